"""What the benchmarks share: processes to start and end, figures with their spread, table, JSON line.

Asks no question of its own.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PACKTRAIN = str(Path(sys.executable).with_name("packtrain"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


def child_environment(**more: str) -> dict[str, str]:
    """As a user's shell has it: no cluster inherited, one thread a rank, everything on the loopback."""
    values = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    values.pop("RAY_ADDRESS", None)
    values.setdefault("RAY_AUTH_MODE", "disabled")
    return {**values, **more}


@contextlib.contextmanager
def started(words: Sequence[str], output: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own; nothing of it is left behind, and what it printed is in `output`."""
    with output.open("ab") as out:
        process = subprocess.Popen(
            list(words),
            env=child_environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_tree(process)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to a command of ours, and after a while SIGKILL to it and all that descended from it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def wait_until(
    is_true: Callable[[], bool],
    process: subprocess.Popen[bytes],
    output: Path,
    what: str,
    timeout_s: float = 180.0,
) -> None:
    """Look often; a command that ends first, or takes too long, ends the benchmark with its output."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if process.poll() is not None and not is_true():
            raise SystemExit(f"ended before {what}:\n{output.read_text()[-4000:]}")
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {timeout_s:g} s for {what}:\n{output.read_text()[-4000:]}")
        time.sleep(0.02)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that may still be written to, or not be there yet."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The step lines of metrics.jsonl, as written."""
    return [line for line in json_lines(run_dir / "metrics.jsonl") if "grad_norm" in line]


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    """All ledger events of a run, oldest first."""
    found = [event for path in (run_dir / "ledger").glob("*.jsonl") for event in json_lines(path)]
    return sorted(found, key=lambda event: event["at"])


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def spread(values: Sequence[float], unit: str = "", scale: float = 1.0, digits: int = 2) -> str:
    """Median and, in brackets, smallest and largest."""
    middle, low, high = (f"{f(values) * scale:.{digits}f}" for f in (median, min, max))
    return f"{middle} [{low}..{high}]{' ' + unit if unit else ''}"


def intervals(instants: Sequence[float], n_warm: int) -> list[float]:
    """Between neighbours, the first few left out."""
    return [b - a for a, b in pairwise(instants[n_warm:])]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """One ratio for each pair of neighbours."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def print_json(question: str, goal: float, figures: Mapping[str, Any]) -> None:
    """The one line for machines, with what the machine was doing besides (load average over a minute)."""
    head = {"benchmark": question, "goal": goal, "cpus": os.cpu_count(), "load_1min": os.getloadavg()[0]}
    print(json.dumps({**head, **rounded(figures)}))


def rounded(value: Any) -> Any:
    """Floats to four digits behind the point, inside lists and dicts too."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
