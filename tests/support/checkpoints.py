"""States to save and to load into, cut in any way, and a one-process save of them."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from jobs.events import Progress
from jobs.mesh import Mesh
from jobs.state import Box, Chunk, boxes_of_flat_range
from ops.checkpoint.commit import commit_manifest
from ops.checkpoint.layout import folder_name, shard_name
from ops.checkpoint.manifest import Identity, Manifest
from ops.checkpoint.shard import write_shard
from ops.checkpoint.staging import Staging
from ops.checkpoint.writer import AsyncWriter, Peers

State = Mapping[str, torch.Tensor]
FINGERPRINT = '{"d_model": 8}'


class Events(list[tuple[str, dict[str, Any]]]):
    """Collects what a writer reports."""

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        self.append((kind, fields))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for k, fields in self if k == kind]


def make_state(seed: int) -> dict[str, torch.Tensor]:
    """Weights, moments and step counter with odd shapes."""
    g = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, shape in {"embed.weight": (13, 8), "layers.0.w": (7, 5, 3), "norm.weight": (11,)}.items():
        for kind in ("model", "optim/exp_avg", "optim/exp_avg_sq"):
            state[f"{kind}/{name}"] = torch.randn(shape, generator=g)
    state["optim/step"] = torch.tensor([seed])
    return state


def identity(world_size: int = 1, fingerprint: str = FINGERPRINT, attempt: int = 0) -> Identity:
    return Identity(fingerprint, "native", Mesh(dp=world_size), attempt)


def whole(state: State) -> list[Chunk]:
    return [Chunk(n, tuple(t.shape), (0,) * t.dim(), t, is_writer=True) for n, t in state.items()]


def empty_like(state: State) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(t, -77) for name, t in state.items()}


def box_chunk(name: str, tensor: torch.Tensor, box: Box, *, is_writer: bool = True) -> Chunk:
    """A copy of a box: like a rank that holds only this."""
    offsets, sizes = box
    index = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
    return Chunk(name, tuple(tensor.shape), offsets, tensor[index].clone(), is_writer)


def flat_cut(state: State, rank: int, world_size: int) -> list[Chunk]:
    """Rank's share when every tensor is cut flat into equal parts, as ZeRO does."""
    chunks: list[Chunk] = []
    for name, tensor in state.items():
        n = tensor.numel()
        start, stop = n * rank // world_size, n * (rank + 1) // world_size
        chunks += [
            box_chunk(name, tensor, box) for box in boxes_of_flat_range(tuple(tensor.shape), start, stop)
        ]
    return chunks


def assemble(state: State, ranks: Iterable[Sequence[Chunk]]) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' chunks; what no chunk holds stays at a marker value."""
    found = empty_like(state)
    for chunk in (chunk for chunks in ranks for chunk in chunks):
        index = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.tensor.shape, strict=True))
        found[chunk.name][index] = chunk.tensor
    return found


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def save(
    checkpoint_dir: Path, step: int, state: State, extra: State | None = None, *, attempt: int = 0
) -> Path:
    """A committed checkpoint of one rank, through the real writer."""
    events = Events()
    writer = AsyncWriter(checkpoint_dir, identity(attempt=attempt), Peers(), events)
    assert writer.save(whole(state), Progress(step, step * 8, step * 100), extra) == "started"
    assert writer.wait(20), events
    return checkpoint_dir / folder_name(step)


def save_ranks(checkpoint_dir: Path, step: int, ranks: Sequence[Sequence[Chunk]]) -> Manifest:
    """A committed checkpoint of several ranks, their shards written one after another in this process."""
    path = checkpoint_dir / folder_name(step)
    path.mkdir(parents=True)
    shards, tensors = [], {}
    for rank, chunks in enumerate(ranks):
        staging = Staging(rank, len(ranks))
        staging.copy(chunks, {})
        name = shard_name(rank, len(ranks))
        with (path / name).open("wb") as file:
            shards.append(write_shard(file.fileno(), staging.plan, staging.buffer, name, rank))
        tensors |= staging.tensors
    return commit_manifest(path, Progress(step), identity(len(ranks)), tensors, shards, created_at=1.0)


def n_elements(chunks: Iterable[Chunk]) -> int:
    return sum(prod(chunk.tensor.shape) for chunk in chunks)
