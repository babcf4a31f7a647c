"""One process and plain torch: the numbers that every layout must give. Knows no engine, no group, no mesh.

All of it is in fp64, whatever the layout trains in, so that what differs is the layout's rounding alone.
"""

from dataclasses import dataclass

import torch

from jobs.models.init import build_llama
from jobs.models.llama import Llama
from jobs.models.losses import cross_entropy_sum
from jobs.models.moe import Router
from jobs.models.operations import Operations
from jobs.models.router_losses import RouterLossScale
from jobs.optim.schedule import lr_at
from jobs.parity.batches import global_batch, n_valid_tokens
from jobs.parity.phases import gradient_phase, losses_phase, sgd_phase
from jobs.spec.job import JobSpec
from jobs.spec.optim import OptimSpec


@dataclass(frozen=True)
class Numbers:
    """What one process gives; tensors by logical name, whole, fp64."""

    loss: float
    """Of the first step."""
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    after_adamw: dict[str, torch.Tensor]
    """Weights after one step of AdamW without clipping."""
    after_sgd: dict[str, torch.Tensor]
    """Weights after one clipped step of SGD."""
    losses: list[float]
    """Before each of the steps of AdamW with clipping."""


def reference(spec: JobSpec, n_steps: int) -> Numbers:
    """Train the three phases in this process.

    Args:
        spec: the run; its strategy is not looked at.
        n_steps: steps of the phase that gives `losses`.
    """
    first = _Loop(gradient_phase(spec))
    loss, norm = first.step(0)
    gradients = first.gradients()
    sgd = _Loop(sgd_phase(spec))
    sgd.step(0)
    longer = _Loop(losses_phase(spec))
    losses = [longer.step(step)[0] for step in range(n_steps)]
    return Numbers(loss, norm, gradients, first.weights(), sgd.weights(), losses)


class _Loop:
    """A model and its optimizer; each step takes the whole global batch at once."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        operations = Operations(
            router_losses=RouterLossScale(spec.train.global_batch_size, spec.data.seq_len)
        )
        self._model: Llama = build_llama(
            spec.model, spec.run.seed, torch.device("cpu"), torch.float64, operations
        )
        self._optimizer = plain_optimizer(self._model, spec.optim)

    def step(self, step: int) -> tuple[float, float]:
        """Loss before the step and norm of the gradient before clipping."""
        batch = global_batch(self._spec, step)
        logits = self._model(batch.tokens, batch.positions, batch.document_ids)
        loss = cross_entropy_sum(logits, batch.labels) / n_valid_tokens(batch)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        limit = self._spec.optim.grad_clip_norm
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), float("inf") if limit is None else limit
        )
        for group in self._optimizer.param_groups:
            group["lr"] = lr_at(self._spec.optim, self._spec.train.steps, step)
        self._optimizer.step()
        self._move_router_biases()
        return loss.item(), norm.item()

    @torch.no_grad()
    def _move_router_biases(self) -> None:
        """Each expert's selection bias moves one rate against its load (arXiv 2408.15664)."""
        for router in self._model.modules():
            if isinstance(router, Router) and router.has_bias:
                load = router.load.double()
                moe = self._spec.model.moe
                assert moe is not None
                router.e_score_correction_bias += moe.bias_update_rate * (load.mean() - load).sign()
                router.load.zero_()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the last step; zero where a parameter took no part (an expert that no token visited)."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self._model.named_parameters()
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """And the routers' selection biases, which are no parameters but move with them."""
        named: dict[str, torch.Tensor] = dict(self._model.named_parameters())
        for path, module in self._model.named_modules():
            if isinstance(module, Router) and module.has_bias:
                named[f"{path}.e_score_correction_bias"] = module.e_score_correction_bias
        return {name: tensor.detach().double().clone() for name, tensor in named.items()}


def plain_optimizer(model: torch.nn.Module, optim: OptimSpec) -> torch.optim.Optimizer:
    """Torch's optimizer as a hand-written loop has it: matrices are decayed, vectors are not."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, foreach=False)
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, foreach=False)
