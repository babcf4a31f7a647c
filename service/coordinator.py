"""One actor a run: hears how ranks end, decides (by ops.policy) and tells every shell what to do next.

    shells --join / report_store / report_exit ----------------> Coordinator --orders (long poll)--> shells
    driver --begin_attempt / request_stop / outcome-------------> Coordinator
    node agents --report_node, once a second--------------------> Coordinator

A generation is one set of rank processes. When a rank fails, the others of its generation are killed, and
once every shell has reaped its rank the next generation is forked: nothing of the old one can meet the new
one. Orders of an attempt are one growing list; a shell asks for those after the last that it has seen, so
none is lost or repeated. It holds no tensors and runs no training; new attempts are the supervisor's.
"""

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from jobs.spec.job import ResilienceSection
from ops.decision import RESTARTS, Action, Decision
from ops.diagnosis.hang_culprits import hang_incident
from ops.diagnosis.rank_deaths import EVIDENCE_BEFORE_S, join_signals
from ops.diagnosis.rank_exits import RankExit, diagnose
from ops.findings import Finding
from ops.incident import FailureClass, Incident
from ops.ledger import LedgerWriter
from ops.monitors.collective_hang import NAME as HANG_DETECTOR
from ops.monitors.collective_hang import Hang
from ops.signal import Entity, EntityKind
from service.attempt_state import Attempt, Generation
from service.decisions import Decider, Nodes
from service.evidence import WITNESS_LIMIT_S, ask_agents, incident_folder, record_report, weigh_hang
from service.going_back import GoingBack
from service.lifetime import end_with_raylet
from service.orders import AttemptOutcome, Order, ShellInfo
from service.run_store import last_step
from service.watch import NodeReport, Watch, report_interval_s
from service.witness import Testimony

EVIDENCE_WINDOW_S = 2.0
"""How long to wait for the exit that explains a broken connection before the connection itself is blamed."""
UNHURRIED_S = 600.0
"""For a save under way and the last one, where nobody waits for the node."""
REAP_LIMIT_S = 60.0
"""After it a rank that SIGKILL does not end is left behind: it waits for a device or a file system."""
NODE_LOSS_LIMIT_S = 12.0
"""How much longer, where a node is silent: until Ray must have said that it is lost."""


