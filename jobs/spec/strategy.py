"""The strategy section: which engine executes a step, over how many ranks."""

from typing import Annotated, Literal

from pydantic import Field

from jobs.spec.base import SpecSection


class NativeStrategy(SpecSection):
    """Hand-written data parallelism: bucketed gradient all-reduce, overlapped with the backward pass."""

    kind: Literal["native"] = "native"
    dp: int = Field(default=1, gt=0)
    """Data-parallel ranks; the world size, as long as there is no other axis."""
    bucket_mib: float = Field(default=25.0, gt=0)


class DeepspeedZeroStrategy(SpecSection):
    """DeepSpeed ZeRO (arXiv 1910.02054), stages 0 to 3; stage 0 in fp32 only."""

    kind: Literal["deepspeed_zero"]
    dp: int = Field(default=1, gt=0)
    stage: Literal[0, 1, 2, 3]
    deepspeed_config: str | None = None
    """Path of a DeepSpeed JSON: its keys are honoured, refused with the reason, or named as ignored."""
    zero_options: dict[str, bool | int | float] = Field(default_factory=dict)
    """Keys of zero_optimization taken over from deepspeed_config (filled in by the loader)."""


Strategy = Annotated[NativeStrategy | DeepspeedZeroStrategy, Field(discriminator="kind")]
