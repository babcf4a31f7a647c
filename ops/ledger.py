"""What happened in a run, on disk: the ledger's events and each step's metrics, as append-only JSON lines.

One writer a file, one write() a line: whatever kills a process, at most its last line is torn, and readers
pass over it. Non-finite figures are written as the strings "nan", "inf" and "-inf", which is plain JSON.

Does not decide anything and draws nothing: goodput.py counts the seconds, report.py sums up.
"""

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.events import EvalRecord, StepRecord

LEDGER_DIR = "ledger"
"""Folder in the run folder: one `<writer>.jsonl` a writer."""
METRICS_FILE = "metrics.jsonl"

UNSYNCED_KINDS = frozenset({"checkpoint_blocked", "checkpoint_skipped", "digests", "signal", "agent_joined"})
"""Kinds that are frequent or cheap to lose: written without fsync. All others are on disk after write()."""

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Event:
    """One line of the ledger."""

    at: float
    """Wall-clock instant, Unix seconds."""
    kind: str
    writer: str
    """Name of the file's writer: supervisor, coordinator, rank-00000, ..."""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def integer(self, name: str, default: int = 0) -> int:
        """A field as an int; `default` where it is absent or is no number."""
        value = self.fields.get(name)
        return int(value) if isinstance(value, int | float) and math.isfinite(value) else default

    def seconds(self, name: str, default: float = 0.0) -> float:
        """A field as a finite float; `default` where it is absent or is no finite number."""
        value = self.fields.get(name)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else default

    def text(self, name: str, default: str = "") -> str:
        """A field as text; `default` where it is absent or None."""
        value = self.fields.get(name)
        return default if value is None else str(value)


def plain_value(value: Any) -> Any:
    """A value that JSON can hold: non-finite floats become "nan", "inf", "-inf", other types their str()."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_value(item) for item in value]
    return str(value)


def number(value: Any) -> float | None:
    """A figure of metrics.jsonl as a float, the strings "nan", "inf", "-inf" included; None for all else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return _NON_FINITE.get(value) if isinstance(value, str) else None


