"""Where ranks have room: live nodes and their free places, nodes that a run keeps off, the layout that fits.

    ray.nodes(), what is free, draining nodes --> Place, one a live node
    the last decision's exclude + book of nodes --> nodes kept off --> Ray label selector
    free places elsewhere --> the spec's own layout, or after SHRINK the next smaller legal one

Decides nothing about failures (decisions.py) and starts nothing (launch.py).
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import ray
from ray._private.state import state as ray_state

from jobs.planner.legality import nearest_layout, with_layout
from jobs.spec.job import JobSpec, ResourcesSection
from ops.decision import Action, Decision
from ops.quarantine import Fleet, label_selector
from ops.situation import Situation
from ops.spares import layout_for
from service.decisions import Nodes

SETTLE_S = 5.0
"""What an attempt held is free again within so long: until then room is not taken for gone."""


@dataclass(frozen=True)
class Place:
    """A live node."""

    node_id: str
    address: str
    slots: int
    """Ranks that it holds when nothing else runs there."""
    free: int
    """Ranks that it holds now, beside what runs there."""
    is_leaving: bool = False
    """Ray drains it: nothing new is placed there, and it goes soon."""


@dataclass(frozen=True)
class Start:
    """What the next attempt runs with."""

    spec: JobSpec
    """The run's own, or with a smaller layout."""
    selector: dict[str, str] = field(default_factory=dict)
    """Ray label selector of its workers."""
    off: tuple[str, ...] = ()
    """Addresses of the live nodes that it keeps off."""


