"""The optimizer section: AdamW or SGD, schedule with warm-up, clipping."""

from typing import Annotated, Literal

from pydantic import Field

from jobs.spec.base import SpecSection


class Cosine(SpecSection):
    """Linear warm-up to lr, then half a cosine down to lr * min_lr_frac at train.steps."""

    kind: Literal["cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    min_lr_frac: float = Field(default=0.1, ge=0, le=1)


class Wsd(SpecSection):
    """Warm-up, stable, decay (arXiv 2404.06395): constant until the last `decay_steps`, then down."""

    kind: Literal["wsd"]
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int = Field(gt=0)
    decay: Literal["linear", "sqrt", "cosine"] = "linear"
    min_lr_frac: float = Field(default=0.0, ge=0, le=1)


class Linear(SpecSection):
    """Linear warm-up to lr, then linearly down to lr * min_lr_frac at train.steps."""

    kind: Literal["linear"]
    warmup_steps: int = Field(default=0, ge=0)
    min_lr_frac: float = Field(default=0.0, ge=0, le=1)


class Constant(SpecSection):
    """Linear warm-up to lr, then constant."""

    kind: Literal["constant"]
    warmup_steps: int = Field(default=0, ge=0)


Schedule = Annotated[Cosine | Wsd | Linear | Constant, Field(discriminator="kind")]


class OptimSpec(SpecSection):
    """How parameters move."""

    kind: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Applied to matrices only: norms and other vectors are not decayed."""
    grad_clip_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm is clipped to this; None never clips."""
    schedule: Schedule = Cosine()
