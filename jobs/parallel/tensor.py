"""Tensor and sequence parallelism (arXiv 1909.08053, 2205.05198): operations on a tp rank's pieces.

               without sequence parallelism      with it: hidden states are [B, S/tp, D]
               forward           backward        forward             backward
    columns    -                 dX all-reduced  X all-gathered      X all-gathered, dX reduce-scattered
    row        Y all-reduced     -               Y reduce-scattered  dY all-gathered
    embed      the same as row                   the same as row
    loss       two small all-reduces: the rows' maxima; the rows' sums of exponentials and target logits

The naive column-parallel product sums dX once a weight and then waits for each. Here projections that share
an input are one autograd function: the gradients of q, k and v add up first, and one sum is sent while this
rank multiplies the weights' gradients. Overlapped:

    dX's all-reduce or reduce-scatter   with the products that give dW
    X's second all-gather               with the products that give dX (only the local part of X is kept)

Not overlapped, because what follows needs the result: the forward all-gather, row's sums, the loss'.

Which piece of which parameter a rank holds is jobs/parallel/placement.py's business; gradients of norms and
routers are summed by the engine, or by `sum_replicated_gradients`.

Shapes: B micro-batch, S sequence (this rank's context-parallel part of it), D d_model, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from jobs.comm.collectives import (
    enter,
    gather_plain,
    leave_in_place,
    max_in_place,
    scatter_sum,
    start_gather,
    start_scatter_sum,
    start_sum_in_place,
    sum_in_place,
)
from jobs.comm.groups import Axis
from jobs.models.losses import IGNORED_LABEL
from jobs.models.operations import Operations
from jobs.models.split_backward import wanted_gradients

SEQUENCE = 1
"""The dimension that sequence parallelism cuts."""
BLOCK_ELEMENTS = 1 << 24
"""Logits that the loss holds in its own, wider type at a time (64 MiB in fp32)."""
CPU_BLOCK_ELEMENTS = 1 << 17
"""The same on a CPU: half a MiB in fp32 stays in a core's cache from one elementwise pass to the next."""


def tensor_operations(base: Operations, tp: Axis, sequence_parallel: bool) -> Operations:
    """Operations on weights that are cut over tp as jobs.parallel.placement says.

    The hidden states that go from one operation to the next are whole without sequence parallelism, and cut
    along S in tp order with it; logits are [B, S, V/tp], and tokens and labels whole, either way.

    Args:
        base: what the other axes do; its columns, row, embed and loss are replaced.
        tp: this rank's tensor-parallel line.
        sequence_parallel: cut the sequence between the products. S must divide by tp.
    """
    if tp.size == 1:
        return base
    vocabulary = _Vocabulary(tp)

    def columns(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(_Columns.apply(tp, sequence_parallel, x, *weights))  # type: ignore[no-untyped-call]

    def sum_out(x: torch.Tensor) -> torch.Tensor:
        return scatter_sum(x, tp, SEQUENCE) if sequence_parallel else leave_in_place(x, tp)

    def row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return sum_out(F.linear(x, weight))

    def embed(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        local, elsewhere = vocabulary.local(tokens, weight.shape[0])
        return sum_out(F.embedding(local, weight).masked_fill_(elsewhere[..., None], 0))

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        local, elsewhere = vocabulary.local(labels.flatten(), logits.shape[-1])
        out: torch.Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]
            tp, logits.flatten(0, -2), local, elsewhere, labels.flatten() != IGNORED_LABEL
        )
        return out

    return replace(base, columns=columns, row=row, embed=embed, loss=loss)


def sum_replicated_gradients(operations: Operations, tp: Axis) -> Operations:
    """With sequence parallelism: sum the gradients of norms and routers over tp in the backward pass itself.

    For engines that do not sum them over the line of their placement (data_tp), such as DeepSpeed. One small
    all-reduce a weight and micro-batch, where the native engine sums them once a step in its buckets.

    Args:
        operations: of a layout with sequence parallelism.
        tp: this rank's tensor-parallel line.
    """
    return replace(operations, replicated=lambda weight: enter(operations.replicated(weight), tp))


