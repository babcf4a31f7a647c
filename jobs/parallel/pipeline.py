"""Pipeline parallelism: this rank's stages, run by the schedules of torch.distributed.pipelining.

    1F1B on 2 ranks, 4 micro-batches (F forward, B backward, . waiting; arXiv 2104.04473, 2.2)
    rank 0   F0 F1 .  B0 .  F2 B1 .  F3 B2 .  .  B3
    rank 1   .  F0 B0 .  F1 B1 .  F2 B2 .  F3 B3

Between stages travel hidden states one way and their gradients the other, nothing else: every rank of a
pipeline has the whole micro-batch, so tokens, positions and document ids are never sent. Their shape and type
are known beforehand and torch is told, so no metadata is exchanged.

Gradients land in each parameter's .grad as sums over the micro-batches of the scaled loss. Neither sums
gradients over ranks nor makes the loss known elsewhere than on the last stage: the engine does both.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from jobs.comm.groups import Groups
from jobs.compute_clock import ComputeClock
from jobs.engines.base import MicroBatch
from jobs.models.llama import Llama
from jobs.planner.bubble import Action, ActionKind, Trace, busy_s, span_s
from jobs.planner.stages import Stage, rank_of_stage, schedule_refusal
from jobs.spec.job import JobSpec
from jobs.spec.strategy import NativeStrategy, PipelineSchedule

ONE_STAGE: dict[PipelineSchedule, type[PipelineScheduleSingle]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
}
SOME_STAGES: dict[PipelineSchedule, type[PipelineScheduleMulti]] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Pipeline:
    """This rank's stages of one pipeline."""

    def __init__(
        self,
        stages: Sequence[tuple[Stage, Llama]],
        spec: JobSpec,
        groups: Groups,
        device: torch.device,
        compute: ComputeClock | None = None,
    ) -> None:
        """Keep the stages; communicates nothing before the first step.

        Args:
            stages: this rank's, first to last. A parameter that two of them share is one Parameter in both.
            spec: the run; spec.strategy is native with pp > 1.
            groups: this rank's groups.
            device: where everything lives.
            compute: takes the time of each pass.

        Raises:
            ValueError: the pipeline has one rank only.
        """
        assert isinstance(spec.strategy, NativeStrategy)
        if groups.pp.group is None:
            raise ValueError("a pipeline of one rank has nobody to send to; run its stages directly")
        self._stages = tuple(stages)
        self._layout = spec.strategy
        self._d_model = spec.model.d_model
        self._pp = groups.pp
        self._device = device
        self._dtype = next(self._stages[0][1].parameters()).dtype
        self._sum_dtype = torch.float64 if self._dtype == torch.float64 else torch.float32
        self._n_stages = groups.pp.size * spec.strategy.pipeline.stages_per_rank
        self._scale = 1.0
        self._clock = _Clock(device, compute or ComputeClock(device))
        self._schedules: dict[tuple[int, torch.Size], PipelineScheduleSingle | PipelineScheduleMulti] = {}

    def run(self, batches: list[MicroBatch], scale: float) -> torch.Tensor:
        """Forward and backward of a step's micro-batches. Collective over groups.pp.

        Gradients are added to each parameter's .grad: of the sum over micro-batches of loss * scale.

        Args:
            batches: the micro-batches, of one shape; the same on every rank of the pipeline.
            scale: factor on each micro-batch's sum of cross entropies.

        Returns:
            Scalar without gradient: the sum of scaled losses where the last stage is, 0 elsewhere.

        Raises:
            ValueError: the schedule cannot run so many micro-batches; says which it can.
        """
        self._scale = scale
        schedule = self._schedule(len(batches), batches[0].tokens.shape)
        tokens, labels, positions, ids = self._joined(batches)
        losses: list[torch.Tensor] = []
        self._clock.restart()
        # Whole batches go in and torch cuts them again: that is its public way, and the pieces are views.
        schedule.step(
            *((tokens,) if self._holds_first else ()),
            target=labels if self._holds_last else None,
            losses=losses if self._holds_last else None,
            return_outputs=False,
            positions=positions,
            document_ids=ids,
        )
        if not losses:
            return torch.zeros((), dtype=self._sum_dtype, device=self._device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> torch.Tensor:
        """Forward only. Collective over groups.pp; any batch shape.

        Returns:
            Scalar: the sum of cross entropies where the last stage is, 0 elsewhere.
        """
        tokens, labels, positions, ids = self._joined([batch])
        total = torch.zeros((), dtype=self._sum_dtype, device=self._device)
        hidden: torch.Tensor | None = None
        held = {stage.index for stage, _ in self._stages}
        for stage, model in self._stages:
            if stage.is_first:
                x = tokens
            elif hidden is not None and stage.index - 1 in held:
                x = hidden
            else:
                x = torch.empty(self._hidden_shape(tokens.shape), dtype=self._dtype, device=self._device)
                dist.recv(x, src=self._rank_of(stage.index - 1), group=self._pp.group)
            hidden = model(x, positions, ids)
            if stage.is_last:
                total += model.operations.loss(hidden, labels)
            elif stage.index + 1 not in held:
                dist.send(hidden.contiguous(), dst=self._rank_of(stage.index + 1), group=self._pp.group)
        return total

    def last_trace(self) -> Trace:
        """What this rank computed in the last step, and when. Waits for the device."""
        return self._clock.trace()

    def timing(self) -> torch.Tensor:
        """This rank's part of jobs.planner.bubble.bubble_of; summed over the world it is the step's.

        Waits for the device.

        Returns:
            [1 + pp] fp64: busy seconds of the last step, then at the rank's own place its span.
        """
        trace = self.last_trace()
        figures = torch.zeros(1 + self._pp.size, dtype=torch.float64)
        figures[0], figures[1 + self._pp.rank] = busy_s(trace), span_s(trace)
        return figures.to(self._device)

    @property
    def _holds_first(self) -> bool:
        return any(stage.is_first for stage, _ in self._stages)

    @property
    def _holds_last(self) -> bool:
        return any(stage.is_last for stage, _ in self._stages)

    def _rank_of(self, stage: int) -> int:
        return self._pp.ranks[rank_of_stage(self._layout.pipeline.schedule, self._pp.size, stage)]

    def _hidden_shape(self, tokens: torch.Size) -> tuple[int, int, int]:
        """[B, S, D] of what travels: S is this rank's part where sequences are cut."""
        parts = self._layout.tp if self._layout.sequence_parallel else 1
        return tokens[0], tokens[1] // parts, self._d_model

    def _joined(
        self, batches: list[MicroBatch]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Tokens, labels, positions, document ids of micro-batches after one another on B, on the device.

        A micro-batch without ids, beside one that has some, is one document a sequence.
        """

        def join(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([part.to(self._device, non_blocking=True) for part in parts])

        ids = None
        if any(batch.document_ids is not None for batch in batches):
            ids = join(
                [
                    torch.zeros_like(batch.tokens, dtype=torch.int32)
                    if batch.document_ids is None
                    else batch.document_ids
                    for batch in batches
                ]
            )
        return (
            join([batch.tokens for batch in batches]),
            join([batch.labels for batch in batches]),
            join([batch.positions for batch in batches]),
            ids,
        )

    def _schedule(
        self, n_micro_batches: int, shape: torch.Size
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """The schedule of so many micro-batches of tokens [B, S]; made once, and its buffers kept."""
        key = (n_micro_batches, shape)
        if key not in self._schedules:
            section = self._layout.pipeline
            reason = schedule_refusal(
                section.schedule, self._pp.size, section.stages_per_rank, n_micro_batches
            )
            if reason is not None:
                raise ValueError(reason)
            stages = [self._torch_stage(stage, model, shape) for stage, model in self._stages]
            self._schedules[key] = self._build(section.schedule, stages, n_micro_batches)
        return self._schedules[key]

    def _build(
        self, name: PipelineSchedule, stages: list["_TimedStage"], n_micro_batches: int
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        if name in ONE_STAGE:
            return ONE_STAGE[name](stages[0], n_micro_batches, loss_fn=self._loss, scale_grads=False)
        return SOME_STAGES[name](list(stages), n_micro_batches, loss_fn=self._loss, scale_grads=False)

    def _torch_stage(self, stage: Stage, model: Llama, tokens: torch.Size) -> "_TimedStage":
        hidden = torch.empty(self._hidden_shape(tokens), dtype=self._dtype, device="meta", requires_grad=True)
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        # What the last stage puts out is never sent, so nobody looks at the shape that is given for it.
        return _TimedStage(
            model,
            stage.index,
            self._n_stages,
            self._device,
            input_args=ids if stage.is_first else hidden,
            output_args=hidden,
            group=self._pp.group,
            clock=self._clock,
        )

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        stage, model = self._stages[-1]
        with self._clock.action("loss", stage.index, self._clock.last_micro_batch):
            return model.operations.loss(logits, labels) * self._scale


class _TimedStage(PipelineStage):
    """A stage that notes when it computes."""

    def __init__(self, *args: Any, clock: "_Clock", **named: Any) -> None:
        super().__init__(*args, **named)
        self._clock = clock

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        with self._clock.action("forward", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **named)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        kind: ActionKind = "backward" if full_backward else "backward_input"
        with self._clock.action(kind, self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        with self._clock.action("backward_weight", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


class _Clock:
    """Begin and end of this rank's actions: the host's clock on the host, events in the stream on a GPU."""

    def __init__(self, device: torch.device, compute: ComputeClock) -> None:
        self._is_cuda = device.type == "cuda"
        self._compute = compute
        self._start: Any = None
        self._noted: list[tuple[ActionKind, int, int, Any, Any]] = []
        self.last_micro_batch = 0

    def restart(self) -> None:
        """A step begins."""
        self._noted = []
        self._start = self._now()

    @contextmanager
    def action(self, kind: ActionKind, stage: int, micro_batch: int) -> Iterator[None]:
        """Note that what happens inside is one action."""
        self.last_micro_batch = micro_batch
        start = self._now()
        with self._compute.measure("backward" if "backward" in kind else "forward", stage, micro_batch):
            yield
        self._noted.append((kind, stage, micro_batch, start, self._now()))

    def trace(self) -> Trace:
        """The last step's actions. Waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return tuple(
            Action(kind, stage, micro_batch, self._since_start(start), self._since_start(end))
            for kind, stage, micro_batch, start, end in self._noted
        )

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _since_start(self, moment: Any) -> float:
        return float(self._start.elapsed_time(moment) / 1e3 if self._is_cuda else moment - self._start)
