"""Many small SwiGLU networks over rows sorted by expert: one product an expert, on contiguous rows.

    tokens [T, D] --spread--> rows sorted by expert [N, D] --grouped products--> [N, D] --collect--> [T, D]

`spread` and `collect` are each other's transpose, so forward and backward both read rows and never add
atomically: results do not depend on a device's scheduling. Knows no router and no mesh axis.

Shapes: T tokens, K experts a token visits, N <= T*K rows, E experts, D d_model, F hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from jobs.models.split_backward import wanted_gradients

ExpertWeights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""gate [F, D], up [F, D], down [D, F] of one expert."""
ExpertsFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[ExpertWeights]], torch.Tensor]
"""(x [T, D], chosen [T, K], weights [T, K], experts held here) -> [T, D]: sum over k of weight * expert(x).

`chosen` holds global numbers of experts; the number of experts itself stands for "dropped"."""


@dataclass(frozen=True)
class RowOrder:
    """Which rows are made of which tokens."""

    token_of: torch.Tensor
    """[N] the token of each row."""
    place_of: torch.Tensor
    """[T, K] the row of each token's k-th choice; N where there is none."""

    @property
    def n_rows(self) -> int:
        """N."""
        return self.token_of.shape[0]


@dataclass(frozen=True)
class SortedChoices:
    """The choices of all tokens, sorted by expert; those of one expert stay in the order of the tokens."""

    order: RowOrder
    choice_of: torch.Tensor
    """[N] the place in [T * K] that each row stands for."""
    counts: torch.Tensor
    """[E] int64: rows of each expert."""


def sort_by_expert(chosen: torch.Tensor, n_experts: int) -> SortedChoices:
    """Sort the choices by expert and leave the dropped ones out.

    Args:
        chosen: [T, K], n_experts where dropped.
        n_experts: of the whole model.
    """
    flat = chosen.flatten()
    counts = torch.bincount(flat, minlength=n_experts + 1)[:n_experts]
    order = flat.argsort(stable=True)
    place_of = torch.empty_like(order)
    place_of[order] = torch.arange(len(order), device=order.device)
    n_rows = int(counts.sum())
    choice_of = order[:n_rows]
    rows = RowOrder(choice_of // chosen.shape[1], place_of.clamp_(max=n_rows).view_as(chosen))
    return SortedChoices(rows, choice_of, counts)


def spread(x: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """[T, D] -> [N, D]: copies each token to its rows."""
    rows: torch.Tensor = _Spread.apply(x, order)  # type: ignore[no-untyped-call]
    return rows


def collect(rows: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """[N, D] -> [T, D]: adds up each token's rows; zero where it has none."""
    out: torch.Tensor = _Collect.apply(rows, order)  # type: ignore[no-untyped-call]
    return out


def grouped_swiglu(rows: torch.Tensor, counts: list[int], experts: Sequence[ExpertWeights]) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) with each row's own expert.

    An expert without a row takes part with an empty product, so that its gradient is zero and not missing.

    Args:
        rows: [N, D], sorted by expert.
        counts: rows of each expert.
        experts: as many.

    Returns:
        [N, D].
    """
    if not experts:
        return rows
    gates, ups, downs = zip(*experts, strict=True)
    hidden = F.silu(_grouped_linear(rows, counts, gates)) * _grouped_linear(rows, counts, ups)  # [N, F]
    return _grouped_linear(hidden, counts, downs)


def local_experts(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Sequence[ExpertWeights]
) -> torch.Tensor:
    """The ExpertsFn of a device that holds all experts."""
    choices = sort_by_expert(chosen, len(experts))
    rows = grouped_swiglu(spread(x, choices.order), choices.counts.tolist(), experts)
    return weigh_and_collect(rows, weights, choices)


def weigh_and_collect(rows: torch.Tensor, weights: torch.Tensor, choices: SortedChoices) -> torch.Tensor:
    """[N, D] -> [T, D]: sum over each token's rows of weight * row.

    Args:
        rows: [N, D], sorted by expert.
        weights: [T, K].
        choices: what the rows stand for.
    """
    weight_of = weights.flatten().index_select(0, choices.choice_of).to(rows.dtype)  # [N]
    return collect(rows * weight_of[:, None], choices.order)


@torch.library.custom_op("jobs::grouped_products", mutates_args=())
def grouped_products(rows: torch.Tensor, weights: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """rows[span of e] @ weight_e^T into one result: no pieces are cut out or joined. Not differentiable.

    An operator of its own, so that recomputation can keep its result as that of any other product.

    Args:
        rows: [N, in], sorted by expert.
        weights: [out, in] each.
        counts: rows of each.

    Returns:
        [N, out].
    """
    out = rows.new_empty(rows.shape[0], weights[0].shape[0])
    for weight, span in zip(weights, _spans(counts), strict=True):
        torch.mm(rows[span], weight.t(), out=out[span])
    return out


def _collect_plain(rows: torch.Tensor, order: RowOrder) -> torch.Tensor:
    if order.n_rows < order.place_of.numel():
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    if order.place_of.shape[1] == 1:
        return rows.index_select(0, order.place_of.flatten())
    return rows.index_select(0, order.place_of.flatten()).view(*order.place_of.shape, -1).sum(1)


def _spans(counts: list[int]) -> Iterator[slice]:
    start = 0
    for count in counts:
        yield slice(start, start + count)
        start += count


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order = order
        return x.index_select(0, order.token_of)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _collect_plain(grad, ctx.order), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order = order
        return _collect_plain(rows, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.order.token_of), None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: list[int], *weights: torch.Tensor) -> torch.Tensor:
        ctx.counts = counts
        ctx.save_for_backward(rows, *weights)
        out: torch.Tensor = grouped_products(rows, list(weights), counts)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        wants_rows, *wants = wanted_gradients(ctx)
        grad = grad.contiguous()
        grad_rows = None
        if wants_rows:
            grad_rows = torch.empty_like(rows)
            for weight, span in zip(weights, _spans(ctx.counts), strict=True):
                torch.mm(grad[span], weight, out=grad_rows[span])
        wanted = zip(wants, _spans(ctx.counts), strict=True)
        grad_weights = [grad[span].t().mm(rows[span]) if is_wanted else None for is_wanted, span in wanted]
        return grad_rows, None, *grad_weights


def _grouped_linear(rows: torch.Tensor, counts: list[int], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = _GroupedLinear.apply(rows, counts, *weights)  # type: ignore[no-untyped-call]
    return out
