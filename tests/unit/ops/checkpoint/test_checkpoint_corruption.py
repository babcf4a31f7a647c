"""Every way in which a checkpoint can be wrong: it is passed over with one line, the older one is taken."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jobs.errors import CheckpointError
from ops.checkpoint.layout import MANIFEST, folder_name, shard_name
from ops.checkpoint.manifest import CorruptCheckpointError, parse_manifest, read_manifest
from ops.checkpoint.reader import find_newest, load_into, open_checkpoint
from ops.checkpoint.verify import list_checkpoints, verify, verify_all
from tests.support.checkpoints import assert_equal, empty_like, flat_cut, make_state, save, save_ranks, whole

WORLD_SIZE = 3


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Steps 10 and 20 of three ranks."""
    for step in (10, 20):
        save_ranks(
            tmp_path, step, [flat_cut(make_state(step), rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
        )
    return tmp_path


def shard(folder: Path, step: int, rank: int) -> Path:
    return folder / folder_name(step) / shard_name(rank, WORLD_SIZE)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(bytes(data))


def flip_data(folder: Path) -> None:
    flip(shard(folder, 20, 1), -3)


def flip_header(folder: Path) -> None:
    flip(shard(folder, 20, 2), 30)


def truncate(folder: Path) -> None:
    path = shard(folder, 20, 1)
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(folder: Path) -> None:
    with shard(folder, 20, 1).open("ab") as file:
        file.write(b"\0")


def empty_shard(folder: Path) -> None:
    shard(folder, 20, 0).write_bytes(b"")


def lose_shard(folder: Path) -> None:
    shard(folder, 20, 2).unlink()


def shard_in_temporary_folder(folder: Path) -> None:
    # deepspeedai/DeepSpeed#5405: the shard stayed on its node, under a temporary name.
    (folder / "tmp-checkpoint-20").mkdir()
    shutil.move(shard(folder, 20, 2), folder / "tmp-checkpoint-20")


def swap_shards(folder: Path) -> None:
    a, b = shard(folder, 10, 1), shard(folder, 20, 1)
    kept = a.read_bytes()
    shutil.copy(b, a.with_suffix(".new"))
    b.write_bytes(kept)
    a.with_suffix(".new").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / folder_name(20) / MANIFEST).unlink()


def half_manifest(folder: Path) -> None:
    path = folder / folder_name(20) / MANIFEST
    path.write_text(path.read_text()[:200])


def flip_manifest(folder: Path) -> None:
    path = folder / folder_name(20) / MANIFEST
    path.write_text(path.read_text().replace('"sample_ordinal":0', '"sample_ordinal":8'))


def binary_manifest(folder: Path) -> None:
    (folder / folder_name(20) / MANIFEST).write_bytes(b"\xff\xfe\x00")


def older_manifest(folder: Path) -> None:
    shutil.copy(folder / folder_name(10) / MANIFEST, folder / folder_name(20) / MANIFEST)


def no_contents(folder: Path) -> None:
    shutil.rmtree(folder / folder_name(20))
    (folder / folder_name(20)).mkdir()


def manifest_is_a_folder(folder: Path) -> None:
    (folder / folder_name(20) / MANIFEST).unlink()
    (folder / folder_name(20) / MANIFEST).mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_data, ["rank 1", "shard-00001-of-00003", "optim/exp_avg", "checksum"]),
        (flip_header, ["rank 2", "shard-00002-of-00003", "header", "checksum"]),
        (truncate, ["rank 1", "shard-00001-of-00003", "bytes"]),
        (lengthen, ["rank 1", "shard-00001-of-00003", "bytes"]),
        (empty_shard, ["rank 0", "has 0 bytes"]),
        (lose_shard, ["rank 2", "shard-00002-of-00003", "missing"]),
        (shard_in_temporary_folder, ["rank 2", "shard-00002-of-00003", "missing"]),
        (swap_shards, ["rank 1", "checksum"]),
        (lose_manifest, ["manifest.json", "not finished"]),
        (half_manifest, ["manifest.json"]),
        (flip_manifest, ["manifest.json", "checksum"]),
        (binary_manifest, ["manifest.json"]),
        (older_manifest, ["step 10", "step-00000020"]),
        (no_contents, ["manifest.json", "not finished"]),
        (manifest_is_a_folder, ["manifest.json"]),
    ],
)
def test_damage_is_passed_over_with_one_line(
    two: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(two)
    skipped: list[tuple[Path, str]] = []
    ref = find_newest(two, lambda path, reason: skipped.append((path, reason)))
    assert ref is not None
    assert ref.step == 10
    lines = [reason for path, reason in skipped if path.name == folder_name(20)]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    for word in words:
        assert word in lines[0]
    found = empty_like(make_state(10))
    load_into(ref, whole(found))
    assert_equal(found, make_state(10))


def test_every_single_byte_of_a_shard_is_covered(tmp_path: Path) -> None:
    save_ranks(tmp_path, 1, [whole({"model/w": torch.arange(6.0), "optim/step": torch.tensor([1])})])
    path = tmp_path / folder_name(1) / shard_name(0, 1)
    for place in range(path.stat().st_size):
        flip(path, place)
        assert find_newest(tmp_path, lambda *_: None) is None, place
        flip(path, place)
    assert find_newest(tmp_path, lambda *_: None) is not None


def test_foreign_entries_are_named_and_never_taken(two: Path) -> None:
    # vllm-project/speculators#739
    (two / "7").mkdir()
    (two / "notes").mkdir()
    (two / "40").write_text("a file")
    (two / "step-00000050").write_text("a file with a checkpoint's name")
    (two / "step-00000030").mkdir()
    shutil.copytree(two / folder_name(20), two / "step-00000060.bak")
    skipped: dict[str, str] = {}
    ref = find_newest(two, lambda path, reason: skipped.update({path.name: reason}))
    assert ref is not None
    assert ref.step == 20
    assert skipped.keys() == {"7", "notes", "40", "step-00000050", "step-00000030", "step-00000060.bak"}
    assert "not finished" in skipped["step-00000030"]


def test_nothing_to_find(tmp_path: Path) -> None:
    assert find_newest(tmp_path / "missing", lambda *_: None) is None
    assert find_newest(tmp_path, lambda *_: None) is None


def test_damage_met_while_loading_is_an_error(two: Path) -> None:
    ref = open_checkpoint(two / folder_name(20))
    flip_data(two)
    with pytest.raises(CorruptCheckpointError, match=r"rank 1.*checksum"):
        load_into(ref, whole(empty_like(make_state(20))))
    lose_shard(two)
    with pytest.raises(CorruptCheckpointError, match=r"rank 2.*cannot be read"):
        load_into(ref, whole(empty_like(make_state(20))), verify=False)


def test_manifest_text_round_trips(two: Path) -> None:
    manifest = read_manifest(two / folder_name(20))
    assert parse_manifest(manifest.to_text()) == manifest
    assert json.loads(manifest.to_text())["world_size"] == WORLD_SIZE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["shards"].pop(), "ranks"),
        (lambda m: m["shards"][0]["chunks"].pop(), "add up"),
        (lambda m: m["shards"][0]["chunks"][0].__setitem__(1, [99]), "box"),
        (lambda m: m["tensors"].pop("optim/step"), "no shape"),
        (lambda m: m["tensors"].update({"model/other": [[3], "F32"]}), "0 elements"),
        (lambda m: m["tensors"].update({"optim/step": [[1], "C64"]}), "element type"),
        (lambda m: m.update(format_version=2), "format version 2"),
        (lambda m: m.pop("identity"), "not a whole manifest"),
        (lambda m: m["progress"].update(loss=3), "not a whole manifest"),
        (lambda m: m["shards"][0]["chunks"][0].__setitem__(1, ["0"]), "whole numbers"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    two: Path, change: Callable[[dict[str, object]], object], words: str
) -> None:
    import zlib

    body = json.loads((two / folder_name(20) / MANIFEST).read_text())
    body.pop("crc32")
    change(body)
    crc32 = zlib.crc32(json.dumps(body, separators=(",", ":"), sort_keys=True).encode())
    with pytest.raises(CorruptCheckpointError, match=words):
        parse_manifest(json.dumps({**body, "crc32": crc32}))


