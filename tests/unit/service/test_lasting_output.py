"""Output that nobody reads any more costs lines and nothing else: real pipes, a real full device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service import runner
from service.lasting_output import LastingStream
from tests.support.commands import command

ROOT = Path(__file__).resolve().parents[3]
TALK = """
import logging, sys, typer
from rich.console import Console
from service.lasting_output import lasting_output
with lasting_output():
    assert sys.stdout.encoding and not sys.stdout.isatty()
    for n in range(3000):
        print("a line of print", n)
        typer.echo(f"a line of typer {n}")
        Console().print("a line of rich", n)
        logging.warning("a line of logging %d", n)
    print("the last line", flush=True)
open(sys.argv[1], "w").write("came to its end")
"""


def talk(tmp_path: Path, stdout: int, stderr: int) -> int:
    command = [sys.executable, "-c", TALK, str(tmp_path / "end")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stderr)
    code = process.wait(50)
    assert (tmp_path / "end").read_text() == "came to its end"
    return code


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert talk(tmp_path, writing, writing) == 0
    finally:
        os.close(writing)


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    os.close(ours)
    try:
        assert talk(tmp_path, subprocess.DEVNULL, theirs) == 0
    finally:
        os.close(theirs)


def test_a_full_disk(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        assert talk(tmp_path, full.fileno(), full.fileno()) == 0


def test_what_can_be_read_is_whole(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        assert talk(tmp_path, out.fileno(), subprocess.DEVNULL) == 0
    lines = (tmp_path / "out").read_text().splitlines()
    assert len(lines) == 3 * 3000 + 1
    assert lines[-1] == "the last line"


def test_without_it_a_dead_pipe_ends_the_process() -> None:
    """What the room is for: rich and typer end the process on their own."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", "import typer\nfor n in range(9): typer.echo('x')\nopen('/dev/null')"],
        stdout=writing,
        stderr=subprocess.DEVNULL,
        timeout=50,
        check=False,
    )
    os.close(writing)
    assert done.returncode != 0


SPEC = """\
model: {preset: tiny}
data: {seq_len: 64, sources: [{kind: text, path: corpus.txt}]}
optim: {lr: 3e-4}
train: {steps: 10, global_batch_size: 4, micro_batch_size: 2}
run: {name: one, storage: runs}
"""


def test_runs_and_resumed_runs_print_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def drive(*_: object) -> int:
        seen.append((type(sys.stdout), type(sys.stderr)))
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_connect", lambda *_, **__: None)
    monkeypatch.setattr(runner, "_drive", drive)
    (tmp_path / "corpus.txt").write_text("hello world. " * 2000)
    (tmp_path / "spec.yaml").write_text(SPEC)
    assert command("run", "spec.yaml").code == 0
    state = tmp_path / "runs" / "one" / "run.json"
    state.write_text(state.read_text().replace("RUNNING", "STOPPED"))
    assert command("resume", "one").code == 0
    assert seen == [(LastingStream, LastingStream)] * 2
