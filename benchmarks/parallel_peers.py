"""The parallelism that Packtrain's is measured against, as a careful user would set each of them up.

Most functions make a step, which takes the next batch and returns the loss of the global batch: DTensor's
tensor parallelism, torch's context_parallel, torch's ring around the CPU's kernel, FSDP2 and DeepSpeed ZeRO,
all on PlainLlama. Besides: DeepSpeed's MoE layer and the naive loop over experts.
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hand_loop import build_optimizer
from plain_llama import PlainLlama, PlainMlp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from jobs.comm.collectives import gather, scatter_sum
from jobs.comm.groups import Axis, Groups
from jobs.engines.base import MicroBatch
from jobs.models.attention import AttentionFn
from jobs.models.experts import ExpertsFn, ExpertWeights
from jobs.models.moe import Moe
from jobs.parallel.context import split_batch
from jobs.parallel.zigzag import part_of
from jobs.spec.job import JobSpec

Step = Callable[[], float]
CLIP_NORM = 1.0


def device_mesh(groups: Groups, device: torch.device) -> DeviceMesh:
    """All ranks in one line."""
    return init_device_mesh(device.type, (groups.world_size,))


# ---------------------------------------------------------------------- tensor parallelism


def dtensor_step(
    spec: JobSpec, groups: Groups, device: torch.device, batches: Iterator[MicroBatch], *, sequence: bool
) -> Step:
    """DTensor's plan as torch's documentation has it: vocabulary, heads, feed-forward and loss are cut.

    Without sequence parallelism the inputs are marked once for q, k, v and once for gate, up: DTensor then
    sums their gradients before it exchanges them, once. Without that it would exchange each.
    """
    model = PlainLlama(spec.model, spec.run.seed, device)
    mesh = device_mesh(groups, device)
    between = Shard(1) if sequence else Replicate()
    norm = {"norm": SequenceParallel()} if sequence else {}
    outer: dict[str, Any] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outer | norm)
    whole = PrepareModuleInput(
        input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
    )
    inner: dict[str, Any] = {
        "self_attn": whole,
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        inner |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, inner)
    optimizer = build_optimizer(model)

    def step() -> float:
        batch = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            logits = model(batch.tokens, batch.positions)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
            loss.backward()
        clip(model)
        optimizer.step()
        return float(loss.full_tensor().item())

    return step


# ---------------------------------------------------------------------- context parallelism


def gathering_attention(cp: Axis, seq_len: int, device: torch.device) -> AttentionFn:
    """The version one writes first: gather all keys and values, then one call with a mask."""
    places = torch.arange(seq_len, device=device)
    order = torch.cat([part_of(places, cp.size, rank, 0) for rank in range(cp.size)])
    mask = part_of(places, cp.size, cp.rank, 0)[:, None] >= order  # keys stay in the order of the ranks

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, gather(k, cp, 2), gather(v, cp, 2), attn_mask=mask)

    return attention


def torch_ring_attention(group: dist.ProcessGroup) -> AttentionFn:
    """The ring inside of torch's context_parallel, which has no entry for a CPU, around the CPU's kernel."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out, lse = ring._templated_ring_attention(group, 2, kernel, q, k, v, is_causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return ring._templated_ring_attention_backward(
                group, 2, kernel_backward, grad, "grad_out", *ctx.saved_tensors, is_causal=True, dropout_p=0.0
            )

    return lambda q, k, v, _: Ring.apply(q, k, v)


def ddp_context_step(
    spec: JobSpec, groups: Groups, device: torch.device, batches: Iterator[MicroBatch], attention: AttentionFn
) -> Step:
    """PlainLlama on zig-zag parts with an attention over the ranks; DDP sums the gradients."""
    model = PlainLlama(spec.model, spec.run.seed, device, attention)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model)

    def step() -> float:
        batch = split_batch(next(batches), groups.cp)
        optimizer.zero_grad(set_to_none=True)
        # DDP takes the mean over parts of equal size.
        loss = F.cross_entropy(ddp(batch.tokens, batch.positions).flatten(0, 1), batch.labels.flatten())
        loss.backward()
        return _update(model, optimizer, loss)

    return step


def torch_context_step(
    spec: JobSpec, groups: Groups, device: torch.device, batches: Iterator[MicroBatch]
) -> Step:
    """torch.distributed.tensor.experimental.context_parallel, which cuts the batch itself."""
    model = PlainLlama(spec.model, spec.run.seed, device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model)
    mesh = device_mesh(groups, device)
    backend = SDPBackend.EFFICIENT_ATTENTION if device.type == "cuda" else SDPBackend.MATH

    def step() -> float:
        batch = next(batches)
        tokens, labels, positions = (t.clone() for t in (batch.tokens, batch.labels, batch.positions))
        optimizer.zero_grad(set_to_none=True)
        buffers = [tokens, labels, positions]
        with (
            context_parallel(
                mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
            ),
            sdpa_kernel(backend),
        ):
            loss = F.cross_entropy(ddp(tokens, positions).flatten(0, 1), labels.flatten())
            loss.backward()
        return _update(model, optimizer, loss)

    return step


