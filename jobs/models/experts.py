"""Many small SwiGLU networks over rows sorted by expert: one expert after another, on contiguous rows.

    tokens [T, D] --spread--> rows sorted by expert [N, D] --SwiGLU of each--> [N, D] --collect--> [T, D]

`spread` and `collect` are each other's transpose, so forward and backward both read rows and never add
atomically: results do not depend on a device's scheduling. What is elementwise in an expert is done between
its products, while they are in a core's cache. Knows no router and no mesh axis.

Shapes: T tokens, K experts a token visits, N <= T*K rows, E experts, D d_model, F hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

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
    out: torch.Tensor = _GroupedSwiglu.apply(rows, counts, *chain(*experts))  # type: ignore[no-untyped-call]
    return out


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
    out: torch.Tensor = _WeighAndCollect.apply(rows, weights, choices)  # type: ignore[no-untyped-call]
    return out


@torch.library.custom_op("jobs::grouped_swiglu_products", mutates_args=())
def grouped_swiglu_products(
    rows: torch.Tensor,
    gates: list[torch.Tensor],
    ups: list[torch.Tensor],
    downs: list[torch.Tensor],
    counts: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three products of each expert, into one result each. Not differentiable.

    An operator of its own, so that recomputation can keep its results as those of any other product. What
    lies between the products is not among them: backward makes it again, expert by expert.

    Args:
        rows: [N, D], sorted by expert.
        gates: [F, D] each.
        ups: [F, D] each.
        downs: [D, F] each.
        counts: rows of each.

    Returns:
        down(silu(gate(x)) * up(x)) [N, D], gate(x) [N, F], up(x) [N, F].
    """
    gated = rows.new_empty(len(rows), len(gates[0]))
    raised, out = torch.empty_like(gated), torch.empty_like(rows)
    memory = gated.new_empty(max(counts), gated.shape[1])
    for gate, up, down, span in zip(gates, ups, downs, _spans(counts), strict=True):
        torch.mm(rows[span], gate.t(), out=gated[span])
        torch.mm(rows[span], up.t(), out=raised[span])
        hidden = memory[: span.stop - span.start]
        torch.ops.aten.silu.out(gated[span], out=hidden).mul_(raised[span])
        torch.mm(hidden, down.t(), out=out[span])
    return out, gated, raised


def _collect_plain(rows: torch.Tensor, order: RowOrder, weights: torch.Tensor | None = None) -> torch.Tensor:
    if order.n_rows < order.place_of.numel():
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    if order.place_of.shape[1] == 1 and weights is None:
        return rows.index_select(0, order.place_of.flatten())
    # Reads each row once and writes sums only, where a selection would write all rows first.
    return F.embedding_bag(order.place_of, rows, mode="sum", per_sample_weights=weights)


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


class _WeighAndCollect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, choices: SortedChoices) -> torch.Tensor:
        ctx.choices = choices
        ctx.save_for_backward(rows, weights)
        return _collect_plain(rows, choices.order, weights.to(rows.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weights = ctx.saved_tensors
        choice_of = ctx.choices.choice_of
        grad_rows = grad.index_select(0, ctx.choices.order.token_of)  # [N, D], not weighed yet
        products = torch.bmm(grad_rows[:, None], rows[:, :, None]).flatten()  # [N]
        grad_weights = torch.zeros_like(weights).flatten()
        grad_weights[choice_of] = products.to(weights.dtype)
        weight_of = weights.flatten().index_select(0, choice_of).to(rows.dtype)
        return grad_rows.mul_(weight_of[:, None]), grad_weights.view_as(weights), None


class _GroupedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: list[int], *weights: torch.Tensor) -> torch.Tensor:
        """`weights`: gate, up and down of the first expert, then of the next."""
        matrices = [list(weights[i::3]) for i in range(3)]
        out, gated, raised = grouped_swiglu_products(rows, *matrices, counts)
        ctx.counts = counts
        ctx.save_for_backward(rows, gated, raised, *weights)
        return cast(torch.Tensor, out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, gated, raised, *weights = ctx.saved_tensors
        wants_rows, *wants = wanted_gradients(ctx)
        grad = grad.contiguous()
        grad_rows = torch.empty_like(rows) if wants_rows else None
        grad_weights: list[torch.Tensor | None] = [None] * len(weights)
        # Shared by the experts, so that it stays in the cache and no page of it is asked for twice.
        memory = gated.new_empty(3, max(ctx.counts), gated.shape[1])
        for first, span in zip(range(0, len(weights), 3), _spans(ctx.counts), strict=True):
            gate, up, down = weights[first : first + 3]
            wants_gate, wants_up, wants_down = wants[first : first + 3]
            silu, hidden, grad_hidden = memory[:, : span.stop - span.start]
            torch.ops.aten.silu.out(gated[span], out=silu)
            if wants_down:
                torch.mul(silu, raised[span], out=hidden)
                grad_weights[first + 2] = grad[span].t().mm(hidden)
            if not (wants_rows or wants_gate or wants_up):
                continue
            torch.mm(grad[span], down, out=grad_hidden)
            grad_raised = silu.mul_(grad_hidden)
            grad_hidden.mul_(raised[span])
            grad_gated = torch.ops.aten.silu_backward.grad_input(
                grad_hidden, gated[span], grad_input=grad_hidden
            )
            if wants_gate:
                grad_weights[first] = grad_gated.t().mm(rows[span])
            if wants_up:
                grad_weights[first + 1] = grad_raised.t().mm(rows[span])
            if grad_rows is not None:
                torch.mm(grad_gated, gate, out=grad_rows[span]).addmm_(grad_raised, up)
        return grad_rows, None, *grad_weights
