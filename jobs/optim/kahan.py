"""AdamW and SGD on pure bf16 weights with Kahan's compensated summation (arXiv 2010.06192, section 3).

An update is often smaller than half of the distance between two neighbouring bf16 numbers, and plain rounding
then loses all of it. Kahan keeps what was lost, in bf16, and adds it to the next update:

    y = update + lost;   new = bf16(weight + y);   lost = bf16(y - (new - weight))

Bytes a parameter: weight 2, lost 2, gradient 2, first moment 2 (bf16), second moment 4 (fp32) = 12. The
second moment moves by 1 - beta2 of itself, which bf16 cannot show. All sums are taken in fp32, portion by
portion, so that no fp32 copy of the parameters ever exists. Knows no buckets and no ranks.
"""

from dataclasses import dataclass

import torch

from jobs.spec.optim import OptimSpec

PORTION = 1 << 20
"""Elements that are widened at a time."""


@dataclass(frozen=True)
class KahanRun:
    """A run of memory, all of it decayed or none; each is [n]."""

    weight: torch.Tensor
    gradient: torch.Tensor
    lost: torch.Tensor
    exp_avg: torch.Tensor | None
    """None for SGD."""
    exp_avg_sq: torch.Tensor | None
    weight_decay: float


@torch.no_grad()
def update(run: KahanRun, optim: OptimSpec, lr: float, step: int, factor: float) -> None:
    """One step, in place: AdamW as torch's (arXiv 1711.05101), or SGD where there are no moments.

    Args:
        run: what is moved.
        optim: betas and eps.
        lr: learning rate.
        step: number of this update, 1 for the first.
        factor: the gradient is multiplied with it (clipping).
    """
    n = run.weight.numel()
    for part in (slice(at, min(n, at + PORTION)) for at in range(0, n, PORTION)):
        weight = run.weight[part].float()
        gradient = run.gradient[part].float().mul_(factor)
        if run.exp_avg is None or run.exp_avg_sq is None:
            change = gradient.add_(weight, alpha=run.weight_decay).mul_(-lr)
        else:
            mean = run.exp_avg[part].float().lerp_(gradient, 1 - optim.beta1)
            run.exp_avg[part].copy_(mean)
            square = run.exp_avg_sq[part]
            square.mul_(optim.beta2).addcmul_(gradient, gradient, value=1 - optim.beta2)
            spread = (square / (1 - optim.beta2**step)).sqrt_().add_(optim.eps)
            change = mean.div_(spread).mul_(-lr / (1 - optim.beta1**step))
            change.add_(weight, alpha=-lr * run.weight_decay)
        change.add_(run.lost[part])
        run.weight[part].copy_(weight + change)
        run.lost[part].copy_(change.sub_(run.weight[part].float() - weight))
