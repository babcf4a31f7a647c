"""Training state as named pieces of logical tensors: what engines hand to checkpoints and take back.

A Chunk is a box of a global tensor; the checkpoint knows nothing else of layouts, so any layout can read any
other's chunks. Does not read or write files.

Logical names: `model/<parameter name>` (the master weight where there is one),
`optim/exp_avg/<parameter name>`, `optim/exp_avg_sq/<parameter name>`, and for SGD none of the latter; with
precision bf16_kahan `optim/kahan/<parameter name>`, what rounding has lost so far. Adam's step counter is
Progress.step minus skipped steps, saved as the tensor `optim/step` (int64, shape [1]).
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in the global shape."""


@dataclass(frozen=True)
class Chunk:
    """A box of one logical tensor, as a live view of this rank's memory."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: "torch.Tensor"
    """Shape = the sizes of the box. Reading it gives the state, writing into it restores the state."""
    is_writer: bool
    """This rank writes the box: over all ranks the written boxes tile each tensor exactly once."""


def boxes_of_flat_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Boxes that tile the elements [start, stop) of a row-major tensor, in order.

    ZeRO cuts flattened parameters anywhere; a flat range of an n-dimensional tensor is at most 2n - 1 boxes.

    Raises:
        ValueError: the range is not inside the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"[{start}, {stop}) is not inside a tensor of {prod(shape)} elements")
    if start == stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,))] if shape else [((), ())]
    row = prod(shape[1:])
    first, first_rest = divmod(start, row)
    last, last_rest = divmod(stop, row)
    if first == last:
        return _within_row(shape, first, first_rest, last_rest)
    boxes: list[Box] = []
    if first_rest:
        boxes += _within_row(shape, first, first_rest, row)
        first += 1
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(((first, *zeros), (last - first, *shape[1:])))
    if last_rest:
        boxes += _within_row(shape, last, 0, last_rest)
    return boxes


def _within_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    inner = boxes_of_flat_range(shape[1:], start, stop)
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in inner]