def test_verify_names_all_damage_and_ls_shows_what_is_there(two: Path) -> None:
    assert verify(two / folder_name(10)).ok
    flip(shard(two, 20, 0), -1)
    flip(shard(two, 20, 1), -1)
    (two / "step-00000030").mkdir()
    bad = verify(two / folder_name(20))
    assert not bad.ok
    assert ["rank 0" in bad.problems[0], "rank 1" in bad.problems[1], len(bad.problems)] == [True, True, 2]
    assert [v.ok for v in verify_all(two)] == [True, False]
    assert json.loads(json.dumps(bad.to_json()))["step"] == 20
    rows = list_checkpoints(two)
    assert [(r.step, r.is_committed, r.note == "") for r in rows] == [
        (10, True, True),
        (20, True, True),
        (30, False, False),
    ]
    with pytest.raises(CheckpointError, match="no folder"):
        list_checkpoints(two / "missing")


def test_verify_finds_values_that_are_not_finite(tmp_path: Path) -> None:
    state = make_state(1)
    state["optim/exp_avg/norm.weight"][3] = float("nan")
    state["optim/exp_avg/norm.weight"][4] = float("inf")
    path = save(tmp_path, 1, state)
    found = verify(path)
    assert found.problems == ("optim/exp_avg/norm.weight has 2 of 11 values that are not finite",)
