"""JobSpec: the whole of one run, frozen. Its resolved JSON, kept with the run, is the truth of that run."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from jobs.spec.base import SpecSection
from jobs.spec.data import DataSpec
from jobs.spec.model import ModelSpec
from jobs.spec.optim import OptimSpec
from jobs.spec.strategy import NativeStrategy, Strategy

Precision = Literal["fp32", "bf16", "bf16_kahan", "fp8", "fp64"]
"""What is computed and kept in which type:

bf16        bfloat16 forward and backward; fp32 master weights, moments and gradient reduction
bf16_kahan  bfloat16 weights and gradients with compensated sums: 12 bytes a parameter (jobs/optim/kahan.py)
fp8         as bf16, with the layers' products in 8 bits, on GPUs that can
fp64        everything, for comparing layouts
"""
OnBadLoss = Literal["rollback", "skip", "stop"]
"""What follows a loss that is not finite:

rollback    an older checkpoint, without the data since then
skip        the step is counted and training goes on, up to max_skipped_steps in a row; then as rollback
stop        the run ends
"""
OBSERVING = (
    "straggler",
    "replica_digest",
    "loss_spike",
    "kernel_log",
    "gpu_health",
    "nvidia_smi",
    "dcgm",
    "health_lines",
    "cgroup_memory",
    "disks",
    "shm",
    "nics",
    "infiniband",
    "clock_skew",
    "d_state",
)
"""Detectors whose word is not acted upon before somebody has seen on this cluster that it can be trusted."""
_LONGEST_S = 1e8
"""Three years: clocks and timers take no limit that is much longer."""
_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


class RunSection(SpecSection):
    """Where the run lives and what it is called."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")
    """Run id, unique under `storage`; None makes one from the spec's file name and the time."""
    storage: str = Field(default="runs", min_length=1)
    """Folder that every node sees: each run is a folder below it."""
    seed: int = Field(default=0, ge=0)


class TrainSection(SpecSection):
    """How long and in what portions."""

    steps: int = Field(gt=0)
    global_batch_size: int = Field(gt=0)
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int = Field(gt=0)
    """Sequences per forward pass on one data-parallel rank."""
    precision: Precision = "fp32"
    evaluate_every_steps: int | None = Field(default=None, gt=0)
    evaluate_batches: int = Field(default=8, gt=0)
    """Global batches of validation data in each evaluation."""
    init_from: str | None = Field(default=None, min_length=1)
    """Hugging Face folder whose weights the run starts from."""


class ResourcesSection(SpecSection):
    """What each worker takes from the Ray cluster."""

    cpus_per_worker: float = Field(default=1.0, gt=0)
    gpus_per_worker: int = Field(default=0, ge=0)
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    threads_per_rank: int = Field(default=1, gt=0)
    env: dict[Annotated[str, Field(pattern=r"^[^=]+$")], str] = Field(default_factory=dict)
    """Environment of the rank processes, over what the node has (GLOO_SOCKET_IFNAME, NCCL_*, ...)."""


class CheckpointSection(SpecSection):
    """When state is saved and how much of it is kept."""

    every_steps: int | None = Field(default=None, gt=0)
    """None saves only at the end and when stopped."""
    keep_last: int = Field(default=3, gt=0)
    asynchronous: bool = True
    commit_timeout_s: float = Field(default=600.0, gt=0, le=_LONGEST_S)
    """A save that is not committed after so long is given up; the run goes on."""


class ResilienceSection(SpecSection):
    """How often each kind of failure may happen before the run stops, without progress in between."""

    max_rank_restarts: int = Field(default=10, ge=0)
    """Restarts of the ranks in place since the last newly committed checkpoint."""
    max_attempts: int = Field(default=5, gt=0)
    """New attempts (node loss, dead worker or controller) since the last newly committed checkpoint."""
    max_no_progress: int = Field(default=2, gt=0)
    """The same failure at the same step so many times in a row stops the run."""
    on_bad_loss: OnBadLoss = "rollback"
    """What follows a step whose loss or gradient is not finite; no parameter is changed by it."""
    max_skipped_steps: int = Field(default=3, ge=0)
    """With on_bad_loss=skip: so many such steps in a row are passed over; one more is an incident."""
    digest_every_steps: int | None = Field(default=100, gt=0)
    """Digests of parameters are compared between replicas after each multiple; None compares none."""
    straggler_window_steps: int | None = Field(default=32, gt=0)
    """Steps over which each rank's pure compute times are judged; None measures none."""
    wait_for_nodes_s: float = Field(default=300.0, ge=0, le=_LONGEST_S)
    """How long a new attempt waits for enough live nodes."""
    spares: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    """Nodes beyond those of the run that are held for it, as far as they are there; auto: as many as keep it
    whole for 99 % of the time."""
    shrink_to_frac: float = Field(default=0.5, gt=0, le=1)
    """Where nodes are lost and no spare is left, the run goes on with the next smaller legal layout and the
    same global batch, down to this share of its ranks; 1 never shrinks. It grows back when nodes return."""
    collective_timeout_s: float = Field(default=600.0, gt=0, le=_LONGEST_S)
    stop_grace_s: float = Field(default=120.0, gt=0, le=_LONGEST_S)
    """Time that ranks get to save and leave after a stop request."""
    observe: tuple[str, ...] = OBSERVING
    """Detectors that only observe: what their word would lead to is written down and not done."""


