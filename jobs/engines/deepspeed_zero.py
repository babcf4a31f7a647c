"""The deepspeed_zero engine: one optimizer step under DeepSpeed ZeRO (arXiv 1910.02054), stages 0 to 3.

    forward and backward of each micro-batch; DeepSpeed reduces gradients, stages 2 and 3 during the backward
    norm -> clip -> AdamW on this rank's share -> all-gather of the new weights (stage 3: before each use)

Tensor, sequence and context parallelism are ours and lie below it: each rank hands DeepSpeed its pieces of
the model, and ZeRO shares those out over the ranks with equal pieces (dp x cp). DeepSpeed gets a plain torch
optimizer and no schedule, so nothing is compiled at run time and the learning rate is ours. What the state
looks like inside is deepspeed_state.py's business, what a layout is to DeepSpeed is deepspeed_mesh.py's.
DeepSpeed wants LOCAL_RANK in the environment, as torchrun sets it; the device is the one handed in all the
same.
"""

import math
from typing import Any

import torch

from jobs.comm.collectives import start_sum_in_place, sum_in_place
from jobs.comm.groups import Groups
from jobs.compute_clock import ComputeClock
from jobs.engines.base import MicroBatch, StepResult
from jobs.engines.deepspeed_mesh import (
    ModelParallelUnit,
    clip_whole_gradients,
    mark_counted,
    own_pieces,
    start_pieces,
    sum_partial_gradients,
)
from jobs.engines.deepspeed_start import (
    GroupBook,
    build_optimizer,
    deepspeed_config,
    initialize,
    quiet_start,
    set_lr,
)
from jobs.engines.deepspeed_state import EngineState
from jobs.engines.layout import operations_for
from jobs.models.init import take_parameters
from jobs.models.llama import Llama
from jobs.models.losses import IGNORED_LABEL, with_bad_gradient
from jobs.parallel.context import split_batch
from jobs.parallel.placement import place_parameters
from jobs.planner.stages import plan_stages
from jobs.spec.job import JobSpec
from jobs.spec.strategy import DeepspeedZeroStrategy
from jobs.state import Chunk


