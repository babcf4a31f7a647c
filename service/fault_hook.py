"""Drills inside a rank that goes on training: its numbers become wrong, or its pace. See rank_faults.py.

nan        its next forward pass gives NaN, once: a chip that slips
nan-data   forward passes over the samples of its next step give NaN, on every try: a file in control/ says
           which, so that ranks of later generations meet them as well
bit-flip   one bit of its largest parameter is another one after the step
slow       its passes take twice the processor time from then on
"""

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobs.data.sampler import step_ordinals
from jobs.engines.base import Engine, stages_of
from jobs.events import EvalRecord, Progress, StepRecord
from ops.durable import write_atomically
from service.rank_faults import RankFaults

BAD_SAMPLES = "bad_samples.json"
FLIPPED_BIT = 22
"""Of a 32-bit float the highest one of its fraction: the number changes by a quarter to a half."""


class FaultHook:
    """Has what the rank was told to have."""

    def __init__(
        self,
        faults: RankFaults,
        control_dir: Path,
        global_batch: int,
        record: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """Local.

        Args:
            faults: what this rank is told.
            control_dir: the run's folder of control files.
            global_batch: samples of a step.
            record: takes ledger events.
        """
        self._faults, self._file = faults, control_dir / BAD_SAMPLES
        self._global_batch, self._record = global_batch, record
        self._bad: set[int] = set()
        self._is_next_bad = False
        self._is_slow = False
        self._began_s = 0.0

    def on_start(self, engine: Engine, progress: Progress) -> None:
        """Bad samples of an earlier generation are bad still."""
        for stage in stages_of(engine.model):
            stage.register_forward_pre_hook(self._before_forward)
            stage.register_forward_hook(self._after_forward)
        self._skipped = progress.skipped_samples
        with contextlib.suppress(OSError, ValueError):
            self._bad = set(json.loads(self._file.read_text()))
        self._look_ahead(progress.sample_ordinal)

    def after_step(self, record: StepRecord, engine: Engine) -> None:
        """Between two steps: choose the bad samples, flip the bit."""
        if self._faults.take("nan-data"):
            self._bad = set(self._next_samples(record.sample_ordinal))
            write_atomically(self._file, json.dumps(sorted(self._bad)))
            self._record("drill", {"fault": "nan-data", "step": record.step, "samples": sorted(self._bad)})
        if self._faults.take("bit-flip"):
            name = flip_bit(engine)
            self._record("drill", {"fault": "bit-flip", "step": record.step, "tensor": name})
        if self._faults.take("slow"):
            self._is_slow = True
            self._record("drill", {"fault": "slow", "step": record.step})
        self._look_ahead(record.sample_ordinal)

    def after_evaluate(self, record: EvalRecord) -> None:
        """Nothing."""

    def on_end(self, outcome: str, engine: Engine, progress: Progress) -> None:
        """Nothing."""

    def _look_ahead(self, ordinal: int) -> None:
        self._is_next_bad = bool(self._bad) and not self._bad.isdisjoint(self._next_samples(ordinal))

    def _next_samples(self, ordinal: int) -> list[int]:
        found: list[int] = step_ordinals(ordinal, self._global_batch, self._skipped).tolist()
        return found

    def _before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        if self._is_slow:
            self._began_s = time.thread_time()

    def _after_forward(self, module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not module.training or not torch.is_grad_enabled():
            return None
        if self._is_slow:
            spent_s = time.thread_time() - self._began_s
            burn(spent_s)
            output.register_hook(lambda gradient: burn(2 * spent_s))  # type: ignore[no-untyped-call]
        if self._is_next_bad or self._faults.take("nan"):
            return output * math.nan
        return None


def burn(seconds: float) -> None:
    """Take so much processor time of this thread."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


@torch.no_grad()
def flip_bit(engine: Engine) -> str:
    """Flip a bit in the middle of the largest piece of a parameter that this rank keeps; its name."""
    chunk = max(
        (one for one in engine.chunks() if one.name.startswith("model/")), key=lambda one: one.tensor.numel()
    )
    words = chunk.tensor.reshape(-1).view(torch.int32)
    words[words.numel() // 2] ^= 1 << FLIPPED_BIT
    return chunk.name
