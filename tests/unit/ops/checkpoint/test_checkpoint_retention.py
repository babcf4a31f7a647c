from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ops.checkpoint.layout import committed_steps, list_steps
from ops.checkpoint.retention import apply_retention, plan_retention
from tests.support.checkpoints import make_state, save


def test_steps_are_compared_as_numbers() -> None:
    # huggingface/transformers#27138
    assert plan_retention([9800, 9900, 10000, 10100], 2, (), newest_good=10100) == [9800, 9900]


def test_a_fresh_run_in_a_used_folder_loses_neither_its_own_nor_the_others() -> None:
    # huggingface/transformers#37260
    assert plan_retention([100, 500, 600, 700], 2, (), newest_good=100) == []


def test_pins_and_unknown_newest() -> None:
    assert plan_retention([1, 2, 3, 4], 1, {2}, newest_good=4) == [1, 3]
    assert plan_retention([1, 2, 3, 4], 1, (), newest_good=None) == []


@given(
    steps=st.sets(st.integers(0, 10**6), min_size=1, max_size=12),
    keep_last=st.integers(1, 5),
    pinned=st.sets(st.integers(0, 10**6), max_size=3),
    data=st.data(),
)
def test_the_newest_good_one_is_never_deleted(
    steps: set[int], keep_last: int, pinned: set[int], data: st.DataObject
) -> None:
    newest_good = data.draw(st.sampled_from(sorted(steps)))
    doomed = plan_retention(steps, keep_last, pinned, newest_good)
    kept = steps - set(doomed)
    assert newest_good in kept
    assert not set(doomed) & pinned
    assert all(step < newest_good for step in doomed)
    past = sorted(step for step in steps if step <= newest_good)
    assert set(past[-keep_last:]) <= kept
    assert doomed == sorted(step for step in past[:-keep_last] if step not in pinned)


def test_applied_to_real_folders_foreign_entries_stay(tmp_path: Path) -> None:
    state = make_state(1)
    for step in (9, 10, 100):
        save(tmp_path, step, state)
    for torn in ("step-00000050", "step-00000200"):
        (tmp_path / torn).mkdir()
        (tmp_path / torn / "shard-00000-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / "7").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    removed = apply_retention(tmp_path, 2, (), newest_good=100)
    assert [p.name for p in removed] == ["step-00000009", "step-00000050"]
    assert committed_steps(tmp_path) == [10, 100]
    assert list_steps(tmp_path) == [10, 100, 200]
    assert (tmp_path / "7").is_dir()
    assert (tmp_path / "notes.txt").read_text() == "mine"