class _Columns(torch.autograd.Function):
    """Y_i = X W_i^T for the pieces W_i of several weights."""

    @staticmethod
    def forward(
        ctx: Any, tp: Axis, sequence_parallel: bool, x: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        ctx.save_for_backward(x, *weights)
        whole = gather_plain(x, tp, SEQUENCE) if sequence_parallel else x
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wants_x, *wants = wanted_gradients(ctx)
        tp: Axis = ctx.tp
        # [B, S, out_i] -> [B*S, out_i]
        flat = [None if grad is None else grad.flatten(0, -2) for grad in grads]
        gathering = start_gather(x, tp, SEQUENCE) if ctx.sequence_parallel and any(wants) else None
        reducing = None
        if wants_x:
            d_x = _sum_of_products(flat, weights).view(x.shape[0], -1, x.shape[2])  # [B, S, in]
            if ctx.sequence_parallel:
                reducing = start_scatter_sum(d_x, tp, SEQUENCE)
            else:
                reducing = start_sum_in_place(d_x, tp)
        d_weights: list[torch.Tensor | None] = [None] * len(weights)
        if any(wants):
            whole = (x if gathering is None else gathering.wait()).flatten(0, -2)  # [B*S, in]
            for i, grad in enumerate(flat):
                if wants[i] and grad is not None:
                    d_weights[i] = grad.t() @ whole
        return None, None, None if reducing is None else reducing.wait(), *d_weights


def _sum_of_products(grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of grad_i @ weight_i: [B*S, in]. A product that no gradient came to adds nothing."""
    total: torch.Tensor | None = None
    for grad, weight in zip(grads, weights, strict=True):
        if grad is not None:
            total = grad @ weight if total is None else total.addmm_(grad, weight)
    assert total is not None, "autograd calls a backward method only with a gradient"
    return total


class _Vocabulary:
    """Which rows of the vocabulary this rank holds. Learns from the ranks' sizes where its own begin."""

    def __init__(self, tp: Axis) -> None:
        self._tp = tp
        self._start: int | None = None

    def local(self, ids: torch.Tensor, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of this rank's piece for global ids, and which ids another rank holds (their row is 0).

        Ids outside of the whole vocabulary stay outside of a piece, so that looking them up fails as it does
        on one device. Collective over tp the first time.
        """
        if self._start is None:
            # Every piece but the last few is as long as the first (jobs.parallel.placement.chunk).
            longest = max_in_place(torch.tensor([n_rows], device=ids.device), self._tp)
            self._start = int(longest.item()) * self._tp.rank
        local = ids - self._start
        elsewhere = torch.zeros_like(local, dtype=torch.bool)
        if self._tp.rank > 0:
            elsewhere |= local < 0
        if self._tp.rank < self._tp.size - 1:
            elsewhere |= local >= n_rows
        return local.masked_fill_(elsewhere, 0), elsewhere


class _CrossEntropySum(torch.autograd.Function):
    """Sum of logsumexp(row) - target logit over the rows with a label; each row is cut over tp.

    Keeps the logits, which are there anyway, and a few numbers a row; the softmax is taken again in backward,
    in the gradient's memory where types allow. Wider copies of the logits are BLOCK_ELEMENTS at most. The
    largest logit is taken off the target as well and never added back: beside a large one, fp32 would lose
    the digits of the loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tp: Axis,
        logits: torch.Tensor,
        local: torch.Tensor,
        elsewhere: torch.Tensor,
        is_valid: torch.Tensor,
    ) -> torch.Tensor:
        """Of logits [N, V/tp]; the rest is [N]: the label's column here, or elsewhere, or there is none."""
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        elsewhere = elsewhere | ~is_valid
        local = local.masked_fill(elsewhere, 0)
        largest = max_in_place(logits.amax(1).to(wide), tp)  # [N]
        sums = torch.empty((2, len(local)), dtype=wide, device=logits.device)
        for rows in _blocks(logits):
            shifted = logits[rows] - largest[rows, None]  # in the wider type of the two
            torch.sum(shifted.exp_(), 1, out=sums[0, rows])
        target = logits.gather(1, local[:, None])[:, 0].to(wide)
        sums[1] = (target - largest).masked_fill_(elsewhere, 0)
        sum_in_place(sums, tp)
        ctx.save_for_backward(logits, local, elsewhere, is_valid, largest, sums[0])
        return (sums[0].log() - sums[1]).masked_fill_(~is_valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """(softmax - one-hot) * grad, in the logits' type."""
        logits, local, elsewhere, is_valid, largest, exp_sum = ctx.saved_tensors
        scale = is_valid * grad  # [N]
        at_label = -scale.masked_fill(elsewhere, 0)
        d_logits = torch.empty_like(logits)
        is_wide = logits.dtype == largest.dtype
        for rows in _blocks(logits):
            into = d_logits[rows] if is_wide else None
            block = torch.sub(logits[rows], largest[rows, None], out=into).exp_()
            block.mul_((scale[rows] / exp_sum[rows])[:, None])
            block.scatter_add_(1, local[rows, None], at_label[rows, None])
            if not is_wide:
                d_logits[rows] = block
        return None, d_logits, None, None, None


def _blocks(logits: torch.Tensor) -> list[slice]:
    """Runs of rows, of about BLOCK_ELEMENTS elements each."""
    n_elements = CPU_BLOCK_ELEMENTS if logits.device.type == "cpu" else BLOCK_ELEMENTS
    n_rows = max(1, n_elements // logits.shape[1])
    return [slice(first, first + n_rows) for first in range(0, len(logits), n_rows)]