class Coordinator:
    """The actor's class (made an actor by the supervisor): every method is a coroutine on one event loop."""

    def __init__(self, run_dir: str, budgets_json: str) -> None:
        """Start without an attempt."""
        end_with_raylet()
        self._run_dir = Path(run_dir)
        self._ledger = LedgerWriter(self._run_dir / "ledger" / "coordinator.jsonl")
        self._budgets = ResilienceSection.model_validate_json(budgets_json)
        self._decider = Decider(self._run_dir, self._budgets, self._ledger)
        self._going_back = GoingBack(self._run_dir, self._ledger)
        self._watch = Watch()
        self._changed = asyncio.Condition()
        self._attempt = Attempt(-1, 0)
        self._is_stopping = False
        self._judge: asyncio.Task[None] | None = None
        self._deadline: asyncio.Task[None] | None = None
        """Of a renewal; kept, or the event loop would forget it."""
        self._reaping: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ driver

    async def begin_attempt(self, number: int, world_size: int) -> None:
        """Forget the last attempt's shells and expect `world_size` new ones."""
        async with self._changed:
            self._forget_judge()
            self._attempt = Attempt(number, world_size)
            self._watch.begin_attempt()
            self._changed.notify_all()

    async def request_stop(self) -> None:
        """Have every rank save and leave at the same step."""
        self._is_stopping = True
        await self._order(Order("terminate", self._attempt.generation.number))

    async def abandon(self) -> None:
        """Kill the ranks and let the shells return. An attempt that has ended already stays as it ended."""
        if self._attempt.outcome.kind == "running":
            await self._close(AttemptOutcome("stopped", decision=self._attempt.renewal))

    async def outcome(self) -> AttemptOutcome:
        """How the current attempt stands."""
        return self._attempt.outcome

    async def order_fault(self, fault: str, rank: int) -> None:
        """Have a rank fail on purpose."""
        await self._order(Order("fault", self._attempt.generation.number, rank=rank, fault=fault))

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

    async def tell_nodes(self, nodes: Nodes) -> None:
        """The newest that the driver knows of the cluster."""
        self._decider.nodes = nodes

    async def record_incident(self, incident: Incident) -> Decision:
        """Decide about an incident that the supervisor saw (the attempt is over: no shell is left)."""
        self._examine(self._attempt.generation)
        seen = self._watch.signals_since(incident.failed_at - EVIDENCE_BEFORE_S)
        return self._decide(join_signals(incident, [], seen), shells_alive=False)

    async def report_signal(self, attempt: int, generation: int, values: dict[str, Any]) -> None:
        """Rank 0 found something out about the training (ops.findings.Finding as JSON); the ranks go on."""
        if not self._is_current(attempt, generation) or self._attempt.generation.is_closed:
            return
        nodes = {rank: shell.node for rank, shell in self._attempt.shells.items()}
        finding = Finding.from_json(values).on_nodes(nodes)
        self._watch.add_signals([finding.signal])
        await self.report_finding(finding.incident(time.time()))

    async def report_finding(self, incident: Incident) -> Decision:
        """Decide about something seen beside ranks that go on training, and carry it out."""
        decision = self._decide(incident, shells_alive=True, still_trains=True)
        if decision.action in RESTARTS or decision.action is Action.STOP:
            await self._carry_out(decision, incident)
        return decision

    async def renew(self, number: int, decision: Decision, *, is_urgent: bool = False) -> None:
        """Have every rank of an attempt save and leave at the same step: a new one begins by `decision`."""
        attempt = self._attempt
        if number != attempt.number or attempt.outcome.kind != "running" or attempt.renewal is not None:
            return
        attempt.renewal = decision
        limit_s = self._budgets.stop_grace_s
        if not is_urgent:
            limit_s += UNHURRIED_S
        self._deadline = asyncio.get_running_loop().create_task(self._abandon_later(attempt, limit_s))
        await self._order(Order("terminate", attempt.generation.number))

    # ------------------------------------------------------------------ shells

    async def join(self, attempt: int, shell: ShellInfo) -> None:
        """A shell is ready to fork. The last one to come starts the first generation."""
        async with self._changed:  # begin_attempt may still be on its way
            await self._changed.wait_for(lambda: attempt <= self._attempt.number)
        if attempt != self._attempt.number:
            return
        shells = self._attempt.shells
        shells[shell.rank] = shell
        self._attempt.stages[shell.rank] = shell.stage
        if len(shells) < self._attempt.world_size:
            return
        blind = sorted({s.node for s in shells.values() if not s.sees_storage})
        if blind:
            await self._close(
                AttemptOutcome(
                    "failed",
                    f"run.storage is not shared: {self._run_dir} as the driver writes it is not seen by node "
                    f"{', '.join(blind)}; mount the same storage on every node",
                )
            )
        else:
            await self._start_generation(0)

    async def orders(self, attempt: int, seen: int) -> list[Order]:
        """Orders after the first `seen`, waiting for one; a shell of an older attempt is told to end."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: attempt != self._attempt.number or len(self._attempt.orders) > seen
            )
            if attempt != self._attempt.number:
                return [Order("end", -1, is_followed=True)]
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
                nodes = sorted({shell.node for shell in self._attempt.shells.values()})
                self._ledger.write("ranks_started", attempt=attempt, generation=generation, nodes=nodes)

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
            renewal = self._attempt.renewal if kind == "stopped" else None
            await self._close(AttemptOutcome(kind, decision=renewal))
        elif rank_exit.is_failure and not rank_exit.is_victim:
            await self._judge_generation()
        elif rank_exit.is_failure and self._judge is None:
            self._judge = asyncio.get_running_loop().create_task(self._judge_later(current))

    async def report_testimony(self, attempt: int, generation: int, found: Testimony) -> None:
        """What a shell found of its rank, as it was ordered to."""
        if self._is_current(attempt, generation):
            async with self._changed:
                self._attempt.generation.testimonies[found.rank] = found
                self._changed.notify_all()

    # ------------------------------------------------------------------ node agents

    async def nodes(self, attempt: int) -> tuple[str, ...]:
        """Ray's ids of the attempt's nodes, once all shells have joined; empty when it is over before."""
        async with self._changed:
            await self._changed.wait_for(lambda: attempt < self._attempt.number or self._has_begun(attempt))
            if attempt != self._attempt.number:
                return ()
            found = tuple(sorted({s.node_id for s in self._attempt.shells.values()}))
            self._watch.reports_every_s = report_interval_s(len(found))
            return found

    async def join_agent(self, attempt: int, node_id: str, agent: Any) -> None:
        """An agent runs, or runs again."""
        if attempt == self._attempt.number:
            self._attempt.agents[node_id] = agent
            self._ledger.write("agent_joined", attempt=attempt, node_id=node_id)

    async def report_node(self, report: NodeReport) -> None:
        """What a node agent has seen in the last second."""
        attempt, now = self._attempt, time.time()
        if report.attempt != attempt.number or attempt.outcome.kind != "running":
            return
        self._watch.hear(report, attempt.stages, now)
        attempt.n_recorded_signals = record_report(self._ledger, report, attempt.n_recorded_signals)
        current = attempt.generation
        if not current.is_closed:
            hang = self._watch.look((attempt.number, current.number), attempt.world_size, now)
            if hang is not None:
                await self._judge_hang(hang)

    # ------------------------------------------------------------------ inside

    def _has_begun(self, attempt: int) -> bool:
        own = self._attempt
        has_all = len(own.shells) == own.world_size or own.outcome.kind != "running"
        return attempt == own.number and has_all

    def _is_current(self, attempt: int, generation: int) -> bool:
        return attempt == self._attempt.number and generation == self._attempt.generation.number

    async def _judge_later(self, generation: Generation) -> None:
        await asyncio.sleep(EVIDENCE_WINDOW_S)
        limit = time.monotonic() + NODE_LOSS_LIMIT_S
        while self._may_have_lost_node(generation) and time.monotonic() < limit:
            await asyncio.sleep(0.25)
        self._judge = None
        if generation is self._attempt.generation and not generation.is_closed:
            await self._judge_generation()

    def _may_have_lost_node(self, generation: Generation) -> bool:
        """A rank is not heard of, nor is its node: Ray will soon say to the supervisor what became of it."""
        if generation is not self._attempt.generation or generation.is_closed:
            return False
        silent = self._watch.silent_nodes(time.time())
        shells = self._attempt.shells
        return any(shell.node in silent for rank, shell in shells.items() if rank not in generation.exits)

    async def _judge_generation(self) -> None:
        attempt, current = self._attempt, self._attempt.generation
        exits = list(current.exits.values())
        self._examine(current)
        await self._kill(current)  # whoever is left only waits for the dead
        incident = diagnose(exits, last_step(self._run_dir), time.time())
        on = {attempt.shells[one.rank].node_id for one in exits if one.is_failure}
        self._watch.add_signals(await ask_agents(attempt.agents[node] for node in on & set(attempt.agents)))
        if attempt is self._attempt and attempt.outcome.kind == "running":
            seen = self._watch.signals_since(incident.failed_at - EVIDENCE_BEFORE_S)
            incident = join_signals(incident, exits, seen)
            await self._carry_out(self._decide(incident, shells_alive=True), incident)

    async def _judge_hang(self, hang: Hang) -> None:
        """Evidence first, then the verdict and the kill."""
        attempt, current = self._attempt, self._attempt.generation
        node_of = {rank: shell.node for rank, shell in attempt.shells.items()}
        if HANG_DETECTOR in self._budgets.observe:
            if not current.is_hang_told:
                current.is_hang_told = True
                self._decide(hang_incident(hang, (), None, {}, node_of), shells_alive=True, still_trains=True)
            return
        self._examine(current)
        step_then = last_step(self._run_dir)
        await self._order(Order("witness", current.number))
        with contextlib.suppress(TimeoutError):
            async with self._changed, asyncio.timeout(WITNESS_LIMIT_S):
                await self._changed.wait_for(lambda: len(current.testimonies) == attempt.world_size)
        folder = incident_folder(self._run_dir, attempt.number, current.number)
        incident = await asyncio.to_thread(weigh_hang, hang, current.testimonies, node_of, folder)
        if attempt is not self._attempt or attempt.outcome.kind != "running":
            return
        if any(one.error_type and not one.is_victim for one in current.exits.values()):
            await self._judge_generation()  # it says itself what the others waited for
        elif not current.exits and last_step(self._run_dir) > step_then:
            current.is_closed = current.is_examined = False  # they go on: it was a long wait
        else:
            await self._carry_out(self._decide(incident, shells_alive=True), incident)

    def _examine(self, current: Generation) -> None:
        current.is_closed = current.is_examined = True
        self._forget_judge()

    def _forget_judge(self) -> None:
        if self._judge is not None:
            self._judge.cancel()
            self._judge = None

    async def _kill(self, current: Generation) -> None:
        if not current.is_killed:
            current.is_killed = True
            await self._order(Order("kill", current.number))

    def _decide(self, incident: Incident, *, shells_alive: bool, still_trains: bool = False) -> Decision:
        attempt = self._attempt
        on = frozenset(shell.node for shell in attempt.shells.values())
        self._decider.nodes = replace(self._decider.nodes, of_attempt=on)
        own = replace(incident, generation=(attempt.number, attempt.generation.number))
        decision = self._decider.decide(own, shells_alive=shells_alive, still_trains=still_trains)
        self._going_back.expect(own, decision)
        return decision

    async def _carry_out(self, decision: Decision, incident: Incident) -> None:
        """End the current generation as decided; its ranks are dead, stuck or still train."""
        current = self._attempt.generation
        is_restart = decision.action in RESTARTS
        if is_restart and decision.at_checkpoint:
            is_urgent = incident.failure_class is FailureClass.PREEMPTION
            await self.renew(self._attempt.number, decision, is_urgent=is_urgent)
            return
        current.is_closed, current.is_examined = True, False
        if is_restart and decision.in_place and not self._is_stopping:
            await self._kill(current)
            self._reaping = asyncio.get_running_loop().create_task(self._leave_unreaped(current, incident))
            await self._start_next_when_reaped()
            return
        # Where a stop was asked for, a restart could only save the newest checkpoint once more.
        is_stop_enough = self._is_stopping and decision.action is not Action.STOP
        kind: Literal["failed", "stopped"] = "stopped" if is_stop_enough else "failed"
        await self._close(AttemptOutcome(kind, f"{decision.reason}\n{incident.evidence}", decision))

    async def _leave_unreaped(self, current: Generation, incident: Incident) -> None:
        """A rank that does not go keeps its shell from starting another: then a new attempt has to."""
        await asyncio.sleep(REAP_LIMIT_S)
        attempt = self._attempt
        left = sorted(set(attempt.shells) - current.reaped)
        if current is not attempt.generation or attempt.outcome.kind != "running" or not left:
            return
        node = attempt.shells[left[0]].node
        stuck = replace(
            incident,
            failure_class=FailureClass.HANG,
            culprit=f"rank {left[0]} (node {node})",
            entity=Entity(EntityKind.RANK, str(left[0]), node),
            evidence=f"rank {', '.join(map(str, left))} was not ended by SIGKILL within {REAP_LIMIT_S:g} s",
        )
        decision = self._decide(stuck, shells_alive=False)
        await self._close(AttemptOutcome("failed", f"{decision.reason}\n{stuck.evidence}", decision))

    async def _abandon_later(self, attempt: Attempt, limit_s: float) -> None:
        """Ranks that cannot save and leave in time are ended as they are.

        Who takes a node away waits no longer than the grace time. Else a save may take as long as any may; a
        rank that hangs has a verdict of its own.
        """
        await asyncio.sleep(limit_s)
        if attempt is self._attempt:
            await self.abandon()

    async def _start_next_when_reaped(self) -> None:
        current = self._attempt.generation
        if current.is_examined:
            return
        if len(current.reaped) == self._attempt.world_size and self._attempt.outcome.kind == "running":
            await self._start_generation(current.number + 1)

    async def _start_generation(self, number: int) -> None:
        self._forget_judge()
        self._attempt.generation = Generation(number)
        start = self._going_back.start_point(self._attempt.number, number)
        await self._order(Order("start", number, start=start))
        if self._is_stopping or self._attempt.renewal is not None:
            await self._order(Order("terminate", number))

    async def _close(self, outcome: AttemptOutcome) -> None:
        """The attempt is over: what is left of its ranks is killed, and its shells return."""
        self._attempt.outcome = outcome
        self._attempt.generation.is_closed = True
        decision, number = outcome.decision, self._attempt.generation.number
        is_followed = decision is not None and decision.action in RESTARTS and not self._is_stopping
        await self._order(Order("end", number, is_followed=is_followed))

    async def _order(self, order: Order) -> None:
        async with self._changed:
            self._attempt.orders.append(order)
            self._changed.notify_all()
