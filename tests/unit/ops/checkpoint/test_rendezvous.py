"""What a save's decision costs in looks at the store, and what it leaves there."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch._C._distributed_c10d import HashStore

from ops.checkpoint.rendezvous import Decision, Rendezvous

WORLD_SIZE = 8


class CountingStore:
    """A rank's view of a store that all share; counts what is asked of it, polls (adding 0) left out."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.counts: Counter[str] = Counter()

    def add(self, key: str, amount: int) -> int:
        self.counts["add"] += amount != 0
        return int(self._store.add(key, amount))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.counts[name] += 1
        found: Callable[..., Any] = getattr(self._store, name)
        return found


def decide(store: HashStore, busy: set[int], absent: set[int]) -> tuple[list[Decision], list[Counter[str]]]:
    views = [CountingStore(store) for _ in range(WORLD_SIZE)]

    def one(rank: int) -> Decision:
        meeting = Rendezvous(views[rank], "7.0", rank, WORLD_SIZE)  # type: ignore[arg-type]
        return meeting.decide(is_busy=rank in busy, timeout_s=0.5 if absent else 20)

    present = [rank for rank in range(WORLD_SIZE) if rank not in absent]
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        return list(pool.map(one, present)), [view.counts for view in views]


def names_left(store: HashStore) -> list[str]:
    return [
        f"{kind}/{rank}"
        for kind in ("came", "busy")
        for rank in range(WORLD_SIZE)
        if store.check([f"7.0/{kind}/{rank}"])
    ]


def test_a_save_that_goes_costs_rank_zero_no_look_at_each_rank() -> None:
    store = HashStore()
    decisions, counts = decide(store, set(), set())
    assert {d.kind for d in decisions} == {"go"}
    assert counts[0] == {"set": 1, "add": 2, "compare_set": 1, "delete_key": 1}
    assert names_left(store) == []


def test_busy_ranks_are_named_and_leave_nothing_behind() -> None:
    store = HashStore()
    decisions, _ = decide(store, {2, 5}, set())
    assert {(d.kind, d.reason) for d in decisions} == {
        ("busy", "ranks [2, 5] are still writing an earlier save")
    }
    assert [d.is_mine for d in decisions].count(True) == 1
    assert names_left(store) == []


def test_absent_ranks_are_named_and_one_that_comes_late_leaves_nothing_behind() -> None:
    store = HashStore()
    decisions, _ = decide(store, {5}, {1, 3})
    assert {d.kind for d in decisions} == {"absent"}
    assert "ranks [1, 3] did not come" in decisions[0].reason
    late = Rendezvous(store, "7.0", 3, WORLD_SIZE).decide(is_busy=False, timeout_s=20)
    assert (late.kind, late.reason, late.is_mine) == ("absent", decisions[0].reason, False)
    assert names_left(store) == []
