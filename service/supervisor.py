"""The attempt loop of a run: start an attempt, watch it, decide (by ops.policy) what comes next.

    while True:
        wait for room on nodes that may be used -> attempt n = one fit() (in a thread) with one shell a rank
        meanwhile: draw progress, keep the lease, look for stop requests and at the nodes, run drills
        finished -> FINISHED      stopped -> STOPPED | PREEMPTED      decided to STOP -> FAILED
        decided to go on elsewhere, or smaller, or full again -> attempt n + 1
        a shell, a node or the controller died -> incident -> decision -> attempt n + 1 | FAILED

Failures of ranks inside a living attempt are the coordinator's. Everything that must survive this process
is in the run folder, so a killed driver is followed by `packtrain resume`.
"""

import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from jobs.engines.preload import preload_modules
from jobs.spec.job import JobSpec
from ops.decision import Action, Decision
from ops.durable import write_atomically
from ops.incident import FailureClass, Incident
from ops.ledger import LedgerWriter, read_ledger
from ops.node_book import NodeBook
from ops.replay import kept_off
from service.cluster import is_own_node_alive, release_placement_groups
from service.controllers import Controllers
from service.decisions import Decider
from service.launch import FitFailure, coordinator_actor, run_attempt
from service.node_agent import AgentConfig, start_agents
from service.node_watch import NodeWatch
from service.orders import AttemptOutcome
from service.room import Place, Room, Start, live_places
from service.run_store import (
    FAILED,
    FINISHED,
    PREEMPTED,
    STOPPED,
    RunState,
    last_sign_of_life,
    last_step,
    read_state,
    stop_request,
    touch_lease,
    write_attempt_spec,
    write_state,
)
from service.worker import ShellConfig

POLL_S = 0.2
ROOM_POLL_S = 0.1
QUIET_WAIT_S = 2.0
"""Nodes are not waited for before so long: what an attempt held is being given back."""
SHELLS_END_LIMIT_S = 60.0
NODE_DEATH_LIMIT_S = 15.0
"""How long Ray may take to call a node dead whose workers are already gone."""


@dataclass(frozen=True)
class RunEnd:
    """How the run ended."""

    status: str
    error: str = ""
    exit_code: int | None = None
    """Of the process; None: by the status."""