class JsonLinesWriter:
    """Appends JSON objects to one file, one write() a line. Never raises; safe between threads.

    A full disk must not end a run: lines that could not be written whole are counted in `n_lost`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.n_lost = 0
        """Lines that could not be written (disk full, folder gone)."""
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._is_torn = False

    def append(self, line: Mapping[str, Any], *, sync: bool = False) -> bool:
        """Append one object. Blocks on the disk (with `sync` until it is on the medium).

        Returns:
            False when the line was lost.
        """
        data = json.dumps(plain_value(line), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            try:
                whole = self._write(data)
                if whole and sync and self._fd is not None:
                    os.fsync(self._fd)
            except OSError:
                whole = False
            self.n_lost += not whole
            return whole

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _write(self, data: bytes) -> bool:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._fd).st_size
            self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        if self._is_torn:  # half a line was left by a full disk or a killed writer: keep ours apart from it
            data = b"\n" + data
        written = os.write(self._fd, data)
        self._is_torn = written < len(data) if written else self._is_torn
        return written == len(data)


class LedgerWriter(JsonLinesWriter):
    """Writes the events of one writer to `<run>/ledger/<writer>.jsonl`."""

    def write(self, kind: str, *, at: float | None = None, **fields: Any) -> bool:
        """Append one event, stamped with the wall clock unless `at` (Unix seconds) is given.

        Returns:
            False when the line was lost (disk full); the run must go on all the same.
        """
        stamp = time.time() if at is None else at
        return self.append({"at": stamp, "kind": kind, **fields}, sync=kind not in UNSYNCED_KINDS)


class MetricsWriter(JsonLinesWriter):
    """Writes metrics.jsonl: one line a step and one an evaluation. Rank 0 only."""

    def __init__(self, path: str | os.PathLike[str], attempt: int, generation: int) -> None:
        super().__init__(path)
        self._who = {"attempt": attempt, "generation": generation}

    def write_step(self, record: StepRecord, *, at: float | None = None, **more: Any) -> bool:
        """Append one step; `tokens_per_s` is this step's valid tokens over this step's time.

        Args:
            record: the step.
            at: Unix seconds of the step's end; None takes the wall clock.
            more: further figures of the same step (mfu_frac, tflops_per_rank, memory_bytes, ...).

        Returns:
            False when the line was lost.
        """
        line = {"at": time.time() if at is None else at, **self._who, **record.to_json()}
        if record.step_time_s > 0:
            line["tokens_per_s"] = record.n_tokens / record.step_time_s
        return self.append({**line, **more})

    def write_eval(self, record: EvalRecord, *, at: float | None = None) -> bool:
        """Append one evaluation. Returns False when the line was lost."""
        fields = {
            "step": record.step,
            "loss": record.loss,
            "n_tokens": record.n_tokens,
            "eval_time_s": record.eval_time_s,
        }
        return self.append({"kind": "eval", "at": time.time() if at is None else at, **self._who, **fields})


class Tail:
    """Reads the complete new lines of one JSON-lines file; the file may not exist yet."""

    def __init__(self, path: str | os.PathLike[str], offset_bytes: int = 0) -> None:
        self.path = Path(path)
        self.offset_bytes = offset_bytes
        """Bytes consumed: everything before is done with. Keep it to go on later."""
        self.n_bad_lines = 0

    def read(self, max_bytes: int = 4 << 20) -> list[dict[str, Any]]:
        """The objects of the lines that were completed since the last call, about `max_bytes` at most.

        A line that is no JSON object is counted in `n_bad_lines` and passed over; a last line without its
        newline is left for the next call.
        """
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.offset_bytes:
                    self.offset_bytes = 0  # the file was replaced by a shorter one
                file.seek(self.offset_bytes)
                data = file.read(max_bytes)
                if len(data) == max_bytes and b"\n" not in data:
                    data += file.readline()
        except OSError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self.offset_bytes += len(data)
        objects = []
        for line in data.split(b"\n"):
            if line.strip():
                parsed = _parse(line)
                if parsed is None:
                    self.n_bad_lines += 1
                else:
                    objects.append(parsed)
        return objects


class LedgerTail:
    """Reads the new events of all writers of a run, those that appear later included."""

    def __init__(
        self, run_dir: str | os.PathLike[str], offsets_bytes: Mapping[str, int] | None = None
    ) -> None:
        self._dir = Path(run_dir) / LEDGER_DIR
        self._tails = {name: Tail(self._dir / name, offset) for name, offset in (offsets_bytes or {}).items()}

    @property
    def offsets_bytes(self) -> dict[str, int]:
        """Bytes consumed of each file, by file name."""
        return {name: tail.offset_bytes for name, tail in self._tails.items()}

    def read(self) -> list[Event]:
        """The events that were written since the last call, by time."""
        for path in _ledger_files(self._dir):
            self._tails.setdefault(path.name, Tail(path))
        found = [_event(line, tail.path.stem) for tail in self._tails.values() for line in tail.read()]
        return sorted((event for event in found if event is not None), key=lambda event: event.at)


def read_ledger(run_dir: str | os.PathLike[str]) -> list[Event]:
    """All events of a run, of all writers, by time (those of one writer and instant in the order written)."""
    events = []
    for path in _ledger_files(Path(run_dir) / LEDGER_DIR):
        for line in _read_lines(path):
            event = _event(line, path.stem)
            if event is not None:
                events.append(event)
    return sorted(events, key=lambda event: event.at)


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl in the order written, "nan", "inf" and "-inf" turned back into floats."""
    return [
        {
            key: _NON_FINITE.get(value, value) if isinstance(value, str) else value
            for key, value in line.items()
        }
        for line in _read_lines(Path(run_dir) / METRICS_FILE)
    ]


def _ledger_files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("*.jsonl"))
    except OSError:
        return []


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete objects, and a last one that lacks only its newline."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    parsed = (_parse(line) for line in data.split(b"\n") if line.strip())
    return [line for line in parsed if line is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _event(line: dict[str, Any], writer: str) -> Event | None:
    at, kind = number(line.get("at")), line.get("kind")
    if at is None or not math.isfinite(at) or not isinstance(kind, str):
        return None
    fields = {key: value for key, value in line.items() if key not in ("at", "kind")}
    return Event(at=at, kind=kind, writer=writer, fields=fields)
