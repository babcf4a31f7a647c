"""The copy of this rank's state on the host: the only part of a save that training waits for.

The buffer is laid out like the file, allocated once and used again as long as the pieces stay the same.
It never shares memory with the state, so training may go on as soon as `copy` returns. Writes no file.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from jobs.state import Chunk
from ops.checkpoint.commit import Tensors
from ops.checkpoint.shard import Piece, ShardPlan, plan_shard, views_of

ExtraTensors = Mapping[str, torch.Tensor]
"""Whole tensors that one rank alone writes, by logical name: random states."""

Bytes = npt.NDArray[np.uint8]

_MAX_THREADS = 4
_PORTION_BYTES = 8 << 20
"""What a thread copies at a time."""


class Staging:
    """Host buffer and the plan of the file that it is written to."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Allocates nothing yet."""
        self._rank, self._world_size = rank, world_size
        self._plan: ShardPlan | None = None
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "staging")
        self._pieces: list[Piece] = []
        """In the caller's order."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def is_prepared(self) -> bool:
        """There is a plan."""
        return self._plan is not None

    @property
    def plan(self) -> ShardPlan:
        """Plan of the pieces that were last prepared."""
        assert self._plan is not None
        return self._plan

    @property
    def buffer(self) -> torch.Tensor:
        """[data_n_bytes] uint8 on the host."""
        return self._buffer

    @property
    def tensors(self) -> Tensors:
        """Global shape and element type of what this rank writes."""
        return {piece.name: (piece.global_shape, piece.dtype) for piece in self.plan.pieces}

    def prepare(self, chunks: Sequence[Chunk], extra: ExtraTensors) -> None:
        """Allocate for these pieces and touch every page; nothing happens where they are the same as before.

        Raises:
            CheckpointError: an element type that checkpoints cannot hold.
            RuntimeError: no memory for the buffer.
        """
        pieces = [piece for piece, _ in _sources(chunks, extra)]
        if self._plan is not None and pieces == self._pieces:
            return
        plan = plan_shard(pieces, self._rank, self._world_size)
        if self._buffer.numel() != plan.data_n_bytes:
            on_device = any(chunk.tensor.is_cuda for chunk in chunks)
            self._buffer = torch.empty(plan.data_n_bytes, dtype=torch.uint8, pin_memory=on_device)
            self._buffer.zero_()
        self._plan, self._pieces = plan, pieces

    @torch.no_grad()
    def copy(self, chunks: Sequence[Chunk], extra: ExtraTensors) -> None:
        """Copy the current values; on return they are on the host.

        Raises:
            CheckpointError: an element type that checkpoints cannot hold.
            RuntimeError: no memory for the buffer.
        """
        self.prepare(chunks, extra)
        sources = [tensor.detach() for _, tensor in _sources(chunks, extra)]
        plain: list[tuple[Bytes, Bytes]] = []
        for i, view in zip(self.plan.order, views_of(self.plan, self._buffer), strict=True):
            if sources[i].is_contiguous() and sources[i].device.type == "cpu" and view.numel():
                plain += _portions(_bytes_of(view), _bytes_of(sources[i]))
            else:
                view.copy_(sources[i], non_blocking=True)
        # One core does not fill the memory's bandwidth; numpy lets the others run while it copies.
        list(self._pool.map(lambda pair: np.copyto(*pair), plain))
        if any(tensor.is_cuda for tensor in sources):
            torch.cuda.synchronize()


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    found: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return found


def _portions(target: Bytes, source: Bytes) -> list[tuple[Bytes, Bytes]]:
    return [
        (target[at : at + _PORTION_BYTES], source[at : at + _PORTION_BYTES])
        for at in range(0, len(target), _PORTION_BYTES)
    ]


def _sources(chunks: Sequence[Chunk], extra: ExtraTensors) -> list[tuple[Piece, torch.Tensor]]:
    found = [
        (Piece(c.name, c.global_shape, c.offsets, tuple(c.tensor.shape), c.tensor.dtype), c.tensor)
        for c in chunks
        if c.is_writer
    ]
    for name, tensor in extra.items():
        shape = tuple(tensor.shape)
        found.append((Piece(name, shape, (0,) * len(shape), shape, tensor.dtype), tensor))
    return found