class TrackingSection(SpecSection):
    """Where the figures go besides the run folder."""

    mlflow: bool = True
    mlflow_uri: str | None = None
    """Any MLflow tracking URI; None embeds a sqlite store under run.storage."""
    experiment: str = "packtrain"
    log_every_steps: int = Field(default=1, gt=0)
    flops_convention: Literal["causal_half", "full_attention"] = "causal_half"
    """How attention is counted in MFU: the causal half (Megatron) or all pairs of positions (torchtitan)."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak of one rank's device for MFU; None measures a matrix product at start."""
    notify: tuple[str, ...] = ()
    """Who is told of incidents and of the end: each `${NAME}`, an environment variable of the driver that
    holds one Apprise URL (mailto://, slack://, json://, ...). The URL itself never gets into the spec."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port on which the driver serves this run's figures to Prometheus; 0 serves none."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """Address that they are served on; 0.0.0.0 lets other hosts read them."""

    @field_validator("notify", mode="before")
    @classmethod
    def _names_variables(cls, entries: Any) -> Any:
        listed = [entries] if isinstance(entries, str) else entries
        if not isinstance(listed, list | tuple) or not all(isinstance(entry, str) for entry in listed):
            return entries
        for place, entry in enumerate(listed, start=1):
            if not _VARIABLE.fullmatch(entry):  # never quoted: it may be a secret
                raise ValueError(
                    f"entry {place} is no ${{NAME}}: an Apprise URL holds tokens and passwords, and the spec "
                    "is kept with the run; put the URL into an environment variable where the driver runs "
                    "and write ${NAME} here"
                )
        return tuple(listed)


class JobSpec(SpecSection):
    """One run."""

    run: RunSection = RunSection()
    model: ModelSpec
    data: DataSpec
    optim: OptimSpec
    train: TrainSection
    strategy: Strategy = NativeStrategy()
    resources: ResourcesSection = ResourcesSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resilience: ResilienceSection = ResilienceSection()
    tracking: TrackingSection = TrackingSection()

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.strategy.mesh.world_size

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches per optimizer step on each data-parallel rank."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.strategy.dp)

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        micro, dp, whole = self.train.micro_batch_size, self.strategy.dp, self.train.global_batch_size
        if whole % (micro * dp):
            accum = max(1, whole // (micro * dp))
            sizes = [n for n in range(1, min(whole // micro, 2 * dp, 4096) + 1) if whole % (micro * n) == 0]
            raise ValueError(
                f"train.global_batch_size={whole} is not micro_batch_size x dp x a whole number: "
                f"{whole} != {micro} x {dp} x {whole / (micro * dp):g}; "
                f"nearest that work: {micro * dp * accum} or {micro * dp * (accum + 1)}"
                + (f"; or strategy.dp={' or '.join(map(str, sizes[-4:]))} as it is" if sizes else "")
            )
        return self

    @model_validator(mode="after")
    def _sequence_fits(self) -> Self:
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len={self.data.seq_len} is longer than "
                f"model.max_seq_len={self.model.max_seq_len}; shorten the one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _stage_zero_is_not_bf16(self) -> Self:
        strategy = self.strategy
        if strategy.kind != "native" and strategy.stage == 0 and self.train.precision == "bf16":
            raise ValueError(
                "strategy.stage=0 with train.precision=bf16: DeepSpeed's unfused bf16 optimizer takes one "
                "extra step at construction and trains wrongly; choose stage 1 or precision fp32"
            )
        return self
