"""The Hook protocol: what the trainer tells others, on every rank, and when. Holds no hook of its own."""

from typing import TYPE_CHECKING, Protocol

from jobs.events import EvalRecord, Progress, StepRecord

if TYPE_CHECKING:
    from jobs.engines.base import Engine


class Hook(Protocol):
    """Called by the trainer on every rank, in list order. A hook that raises ends the run."""

    def on_start(self, engine: "Engine", progress: Progress) -> None:
        """After restore, before the first step."""

    def after_step(self, record: StepRecord, engine: "Engine") -> None:
        """After each step; the engine's state is that of record.step until this returns."""

    def after_evaluate(self, record: EvalRecord) -> None:
        """After each evaluation."""

    def on_end(self, outcome: str, engine: "Engine", progress: Progress) -> None:
        """Last call: outcome is "finished" or "stopped". Not called when an exception ends the run."""
