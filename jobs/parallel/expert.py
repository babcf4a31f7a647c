"""Expert parallelism: every rank of the ep axis has other experts, and tokens travel to theirs and back.

One MoE layer, on two ranks with four experts (each letter is a row, sorted by its expert's number):

    rank 0  tokens -> rows  a0 a1 a2 a3          exchange          a0 b0 a1 b1  experts 0 1
    rank 1  tokens -> rows  b0 b1 b2 b3   (rows by counts)  ->     a2 b2 a3 b3  experts 2 3
                                          exchange back  <-  SwiGLU of each, one product an expert
    each rank: sum over a token's rows of weight * row

The counts go first (one small all-gather), so splits may be uneven or zero. With expert tensor parallelism
the etp ranks, which have parts of the same matrices and each received other rows, gather one another's rows,
and the partial results are summed and scattered:

    arrived [M, D] -all-gather over etp-> [etp * max M, D] -experts' parts-> -reduce-scatter over etp-> [M, D]

A layer sends 2 K T (ep - 1)/ep D values a rank in the forward pass and as many in the backward pass (even
routing, T tokens on the rank), whatever the number of experts. Every rank enters every exchange, however the
router decides: what depends on the routing is only how many rows an exchange has.

All tokens of a stage's ranks differ (tensor parallelism is with sequence parallelism), so gradients of
experts are plain sums over their copies: see placement.py. Does not decide who holds which expert.

Shapes: T tokens of this rank, K experts a token visits, E experts, D d_model, B micro-batch, S sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from jobs.comm.collectives import exchange, gather, gather_plain, scatter_sum, sum_in_place
from jobs.comm.groups import Axis, Groups
from jobs.models.experts import (
    ExpertsFn,
    ExpertWeights,
    RowOrder,
    collect,
    grouped_swiglu,
    local_experts,
    sort_by_expert,
    spread,
    weigh_and_collect,
)
from jobs.models.moe import Router
from jobs.models.operations import Operations, Sequences
from jobs.models.router_losses import RouterLossScale
from jobs.parallel.placement import chunk
from jobs.parallel.zigzag import in_true_order, part_of
from jobs.spec.job import JobSpec


def expert_operations(
    base: Operations, spec: JobSpec, groups: Groups, *, loss_factor: float = 1.0
) -> Operations:
    """Operations whose experts are spread over groups.ep and groups.etp; the others stay as they are.

    Also says what the router needs of sequences that are cut over cp and tp, and the scale of its losses.
    Without experts in the model, `base`.

    Args:
        base: operations of the layout's dense part.
        spec: the run.
        groups: this rank's place.
        loss_factor: gradient of the router's losses: 1 where gradients are sums over micro-batches and
            ranks (native); what the engine divides gradients by afterwards, else.
    """
    moe = spec.model.moe
    if moe is None:
        return base
    return replace(
        base,
        experts=experts_over(groups.ep, groups.etp, moe.n_experts),
        sequences=sequences_over(groups.cp, groups.tp),
        router_losses=RouterLossScale(spec.train.global_batch_size, spec.data.seq_len, loss_factor),
    )


def experts_over(ep: Axis, etp: Axis, n_experts: int) -> ExpertsFn:
    """The ExpertsFn of a rank that holds chunk(n_experts, ep.size, ep.rank). Collective over ep and etp.

    Args:
        ep: ranks that hold other experts.
        etp: ranks that hold other parts of the same experts.
        n_experts: E.
    """
    if ep.size == 1 and etp.size == 1:
        return local_experts

    def experts(
        x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, held: Sequence[ExpertWeights]
    ) -> torch.Tensor:
        choices = sort_by_expert(chosen, n_experts)
        trip = plan_trip(choices.counts, ep, etp)
        arrived = exchange(spread(x, choices.order), ep, trip.n_sent, trip.n_received)  # [M, D]
        everyones = gather(_padded(arrived, trip.n_places), etp, 0)  # [etp * places, D]
        partial_rows = grouped_swiglu(spread(everyones, trip.order), trip.counts, held)
        results = scatter_sum(collect(partial_rows, trip.order), etp, 0)  # [places, D]
        rows = exchange(_unpadded(results, len(arrived)), ep, trip.n_received, trip.n_sent)  # [N, D]
        return weigh_and_collect(rows, weights, choices)

    return experts


def sequences_over(cp: Axis, tp: Axis) -> Sequences:
    """Sequences cut zig-zag over cp, and each of these parts along S in tp order. Collective over both."""
    if cp.size == 1 and tp.size == 1:
        return Sequences()

    def total(counts: torch.Tensor) -> torch.Tensor:
        return sum_in_place(sum_in_place(counts.clone(), tp), cp)

    def whole(part: torch.Tensor) -> torch.Tensor:
        of_cp_rank = gather_plain(part, tp, 1)
        if cp.size == 1:
            return of_cp_rank
        return in_true_order(list(gather_plain(of_cp_rank[None], cp, 0).unbind(0)), 1)

    def part(whole: torch.Tensor) -> torch.Tensor:
        of_cp_rank = part_of(whole, cp.size, cp.rank, 1) if cp.size > 1 else whole
        return of_cp_rank.chunk(tp.size, 1)[tp.rank]

    return Sequences(total, whole, part)


@dataclass(frozen=True)
class Trip:
    """How many rows of one layer and micro-batch go where, and in what order this rank computes them."""

    n_sent: list[int]
    """Rows to each ep rank."""
    n_received: list[int]
    """Rows from each ep rank."""
    n_places: int
    """Most rows that an etp rank received: what each of them pads its own to."""
    counts: list[int]
    """Rows of each expert held here, those of all etp ranks together."""
    order: RowOrder
    """From the etp ranks' padded rows (each: by ep rank, then expert) to rows sorted by expert."""


