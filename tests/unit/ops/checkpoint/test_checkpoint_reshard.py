"""Any layout reads any other's checkpoint; torch's own DCP reads and writes ours."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from jobs.errors import CheckpointError
from jobs.events import Progress
from jobs.state import Box, Chunk
from ops.checkpoint.dcp import (
    ChunkLoadPlanner,
    ChunkSavePlanner,
    ShardStorageReader,
    ShardStorageWriter,
    by_name,
)
from ops.checkpoint.layout import folder_name
from ops.checkpoint.reader import CheckpointRef, find_newest, load_into, open_checkpoint
from tests.support.checkpoints import (
    FINGERPRINT,
    assemble,
    assert_equal,
    box_chunk,
    empty_like,
    flat_cut,
    identity,
    make_state,
    save,
    save_ranks,
    whole,
)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("n_saving", "n_loading"), [(4, 2), (4, 1), (1, 4), (3, 2), (2, 5)])
def test_flat_cuts_at_other_world_sizes(tmp_path: Path, n_saving: int, n_loading: int, verify: bool) -> None:
    # deepspeedai/DeepSpeed#2898
    state = make_state(7)
    save_ranks(tmp_path, 5, [flat_cut(state, rank, n_saving) for rank in range(n_saving)])
    ref = find_newest(tmp_path, lambda *_: None)
    assert ref is not None
    ranks = [flat_cut(empty_like(state), rank, n_loading) for rank in range(n_loading)]
    for chunks in ranks:
        assert load_into(ref, chunks, strict=False, verify=verify).step == 5
    assert_equal(assemble(state, ranks), state)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile a shape: cut recursively, anywhere, along any dimension."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [d for d, size in enumerate(sizes) if size > 1]
        if not dims:
            boxes.append((offsets, sizes))
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, sizes[dim] - 1))
        low = (*sizes[:dim], at, *sizes[dim + 1 :])
        high = (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
        boxes += [(offsets, low), ((*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]), high)]
    return boxes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), verify=st.booleans())
def test_odd_boxes_to_odd_boxes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, verify: bool
) -> None:
    shape = data.draw(st.sampled_from([(9,), (4, 7), (3, 4, 5), (2, 3, 2, 3)]))
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    saved, wanted = data.draw(tilings(shape)), data.draw(tilings(shape))
    chunks = [box_chunk("model/w", tensor, box) for box in saved]
    split = data.draw(st.integers(0, len(chunks)))
    folder = tmp_path_factory.mktemp("odd")
    save_ranks(folder, 1, [chunks[:split], chunks[split:]])
    ref = open_checkpoint(folder / folder_name(1))
    found = [box_chunk("model/w", torch.full(shape, -1.0), box) for box in wanted]
    load_into(ref, found, verify=verify)
    assert torch.equal(assemble({"model/w": tensor}, [found])["model/w"], tensor)


def test_missing_and_unexpected_names_are_all_listed_and_nothing_changes(tmp_path: Path) -> None:
    # deepspeedai/Megatron-DeepSpeed#405
    state = make_state(1)
    path = save(tmp_path, 1, state, {"rng/rank-00000": torch.get_rng_state()})
    ref = open_checkpoint(path)
    wanted = empty_like(state)
    wanted["model/tied.weight"] = wanted.pop("model/embed.weight")
    wanted["optim/exp_avg/tied.weight"] = wanted.pop("optim/exp_avg/embed.weight")
    with pytest.raises(CheckpointError) as caught:
        load_into(ref, whole(wanted))
    text = str(caught.value)
    for name in ("model/tied.weight", "optim/exp_avg/tied.weight"):
        assert f"{name} is expected and not in the checkpoint" in text
    for name in ("model/embed.weight", "optim/exp_avg/embed.weight"):
        assert f"{name} is in the checkpoint and nothing expects it" in text
    assert "rng/" not in text
    assert all(torch.equal(t, torch.full_like(t, -77)) for t in wanted.values())


def test_shapes_and_element_types_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    state = {"model/a": torch.randn(4, 3), "model/b": torch.randn(5)}
    ref = open_checkpoint(save(tmp_path, 1, state))
    wrong = {"model/a": torch.zeros(3, 4), "model/b": torch.zeros(5, dtype=torch.bfloat16)}
    with pytest.raises(
        CheckpointError, match=r"model/a has shape \[4, 3\].*expected \[3, 4\].*model/b is torch.float32"
    ):
        load_into(ref, whole(wrong))
    half = {
        "model/a": torch.zeros(4, 3, dtype=torch.bfloat16),
        "model/b": torch.zeros(5, dtype=torch.float64),
    }
    load_into(ref, whole(half), convert_dtypes=True)
    assert torch.equal(half["model/a"], state["model/a"].bfloat16())
    assert torch.equal(half["model/b"], state["model/b"].double())


def test_another_model_is_refused_before_loading_and_the_keys_are_named(tmp_path: Path) -> None:
    # NVIDIA-NeMo/Automodel#836
    state = make_state(1)
    ref = open_checkpoint(save(tmp_path, 1, state))
    wanted = empty_like(state)
    with pytest.raises(CheckpointError, match="d_model is 8 in the checkpoint and 96 in this run"):
        load_into(ref, whole(wanted), fingerprint='{"d_model": 96}')
    assert all(torch.equal(t, torch.full_like(t, -77)) for t in wanted.values())
    load_into(ref, whole(wanted), fingerprint=FINGERPRINT)


@pytest.fixture
def saved(tmp_path: Path) -> CheckpointRef:
    save_ranks(tmp_path, 3, [flat_cut(make_state(3), rank, 3) for rank in range(3)])
    return open_checkpoint(tmp_path / folder_name(3))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp_loads_our_checkpoint_into_plain_tensors(saved: CheckpointRef) -> None:
    state = make_state(3)
    found: dict[str, torch.Tensor] = empty_like(state)
    dcp.load(found, storage_reader=ShardStorageReader(saved.path, saved.manifest))
    assert_equal(found, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp_loads_chunks_with_our_planner(saved: CheckpointRef) -> None:
    chunks = flat_cut(empty_like(make_state(3)), 1, 2)
    reader = ShardStorageReader(saved.path, saved.manifest)
    dcp.load(dict(by_name(chunks)), storage_reader=reader, planner=ChunkLoadPlanner())
    for ours, expected in zip(chunks, flat_cut(make_state(3), 1, 2), strict=True):
        assert torch.equal(ours.tensor, expected.tensor)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("with_our_planner", [True, False])
def test_plain_dcp_saves_what_our_reader_loads(tmp_path: Path, with_our_planner: bool) -> None:
    state = make_state(4)
    path = tmp_path / folder_name(4)
    storage = ShardStorageWriter(path, Progress(4), identity())
    if with_our_planner:
        dcp.save(dict(by_name(flat_cut(state, 0, 1))), storage_writer=storage, planner=ChunkSavePlanner())
    else:
        dcp.save(dict(state), storage_writer=storage)
    ref = find_newest(tmp_path, lambda *_: None)
    assert ref is not None
    found = empty_like(state)
    assert load_into(ref, whole(found)) == Progress(4)
    assert_equal(found, state)


def test_dcp_metadata_is_the_manifest(saved: CheckpointRef) -> None:
    metadata = ShardStorageReader(saved.path, saved.manifest).read_metadata()
    entry = metadata.state_dict_metadata["model/layers.0.w"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == torch.Size((7, 5, 3))
    assert sum(chunk.sizes.numel() for chunk in entry.chunks) == 105


def test_a_box_that_is_not_covered_is_refused(saved: CheckpointRef) -> None:
    planner = ChunkLoadPlanner()
    metadata = ShardStorageReader(saved.path, saved.manifest).read_metadata()
    entry = metadata.state_dict_metadata["model/norm.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.pop()
    chunk = Chunk("model/norm.weight", (11,), (0,), torch.zeros(11), is_writer=True)
    planner.set_up_planner({"model/norm.weight": [chunk]}, metadata)
    with pytest.raises(CheckpointError, match="do not cover"):
        planner.create_local_plan()
