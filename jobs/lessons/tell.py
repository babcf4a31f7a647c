"""How a rank of a lesson speaks. Does not print: whoever started the ranks puts their lines in order."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Tell:
    """One rank's voice. All ranks give the same titles in the same order; lines are their own."""

    method: str
    """As in `[data_parallelism] Rank 0: ...`."""
    rank: int
    send: Callable[[str, str], None]
    """(kind, text); kind is "title" or "line"."""

    def title(self, text: str) -> None:
        """Begin a part of the lesson; shown once for all ranks."""
        self.send("title", text)

    def line(self, text: str) -> None:
        """Say something as this rank."""
        self.send("line", f"[{self.method}] Rank {self.rank}: {text}")

    def first(self, text: str) -> None:
        """Say something that is the same for all ranks: only rank 0 does."""
        if self.rank == 0:
            self.send("line", f"  {text}")
