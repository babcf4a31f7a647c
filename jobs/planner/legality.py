"""Which layouts fit which run: why one does not, and the nearest that does. Pure; no torch.

A layout that passes here builds and trains; one that does not is refused before anything starts. The rules
are in rules.py. What one key alone may be is the schema's business (jobs/spec), and what a cluster has is not
looked at.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from jobs.mesh import AXES, SIZES, Mesh
from jobs.planner.rules import breaches
from jobs.spec.job import JobSpec

MAX_CANDIDATES = 20_000
"""Layouts that the search for the nearest looks at, the nearest first."""


@dataclass(frozen=True)
class Refusal:
    """One reason why a run cannot be executed as it is written."""

    key: str
    """Dotted key of the spec to blame."""
    reason: str
    """One sentence, with the numbers."""
    nearest: str
    """What to set instead, as `key=value`, several divided by spaces."""
    layout: Mesh | None = None
    """The nearest legal layout, where another layout is the way out."""

    def __str__(self) -> str:
        return f"{self.reason}; nearest: {self.nearest}"


def refusals(spec: JobSpec) -> list[Refusal]:
    """All rules that a run breaks; empty where its layout is legal."""
    broken = list(breaches(spec))
    if not broken:
        return []
    layout = None
    if any(breach.instead is None for breach in broken):
        layout = nearest_layout(spec)
    found = []
    for breach in broken:
        nearest, mesh = breach.instead, None
        if nearest is None:
            mesh = layout
            nearest = (
                _described(spec, layout) if layout is not None else "no layout of so many ranks or fewer"
            )
            nearest += f"; or {breach.alternative}" if breach.alternative else ""
        found.append(Refusal(breach.key, breach.reason, nearest, mesh))
    return found


def refusal_text(spec: JobSpec) -> str | None:
    """All refusals as one text, `key: reason; nearest: ...` a line; None where the layout is legal."""
    found = refusals(spec)
    return "\n".join(f"{refusal.key}: {refusal}" for refusal in found) if found else None


def nearest_layout(spec: JobSpec) -> Mesh | None:
    """The legal layout that changes least: with as many ranks where there is one, else with fewer.

    Rules that no layout mends (a precision, say) are left out of account. Least is: the fewest axes, then
    the smallest factors. None where there is none.
    """
    others = {breach.key for breach in breaches(spec) if breach.instead is not None}
    for candidates in (_of_equal_size(spec), _of_smaller_size(spec)):
        for mesh in candidates[:MAX_CANDIDATES]:
            left = breaches(with_layout(spec, mesh))
            if all(breach.instead is not None and breach.key in others for breach in left):
                return mesh
    return None


def with_layout(spec: JobSpec, mesh: Mesh) -> JobSpec:
    """The spec with other axis sizes; nothing is checked."""
    sizes = {axis: getattr(mesh, axis) for axis in SIZES if axis in type(spec.strategy).model_fields}
    return spec.model_copy(update={"strategy": spec.strategy.model_copy(update=sizes)})


def _of_equal_size(spec: JobSpec) -> list[Mesh]:
    own = spec.strategy.mesh
    dense = [axis for axis in AXES if axis in type(spec.strategy).model_fields]
    meshes = [
        Mesh(**dict(zip(dense, sizes, strict=True)), ep=ep, etp=etp)
        for sizes in _factorings(own.world_size, len(dense))
        for ep, etp in _expert_sizes(spec)
    ]
    return sorted(meshes, key=lambda mesh: _distance(own, mesh))


def _of_smaller_size(spec: JobSpec) -> list[Mesh]:
    """Every axis by one of its divisors, or one axis by any smaller number."""
    own = spec.strategy.mesh
    sizes = {axis: getattr(own, axis) for axis in SIZES}
    meshes = {Mesh(*chosen) for chosen in product(*(_divisors(size) for size in sizes.values()))}
    meshes |= {Mesh(**sizes | {axis: n}) for axis, size in sizes.items() for n in range(1, min(size, 4096))}
    return sorted(meshes, key=lambda mesh: (_distance(own, mesh), -mesh.world_size))


def _expert_sizes(spec: JobSpec) -> list[tuple[int, int]]:
    own, moe = spec.strategy.mesh, spec.model.moe
    if moe is None or "ep" not in type(spec.strategy).model_fields:
        return [(own.ep, own.etp)]
    return [(ep, etp) for ep in {own.ep, *_divisors(moe.n_experts)} for etp in _divisors(own.etp)]


def _factorings(n: int, n_factors: int) -> Iterator[tuple[int, ...]]:
    if n_factors == 1:
        yield (n,)
        return
    for first in _divisors(n):
        for rest in _factorings(n // first, n_factors - 1):
            yield first, *rest


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _distance(own: Mesh, other: Mesh) -> tuple[int, float, tuple[int, ...]]:
    ratios = [abs(math.log2(getattr(other, axis) / getattr(own, axis))) for axis in SIZES]
    n_changed = sum(ratio > 0 for ratio in ratios)
    return n_changed, round(sum(ratios), 6), tuple(-getattr(other, axis) for axis in SIZES)


def _described(spec: JobSpec, mesh: Mesh) -> str:
    """The axes that change, as a user would write them after --set."""
    own = spec.strategy.mesh
    changes = [a for a in SIZES if getattr(mesh, a) != getattr(own, a)]
    return " ".join(f"strategy.{axis}={getattr(mesh, axis)}" for axis in changes)
