"""The manifest: everything about a checkpoint besides its bytes, as frozen values and as checked JSON.

Every byte of every shard file is covered by a CRC-32 that stands here: one for the file's header, one for
each chunk. So a rank checks exactly what it reads, and a fault is reported with the name of its tensor.
The manifest itself carries a CRC-32 of its own text. Does not open shard files; imports no torch.
"""

import json
import zlib
from collections import defaultdict
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from jobs.errors import CheckpointError
from jobs.events import Progress
from jobs.mesh import Mesh
from ops.checkpoint.layout import MANIFEST

FORMAT_VERSION = 1

ITEM_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes an element, by safetensors' name of the type."""


class CorruptCheckpointError(CheckpointError):
    """This one checkpoint is torn or damaged: an older one may serve."""


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor."""

    shape: tuple[int, ...]
    dtype: str
    """A key of ITEM_SIZES."""


@dataclass(frozen=True)
class ChunkEntry:
    """A box of a logical tensor and where its bytes are."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    """First byte in the shard file."""
    n_bytes: int
    crc32: int


@dataclass(frozen=True)
class ShardEntry:
    """One rank's file: a header, then its chunks without gaps."""

    file: str
    rank: int
    n_bytes: int
    header_n_bytes: int
    header_crc32: int
    chunks: tuple[ChunkEntry, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; chunks as rows [name, offsets, sizes, begin, n_bytes, crc32]."""
        rows = [[c.name, list(c.offsets), list(c.sizes), c.begin, c.n_bytes, c.crc32] for c in self.chunks]
        return {**asdict(self), "chunks": rows}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "ShardEntry":
        """The reverse of to_json.

        Raises:
            KeyError, TypeError, ValueError: the value has another form.
        """
        chunks = tuple(
            ChunkEntry(str(name), _ints(offsets), _ints(sizes), int(begin), int(n_bytes), int(crc32))
            for name, offsets, sizes, begin, n_bytes, crc32 in value["chunks"]
        )
        return ShardEntry(
            file=str(value["file"]),
            rank=int(value["rank"]),
            n_bytes=int(value["n_bytes"]),
            header_n_bytes=int(value["header_n_bytes"]),
            header_crc32=int(value["header_crc32"]),
            chunks=chunks,
        )


@dataclass(frozen=True)
class Identity:
    """What a checkpoint is of: equal for all saves of one attempt."""

    fingerprint: str
    """Canonical JSON of what must be equal for the weights to mean the same: see fingerprint.py."""
    engine: str
    """Kind of the engine that saved. For the record: any engine reads any other's."""
    mesh: Mesh
    attempt: int = 0


@dataclass(frozen=True)
class Manifest:
    """The whole of one checkpoint."""

    progress: Progress
    identity: Identity
    tensors: dict[str, TensorEntry]
    shards: tuple[ShardEntry, ...]
    created_at: float
    """Wall clock, seconds since 1970."""
    versions: dict[str, str]
    """Of packtrain and torch, when it was written."""
    format_version: int = FORMAT_VERSION

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return len(self.shards)

    @property
    def n_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(shard.n_bytes for shard in self.shards)

    def to_text(self) -> str:
        """JSON with a last field `crc32` over the text of all other fields."""
        body = {
            "format_version": self.format_version,
            "progress": _progress_to_json(self.progress),
            "identity": {**asdict(self.identity), "mesh": asdict(self.identity.mesh)},
            "world_size": self.world_size,
            "created_at": self.created_at,
            "versions": self.versions,
            "tensors": {name: [list(t.shape), t.dtype] for name, t in sorted(self.tensors.items())},
            "shards": [shard.to_json() for shard in self.shards],
        }
        return json.dumps({**body, "crc32": _crc_of(body)}, separators=(",", ":")) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Raises:
        CorruptCheckpointError: missing, unreadable, damaged, or its boxes do not tile the tensors.
    """
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CorruptCheckpointError(f"no {MANIFEST}: the save was not finished") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{MANIFEST} cannot be read: {error}") from error
    return parse_manifest(text)


def parse_manifest(text: str) -> Manifest:
    """Parse and check a manifest's text.

    Raises:
        CorruptCheckpointError: damaged, of a newer format, or its boxes do not tile the tensors.
    """
    try:
        body = json.loads(text)
        stated = body.pop("crc32")
        if stated != _crc_of(body):
            raise CorruptCheckpointError(
                f"{MANIFEST} does not match its own checksum: it was changed or damaged"
            )
        if body["format_version"] != FORMAT_VERSION:
            raise CorruptCheckpointError(
                f"{MANIFEST} has format version {body['format_version']}, this program reads {FORMAT_VERSION}"
            )
        identity = body["identity"]
        manifest = Manifest(
            progress=_progress_from_json(body["progress"]),
            identity=Identity(**{**identity, "mesh": Mesh(**identity["mesh"])}),
            tensors={
                str(name): TensorEntry(_ints(shape), str(dtype))
                for name, (shape, dtype) in body["tensors"].items()
            },
            shards=tuple(ShardEntry.from_json(shard) for shard in body["shards"]),
            created_at=float(body["created_at"]),
            versions=dict(body["versions"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(f"{MANIFEST} is not a whole manifest: {error}") from error
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Every tensor is covered exactly once, every file is covered without gaps, each rank has its one shard.

    Raises:
        CorruptCheckpointError: names the first tensor or file that is not.
    """
    ranks = [shard.rank for shard in manifest.shards]
    if ranks != list(range(manifest.identity.mesh.world_size)):
        raise CorruptCheckpointError(
            f"the shards are of ranks {ranks}, expected all of 0..{manifest.identity.mesh.world_size - 1}"
        )
    boxes: dict[str, list[ChunkEntry]] = defaultdict(list)
    for shard in manifest.shards:
        end = shard.header_n_bytes
        for chunk in shard.chunks:
            _check_chunk(chunk, manifest.tensors.get(chunk.name))
            if chunk.begin != end:
                raise CorruptCheckpointError(
                    f"{shard.file}: {chunk.name} begins at {chunk.begin}, expected {end}"
                )
            end += chunk.n_bytes
            boxes[chunk.name].append(chunk)
        if end != shard.n_bytes:
            raise CorruptCheckpointError(
                f"{shard.file}: {shard.n_bytes} bytes stated, its parts add up to {end}"
            )
    for name, tensor in manifest.tensors.items():
        _check_disjoint(boxes[name])
        covered = sum(prod(chunk.sizes) for chunk in boxes[name])
        if covered != prod(tensor.shape):
            raise CorruptCheckpointError(
                f"the pieces of {name} hold {covered} elements, "
                f"its shape {list(tensor.shape)} has {prod(tensor.shape)}"
            )


def _progress_to_json(progress: Progress) -> dict[str, Any]:
    """Skipped samples are left out where there are none, as in checkpoints that knew of none."""
    body = asdict(progress)
    skipped = body.pop("skipped_samples")
    return {**body, "skipped_samples": [list(range_) for range_ in skipped]} if skipped else body


def _progress_from_json(body: dict[str, Any]) -> Progress:
    ranges = tuple((int(first), int(stop)) for first, stop in body.get("skipped_samples", ()))
    return Progress(**{**body, "skipped_samples": ranges})


def _check_chunk(chunk: ChunkEntry, tensor: TensorEntry | None) -> None:
    if tensor is None or tensor.dtype not in ITEM_SIZES:
        raise CorruptCheckpointError(f"{chunk.name} has no shape and no known element type")
    is_inside = len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape) and all(
        o >= 0 and s >= 0 and o + s <= n
        for o, s, n in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
    )
    if not is_inside or chunk.n_bytes != prod(chunk.sizes) * ITEM_SIZES[tensor.dtype]:
        raise CorruptCheckpointError(
            f"{chunk.name}: the box at {list(chunk.offsets)} of {list(chunk.sizes)} ({chunk.n_bytes} bytes) "
            f"is not a box of a {tensor.dtype} tensor of {list(tensor.shape)}"
        )


def _check_disjoint(boxes: list[ChunkEntry]) -> None:
    """No element is in two boxes of a tensor: else equal sums could hide a hole. A sweep along dim 0."""
    near: list[ChunkEntry] = []
    for box in sorted(boxes, key=lambda chunk: chunk.offsets):
        near = [other for other in near if not box.offsets or _stop(other) > box.offsets[0]]
        for other in near:
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
            ):
                raise CorruptCheckpointError(
                    f"elements of {box.name} were written twice: the boxes at {list(other.offsets)} of "
                    f"{list(other.sizes)} and at {list(box.offsets)} of {list(box.sizes)} overlap"
                )
        near.append(box)


def _stop(box: ChunkEntry) -> int:
    return box.offsets[0] + box.sizes[0]


def _crc_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, separators=(",", ":"), sort_keys=True).encode())


def _ints(values: list[Any]) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise ValueError(f"{values} are not whole numbers")
    return tuple(values)
