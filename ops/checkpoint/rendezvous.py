"""What the ranks tell each other about one save, through a torch Store. No collective: nobody can hang in it.

A dead or stopped rank costs the others a bounded wait, is named, and leaves the store as usable as
before; a collective that timed out would leave its process group broken. Knows nothing of files.

    <key>/came/<rank>     the rank has entered the save; gone again once it knows the decision
    <key>/busy/<rank>     and is still at work on an earlier one
    <key>/decision        "go:", or "busy:" or "absent:" and why: whoever writes it first has decided
    <key>/folder          rank 0 has made a fresh folder; the value is its token
    <key>/shard/<rank>    {"entry": ...} or {"error": ...}
    <key>/outcome         "committed" or "failed: ..."
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch._C._distributed_c10d import Store

COMMITTED = "committed"
_POLL_S = (0.001, 0.1)
"""First and longest pause between two looks."""


@dataclass(frozen=True)
class Decision:
    """Whether a save takes place: the same kind and reason on all ranks."""

    kind: Literal["go", "busy", "absent"]
    """busy: a rank is still at work on an earlier save; absent: a rank did not come."""
    reason: str
    is_mine: bool
    """It was this rank that decided: the one to speak of it."""


class Rendezvous:
    """One save's exchange; `key` must be new for each save and equal on all ranks."""

    def __init__(self, store: Store, key: str, rank: int, world_size: int) -> None:
        """Nothing is sent yet."""
        self._store, self._key, self._rank, self._world_size = store, key, rank, world_size

    def decide(self, *, is_busy: bool, timeout_s: float) -> Decision:
        """All ranks come, or the save is off for all. Every rank must call it."""
        self._store.set(f"{self._key}/came/{self._rank}", "1")
        if is_busy:
            self._store.set(f"{self._key}/busy/{self._rank}", "1")
            self._store.add(f"{self._key}/n_busy", 1)
        self._store.add(f"{self._key}/n_came", 1)
        deadline = time.monotonic() + timeout_s
        if self._rank == 0:
            if poll(lambda: self._store.add(f"{self._key}/n_came", 0) == self._world_size, deadline):
                wanted = self._go_unless_busy()
            else:
                wanted = self._who_came(timeout_s)
        elif poll(lambda: self._has("decision"), deadline):
            wanted = "go:"
        else:
            wanted = self._who_came(timeout_s)
        decision = self._store.compare_set(f"{self._key}/decision", "", wanted).decode()
        # The decision stays, for those that come late; what it was made from is not needed any more.
        self._store.delete_key(f"{self._key}/came/{self._rank}")
        if is_busy:
            self._store.delete_key(f"{self._key}/busy/{self._rank}")
        # A decision read back equal may be somebody else's equal text: only one rank may speak of it.
        is_mine = decision == wanted and self._store.add(f"{self._key}/n_spoken", 1) == 1
        match decision.partition(":"):
            case ("go" | "busy" | "absent") as kind, _, reason:
                return Decision(kind, reason, is_mine)
            case _:
                raise ValueError(f"{decision!r} is no decision")

    def open_folder(self, token: str) -> None:
        """Rank 0 tells the others that the folder is there, and by which token they know it."""
        self._store.set(f"{self._key}/folder", token)

    def await_folder(self, deadline: float) -> str | None:
        """Token of the folder; None where the save was given up or the time is over."""
        poll(lambda: self._has("folder") or self._has("outcome"), deadline)
        return None if self._has("outcome") or not self._has("folder") else self._text("folder")

    def report(self, value: dict[str, Any]) -> None:
        """Tell rank 0 how this rank's shard went."""
        self._store.set(f"{self._key}/shard/{self._rank}", json.dumps(value, separators=(",", ":")))
        if "error" in value:
            self._store.set(f"{self._key}/failed", "1")
        self._store.add(f"{self._key}/n_reported", 1)

    def await_reports(self, deadline: float) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """Rank 0 waits for all reports, or for the first that is an error.

        Returns:
            The reports by rank, and the ranks that have not reported.
        """
        poll(
            lambda: self._store.add(f"{self._key}/n_reported", 0) == self._world_size or self._has("failed"),
            deadline,
        )
        came = [rank for rank in range(self._world_size) if self._has(f"shard/{rank}")]
        reports = {rank: json.loads(self._text(f"shard/{rank}")) for rank in came}
        return reports, [rank for rank in range(self._world_size) if rank not in reports]

    def close(self, outcome: str) -> None:
        """Rank 0 tells how the save ended and drops what is large."""
        self._store.set(f"{self._key}/outcome", outcome)
        for rank in range(self._world_size):
            self._store.delete_key(f"{self._key}/shard/{rank}")

    def outcome(self, deadline: float) -> str | None:
        """How the save ended; None where the time is over first."""
        return self._text("outcome") if poll(lambda: self._has("outcome"), deadline) else None

    def _go_unless_busy(self) -> str:
        """Training waits for this: no look at each rank unless one of them is busy."""
        if self._store.add(f"{self._key}/n_busy", 0) == 0:
            return "go:"
        busy = [rank for rank in range(self._world_size) if self._has(f"busy/{rank}")]
        return f"busy:ranks {busy} are still writing an earlier save"

    def _who_came(self, timeout_s: float) -> str:
        came = [rank for rank in range(self._world_size) if self._has(f"came/{rank}")]
        missing = [rank for rank in range(self._world_size) if rank not in came]
        return f"absent:ranks {missing} did not come to the save within {timeout_s:g} s, ranks {came} did"

    def _has(self, name: str) -> bool:
        return bool(self._store.check([f"{self._key}/{name}"]))

    def _text(self, name: str) -> str:
        return self._store.get(f"{self._key}/{name}").decode()


def poll(is_true: Callable[[], bool], deadline: float) -> bool:
    """Look until true or past the deadline (monotonic seconds), at growing intervals."""
    pause_s, longest_s = _POLL_S
    while not is_true():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, longest_s)
    return True
