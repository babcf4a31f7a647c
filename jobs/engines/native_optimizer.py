"""The native engine's optimizer: torch's fused kernels over flat memory, or Kahan's sums in pure bf16.

Two runs of memory a bucket, decayed and not, however many parameters there are. State exists before the first
step, so that chunks can show it. Does not communicate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jobs.engines.native_parameters import FlatBucket
from jobs.optim.kahan import KahanRun, update
from jobs.spec.optim import OptimSpec


@dataclass(frozen=True)
class _Run:
    """A run of one bucket's masters, all of it decayed or none."""

    bucket: int
    part: slice
    """Of the masters and everything laid out like them."""
    masters: torch.Tensor
    gradients: torch.Tensor
    weight_decay: float


class FlatOptimizer:
    """Moves the masters of all buckets by their gradients."""

    def __init__(self, optim: OptimSpec, buckets: Sequence[FlatBucket], *, is_kahan: bool) -> None:
        """Make empty state. Local.

        Args:
            optim: kind and settings.
            buckets: what is moved; this object keeps views of them.
            is_kahan: masters are bf16 weights: keep what rounding loses.
        """
        self._optim = optim
        self._runs = list(_runs(optim, buckets))
        self._n_updates = torch.zeros(1, dtype=torch.int64)
        self.state: dict[str, list[torch.Tensor]] = {}
        """Kind (`optim/exp_avg`) -> one tensor a bucket, laid out like its masters."""
        masters = [bucket.masters for bucket in buckets]
        if optim.kind == "adamw":
            self.state["optim/exp_avg"] = [torch.zeros_like(master) for master in masters]
            self.state["optim/exp_avg_sq"] = [
                torch.zeros_like(master, dtype=torch.promote_types(master.dtype, torch.float32))
                for master in masters
            ]
        if is_kahan:
            self.state["optim/kahan"] = [torch.zeros_like(master) for master in masters]
        self._fused = None if is_kahan else self._build_fused()
        self._has_narrow_scale = all(master.dtype != torch.float64 for master in masters)

    @property
    def counter(self) -> torch.Tensor | None:
        """[1] int64: updates taken; None where the kind of optimizer does not count."""
        return self._n_updates if self._optim.kind == "adamw" else None

    def step(self, lr: float, factor: float) -> None:
        """Take one step with the gradients multiplied by `factor`."""
        self._n_updates += 1
        if self._fused is None:
            for run in self._runs:
                update(self._kahan_run(run), self._optim, lr, int(self._n_updates), factor)
            return
        self.set_lr(lr)
        scale = None
        if factor != 1.0 and self._has_narrow_scale:
            # The fused kernels divide each gradient by this while they read it: clipping costs no pass.
            scale = torch.tensor(1.0 / factor, device=self._runs[0].masters.device)
        elif factor != 1.0:
            for run in self._runs:  # the kernels' scale is fp32 whatever the gradients are
                run.gradients.mul_(factor)
        self._fused.grad_scale = scale  # type: ignore[attr-defined]
        self._fused.step()

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next step."""
        if self._fused is not None:
            for group in self._fused.param_groups:
                group["lr"] = lr

    def after_load(self) -> None:
        """The counter was read from a checkpoint: bias correction goes on from it."""
        if self._fused is not None:
            for state in self._fused.state.values():
                if "step" in state:
                    state["step"].fill_(float(self._n_updates))

    def _build_fused(self) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = []
        for run in self._runs:
            run.masters.grad = run.gradients
        for decay in dict.fromkeys(run.weight_decay for run in self._runs):
            runs = [run.masters for run in self._runs if run.weight_decay == decay]
            groups.append({"params": runs, "weight_decay": decay})
        optim = self._optim
        if optim.kind == "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, fused=True)
        betas = (optim.beta1, optim.beta2)
        optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)
        for run in self._runs:
            optimizer.state[run.masters] = {
                "step": torch.zeros((), device=run.masters.device),
                "exp_avg": self.state["optim/exp_avg"][run.bucket][run.part],
                "exp_avg_sq": self.state["optim/exp_avg_sq"][run.bucket][run.part],
            }
        return optimizer

    def _kahan_run(self, run: _Run) -> KahanRun:
        def part_of(kind: str) -> torch.Tensor | None:
            return self.state[kind][run.bucket][run.part] if kind in self.state else None

        lost = part_of("optim/kahan")
        assert lost is not None
        return KahanRun(
            run.masters,
            run.gradients,
            lost,
            part_of("optim/exp_avg"),
            part_of("optim/exp_avg_sq"),
            run.weight_decay,
        )


def _runs(optim: OptimSpec, buckets: Sequence[FlatBucket]) -> Iterator[_Run]:
    for is_decayed in (True, False):
        for number, bucket in enumerate(buckets):
            border = bucket.plan.decayed_stop
            whole = slice(0, border) if is_decayed else slice(border, bucket.plan.stop)
            start, stop = max(whole.start, bucket.span.start), min(whole.stop, bucket.span.stop)
            if start < stop:
                part = slice(start - bucket.span.start, stop - bucket.span.start)
                decay = optim.weight_decay if is_decayed else 0.0
                yield _Run(number, part, bucket.masters[part], bucket.gradients[start:stop], decay)
