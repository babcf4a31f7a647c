"""The commit: from all ranks' shard entries to a manifest on disk.

Called on one rank, when all shards are durable. Does not talk to other ranks: see rendezvous.py.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from jobs.errors import CheckpointError
from jobs.events import Progress
from ops.checkpoint.element_types import DTYPE_NAMES
from ops.checkpoint.layout import MANIFEST
from ops.checkpoint.manifest import (
    CorruptCheckpointError,
    Identity,
    Manifest,
    ShardEntry,
    TensorEntry,
    check,
)
from ops.checkpoint.shard import check_size
from ops.durable import fsync_folder, write_atomically

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Global shape and element type by logical name."""


def commit_manifest(
    path: Path,
    progress: Progress,
    identity: Identity,
    tensors: Tensors,
    shards: Sequence[ShardEntry],
    *,
    created_at: float,
) -> Manifest:
    """Check that the shards tile every tensor and lie in this folder, then write the manifest.

    Raises:
        CheckpointError: pieces are missing or overlap, or a rank's file is not to be seen; nothing is
            committed.
        OSError: the file system refused; nothing is committed.
    """
    manifest = Manifest(
        progress=progress,
        identity=identity,
        tensors={name: TensorEntry(shape, DTYPE_NAMES[dtype]) for name, (shape, dtype) in tensors.items()},
        shards=tuple(sorted(shards, key=lambda shard: shard.rank)),
        created_at=created_at,
        versions={"packtrain": _own_version(), "torch": str(torch.__version__)},
    )
    try:
        check(manifest)
        for shard in manifest.shards:
            check_size(path, shard)
    except CorruptCheckpointError as error:
        raise CheckpointError(
            f"{path} cannot be committed: {error}. All ranks must write to one folder that rank 0 sees."
        ) from error
    fsync_folder(path)
    write_atomically(path / MANIFEST, manifest.to_text())
    fsync_folder(path.parent)
    return manifest


def _own_version() -> str:
    try:
        return version("packtrain")
    except PackageNotFoundError:
        return "unknown"