class Supervisor:
    """Drives one run to its end from this process."""

    def __init__(
        self,
        spec: JobSpec,
        run_dir: Path,
        code_dir: str,
        say: Callable[[str], None],
        watch: Callable[["Supervisor"], None],
    ) -> None:
        """Nothing starts yet.

        Args:
            spec: the resolved spec of the run.
            run_dir: its folder, made by create_run.
            code_dir: folder of jobs, ops, service on every node; empty where Ray ships the code.
            say: shows one line to the user.
            watch: called about five times a second while an attempt runs.
        """
        self._spec = spec
        self.run_dir = run_dir
        self._code_dir = code_dir
        self._say = say
        self._watch = watch
        self._ledger = LedgerWriter(run_dir / "ledger" / "supervisor.jsonl")
        self._state = read_state(run_dir)
        self._token = secrets.token_hex(8)
        self._signals: list[int] = []
        self._stop_asked_at: float | None = None
        self._is_abandoned = False
        self._is_watch_broken = False
        self._decision: Decision | None = None
        """The last that led to a new attempt."""
        self._room = Room(spec)
        self._book = NodeBook(run_dir.parent)
        self._is_awaiting_nodes = False
        self._fit: threading.Thread | None = None
        self._controllers = Controllers()
        self._coordinator: Any = None

    def run(self) -> RunEnd:
        """Attempts until the run has ended. Main thread: it takes SIGINT, SIGTERM and SIGHUP meanwhile."""
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup: a closed terminal is no reason to stop
        }
        write_atomically(self.run_dir / "control" / "token", self._token)
        # Of a driver that has died since; the book of nodes knows only those that had too many strikes.
        self._room.keep_off(kept_off(read_ledger(self.run_dir)), ())
        try:
            end = self._attempts_under_coordinators()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self._ledger.write("run_ended", status=end.status)
        self._keep(replace(self._state, status=end.status, error=end.error))
        return end

    def processes(self) -> dict[int, dict[str, Any]]:
        """Node, shell pid and rank pid of each rank that runs now."""
        found: dict[int, dict[str, Any]] = ray.get(self._coordinator.processes.remote())
        return found

    def order_fault(self, fault: str, rank: int) -> None:
        """Have a rank of the attempt fail on purpose."""
        ray.get(self._coordinator.order_fault.remote(fault, rank))

    def note(self, kind: str, **fields: Any) -> None:
        """Write an event of the driver's own to the ledger."""
        self._ledger.write(kind, **fields)

    def _keep(self, state: RunState) -> None:
        """Replace run.json; a disk that is full ends no run: the ledger and this process know the same."""
        self._state = state
        try:
            write_state(self.run_dir, state)
        except OSError as error:
            self._say(f"{self.run_dir / 'run.json'} could not be replaced: {error}")

    def _attempts_under_coordinators(self) -> RunEnd:
        """Attempts, with a new coordinator whenever it, or Ray on this node, is lost."""
        n_lost = 0
        while True:  # ends, since the policy counts the losses
            name = f"coordinator-{self.run_dir.name}-{self._token}-{n_lost}"
            try:
                with coordinator_actor(self.run_dir, self._spec, name) as self._coordinator:
                    return self._attempts(name)
            except (ray.exceptions.RayError, ConnectionError) as error:
                n_lost += 1
                end = self._after_losing_ray(str(error))
                if end is not None:
                    return end

    def _after_losing_ray(self, evidence: str) -> RunEnd | None:
        """What follows when the coordinator died: with the shells' own end it is safe to begin again.

        Without Ray on its own node the driver cannot go on, and Ray soon ends it: that is for resume.
        """
        noticed_at = time.time()
        is_node_alive = is_own_node_alive()
        culprit = "coordinator" if is_node_alive else "Ray on the driver's node"
        decider = Decider(self.run_dir, self._spec.resilience, self._ledger)
        incident = Incident(
            failure_class=FailureClass.WORKER_KILLED if is_node_alive else FailureClass.NODE_LOST,
            culprit=culprit,
            evidence=evidence,
            step=last_step(self.run_dir),
            failed_at=last_sign_of_life(self.run_dir, noticed_at),
            detected_at=noticed_at,
            generation=(self._state.attempts - 1, 0),
        )
        decision = decider.decide(
            incident,
            shells_alive=False,
            available=frozenset({Action.RESTART, Action.STOP} if is_node_alive else {Action.STOP}),
        )
        self._ledger.write("attempt_ended", attempt=self._state.attempts - 1, outcome="lost", error=culprit)
        end: RunEnd | None = None
        if self._is_stop_asked():
            end = self._stopped("ended before it could save")
        elif not is_node_alive:
            end = RunEnd(
                FAILED,
                f"{culprit} is gone; go on with packtrain resume {self.run_dir.name}\n{evidence}",
            )
        elif decision.action is Action.STOP:
            end = RunEnd(FAILED, f"{decision.reason}\n{evidence}", decision.exit_code)
        if end is None:
            if self._fit is not None:  # the shells return when nobody gives them orders
                self._fit.join(SHELLS_END_LIMIT_S)
            release_placement_groups()
        return end

    def _attempts(self, coordinator_name: str) -> RunEnd:
        while True:
            start = self._await_room()
            if start is None:
                return self._end_without_nodes()
            attempt = self._state.attempts
            self._keep(replace(self._state, attempts=attempt + 1))
            self._ledger.write(
                "attempt_started",
                attempt=attempt,
                world_size=start.spec.world_size,
                layout=start.spec.strategy.mesh.factors,
                exclude=list(start.off),
            )
            failure, outcome = self._one_attempt(attempt, start, coordinator_name)
            self._ledger.write(
                "attempt_ended",
                attempt=attempt,
                outcome=outcome.kind,
                error=(outcome.error or (failure.text if failure else ""))[-2000:],
            )
            end = self._next(failure, outcome)
            if end is not None:
                return end
            release_placement_groups()

    def _one_attempt(self, attempt: int, start: Start, name: str) -> tuple[FitFailure | None, AttemptOutcome]:
        spec = start.spec
        if spec.world_size != self._spec.world_size:
            write_attempt_spec(self.run_dir, attempt, spec)
        config = ShellConfig(
            run_dir=str(self.run_dir),
            data_dir=self._state.data_dir,
            attempt=attempt,
            coordinator=name,
            namespace="packtrain",
            preload=(*preload_modules(spec.strategy.kind), "service.rank_training"),
            code_dir=self._code_dir,
            token=self._token,
        )
        begun = self._coordinator.begin_attempt.remote(attempt, spec.world_size)
        ended: list[FitFailure | None] = []
        fit = threading.Thread(
            target=lambda: ended.append(
                run_attempt(spec, config, self.run_dir, start.selector, self._controllers)
            ),
            name=f"fit-{attempt}",
            daemon=True,
        )
        fit.start()
        self._fit = fit
        ray.get(begun)
        self._nodes = NodeWatch(
            self._coordinator, self._room, attempt, spec.world_size, self.run_dir, self.note
        )
        agents = AgentConfig(str(self.run_dir), attempt, name, "packtrain")
        with self._nodes.watching(), start_agents(self._coordinator, agents):
            while fit.is_alive():
                fit.join(POLL_S)
                touch_lease(self.run_dir)
                self._look()
                self._pass_on_stop()
        failure = ended[0] if ended else FitFailure("controller", "the thread that ran fit() died")
        return failure, ray.get(self._coordinator.outcome.remote())

    def _look(self) -> None:
        """Progress and drills: a fault of theirs is said once and ends nothing."""
        try:
            self._watch(self)
        except ray.exceptions.RayError:
            raise
        except Exception as error:
            if not self._is_watch_broken:
                self._is_watch_broken = True
                self._say(f"progress cannot be shown: {type(error).__name__}: {error}")

    def _next(self, failure: FitFailure | None, outcome: AttemptOutcome) -> RunEnd | None:
        decision = outcome.decision
        if outcome.kind == "finished":
            return RunEnd(FINISHED)
        if outcome.kind == "stopped" and (decision is None or self._is_stop_asked()):
            return self._stopped()
        if outcome.kind == "failed" and (decision is None or decision.action is Action.STOP):
            return RunEnd(FAILED, outcome.error, decision.exit_code if decision else None)
        if self._is_stop_asked():
            return self._stopped("ended before it could save")
        if decision is None:
            lost = failure or FitFailure("worker", "the shells returned without a verdict")
            incident = self._name_incident(lost)
            release_placement_groups()
            self._nodes.tell_when_free()
            made: Decision = ray.get(self._coordinator.record_incident.remote(incident))
            if made.action is Action.STOP:
                return RunEnd(FAILED, f"{made.reason}\n{incident.evidence}", made.exit_code)
            decision = made
        self._decision = decision
        self._room.keep_off(decision.exclude, live_places(self._spec.resources))
        return None

    def _name_incident(self, failure: FitFailure) -> Incident:
        """Which part of the attempt is gone: a node, a worker shell, or Ray Train's controller."""
        noticed_at = time.time()
        failure_class, culprit = FailureClass.WORKER_KILLED, "Ray Train controller"
        if failure.kind == "start":
            failure_class, culprit = FailureClass.UNKNOWN, "start of the workers"
        elif failure.kind == "worker":
            places = self.processes()
            lost = self._lost_nodes({p["node_id"]: p["node"] for p in places.values()}, failure)
            if lost:
                is_foretold = set(lost) <= self._nodes.draining
                failure_class = FailureClass.PREEMPTION if is_foretold else FailureClass.NODE_LOST
                culprit = f"node {', '.join(lost)}"
            else:
                shells = [
                    f"shell of rank {r} (node {places[r]['node'] if r in places else 'unknown'})"
                    for r in failure.ranks
                ]
                culprit = ", ".join(shells) or "a shell"
        return Incident(
            failure_class=failure_class,
            culprit=culprit,
            evidence=failure.text,
            step=last_step(self.run_dir),
            failed_at=min(noticed_at, last_sign_of_life(self.run_dir, noticed_at)),
            detected_at=time.time(),
        )

    def _lost_nodes(self, nodes: dict[str, str], failure: FitFailure) -> list[str]:
        """Addresses of the attempt's nodes that Ray calls dead.

        A raylet that reports the death of a worker is alive itself: then there is nothing to wait for.
        """
        may_be_node = "worker process has died" not in failure.text and len(nodes) > 1
        deadline = time.monotonic() + (NODE_DEATH_LIMIT_S if may_be_node else 0.0)
        while True:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            lost = sorted(address for node_id, address in nodes.items() if node_id not in alive)
            if lost or time.monotonic() > deadline:
                return lost
            time.sleep(0.25)

    # ------------------------------------------------------------------ room

    def _await_room(self) -> Start | None:
        """What the next attempt runs with, once there is room for it; None where waiting was given up."""
        begun = time.monotonic()
        while True:
            have = live_places(self._spec.resources)
            waited_s = time.monotonic() - begun
            start = self._room.start(have, self._book.fleet_if_readable(), self._decision, waited_s)
            if start is not None:
                self._is_awaiting_nodes = False
                return start
            if self._gives_up_waiting(waited_s):
                return None
            if waited_s > self._spec.resilience.wait_for_nodes_s:
                return self._start_smaller(have, waited_s)
            time.sleep(ROOM_POLL_S if waited_s < QUIET_WAIT_S else 0.5)

    def _start_smaller(self, have: Sequence[Place], waited_s: float) -> Start | None:
        """Where the room that a decision counted on never came: as well as it goes with what there is."""
        if self._decision is None:
            return None
        smaller = replace(self._decision, action=Action.SHRINK)
        return self._room.start(have, self._book.fleet_if_readable(), smaller, waited_s)

    def _gives_up_waiting(self, waited_s: float) -> bool:
        """Keep the lease while no attempt runs; whether to wait no longer."""
        touch_lease(self.run_dir)
        if not self._is_awaiting_nodes and waited_s > QUIET_WAIT_S:
            self._is_awaiting_nodes = True
            self._ledger.write("nodes_awaited", world_size=self._spec.world_size)
        return self._is_stop_asked()

    def _end_without_nodes(self) -> RunEnd:
        if self._is_stop_asked():
            return self._stopped()
        why = self._room.shortage(live_places(self._spec.resources), self._book.fleet_if_readable())
        limit_s = self._spec.resilience.wait_for_nodes_s
        return RunEnd(FAILED, f"{why}, and no more came within resilience.wait_for_nodes_s={limit_s:g}")

    # ------------------------------------------------------------------ stopping

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._signals.append(number)

    def _stopped(self, error: str = "") -> RunEnd:
        return RunEnd(PREEMPTED if signal.SIGTERM in self._signals else STOPPED, error)

    def _is_stop_asked(self) -> bool:
        return bool(self._signals) or stop_request(self.run_dir).exists()

    def _pass_on_stop(self) -> None:
        """Ask the ranks to save and leave; after the grace time, or a third Ctrl-C, end them as they are."""
        if not self._is_stop_asked() or self._is_abandoned:
            return
        if self._stop_asked_at is None:
            self._stop_asked_at = time.monotonic()
            self._say("stopping: the ranks save a checkpoint and leave")
            ray.get(self._coordinator.request_stop.remote())
        elif (
            time.monotonic() - self._stop_asked_at > self._spec.resilience.stop_grace_s
            or len(self._signals) >= 3
        ):
            self._is_abandoned = True
            self._say("stop grace is over: ending the ranks without a further checkpoint")
            ray.get(self._coordinator.abandon.remote())
