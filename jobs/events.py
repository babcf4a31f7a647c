"""Values that training hands to its hooks: what one step was. Pure values, no torch."""

from dataclasses import asdict, dataclass
from typing import Any

Ranges = tuple[tuple[int, int], ...]
"""Whole numbers from the first of each pair up to, and without, the second."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step that was just completed (or skipped for a non-finite gradient).

    `step` counts completed steps: 0 before the first, so the first record has step 1.
    """

    step: int
    loss: float
    """Mean cross entropy per valid token over the global batch."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    n_tokens: int
    """Valid (trained) tokens of the global batch."""
    n_padding_tokens: int
    """Padding and masked tokens of the global batch."""
    step_time_s: float
    """Wall time from asking for the batch to the end of the update. What happens between steps is left out:
    all hooks (saving and writing metrics among them), evaluation, garbage collection."""
    data_time_s: float
    """Part of step_time_s spent waiting for the batch."""
    tokens_seen: int
    """Valid tokens since step 0, over all attempts."""
    sample_ordinal: int
    """Global sample ordinal of the next step's first sample: the whole state of the sampler."""
    skipped: bool = False
    """The gradient was not finite on some rank: no rank updated its parameters."""
    bubble_frac: float | None = None
    """Idle part of the pipeline's forward and backward passes, over all ranks; None without a pipeline."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation after `step` completed steps."""

    step: int
    loss: float
    """Mean cross entropy per valid token over the evaluated batches of all ranks."""
    n_tokens: int
    eval_time_s: float


@dataclass(frozen=True)
class Progress:
    """Where a run is: everything besides tensors that a checkpoint needs to go on."""

    step: int = 0
    sample_ordinal: int = 0
    tokens_seen: int = 0
    skipped_samples: Ranges = ()
    """Global sample ordinals that are passed over: the run was rolled back, and its data was to blame."""
