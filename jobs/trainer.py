"""The loop. It knows steps, hooks and stop requests; how a step is executed is the engine's affair.

    on_start
       |
       v                 +---------------- evaluate, every n steps <---------------+
    take batch  <--------+                 (a stop is looked for between batches)  |
       |   ask: has any rank been told to stop? (MAX over ranks, runs beside the step)
       v                                                                           |
    engine.train_step                                                              |
       |   answer                                                                  |
       v                                                                           |
    after_step --- skipped, by on_bad_loss: NumericError -- stop or last step? - no +
                                                            | yes
                                                            v
                                                         on_end

Runs on every rank alike. Knows nothing of Ray, files or the environment: a caller under torchrun hands in
the same arguments as a worker under Ray.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from jobs.comm.groups import Groups
from jobs.data.batches import BatchSource, Prefetcher, StepBatches
from jobs.engines.base import Engine
from jobs.errors import NumericEchoError, NumericError
from jobs.events import EvalRecord, Progress, StepRecord
from jobs.hooks import Hook
from jobs.optim.schedule import lr_at
from jobs.spec.job import JobSpec, ResilienceSection

COLLECT_EVERY_STEPS = 100
"""Python's cyclic garbage collector runs so often, on all ranks at the same step, and at no other time."""


@dataclass(frozen=True)
class Outcome:
    """How the loop ended when no exception ended it."""

    kind: Literal["finished", "stopped"]
    progress: Progress


def train(
    spec: JobSpec,
    engine: Engine,
    source: BatchSource,
    progress: Progress,
    hooks: Sequence[Hook],
    groups: Groups,
    should_stop: Callable[[], bool],
) -> Outcome:
    """Train from `progress` to spec.train.steps, or until any rank's `should_stop` says so.

    Collective over all ranks. A request that is there when a step begins ends the run after that step, one
    that comes later ends it after the next, on all ranks at the same step. A hook that may keep one rank
    for longer than resilience.collective_timeout_s must make the others wait in a group of its own, or they
    time out in the next step.

    Args:
        spec: the run.
        engine: restored to `progress`.
        source: this rank's batches.
        progress: completed steps and the sampler's state.
        hooks: called in this order on this rank; they may differ from rank to rank.
        groups: stop requests are agreed on in groups.control.
        should_stop: local and quick; asked once a step and once an evaluation batch.

    Returns:
        How and where it ended. on_end of all hooks was called.

    Raises:
        NumericError: a loss or gradient was not finite, on all ranks; with resilience.on_bad_loss=skip only
            after more than max_skipped_steps of them in a row. No parameter was changed by them.
        DataError: a batch could not be built.
    """
    agreement = StopAgreement(groups, should_stop)
    n_skipped = 0
    is_stopped = False
    for hook in hooks:
        hook.on_start(engine, progress)
    with (
        _scheduled_garbage_collection() as collect,
        Prefetcher(source, progress.sample_ordinal) as prefetcher,
    ):
        while progress.step < spec.train.steps and not is_stopped:
            began_at_mono_s = time.monotonic()
            batches = prefetcher.take()
            data_time_s = time.monotonic() - began_at_mono_s
            agreement.ask()
            record, is_cause = _step(spec, engine, batches, progress)
            is_stopped = agreement.answer()
            record = replace(record, step_time_s=time.monotonic() - began_at_mono_s, data_time_s=data_time_s)
            progress = replace(
                progress,
                step=record.step,
                sample_ordinal=record.sample_ordinal,
                tokens_seen=record.tokens_seen,
            )
            for hook in hooks:
                hook.after_step(record, engine)
            n_skipped = n_skipped + 1 if record.skipped else 0
            if n_skipped:
                _check_skipped(n_skipped, spec.resilience, record, groups, is_cause=is_cause)
            every = spec.train.evaluate_every_steps
            if every is not None and progress.step % every == 0 and not is_stopped:
                is_stopped = _evaluate(engine, source, progress.step, hooks, agreement)
            if progress.step % COLLECT_EVERY_STEPS == 0:
                collect()
    kind: Literal["finished", "stopped"] = "finished" if progress.step >= spec.train.steps else "stopped"
    for hook in hooks:
        hook.on_end(kind, engine, progress)
    return Outcome(kind, progress)


