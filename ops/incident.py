"""What went wrong, once it has a name: class, culprit, evidence. Pure values; decides nothing."""

from collections.abc import Set
from dataclasses import dataclass, replace
from enum import StrEnum

from ops.signal import Entity


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
    STRAGGLER = "straggler"
    PREEMPTION = "preemption"
    USER_CODE = "user_code"
    CONFIGURATION = "configuration"
    ENVIRONMENT = "environment"
    NUMERICS = "numerics"
    TRACKING = "tracking"
    WORKER_KILLED = "worker_killed"
    BENIGN = "benign"
    UNKNOWN = "unknown"


class Nature(StrEnum):
    """What the policy has to know of a failure beside its class."""

    CLEAR = "clear"
    AMBIGUOUS = "ambiguous"
    """A bad chip and bad code look the same (Xid 13, 31, 32, 43, 69, 109): what it follows will tell."""
    CONTAINED = "contained"
    """The hardware dealt with it and is good for more (Xid 63, 92, 94)."""
    FABRIC = "fabric"
    """It takes in all nodes of a failure domain: an NVSwitch, a rack."""


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
    entity: Entity | None = None
    """The culprit as a value, where it is known as one; else its text is all there is."""
    nature: Nature = Nature.CLEAR
    symptom: str = ""
    """What was seen, more exactly than the class: "xid 79"."""
    detector: str = ""
    """Name of the monitor or detector whose word it is; empty where a process ended by itself."""
    good_step: int | None = None
    """State after a later step is not to be trusted, whatever was saved; None: nothing is known of that."""
    generation: tuple[int, int] | None = None
    """(attempt, generation) of the ranks that it happened to, where known: no set of ranks fails twice."""
    otherwise: "Incident | None" = None
    """What it is without the word of the detector: acted on while that only observes."""

    def without_word_of(self, detectors: Set[str]) -> "Incident":
        """What is left where these detectors only observe: unknown, if nobody else knows."""
        if self.detector not in detectors:
            return self
        if self.otherwise is not None:
            return replace(self.otherwise, generation=self.generation, evidence=self.evidence, otherwise=None)
        return replace(
            self, failure_class=FailureClass.UNKNOWN, nature=Nature.CLEAR, entity=None, culprit="unknown"
        )

    @property
    def fingerprint(self) -> str:
        """Same class, same culprit, same step: the same failure again, without progress."""
        return f"{self.failure_class}:{self.culprit}:{self.step}"