class DeepspeedZeroEngine:
    """Engine of strategy.kind=deepspeed_zero. All methods but `chunks` are collective over all ranks."""

    def __init__(self, spec: JobSpec, groups: Groups, device: torch.device) -> None:
        """Build this rank's pieces of the model on the host and hand them to DeepSpeed, which keeps a share.

        Peak memory: the pieces once in fp32 on the host, and once in the training precision on the device
        (stage 3 then frees all but its share).

        Raises:
            TypeError: spec.strategy is of another kind.
        """
        if not isinstance(spec.strategy, DeepspeedZeroStrategy):
            raise TypeError(f"strategy.kind={spec.strategy.kind} is not for this engine")
        self.clock = ComputeClock(device)
        self._groups = groups
        self._data = groups.sums["data"]
        self._device = device
        self._stage = spec.strategy.stage
        self._clip_norm = spec.optim.grad_clip_norm
        placements = place_parameters(
            spec.model,
            groups.mesh,
            groups.rank,
            plan_stages(spec.model, pp=1),
            sequence_parallel=spec.strategy.sequence_parallel,
        )
        operations = operations_for(spec, groups, device)
        self._loss = operations.loss
        with torch.device("meta"):
            model = Llama(spec.model, operations)
        start = start_pieces(spec.model, placements, spec.run.seed)
        parameters = take_parameters(model, start)
        self._pieces = own_pieces(parameters, placements, groups)
        self._optimizer = build_optimizer(model, spec.optim)
        book = GroupBook(groups, spec.resilience.collective_timeout_s)
        with quiet_start(book, device):
            mpu = None
            if groups.tp.size > 1:
                mpu = ModelParallelUnit(groups, book)
                mark_counted(self._pieces)
                sum_partial_gradients(self._pieces, groups)
            self._engine = initialize(model, self._optimizer, zero_config(spec), device, mpu)
        zero_optimizer = self._engine.optimizer if self._stage else None
        masters = start if spec.train.precision == "bf16" else None
        self._state = EngineState(zero_optimizer, self._optimizer, self._pieces, self._data, masters)

    @property
    def model(self) -> torch.nn.Module:
        """The module that DeepSpeed trains; its parameters are empty between steps at stage 3."""
        module: torch.nn.Module = self._engine.module
        return module

    def train_step(self, batches: list[MicroBatch], n_valid_tokens: int, lr: float) -> StepResult:
        """As in Engine."""
        set_lr(self._optimizer, lr)
        # DeepSpeed averages gradients over dp x cp; the factor turns its mean into one over valid tokens.
        scale = self._data.size / max(1, n_valid_tokens)
        loss_sum = torch.zeros((), device=self._device)
        for index, batch in enumerate(batches):
            self._engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            with self.clock.measure("forward", 0, index):
                loss = with_bad_gradient(self._loss_sum(batch) * scale)
            with self.clock.measure("backward", 0, index):
                self._engine.backward(loss, scale_wrt_gas=False)
            loss_sum += loss.detach()
        own_loss = loss_sum.clone()
        reduction = start_sum_in_place(loss_sum, self._data)
        grad_norm, skipped = self._update_plain() if self._stage == 0 else self._update_sharded()
        reduction.wait()
        self._state.count_step(skipped=skipped)
        is_cause = skipped and not math.isfinite(own_loss.item())
        return StepResult(loss_sum.item() / self._data.size, grad_norm, skipped, is_cause=is_cause)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> tuple[float, int]:
        """As in Engine."""
        n_valid = (batch.labels != IGNORED_LABEL).sum()
        n_valid = n_valid if self._groups.cp.rank == 0 else torch.zeros_like(n_valid)
        figures = torch.stack((self._loss_sum(batch).double(), n_valid.to(self._device).double()))
        sum_in_place(figures, self._data)
        loss_sum, n_tokens = figures.tolist()
        return float(loss_sum), int(n_tokens)

    def chunks(self) -> list[Chunk]:
        """As in Engine."""
        return self._state.chunks(is_first_rank=self._groups.rank == 0)

    def after_load(self, lr: float) -> None:
        """As in Engine."""
        set_lr(self._optimizer, lr)
        self._state.after_load()

    def _loss_sum(self, batch: MicroBatch) -> torch.Tensor:
        batch = split_batch(batch, self._groups.cp)
        ids = batch.document_ids
        logits = self._engine(
            batch.tokens.to(self._device, non_blocking=True),
            batch.positions.to(self._device, non_blocking=True),
            None if ids is None else ids.to(self._device, non_blocking=True),
        )
        return self._loss(logits, batch.labels.to(self._device, non_blocking=True))

    def _update_sharded(self) -> tuple[float, bool]:
        """Stages 1 to 3: DeepSpeed clips and steps, or drops the step when its norm is not finite."""
        self._engine.step()
        return float(self._engine.get_global_grad_norm()), bool(self._engine.optimizer.overflow)

    def _update_plain(self) -> tuple[float, bool]:
        """Stage 0: DeepSpeed only reduced."""
        grad_norm = clip_whole_gradients(self._pieces, self._groups.tp, self._clip_norm, self._device)
        if not math.isfinite(grad_norm):
            self._engine.zero_grad()
            return grad_norm, True
        self._engine.step()
        return grad_norm, False


def zero_config(spec: JobSpec) -> dict[str, Any]:
    """What deepspeed.initialize is given for a run of kind deepspeed_zero. Pure."""
    strategy = spec.strategy
    assert isinstance(strategy, DeepspeedZeroStrategy)
    return deepspeed_config(spec, strategy.stage, strategy.dp * strategy.cp, strategy.zero_options)
