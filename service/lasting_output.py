"""Standard output and error that cannot end a run: dead pipe, closed terminal, full disk cost lines only.

A run lives for days and its driver prints all along, so whoever reads must be able to go away. What is lost
to them is in the run folder. Not for short commands: those should fail where nobody can read them.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_COMES_BACK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})
"""Troubles that pass: later lines may be written again. A pipe or a terminal that is gone stays gone."""


class LastingStream:
    """A text stream whose writes never raise OSError."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream` as long as that works."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or lose the text."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flush, or lose what was waiting."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def settle(self) -> None:
        """Write or lose all that is waiting, so that Python's own last flush cannot fail."""
        try:
            self._stream.flush()
        except OSError:
            self._to_nowhere()

    def __getattr__(self, name: str) -> Any:
        """Everything else (encoding, isatty, fileno, buffer ...) is the stream's own."""
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        if error.errno not in _COMES_BACK:
            self._to_nowhere()

    def _to_nowhere(self) -> None:
        """Put /dev/null in the place of the file: the stream still holds what it could not write."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):  # a stream without a file
            os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Make sys.stdout and sys.stderr last for the length of a with-block."""
    before = sys.stdout, sys.stderr
    lasting = [LastingStream(stream) for stream in before]
    sys.stdout, sys.stderr = cast(list[TextIO], lasting)
    try:
        yield
    finally:
        for stream in lasting:
            stream.settle()
        sys.stdout, sys.stderr = before
