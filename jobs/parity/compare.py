"""Compares what the ranks of a layout hold with one process, and says where they differ most.

Who starts the ranks is the caller's business (`Runner`): a test's processes, or service/parity.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from jobs.mesh import Mesh
from jobs.parallel.placement import kv_replicas
from jobs.parity.rank import Piece, RankNumbers, measure_rank
from jobs.parity.reference import Numbers, reference
from jobs.spec.job import JobSpec

Runner: TypeAlias = Callable[..., Sequence[Any]]
"""(fn, mesh, kv_replicas, *args) -> what `fn(groups, *args)` returned on each rank, in rank order."""
FP64_FACTOR = 1e-4
"""In fp64 every tolerance is four orders tighter."""


@dataclass(frozen=True)
class Tolerances:
    """What may differ at most."""

    loss_abs: float = 1e-6
    grad_norm_rel: float = 1e-6
    grad_rel: float = 1e-5
    """Of each parameter: Frobenius norm of the difference over that of the gradient."""
    weights_rel: float = 1e-5
    """Of each parameter: Frobenius norm of the difference over that of the weights."""
    losses_abs: float = 1e-5

    @classmethod
    def of(cls, precision: str) -> "Tolerances":
        """For "fp32", or tighter for "fp64"."""
        factor = FP64_FACTOR if precision == "fp64" else 1.0
        whole = cls()
        return cls(*(factor * limit for limit in vars(whole).values()))


@dataclass(frozen=True)
class Difference:
    """How far one parameter is from one process' on the rank that is farthest."""

    name: str
    rel: float
    """nan where some of it is on no rank, or not finite."""


@dataclass(frozen=True)
class ParityReport:
    """One layout against one process."""

    layout: dict[str, int | str]
    precision: str
    n_steps: int
    tolerances: Tolerances
    loss: float
    """Of one process."""
    loss_abs: float
    """Largest difference over the ranks."""
    grad_norm: float
    grad_norm_rel: float
    gradients: tuple[Difference, ...]
    """Worst first."""
    after_adamw: tuple[Difference, ...]
    after_sgd: tuple[Difference, ...]
    losses_abs: float
    """Largest over steps and ranks."""
    problems: tuple[str, ...]
    """One sentence for each thing that is out of tolerance."""

    @property
    def ok(self) -> bool:
        """The layout equals one process."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As printed by `packtrain parity --json`."""
        return {
            "ok": self.ok,
            "layout": self.layout,
            "precision": self.precision,
            "loss_abs": self.loss_abs,
            "grad_norm_rel": self.grad_norm_rel,
            "worst_grad": vars(self.gradients[0]),
            "worst_weight_after_adamw": vars(self.after_adamw[0]),
            "worst_weight_after_sgd": vars(self.after_sgd[0]),
            "losses_abs": self.losses_abs,
            "n_steps": self.n_steps,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "tolerances": vars(self.tolerances),
            "gradients": {difference.name: difference.rel for difference in self.gradients},
            "problems": list(self.problems),
        }


def compare_layout(spec: JobSpec, run: Runner, n_steps: int = 10) -> ParityReport:
    """Train the spec's layout and one process, and compare.

    Args:
        spec: a run that is small enough for its ranks to live on this machine; precision fp32 or fp64.
        run: starts the ranks.
        n_steps: steps over which losses are compared.
    """
    mesh = spec.strategy.mesh
    ranks = run(measure_rank, mesh, kv_replicas(spec.model, mesh), spec, n_steps)
    return compare(spec, list(ranks), reference(spec, n_steps))


