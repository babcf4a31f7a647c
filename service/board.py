"""Where ranks put what rank 0 reads later: beside the step, nobody waits for anybody.

A key of the generation's store a rank, topic and step; rank 0 takes them once all are there. Small values
only. A rank that dies leaves its place empty, and then that step is never read.
"""

import json
from typing import Any

from torch._C._distributed_c10d import Store


class Board:
    """One rank's place at the store."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        """A connection of its own: nobody else's waiting at the store holds up a step.

        Args:
            store: of this generation, with a prefix that nobody else uses.
            rank: this one.
            world_size: ranks that post.
        """
        self._store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it
        self._rank, self._world_size = rank, world_size

    def post(self, topic: str, step: int, value: Any) -> None:
        """Leave a JSON value for rank 0."""
        text = json.dumps(value, separators=(",", ":"))
        self._store.set(f"{topic}/{step}/{self._rank}", text)

    def collect(self, topic: str, step: int) -> list[Any] | None:
        """What all ranks left, in rank order, and take it away; None while some have not yet. Rank 0."""
        keys = [f"{topic}/{step}/{rank}" for rank in range(self._world_size)]
        if not self._store.check(keys):
            return None
        values = [json.loads(text) for text in self._store.multi_get(keys)]
        for key in keys:
            self._store.delete_key(key)
        return values
