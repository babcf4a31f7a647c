"""New lines of the kernel's log: /dev/kmsg, or a file that syslog writes, across rotation and truncation.

What a line means is said by the parser that is handed in. Lines from before the first check are not told.
"""

import stat
from collections.abc import Callable
from pathlib import Path

from ops.monitors.follow import FileFollower, RecordFollower
from ops.signal import Signal

ParseLine = Callable[[str, float], Signal | None]


class KernelLogMonitor:
    """Follows the kernel's log and tells what the parser makes of each new line."""

    name = "kernel_log"

    def __init__(self, path: Path, parse_line: ParseLine) -> None:
        """Remember what to follow; opened by is_supported, which also fixes where "new" begins.

        Args:
            path: a character device that gives one record a read (/dev/kmsg), or a text file.
            parse_line: (line, now) -> signal, or None for a line of no interest. Records of /dev/kmsg are
                handed over whole, with their "level,sequence,microseconds,flags;" in front.
        """
        self._path = path
        self._parse_line = parse_line
        self._follower: RecordFollower | FileFollower | None = None

    def is_supported(self) -> bool:
        """The log is there and may be read (in containers /dev/kmsg often may not)."""
        try:
            is_device = stat.S_ISCHR(self._path.stat().st_mode)
            self._follower = RecordFollower(self._path) if is_device else FileFollower(self._path)
        except OSError:
            return False
        return True

    def check(self, now: float) -> list[Signal]:
        """Signals of the lines since the last check, in their order."""
        if self._follower is None and not self.is_supported():
            return []
        assert self._follower is not None
        found = (self._parse_line(line, now) for line in self._follower.new_lines() if line)
        return [signal for signal in found if signal is not None]

    def close(self) -> None:
        """Let go of the open file."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None
