"""The coordinator's verdicts and orders, spoken to as shells and the driver do. No Ray, no processes."""

import asyncio
import errno
from pathlib import Path

import pytest

from ops.decision import RESTARTS, Action
from ops.diagnosis.rank_exits import RankExit
from ops.incident import FailureClass, Incident
from ops.ledger import read_ledger
from service import coordinator as coordinator_module
from service import decisions
from service.coordinator import Coordinator
from service.decisions import Nodes
from service.orders import ShellInfo
from service.watch import NodeReport


async def two_ranks(run_dir: Path, budgets: str = "{}") -> Coordinator:
    """A coordinator whose attempt 0 has just started its first generation of two ranks."""
    coordinator = Coordinator(str(run_dir), budgets)
    await coordinator.tell_nodes(Nodes(slots={"10.0.0.1": 2, "10.0.0.2": 2}, n_ranks=2, n_nodes=2))
    await coordinator.begin_attempt(0, 2)
    for rank in range(2):
        await coordinator.join(0, ShellInfo(rank, "10.0.0.1", "id", 1, sees_storage=True))
    return coordinator


async def kinds(coordinator: Coordinator) -> list[str]:
    return [order.kind for order in await coordinator.orders(0, 0)]


def gone(rank: int, exit_code: int) -> RankExit:
    return RankExit(rank=rank, node="10.0.0.1", at=1.0, exit_code=exit_code)


def test_a_killed_rank_takes_its_generation_with_it_and_the_next_one_starts(run_dir: Path) -> None:
    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        await coordinator.report_exit(0, 0, gone(1, -9), "")
        assert await kinds(coordinator) == ["start", "kill"]
        await coordinator.report_exit(0, 0, gone(0, -9), "")
        assert await kinds(coordinator) == ["start", "kill", "start"]
        await coordinator.report_exit(0, 0, gone(0, -9), "")  # of a generation that is over: not heard
        assert await kinds(coordinator) == ["start", "kill", "start"]

    asyncio.run(play())


def test_storage_that_cannot_be_read_is_no_reason_to_leave_the_ranks_without_a_verdict(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(_folder: Path) -> int | None:
        raise OSError(errno.ESTALE, "Stale file handle")

    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        await coordinator.report_exit(0, 0, gone(1, -9), "")
        assert await kinds(coordinator) == ["start", "kill"]

    monkeypatch.setattr(decisions, "newest_committed_step", stale)
    (run_dir / "metrics.jsonl").mkdir()  # reading it is an error as well
    asyncio.run(play())
    assert [event.fields["action"] for event in read_ledger(run_dir)] == ["RESTART_RANKS"]


def test_abandoning_an_attempt_does_not_change_how_it_has_ended(run_dir: Path) -> None:
    async def play(n_finished: int) -> str:
        coordinator = await two_ranks(run_dir)
        for rank in range(n_finished):
            await coordinator.report_exit(0, 0, gone(rank, 0), "finished")
        await coordinator.abandon()
        assert "end" in await kinds(coordinator)
        return (await coordinator.outcome()).kind

    assert asyncio.run(play(2)) == "finished"
    assert asyncio.run(play(1)) == "stopped"


def test_a_stop_request_reaches_a_generation_that_starts_after_it(run_dir: Path) -> None:
    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        await coordinator.report_exit(0, 0, gone(1, -9), "")
        await coordinator.request_stop()
        await coordinator.report_exit(0, 0, gone(0, -9), "")
        assert await kinds(coordinator) == ["start", "kill", "terminate", "start", "terminate"]

    asyncio.run(play())


PREEMPTED = Incident(FailureClass.PREEMPTION, "node 10.0.0.1", "drained", 3, 1.0, 1.0)


def test_ranks_that_go_on_save_and_leave_before_a_new_attempt(run_dir: Path) -> None:
    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        decision = await coordinator.report_finding(PREEMPTED)
        assert (decision.action, decision.at_checkpoint) == (Action.RESTART_WITHOUT_NODE, True)
        assert await kinds(coordinator) == ["start", "terminate"]
        again = await coordinator.report_finding(PREEMPTED)
        assert again.action is Action.OBSERVE
        for rank in range(2):
            await coordinator.report_exit(0, 0, gone(rank, 0), "stopped")
        outcome = await coordinator.outcome()
        assert (outcome.kind, outcome.decision) == ("stopped", decision)

    asyncio.run(play())


def test_a_rank_that_dies_while_it_is_to_leave_ends_the_attempt_and_the_node_stays_left(
    run_dir: Path,
) -> None:
    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        await coordinator.report_finding(PREEMPTED)
        await coordinator.report_exit(0, 0, gone(0, -9), "")
        outcome = await coordinator.outcome()
        assert outcome.decision is not None
        assert (outcome.kind, outcome.decision.exclude) == ("failed", ("10.0.0.1",))
        assert await kinds(coordinator) == ["start", "terminate", "kill", "end"]

    asyncio.run(play())


def test_ranks_that_do_not_leave_in_time_are_ended_as_they_are(run_dir: Path) -> None:
    async def play() -> None:
        coordinator = await two_ranks(run_dir, budgets='{"stop_grace_s": 0.05}')
        decision = await coordinator.report_finding(PREEMPTED)
        await asyncio.sleep(0.2)
        assert await kinds(coordinator) == ["start", "terminate", "end"]
        assert (await coordinator.outcome()).decision == decision

    asyncio.run(play())


def test_what_is_only_told_leaves_the_ranks_alone(run_dir: Path) -> None:
    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        full = Incident(FailureClass.STORAGE, "storage", "disk full", 3, 1.0, 1.0)
        assert (await coordinator.report_finding(full)).action is Action.PAGE
        assert await kinds(coordinator) == ["start"]
        broken = Incident(FailureClass.GPU_HARDWARE, "rank 1 (node 10.0.0.1)", "Xid 79", 3, 1.0, 1.0)
        assert (await coordinator.report_finding(broken)).action in RESTARTS
        assert await kinds(coordinator) in (["start", "kill"], ["start", "end"])

    asyncio.run(play())


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_lost_peer_on_a_node_that_is_silent_is_left_to_who_sees_nodes(
    is_heard: bool, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "EVIDENCE_WINDOW_S", 0.1)

    async def play() -> None:
        coordinator = Coordinator(str(run_dir), "{}")
        coordinator._watch.reports_every_s = 0.05
        await coordinator.begin_attempt(0, 2)
        for rank in range(2):
            await coordinator.join(0, ShellInfo(rank, f"10.0.0.{rank}", "id", 1, sees_storage=True))
        for node in ("10.0.0.0", "10.0.0.1"):
            await coordinator.report_node(NodeReport(0, node))
        victim = RankExit(0, "10.0.0.0", 1.0, 1, error_type="builtins.RuntimeError", from_communication=True)
        await coordinator.report_exit(0, 0, victim, "")
        for _ in range(20):
            await asyncio.sleep(0.02)
            if is_heard:
                await coordinator.report_node(NodeReport(0, "10.0.0.1"))
        told = [event.text("class") for event in read_ledger(run_dir) if event.kind == "incident"]
        assert told == (["network"] if is_heard else [])
        lost = Incident(FailureClass.NODE_LOST, "node 10.0.0.1", "heartbeats", 3, 1.0, 1.0)
        await coordinator.record_incident(lost)
        await asyncio.sleep(0.5)
        incidents = [event for event in read_ledger(run_dir) if event.kind == "incident"]
        assert [one.text("class") for one in incidents] == [*told, "node_lost"]

    asyncio.run(play())
