"""What went wrong, once it has a name: class, culprit, evidence. Pure values; decides nothing."""

from dataclasses import dataclass
from enum import StrEnum


class FailureClass(StrEnum):
    """The one vocabulary of failure classes."""

    GPU_HARDWARE = "gpu_hardware"
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    NETWORK = "network"
    NODE_LOST = "node_lost"
    STORAGE = "storage"
    CORRUPT_CHECKPOINT = "corrupt_checkpoint"
    HANG = "hang"
    PREEMPTION = "preemption"
    USER_CODE = "user_code"
    CONFIGURATION = "configuration"
    ENVIRONMENT = "environment"
    NUMERICS = "numerics"
    TRACKING = "tracking"
    WORKER_KILLED = "worker_killed"
    BENIGN = "benign"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Incident:
    """One failure, named."""

    failure_class: FailureClass
    culprit: str
    """The entity blamed: "rank 1 (node 10.0.0.3)", "node 10.0.0.3", "controller", "spec" ..."""
    evidence: str
    """The quoted line or traceback that the verdict rests on."""
    step: int
    """Last step known to be completed when it failed."""
    failed_at: float
    """Wall clock (unix seconds) of the first sign of it."""
    detected_at: float
    """Wall clock (unix seconds) when this verdict was reached."""

    @property
    def fingerprint(self) -> str:
        """Same class, same culprit, same step: the same failure again, without progress."""
        return f"{self.failure_class}:{self.culprit}:{self.step}"
