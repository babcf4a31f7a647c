"""The deepspeed_pipeline engine: DeepSpeed's PipelineModule and its 1F1B schedule, with ZeRO stage 0 or 1.

    rank        0         1         2          one Llama a stage, cut by jobs/planner/stages.py
    sends         hidden ->  hidden ->         activations only: tokens, positions, documents and labels
                <- gradient <- gradient        are in every rank's batch already

To DeepSpeed each stage is one "layer", so its own ways of cutting do not come into it, and a stage computes
positions and masks once a micro-batch. Tied embeddings are DeepSpeed's TiedLayerSpec over the first and last
stage. Recomputation is the layout's (jobs/engines/layout.py): DeepSpeed's would be silently left out for
modules that it does not know by name.

Ranks are numbered as in jobs/mesh.py: dp outermost, stages adjacent. Stages 2 and 3 of ZeRO do not exist
here: they give gradients away after each backward pass, and a pipeline needs them over all micro-batches.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from jobs.comm.collectives import sum_in_place
from jobs.comm.groups import Groups
from jobs.compute_clock import ComputeClock
from jobs.engines.base import MicroBatch, StepResult
from jobs.engines.deepspeed_import import import_deepspeed
from jobs.engines.deepspeed_mesh import clip_whole_gradients, own_pieces, start_pieces
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
from jobs.parallel.placement import place_parameters
from jobs.planner.stages import Stage, plan_stages
from jobs.spec.job import JobSpec
from jobs.spec.strategy import DeepspeedPipelineStrategy
from jobs.state import Chunk

deepspeed = import_deepspeed()

TIED = "embedding"
"""Name that DeepSpeed knows the tied embeddings by."""


class StageModule(nn.Module):
    """A stage as DeepSpeed calls it: with one tensor, for one micro-batch after another."""

    def __init__(self, llama: Llama, clock: ComputeClock, stage: int) -> None:
        super().__init__()
        self.llama = llama
        self.clock, self.stage, self.n_begun = clock, stage, 0
        self.batches: deque[MicroBatch] = deque()
        """Micro-batches still to come: a stage passes them forward in order, each once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [B, S] on the first stage, else [B, S, D]; logits [B, S, V] on the last, else [B, S, D]."""
        batch = self.batches.popleft()
        ids = batch.document_ids
        self.n_begun += 1
        with self.clock.measure("forward", self.stage, self.n_begun - 1):
            out: torch.Tensor = self.llama(
                x,
                batch.positions.to(x.device, non_blocking=True),
                None if ids is None else ids.to(x.device, non_blocking=True),
            )
        return out


class DeepspeedPipelineEngine:
    """Engine of strategy.kind=deepspeed_pipeline. All methods but `chunks` are collective over all ranks."""

    def __init__(self, spec: JobSpec, groups: Groups, device: torch.device) -> None:
        """Build this rank's stage on the host and hand it to DeepSpeed.

        Raises:
            TypeError: spec.strategy is of another kind.
            ValueError: the layers do not fill the stages; bf16 with stage 0.
        """
        strategy = spec.strategy
        if not isinstance(strategy, DeepspeedPipelineStrategy):
            raise TypeError(f"strategy.kind={strategy.kind} is not for this engine")
        self.clock = ComputeClock(device)
        self._groups = groups
        self._device = device
        self._stage = strategy.stage
        self._clip_norm = spec.optim.grad_clip_norm
        stages = plan_stages(spec.model, strategy.pp, split=strategy.split)
        own = stages[groups.pp.rank]
        operations = operations_for(spec, groups, device, own.index)
        self._cross_entropy = operations.loss
        placements = place_parameters(spec.model, groups.mesh, groups.rank, stages, sequence_parallel=False)
        with torch.device("meta"):
            llama = Llama(spec.model, operations, own.layers, is_first=own.is_first, is_last=own.is_last)
        start = start_pieces(spec.model, placements, spec.run.seed)
        parameters = take_parameters(llama, start)
        self._pieces = own_pieces(parameters, placements, groups)
        book = GroupBook(groups, spec.resilience.collective_timeout_s)
        with quiet_start(book, device):
            with torch.no_grad():  # it broadcasts tied weights: that is no part of any graph
                self._stage_module, module = self._pipeline_module(llama, stages)
            self._optimizer = build_optimizer(module, spec.optim)
            config = deepspeed_config(spec, strategy.stage, strategy.dp, {})
            self._engine = initialize(module, self._optimizer, config, device)
        schedule = deepspeed.runtime.pipe.schedule
        own_ways: dict[Any, Any] = {schedule.BackwardPass: self._timed_backward}
        if self._stage == 0:
            own_ways[schedule.OptimizerStep] = self._update_plain
        self._engine._INSTRUCTION_MAP = {**self._engine._INSTRUCTION_MAP, **own_ways}
        self._n_returned = 0
        zero_optimizer = self._engine.optimizer if self._stage else None
        masters = start if spec.train.precision == "bf16" else None
        self._state = EngineState(zero_optimizer, self._optimizer, self._pieces, groups.sums["data"], masters)
        self._loss_scale = 1.0
        self._plain_figures = (0.0, False)
        self._shape: torch.Size | None = None

    @property
    def model(self) -> torch.nn.Module:
        """This rank's stage."""
        return self._stage_module.llama

    def train_step(self, batches: list[MicroBatch], n_valid_tokens: int, lr: float) -> StepResult:
        """As in Engine."""
        set_lr(self._optimizer, lr)
        # DeepSpeed takes the mean over micro-batches and over dp; the factor makes it one over valid tokens.
        self._loss_scale = len(batches) * self._groups.dp.size / max(1, n_valid_tokens)
        loss = self._engine.train_batch(self._feed(batches))
        grad_norm, skipped = self._plain_figures if self._stage == 0 else self._sharded_figures()
        self._state.count_step(skipped=skipped)
        return StepResult(loss.item(), grad_norm, skipped)

    def evaluate(self, batch: MicroBatch) -> tuple[float, int]:
        """As in Engine."""
        self._loss_scale = float(self._groups.dp.size)
        loss = self._engine.eval_batch(self._feed([batch]), num_micro_batches=1)
        n_valid = (batch.labels != IGNORED_LABEL).sum().to(self._device)
        return loss.item(), int(sum_in_place(n_valid, self._groups.dp))

    def chunks(self) -> list[Chunk]:
        """As in Engine."""
        return self._state.chunks(is_first_rank=self._groups.rank == 0)

    def after_load(self, lr: float) -> None:
        """As in Engine."""
        set_lr(self._optimizer, lr)
        self._state.after_load()

    def _pipeline_module(self, llama: Llama, stages: tuple[Stage, ...]) -> tuple[StageModule, Any]:
        """The stage, and DeepSpeed's module around it. Collective."""
        ends_tied = llama.spec.tie_embeddings and len(stages) > 1

        def spec_of(stage: Stage) -> Any:
            # Only the own one is ever built.
            own = llama if stage.index == self._groups.pp.rank else None
            if ends_tied and (stage.is_first or stage.is_last):
                path = f"llama.{'embed_tokens' if stage.is_first else 'lm_head'}.weight"
                return deepspeed.pipe.TiedLayerSpec(
                    TIED, StageModule, own, self.clock, stage.index, tied_weight_attr=path
                )
            return deepspeed.pipe.LayerSpec(StageModule, own, self.clock, stage.index)

        mesh = self._groups.mesh
        module = deepspeed.pipe.PipelineModule(
            [spec_of(stage) for stage in stages],
            topology=deepspeed.runtime.pipe.topology.ProcessTopology(["data", "pipe"], [mesh.dp, mesh.pp]),
            loss_fn=self._scaled_loss,
            partition_method="uniform",
        )
        for parameter, piece in self._pieces.items():
            # DeepSpeed takes all of a tied stage for a copy, not its embedding alone.
            parameter.ds_pipe_replicated = not piece.is_owned  # type: ignore[attr-defined]
        (stage_module,) = (part for part in module.modules() if isinstance(part, StageModule))
        return stage_module, module

    def _feed(self, batches: list[MicroBatch]) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Lay the micro-batches ready; tokens and labels for the first and the last stage to draw."""
        shape = batches[0].tokens.shape
        if shape != self._shape:
            # What is received has to be announced again.
            self._engine.reset_activation_shape()
            self._shape = shape
        self._stage_module.n_begun = self._n_returned = 0
        self._stage_module.batches.clear()
        self._stage_module.batches.extend(batches)
        return iter([(batch.tokens, batch.labels) for batch in batches])

    def _scaled_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return with_bad_gradient(self._cross_entropy(logits, labels) * self._loss_scale)

    def _sharded_figures(self) -> tuple[float, bool]:
        return float(self._engine.get_global_grad_norm()), bool(self._engine.optimizer.overflow)

    def _timed_backward(self, engine: Any, **named: Any) -> None:
        """In the place of DeepSpeed's backward pass, which it calls: micro-batches come back in order."""
        self._n_returned += 1
        with self.clock.measure("backward", self._groups.pp.rank, self._n_returned - 1):
            engine._exec_backward_pass(**named)

    def _update_plain(self, engine: Any, **_: Any) -> None:
        """Stage 0, in the place of DeepSpeed's optimizer step: it would clip by the first stage's norm."""
        grad_norm = clip_whole_gradients(self._pieces, self._groups.pp, self._clip_norm, self._device)
        self._plain_figures = (grad_norm, not math.isfinite(grad_norm))
        if not math.isfinite(grad_norm):
            engine.zero_grad()
            return
        engine._exec_optimizer_step()
