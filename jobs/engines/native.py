"""The native engine: hand-written parallelism over any mesh, in every precision of the spec.

A step is: forward and backward of all micro-batches, which fill the gradient buckets; one sum a bucket, over
the ranks that share its pieces, while backward still runs; one small sum of loss and squared norm over the
world; one update a bucket. Ranks that hold the same piece do the same arithmetic on the same sums, so copies
stay bitwise equal without ever being compared.

    native_parameters.py   the memory and what lies where
    native_optimizer.py    the update
    layout.py              how the model's maths is computed under the layout
    parallel/pipeline.py   the order of micro-batches where there is more than one stage
"""

import math

import torch

from jobs.comm.collectives import sum_in_place
from jobs.comm.groups import Groups
from jobs.comm.reducer import GradBucket, GradReducer
from jobs.compute_clock import ComputeClock
from jobs.engines.base import MicroBatch, StepResult
from jobs.engines.native_optimizer import FlatOptimizer
from jobs.engines.native_parameters import NativeParameters
from jobs.models.losses import IGNORED_LABEL
from jobs.optim.grad_norm import clip_factor, squared_norm
from jobs.parallel.context import split_batch
from jobs.parallel.expert import update_router_biases
from jobs.planner.bubble import bubble_of
from jobs.spec.job import JobSpec
from jobs.spec.model import router_bias_names
from jobs.state import Chunk


