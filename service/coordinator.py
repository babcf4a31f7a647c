"""One actor a run: hears how ranks end, decides (by ops.policy) and tells every shell what to do next.

    shells --join / report_store / report_exit / report_reaped--> Coordinator --orders (long poll)--> shells
    driver --begin_attempt / request_stop / outcome-------------> Coordinator

A generation is one set of rank processes. When a rank fails, the others of its generation are killed, and
once every shell has reaped its rank the next generation is forked: nothing of the old one can meet the new
one. Orders of an attempt are one growing list; a shell asks for those after the last that it has seen, so
none is lost or repeated. It holds no tensors and runs no training; new attempts are the supervisor's.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jobs.spec.job import ResilienceSection
from ops.checkpoint.layout import CHECKPOINTS_DIR, newest_committed_step
from ops.decision import Action
from ops.diagnosis.rank_exits import RankExit, diagnose
from ops.incident import Incident
from ops.ledger import LedgerWriter
from ops.policy import PastIncident, decide
from service.lifetime import end_with_raylet
from service.run_store import last_step

EVIDENCE_WINDOW_S = 2.0
"""How long to wait for the exit that explains a broken connection before the connection itself is blamed."""


@dataclass(frozen=True)
class Order:
    """What every shell of the attempt must do now."""

    kind: Literal["start", "store", "kill", "terminate", "end"]
    generation: int
    address: tuple[str, int] | None = None
    """With "store": host and port of the generation's TCPStore."""


