"""From an incident and the run's history to a decision. Pure: no clock, no I/O, nothing executed here.

What is tried for which class is in decision_table.py. The rules that hold for all of them:

    budgets     restarts of each kind since the last newly committed checkpoint, and those of the row itself;
                a preemption that can be moved away from costs none
    progress    the same verdict without a new checkpoint in between gets the next action of its ladder, never
                the same again; a new checkpoint begins the ladder anew
    blame       what is left for a node's sake keeps off it, and off all that is quarantined
    breaker     where our word alone would take a node out, quarantine.breaker_refusal has to allow it
    stand-ins   an action that the caller cannot carry out is replaced by the nearest that it can, and the
                reason says so

Keeps no state: the caller remembers the history, and writes strikes to the book of nodes.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from jobs.spec.job import ResilienceSection
from ops.blame import Follows, blamed_nodes, follows, sighting_of
from ops.decision import DO_NOT_REQUEUE, NEW_ATTEMPTS, RESTARTS, TODAYS_ACTIONS, Action, Decision
from ops.decision_table import IMMEDIATE_STRIKE, TABLE, Row, row_of
from ops.incident import FailureClass, Incident
from ops.quarantine import breaker_refusal
from ops.situation import Situation

NEVER_RETRIED = frozenset(name for name, row in TABLE.items() if not row.is_retryable)
"""A plain restart cannot cure these: the same input gives the same error, at the price of the cluster."""

NEEDS_NEW_ATTEMPT = frozenset({FailureClass.NODE_LOST})
"""The shells themselves are gone: restarting ranks in place is impossible."""

_LEAVES = frozenset({Action.RESTART_WITHOUT_NODE, Action.SHRINK})


@dataclass(frozen=True)
class PastIncident:
    """An earlier incident of this run, what was done, and whether a checkpoint was committed after it."""

    incident: Incident
    action: Action
    progressed: bool
    """A newer checkpoint was committed between this incident and the one being decided."""
    is_pending: bool = False
    """The action waits for a checkpoint (Decision.at_checkpoint) and has not begun."""
    in_place: bool = True
    """Decision.in_place: it takes the shells of that attempt, new attempts aside."""


def decide(
    incident: Incident,
    history: Sequence[PastIncident],
    budgets: ResilienceSection,
    *,
    shells_alive: bool,
    available: Set[Action] = TODAYS_ACTIONS,
    situation: Situation | None = None,
) -> Decision:
    """What to do about `incident`.

    Args:
        incident: the new failure.
        history: the run's earlier incidents, oldest first.
        budgets: limits per kind of restart; only incidents without progress since count against them.
        shells_alive: every worker shell of the attempt still answers, so ranks can be restarted in place.
        available: what the caller can carry out. Nothing else is decided.
        situation: what else is known.

    Raises:
        ValueError: the caller asks for what it cannot carry out: ranks that still train without PAGE or
            OBSERVE among the available, nodes that can be left without a cluster for the breaker.
    """
    known = situation or Situation()
    if known.still_trains and not available & {Action.OBSERVE, Action.PAGE}:
        raise ValueError("still_trains=True needs PAGE or OBSERVE among the available actions")
    if Action.RESTART_WITHOUT_NODE in available and known.cluster is None:
        raise ValueError("RESTART_WITHOUT_NODE needs situation.cluster: the breaker counts its nodes")
    is_handled_by_then = is_handled(
        incident, history, shells_alive=shells_alive, still_trains=known.still_trains
    )
    if is_handled_by_then and Action.OBSERVE in available:
        return Decision(Action.OBSERVE, f"the ranks {incident.generation} were already decided about")
    is_observed = incident.detector in known.observing
    if not known.still_trains:  # the ranks are down: that much is no opinion of a detector
        incident = incident.without_word_of(known.observing)
        history = [replace(past, incident=past.incident.without_word_of(known.observing)) for past in history]
    decision = _Case(incident, history, budgets, shells_alive, available, known).decision()
    if not is_observed:
        return decision
    if known.still_trains:
        would = f"{incident.detector} only observes; it would have been {decision.action}: {decision.reason}"
        quiet = Action.OBSERVE if Action.OBSERVE in available else Action.PAGE
        return Decision(quiet, would, wanted=decision.action)
    return replace(
        decision, reason=f"{decision.reason}; {incident.detector} only observes, so its word is not acted on"
    )


def is_handled(
    incident: Incident, history: Sequence[PastIncident], *, shells_alive: bool, still_trains: bool = False
) -> bool:
    """These ranks, or later ones, were already decided about, and what was decided can still be carried out.

    Not so where the ranks were to be restarted in shells that have died since, or where they failed while a
    restart was waiting for their next checkpoint. Needs Incident.generation.
    """
    own = incident.generation
    for past in history if own is not None else ():
        theirs = past.incident.generation
        can_go_on = shells_alive or not past.in_place
        is_done = past.action in NEW_ATTEMPTS | {Action.STOP} or (past.action in RESTARTS and can_go_on)
        is_due = still_trains or not past.is_pending
        if theirs is not None and own is not None and theirs >= own and is_done and is_due:
            return True
    return False


@dataclass(frozen=True)
class _Case:
    """One incident with all that bears on it."""

    incident: Incident
    history: Sequence[PastIncident]
    budgets: ResilienceSection
    shells_alive: bool
    available: Set[Action]
    known: Situation

    # ------------------------------------------------------------------ what is known

    @cached_property
    def n_settled(self) -> int:
        """Incidents up to the last one that was followed by a newly committed checkpoint."""
        return max((i for i, past in enumerate(self.history, 1) if past.progressed), default=0)

    @property
    def spent(self) -> Sequence[PastIncident]:
        """The incidents since the last progress."""
        return self.history[self.n_settled :]

    @cached_property
    def blamed(self) -> frozenset[str]:
        """Nodes that it is laid to."""
        return blamed_nodes(self.incident, [past.incident for past in self.history], self.known.cluster)

    @cached_property
    def verdict(self) -> tuple[Row, Follows, str]:
        """The row it falls under, what it follows where that was in doubt, and why."""
        incident = self.incident
        this = sighting_of(incident, self.known.run)
        if this is not None:
            own = [sighting_of(past.incident, self.known.run) for past in self.history]
            found, why = follows(this, [*self.known.sightings, *(one for one in own if one is not None)])
            if found is Follows.GPU:
                return TABLE[FailureClass.GPU_HARDWARE], found, f"it follows the GPU: {why}"
            if found is Follows.CODE:
                return row_of(incident), found, f"it follows the code: {why}"
        if incident.failure_class is FailureClass.NUMERICS and self.known.is_clean_elsewhere:
            why = f"step {incident.step} is clean on other nodes: the chip computes wrongly"
            return TABLE[FailureClass.GPU_HARDWARE], Follows.GPU, why
        return row_of(incident), Follows.UNDECIDED, str(incident.failure_class)

    @property
    def row(self) -> Row:
        return self.verdict[0]

    @cached_property
    def same(self) -> list[PastIncident]:
        """Restarts for the same verdict since the last progress."""
        own = self.incident
        return [
            past
            for past in self.spent
            if past.action in RESTARTS
            and past.incident.failure_class is own.failure_class
            and (self.row.by_class or past.incident.fingerprint == own.fingerprint)
        ]

    @cached_property
    def left(self) -> frozenset[str]:
        """Nodes that were left since the last progress: no way leads back to them yet."""
        incidents = [past.incident for past in self.history]
        nodes = [
            blamed_nodes(past.incident, incidents[:index], self.known.cluster)
            for index, past in enumerate(self.history)
            if index >= self.n_settled and past.action in _LEAVES
        ]
        return frozenset().union(*nodes)

    @property
    def can_move(self) -> bool:
        return Action.RESTART_WITHOUT_NODE in self.available

    # ------------------------------------------------------------------ what follows

    def decision(self) -> Decision:
        stop = self._ends_here()
        if stop is not None:
            return stop
        if self.known.still_trains and self.row.running is not None:
            return self._while_training(self.row.running)
        wanted = self.row.ladder[min(len(self.same), len(self.row.ladder) - 1)]
        return self._restart(Action.RESTART_RANKS if wanted is Action.STOP else wanted)

    def _ends_here(self) -> Decision | None:
        """STOP where no restart can help, or enough were tried."""
        incident, row, n_same = self.incident, self.row, len(self.same)
        if self.known.still_trains and row.running is not None:
            return None
        if self.verdict[1] is Follows.CODE:
            return self._stop(self.verdict[2], is_final=True)
        if row.ladder == (Action.STOP,) and not self._may_be_chance():
            text = f"{incident.failure_class} is never retried: the same input fails the same way"
            return self._stop(text, is_final=True)
        if incident.failure_class is FailureClass.NUMERICS and self.budgets.on_bad_loss == "stop":
            return self._stop("resilience.on_bad_loss=stop", is_final=True)
        if incident.failure_class is FailureClass.GPU_OUT_OF_MEMORY and incident.step == 0:
            text = "out of device memory before the first step: the layout does not fit"
            return self._stop(text, is_final=True)
        if n_same >= self.budgets.max_no_progress and not self._is_free():
            return self._stop(
                f"{incident.failure_class} of {incident.culprit} at step {incident.step}, "
                f"{n_same + 1} times in a row without progress "
                f"(resilience.max_no_progress={self.budgets.max_no_progress})",
                is_final=not row.is_retryable,
            )
        of_class = [
            past
            for past in self.spent
            if past.action in RESTARTS and past.incident.failure_class is incident.failure_class
        ]
        if row.budget is not None and len(of_class) >= row.budget:
            return self._stop(
                f"{incident.failure_class}: {len(of_class)} restarts since the last committed checkpoint, "
                "which is all that this class gets",
                is_final=bool(row.advice) or not row.is_retryable,
            )
        elsewhere = [
            past.incident
            for past in of_class
            if past.action in _LEAVES and past.incident.step == incident.step
        ]
        if row.may_be_code and elsewhere and self.blamed and not self.blamed & self.left:
            return self._stop(
                f"{incident.failure_class} at step {incident.step} again, on other nodes than before: it "
                "follows the code or the data, not the node",
                is_final=True,
            )
        return None

    def _may_be_chance(self) -> bool:
        """After many good steps with the same code one restart shows whether it comes again."""
        steps, enough = self.known.good_steps, self.row.confirm_after_steps
        return steps is not None and enough is not None and steps >= enough

    def _is_free(self) -> bool:
        """A preemption from which the run can move away costs no budget."""
        is_preemption = self.incident.failure_class is FailureClass.PREEMPTION
        return is_preemption and self.can_move and bool(self.blamed)

    def _while_training(self, steps: tuple[Action, Action]) -> Decision:
        """What is done beside ranks that go on; a restart waits for the next checkpoint."""
        own, window_s = self.incident, self.row.again_within_s
        told = [
            index
            for index, past in enumerate(self.history)
            if past.incident.failure_class is own.failure_class
            and (window_s is not None or past.incident.culprit == own.culprit)
        ]
        is_again = bool(told)
        if told and window_s is not None:
            is_again = own.detected_at - self.history[told[-1]].incident.detected_at <= window_s
        elif told and told[-1] >= self.n_settled and steps[0] is Action.PAGE:
            return self._say(Action.OBSERVE, "this was told already, and no checkpoint was committed since")
        wanted = steps[1] if is_again else steps[0]
        if wanted in RESTARTS:
            decision = self._restart(wanted)
            return replace(decision, at_checkpoint=decision.action in RESTARTS)
        return self._say(wanted, f"{own.failure_class} of {own.culprit}: the ranks go on")

    def _say(self, action: Action, reason: str, wanted: Action | None = None) -> Decision:
        """PAGE or OBSERVE, whichever of them there is."""
        other = Action.OBSERVE if action is Action.PAGE else Action.PAGE
        taken = action if action in self.available else other
        return Decision(
            taken, reason, wanted=wanted, strikes=self._strikes(taken), calls_people=taken is Action.PAGE
        )

    def _restart(self, wanted: Action) -> Decision:
        """One of the restarts, or what stands in for it, within the budgets."""
        action, notes, is_move = self._carried_out(wanted)
        out = self.known.fleet.out_of_service | self.left | (self.blamed if is_move else frozenset())
        can_renew = self.can_move and Action.RESTART in self.available
        if action is Action.RESTART_RANKS and can_renew and self.known.nodes & out:
            notes.append("the attempt has nodes that are out of service")
            action = Action.RESTART
        stand_in = wanted if action is not wanted and notes else None
        if self.known.still_trains and stand_in is not None:
            return self._say(Action.PAGE, "; ".join([self.verdict[2], *notes]), wanted)
        action = self._untried(action)
        if action is Action.STOP:
            is_final = not self.row.is_retryable
            text = "a plain restart does not cure it" if is_final else "what there is to try was tried"
            return self._stop("; ".join([f"{self.verdict[2]}: {text}", *notes]), is_final=is_final)
        calls_people = any("breaker" in note for note in notes)
        action, n_ranks, note = self._fits(action, out)
        if note:
            notes.append(note)
            calls_people = True
        name = "max_attempts" if action in NEW_ATTEMPTS else "max_rank_restarts"
        limit = self.budgets.max_attempts if action in NEW_ATTEMPTS else self.budgets.max_rank_restarts
        used = sum((past.action in NEW_ATTEMPTS) == (action in NEW_ATTEMPTS) for past in self._charged)
        if used >= limit and not (self._is_free() and is_move):
            return self._stop(
                f"{used} restarts of this kind since the last committed checkpoint; resilience.{name}={limit}"
            )
        n_back = 2 ** len(self.same) if action is Action.ROLLBACK else 0
        count = f"{self.verdict[2]}: restart {used + 1} of {limit} since the last committed checkpoint"
        if self._is_free() and is_move:
            count = f"{self.verdict[2]}: it costs no budget"
        return Decision(
            action,
            "; ".join([count, *notes]),
            wanted=stand_in,
            in_place=action not in NEW_ATTEMPTS
            and self.shells_alive
            and not (self.can_move and self.known.nodes & out),
            exclude=tuple(sorted(out)) if self.can_move else (),
            strikes=self._strikes(action),
            checkpoints_back=n_back,
            skips_data=n_back > 0 and self.incident.failure_class is FailureClass.NUMERICS,
            n_ranks=n_ranks,
            calls_people=calls_people,
        )

    @property
    def _charged(self) -> list[PastIncident]:
        """Restarts since the last progress that the budgets of the spec count for this one."""
        own = FailureClass.PREEMPTION
        is_own = self.incident.failure_class is own
        return [
            past
            for past in self.spent
            if past.action in RESTARTS and (is_own or past.incident.failure_class is not own)
        ]

    def _carried_out(self, wanted: Action) -> tuple[Action, list[str], bool]:
        """What is done for `wanted`, what has to be said about it, and whether it leaves the nodes blamed."""
        in_place = self.shells_alive and self.incident.failure_class not in NEEDS_NEW_ATTEMPT
        retry = (
            Action.RESTART_RANKS if in_place and Action.RESTART_RANKS in self.available else Action.RESTART
        )
        if Action.RESTART not in self.available and retry is Action.RESTART:
            retry = Action.STOP
        if wanted is Action.RESTART_RANKS:
            return retry, [], False
        if wanted not in self.available:
            instead = retry if self.row.is_retryable else Action.STOP
            may_return = wanted in _LEAVES and instead is not Action.STOP and bool(self.blamed)
            where = f" ({', '.join(sorted(self.blamed))} may be used again)" if may_return else ""
            return instead, [f"{wanted} is called for and cannot be carried out here{where}"], False
        if wanted is not Action.RESTART_WITHOUT_NODE:
            return wanted, [], False
        if not self.blamed:
            return retry, ["the evidence names no node that could be left"], False
        if self.row.passes_breaker and self.known.cluster is not None:
            incident, known = self.incident, self.known
            refused = breaker_refusal(
                known.fleet, self.blamed | self.left, self.known.cluster, incident.detected_at
            )
            if refused is not None:
                return retry, [refused], False
        return wanted, [], True

    def _untried(self, action: Action) -> Action:
        """The action, or where it was taken for the same verdict already the next that was not."""
        tried = {past.action for past in self.same}
        if not self.can_move or self._is_free() or action in (Action.ROLLBACK, Action.STOP):
            return action
        order = (action, Action.RESTART) if action is Action.RESTART_RANKS else (action,)
        return next((one for one in order if one not in tried and one in self.available), Action.STOP)

    def _fits(self, action: Action, out: frozenset[str]) -> tuple[Action, int, str]:
        """The action, or SHRINK where too few nodes are left; ranks that have room; what to say."""
        known = self.known
        usable = sum(n for node, n in known.slots.items() if node not in out)
        if action not in NEW_ATTEMPTS or not known.slots or usable >= known.n_ranks:
            return action, 0, ""
        short = f"{known.n_ranks} ranks are wanted and there is room for {usable}"
        if Action.SHRINK in self.available and usable >= known.can_shrink_to:
            return Action.SHRINK, usable, f"no spare is left: {short}"
        return action, 0, f"no spare is left, so it waits for nodes: {short}"

    def _strikes(self, action: Action) -> tuple[tuple[str, float], ...]:
        """What is held against the nodes blamed."""
        weight = self.row.strike
        if action in _LEAVES:
            weight = max(weight, self.row.strike_on_leaving)
        return tuple((node, weight) for node in sorted(self.blamed)) if weight else ()

    def _stop(self, reason: str, *, is_final: bool = False) -> Decision:
        advice = f"; {self.row.advice}" if self.row.advice and self.row.advice not in reason else ""
        return Decision(
            Action.STOP,
            reason + advice,
            strikes=self._strikes(Action.STOP) if self.row.strike >= IMMEDIATE_STRIKE else (),
            calls_people=True,
            exit_code=DO_NOT_REQUEUE if is_final else 1,
        )