class NativeEngine:
    """The Engine of strategy.kind = native."""

    def __init__(self, spec: JobSpec, groups: Groups, device: torch.device) -> None:
        """Build this rank's stages with their start weights, and empty moments. Local: no communication.

        Args:
            spec: the run; spec.strategy is native.
            groups: this rank's groups.
            device: where everything lives.

        Raises:
            ValueError: the built model and the spec disagree, or the device cannot compute in the precision.
        """
        self.clock = ComputeClock(device)
        self._groups = groups
        self._device = device
        self._grad_clip_norm = spec.optim.grad_clip_norm
        self._bias_rate = 0.0 if spec.model.moe is None else spec.model.moe.bias_update_rate
        self._parameters = NativeParameters(spec, groups, device)
        self._buckets = self._parameters.buckets
        self._stages = self._parameters.modules
        modules = [module for _, module in self._stages]
        names = set(router_bias_names(spec.model))
        self._biases = {
            name: buffer for module in modules for name, buffer in module.named_buffers() if name in names
        }
        self._model = modules[0] if len(modules) == 1 else torch.nn.ModuleList(modules)
        self._reducer = GradReducer(
            [GradBucket(b.plan, b.gradients, b.axis, b.span) for b in self._buckets],
            self._parameters.parameters,
        )
        self._optimizer = FlatOptimizer(
            spec.optim, self._buckets, is_kahan=spec.train.precision == "bf16_kahan"
        )
        self._pipeline = None
        if groups.pp.size > 1:
            from jobs.parallel.pipeline import Pipeline

            self._pipeline = Pipeline(self._stages, spec, groups, device, self.clock)
        # Ranks of one tp line compute the same loss: one of them counts it.
        has_loss = any(stage.is_last for stage, _ in self._stages)
        self._counts_loss = has_loss and groups.tp.rank == 0

    @property
    def model(self) -> torch.nn.Module:
        """This rank's stage, or its stages in a list; the parameters are views of the flat buckets."""
        return self._model

    def train_step(self, batches: list[MicroBatch], n_valid_tokens: int, lr: float) -> StepResult:
        """See base.Engine. losses are divided by n_valid_tokens before backward: sums are means."""
        self._reducer.start(len(batches))
        loss = self._run([self._own_part(batch) for batch in batches], 1.0 / max(1, n_valid_tokens))
        self._reducer.collect()
        squares: list[torch.Tensor] = []

        def square(number: int) -> None:
            bucket = self._buckets[number]
            squares.append(squared_norm(bucket.gradients[bucket.span]) / bucket.n_span_holders)

        self._reducer.finish(square)
        share = loss.double() if self._counts_loss else torch.zeros_like(loss, dtype=torch.float64)
        figures = torch.stack((share, torch.stack(squares).sum()))
        if self._pipeline is not None:
            # Waiting for the device here delays nothing: the sum is read at once.
            figures = torch.cat((figures, self._pipeline.timing()))
        mean_loss, squared, *timing = sum_in_place(figures, self._groups.world).tolist()
        # Every rank has the same sums, so all of them see what is not finite on any of them.
        grad_norm = math.sqrt(squared) if squared >= 0 else math.nan
        is_skipped = not (math.isfinite(grad_norm) and math.isfinite(mean_loss))
        if not is_skipped:
            self._optimizer.step(lr, clip_factor(grad_norm, self._grad_clip_norm))
            self._parameters.publish()
        if self._bias_rate:
            modules = [module for _, module in self._stages]
            update_router_biases(modules, self._groups, self._bias_rate, is_skipped=is_skipped)
        bubble_frac = bubble_of(timing[0], timing[1:]) if timing else None
        is_cause = is_skipped and not math.isfinite(loss.item())
        return StepResult(mean_loss, grad_norm, is_skipped, bubble_frac, is_cause)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> tuple[float, int]:
        """See base.Engine."""
        own = self._own_part(batch)
        loss_sum = self._loss_sum(own) if self._pipeline is None else self._pipeline.evaluate(own)
        n_valid = (own.labels != IGNORED_LABEL).sum()
        figures = torch.stack((loss_sum.double(), n_valid.double()))
        if not self._counts_loss:
            figures.zero_()
        total, n_tokens = sum_in_place(figures, self._groups.world).tolist()
        return float(total), int(n_tokens)

    def chunks(self) -> list[Chunk]:
        """See jobs/state.py. The ranks that hold the same pieces save equal shares of them."""
        masters = [bucket.masters for bucket in self._buckets]
        found = self._parameters.chunks("model", masters)
        for kind, flats in self._optimizer.state.items():
            found += self._parameters.chunks(kind, flats)
        is_writer = self._groups.sums["data_tp"].rank == 0
        for name, bias in self._biases.items():
            found.append(Chunk(f"model/{name}", tuple(bias.shape), (0,), bias, is_writer))
        counter = self._optimizer.counter
        if counter is not None:
            found.append(Chunk("optim/step", (1,), (0,), counter, self._groups.rank == 0))
        return found

    @torch.no_grad()
    def after_load(self, lr: float) -> None:
        """See base.Engine. Collective under zero_stage 1."""
        self._parameters.publish()
        self._optimizer.set_lr(lr)
        self._optimizer.after_load()

    def _run(self, batches: list[MicroBatch], scale: float) -> torch.Tensor:
        """Forward and backward of all micro-batches; this rank's part of the loss, a scalar."""
        if self._pipeline is not None:
            return self._pipeline.run(batches, scale)
        total = torch.zeros((), device=self._device)
        for number, batch in enumerate(batches):
            with self.clock.measure("forward", 0, number):
                loss = self._loss_sum(batch) * scale
                total = total + loss.detach()
            with self.clock.measure("backward", 0, number):
                loss.backward()  # type: ignore[no-untyped-call]
        return total

    def _loss_sum(self, batch: MicroBatch) -> torch.Tensor:
        _, module = self._stages[0]
        logits = module(batch.tokens, batch.positions, batch.document_ids)
        return module.operations.loss(logits, batch.labels)

    def _own_part(self, batch: MicroBatch) -> MicroBatch:
        """On the device, and of each sequence what this rank holds."""
        batch = split_batch(batch, self._groups.cp)
        ids = batch.document_ids
        return MicroBatch(
            batch.tokens.to(self._device, non_blocking=True),
            batch.labels.to(self._device, non_blocking=True),
            batch.positions.to(self._device, non_blocking=True),
            None if ids is None else ids.to(self._device, non_blocking=True),
        )