@dataclass(frozen=True)
class ShellInfo:
    """Where a shell runs."""

    rank: int
    node: str
    node_id: str
    shell_pid: int
    sees_storage: bool
    """The driver's token in the run folder could be read back on this node."""


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended, as far as ranks and shells could tell."""

    kind: Literal["running", "finished", "stopped", "failed"]
    error: str = ""
    incident: Incident | None = None


@dataclass
class _Generation:
    number: int
    rank_pids: dict[int, int] = field(default_factory=dict)
    exits: dict[int, RankExit] = field(default_factory=dict)
    reaped: set[int] = field(default_factory=set)
    outcomes: dict[int, str] = field(default_factory=dict)
    is_closed: bool = False
    """Its verdict has been given: later exits are those that we caused."""


@dataclass
class _Attempt:
    number: int
    world_size: int
    generation: _Generation = field(default_factory=lambda: _Generation(0))
    shells: dict[int, ShellInfo] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    outcome: AttemptOutcome = field(default_factory=lambda: AttemptOutcome("running"))


class Coordinator:
    """The actor's class (made an actor by the supervisor): every method is a coroutine on one event loop."""

    def __init__(self, run_dir: str, budgets_json: str) -> None:
        """Start without an attempt."""
        end_with_raylet()
        self._run_dir = Path(run_dir)
        self._budgets = ResilienceSection.model_validate_json(budgets_json)
        self._ledger = LedgerWriter(self._run_dir / "ledger" / "coordinator.jsonl")
        self._changed = asyncio.Condition()
        self._attempt = _Attempt(-1, 0)
        self._history: list[tuple[Incident, Action, int | None]] = []
        self._is_stopping = False
        self._judge: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ driver

    async def begin_attempt(self, number: int, world_size: int) -> None:
        """Forget the last attempt's shells and expect `world_size` new ones."""
        async with self._changed:
            self._attempt = _Attempt(number, world_size)
            self._changed.notify_all()

    async def request_stop(self) -> None:
        """Have every rank save and leave at the same step."""
        self._is_stopping = True
        await self._order(Order("terminate", self._attempt.generation.number))

    async def abandon(self) -> None:
        """Kill the ranks and let the shells return. An attempt that has ended already stays as it ended."""
        if self._attempt.outcome.kind == "running":
            self._close(AttemptOutcome("stopped"))
        await self._order(Order("end", self._attempt.generation.number))

    async def outcome(self) -> AttemptOutcome:
        """How the current attempt stands."""
        return self._attempt.outcome

    async def processes(self) -> dict[int, dict[str, Any]]:
        """Node, shell pid and rank pid by rank."""
        pids = self._attempt.generation.rank_pids
        return {
            rank: {
                "node": shell.node,
                "node_id": shell.node_id,
                "shell_pid": shell.shell_pid,
                "rank_pid": pids.get(rank),
            }
            for rank, shell in self._attempt.shells.items()
        }

    async def record_incident(self, incident: Incident) -> tuple[Action, str]:
        """Decide about an incident that the supervisor saw (the attempt is over: no shell is left).

        Returns:
            The action taken and the reason.
        """
        return self._decide(incident, shells_alive=False)

    # ------------------------------------------------------------------ shells

    async def join(self, attempt: int, shell: ShellInfo) -> None:
        """A shell is ready to fork. The last one to come starts the first generation."""
        async with self._changed:  # begin_attempt may still be on its way
            await self._changed.wait_for(lambda: attempt <= self._attempt.number)
        if attempt != self._attempt.number:
            return
        shells = self._attempt.shells
        shells[shell.rank] = shell
        if len(shells) < self._attempt.world_size:
            return
        blind = sorted({s.node for s in shells.values() if not s.sees_storage})
        if blind:
            self._close(
                AttemptOutcome(
                    "failed",
                    f"run.storage is not shared: {self._run_dir} as the driver writes it is not seen by node "
                    f"{', '.join(blind)}; mount the same storage on every node",
                )
            )
            await self._order(Order("end", 0))
        else:
            await self._start_generation(0)

    async def orders(self, attempt: int, seen: int) -> list[Order]:
        """Orders after the first `seen`, waiting for one; a shell of an older attempt is told to end."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: attempt != self._attempt.number or len(self._attempt.orders) > seen
            )
            if attempt != self._attempt.number:
                return [Order("end", -1)]
            return self._attempt.orders[seen:]

    async def report_store(self, attempt: int, generation: int, host: str, port: int) -> None:
        """Rank 0 of a generation listens here."""
        if self._is_current(attempt, generation):
            await self._order(Order("store", generation, (host, port)))

    async def report_forked(self, attempt: int, generation: int, rank: int, pid: int) -> None:
        """A rank process runs."""
        if self._is_current(attempt, generation):
            pids = self._attempt.generation.rank_pids
            pids[rank] = pid
            if len(pids) == self._attempt.world_size:
                self._ledger.write("ranks_started", attempt=attempt, generation=generation)

    async def report_exit(self, attempt: int, generation: int, rank_exit: RankExit, outcome: str) -> None:
        """A rank process is gone and reaped. `outcome` is its last word: "finished", "stopped" or empty."""
        if not self._is_current(attempt, generation):
            return
        current = self._attempt.generation
        current.exits[rank_exit.rank] = rank_exit
        current.reaped.add(rank_exit.rank)
        if not rank_exit.is_failure:
            current.outcomes[rank_exit.rank] = outcome
        if current.is_closed:
            await self._start_next_when_reaped()
        elif len(current.outcomes) == self._attempt.world_size:
            kind: Literal["finished", "stopped"] = "finished" if outcome == "finished" else "stopped"
            self._close(AttemptOutcome(kind))
            await self._order(Order("end", generation))
        elif rank_exit.is_failure and not rank_exit.is_victim:
            await self._judge_generation()
        elif rank_exit.is_failure and self._judge is None:
            self._judge = asyncio.get_running_loop().create_task(self._judge_later(current))

    # ------------------------------------------------------------------ inside

    def _is_current(self, attempt: int, generation: int) -> bool:
        return attempt == self._attempt.number and generation == self._attempt.generation.number

    async def _judge_later(self, generation: _Generation) -> None:
        await asyncio.sleep(EVIDENCE_WINDOW_S)
        self._judge = None
        if generation is self._attempt.generation and not generation.is_closed:
            await self._judge_generation()

    async def _judge_generation(self) -> None:
        current = self._attempt.generation
        current.is_closed = True
        if self._judge is not None:
            self._judge.cancel()
            self._judge = None
        incident = diagnose(list(current.exits.values()), last_step(self._run_dir), time.time())
        action, reason = self._decide(incident, shells_alive=True)
        if action is Action.RESTART_RANKS and not self._is_stopping:
            await self._order(Order("kill", current.number))
            await self._start_next_when_reaped()
            return
        # Where a stop was asked for, a restart could only save the newest checkpoint once more.
        is_stop_enough = self._is_stopping and action is not Action.STOP
        kind: Literal["failed", "stopped"] = "stopped" if is_stop_enough else "failed"
        self._close(AttemptOutcome(kind, f"{reason}\n{incident.evidence}", incident))
        await self._order(Order("end", current.number))

    def _decide(self, incident: Incident, *, shells_alive: bool) -> tuple[Action, str]:
        committed: int | None = None
        with contextlib.suppress(OSError):  # nobody waits for this verdict: ranks must never lack one
            committed = newest_committed_step(self._run_dir / CHECKPOINTS_DIR)
        history = [
            PastIncident(past, action, progressed=(committed or 0) > (then or 0))
            for past, action, then in self._history
        ]
        decision = decide(incident, history, self._budgets, shells_alive=shells_alive)
        self._history.append((incident, decision.action, committed))
        named: dict[str, Any] = {"class": incident.failure_class.value}
        self._ledger.write(
            "incident",
            **named,
            culprit=incident.culprit,
            action=decision.action.value,
            reason=decision.reason,
            step=incident.step,
            failed_at=incident.failed_at,
            detected_at=incident.detected_at,
            evidence=incident.evidence[-4000:],
            attempt=self._attempt.number,
            generation=self._attempt.generation.number,
        )
        return decision.action, decision.reason

    async def _start_next_when_reaped(self) -> None:
        current = self._attempt.generation
        if len(current.reaped) == self._attempt.world_size and self._attempt.outcome.kind == "running":
            await self._start_generation(current.number + 1)

    async def _start_generation(self, number: int) -> None:
        self._attempt.generation = _Generation(number)
        await self._order(Order("start", number))
        if self._is_stopping:
            await self._order(Order("terminate", number))

    def _close(self, outcome: AttemptOutcome) -> None:
        self._attempt.outcome = outcome
        self._attempt.generation.is_closed = True

    async def _order(self, order: Order) -> None:
        async with self._changed:
            self._attempt.orders.append(order)
            self._changed.notify_all()
