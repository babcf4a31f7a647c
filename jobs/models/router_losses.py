"""Losses of the router that enter the gradient where they arise, and the count of each expert's tokens.

They are not part of the loss that a run reports: nothing has to carry them to the last pipeline stage.
Their gradient is started by an autograd function that passes the layer's output through, once for each
backward pass, however often the forward pass is computed. Makes no communication.

Shapes: B micro-batch, S sequence (this rank's part where it is cut), E experts.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RouterLossScale:
    """What turns sums over one rank's tokens into means over the global batch.

    A gradient is the plain sum over all micro-batches and ranks, in the native engine. An engine that
    divides by the number of micro-batches or ranks afterwards needs that number as `factor`.
    """

    global_batch_size: int
    """Sequences of one step, all micro-batches and ranks."""
    seq_len: int
    """Whole length of each, in tokens."""
    factor: float = 1.0


def balance_loss(shares: torch.Tensor, counts: torch.Tensor, scale: RouterLossScale) -> torch.Tensor:
    """Sum over this rank's tokens of sum_i f_i s'_i / S, over the sequences of the global batch.

    arXiv 2412.19437, eq. 17 to 20: of each sequence, sum over the experts i of f_i P_i, where
    f_i = E / (K S) * (tokens that have i among the K highest scores) and P_i is the mean of s'_i, a token's
    score over the sum of its scores. f_i has no gradient, so the parts of a sequence simply add up.

    Args:
        shares: [B, S, E] s'.
        counts: [B, E] tokens of the whole sequence that have expert i among their highest scores.
        scale: the global batch.
    """
    counts = counts.to(shares.dtype)
    frequencies = counts * (counts.shape[1] / counts.sum(1, keepdim=True))  # [B, E]; the sum is K * S
    mean_shares = shares.sum(1) / scale.seq_len  # [B, E]
    return (frequencies * mean_shares).sum() / scale.global_batch_size


def z_loss(logits: torch.Tensor, scale: RouterLossScale) -> torch.Tensor:
    """Sum over this rank's tokens of logsumexp(logits)^2, over the tokens of the global batch.

    arXiv 2202.08906, eq. 5.

    Args:
        logits: [B, S, E].
        scale: the global batch.
    """
    return logits.logsumexp(-1).square().sum() / (scale.global_batch_size * scale.seq_len)


def attach(
    out: torch.Tensor,
    loss: torch.Tensor | None,
    factor: float,
    counts: torch.Tensor,
    load: torch.Tensor | None,
) -> torch.Tensor:
    """Pass `out` through; its backward pass starts the loss's with `factor` and adds counts to the load.

    Args:
        out: any shape; the layer's output.
        loss: scalar, or None.
        factor: gradient of the loss.
        counts: [E] tokens that went to each expert.
        load: [E], changed in place; None counts nothing.
    """
    passed: torch.Tensor = _Attach.apply(out, loss, factor, counts, load)  # type: ignore[no-untyped-call]
    return passed


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out: torch.Tensor,
        loss: torch.Tensor | None,
        factor: float,
        counts: torch.Tensor,
        load: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.load, ctx.started = load, None if loss is None else torch.full_like(loss, factor)
        ctx.save_for_backward(counts)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Here and not in the forward pass: recomputation runs that twice, evaluation has no backward pass.
        if ctx.load is not None:
            ctx.load.add_(ctx.saved_tensors[0])
        return grad, ctx.started, None, None, None
