"""The collectives: what each rank holds before and after; all-reduce as two others; how fast they are.

    broadcast   one rank's tensor to all          scatter         one rank's pieces, one to each
    gather      a piece from each to one rank     reduce          the sum, on one rank
    all-gather  the pieces of all, on all         reduce-scatter  piece r of the sum, on rank r
    all-reduce  the sum, on all                   all-to-all      piece j of rank i is piece i of rank j

A ring moves (n-1)/n of the data for an all-gather or a reduce-scatter, twice that for an all-reduce.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from jobs.comm.collectives import exchange_plain, gather_plain, scatter_sum_plain, sum_in_place
from jobs.comm.groups import Axis, Groups
from jobs.lessons.tell import Tell
from jobs.lessons.toy import Piece, Whole, dtype_of, sample_data
from jobs.spec.lesson import LessonSpec

N_TIMED = 3


def _own(rank: int, n: int) -> torch.Tensor:
    """What a rank starts with: n numbers that show whose they are: [10 r, 10 r + 1, ...]."""
    return 10.0 * rank + torch.arange(n, dtype=torch.float64)


def alone(spec: LessonSpec) -> Whole:
    """What each has to give, by plain arithmetic on all ranks' tensors."""
    n = spec.n_ranks
    held = torch.stack([_own(rank, n) for rank in range(n)])  # [rank, piece]
    found = {
        "broadcast": held[0],
        "scatter": held[0],
        "gather": held[:, 0],
        "reduce": held.sum(0),
        "all-gather": held[:, 0],
        "reduce-scatter": held.sum(0),
        "all-reduce": held.sum(0),
        "all-to-all": held.T,
    }
    parts = sample_data(spec).chunk(n)
    return found | {"reduce-scatter + all-gather": torch.stack(parts).sum(0)}


def lesson(spec: LessonSpec, groups: Groups, tell: Tell) -> list[Piece]:
    """Every collective once; returns what each gave."""
    axis, n, rank = groups.world, groups.world.size, groups.rank
    found: list[Piece] = []

    def show(
        name: str, before: torch.Tensor, after: torch.Tensor | None, offsets: tuple[int, ...] | None
    ) -> None:
        tell.title(name)
        result = "nothing" if after is None else _numbers(after)
        tell.line(f"before {_numbers(before)}  after {result}")
        if after is not None:
            found.append(Piece(name, after, offsets))

    own = _own(rank, n)
    first = own[:1].contiguous()
    x = own.clone()
    dist.broadcast(x, src=0)
    show("broadcast", own, x, None)

    x = torch.empty_like(first)
    dist.scatter(x, list(own.chunk(n)) if rank == 0 else None, src=0)
    show("scatter", own, x, (rank,))

    into = [torch.empty_like(first) for _ in range(n)] if rank == 0 else None
    dist.gather(first, into, dst=0)
    show("gather", first, torch.cat(into) if into else None, None)

    x = own.clone()
    dist.reduce(x, dst=0)
    show("reduce", own, x if rank == 0 else None, None)

    show("all-gather", first, gather_plain(first, axis, dim=0), None)
    show("reduce-scatter", own, scatter_sum_plain(own, axis, dim=0), (rank,))
    show("all-reduce", own, sum_in_place(own.clone(), axis), None)
    show("all-to-all", own, exchange_plain(own, axis, [1] * n, [1] * n)[None], (rank, 0))

    _two_make_one(spec, axis, tell, found)
    _bandwidth(spec, axis, tell)
    return found


def _two_make_one(spec: LessonSpec, axis: Axis, tell: Tell, found: list[Piece]) -> None:
    tell.title("all-reduce = reduce-scatter + all-gather")
    data = sample_data(spec).chunk(axis.size)[axis.rank]
    flat = data.flatten()
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % axis.size)])
    both = gather_plain(scatter_sum_plain(padded, axis, dim=0), axis, dim=0)[: len(flat)].view_as(data)
    difference = (both - sum_in_place(data.clone(), axis)).abs().max().item()
    tell.line(f"{len(flat):,} elements: largest difference {difference:g}")
    found.append(Piece("reduce-scatter + all-gather", both))


def _bandwidth(spec: LessonSpec, axis: Axis, tell: Tell) -> None:
    n_elements = spec.train.batch_size * spec.model.d_model * axis.size
    tell.title(f"effective bandwidth of {n_elements:,} elements, best of {N_TIMED}")
    x = torch.zeros(n_elements, dtype=dtype_of(spec))
    size_bytes = x.numel() * x.element_size()
    reduced_s = _timed(lambda: sum_in_place(x, axis), axis)
    scattered_s = _timed(lambda: scatter_sum_plain(x, axis, dim=0), axis)
    part = x[: n_elements // axis.size]
    gathered_s = _timed(lambda: gather_plain(part, axis, dim=0), axis)
    # All-reduce both sends its input and receives the result, so (n-1) pieces count twice.
    for name, factor, duration_s in (
        ("all-reduce", 2, reduced_s),
        ("reduce-scatter", 1, scattered_s),
        ("all-gather", 1, gathered_s),
    ):
        sent_bytes = size_bytes * factor * (axis.size - 1)  # by all ranks together
        bandwidth = sent_bytes / (axis.size * duration_s)
        tell.line(f"{name:14} {duration_s * 1e3:8.2f} ms  {bandwidth / 1e9:6.2f} GB/s")


def _timed(run: Callable[[], object], axis: Axis) -> float:
    """Seconds of the fastest of some runs, after one that opens connections; all ranks start together."""
    run()
    took_s = []
    for _ in range(N_TIMED):
        sum_in_place(torch.zeros(1), axis)
        began_s = time.perf_counter()
        run()
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


def _numbers(x: torch.Tensor) -> str:
    return "[" + " ".join(f"{value:g}" for value in x.flatten().tolist()) + "]"