def compare(spec: JobSpec, ranks: list[RankNumbers], one: Numbers) -> ParityReport:
    """The report on what the ranks hold. Pure."""
    precision = spec.train.precision
    limit = Tolerances.of(precision)
    gradients = _differences([rank.gradients for rank in ranks], one.gradients)
    after_adamw = _differences([rank.after_adamw for rank in ranks], one.after_adamw)
    after_sgd = _differences([rank.after_sgd for rank in ranks], one.after_sgd)
    loss_abs = _largest([rank.loss - one.loss for rank in ranks])
    grad_norm_rel = _largest([rank.grad_norm / one.grad_norm - 1.0 for rank in ranks])
    losses_abs = _largest(
        [ours - theirs for rank in ranks for ours, theirs in zip(rank.losses, one.losses, strict=True)]
    )
    problems = [
        f"{what} differs by {found:.2e}, more than {most:.0e}"
        for what, found, most in (
            ("loss", loss_abs, limit.loss_abs),
            ("gradient norm", grad_norm_rel, limit.grad_norm_rel),
            (f"loss over {len(one.losses)} steps", losses_abs, limit.losses_abs),
        )
        if not found <= most
    ]
    for what, differences, most in (
        ("gradient", gradients, limit.grad_rel),
        ("weight after one AdamW step", after_adamw, limit.weights_rel),
        ("weight after one SGD step", after_sgd, limit.weights_rel),
    ):
        problems += [
            f"{what} of {difference.name} differs by {difference.rel:.2e}, more than {most:.0e}"
            for difference in differences
            if not difference.rel <= most
        ]
    return ParityReport(
        _layout(spec),
        precision,
        len(one.losses),
        limit,
        one.loss,
        loss_abs,
        one.grad_norm,
        grad_norm_rel,
        gradients,
        after_adamw,
        after_sgd,
        losses_abs,
        (*_not_tiled(ranks, one), *problems),
    )


def _layout(spec: JobSpec) -> dict[str, int | str]:
    """Kind of engine and the axes' sizes."""
    mesh: Mesh = spec.strategy.mesh
    return {"kind": spec.strategy.kind, **vars(mesh)}


def _largest(numbers: list[float]) -> float:
    """Largest absolute value; nan where one is nan."""
    return float("nan") if any(math.isnan(x) for x in numbers) else max(abs(x) for x in numbers)


def _differences(ranks: list[list[Piece]], whole: dict[str, torch.Tensor]) -> tuple[Difference, ...]:
    """Each parameter's difference, the worst rank's where several hold an element; worst first."""
    # Elements that no rank holds stay nan, and so does the norm.
    errors = {name: torch.full_like(tensor, float("nan")) for name, tensor in whole.items()}
    for pieces in ranks:
        for piece in pieces:
            box = _box(piece)
            error = (piece.tensor.double() - whole[piece.name][box]).abs()
            seen = errors[piece.name][box]
            errors[piece.name][box] = torch.where(seen.isnan(), error, torch.maximum(seen, error))
    scale = math.sqrt(sum(float(tensor.square().sum()) for tensor in whole.values()))
    found = []
    for name, error in errors.items():
        # A gradient that is zero (an expert that no token visited) is measured by the whole one.
        own = float(whole[name].norm()) or scale
        found.append(Difference(name, float(error.norm()) / own))
    return tuple(sorted(found, key=lambda d: math.inf if math.isnan(d.rel) else d.rel, reverse=True))


def _not_tiled(ranks: list[RankNumbers], one: Numbers) -> list[str]:
    """Parameters of which an element is written by no rank, or by several."""
    n_writers = {
        name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in one.after_adamw.items()
    }
    problems = []
    for rank in ranks:
        for piece in rank.after_adamw:
            if piece.is_writer:
                n_writers[piece.name][_box(piece)] += 1
    for name, counts in n_writers.items():
        if not bool((counts == 1).all()):
            least, most = int(counts.min()), int(counts.max())
            problems.append(f"{name}: its elements are written by {least} to {most} ranks, not by one each")
    return problems


def _box(piece: Piece) -> tuple[slice, ...]:
    sizes = piece.tensor.shape
    return tuple(slice(start, start + size) for start, size in zip(piece.offsets, sizes, strict=True))
