"""Random runs under the policy, with the book of nodes kept as the service would: what must always hold."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.spec.job import ResilienceSection
from ops.blame import blamed_nodes
from ops.decision import NEW_ATTEMPTS, RESTARTS, TODAYS_ACTIONS, Action, Decision
from ops.incident import FailureClass, Incident, Nature
from ops.node_book import strikes_of
from ops.policy import PastIncident, decide
from ops.quarantine import ChangeKind, Cluster, Fleet, NodeChange, Owner, apply_change, strike
from ops.signal import Entity, EntityKind
from ops.situation import Situation

BUDGETS = ResilienceSection(max_rank_restarts=4, max_attempts=3, max_no_progress=2)
NODES = [f"n{i}" for i in range(20)]
CLUSTER = Cluster(len(NODES))
LEAVES = (Action.RESTART_WITHOUT_NODE, Action.SHRINK)
N_IN_ATTEMPT = 8


@dataclass(frozen=True)
class Happening:
    """Something that hits the run."""

    kind: int
    """Index into the classes that this run is hit by."""
    nature: Nature
    place: int
    """Index into the nodes of the attempt."""
    names_node: bool
    progress: bool
    still_trains: bool
    shells_alive: bool
    pause_s: float
    human_cordons: int | None
    """Index of a node that a human takes out before."""


happenings = st.lists(
    st.builds(
        Happening,
        st.integers(0, 2),
        st.sampled_from([Nature.CLEAR, Nature.CLEAR, Nature.AMBIGUOUS, Nature.CONTAINED]),
        st.integers(0, 2),
        st.booleans() | st.just(True),
        st.integers(0, 9).map(lambda n: n == 0),
        st.integers(0, 3).map(lambda n: n == 0),
        st.booleans() | st.just(True),
        st.floats(1, 4000),
        st.none() | st.none() | st.integers(0, len(NODES) - 1),
    ),
    max_size=16,
)
classes = st.lists(st.sampled_from(list(FailureClass)), min_size=3, max_size=3)
"""Few a run: what comes again is what the policy has to get right."""
availables = st.sets(st.sampled_from(sorted(set(Action) - TODAYS_ACTIONS))).map(
    lambda more: TODAYS_ACTIONS | more
) | st.just(frozenset(Action))


@dataclass
class World:
    """A run and its cluster."""

    available: frozenset[Action]
    classes: list[FailureClass]
    history: list[PastIncident] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    fleet: Fleet = field(default_factory=Fleet)
    nodes: list[str] = field(default_factory=lambda: NODES[:N_IN_ATTEMPT])
    ranks: tuple[int, int] = (0, 0)
    step: int = 0
    now: float = 0.0

    def pass_time(self, one: Happening) -> None:
        self.now += one.pause_s
        if one.progress:
            self.step += 1
            self.history = [replace(past, progressed=True) for past in self.history]
        if one.human_cordons is not None:
            cordon = NodeChange(self.now, NODES[one.human_cordons], ChangeKind.CORDON, Owner.HUMAN)
            self.fleet = apply_change(self.fleet, cordon)

    def incident(self, one: Happening) -> Incident:
        node = self.nodes[one.place % len(self.nodes)] if self.nodes else "gone"
        gpu = Entity(EntityKind.GPU, f"GPU of {node}", node) if one.names_node else None
        culprit = f"rank {one.place} (node {node})" if one.names_node else "somebody"
        at = self.now
        return Incident(
            self.classes[one.kind], culprit, "line", self.step, at, at, gpu, one.nature, generation=self.ranks
        )

    def decide(self, incident: Incident, one: Happening) -> Decision:
        can_wait = bool(self.available & {Action.PAGE, Action.OBSERVE})
        return decide(
            incident,
            self.history,
            BUDGETS,
            shells_alive=one.shells_alive,
            available=self.available,
            situation=Situation(
                still_trains=one.still_trains and can_wait,
                nodes=frozenset(self.nodes),
                n_ranks=N_IN_ATTEMPT,
                slots=dict.fromkeys(NODES, 1),
                can_shrink_to=4,
                fleet=self.fleet,
                cluster=CLUSTER,
            ),
        )

    def carry_out(self, incident: Incident, decision: Decision) -> None:
        past = PastIncident(incident, decision.action, False, decision.at_checkpoint, decision.in_place)
        self.history.append(past)
        self.decisions.append(decision)
        for hit in strikes_of(decision, incident, "run", N_IN_ATTEMPT):
            for change in strike(self.fleet, hit, CLUSTER)[0]:
                self.fleet = apply_change(self.fleet, change)
        if decision.action in RESTARTS:
            attempt, generation = self.ranks
            self.ranks = (attempt, generation + 1) if decision.in_place else (attempt + 1, 0)
        if decision.action is Action.STOP:  # somebody resumes the run
            self.ranks = (self.ranks[0] + 1, 0)
        if decision.action in RESTARTS and not decision.in_place:
            usable = [node for node in NODES if node not in decision.exclude]
            self.nodes = usable[:N_IN_ATTEMPT]

    @property
    def spent(self) -> Sequence[PastIncident]:
        return [past for past in self.history if not past.progressed]


def check_budgets(world: World, incident: Incident, decision: Decision) -> None:
    kinds = [NEW_ATTEMPTS, RESTARTS - NEW_ATTEMPTS]
    limits = [BUDGETS.max_attempts, BUDGETS.max_rank_restarts]
    for kind, limit in zip(kinds, limits, strict=True):
        if decision.action in kind and incident.failure_class is not FailureClass.PREEMPTION:
            used = [
                past
                for past in world.spent
                if past.action in kind and past.incident.failure_class is not FailureClass.PREEMPTION
            ]
            assert len(used) < limit


def check_places(world: World, incident: Incident, decision: Decision) -> None:
    """Nothing is placed on nodes that are out of service, blamed, or were left since the last progress."""
    if Action.RESTART_WITHOUT_NODE not in world.available or decision.action not in RESTARTS:
        return
    out = set(world.fleet.out_of_service)
    for past in world.spent:
        out |= blamed_nodes(past.incident) if past.action in LEAVES else set()
    if decision.in_place:
        assert not out & set(world.nodes)
    else:
        assert out <= set(decision.exclude)
    if decision.action is Action.RESTART_WITHOUT_NODE:
        assert blamed_nodes(incident)
        assert blamed_nodes(incident) <= set(decision.exclude)


def check_next_differs(world: World, incident: Incident, decision: Decision) -> None:
    """The same verdict again without progress gets something that it did not get before."""
    if Action.RESTART_WITHOUT_NODE not in world.available or decision.action not in RESTARTS:
        return
    if incident.failure_class is FailureClass.PREEMPTION or Action.ROLLBACK not in world.available:
        return
    for past, before in zip(world.history, world.decisions, strict=True):
        if not past.progressed and past.incident.fingerprint == incident.fingerprint:
            same = (before.action, before.checkpoints_back) == (decision.action, decision.checkpoints_back)
            assert not same, (before, decision)


@settings(max_examples=300)
@given(happenings, classes, availables)
def test_what_holds_in_every_run(
    run: list[Happening], hit_by: list[FailureClass], available: frozenset[Action]
) -> None:
    world = World(available, hit_by)
    for one in run:
        world.pass_time(one)
        incident = world.incident(one)
        decision = world.decide(incident, one)
        assert decision == world.decide(incident, one)
        assert decision.action in available
        assert (decision.exit_code is not None) == (decision.action is Action.STOP)
        if decision.action is Action.RESTART_RANKS:
            assert one.shells_alive
            assert decision.in_place or Action.RESTART_WITHOUT_NODE not in available
        check_budgets(world, incident, decision)
        check_places(world, incident, decision)
        check_next_differs(world, incident, decision)
        out_before, ranks = world.fleet.out_of_service, world.ranks
        world.carry_out(incident, decision)
        taken = world.fleet.out_of_service - out_before
        assert not taken or len(world.fleet.out_of_service) <= max(1, len(NODES) // 10)
        is_acted_on = decision.action in RESTARTS and not decision.at_checkpoint
        if Action.OBSERVE in available and world.ranks != ranks and is_acted_on:
            if decision.in_place and not one.shells_alive:
                continue
            again = world.decide(incident, one)  # the same failure, told by somebody else a moment later
            assert again.action is Action.OBSERVE
            assert again.strikes == ()
