"""The deepspeed_zero engine: one optimizer step under DeepSpeed ZeRO (arXiv 1910.02054), stages 0 to 3.

    forward and backward of each micro-batch; DeepSpeed reduces gradients, stages 2 and 3 during the backward
    norm -> clip -> AdamW on this rank's share -> all-gather of the new weights (stage 3: before each use)

DeepSpeed gets a plain torch optimizer and no schedule, so nothing is compiled at run time and the learning
rate is ours. What the state looks like inside is deepspeed_state.py's business. DeepSpeed wants LOCAL_RANK in
the environment, as torchrun sets it; the device is the one handed in all the same.
"""

import logging
import math
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from jobs.comm.groups import Groups
from jobs.engines.base import MicroBatch, StepResult
from jobs.engines.deepspeed_import import import_deepspeed
from jobs.engines.deepspeed_state import (
    Fragment,
    create_moments,
    find_fragments,
    fragment_chunks,
    publish_masters,
    replicated_fragments,
    set_step_counters,
)
from jobs.models.init import build_llama
from jobs.models.losses import IGNORED_LABEL, cross_entropy_sum
from jobs.optim.grad_norm import clip_factor, squared_norm
from jobs.optim.param_groups import is_decayed
from jobs.spec.job import JobSpec
from jobs.spec.optim import OptimSpec
from jobs.spec.strategy import DeepspeedZeroStrategy
from jobs.state import Chunk

deepspeed = import_deepspeed()

DEEPSPEED_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default of reduce_bucket_size."""


class DeepspeedZeroEngine:
    """Engine of strategy.kind=deepspeed_zero. All methods but `chunks` are collective over all ranks."""

    def __init__(self, spec: JobSpec, groups: Groups, device: torch.device) -> None:
        """Build the whole model on the host and hand it to DeepSpeed, which keeps this rank's share.

        Peak memory: the whole model once in fp32 on the host, and once in the training precision on the
        device (stage 3 then frees all but its share).

        Raises:
            TypeError: spec.strategy is of another kind.
        """
        if not isinstance(spec.strategy, DeepspeedZeroStrategy):
            raise TypeError(f"strategy.kind={spec.strategy.kind} is not for this engine")
        self._groups = groups
        self._device = device
        self._stage = spec.strategy.stage
        self._clip_norm = spec.optim.grad_clip_norm
        self._n_updates = torch.zeros(1, dtype=torch.int64)
        model = build_llama(spec.model, spec.run.seed, torch.device("cpu"))
        parameters = dict(model.named_parameters())
        start = {name: parameter.detach() for name, parameter in parameters.items()}
        self._optimizer = _build_optimizer(model, spec.optim)
        self._engine = _initialize(model, self._optimizer, zero_config(spec), device)
        self._fragments = self._find_fragments(parameters)
        create_moments(self._optimizer, [fragment.holder for fragment in self._fragments])
        if spec.train.precision == "bf16":
            _refine_masters(self._fragments, start)

    @property
    def model(self) -> torch.nn.Module:
        """The module that DeepSpeed trains; its parameters are empty between steps at stage 3."""
        module: torch.nn.Module = self._engine.module
        return module

    def train_step(self, batches: list[MicroBatch], n_valid_tokens: int, lr: float) -> StepResult:
        """As in Engine."""
        self._set_lr(lr)
        # DeepSpeed averages gradients over dp; the factor turns its mean into the mean over valid tokens.
        scale = self._groups.dp.size / max(1, n_valid_tokens)
        loss_sum = torch.zeros((), device=self._device)
        for index, batch in enumerate(batches):
            self._engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            loss = self._loss_sum(batch) * scale
            self._engine.backward(loss, scale_wrt_gas=False)
            loss_sum += loss.detach()
        reduction = dist.all_reduce(loss_sum, group=self._groups.dp.group, async_op=True)
        grad_norm, skipped = self._update_plain() if self._stage == 0 else self._update_sharded()
        assert reduction is not None
        reduction.wait()
        self._n_updates += not skipped
        return StepResult(loss_sum.item() / self._groups.dp.size, grad_norm, skipped)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> tuple[float, int]:
        """As in Engine."""
        n_valid = (batch.labels != IGNORED_LABEL).sum()
        figures = torch.stack((self._loss_sum(batch).double(), n_valid.to(self._device).double()))
        dist.all_reduce(figures, group=self._groups.dp.group)
        loss_sum, n_tokens = figures.tolist()
        return float(loss_sum), int(n_tokens)

    def chunks(self) -> list[Chunk]:
        """As in Engine."""
        found = fragment_chunks(self._fragments, self._optimizer)
        if isinstance(self._optimizer, torch.optim.AdamW):
            is_writer = self._groups.dp.rank == 0
            found.append(Chunk("optim/step", (1,), (0,), self._n_updates, is_writer))
        return found

    def after_load(self, lr: float) -> None:
        """As in Engine."""
        set_step_counters(self._optimizer, int(self._n_updates))
        self._set_lr(lr)
        if self._stage > 0:
            publish_masters(self._engine.optimizer)

    def _loss_sum(self, batch: MicroBatch) -> torch.Tensor:
        ids = batch.document_ids
        logits = self._engine(
            batch.tokens.to(self._device, non_blocking=True),
            batch.positions.to(self._device, non_blocking=True),
            None if ids is None else ids.to(self._device, non_blocking=True),
        )
        return cross_entropy_sum(logits, batch.labels.to(self._device, non_blocking=True))

    def _set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def _find_fragments(self, parameters: dict[str, torch.nn.Parameter]) -> list[Fragment]:
        if self._stage == 0:
            return replicated_fragments(parameters, self._groups.dp.rank, self._groups.dp.size)
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        return find_fragments(self._engine.optimizer, names)

    def _update_sharded(self) -> tuple[float, bool]:
        """Stages 1 to 3: DeepSpeed clips and steps, or drops the step when its norm is not finite."""
        self._engine.step()
        return float(self._engine.get_global_grad_norm()), bool(self._engine.optimizer.overflow)

    def _update_plain(self) -> tuple[float, bool]:
        """Stage 0: DeepSpeed only reduced. Every rank sees the same gradients, so all decide alike."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        grad_norm = math.sqrt(sum(squared_norm(gradient.view(-1)) for gradient in gradients))
        if not math.isfinite(grad_norm):
            self._engine.zero_grad()
            return grad_norm, True
        factor = clip_factor(grad_norm, self._clip_norm)
        if factor < 1.0:
            torch._foreach_mul_(gradients, factor)
        self._engine.step()
        return grad_norm, False


