"""The native engine: data parallel over replicated parameters, in fp32 or in bf16 with fp32 master weights.

Everything a parameter needs lies flat, bucket by bucket, and the model's parameters are views of it:

    bf16 only   weights   |  bucket 0  |  bucket 1  | ...   what forward and backward use
    fp32        master    |            |            |       (in fp32 these are the model's parameters)
    fp32        gradients |            |            |       summed over ranks while backward runs
    fp32        moments   |            |            |       two of them, AdamW only

so a step is one copy of each gradient, one all-reduce, one norm and one optimizer call per bucket. Every
rank does the same arithmetic on the same sums, so replicas stay bitwise equal without ever being compared.
Does not shard anything.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from jobs.comm.buckets import plan_buckets, plan_writers
from jobs.comm.groups import Groups
from jobs.comm.reducer import GradReducer
from jobs.engines.base import MicroBatch, StepResult
from jobs.models.init import build_llama
from jobs.models.losses import IGNORED_LABEL, cross_entropy_sum
from jobs.optim.grad_norm import clip_factor, squared_norm
from jobs.spec.job import JobSpec
from jobs.spec.optim import OptimSpec
from jobs.spec.strategy import NativeStrategy
from jobs.state import Chunk


class NativeEngine:
    """The Engine of strategy.kind = native. Collective over groups.dp where base.Engine says so."""

    def __init__(self, spec: JobSpec, groups: Groups, device: torch.device) -> None:
        """Build the model with its start weights, and empty moments. Local: no communication.

        Args:
            spec: the run; spec.strategy is native.
            groups: this rank's groups.
            device: where everything lives.
        """
        assert isinstance(spec.strategy, NativeStrategy)
        self._groups = groups
        self._device = device
        self._grad_clip_norm = spec.optim.grad_clip_norm
        self._model: torch.nn.Module = build_llama(spec.model, spec.run.seed, device)
        self._parameters = dict(self._model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        self._buckets = plan_buckets(shapes, spec.strategy.bucket_mib * 2**20)
        self._masters = [torch.zeros(bucket.stop, device=device) for bucket in self._buckets]
        self._weights: list[torch.Tensor] = []
        self._take_over_parameters(torch.bfloat16 if spec.train.precision == "bf16" else torch.float32)
        last = len(self._buckets) - 1
        flats = [
            torch.zeros(bucket.stop + (number == last), device=device)
            for number, bucket in enumerate(self._buckets)
        ]
        group = groups.dp.group
        self._reducer = GradReducer(self._buckets, flats, self._parameters, group)
        self._gradients = [flat[: bucket.stop] for bucket, flat in zip(self._buckets, flats, strict=True)]
        self._adam_step = torch.zeros(1, dtype=torch.int64)
        self._moments: dict[str, list[torch.Tensor]] = {}
        self._optimizer = self._build_optimizer(spec.optim)
        self._writers = plan_writers(shapes, groups.dp.size)

    @property
    def model(self) -> torch.nn.Module:
        """The whole module; its parameters are views of the flat buckets."""
        return self._model

    def train_step(self, batches: list[MicroBatch], n_valid_tokens: int, lr: float) -> StepResult:
        """See base.Engine. losses are divided by n_valid_tokens before backward: sums are means."""
        self._reducer.start()
        scale = 1.0 / max(1, n_valid_tokens)
        total = torch.zeros((), device=self._device)
        for number, batch in enumerate(batches):
            loss = self._loss_sum(batch) * scale
            total = total + loss.detach()
            if number == len(batches) - 1:
                self._reducer.expect_last(total)
            loss.backward()  # type: ignore[no-untyped-call]
        squares: list[torch.Tensor] = []
        summed = self._reducer.finish(lambda number: squares.append(squared_norm(self._gradients[number])))
        figures = torch.stack((summed.double(), torch.stack(squares).sum().sqrt())).tolist()
        mean_loss, grad_norm = float(figures[0]), float(figures[1])
        # Every rank has the same sums, so all of them see a non-finite gradient on any of them.
        if not math.isfinite(grad_norm):
            return StepResult(mean_loss, grad_norm, skipped=True)
        self._update(lr, clip_factor(grad_norm, self._grad_clip_norm))
        return StepResult(mean_loss, grad_norm, skipped=False)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> tuple[float, int]:
        """See base.Engine."""
        n_valid = (batch.labels != IGNORED_LABEL).sum()
        figures = torch.stack((self._loss_sum(batch).double(), n_valid.to(self._device).double()))
        if self._groups.dp.size > 1:
            dist.all_reduce(figures, group=self._groups.dp.group)
        loss_sum, n_tokens = figures.tolist()
        return float(loss_sum), int(n_tokens)

    def chunks(self) -> list[Chunk]:
        """See jobs/state.py. Every rank holds everything; the dp ranks save equal shares, cut at rows."""
        flats = {"model": self._masters, **self._moments}
        found: list[Chunk] = []
        for kind, tensors in flats.items():
            for bucket, flat in zip(self._buckets, tensors, strict=True):
                for slot in bucket.slots:
                    whole = flat[slot.start : slot.stop].view(slot.shape)
                    found += [
                        Chunk(
                            name=f"{kind}/{slot.name}",
                            global_shape=slot.shape,
                            offsets=(rows.start, *(0 for _ in slot.shape[1:])),
                            tensor=whole[rows.start : rows.stop],
                            is_writer=rows.writer == self._groups.dp.rank,
                        )
                        for rows in self._writers[slot.name]
                    ]
        if self._moments:
            is_writer = self._groups.dp.rank == 0
            found.append(Chunk("optim/step", (1,), (0,), self._adam_step, is_writer))
        return found

    def after_load(self, lr: float) -> None:
        """See base.Engine. Local: no communication."""
        self._refresh_weights()
        self._set_lr(lr)
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(float(self._adam_step))

    def _loss_sum(self, batch: MicroBatch) -> torch.Tensor:
        ids = batch.document_ids
        logits = self._model(
            batch.tokens.to(self._device, non_blocking=True),
            batch.positions.to(self._device, non_blocking=True),
            None if ids is None else ids.to(self._device, non_blocking=True),
        )
        return cross_entropy_sum(logits, batch.labels.to(self._device, non_blocking=True))

    def _take_over_parameters(self, dtype: torch.dtype) -> None:
        """Move the fp32 start weights into the masters and make the model's parameters views of flat ones."""
        for bucket, master in zip(self._buckets, self._masters, strict=True):
            for slot in bucket.slots:
                master[slot.start : slot.stop].view(slot.shape).copy_(self._parameters[slot.name].detach())
        seen = self._masters
        if dtype != torch.float32:
            self._weights = [master.to(dtype) for master in self._masters]
            seen = self._weights
            self._model.to(dtype)
        for bucket, flat in zip(self._buckets, seen, strict=True):
            for slot in bucket.slots:
                self._parameters[slot.name].data = flat[slot.start : slot.stop].view(slot.shape)

    def _build_optimizer(self, optim: OptimSpec) -> torch.optim.Optimizer:
        """Torch's fused optimizers on two runs of memory a bucket: one pass over memory, clipping included.

        AdamW gets its state before the first step, as views of memory that chunks() can show.
        """
        runs: list[tuple[torch.Tensor, int, slice]] = []
        groups: list[dict[str, Any]] = []
        for decayed in (True, False):
            first = len(runs)
            for number, bucket in enumerate(self._buckets):
                span = slice(0, bucket.decayed_stop) if decayed else slice(bucket.decayed_stop, bucket.stop)
                if span.start < span.stop:
                    run = self._masters[number][span]
                    run.grad = self._gradients[number][span]
                    runs.append((run, number, span))
            if first < len(runs):
                decay = optim.weight_decay if decayed else 0.0
                groups.append({"params": [run for run, _, _ in runs[first:]], "weight_decay": decay})
        if optim.kind == "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, fused=True)
        betas = (optim.beta1, optim.beta2)
        optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)
        exp_avg, exp_avg_sq = ([torch.zeros_like(master) for master in self._masters] for _ in range(2))
        self._moments = {"optim/exp_avg": exp_avg, "optim/exp_avg_sq": exp_avg_sq}
        for run, number, span in runs:
            optimizer.state[run] = {
                "step": torch.zeros((), device=self._device),
                "exp_avg": exp_avg[number][span],
                "exp_avg_sq": exp_avg_sq[number][span],
            }
        return optimizer

    def _update(self, lr: float, factor: float) -> None:
        self._set_lr(lr)
        # The fused kernels divide each gradient by this while they read it: clipping costs no pass.
        scale = None if factor == 1.0 else torch.tensor(1.0 / factor, device=self._device)
        self._optimizer.grad_scale = scale  # type: ignore[attr-defined]
        self._optimizer.step()
        self._adam_step += 1
        self._refresh_weights()

    def _set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def _refresh_weights(self) -> None:
        for weights, master in zip(self._weights, self._masters, strict=False):
            weights.copy_(master)
