"""What a rank does around its steps besides saving: the metrics line, and its name in the process list."""

import logging
import time
from pathlib import Path

import psutil
import setproctitle
import torch

from jobs.engines.base import Engine
from jobs.events import EvalRecord, Progress, StepRecord
from jobs.flops import mfu_frac, tflops_per_rank
from jobs.spec.job import JobSpec
from ops.ledger import MetricsWriter

PEAK_MATRIX_SIZES = {"cpu": 1024, "cuda": 8192}
"""Side of the square product that stands for a device's peak where the spec names none: on a GPU large enough
that starting it and asking for its end are next to nothing."""
PEAK_TRIAL_S = 0.2
"""How long products are repeated: on a busy machine most of them are slow, and the best counts."""
PEAK_MIN_PRODUCTS = 4
_LOG = logging.getLogger(__name__)


class MetricsHook:
    """Writes metrics.jsonl. Rank 0 only: every figure in it is one of the whole run.

    No MFU above 1 is written: a step faster than the peak proves that it was too low (measured on a busy
    machine, or named wrongly), so the step's own rate is the peak from then on, and the rank's log says so.
    """

    def __init__(self, spec: JobSpec, path: Path, attempt: int, generation: int, peak_tflops: float) -> None:
        """Opens the file for appending.

        Args:
            spec: for the FLOPs of a token and the number of ranks.
            path: metrics.jsonl of the run.
            attempt: this attempt's number.
            generation: this generation's number.
            peak_tflops: peak of one rank's device in 1e12 FLOP/s, the denominator of MFU.
        """
        self._writer = MetricsWriter(path, attempt, generation)
        self._spec = spec
        self._peak_tflops = peak_tflops
        self._process = psutil.Process()

    def on_start(self, engine: Engine, progress: Progress) -> None:
        """Nothing yet: the first line is the first step's."""

    def after_step(self, record: StepRecord, engine: Engine) -> None:
        """One line."""
        spec = self._spec
        rank_tflops = tflops_per_rank(
            spec.model,
            spec.data.seq_len,
            spec.tracking.flops_convention,
            tokens_per_s=record.n_tokens / record.step_time_s,
            n_ranks=spec.world_size,
        )
        if rank_tflops > self._peak_tflops:
            _LOG.warning(
                "step %d ran at %.4g TFLOP/s a rank, above the peak of %.4g that MFU was measured against: "
                "that rate is the peak from now on",
                record.step,
                rank_tflops,
                self._peak_tflops,
            )
            self._peak_tflops = rank_tflops
        self._writer.write_step(
            record,
            tflops_per_rank=rank_tflops,
            mfu_frac=mfu_frac(rank_tflops, self._peak_tflops),
            memory_bytes=self._memory_bytes(),
        )

    def after_evaluate(self, record: EvalRecord) -> None:
        """One line."""
        self._writer.write_eval(record)

    def on_end(self, outcome: str, engine: Engine, progress: Progress) -> None:
        """Close the file."""
        self._writer.close()

    def _memory_bytes(self) -> int:
        """Peak allocated device memory, or this process' resident memory on the host."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        resident: int = self._process.memory_info().rss
        return resident


class TitleHook:
    """Shows run, rank, phase and step in the process list, at most once a second."""

    def __init__(self, run_id: str, rank: int) -> None:
        """Shows nothing yet."""
        self._name = f"packtrain[{run_id}] rank {rank}"
        self._shown_at_mono_s = 0.0

    def show(self, phase: str) -> None:
        """Show a phase now."""
        setproctitle.setproctitle(f"{self._name}: {phase}")

    def on_start(self, engine: Engine, progress: Progress) -> None:
        """Training begins."""
        self.show(f"step {progress.step}")

    def after_step(self, record: StepRecord, engine: Engine) -> None:
        """Show the step."""
        now = time.monotonic()
        if now - self._shown_at_mono_s >= 1.0:
            self._shown_at_mono_s = now
            self.show(f"step {record.step}")

    def after_evaluate(self, record: EvalRecord) -> None:
        """Nothing to show."""

    def on_end(self, outcome: str, engine: Engine, progress: Progress) -> None:
        """Show how it ended."""
        self.show(outcome)


def measure_peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Best square product of `dtype` on this rank's device and threads, in 1e12 FLOP/s.

    Takes PEAK_TRIAL_S, or PEAK_MIN_PRODUCTS where those are slower. It may read low on a machine that is
    busy all that time: see MetricsHook.
    """
    size = PEAK_MATRIX_SIZES[device.type]
    # Ones, not random numbers: those would be drawn from the stream that a resumed run must find untouched.
    left = torch.ones(size, size, device=device, dtype=dtype)
    best_s = float("inf")
    ends_at, n_products = time.perf_counter() + PEAK_TRIAL_S, 0
    while n_products < PEAK_MIN_PRODUCTS or time.perf_counter() < ends_at:
        begun = time.perf_counter()
        product = left @ left
        product[0, 0].item()  # waits for a GPU
        best_s = min(best_s, time.perf_counter() - begun)
        n_products += 1
    return 2 * size**3 / best_s / 1e12
