"""The Engine protocol: how one optimizer step is executed. The trainer knows nothing else of parallelism."""

from dataclasses import dataclass
from typing import Protocol

import torch

from jobs.compute_clock import ComputeClock
from jobs.state import Chunk


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one data-parallel rank.

    B = micro-batch, S = sequence.
    """

    tokens: torch.Tensor
    """[B, S] int64."""
    labels: torch.Tensor
    """[B, S] int64: the next token, -100 where no loss is taken (padding, last token of a document)."""
    positions: torch.Tensor
    """[B, S] int64: position inside the document where documents are masked, else 0..S-1."""
    document_ids: torch.Tensor | None
    """[B, S] int32, equal inside a document (padding has its own ids); None: attention is plainly causal."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, equal on all ranks but for is_cause."""

    loss: float
    """Sum of cross entropies over the global batch / n_valid_tokens."""
    grad_norm: float
    """Global L2 norm of the mean gradient before clipping."""
    skipped: bool
    """Loss or gradient was not finite on some rank: nothing was updated on any."""
    bubble_frac: float | None = None
    """Idle part of the pipeline's forward and backward passes (jobs/planner/bubble.py); None without one."""
    is_cause: bool = False
    """This rank's own part of the loss was not finite; the one field that differs from rank to rank."""


class Engine(Protocol):
    """One optimizer step at a time. All methods but `chunks` are collective over all ranks."""

    clock: ComputeClock
    """Takes the time of this rank's forward and backward passes, once it is switched on."""

    @property
    def model(self) -> torch.nn.Module:
        """The (possibly sharded) module."""

    def train_step(self, batches: list[MicroBatch], n_valid_tokens: int, lr: float) -> StepResult:
        """Forward and backward over this rank's micro-batches, reduce, clip, update.

        Args:
            batches: this rank's grad_accum_steps micro-batches.
            n_valid_tokens: labels other than -100 in the whole global batch (all ranks, all micro-batches).
            lr: learning rate of this step.
        """

    def evaluate(self, batch: MicroBatch) -> tuple[float, int]:
        """Loss without gradient: sum of cross entropies and count of valid tokens over all ranks' batches."""

    def chunks(self) -> list[Chunk]:
        """This rank's state as live views; valid until the next train_step. Local: no communication."""

    def after_load(self, lr: float) -> None:
        """Make everything derived from the chunks (low-precision copies, step counters) agree with them.

        Called after a checkpoint was read into the chunks' tensors.
        """


def stages_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What passes forward by itself in an engine's model: each of its pipeline stages, or the whole."""
    return list(model) if isinstance(model, torch.nn.ModuleList) else [model]
