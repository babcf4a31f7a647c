"""What a rank found about the training itself: losses, replicas, stragglers; and the incident that it makes.

A finding is a signal with what only the ranks know beside it: the step, and up to which step the state was
all right. Pure values; finds nothing (monitors/ does) and decides nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ops.incident import FailureClass, Incident
from ops.monitors.loss_anomaly import LossAnomaly
from ops.monitors.replica_digest import NAME as REPLICA_DIGEST
from ops.monitors.replica_digest import DigestVerdict
from ops.monitors.straggler import NAME as STRAGGLER
from ops.monitors.straggler import Straggler
from ops.signal import Entity, EntityKind, Signal

LOSS_SPIKE = "loss_spike"
"""Detector of losses that are finite and not as they should be."""


@dataclass(frozen=True)
class Finding:
    """One finding of one detector."""

    signal: Signal
    failure_class: FailureClass
    detector: str
    step: int
    """Completed steps when it was found."""
    good_step: int | None = None
    """State after a later step is not to be trusted; None: nothing is known of that."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Finding":
        """The reverse of to_json.

        Raises:
            KeyError, TypeError, ValueError: the values have another form.
        """
        signal = dict(values["signal"])
        entity = Entity.from_json(signal.pop("entity"))
        return Finding(
            Signal(**signal, entity=entity),
            FailureClass(values["failure_class"]),
            str(values["detector"]),
            int(values["step"]),
            values["good_step"],
        )

    def on_nodes(self, nodes: Mapping[int, str]) -> "Finding":
        """The same with the node of its rank, where it is of one.

        Args:
            nodes: rank -> address.
        """
        entity = self.signal.entity
        if entity.kind is not EntityKind.RANK:
            return self
        where = replace(entity, node=nodes.get(int(entity.name), entity.node))
        return replace(self, signal=replace(self.signal, entity=where))

    def incident(self, now: float) -> Incident:
        """What is decided about.

        Args:
            now: wall clock, unix seconds.
        """
        entity = self.signal.entity
        return Incident(
            failure_class=self.failure_class,
            culprit=str(entity),
            evidence=self.signal.text,
            step=self.step,
            failed_at=self.signal.at,
            detected_at=now,
            entity=entity,
            symptom=self.signal.kind,
            detector=self.detector,
            good_step=self.good_step,
        )


def of_loss(anomaly: LossAnomaly, now: float) -> Finding:
    """A spike or a divergence: the state from before it began is all right."""
    return Finding(
        anomaly.signal(now), FailureClass.NUMERICS, LOSS_SPIKE, anomaly.step, anomaly.since_step - 1
    )


def of_digests(verdict: DigestVerdict, good_step: int, now: float) -> list[Finding]:
    """Replicas differ: the odd ranks have wrong ones; without a majority nobody knows who has.

    Args:
        verdict: of the vote.
        good_step: last step after which all replicas were equal.
        now: wall clock, unix seconds.
    """
    kind = FailureClass.GPU_HARDWARE if verdict.odd_ranks else FailureClass.UNKNOWN
    return [Finding(signal, kind, REPLICA_DIGEST, verdict.step, good_step) for signal in verdict.signals(now)]


def of_straggler(found: Straggler, step: int, now: float) -> Finding:
    """Steps are longer than they have to be."""
    return Finding(found.signal(now), FailureClass.STRAGGLER, STRAGGLER, step)
