"""Which rank failed first, and how: a verdict from the exits of one generation of ranks.

When a rank dies its peers fail a moment later with a broken connection: the loudest error is a victim's.
So a rank whose only error is a collective that lost its peer is blamed only when no other explanation
arrives. Does not read logs or kernel messages.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ops.incident import FailureClass, Incident

PEER_LOST_MARKS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",
    "recvBytes",
    "sendBytes",
    "failed to recv",
    "Socket closed",
    "NCCL",
    "ncclRemoteError",
    "ncclInternalError",
    "DistNetworkError",
    "DistStoreError",
    "Gloo connectFullMesh failed",
    "gloo",
)
"""Text of collectives (gloo, NCCL, TCPStore) that lost a peer, as torch 2.13 prints it."""


@dataclass(frozen=True)
class RankExit:
    """How one rank process of a generation ended."""

    rank: int
    node: str
    at: float
    """Wall clock (unix seconds) when its shell saw the exit."""
    exit_code: int
    """As in subprocess: negative is a signal number, 0 is a clean end."""
    error_type: str = ""
    """Qualified name of the exception that ended it; empty where it left none."""
    error_text: str = ""
    traceback: str = ""
    failure_class: str = ""
    """Class that the rank itself gave to its error; empty where it could not."""
    from_communication: bool = False
    """The exception came out of a collective or the store."""

    @property
    def is_failure(self) -> bool:
        """Anything but a clean end."""
        return self.exit_code != 0

    @property
    def is_victim(self) -> bool:
        """It says only that a peer went away."""
        if self.from_communication:
            return True
        is_runtime_error = self.error_type in ("builtins.RuntimeError", "builtins.ConnectionError")
        return is_runtime_error and any(mark in self.error_text for mark in PEER_LOST_MARKS)


def diagnose(exits: Sequence[RankExit], step: int, now: float) -> Incident:
    """The incident behind the failed exits of one generation.

    Args:
        exits: exits seen so far, in any order; at least one is a failure.
        step: last step known to be completed.
        now: wall clock in unix seconds.

    Raises:
        ValueError: none of the exits is a failure.
    """
    failed = sorted((e for e in exits if e.is_failure), key=lambda e: e.at)
    if not failed:
        raise ValueError("no exit of this generation is a failure")
    roots = [e for e in failed if not e.is_victim]
    first = roots[0] if roots else failed[0]
    return Incident(
        failure_class=_class_of(first),
        culprit=f"rank {first.rank} (node {first.node})",
        evidence=_evidence(first),
        step=step,
        failed_at=failed[0].at,
        detected_at=now,
    )


def _class_of(exit_: RankExit) -> FailureClass:
    if exit_.exit_code < 0:
        return FailureClass.WORKER_KILLED
    if exit_.is_victim:
        return FailureClass.NETWORK
    if exit_.failure_class:
        return FailureClass(exit_.failure_class)
    return FailureClass.USER_CODE if exit_.error_type else FailureClass.UNKNOWN


def _evidence(exit_: RankExit) -> str:
    if exit_.traceback:
        return exit_.traceback
    if exit_.exit_code < 0:
        try:
            name = signal.Signals(-exit_.exit_code).name
        except ValueError:
            name = f"signal {-exit_.exit_code}"
        return f"rank {exit_.rank} was killed by {name}"
    return f"rank {exit_.rank} left with exit code {exit_.exit_code} and no error"
