"""Spare nodes of a run: how many it wants, which are held for it, what is told of them.

A spare is held by a placement group over all its free places, so that no other job takes them. Between
attempts cluster.release_placement_groups gives it back with all else, and the next attempt may run on it.
Whether spares pay is in ops/spares.py; which nodes are out of service is for others to say.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from jobs.spec.job import JobSpec
from ops.quarantine import NODE_ID_LABEL
from ops.spares import plan_spares
from service.room import Place

FAILURES_PER_NODE_DAY = 0.0065
REPAIR_DAYS = 1.0
"""For `spares: auto`: 6.5 failures in a thousand node-days, as on a research cluster of 16,000 A100 GPUs
(Kokolis et al., arXiv 2410.21680), and a day until a node is back."""


def wanted_spares(spec: JobSpec, n_nodes: int) -> int:
    """Spares for a run on so many nodes, by its spec."""
    if spec.resilience.spares == "auto":
        return plan_spares(n_nodes, FAILURES_PER_NODE_DAY, REPAIR_DAYS).n_spares
    return spec.resilience.spares


def choose_spares(
    have: Sequence[Place], ranks_on: Mapping[str, int], held: Set[str], out: Set[str], n_wanted: int
) -> list[Place]:
    """Nodes to hold in addition to those held, the roomiest first. Pure.

    Args:
        have: the live nodes.
        ranks_on: ranks of the run by Ray node id: a spare has room for as many as the fullest of these nodes.
        held: Ray node ids of the spares that are held already.
        out: addresses of nodes that the run keeps off.
        n_wanted: spares in all.
    """
    busy = {place.address for place in have if place.node_id in ranks_on}
    needed = max(ranks_on.values(), default=1)
    free = [
        place
        for place in have
        if place.address not in busy | out
        and place.node_id not in held
        and place.free >= needed
        and not place.is_leaving
    ]
    ranked = sorted(free, key=lambda place: (-place.free, place.address))
    return ranked[: max(0, n_wanted - len(held))]


class SpareNodes:
    """The spares of one attempt."""

    def __init__(self, spec: JobSpec, note: Callable[..., None]) -> None:
        """Nothing is held yet.

        Args:
            spec: of the run.
            note: writes an event to the ledger.
        """
        self._spec = spec
        self._note = note
        self._groups: dict[str, PlacementGroup] = {}
        self._told: tuple[int, list[str]] | None = None
        self.places: Counter[str] = Counter()
        """Places held, by Ray node id."""

    def hold(self, have: Sequence[Place], ranks_on: Mapping[str, int], out: Set[str]) -> None:
        """Hold as many as are wanted and there; let go those that are not to be used any more."""
        n_wanted = wanted_spares(self._spec, len(ranks_on))
        usable = {place.node_id: place for place in have if place.address not in out and not place.is_leaving}
        for node_id in set(self._groups) - set(usable):
            del self.places[node_id]
            with contextlib.suppress(Exception):  # of Ray: the node may be gone
                remove_placement_group(self._groups.pop(node_id))
        needs = self._spec.resources
        for place in choose_spares(have, ranks_on, set(self._groups), out, n_wanted):
            bundle = {"CPU": place.free * needs.cpus_per_worker}
            if needs.gpus_per_worker:
                bundle["GPU"] = float(place.free * needs.gpus_per_worker)
            selector = [{NODE_ID_LABEL: place.node_id}]
            self._groups[place.node_id] = placement_group([bundle], bundle_label_selector=selector)
            self.places[place.node_id] = place.free
        held = sorted(usable[node_id].address for node_id in self._groups)
        if (n_wanted, held) != self._told and (n_wanted or self._told):
            self._told = (n_wanted, held)
            self._note("spares", wanted=n_wanted, held=held)
