"""One rank's side of a comparison: trains the phases with the spec's engine and tells what it holds.

Compares nothing and starts no process.
"""

from dataclasses import dataclass

import torch

from jobs.comm.groups import Groups
from jobs.engines.base import Engine, StepResult
from jobs.engines.build import build_engine
from jobs.optim.schedule import lr_at
from jobs.parity.batches import global_batch, n_valid_tokens, share
from jobs.parity.phases import gradient_phase, losses_phase, sgd_phase
from jobs.spec.job import JobSpec

GRADIENT = "optim/exp_avg/"
"""Chunks that are the mean gradient after the gradient phase."""
WEIGHT = "model/"


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor, copied out of one rank."""

    name: str
    """Logical name of the parameter."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    is_writer: bool
    """As in jobs.state.Chunk."""


@dataclass(frozen=True)
class RankNumbers:
    """What one rank has after the phases; the fields are those of jobs.parity.reference.Numbers."""

    loss: float
    grad_norm: float
    gradients: list[Piece]
    after_adamw: list[Piece]
    after_sgd: list[Piece]
    losses: list[float]


def measure_rank(groups: Groups, spec: JobSpec, n_steps: int) -> RankNumbers:
    """Train the phases under the spec's layout. Collective over all ranks.

    Args:
        groups: this rank's groups; their mesh is the spec's.
        spec: the run.
        n_steps: steps of the phase that gives `losses`.
    """
    first = gradient_phase(spec)
    engine = build_engine(first, groups, torch.device("cpu"))
    result = train_step(engine, first, groups, 0)
    gradients, after_adamw = _pieces(engine, GRADIENT), _pieces(engine, WEIGHT)
    del engine
    sgd = sgd_phase(spec)
    engine = build_engine(sgd, groups, torch.device("cpu"))
    train_step(engine, sgd, groups, 0)
    after_sgd = _pieces(engine, WEIGHT)
    del engine
    longer = losses_phase(spec)
    engine = build_engine(longer, groups, torch.device("cpu"))
    losses = [train_step(engine, longer, groups, step).loss for step in range(n_steps)]
    return RankNumbers(result.loss, result.grad_norm, gradients, after_adamw, after_sgd, losses)


def train_step(engine: Engine, spec: JobSpec, groups: Groups, step: int) -> StepResult:
    """Step number `step`, on this rank's share of its global batch. Collective over all ranks."""
    batch = global_batch(spec, step)
    lr = lr_at(spec.optim, spec.train.steps, step)
    return engine.train_step(share(batch, spec, groups.dp.rank), n_valid_tokens(batch), lr)


def _pieces(engine: Engine, prefix: str) -> list[Piece]:
    return [
        Piece(
            chunk.name.removeprefix(prefix),
            chunk.global_shape,
            chunk.offsets,
            chunk.tensor.detach().clone(),
            chunk.is_writer,
        )
        for chunk in engine.chunks()
        if chunk.name.startswith(prefix)
    ]
