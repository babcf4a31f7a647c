"""The strategy section: which engine executes a step, and the layout over which it does.

What fits with what is decided in jobs/planner/legality.py, not here.
"""

from typing import Annotated, Literal

from pydantic import Field

from jobs.mesh import Mesh
from jobs.spec.base import SpecSection

Recompute = Literal["none", "attention", "ops", "full"]
"""What the backward pass computes again: nothing; the attention core; all but products; whole layers."""
ContextMethod = Literal["ring", "ulysses", "all_gather"]
PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"
]
Split = Literal["layers", "parameters"] | tuple[Annotated[int, Field(gt=0)], ...]
"""Layers of each stage: as even as possible by count, by parameters, or as listed."""


class PipelineSection(SpecSection):
    """How the layers are cut into stages, and in which order micro-batches pass them."""

    schedule: PipelineSchedule = "1f1b"
    stages_per_rank: int = Field(default=1, gt=0)
    """Virtual stages: more than one for the interleaved schedules, two for the V-shaped ones."""
    split: Split = "layers"


class NativeStrategy(SpecSection):
    """Hand-written parallelism; world_size = dp * pp * cp * tp, experts folded in (see jobs/mesh.py)."""

    kind: Literal["native"] = "native"
    dp: int = Field(default=1, gt=0)
    """Data-parallel ranks: other samples."""
    pp: int = Field(default=1, gt=0)
    """Pipeline-parallel ranks: other layers. Micro-batches are train.global_batch_size / micro / dp."""
    cp: int = Field(default=1, gt=0)
    """Context-parallel ranks: other parts of each sequence."""
    tp: int = Field(default=1, gt=0)
    """Tensor-parallel ranks: other parts of each matrix."""
    ep: int = Field(default=1, gt=0)
    """Expert-parallel ranks: other experts."""
    etp: int = Field(default=1, gt=0)
    """Ranks that one expert's matrices are cut over."""
    sequence_parallel: bool = True
    """With tp: norms and residuals hold only this rank's part of the sequence (arXiv 2205.05198, 4.2.2)."""
    context_method: ContextMethod = "ring"
    pipeline: PipelineSection = PipelineSection()
    zero_stage: Literal[0, 1] = 0
    """1: each rank that shares a parameter updates its part only (arXiv 1910.02054, 5.1)."""
    recompute: Recompute | tuple[Recompute, ...] = "none"
    """One for all stages, or one for each pipeline stage in order."""
    bucket_mib: float = Field(default=25.0, gt=0)

    @property
    def mesh(self) -> Mesh:
        """The axes' sizes."""
        return Mesh(self.dp, self.pp, self.cp, self.tp, self.ep, self.etp)


class DeepspeedZeroStrategy(SpecSection):
    """DeepSpeed ZeRO (arXiv 1910.02054), stages 0 to 3; stage 0 in fp32 only."""

    kind: Literal["deepspeed_zero"]
    dp: int = Field(default=1, gt=0)
    cp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    ep: int = Field(default=1, gt=0)
    etp: int = Field(default=1, gt=0)
    sequence_parallel: bool = True
    context_method: ContextMethod = "ring"
    recompute: Recompute = "none"
    stage: Literal[0, 1, 2, 3]
    deepspeed_config: str | None = None
    """Path of a DeepSpeed JSON: its keys are honoured, refused with the reason, or named as ignored."""
    zero_options: dict[str, bool | int | float] = Field(default_factory=dict)
    """Keys of zero_optimization taken over from deepspeed_config (filled in by the loader)."""

    @property
    def mesh(self) -> Mesh:
        """The axes' sizes."""
        return Mesh(dp=self.dp, cp=self.cp, tp=self.tp, ep=self.ep, etp=self.etp)


class DeepspeedPipelineStrategy(SpecSection):
    """DeepSpeed's PipelineModule (1F1B), with ZeRO stage 0 or 1."""

    kind: Literal["deepspeed_pipeline"]
    dp: int = Field(default=1, gt=0)
    pp: int = Field(default=1, gt=0)
    split: Split = "layers"
    recompute: Literal["none", "full"] = "none"
    stage: Literal[0, 1] = 0

    @property
    def mesh(self) -> Mesh:
        """The axes' sizes."""
        return Mesh(dp=self.dp, pp=self.pp)


Strategy = Annotated[
    NativeStrategy | DeepspeedZeroStrategy | DeepspeedPipelineStrategy, Field(discriminator="kind")
]
