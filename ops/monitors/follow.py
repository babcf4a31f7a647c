"""New lines of a log that others write, from when it is opened. Knows nothing of what they mean."""

import errno
import os
from pathlib import Path

MAX_BYTES_A_CHECK = 4 << 20
"""A flood is read on at the next call: training's node is not to be busy with its logs."""
MAX_LINE_BYTES = 64 << 10
RECORD_BYTES = 16 << 10
MARK_BYTES = 256


class RecordFollower:
    """A device that gives one record a read; the kernel keeps our place, also while its ring goes round."""

    def __init__(self, path: Path) -> None:
        """Open it at its end.

        Raises:
            OSError: it may not be read.
        """
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                self.close()
                raise

    def new_lines(self) -> list[str]:
        """The first line of each record since the last call."""
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
        """Let go of it."""
        os.close(self._fd)


class FileFollower:
    """A text file that is appended to, renamed away, or cut and written anew."""

    def __init__(self, path: Path) -> None:
        """Open it at its end.

        Raises:
            OSError: it may not be read.
        """
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._inode = os.fstat(self._fd).st_ino
        self._offset = os.fstat(self._fd).st_size
        self._mark = self._read_mark()
        self._rest = b""

    def new_lines(self) -> list[str]:
        """Whole lines since the last call, without their ends."""
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
        """Let go of it."""
        os.close(self._fd)