@torch.no_grad()
def plan_trip(counts: torch.Tensor, ep: Axis, etp: Axis) -> Trip:
    """Tell one another how many rows there are. Collective over ep and etp.

    Args:
        counts: [E] this rank's rows of each expert.
        ep: ranks that hold other experts.
        etp: ranks that hold other parts of the same experts.
    """
    everyones = gather_plain(gather_plain(counts[None], ep, 0)[None], etp, 0).cpu()  # [etp, ep, E]
    spans = [chunk(len(counts), ep.size, rank) for rank in range(ep.size)]
    own = [everyones[etp.rank, ep.rank, start : start + length].sum() for start, length in spans]
    start, length = spans[ep.rank]
    blocks = everyones[:, :, start : start + length]  # [etp, ep, held]
    n_places = int(blocks.sum((1, 2)).max())
    return Trip(
        n_sent=[int(n) for n in own],
        n_received=blocks[etp.rank].sum(1).tolist(),
        n_places=n_places,
        counts=blocks.sum((0, 1)).tolist(),
        order=_order_of_blocks(blocks, n_places, counts.device),
    )


def update_router_biases(
    models: Sequence[nn.Module], groups: Groups, rate: float, *, is_skipped: bool = False
) -> None:
    """Move each expert's selection bias against its load of the step that ends (arXiv 2408.15664).

    bias_e += rate * sign(mean load - load_e); then the loads are zero again. A load is the number of choices
    over the whole global batch, before capacity. Collective over the stage's ranks (groups.sums["data_tp"]);
    to be called after each step, by all of them.

    Args:
        models: this rank's stages.
        groups: this rank's place.
        rate: moe.bias_update_rate; nothing happens at 0.
        is_skipped: the step changed no parameter, so it changes no bias either.
    """
    modules = [module for model in models for module in model.modules()]
    routers = [module for module in modules if isinstance(module, Router) and module.has_bias]
    if not routers or not rate:
        return
    loads = sum_in_place(torch.stack([router.load for router in routers]), groups.sums["data_tp"])
    for router, load in zip(routers, loads, strict=True):
        router.load.zero_()
        if not is_skipped:
            # In whole numbers: E * load_e against the sum, so that no rounding decides about a sign.
            direction = torch.sign(load.sum() - load * len(load))
            router.e_score_correction_bias.add_(rate * direction)


def _padded(rows: torch.Tensor, n_places: int) -> torch.Tensor:
    missing = n_places - len(rows)
    return torch.cat((rows, rows.new_zeros(missing, rows.shape[1]))) if missing else rows


def _unpadded(rows: torch.Tensor, n_rows: int) -> torch.Tensor:
    # A slice of all would cost backward a copy.
    return rows if len(rows) == n_rows else rows[:n_rows]


def _order_of_blocks(blocks: torch.Tensor, n_places: int, device: torch.device) -> RowOrder:
    """Sort rows that lie by etp rank (each padded to n_places), ep rank, expert: by expert first.

    Args:
        blocks: [etp, ep, held] rows of each block.
        n_places: rows that each etp rank's part has, padding included.
        device: of the result.
    """
    etp, ep, held = blocks.shape
    lengths = blocks.reshape(etp, ep * held)
    first = torch.arange(etp)[:, None] * n_places + lengths.cumsum(1) - lengths  # where each block lies
    by_expert = lengths.view(etp, ep, held).permute(2, 0, 1).flatten()
    goes_to = by_expert.cumsum(0) - by_expert
    shift = first.view(etp, ep, held).permute(2, 0, 1).flatten() - goes_to
    n_rows = int(by_expert.sum())
    token_of = torch.repeat_interleave(shift, by_expert) + torch.arange(n_rows)
    place_of = torch.full((etp * n_places, 1), n_rows)
    place_of[token_of, 0] = torch.arange(n_rows)
    return RowOrder(token_of.to(device), place_of.to(device))
