"""Context parallelism: each rank holds a part of the sequence; keys and values travel round the ring.

    rank r: queries of its positions stay; keys and values of rank r, then r-1, then r-2, ... pass by
        scores of my queries with what is here -> online softmax: keep maximum m, sum l, weighted values o
            m' = max(m, max s);  l' = l e^(m-m') + sum e^(s-m');  o' = o e^(m-m') + e^(s-m') v;  last o / l
        no rank ever holds more than one part of keys and values (arXiv 2310.01889)

Causal attention makes contiguous parts uneven: the last rank has 2n-1 times as many pairs as the first. Zig-
zag cuts 2n pieces and gives rank r pieces r and 2n-1-r, one early and one late: equal work.

One attention layer: softmax(q k^T / sqrt(C)) v, then the output weight. Rows of the batch are the positions
S.
"""

import math

import torch

from jobs.comm.collectives import exchange, leave, sum_in_place
from jobs.comm.groups import Axis, Groups
from jobs.lessons.tell import Tell
from jobs.lessons.toy import (
    Piece,
    Whole,
    adamw,
    gradient_of,
    initial_weight,
    sample_data,
    summary,
    trained,
)
from jobs.spec.lesson import LessonSpec

NAMES = ("q", "k", "v", "out")
WAYS = ("contiguous", "zig-zag")


def positions_of(way: str, length: int, rank: int, n_ranks: int) -> torch.Tensor:
    """Positions of the sequence that a rank holds."""
    if way == "contiguous":
        return torch.arange(length).chunk(n_ranks)[rank]
    pieces = torch.arange(length).chunk(2 * n_ranks)
    return torch.cat([pieces[rank], pieces[2 * n_ranks - 1 - rank]])


def heads(x: torch.Tensor, n_heads: int) -> torch.Tensor:
    """[S, D] -> [H, S, C]."""
    return x.view(len(x), n_heads, -1).transpose(0, 1)


def alone(spec: LessonSpec) -> Whole:
    """The layer on one process, with the whole matrix of scores."""
    data = sample_data(spec)
    weights = trained([initial_weight(spec, seed=i) for i in range(len(NAMES))])
    optimizer = adamw(weights, spec)
    mask = torch.ones(len(data), len(data), dtype=torch.bool).tril()
    found: Whole = {}
    for step in range(spec.train.steps):
        q, k, v = (heads(data @ weight, spec.model.n_heads) for weight in weights[:3])
        scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
        out = (scores.softmax(dim=-1) @ v).transpose(0, 1).flatten(1) @ weights[3]
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if step == 0:
            found |= {f"gradient of {n}": gradient_of(w) for n, w in zip(NAMES, weights, strict=True)}
        optimizer.step()
        found[f"loss of step {step}"] = loss.detach()
    return {f"{way}, {name}": value for name, value in found.items() for way in WAYS}


def lesson(spec: LessonSpec, groups: Groups, tell: Tell) -> list[Piece]:
    """Train with both cuts of the sequence; returns losses and first gradients of each."""
    found: list[Piece] = []
    for way in WAYS:
        tell.title(f"{way} parts")
        found += _train(spec, groups.cp, tell, way)
    tell.title("what it costs")
    part = 2 * spec.train.batch_size // groups.cp.size * spec.model.d_model
    tell.first(
        f"keys and values, {part:,} elements a rank, go on {groups.cp.size - 1} times in forward, and their"
    )
    tell.first(
        "gradients as often in backward; computing the scores hides that once the parts are long enough"
    )
    return found


def _train(spec: LessonSpec, axis: Axis, tell: Tell, way: str) -> list[Piece]:
    places = [positions_of(way, spec.train.batch_size, r, axis.size) for r in range(axis.size)]
    data = sample_data(spec)[places[axis.rank]]  # [S/n, D]
    weights = trained([initial_weight(spec, seed=i) for i in range(len(NAMES))])
    optimizer = adamw(weights, spec)
    found: list[Piece] = []
    for step in range(spec.train.steps):
        q, k, v = (heads(data @ weight, spec.model.n_heads) for weight in weights[:3])  # [H, S/n, C]
        out = ring_attention(q, k, v, places, axis).transpose(0, 1).flatten(1) @ weights[3]
        loss = leave(out.square().sum(), axis) / (data.numel() * axis.size)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for weight in weights:  # every rank holds them all and has seen its positions
            assert weight.grad is not None
            sum_in_place(weight.grad, axis)
        if step == 0:
            n_pairs = int((places[axis.rank] + 1).sum())
            tell.line(f"positions {_spans(places[axis.rank])}: {n_pairs:,} pairs of query and key to compute")
            found += [
                Piece(f"{way}, gradient of {n}", gradient_of(w)) for n, w in zip(NAMES, weights, strict=True)
            ]
        optimizer.step()
        tell.line(f"step = {step}, attention produced {summary(out)}, loss = {loss.item()}")
        found.append(Piece(f"{way}, loss of step {step}", loss.detach()))
    return found


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: list[torch.Tensor], axis: Axis
) -> torch.Tensor:
    """Causal attention of this rank's queries over all keys; all [H, S/n, C]. Collective over the axis."""
    kv = torch.stack([k, v]).transpose(0, 2).contiguous()  # [S/n, H, 2, C]: rows travel
    top = q.new_full((*q.shape[:2], 1), -math.inf)  # m
    total, out = torch.zeros_like(top), torch.zeros_like(q)  # l, o
    n_rows = len(kv)
    n_sent = [n_rows * (rank == (axis.rank + 1) % axis.size) for rank in range(axis.size)]
    n_received = [n_rows * (rank == (axis.rank - 1) % axis.size) for rank in range(axis.size)]
    for turn in range(axis.size):
        source = (axis.rank - turn) % axis.size  # whose keys are here now
        keys, values = kv.transpose(0, 2)  # [H, S/n, C] each
        scores = q @ keys.transpose(1, 2) / math.sqrt(q.shape[-1])
        is_later = places[source][None, :] > places[axis.rank][:, None]  # [queries, keys]
        scores = scores.masked_fill(is_later, -math.inf)
        # The own part comes first, and a query sees itself: from then on the maximum is finite.
        new_top = torch.maximum(top, scores.detach().amax(dim=-1, keepdim=True))
        kept, weights = (top - new_top).exp(), (scores - new_top).exp()
        total, out, top = (
            total * kept + weights.sum(dim=-1, keepdim=True),
            out * kept + weights @ values,
            new_top,
        )
        if turn < axis.size - 1:
            kv = exchange(
                kv, axis, n_sent, n_received
            )  # one step round the ring; backward goes the other way
    return out / total


def _spans(positions: torch.Tensor) -> str:
    """0..15 112..127."""
    ends = torch.nonzero(positions.diff() != 1).flatten().tolist()
    starts = [0, *(end + 1 for end in ends)]
    stops = [*ends, len(positions) - 1]
    return " ".join(f"{int(positions[a])}..{int(positions[b])}" for a, b in zip(starts, stops, strict=True))
