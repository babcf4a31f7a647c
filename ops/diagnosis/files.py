"""Files in, verdicts out: logs of any kind, kernel logs, and flight recorder dumps of one hang.

Tells the kinds apart by what is in the files. Each file gets its own verdict, dumps of one folder share
theirs, and one verdict is made of everything together.
"""

import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jobs.errors import PacktrainError
from ops.diagnosis.evidence import NOTHING, classify_line, in_window, progress_lines, weigh
from ops.diagnosis.flight_dump import DumpError, read_dump
from ops.diagnosis.flight_recorder import diagnose_dumps
from ops.diagnosis.log_lines import LogLine, split_log
from ops.diagnosis.pattern import Registry
from ops.diagnosis.text_classifier import Finding, find_all, tells
from ops.diagnosis.verdict import UNKNOWN_ENTITY, Verdict
from ops.signal import Entity, EntityKind

_RANK_IN_NAME: Final = re.compile(r"rank[-_ ]?0*(\d+)", re.IGNORECASE)
_PICKLE: Final = b"\x80"
_GZIP: Final = b"\x1f\x8b"
MAX_FILE_BYTES: Final = 1 << 30
"""Of a longer log only the end is read: that is where it failed."""


@dataclass(frozen=True)
class FileVerdict:
    """What one file, or one line of it, says."""

    file: str
    verdict: Verdict
    line: int = 0
    """From 1; 0 for the whole file."""
    is_root: bool = False
    """The verdict on all files together rests on this one."""

    def to_json(self) -> dict[str, Any]:
        """As `packtrain diagnose --json` prints it."""
        verdict = self.verdict
        told: dict[str, Any] = {
            "file": self.file,
            "class": verdict.failure_class.value,
            "role": verdict.role.value,
            "culprit": str(verdict.culprit).strip(),
            "action": verdict.action,
            "confidence": verdict.confidence,
            "evidence": verdict.evidence,
            "runbook": verdict.runbook,
            "advice": verdict.advice,
            "pattern": verdict.pattern,
        }
        return told | ({"line": self.line} if self.line else {"is_root": self.is_root})


@dataclass(frozen=True)
class Diagnosis:
    """What all files say."""

    files: tuple[FileVerdict, ...]
    together: Verdict


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and those below the folders named, in their order.

    Raises:
        PacktrainError: one is not there, or a folder holds no file.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            below = sorted(p for p in path.rglob("*") if p.is_file())
            if not below:
                raise PacktrainError(f"{path}: the folder holds no file")
            found += below
        elif path.is_file():
            found.append(path)
        else:
            raise PacktrainError(f"{path}: no such file or folder")
    return found


def diagnose_files(paths: Sequence[Path], registry: Registry) -> Diagnosis:
    """One verdict for each file, and one for all together.

    Raises:
        PacktrainError: a file cannot be read.
    """
    dumps: dict[Path, list[Path]] = {}
    for path in paths:
        if is_dump(path):
            dumps.setdefault(path.parent, []).append(path)
    shared = {folder: _of_dumps(group) for folder, group in dumps.items()}
    everything: list[Finding] = []
    rows: list[FileVerdict] = []
    for path in paths:
        if path in dumps.get(path.parent, ()):
            verdict = shared[path.parent]
            found = [Finding(LogLine(0, verdict.evidence, verdict.evidence), verdict, yields=True)]
        else:
            found = _findings(path, registry)
            verdict = weigh(found)
        everything += found
        rows.append(FileVerdict(str(path), verdict))
    together = weigh(everything)
    is_root = [bool(together.evidence) and row.verdict.evidence == together.evidence for row in rows]
    marked = (
        FileVerdict(row.file, row.verdict, is_root=root) for row, root in zip(rows, is_root, strict=True)
    )
    return Diagnosis(tuple(marked), together)


def diagnose_lines(path: Path, registry: Registry) -> list[FileVerdict]:
    """One verdict for each line of a log, each taken alone but for tracebacks, whose source is nobody's word.

    Raises:
        PacktrainError: the file cannot be read.
    """
    if is_dump(path):
        return [FileVerdict(str(path), _of_dumps([path]))]
    lines = read_lines(path)
    quoted = {line.number for line in split_log(lines) if line.body.strip() and not tells(line)}
    origin = origin_of(path)
    return [
        FileVerdict(
            str(path), NOTHING if number in quoted else classify_line(line, registry, origin), line=number
        )
        for number, line in enumerate(lines, start=1)
    ]


def is_dump(path: Path) -> bool:
    """The file is a flight recorder dump: a pickle, or JSON that reads as one."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
        if head[:1] != _PICKLE and head.lstrip()[:1] != b"{":
            return False
        read_dump(path)
    except DumpError:
        return head[:1] == _PICKLE
    except OSError as error:
        raise PacktrainError(f"{path}: cannot be read: {error}") from error
    return True


def read_lines(path: Path) -> list[str]:
    """The lines of a log, plain or gzip; what is not UTF-8 is shown as such."""
    try:
        with path.open("rb") as file:
            if file.read(2) == _GZIP:
                file.seek(0)
                with gzip.open(file) as unpacked:
                    raw = unpacked.read(MAX_FILE_BYTES)
            else:
                file.seek(max(0, path.stat().st_size - MAX_FILE_BYTES))
                raw = file.read(MAX_FILE_BYTES)
    except (OSError, EOFError) as error:
        raise PacktrainError(f"{path}: cannot be read: {error}") from error
    return raw.decode("utf-8", errors="replace").splitlines()


def origin_of(path: Path) -> Entity:
    """Whose log it is, by its name."""
    match = _RANK_IN_NAME.search(path.name)
    return Entity(EntityKind.RANK, match[1]) if match else UNKNOWN_ENTITY


def _findings(path: Path, registry: Registry) -> list[Finding]:
    lines = read_lines(path)
    return in_window(find_all(lines, registry, origin_of(path)), progress_lines(lines))


def _of_dumps(paths: Sequence[Path]) -> Verdict:
    try:
        return diagnose_dumps(paths)
    except ValueError as error:
        raise PacktrainError(f"{paths[0].parent}: flight recorder dumps: {error}") from error