class StopAgreement:
    """Whether any rank was told to stop: the same answer on all ranks, at the price of no waiting.

    `ask` starts a one-element MAX in the control group and `answer` takes its result after the step, when
    it has long been there.
    """

    def __init__(self, groups: Groups, should_stop: Callable[[], bool]) -> None:
        """Local.

        Args:
            groups: the ranks that have to agree.
            should_stop: this rank's own opinion.
        """
        self._group = groups.control if groups.world_size > 1 else None
        self._should_stop = should_stop
        self._flag = torch.zeros(1, dtype=torch.uint8)
        self._work: dist.Work | None = None

    def ask(self) -> None:
        """Put this rank's opinion to the others. Collective, does not wait."""
        self._flag.fill_(int(self._should_stop()))
        if self._group is not None:
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def answer(self) -> bool:
        """What came of the last `ask`. Waits for the slowest rank's `ask`."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return bool(self._flag.item())


def _step(spec: JobSpec, engine: Engine, batches: StepBatches, progress: Progress) -> tuple[StepRecord, bool]:
    """One optimizer step, and whether this rank made it a bad one; the caller fills in the record's times."""
    lr = lr_at(spec.optim, spec.train.steps, progress.step)
    result = engine.train_step(batches.batches, batches.n_valid_tokens, lr)
    record = StepRecord(
        step=progress.step + 1,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=lr,
        n_tokens=batches.n_valid_tokens,
        n_padding_tokens=batches.n_padding_tokens,
        step_time_s=math.nan,
        data_time_s=math.nan,
        tokens_seen=progress.tokens_seen + batches.n_valid_tokens,
        sample_ordinal=batches.next_ordinal,
        skipped=result.skipped,
        bubble_frac=result.bubble_frac,
    )
    return record, result.is_cause


def _check_skipped(
    n_skipped: int, rules: ResilienceSection, record: StepRecord, groups: Groups, *, is_cause: bool
) -> None:
    """End the run, on all ranks alike, where its rules say so. Collective over groups.control where it does.

    Only then the ranks tell each other whose loss it was: a step that is all right asks nobody.
    """
    limit = rules.max_skipped_steps if rules.on_bad_loss == "skip" else 0
    if n_skipped <= limit:
        return
    causes = _ranks_that(groups, is_cause)
    figures = f"loss {record.loss}, gradient norm {record.grad_norm}, lr {record.lr}"
    where = f"; the loss of rank {', '.join(map(str, causes))} was not finite" if causes else ""
    if limit:
        text = (
            f"step {record.step}: the gradient was not finite in it and the {n_skipped - 1} steps before it, "
            f"more than resilience.max_skipped_steps={limit} in a row ({figures}{where})."
        )
    else:
        text = f"step {record.step}: loss or gradient was not finite ({figures}{where})."
    kind = NumericEchoError if causes and not is_cause else NumericError
    raise kind(
        f"{text} No parameter was changed: lower optim.lr, or go on from an older checkpoint with other data"
    )


def _ranks_that(groups: Groups, is_one: bool) -> list[int]:
    """The ranks that say yes. Collective over groups.control."""
    if groups.world_size == 1:
        return [0] if is_one else []
    flags = torch.zeros(groups.world_size, dtype=torch.uint8)
    flags[groups.rank] = is_one
    dist.all_reduce(flags, group=groups.control)
    return [rank for rank, flag in enumerate(flags.tolist()) if flag]


def _evaluate(
    engine: Engine, source: BatchSource, step: int, hooks: Sequence[Hook], agreement: StopAgreement
) -> bool:
    """Mean loss over the validation batches; True where a stop cut it short (there is no record then)."""
    began_at_mono_s = time.monotonic()
    loss_sum, n_tokens = 0.0, 0
    for batch in source.validation_batches():
        agreement.ask()
        batch_loss_sum, batch_n_tokens = engine.evaluate(batch)
        if agreement.answer():
            return True
        loss_sum += batch_loss_sum
        n_tokens += batch_n_tokens
    record = EvalRecord(
        step=step,
        loss=loss_sum / max(1, n_tokens),
        n_tokens=n_tokens,
        eval_time_s=time.monotonic() - began_at_mono_s,
    )
    for hook in hooks:
        hook.after_evaluate(record)
    return False


@contextmanager
def _scheduled_garbage_collection() -> Iterator[Callable[[], object]]:
    """Collect only when asked: a pause on one rank at a moment of its own makes all the others wait."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
