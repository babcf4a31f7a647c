"""The command line in this process: arguments in, exit code and texts out, as a shell would see them."""

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

from service import cli


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def command(*words: str) -> Answer:
    """Run `packtrain WORDS` through its own entry; an exception that it lets through fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["packtrain", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
            code: Any = 0
        except SystemExit as exit_:
            code = exit_.code or 0
    return Answer(code, out.getvalue(), err.getvalue())


def refusal(*words: str) -> list[str]:
    """Lines of the one error that a command ends with: exit code 2, no traceback, no word of a run."""
    answer = command(*words)
    assert answer.code == 2, answer
    assert all(line.startswith("data: ") for line in answer.out.splitlines()), answer
    assert answer.err.startswith("error: "), answer
    assert "Traceback" not in answer.err
    return answer.err.removeprefix("error: ").rstrip("\n").split("\n")
