"""The coordinator's verdicts and orders, spoken to as shells and the driver do. No Ray, no processes."""

import asyncio
import errno
from pathlib import Path

import pytest

from ops.diagnosis.rank_exits import RankExit
from ops.ledger import read_ledger
from service import coordinator as coordinator_module
from service.coordinator import Coordinator, ShellInfo


async def two_ranks(run_dir: Path) -> Coordinator:
    """A coordinator whose attempt 0 has just started its first generation of two ranks."""
    coordinator = Coordinator(str(run_dir), "{}")
    await coordinator.begin_attempt(0, 2)
    for rank in range(2):
        await coordinator.join(0, ShellInfo(rank, "10.0.0.1", "id", 1, sees_storage=True))
    return coordinator


async def kinds(coordinator: Coordinator) -> list[str]:
    return [order.kind for order in await coordinator.orders(0, 0)]


def gone(rank: int, exit_code: int) -> RankExit:
    return RankExit(rank=rank, node="10.0.0.1", at=1.0, exit_code=exit_code)


def test_a_killed_rank_takes_its_generation_with_it_and_the_next_one_starts(tmp_path: Path) -> None:
    async def play() -> None:
        coordinator = await two_ranks(tmp_path)
        await coordinator.report_exit(0, 0, gone(1, -9), "")
        assert await kinds(coordinator) == ["start", "kill"]
        await coordinator.report_exit(0, 0, gone(0, -9), "")
        assert await kinds(coordinator) == ["start", "kill", "start"]
        await coordinator.report_exit(0, 0, gone(0, -9), "")  # of a generation that is over: not heard
        assert await kinds(coordinator) == ["start", "kill", "start"]

    asyncio.run(play())


def test_storage_that_cannot_be_read_is_no_reason_to_leave_the_ranks_without_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(_folder: Path) -> int | None:
        raise OSError(errno.ESTALE, "Stale file handle")

    async def play() -> None:
        coordinator = await two_ranks(tmp_path)
        await coordinator.report_exit(0, 0, gone(1, -9), "")
        assert await kinds(coordinator) == ["start", "kill"]

    monkeypatch.setattr(coordinator_module, "newest_committed_step", stale)
    (tmp_path / "metrics.jsonl").mkdir()  # reading it is an error as well
    asyncio.run(play())
    assert [event.fields["action"] for event in read_ledger(tmp_path)] == ["RESTART_RANKS"]


def test_abandoning_an_attempt_does_not_change_how_it_has_ended(tmp_path: Path) -> None:
    async def play(n_finished: int) -> str:
        coordinator = await two_ranks(tmp_path)
        for rank in range(n_finished):
            await coordinator.report_exit(0, 0, gone(rank, 0), "finished")
        await coordinator.abandon()
        assert "end" in await kinds(coordinator)
        return (await coordinator.outcome()).kind

    assert asyncio.run(play(2)) == "finished"
    assert asyncio.run(play(1)) == "stopped"


def test_a_stop_request_reaches_a_generation_that_starts_after_it(tmp_path: Path) -> None:
    async def play() -> None:
        coordinator = await two_ranks(tmp_path)
        await coordinator.report_exit(0, 0, gone(1, -9), "")
        await coordinator.request_stop()
        await coordinator.report_exit(0, 0, gone(0, -9), "")
        assert await kinds(coordinator) == ["start", "kill", "terminate", "start", "terminate"]

    asyncio.run(play())
