"""The coordinator from a hang, or a death with a cause, to orders: evidence first. No Ray, no processes."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from ops.diagnosis.rank_exits import RankExit
from ops.ledger import read_ledger
from ops.signal import Entity, EntityKind, Signal
from service import coordinator as coordinator_module
from service import witness
from service.coordinator import Coordinator
from service.monitor_runner import SwitchedOff
from service.orders import ShellInfo
from service.watch import NodeReport
from tests.support.simulated_ranks import box

NODE = "10.0.0.1"


async def two_ranks(run_dir: Path, budgets: str = "{}") -> Coordinator:
    coordinator = Coordinator(str(run_dir), budgets)
    await coordinator.begin_attempt(0, 2)
    for rank in range(2):
        await coordinator.join(0, ShellInfo(rank, NODE, "id", 1, sees_storage=True))
    return coordinator


async def kinds(coordinator: Coordinator) -> list[str]:
    return [order.kind for order in await coordinator.orders(0, 0)]


def stuck(age_s: float, *late: int) -> NodeReport:
    """Both ranks in their sixth step, for so long; some have called fewer collectives."""
    boxes = [box(rank, collective=5 if rank in late else 6, first_step_s=1.0) for rank in range(2)]
    return NodeReport(0, NODE, tuple((one, age_s) for one in boxes))


def gone(rank: int, exit_code: int) -> RankExit:
    return RankExit(rank=rank, node=NODE, at=time.time(), exit_code=exit_code)


def found(rank: int, state: str = "S") -> witness.Testimony:
    return witness.Testimony(rank, state, f"stacks of rank {rank}", has_dump=False)


def incidents(run_dir: Path) -> list[dict[str, object]]:
    return [dict(event.fields) for event in read_ledger(run_dir) if event.kind == "incident"]


def test_evidence_is_taken_before_the_kill_and_exits_meanwhile_start_nothing(run_dir: Path) -> None:
    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        await coordinator.report_node(stuck(1.0))
        assert await kinds(coordinator) == ["start"]
        await asyncio.sleep(1.0)  # one look a second
        judged = asyncio.create_task(coordinator.report_node(stuck(1e4, 1)))
        await asyncio.sleep(0.05)
        assert await kinds(coordinator) == ["start", "witness"]
        await coordinator.report_node(stuck(1e4, 1))  # it is being seen to
        await coordinator.report_exit(0, 0, gone(0, 1), "")
        await coordinator.report_exit(0, 0, gone(1, -9), "")
        assert await kinds(coordinator) == ["start", "witness"]
        for rank in range(2):
            await coordinator.report_testimony(0, 0, found(rank))
        await judged
        assert await kinds(coordinator) == ["start", "witness", "kill", "start"]

    asyncio.run(play())
    (incident,) = incidents(run_dir)
    assert (incident["class"], incident["culprit"]) == ("hang", f"rank 1 (node {NODE})")
    assert "stacks of rank 1" in str(incident["evidence"])
    assert incident["detector"] == "collective_hang"


def test_shells_that_say_nothing_do_not_keep_the_verdict(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "WITNESS_LIMIT_S", 0.1)

    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        judged = asyncio.create_task(coordinator.report_node(stuck(1e4)))
        await asyncio.sleep(0.02)
        await coordinator.report_testimony(0, 0, found(0, "T"))
        await judged
        assert await kinds(coordinator) == ["start", "witness", "kill"]

    asyncio.run(play())
    assert [one["culprit"] for one in incidents(run_dir)] == [f"rank 0 (node {NODE})"]


def test_where_hangs_are_only_observed_it_is_said_once_and_nobody_is_killed(run_dir: Path) -> None:
    async def play() -> None:
        coordinator = await two_ranks(run_dir, '{"observe": ["collective_hang"]}')
        await coordinator.report_node(stuck(1e4))
        await asyncio.sleep(1.0)
        await coordinator.report_node(stuck(1e4))
        assert await kinds(coordinator) == ["start"]

    asyncio.run(play())
    assert len(incidents(run_dir)) == 1


class FakeAgent:
    """Answers as an actor's handle does."""

    def __init__(self, signals: list[Signal], wait_s: float = 0.0) -> None:
        self.check_urgent = self
        self._signals, self._wait_s = signals, wait_s

    async def remote(self) -> list[Signal]:
        await asyncio.sleep(self._wait_s)
        return self._signals


@pytest.mark.parametrize(("wait_s", "expected"), [(0.0, "host_out_of_memory"), (30.0, "worker_killed")])
def test_agents_are_asked_why_a_rank_died_and_a_slow_one_is_not_waited_for(
    wait_s: float, expected: str, run_dir: Path
) -> None:
    entity = Entity(EntityKind.NODE, NODE)
    kill = Signal(time.time(), "cgroup_memory", "oom_kill", entity, 1.0, "oom_kill rose by 1")

    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        await coordinator.join_agent(0, "id", FakeAgent([kill], wait_s))
        begun = time.monotonic()
        await coordinator.report_exit(0, 0, gone(1, -9), "")
        assert time.monotonic() - begun < 5.0
        await coordinator.report_exit(0, 0, gone(0, -9), "")
        assert await kinds(coordinator) == ["start", "kill", "start"]

    asyncio.run(play())
    assert [one["class"] for one in incidents(run_dir)] == [expected]


def test_what_agents_tell_is_written_down(run_dir: Path) -> None:
    down = Signal(5.0, "nics", "nic_down", Entity(EntityKind.LINK, "eth0", NODE), None, "eth0 is down")

    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        off = SwitchedOff("disks", "RuntimeError: boom")
        await coordinator.report_node(NodeReport(0, NODE, signals=(down,), switched_off=(off,)))
        await coordinator.report_node(NodeReport(7, NODE, signals=(down,)))  # of another attempt
        assert await coordinator.nodes(0) == ("id",)

    asyncio.run(play())
    events = {event.kind: event.fields for event in read_ledger(run_dir)}
    assert events["monitor_off"]["reason"] == "RuntimeError: boom"
    assert [event.kind for event in read_ledger(run_dir)].count("signal") == 1
    assert events["signal"]["signal"] == "nic_down"


def test_ranks_that_go_on_while_evidence_is_taken_are_left_alone(run_dir: Path) -> None:
    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        judged = asyncio.create_task(coordinator.report_node(stuck(1e4, 1)))
        await asyncio.sleep(0.05)
        line = {"step": 900, "loss": 1.0, "grad_norm": 1.0, "attempt": 0, "generation": 0, "at": 1.0}
        (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        for rank in range(2):
            await coordinator.report_testimony(0, 0, found(rank))
        await judged
        assert await kinds(coordinator) == ["start", "witness"]

    asyncio.run(play())
    assert incidents(run_dir) == []


def test_a_rank_that_cannot_be_ended_is_left_behind(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a device: SIGKILL takes effect when the device answers, which may be never."""
    monkeypatch.setattr("service.coordinator.REAP_LIMIT_S", 0.05)

    async def play() -> None:
        coordinator = await two_ranks(run_dir)
        await coordinator.report_exit(0, 0, gone(0, -9), "")
        assert await kinds(coordinator) == ["start", "kill"]
        await asyncio.sleep(0.3)
        assert await kinds(coordinator) == ["start", "kill", "end"]
        outcome = await coordinator.outcome()
        assert outcome.kind == "failed"
        assert outcome.decision is not None
        assert outcome.decision.action != "RESTART_RANKS"

    asyncio.run(play())
    assert [one["culprit"] for one in incidents(run_dir)][1:] == [f"rank 1 (node {NODE})"]