# ---------------------------------------------------------------------- sharded updates


def fsdp2_step(spec: JobSpec, groups: Groups, device: torch.device, batches: Iterator[MicroBatch]) -> Step:
    """FSDP2 that keeps gathered weights until the backward pass is over: the bytes of ZeRO-1."""
    model = PlainLlama(spec.model, spec.run.seed, device)
    mesh = device_mesh(groups, device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = build_optimizer(model)

    def step() -> float:
        batch = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(batch.tokens, batch.positions).flatten(0, 1), batch.labels.flatten())
        loss.backward()
        return _update(model, optimizer, loss)

    return step


def deepspeed_zero_step(
    spec: JobSpec, groups: Groups, device: torch.device, batches: Iterator[MicroBatch]
) -> Step:
    """deepspeed.initialize on PlainLlama with the configuration of a run of this spec."""
    from jobs.engines.deepspeed_start import GroupBook, initialize, quiet_start
    from jobs.engines.deepspeed_zero import zero_config

    model = PlainLlama(spec.model, spec.run.seed, device)
    with quiet_start(GroupBook(groups, 300.0), device):
        engine = initialize(model, build_optimizer(model), zero_config(spec), device)

    def step() -> float:
        batch = next(batches)
        logits = engine(batch.tokens, batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        engine.backward(loss)
        engine.step()
        float(engine.get_global_grad_norm())
        return _mean(loss)

    return step


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    clip(model)
    optimizer.step()
    return _mean(loss)


def clip(model: nn.Module) -> float:
    """Norm of all gradients, which are clipped. As clip_grad_norm_, which takes no mixture of kinds."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    kinds = [kind for kind in _by_kind(parameters) if kind]
    norms = [nn.utils.get_total_norm([p.grad for p in kind]) for kind in kinds]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.stack(whole).norm() if len(whole) > 1 else whole[0]
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, CLIP_NORM, norm)
    return norm.item()


def _by_kind(parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    cut = [p for p in parameters if isinstance(p, DTensor)]
    return cut, [p for p in parameters if not isinstance(p, DTensor)]


def _mean(loss: torch.Tensor) -> float:
    logged = loss.detach().clone()
    dist.all_reduce(logged)
    return logged.item() / dist.get_world_size()


# ---------------------------------------------------------------------- experts


def looping_experts(ep: Axis, held: range) -> ExpertsFn:
    """The version one writes first: every rank gathers all tokens and picks those of each of its experts."""

    def experts(
        x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, matrices: Sequence[ExpertWeights]
    ) -> torch.Tensor:
        x, chosen, weights = gather(x, ep, 0), _gathered_ids(chosen, ep), gather(weights, ep, 0)
        out = torch.zeros_like(x)
        for expert, (gate, up, down) in zip(held, matrices, strict=True):
            token, choice = torch.where(chosen == expert)
            rows = F.linear(F.silu(F.linear(x[token], gate)) * F.linear(x[token], up), down)
            out = out.index_add(0, token, rows * weights[token, choice, None])
        return scatter_sum(out, ep, 0)

    return experts


def deepspeed_moe(ours: Moe, n_experts: int, d_model: int, ep: Axis) -> nn.Module:
    """DeepSpeed's MoE layer without dropped tokens, with the weights of `ours`."""
    from jobs.engines.deepspeed_import import import_deepspeed

    deepspeed = import_deepspeed()
    from deepspeed.moe.layer import MoE

    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False)
        layer = MoE(
            d_model,
            PlainMlp(d_model, ours.moe.d_ff),
            num_experts=n_experts,
            ep_size=ep.size,
            k=ours.moe.top_k,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        layer.set_deepspeed_parallelism()
    layer.to(ours.gate.weight.device)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(ours.gate.weight)
        copies = layer.deepspeed_moe.experts.deepspeed_experts
        for copy, expert in zip(copies, ours.experts.values(), strict=True):
            copy.load_state_dict(expert.state_dict())
    return layer


def _gathered_ids(chosen: torch.Tensor, ep: Axis) -> torch.Tensor:
    pieces = [torch.empty_like(chosen) for _ in range(ep.size)]
    dist.all_gather(pieces, chosen.contiguous(), group=ep.group)
    return torch.cat(pieces)
