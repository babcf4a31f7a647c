"""The loss of a run under watch: spikes and divergence, by rank 0, which knows the global figures anyway.

What is not finite never gets here: the trainer ends the step's generation (resilience.on_bad_loss).
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jobs.engines.base import Engine
from jobs.events import EvalRecord, Progress, StepRecord
from ops.findings import Finding, of_loss
from ops.ledger import number
from ops.monitors.loss_anomaly import AnomalyKind, LossWatch


class LossHook:
    """Rank 0 only: shows each step to ops.monitors.loss_anomaly."""

    def __init__(self, earlier: Iterable[Mapping[str, Any]], tell: Callable[[Finding], None]) -> None:
        """Local.

        Args:
            earlier: step lines of metrics.jsonl, as many as are at hand: what these ranks go on from.
            tell: takes what is found.
        """
        self._earlier = list(earlier)
        self._tell = tell
        self._watch = LossWatch()

    def on_start(self, engine: Engine, progress: Progress) -> None:
        """Learn from the steps that led here; what was wrong with them was told then."""
        for line in self._earlier:
            loss = number(line["loss"])
            if line["step"] <= progress.step and loss is not None:
                self._watch.push(line["step"], loss, number(line["grad_norm"]), number(line["lr"]))
        self._earlier.clear()

    def after_step(self, record: StepRecord, engine: Engine) -> None:
        """Look at the step."""
        for anomaly in self._watch.push(record.step, record.loss, record.grad_norm, record.lr):
            if anomaly.kind is not AnomalyKind.NOT_FINITE:
                self._tell(of_loss(anomaly, time.time()))

    def after_evaluate(self, record: EvalRecord) -> None:
        """Nothing."""

    def on_end(self, outcome: str, engine: Engine, progress: Progress) -> None:
        """Nothing."""
