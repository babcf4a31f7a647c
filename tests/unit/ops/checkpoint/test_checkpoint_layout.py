from pathlib import Path

import pytest

from ops.checkpoint import layout
from ops.checkpoint.fingerprint import differing_keys


@pytest.mark.parametrize("step", [0, 1, 20, 99_999_999, 100_000_000, 12_345_678_901])
def test_name_and_step_are_inverse(step: int) -> None:
    assert layout.step_of(layout.folder_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["7", "step-7", "step-0000007", "step-000000070 ", "step-0100000000", "xstep-00000007",
     "step-00000007.tmp", "step-0000000\u0667", "step--0000007", "notes", ""],
)  # fmt: skip
def test_only_exact_names_are_checkpoints(name: str) -> None:
    assert layout.step_of(name) is None


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    steps = [9900, 10000, 99_999_999, 100_000_000]
    for step in [10000, 100_000_000, 9900, 99_999_999]:
        (tmp_path / layout.folder_name(step)).mkdir()
    assert layout.list_steps(tmp_path) == steps
    assert layout.newest_committed_step(tmp_path) is None
    for step in (9900, 10000):
        (tmp_path / layout.folder_name(step) / layout.MANIFEST).touch()
    assert layout.committed_steps(tmp_path) == [9900, 10000]
    assert layout.newest_committed_step(tmp_path) == 10000


def test_a_missing_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert layout.list_steps(tmp_path / "none") == []
    assert layout.foreign_entries(tmp_path / "none") == []


def test_foreign_entries_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "step-00000010").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "7").mkdir()
    (tmp_path / "step-00000040").write_text("a file")
    assert [p.name for p in layout.foreign_entries(tmp_path)] == ["7", "notes", "step-00000040"]


def test_differing_keys_are_named_with_both_values() -> None:
    saved, wanted = (
        '{"rope_theta": 1e4, "d": 8, "s": {"factor": 2}}',
        '{"rope_theta": 5e5, "d": 8, "s": null}',
    )
    assert differing_keys(saved, wanted) == [
        "rope_theta is 10000.0 in the checkpoint and 500000.0 in this run",
        "s.factor is 2 in the checkpoint and absent in this run",
    ]
    assert differing_keys(saved, saved) == []
    assert "'x'" in differing_keys("x", "y")[0]
