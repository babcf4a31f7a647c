"""One rank's file in safetensors format: laid out, copied to the host, written with checksums, verified.

    8 bytes (length of the header) | JSON header, padded with spaces | data, larger element types first,
    no gaps

Any safetensors reader opens it; keys are `<logical name>@<offsets>`. Knows nothing of other ranks or of
the commit.
"""

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from jobs.errors import CheckpointError
from ops.checkpoint.element_types import DTYPE_NAMES
from ops.checkpoint.manifest import ChunkEntry, CorruptCheckpointError, ShardEntry
from ops.durable import write_all

_SLICE_BYTES = 8 << 20
"""Checksummed and written in such portions, so that other threads get the interpreter in between."""


@dataclass(frozen=True)
class Piece:
    """A box that this rank writes, without its values."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of the box."""
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def key(self) -> str:
        """Its name in the safetensors header."""
        return f"{self.name}@{','.join(map(str, self.offsets))}"


@dataclass(frozen=True)
class ShardPlan:
    """Where each piece lies in the file."""

    pieces: tuple[Piece, ...]
    """In the order of the file."""
    order: tuple[int, ...]
    """Index in the caller's sequence of each piece."""
    begins: tuple[int, ...]
    """First byte of each piece, counted from the end of the header."""
    header: bytes
    """The eight length bytes included."""
    data_n_bytes: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.data_n_bytes


def plan_shard(pieces: Sequence[Piece], rank: int, world_size: int) -> ShardPlan:
    """Lay out a file. Larger element types come first, so every piece is aligned to its element size.

    Raises:
        CheckpointError: an element type that the format does not have, or two pieces with one name and place.
    """
    for piece in pieces:
        if piece.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{piece.name} has element type {piece.dtype}, which checkpoints cannot hold"
            )
    order = sorted(
        range(len(pieces)), key=lambda i: (-pieces[i].dtype.itemsize, pieces[i].name, pieces[i].offsets)
    )
    header: dict[str, object] = {
        "__metadata__": {"format": "pt", "rank": str(rank), "world_size": str(world_size)}
    }
    begins, end = [], 0
    for i in order:
        piece = pieces[i]
        if piece.key in header:
            raise CheckpointError(f"rank {rank} has two pieces {piece.key}")
        begins.append(end)
        end += piece.n_bytes
        header[piece.key] = {
            "dtype": DTYPE_NAMES[piece.dtype],
            "shape": list(piece.sizes),
            "data_offsets": [begins[-1], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return ShardPlan(
        pieces=tuple(pieces[i] for i in order),
        order=tuple(order),
        begins=tuple(begins),
        header=len(text).to_bytes(8, "little") + text,
        data_n_bytes=end,
    )


def views_of(plan: ShardPlan, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Tensors over the buffer, one a piece, in the order of the file.

    Args:
        plan: where each piece lies.
        buffer: [>= data_n_bytes] uint8 on the host.
    """
    return [
        buffer[begin : begin + piece.n_bytes].view(piece.dtype).view(piece.sizes)
        for piece, begin in zip(plan.pieces, plan.begins, strict=True)
    ]


def write_shard(handle: int, plan: ShardPlan, buffer: torch.Tensor, file: str, rank: int) -> ShardEntry:
    """Write header and data to an open file, make them durable, and return the entry with all checksums.

    Raises:
        OSError: the file system refused.
    """
    write_all(handle, memoryview(plan.header))
    data = memoryview(buffer.numpy().data)[: plan.data_n_bytes]
    entries, written = [], 0
    for piece, begin in zip(plan.pieces, plan.begins, strict=True):
        end, position, crc32 = begin + piece.n_bytes, begin, 0
        while position < end:
            stop = min(end, position + _SLICE_BYTES)
            crc32 = zlib.crc32(data[position:stop], crc32)
            position = stop
            if position - written >= _SLICE_BYTES:
                write_all(handle, data[written:position])
                written = position
        place = len(plan.header) + begin
        entries.append(ChunkEntry(piece.name, piece.offsets, piece.sizes, place, piece.n_bytes, crc32))
    write_all(handle, data[written:])
    os.fsync(handle)
    return ShardEntry(
        file=file,
        rank=rank,
        n_bytes=plan.n_bytes,
        header_n_bytes=len(plan.header),
        header_crc32=zlib.crc32(plan.header),
        chunks=tuple(entries),
    )


def check_size(folder: Path, shard: ShardEntry) -> None:
    """The file is there and as long as stated.

    Raises:
        CorruptCheckpointError: names the rank and the file.
    """
    try:
        n_bytes = (folder / shard.file).stat().st_size
    except OSError as error:
        raise CorruptCheckpointError(
            f"the shard of rank {shard.rank}, {shard.file}, is missing: {os.strerror(error.errno or 0)}"
        ) from error
    if n_bytes != shard.n_bytes:
        raise CorruptCheckpointError(
            f"the shard of rank {shard.rank}, {shard.file}, has {n_bytes} bytes, "
            f"the manifest says {shard.n_bytes}"
        )


def check_bytes(folder: Path, shard: ShardEntry) -> None:
    """Read the whole file once and compare every checksum.

    Raises:
        CorruptCheckpointError: names the rank, the file and the tensor.
    """
    check_size(folder, shard)
    scratch = memoryview(bytearray(_SLICE_BYTES))
    try:
        with (folder / shard.file).open("rb", buffering=0) as file:
            expect_crc(
                shard,
                "its header",
                shard.header_crc32,
                _crc_of_next(file.fileno(), shard.header_n_bytes, scratch),
            )
            for chunk in shard.chunks:
                found = _crc_of_next(file.fileno(), chunk.n_bytes, scratch)
                expect_crc(shard, f"{chunk.name} at {list(chunk.offsets)}", chunk.crc32, found)
    except OSError as error:
        raise CorruptCheckpointError(
            f"the shard of rank {shard.rank}, {shard.file}, cannot be read: {error}"
        ) from error


def read_exactly(handle: int, target: memoryview, begin: int) -> None:
    """Fill `target` from the file's bytes at `begin`.

    Raises:
        OSError: the file ended, or could not be read.
    """
    while target:
        n_bytes = os.preadv(handle, [target[: 1 << 30]], begin)
        if n_bytes == 0:
            raise OSError(None, f"the file ends {len(target)} bytes too early")
        target, begin = target[n_bytes:], begin + n_bytes


def expect_crc(shard: ShardEntry, what: str, stated: int, found: int) -> None:
    """Compare two checksums.

    Raises:
        CorruptCheckpointError: they differ; names the rank, the file and `what`.
    """
    if stated != found:
        raise CorruptCheckpointError(
            f"the shard of rank {shard.rank}, {shard.file}: {what} does not match its checksum "
            f"(stated {stated:08x}, found {found:08x})"
        )


def _crc_of_next(handle: int, n_bytes: int, scratch: memoryview) -> int:
    crc32 = 0
    while n_bytes:
        n_read = os.readv(handle, [scratch[: min(n_bytes, len(scratch))]])
        if n_read == 0:
            break
        crc32 = zlib.crc32(scratch[:n_read], crc32)
        n_bytes -= n_read
    return crc32
