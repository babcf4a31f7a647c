"""One line of a kernel log in any of the forms that it is kept in, taken apart: when, which host, what.

Forms: dmesg with seconds since boot, with wall-clock (-T), with ISO times and facility (-x); records of
/dev/kmsg; pstore's "<6>[...]"; journalctl in all its short forms and as JSON; syslog (BSD and RFC 5424); the
fabric manager's own log. What the text means is not known here.
"""

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime

MONTH_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTHS = {name: i for i, name in enumerate(MONTH_NAMES, 1)}
_MONTH = r"(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d(?:[.,]\d+)?)"
_WEEKDAY = r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) +)?"

_KMSG = re.compile(r"(?P<priority>\d+),\d+,(?P<us>\d+),[^;]*;")
_PRIORITY = re.compile(r"<(?P<priority>\d+)>(?:1 )?")
_FACILITY = re.compile(r"(?:kern|user|daemon|syslog|mail|auth|local\d) *: *(?P<level>[a-z]+) *: *")
_UPTIME = re.compile(r"\[ *(?P<uptime>\d+\.\d+)\]:? ?(?:\[ *[TC]\d+\] ?)?")
_ISO = re.compile(
    rf"\[?{_WEEKDAY}(?P<year>\d{{4}})-(?P<month>\d\d)-(?P<day>\d\d)[T ]{_CLOCK}"
    r" ?(?P<zone>Z|UTC|[A-Z]{3,4}|[+-]\d\d:?\d\d)?\]?\s+"
)
_CTIME = re.compile(
    rf"\[{_WEEKDAY}{_MONTH} +(?P<day>\d+) (?:(?P<year1>\d{{4}}) )?{_CLOCK}"
    r"(?: (?P<year>\d{4}))?\] *"
)
_SYSLOG = re.compile(rf"{_WEEKDAY}{_MONTH} +(?P<day>\d+) (?:(?P<year>\d{{4}}) )?{_CLOCK}(?: [A-Z]{{3,4}})? +")
_UNIX = re.compile(r"(?P<unix>1\d{9}(?:\.\d+)?) +")
_HOST = re.compile(r"(?P<host>[A-Za-z0-9_.:-]+) +(?:kernel|nv-fabricmanager)(?:\[\d+\])?:? (?:- ){0,3}")
_KERNEL = re.compile(r"kernel(?:\[\d+\])?: ")
_LEVELS = ("emerg", "alert", "crit", "err", "warn", "notice", "info", "debug")
_ASSUMED_YEAR = 2000
"""For lines without a year, so that differences between them still hold over 29 February."""


@dataclass(frozen=True)
class KernelRecord:
    """One line, taken apart."""

    text: str
    """Without anything that was in front of it."""
    line: str
    """As it was read, without white space at its end."""
    at: float | None
    """Wall clock, unix seconds; None where the line does not say, or leaves out the year."""
    clock_s: float | None
    """Seconds on the line's own clock (wall, since boot, of an unknown year): for differences only."""
    clock: str
    """Which clock that is: wall, boot or year; empty where there is none."""
    host: str
    level: str
    """emerg to debug; empty where the line does not say."""


def parse_record(line: str, year: int | None = None) -> KernelRecord:
    """Take one line apart; a line in no known form is all text.

    Args:
        line: with or without its line feed. Times without a zone are taken as UTC.
        year: for syslog lines, which leave it out.
    """
    line = line.rstrip()
    found = _from_json(line) if line.startswith("{") else None
    if found is not None:
        return found
    front = _Front()
    rest = line.lstrip("\ufeff")
    if match := _UNIX.match(rest):
        front.at = front.clock_s = float(match["unix"])
        front.clock, rest = "wall", rest[match.end() :]
    while (end := front.take(rest, year)) > 0:
        rest = rest[end:]
    return KernelRecord(rest, line, front.at, front.clock_s, front.clock, front.host, front.level)


@dataclass
class _Front:
    """What stands in front of a line's text, gathered piece by piece."""

    at: float | None = None
    clock_s: float | None = None
    clock: str = ""
    host: str = ""
    level: str = ""

    def take(self, rest: str, year: int | None) -> int:
        """Understand the piece that `rest` begins with; its length, 0 for none."""
        if match := _KMSG.match(rest) or _PRIORITY.match(rest):
            self.level = _LEVELS[int(match["priority"]) & 7]
            if "us" in match.groupdict() and not self.clock:
                self.clock_s, self.clock = int(match["us"]) / 1e6, "boot"
        elif match := _FACILITY.match(rest):
            self.level = match["level"]
        elif match := _UPTIME.match(rest):
            if not self.clock:
                self.clock_s, self.clock = float(match["uptime"]), "boot"
        elif match := _ISO.match(rest) or _CTIME.match(rest) or _SYSLOG.match(rest):
            self._take_date(match, year)
        elif match := _HOST.match(rest) or _KERNEL.match(rest):
            self.host = match.groupdict().get("host") or self.host
        else:
            return 0
        return match.end()

    def _take_date(self, match: re.Match[str], year: int | None) -> None:
        seconds, is_dated = _seconds(match, year)
        if seconds is not None and self.clock != "wall":
            self.clock_s, self.clock = seconds, "wall" if is_dated else "year"
            self.at = seconds if is_dated else None


def _seconds(match: re.Match[str], year: int | None) -> tuple[float | None, bool]:
    """(seconds since 1970, the year is known) of a matched date; None for a date that there is not."""
    part = match.groupdict()
    dated = part.get("year") or part.get("year1") or year
    month = part["month"]
    whole, _, fraction = part["second"].replace(",", ".").partition(".")
    try:
        moment = datetime(
            int(dated or _ASSUMED_YEAR),
            _MONTHS.get(month) or int(month),
            int(part["day"]),
            int(part["hour"]),
            int(part["minute"]),
            min(int(whole), 59),
            tzinfo=UTC,
        )
    except ValueError:
        return None, False
    return moment.timestamp() + float(f"0.{fraction or 0}") - _offset_s(part.get("zone")), dated is not None


def _offset_s(zone: str | None) -> float:
    if not zone or zone[0] not in "+-":
        return 0.0
    digits = zone[1:].replace(":", "")
    seconds = int(digits[:2]) * 3600.0 + int(digits[2:]) * 60.0
    return -seconds if zone[0] == "-" else seconds


def _from_json(line: str) -> KernelRecord | None:
    """A line of `journalctl -o json`."""
    try:
        tree = json.loads(line)
    except ValueError:
        return None
    if not isinstance(tree, dict) or not isinstance(tree.get("MESSAGE"), str):
        return None
    stamp = tree.get("__REALTIME_TIMESTAMP") or tree.get("_SOURCE_REALTIME_TIMESTAMP")
    priority = str(tree.get("PRIORITY", ""))
    at = int(stamp) / 1e6 if isinstance(stamp, str) and stamp.isdigit() else None
    return KernelRecord(
        text=tree["MESSAGE"],
        line=line,
        at=at,
        clock_s=at,
        clock="wall" if at is not None else "",
        host=str(tree.get("_HOSTNAME", "")),
        level=_LEVELS[int(priority)] if priority in tuple("01234567") else "",
    )