def zero_config(spec: JobSpec) -> dict[str, Any]:
    """What deepspeed.initialize is given for a run of kind deepspeed_zero. Pure.

    The batch numbers are all given, so DeepSpeed itself checks their product against the true world size.
    """
    strategy = spec.strategy
    assert isinstance(strategy, DeepspeedZeroStrategy)
    # A larger bucket than the model only reserves memory.
    bucket = min(DEEPSPEED_BUCKET_ELEMENTS, spec.model.n_params)
    config: dict[str, Any] = {
        "train_batch_size": spec.train.global_batch_size,
        "train_micro_batch_size_per_gpu": spec.train.micro_batch_size,
        "gradient_accumulation_steps": spec.grad_accum_steps,
        # At stage 0 DeepSpeed would compute a norm and not tell it: the engine clips.
        "gradient_clipping": (spec.optim.grad_clip_norm or 0.0) if strategy.stage else 0.0,
        "zero_optimization": {"reduce_bucket_size": bucket, **strategy.zero_options, "stage": strategy.stage},
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
    }
    if spec.train.precision == "bf16":
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _build_optimizer(model: torch.nn.Module, spec: OptimSpec) -> torch.optim.Optimizer:
    """A torch optimizer over the module's parameters, in two groups: decayed and not."""
    decayed = [parameter for parameter in model.parameters() if is_decayed(tuple(parameter.shape))]
    others = [parameter for parameter in model.parameters() if not is_decayed(tuple(parameter.shape))]
    param_groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": spec.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if spec.kind == "sgd":
        return torch.optim.SGD(param_groups, lr=spec.lr, fused=True)
    betas = (spec.beta1, spec.beta2)
    return torch.optim.AdamW(param_groups, lr=spec.lr, betas=betas, eps=spec.eps, fused=True)


def _initialize(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], device: torch.device
) -> Any:
    """deepspeed.initialize without its compilers and its prints. Collective."""
    # Its table of usable compiled ops. Left alone, it is filled by running compilers, and an op found usable
    # is built at run time; a build that is killed leaves a lock that hangs every later rank.
    deepspeed.ops.__compatible_ops__ = {}
    # The bf16 stage 1 optimizer prints memory readings through this, each after a full garbage collection.
    deepspeed.runtime.bf16_optimizer.see_memory_usage = _say_nothing
    warnings.filterwarnings(
        "ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    if device.type == "cpu":
        # Stage 3 asks at every gradient reduction, and is answered by a program that lists NUMA nodes.
        deepspeed.get_accelerator().device_count = _one_device
    level = deepspeed.utils.logger.level
    deepspeed.utils.logger.setLevel(logging.ERROR)
    place = SimpleNamespace(device_rank=device.index or 0)
    engine, zero_optimizer, _, _ = deepspeed.initialize(place, model, optimizer, config=config)
    deepspeed.utils.logger.setLevel(level)
    if type(zero_optimizer).__name__ == "DeepSpeedZeroOptimizer":
        # Drop a step whose gradient is not finite in bf16 too: by the norm that step() computes anyway, and
        # not by another pass over the gradients.
        zero_optimizer.check_grad_overflow = True
        zero_optimizer.check_overflow = _say_nothing
    return engine


def _one_device() -> int:
    return 1


def _say_nothing(*_: object, **__: object) -> None:
    """Stands in for a DeepSpeed function that only reports."""


@torch.no_grad()
def _refine_masters(fragments: list[Fragment], start: dict[str, torch.Tensor]) -> None:
    """Give bf16 training the fp32 start weights as masters; DeepSpeed's were rounded to bf16 before."""
    for fragment in fragments:
        whole = start[fragment.name].view(-1)
        fragment.of(fragment.holder).copy_(whole[fragment.start : fragment.start + fragment.n_elements])
