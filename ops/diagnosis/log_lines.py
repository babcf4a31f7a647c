"""A line of a log, taken apart: who printed it and when, and what it says without the prefixes.

Knows the prefixes of Ray, torchrun, torch, Slurm, MPI, syslog, dmesg, klog, Kubernetes' JSON and Python's
logging. Judges nothing.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z| ?[+-]\d\d:?\d\d)?"
_PREFIXES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"\((?:[^()]*\b(?:pid|ip)=[^()]*|raylet|gcs_server|autoscaler[^()]*)\)\s*(?:\[repeated[^\]]*\]\s*)?",
        r"\[(?:rank|default|Rank )(?P<rank>\d+)\]:?\s?",
        r"\[\d+,(?P<mpi_rank>\d+)\]<std(?:err|out)>:\s?",
        r"(?P<slurm_rank>\d{1,5}): (?=\S)",
        rf"\[?(?P<at>{_STAMP})\]?[:,]?\s*(?:std(?:out|err) [FP] )?",
        r"kern  ?:\w+ *: (?=\S)",
        r"\d+,\d+,\d+,\S*;",
        r"\[(?:[A-Z][a-z]{2} ){2} ?\d+ \d\d:\d\d:\d\d \d{4}\]\s*",
        r"\[ *\d+\.\d{3,}\]\s*",
        r"[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d (?P<host>[\w.-]+) (?=[\w./-]+(?:\[\d+\])?: )",
        r"kernel: ?",
        r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+\] ?",
        r"\[(?P<bracket_level>INFO|DEBUG|WARN|WARNING|ERROR|CRITICAL|FATAL|TRACE|info|debug|error)\s*\]\s*"
        r"(?:[-:] )?",
        r"(?P<level>INFO|DEBUG|WARNING|ERROR|CRITICAL|FATAL|TRACE)\s+(?:\S+:\d+ )?(?:-+|:|\|)\s*",
        r"\[[\w./-]+\.py:\d+(?::\w+)?\]\s*",
        r"\[[A-Z] [^\]]{0,120}\]\s*",
        r"\s*what\(\):\s+",
    )
)
_RANK: Final = re.compile(r"\b(?:[Rr]ank|RANK)[ =:]+(\d+)\b|\[rank(\d+)\]|[(\[]Rank (\d+)[)\]]")
_RAY_NODE: Final = re.compile(r"\bip=([\w.:]+)")
_FRAME: Final = re.compile(r'^\s+File "([^"]+)", line \d+(?:, in (\S+))?')
_RICH_BOX: Final = re.compile(r"^\s*[\u2500-\u257f]")
"""A traceback as rich draws it: source in a box."""
_CARETS: Final = re.compile(r"^\s+[\^~]+\s*$")
TRACEBACK: Final = "Traceback (most recent call last)"
MAX_LINE_CHARS: Final = 8192
"""What is longer is cut: nobody's failure needs more, and regular expressions are slow on megabytes."""


@dataclass(frozen=True)
class LogLine:
    """One line."""

    number: int
    """From 1."""
    raw: str
    """As it was read, without its line end."""
    body: str
    """Without prefixes; indentation kept."""
    rank: str = ""
    node: str = ""
    at: str = ""
    """Wall clock as printed, in a form that sorts; empty where there is none."""
    level: str = ""
    frames: tuple[str, ...] = ()
    """File:function of each frame of the traceback that this line ends, outermost first."""
    is_code: bool = False
    """A line of source quoted in a traceback: says nothing about what happened."""


def split_line(number: int, raw: str) -> LogLine:
    """One line without its neighbours."""
    text = _ANSI.sub("", raw[:MAX_LINE_CHARS]).rstrip("\r\n")
    if text.startswith("{") and text.endswith("}"):
        text = _message_of(text)
    found: dict[str, str] = {}
    node = ""
    if (match := _RAY_NODE.search(text, 0, 200)) is not None:
        node = match[1]
    body = _without_prefixes(text, found)
    rank = found.get("rank") or found.get("mpi_rank") or found.get("slurm_rank") or ""
    if not rank and (match := _RANK.search(text)) is not None:
        rank = next(group for group in match.groups() if group)
    at = found.get("at", "").replace("T", " ").replace(",", ".")
    level = (found.get("level") or found.get("bracket_level") or "").upper()
    return LogLine(number, raw.rstrip("\r\n"), body, rank, node or found.get("host", ""), at, level)


def _without_prefixes(text: str, found: dict[str, str]) -> str:
    """The text after all prefixes; what they say goes into `found`."""
    for _ in range(8):
        for prefix in _PREFIXES:
            if (match := prefix.match(text)) is not None and match.end():
                for name, value in match.groupdict().items():
                    if value:
                        found.setdefault(name, value)
                text = text[match.end() :]
                break
        else:
            return text
    return text


def _message_of(text: str) -> str:
    """The message of a line of JSON, as log shippers write them; the line itself where it is none."""
    try:
        tree = json.loads(text)
    except ValueError:
        return text
    for key in ("log", "message", "msg", "MESSAGE", "text", "event"):
        if isinstance(tree, dict) and isinstance(tree.get(key), str):
            return str(tree[key]).rstrip("\n")
    return text


def split_log(lines: Iterable[str]) -> Iterator[LogLine]:
    """Lines with what their neighbours say about them: source quoted in tracebacks, files of a traceback."""
    frames: list[str] = []
    in_traceback = False
    after_frame = False
    for number, raw in enumerate(lines, start=1):
        line = split_line(number, raw)
        for part in line.body.split("\n"):
            if TRACEBACK in part:
                in_traceback, after_frame, frames = True, False, []
                yield _part(line, part)
            elif in_traceback and (frame := _FRAME.match(part)) is not None:
                frames.append(f"{frame[1]}:{frame[2] or ''}")
                after_frame = True
                yield _part(line, part, is_code=True)
            elif in_traceback and ((after_frame and part[:2].isspace()) or _CARETS.match(part)):
                after_frame = False
                yield _part(line, part, is_code=True)
            elif in_traceback and part.strip() and not part[:1].isspace():
                yield _part(line, part, frames=tuple(frames))
                in_traceback = after_frame = False
            else:
                yield _part(line, part, is_code=_RICH_BOX.match(part) is not None)


def _part(line: LogLine, body: str, *, frames: tuple[str, ...] = (), is_code: bool = False) -> LogLine:
    """One of the lines that a line of JSON held; in all other cases the line itself."""
    raw = line.raw if line.body == body else body
    return LogLine(line.number, raw, body, line.rank, line.node, line.at, line.level, frames, is_code)