def live_places(needs: ResourcesSection) -> list[Place]:
    """The live nodes of the cluster, as Ray's control store knows them now."""
    free = ray_state.available_resources_per_node()
    leaving = ray_state.get_draining_nodes()
    at_most = 1 if needs.placement == "STRICT_SPREAD" else 1 << 30
    return [
        Place(
            node["NodeID"],
            node["NodeManagerAddress"],
            min(at_most, _slots(node["Resources"], needs)),
            min(at_most, _slots(free.get(node["NodeID"], {}), needs)),
            node["NodeID"] in leaving,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _slots(resources: Mapping[str, float], needs: ResourcesSection) -> int:
    by_cpu = math.floor(resources.get("CPU", 0.0) / needs.cpus_per_worker + 1e-6)
    by_gpu = resources.get("GPU", 0.0) // needs.gpus_per_worker if needs.gpus_per_worker else by_cpu
    return int(min(by_cpu, by_gpu))


class Room:
    """The room that one run has on the cluster. Knows which nodes its decisions keep it off."""

    def __init__(self, spec: JobSpec) -> None:
        """Looks at nothing yet.

        Args:
            spec: the run as its user wrote it: the layout to come back to.
        """
        self._spec = spec
        self._exclude: frozenset[str] = frozenset()
        self._ids_then: frozenset[str] = frozenset()

    @property
    def spec(self) -> JobSpec:
        """The run's own: with its full layout."""
        return self._spec

    @cached_property
    def can_shrink_to(self) -> int:
        """The fewest ranks that the run goes on with: those of a legal layout, of which there are enough."""
        floor = math.ceil(self._spec.resilience.shrink_to_frac * self._spec.world_size)
        low, high = floor, self._spec.world_size
        while low < high:
            middle = (low + high) // 2
            mesh = layout_for(self._spec, middle, nearest_layout)
            if mesh is not None and mesh.world_size >= floor:
                high = middle
            else:
                low = middle + 1
        return low

    def keep_off(self, exclude: Sequence[str], have: Sequence[Place]) -> None:
        """Keep off these nodes from now on, and off no others but those that the book holds out.

        Args:
            exclude: addresses, from the newest decision.
            have: the live nodes at that moment; none where that is not known: then they count again where
                there is no room without them.
        """
        self._exclude = frozenset(exclude)
        self._ids_then = frozenset(place.node_id for place in have)

    def nodes(self, have: Sequence[Place], own: Mapping[str, int]) -> Nodes:
        """What the policy is told of the cluster.

        Args:
            have: the live nodes.
            own: ranks of this run by Ray node id: their places count as room.
        """
        slots: dict[str, int] = {}
        for place in have:
            room = 0 if place.is_leaving else min(place.slots, place.free + own.get(place.node_id, 0))
            slots[place.address] = slots.get(place.address, 0) + room
        return Nodes(
            slots=slots,
            n_ranks=self._spec.world_size,
            can_shrink_to=self.can_shrink_to,
            n_nodes=len(slots),
        )

    def start(
        self, have: Sequence[Place], fleet: Fleet, decision: Decision | None, waited_s: float
    ) -> Start | None:
        """What the next attempt can run with now; None where that has to be waited for.

        Nodes that the last decision keeps off count again once they were started anew, if there is no room
        without them; those that the book holds out of service never do.

        Args:
            have: the live nodes.
            fleet: the book of nodes.
            decision: the last one; a SHRINK allows a smaller layout.
            waited_s: since room was first looked for.
        """
        out = fleet.out_of_service
        seen_then = {place.address for place in have if place.node_id in self._ids_then}
        for off in dict.fromkeys((self._exclude | out, (self._exclude & seen_then) | out)):
            usable = self._usable(have, off)
            spec: JobSpec | None = None
            if usable >= self._spec.world_size:
                spec = self._spec
            elif decision is not None and decision.action is Action.SHRINK:
                hoped = usable if waited_s > SETTLE_S else max(usable, decision.n_ranks)
                smaller = self._smaller(hoped)
                spec = smaller if smaller is not None and smaller.world_size <= usable else None
            if spec is not None:
                listed = {place.node_id: place.address for place in have}
                shunned = tuple(sorted({place.address for place in have} & off))
                return Start(spec, label_selector(off, listed), shunned)
        return None

    def growth(
        self, have: Sequence[Place], own: Mapping[str, int], fleet: Fleet, *, has_progressed: bool
    ) -> Situation:
        """What ops.situation.decide_growth looks at.

        Args:
            have: the live nodes.
            own: ranks of this run by Ray node id.
            fleet: the book of nodes.
            has_progressed: a checkpoint was committed since nodes were left: they count again.
        """
        kept_off = {p.address for p in have if p.address in self._exclude and p.node_id in self._ids_then}
        if has_progressed:
            kept_off = set()
        nodes = self.nodes([place for place in have if place.address not in kept_off], own)
        return Situation(slots=nodes.slots, n_ranks=nodes.n_ranks, fleet=fleet)

    def shortage(self, have: Sequence[Place], fleet: Fleet) -> str:
        """Why there is no room, with the numbers."""
        needs = self._spec.resources
        out = sorted({place.address for place in have} & (fleet.out_of_service | self._exclude))
        held = sorted({place.address for place in have} & fleet.out_of_service)
        text = (
            f"no room for {self._spec.world_size} workers of {needs.cpus_per_worker:g} CPUs and "
            f"{needs.gpus_per_worker} GPUs: the {len(have)} live nodes have room for "
            f"{sum(place.free for place in have)}"
        )
        if out:
            text += f", of which {', '.join(out)} may not be used"
        if held:
            text += f" (see packtrain nodes ls, and packtrain nodes uncordon {held[0]})"
        return text

    def _usable(self, have: Sequence[Place], off: Set[str]) -> int:
        free = [place.free for place in have if place.address not in off and not place.is_leaving]
        return max(free, default=0) if self._spec.resources.placement == "STRICT_PACK" else sum(free)

    def _smaller(self, n_ranks: int) -> JobSpec | None:
        mesh = layout_for(self._spec, n_ranks, nearest_layout)
        if mesh is None or mesh.world_size < self.can_shrink_to:
            return None
        return with_layout(self._spec, mesh)
