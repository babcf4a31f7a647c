"""Flat buckets: where each parameter lies in them, and which rank saves which rows. No tensors.

    backward order ->   | lm_head | layer 1: mlp, attention | norms | layer 0 ... | embed_tokens |
    buckets             |<-- 0 -->|<---------- 1 ---------->|<------ 2 ------>|<------ 3 ------>|

Inside a bucket the decayed parameters come first, so an optimizer sees two runs of memory a bucket, however
many parameters there are.
"""

from dataclasses import dataclass
from math import prod

from jobs.optim.param_groups import is_decayed

ALIGN = 16
"""Elements: every parameter starts on 64 bytes, so vector code takes the same path in every run."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """End of the parameter's elements."""
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced together."""

    slots: tuple[Slot, ...]
    decayed_stop: int
    """Elements [0, decayed_stop) are decayed, [decayed_stop, stop) are not."""
    stop: int
    """Divides by ALIGN times the parts that were asked for; what no slot covers is padding."""


def plan_buckets(shapes: dict[str, tuple[int, ...]], bucket_bytes: float, n_parts: int = 1) -> list[Bucket]:
    """Buckets in the order in which the backward pass fills them: the reverse of `shapes`.

    A parameter that does not fit into the open bucket begins a new one, so one larger than a bucket gets
    its own: what is filled last (the embedding) holds up nothing else.

    Args:
        shapes: parameters by name, in the order in which the forward pass uses them.
        bucket_bytes: size of a bucket of fp32 gradients.
        n_parts: equal parts that each bucket can be cut into.
    """
    buckets: list[Bucket] = []
    names: list[str] = []
    n_bytes = 0
    for name in reversed(shapes):
        size = 4 * prod(shapes[name])
        if names and n_bytes + size > bucket_bytes:
            buckets.append(_lay_out(names, shapes, n_parts))
            names, n_bytes = [], 0
        names.append(name)
        n_bytes += size
    if names:
        buckets.append(_lay_out(names, shapes, n_parts))
    return buckets


def _lay_out(names: list[str], shapes: dict[str, tuple[int, ...]], n_parts: int) -> Bucket:
    slots: list[Slot] = []
    start = decayed_stop = 0
    for decayed in (True, False):
        for name in names:
            if is_decayed(shapes[name]) == decayed:
                slots.append(Slot(name, shapes[name], start))
                start = -(-slots[-1].stop // ALIGN) * ALIGN
        if decayed:
            decayed_stop = start
    unit = ALIGN * n_parts
    return Bucket(tuple(slots), decayed_stop, -(-start // unit) * unit)


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) along dim 0 of one tensor, and the rank (of those that hold it) that saves them."""

    start: int
    stop: int
    writer: int


def plan_writers(shapes: dict[str, tuple[int, ...]], n_writers: int) -> dict[str, list[Rows]]:
    """Who saves what of state that every rank holds: equal shares within one row, tiling each tensor.

    All elements are laid end to end and cut into n_writers equal runs; each cut moves to the next whole row.

    Args:
        shapes: tensors by name, each with at least one dimension.
        n_writers: ranks that hold all of it.
    """
    total = sum(prod(shape) for shape in shapes.values())
    plan: dict[str, list[Rows]] = {}
    before = 0
    for name, shape in shapes.items():
        row = prod(shape[1:])
        # First row of each writer's share of this tensor, clipped to the tensor.
        firsts = [
            min(shape[0], max(0, -(-(total * writer // n_writers - before) // row)))
            for writer in range(n_writers)
        ]
        stops = [*firsts[1:], shape[0]]
        plan[name] = [
            Rows(first, stop, writer)
            for writer, (first, stop) in enumerate(zip(firsts, stops, strict=True))
            if first < stop
        ]
        before += prod(shape)
    return plan
