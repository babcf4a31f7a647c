"""Real runs for tests: the command line in its own process, its processes found by title, ended by pid."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "jobs" / "specs" / "tiny.yaml"
MARK = "PACKTRAIN_TEST_RUN"


def command_environment(**more: str) -> dict[str, str]:
    """As a user's shell would have it, with Ray's authentication set and no cluster inherited."""
    values = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RAY_ADDRESS", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        values.pop(name, None)
    return {**values, **more}


def packtrain(*arguments: str, cwd: Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        cwd=cwd,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@dataclass
class LiveRun:
    """A run that is under way, in a session of its own."""

    process: subprocess.Popen[str]
    run_dir: Path
    output: Path
    mark: str
    """All that the driver starts inherits it as MARK."""
    own: set[psutil.Process] = field(default_factory=set)
    """All that were seen: each is its pid and its start, since pids are given anew."""

    def wait(self, timeout_s: float = 240.0) -> int:
        """Exit code of the driver."""
        return self.process.wait(timeout_s)

    def text(self) -> str:
        """All that the driver printed so far."""
        return self.output.read_text()

    def metrics(self) -> list[dict[str, Any]]:
        """Whole step lines of metrics.jsonl, in the order in which they were written."""
        path = self.run_dir / "metrics.jsonl"
        return [line for line in _json_lines(path) if "grad_norm" in line]

    def last_step(self) -> int:
        """Last step in metrics.jsonl."""
        lines = self.metrics()
        return int(lines[-1]["step"]) if lines else 0

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Ledger events of one kind, oldest first."""
        paths = (self.run_dir / "ledger").glob("*.jsonl")
        found = [event for path in paths for event in _json_lines(path) if event["kind"] == kind]
        return sorted(found, key=lambda event: event["at"])

    def until(self, is_true: Callable[[], bool], what: str, timeout_s: float = 150.0) -> None:
        """Wait for something of the run; fails with the driver's output when it does not come."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}; the driver printed:\n{self.text()[-6000:]}")
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        """Wait until a step is completed."""
        self.until(lambda: self.last_step() >= step, f"step {step}")

    def processes(self) -> list[psutil.Process]:
        """The driver, everything that descends from it, and what has lost its parent meanwhile."""
        found = {process for process in psutil.process_iter() if _mark_of(process) == self.mark}
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.process.pid)
            found |= {driver, *driver.children(recursive=True)}
        self.own |= found
        return sorted(found, key=lambda process: process.pid)

    def pid_of(self, *marks: str) -> int:
        """Pid of the process whose title holds all the marks."""
        titles = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                titles.append(" ".join(process.cmdline()))
                if all(mark in titles[-1] for mark in marks):
                    return process.pid
        raise AssertionError(f"no process with {marks} among {titles}")

    def end(self) -> None:
        """End the driver and all that descends from it, and nobody who has one of their pids by now.

        Fails where something of the run stays for good.
        """
        self.processes()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        for process in self.own:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)
        left = self._left_behind()
        for process in left:
            process.kill()
        assert not left, f"the run is over and these are left: {left}"

    def _left_behind(self, limit_s: float = 40.0) -> list[psutil.Process]:
        """What carries the run's mark and does not go by itself, whoever its parent is now."""
        deadline = time.monotonic() + limit_s
        while left := [process for process in psutil.process_iter() if _mark_of(process) == self.mark]:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.2)
        return []


@contextlib.contextmanager
def live_run(
    tmp_path: Path,
    name: str,
    *overrides: str,
    spec: Path = SPEC,
    flags: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[LiveRun]:
    """Start `packtrain run` below tmp_path; whatever happens, nothing of it is left at the end.

    A `prefix` is put before the command line: it may lead into another namespace.
    """
    storage = tmp_path / "runs"
    words = [str(spec), "--set", f"run.storage={storage}", "--set", f"run.name={name}"]
    with _started(tmp_path, ["run", *words, *_sets(overrides), *flags], storage / name, env, prefix) as run:
        yield run


@contextlib.contextmanager
def resumed_run(
    tmp_path: Path,
    name: str,
    *overrides: str,
    flags: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[LiveRun]:
    """Start `packtrain resume` of a run that live_run began."""
    storage = tmp_path / "runs"
    words = ["resume", name, "--storage", str(storage), *_sets(overrides), *flags]
    with _started(tmp_path, words, storage / name, env, prefix) as run:
        yield run


def shard_checksums(run_dir: Path, step: int) -> list[list[int]]:
    """Checksums of all saved chunks: equal ones are bitwise equal weights, moments and counters."""
    manifest = json.loads((run_dir / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
    return [[row[5] for row in shard["chunks"]] for shard in manifest["shards"]]


@contextlib.contextmanager
def _started(
    tmp_path: Path,
    words: list[str],
    run_dir: Path,
    env: dict[str, str] | None,
    prefix: Sequence[str],
) -> Iterator[LiveRun]:
    mark = f"{run_dir.name}-{words[0]}-{time.monotonic_ns()}"
    output = tmp_path / f"{mark}.txt"
    with output.open("w") as out:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "service", *words],
            cwd=tmp_path,
            env=command_environment(**{**(env or {}), MARK: mark}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    run = LiveRun(process, run_dir, output, mark)
    try:
        yield run
    finally:
        run.end()


def _mark_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(MARK)
    return None


def _sets(overrides: tuple[str, ...]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # the last line may be half written
            found.append(json.loads(line))
    return found
