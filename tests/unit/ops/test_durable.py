"""Small files that outlive a power cut, and a full disk that leaves the old one in place."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.durable import describe_os_error, write_atomically
from ops.tracking.cursor import Cursor, load_cursor, save_cursor
from service.run_store import RUNNING, RunState, write_state


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is made durable, in order: of a folder its path and the names in it then, of a file its text."""
    found: list[str] = []
    real = os.fsync

    def record(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        found_now = f"{path}: {sorted(p.name for p in path.iterdir())}" if path.is_dir() else path.read_text()
        found.append(found_now)
        real(handle)

    monkeypatch.setattr(os, "fsync", record)
    return found


def test_the_bytes_are_durable_before_the_name_is_and_the_name_before_the_return(
    tmp_path: Path, synced: list[str]
) -> None:
    file = tmp_path / "state.json"
    file.write_text("old")
    write_atomically(file, "new")
    assert synced == ["new", f"{tmp_path}: ['state.json']"]
    assert file.read_text() == "new"


def write_cursor(run_dir: Path) -> None:
    save_cursor(run_dir / "tracking" / "mlflow.json", Cursor(mlflow_uri="http://x", run_uid="one"))


def write_run_state(run_dir: Path) -> None:
    write_state(run_dir, RunState(run_dir.name, RUNNING, 1.0))


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_run_state, ["{}: ['run.json']"]),
        (write_cursor, ["{}: ['tracking']", "{}/tracking: ['mlflow.json']"]),
    ],
)
def test_run_state_and_tracking_cursor_outlive_a_power_cut(
    tmp_path: Path, synced: list[str], write: Callable[[Path], None], expected: list[str]
) -> None:
    write(tmp_path)
    folders = [text for text in synced if text.startswith("/")]
    assert folders == [text.format(tmp_path) for text in expected]
    assert len(synced) == len(folders) + 1
    if write is write_cursor:
        assert load_cursor(tmp_path / "tracking" / "mlflow.json", "http://x").run_uid == "one"


def test_without_room_the_old_file_stays_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(OSError, match="File too large"):
            write_atomically(file, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    assert file.read_text() == "old"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EDQUOT, "quota"),
        (errno.ENOSPC, "no space"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission"),
        (errno.EIO, "input/output"),
        (errno.ESTALE, "stale"),
    ],
)
def test_causes_are_told_apart(code: int, words: str) -> None:
    # open-mmlab/mmdetection#12069: a quota is not a full disk.
    text = describe_os_error(OSError(code, "x"))
    assert words in text
    assert f"errno {code}" in text
    assert ("no space" in text) == (code == errno.ENOSPC)
