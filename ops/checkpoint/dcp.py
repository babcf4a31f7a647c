"""Torch's distributed checkpoint (DCP) over our files: planners for Chunks, storages for shards.

These are DCP's documented extension points, so `dcp.load(state, storage_reader=ShardStorageReader(ref))`
reads a Packtrain checkpoint into plain tensors or DTensors, and `dcp.save` with ShardStorageWriter writes
one. Packtrain's own load drives the reader and planner itself, without DCP's collectives; its own save
does not use DCP's writer, whose collectives cannot name a rank that stalls
(docs/adr/0002-checkpoint-format.md).

A state dict here maps a logical name to a list of jobs.state.Chunk. No pickle is read or written.
"""

import os
import time
import zlib
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from jobs.errors import CheckpointError
from jobs.events import Progress
from jobs.state import Chunk
from ops.checkpoint.commit import commit_manifest
from ops.checkpoint.element_types import DTYPES
from ops.checkpoint.layout import shard_name
from ops.checkpoint.manifest import (
    ChunkEntry,
    CorruptCheckpointError,
    Identity,
    Manifest,
    ShardEntry,
)
from ops.checkpoint.removal import remove_checkpoint
from ops.checkpoint.shard import Piece, expect_crc, plan_shard, read_exactly, views_of, write_shard

ChunkDict = dict[str, list[Chunk]]


def by_name(chunks: Iterable[Chunk]) -> ChunkDict:
    """Chunks under their logical names: the state dict of these planners."""
    found: ChunkDict = {}
    for chunk in chunks:
        found.setdefault(chunk.name, []).append(chunk)
    return found


