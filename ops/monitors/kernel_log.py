"""New lines of the kernel's log: /dev/kmsg, or a file that syslog writes, across rotation and truncation.

What a line means is said by the parser that is handed in. Lines from before the first check are not told.
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ops.signal import Signal

MAX_BYTES_A_CHECK = 4 << 20
"""A flood is read on at the next check; training's node is not to be busy with its log."""
MAX_LINE_BYTES = 64 << 10
RECORD_BYTES = 16 << 10
MARK_BYTES = 256

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
        self._follower: _Kmsg | _File | None = None

    def is_supported(self) -> bool:
        """The log is there and may be read (in containers /dev/kmsg often may not)."""
        try:
            is_device = stat.S_ISCHR(self._path.stat().st_mode)
            self._follower = _Kmsg(self._path) if is_device else _File(self._path)
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


class _Kmsg:
    """One record a read; the kernel keeps our place, also while its ring goes round."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                self.close()
                raise

    def new_lines(self) -> list[str]:
        lines: list[str] = []
        n_bytes = 0
        while n_bytes < MAX_BYTES_A_CHECK:
            try:
                record = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # The ring overwrote what we had not read; the next is there.
                    continue
                raise
            if not record:
                break
            n_bytes += len(record)
            # What follows the first line of a record are its fields (" SUBSYSTEM=pci"), not messages.
            lines.append(record.split(b"\n", 1)[0].decode("utf-8", "replace"))
        return lines

    def close(self) -> None:
        os.close(self._fd)


class _File:
    """A text file that is appended to, renamed away, or cut and written anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._inode = os.fstat(self._fd).st_ino
        self._offset = os.fstat(self._fd).st_size
        self._mark = self._read_mark()
        self._rest = b""

    def new_lines(self) -> list[str]:
        if os.fstat(self._fd).st_size < self._offset or self._read_mark() != self._mark:
            self._offset, self._rest = 0, b""  # Cut, and perhaps longer again than it was.
        content = self._read_on(MAX_BYTES_A_CHECK)
        if len(content) < MAX_BYTES_A_CHECK and self._take_successor():
            # The old file gets no more lines: what it ended with is a line.
            content += (b"\n" if self._rest or content else b"") + self._read_on(MAX_BYTES_A_CHECK)
        self._mark = self._read_mark()
        *lines, self._rest = (self._rest + content).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]

    def _take_successor(self) -> bool:
        """Open the file that now has the name, where it is another one."""
        try:
            if self._path.stat().st_ino == self._inode:
                return False
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False  # Renamed away and its successor not there yet.
        os.close(self._fd)
        self._fd, self._offset = fd, 0
        self._inode = os.fstat(fd).st_ino
        return True

    def _read_on(self, n_bytes: int) -> bytes:
        content = os.pread(self._fd, n_bytes, self._offset)
        self._offset += len(content)
        return content

    def _read_mark(self) -> bytes:
        """What stands before our place: another text there means another file under the same inode."""
        n_bytes = min(MARK_BYTES, self._offset)
        return os.pread(self._fd, n_bytes, self._offset - n_bytes)

    def close(self) -> None:
        os.close(self._fd)
