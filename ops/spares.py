"""Spare nodes: how many to hold, at what price, and the layout to go on with when none is left. Pure.

Chooses no node (quarantine.py says which are out of service) and knows no rule of layouts: the search for
the nearest legal one is handed in by who calls.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from jobs.mesh import SIZES, Mesh
from jobs.spec.job import JobSpec

Nearest = Callable[[JobSpec], Mesh | None]
"""The legal layout nearest to a spec's own, with as many ranks or fewer: the spec's own where it is legal."""


@dataclass(frozen=True)
class SparePlan:
    """So many nodes held back, and what that costs and saves."""

    n_spares: int
    p_node: float
    """Probability that one given node is out at any moment: failures a day x days of repair."""
    n_out_mean: float
    """Nodes out of service at any moment, on average."""
    short_frac: float
    """Share of the time in which more nodes are out than there are spares: the run waits or shrinks."""
    idle_node_days_per_day: float
    """Spares that stand idle, on average: the price."""
    short_node_days_per_day: float
    """Nodes short of the full number, on average, with these spares: what is left of the damage."""


def binomial_quantile(n: int, p: float, quantile: float) -> int:
    """The smallest k with P(X <= k) >= quantile, where X ~ Binomial(n, p).

    Raises:
        ValueError: n is negative, or p or quantile is outside 0..1 (quantile: 1 excluded).
    """
    if n < 0 or not 0 <= p <= 1 or not 0 <= quantile < 1:
        raise ValueError(f"n={n}, p={p:g}, quantile={quantile:g}: n >= 0, 0 <= p <= 1, 0 <= quantile < 1")
    below = 0.0
    for k, mass in enumerate(_masses(n, p)):
        below += mass
        if below >= quantile:
            return k
    return n


def plan_spares(
    n_nodes: int, failures_per_node_day: float, repair_days: float, quantile: float = 0.99
) -> SparePlan:
    """How many spares keep a run of `n_nodes` whole for `quantile` of the time.

    The number of nodes out at any moment is taken as Binomial(n_nodes, failures a day x days of repair)
    (ByteRobust, arXiv 2509.16293, warm standbys sized by the P99).

    Raises:
        ValueError: a negative rate or time.
    """
    if failures_per_node_day < 0 or repair_days < 0:
        raise ValueError(
            f"failures_per_node_day={failures_per_node_day:g} and repair_days={repair_days:g}: both from 0 on"
        )
    p = min(1.0, failures_per_node_day * repair_days)
    n_spares = binomial_quantile(n_nodes, p, quantile)
    masses = list(_masses(n_nodes, p))
    idle = sum((n_spares - k) * mass for k, mass in enumerate(masses[:n_spares]))
    short = sum((k - n_spares) * mass for k, mass in enumerate(masses) if k > n_spares)
    return SparePlan(
        n_spares=n_spares,
        p_node=p,
        n_out_mean=n_nodes * p,
        short_frac=max(0.0, sum(masses[n_spares + 1 :])),
        idle_node_days_per_day=idle,
        short_node_days_per_day=short,
    )


def layout_for(spec: JobSpec, n_ranks: int, nearest: Nearest) -> Mesh | None:
    """The layout to go on with on `n_ranks`: the spec's own where it fits, else the next smaller legal one.

    The global batch stays: fewer data-parallel ranks take more micro-batches each. Data parallelism is cut
    first, since that leaves what one rank holds as it was (but for states sharded over dp); only where none
    fits are the other axes cut, by whole divisors. Asked again with more ranks it gives the larger layout
    back, so it serves for growing too.

    Args:
        spec: the run as its user wrote it; its mesh is the one to come back to.
        n_ranks: ranks that the usable nodes can hold.
        nearest: knows the rules, jobs.planner.legality.nearest_layout say. Where memory counts it must
            refuse what does not fit.

    Returns:
        None where no legal layout is so small.
    """
    own = spec.strategy.mesh
    if own.world_size <= n_ranks:
        return own
    for candidates in (_fewer_copies(spec), _smaller_copies(spec)):
        best: Mesh | None = None
        for mesh in sorted(candidates, key=lambda mesh: (-mesh.world_size, _n_changed(own, mesh))):
            if mesh.world_size > n_ranks:
                continue
            if best is not None and mesh.world_size <= best.world_size:
                break
            found = nearest(_with_mesh(spec, mesh))
            if found is not None and (best is None or found.world_size > best.world_size):
                best = found
        if best is not None:
            return best
    return None


def _fewer_copies(spec: JobSpec) -> Iterator[Mesh]:
    """Fewer data-parallel ranks that share the global batch evenly, all else as it is."""
    own = spec.strategy.mesh
    sizes = {axis: getattr(own, axis) for axis in SIZES}
    for dp in range(1, own.dp):
        if spec.train.global_batch_size % (spec.train.micro_batch_size * dp) == 0:
            yield Mesh(**sizes | {"dp": dp})


def _smaller_copies(spec: JobSpec) -> Iterator[Mesh]:
    own = spec.strategy.mesh
    inner = [[n for n in range(1, size + 1) if size % n == 0] for size in (own.pp, own.cp, own.tp)]
    for pp, cp, tp in product(*inner):
        for dp in range(1, own.dp + 1):
            if spec.train.global_batch_size % (spec.train.micro_batch_size * dp) == 0:
                yield Mesh(dp, pp, cp, tp, own.ep, own.etp)


def _n_changed(own: Mesh, mesh: Mesh) -> int:
    return sum(getattr(own, axis) != getattr(mesh, axis) for axis in SIZES)


def _with_mesh(spec: JobSpec, mesh: Mesh) -> JobSpec:
    """The spec with other axis sizes; nothing is checked."""
    sizes = {axis: getattr(mesh, axis) for axis in SIZES if axis in type(spec.strategy).model_fields}
    return spec.model_copy(update={"strategy": spec.strategy.model_copy(update=sizes)})


def _masses(n: int, p: float) -> Iterator[float]:
    """P(X = k) for k = 0..n, X ~ Binomial(n, p); by logarithms, so that no factor over- or underflows."""
    if p in (0.0, 1.0):
        yield from (float(k == round(n * p)) for k in range(n + 1))
        return
    for k in range(n + 1):
        log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        yield math.exp(log + k * math.log(p) + (n - k) * math.log1p(-p))