def _narrow(tensor: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    tensor = tensor.detach()
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


class ChunkSavePlanner(SavePlanner):
    """Plans one WriteItem a chunk that this rank writes."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Keep the chunks."""
        self._chunks = {
            MetadataIndex(c.name, c.offsets): c
            for chunks in state_dict.values()
            for c in chunks
            if c.is_writer
        }

    def create_local_plan(self) -> SavePlan:
        """One item a chunk."""
        return SavePlan(
            [
                WriteItem(
                    index=index,
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.tensor.size()),
                        properties=TensorProperties(dtype=chunk.tensor.dtype),
                        size=torch.Size(chunk.global_shape),
                    ),
                )
                for index, chunk in self._chunks.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """All ranks' boxes by name. Coverage is checked when the manifest is made."""
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data = item.tensor_data
            assert data is not None
            entry = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            entry.chunks.append(data.chunk)
        return all_plans, Metadata(dict(tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing to merge."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The chunk's tensor."""
        tensor: torch.Tensor = self._chunks[write_item.index].tensor
        return tensor.detach()


class ShardStorageWriter(StorageWriter):
    """Writes one checkpoint folder through `dcp.save`: a shard a rank, then the manifest.

    All ranks' files must be on one file system.
    """

    def __init__(self, path: Path, progress: Progress, identity: Identity) -> None:
        """Write to `path`, whose name should be layout.folder_name(progress.step)."""
        self._path, self._progress, self._identity = path, progress, identity
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write to another folder from now on, where one is given."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the rank."""
        self._rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is no tensor."""
        others = [item.index.fqn for item in plan.items if item.tensor_data is None]
        if others:
            raise CheckpointError(f"a checkpoint holds tensors only, these are none: {others}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make a fresh folder (coordinator only) and tell the ranks how many they are."""
        remove_checkpoint(self._path)
        self._path.mkdir(parents=True)
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard."""
        world_size = int(plan.storage_data or 1)
        pieces = []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            pieces.append(
                Piece(
                    name=item.index.fqn,
                    global_shape=tuple(data.size),
                    offsets=tuple(data.chunk.offsets),
                    sizes=tuple(data.chunk.sizes),
                    dtype=data.properties.dtype,
                )
            )
        shard_plan = plan_shard(pieces, self._rank, world_size)
        buffer = torch.empty(shard_plan.data_n_bytes, dtype=torch.uint8)
        for i, view in zip(shard_plan.order, views_of(shard_plan, buffer), strict=True):
            value = planner.resolve_data(plan.items[i])
            assert isinstance(value, torch.Tensor)
            view.copy_(value)
        name = shard_name(self._rank, world_size)
        handle = os.open(self._path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            entry = write_shard(handle, shard_plan, buffer, name, self._rank)
        finally:
            os.close(handle)
        # The whole entry travels with the first result: DCP hands results, not ranks, to finish().
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(index=item.index, size_in_bytes=0, storage_data=entry if i == 0 else None)
                for i, item in enumerate(plan.items)
            ]
            or [WriteResult(MetadataIndex(""), 0, entry)]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest: the commit."""
        shards: list[ShardEntry] = [ranks_results[0].storage_data for ranks_results in results]
        tensors = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        commit_manifest(self._path, self._progress, self._identity, tensors, shards, created_at=time.time())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path."""
        return True


class ChunkLoadPlanner(LoadPlanner):
    """Plans one ReadItem for each overlap of a wanted box with a saved one: any layout to any layout."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the chunks and the saved boxes."""
        assert metadata is not None
        self._chunks: ChunkDict = state_dict
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """All overlaps.

        Raises:
            CheckpointError: a name that the checkpoint does not have, another shape, or a box not wholly
                covered.
        """
        items: list[ReadItem] = []
        for name, chunks in self._chunks.items():
            saved = self._saved.get(name)
            if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != chunks[0].global_shape:
                raise CheckpointError(
                    f"{name} of shape {list(chunks[0].global_shape)} is not in the checkpoint"
                )
            boxes = [ChunkStorageMetadata(torch.Size(c.offsets), c.tensor.size()) for c in chunks]
            found = create_read_items_for_chunk_list(name, saved, boxes)
            if sum(prod(item.lengths) for item in found) != sum(prod(box.sizes) for box in boxes):
                raise CheckpointError(f"the saved pieces of {name} do not cover what is wanted of it")
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to agree on."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to merge."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: checkpoints hold tensors only."""
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """View of the wanted chunk that the item fills."""
        index = read_item.dest_index.index
        assert index is not None
        chunk = self._chunks[read_item.dest_index.fqn][index]
        return _narrow(chunk.tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: the view was filled in place."""


class ShardStorageReader(StorageReader):
    """Reads a checkpoint folder's shards, each chunk checked against its checksum unless told otherwise."""

    def __init__(self, path: Path, manifest: Manifest, *, verify: bool = True) -> None:
        """Read `path`. With verify=False the bytes are taken as they are (they have just been verified)."""
        self._path, self._manifest, self._verify = path, manifest, verify
        self._places: dict[MetadataIndex, tuple[int, ChunkEntry]] = {
            MetadataIndex(chunk.name, chunk.offsets): (i, chunk)
            for i, shard in enumerate(manifest.shards)
            for chunk in shard.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Keeps its folder: a reader is of one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in DCP's terms."""
        boxes: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in self._manifest.tensors}
        for index, (_, chunk) in self._places.items():
            boxes[index.fqn].append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.shape), boxes[name]
                )
                for name, entry in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Sorted by file and place, so that each file is read once and forwards."""

        def place(item: ReadItem) -> tuple[int, int]:
            i, chunk = self._places[item.storage_index]
            return i, chunk.begin

        return replace(plan, items=sorted(plan.items, key=place))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to agree on."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner wants.

        Raises:
            CorruptCheckpointError: a file is missing or short, or a chunk does not match its checksum.
        """
        groups: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            groups.setdefault(self._places[item.storage_index][0], []).append(item)
        for i, items in groups.items():
            self._read_file(self._manifest.shards[i], items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, shard: ShardEntry, items: list[ReadItem], planner: LoadPlanner) -> None:
        try:
            with (self._path / shard.file).open("rb", buffering=0) as file:
                last: tuple[MetadataIndex, torch.Tensor] | None = None
                for item in items:
                    target = planner.resolve_tensor(item)
                    if last is None or last[0] != item.storage_index or not self._verify:
                        last = (item.storage_index, self._read_chunk(file.fileno(), shard, item, target))
                    source = last[1]
                    if source is not target:
                        first = item.storage_offsets if self._verify else (0, *item.storage_offsets[1:])
                        target.copy_(_narrow(source, first[: source.dim()], item.lengths))
                    planner.commit_tensor(item, target)
        except OSError as error:
            raise CorruptCheckpointError(
                f"the shard of rank {shard.rank}, {shard.file}, cannot be read: {error}"
            ) from error

    def _read_chunk(
        self, handle: int, shard: ShardEntry, item: ReadItem, target: torch.Tensor
    ) -> torch.Tensor:
        """The saved chunk, or without verification only its rows that are wanted.

        Read straight into the target where that has the same form.
        """
        chunk = self._places[item.storage_index][1]
        dtype = DTYPES[self._manifest.tensors[chunk.name].dtype]
        sizes, begin = chunk.sizes, chunk.begin
        if sizes and not self._verify:
            sizes = (item.lengths[0], *sizes[1:])
            begin += item.storage_offsets[0] * prod(sizes[1:]) * dtype.itemsize
        is_same = (
            tuple(item.lengths) == sizes
            and target.dtype == dtype
            and target.device.type == "cpu"
            and target.is_contiguous()
        )
        tensor = target if is_same else torch.empty(sizes, dtype=dtype)
        if tensor.numel():
            data = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
            read_exactly(handle, data, begin)
            if self._verify:
                expect_crc(shard, f"{chunk.name} at {list(chunk.offsets)}", chunk.crc32, zlib.crc32(data))
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path."""
        return True
