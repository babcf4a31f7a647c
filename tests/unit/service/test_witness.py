"""Stacks of real processes that cannot answer: asleep, stopped, holding the interpreter's lock, gone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service.witness import DUMP_LIMIT_S, dump_path, process_state, stacks_path, take_stacks, take_testimony


@contextmanager
def program(text: str) -> Iterator[int]:
    """A process that says "x" when it is where it is wanted."""
    code = f"import ctypes, os, time\ndef stuck_here():\n    os.write(1, b'x')\n    {text}\nstuck_here()\n"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"
        time.sleep(0.1)
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    "text", ["time.sleep(60)", "ctypes.PyDLL(None).sleep(60)", "[0 for _ in iter(int, 1)]"]
)
def test_stacks_of_a_process_that_does_not_move(text: str, tmp_path: Path) -> None:
    with program(text) as pid:
        dump_path(tmp_path, 3).touch()
        found = take_testimony(3, pid, tmp_path)
        assert process_state(pid) in "SR"  # it goes on as before
    assert "stuck_here" in found.stacks
    assert found.has_dump
    assert "stuck_here" in stacks_path(tmp_path, 3).read_text()


def test_a_stopped_process_is_told_and_stays_stopped(tmp_path: Path) -> None:
    with program("time.sleep(60)") as pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)
        begun = time.monotonic()
        found = take_testimony(0, pid, tmp_path / "made")
        assert time.monotonic() - begun < DUMP_LIMIT_S  # it can write nothing: nobody waits for that
        assert (found.state, process_state(pid)) == ("T", "T")
    assert "stuck_here" in found.stacks
    assert not found.has_dump


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    with program("time.sleep(60)") as pid:
        pass
    assert process_state(pid) == ""
    for gone in (pid, None):
        found = take_testimony(0, gone, tmp_path)
        assert (found.state, found.has_dump) == ("", False)
        assert "gone" in found.stacks
    assert "py-spy" in take_stacks(pid, "S")


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with program("time.sleep(60)") as pid:
        assert "stuck_here" in take_testimony(0, pid, tmp_path / "file").stacks
