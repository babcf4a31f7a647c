"""Gradients summed over the ranks that share a parameter while backward runs. Does not scale or clip.

    last backward pass                 layer 3   layer 2   layer 1   layer 0   embedding
    bucket 0 (layers 3, 2)                      |== sum ==|
    bucket 1 (layers 1, 0)                                          |== sum ==|
    bucket 2 (embedding)                                                      |== sum ==|

Autograd makes each gradient in a buffer of its own; a hook moves it into the bucket (copied on the first
micro-batch, added on later ones, so nothing is ever zeroed) and lets the buffer go. A bucket is launched
when all its gradients of all micro-batches are there, and buckets are launched in one fixed order, so ranks
cannot pair different buckets. The sum is never narrower than fp32: bf16 buckets are widened for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from jobs.comm.buckets import Bucket
from jobs.comm.groups import Axis


@dataclass(frozen=True)
class GradBucket:
    """One bucket's gradients and who sums them."""

    plan: Bucket
    flat: torch.Tensor
    """[plan.stop]."""
    axis: Axis
    """Ranks that sum this bucket."""
    span: slice
    """What this rank needs of the sum: all of it, or its one of axis.size equal parts."""

    @property
    def is_scattered(self) -> bool:
        """Only a part of the sum is kept here."""
        return bool(self.span.stop - self.span.start < self.plan.stop)


class GradReducer:
    """Fills flat gradient buckets from autograd and sums each over its ranks."""

    def __init__(
        self, buckets: Sequence[GradBucket], parameters: Mapping[str, Sequence[torch.nn.Parameter]]
    ) -> None:
        """Hook every parameter.

        Args:
            buckets: in the order in which they are launched, the same on all ranks that share any.
            parameters: by the names in `buckets`; several that are one piece of memory add up.
        """
        self._buckets = tuple(buckets)
        self._views: list[torch.Tensor] = []
        self._moves: list[tuple[torch.nn.Parameter, Callable[[torch.Tensor], None]]] = []
        self._sizes: list[int] = []
        for number, bucket in enumerate(self._buckets):
            self._sizes.append(0)
            for slot in bucket.plan.slots:
                self._views.append(bucket.flat[slot.start : slot.stop].view(slot.shape))
                move = self._mover(len(self._views) - 1, number)
                for parameter in parameters[slot.name]:
                    parameter.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
                    self._moves.append((parameter, move))
                    self._sizes[-1] += 1
        self._filled = [False] * len(self._views)
        self._missing = list(self._sizes)
        self._works: list[_Work] = []

    def start(self, n_micro_batches: int) -> None:
        """Begin a step: what is in the buckets is forgotten.

        Args:
            n_micro_batches: backward passes until each gradient is whole.
        """
        self._filled = [False] * len(self._views)
        self._missing = [size * n_micro_batches for size in self._sizes]
        self._works = []

    def collect(self) -> None:
        """Take gradients that autograd's hooks did not deliver: a pipeline schedule may set them itself."""
        for parameter, move in self._moves:
            if parameter.grad is not None:
                move(parameter)

    def finish(self, after_bucket: Callable[[int], None]) -> None:
        """Wait for the sums. Collective over the ranks of every bucket.

        Args:
            after_bucket: called with the number of each bucket as soon as its sum is in its span.
        """
        for place, filled in enumerate(self._filled):
            if not filled:
                self._views[place].zero_()
        self._missing = [0] * len(self._sizes)
        self._launch()
        for number, work in enumerate(self._works):
            work.finish()
            after_bucket(number)

    def _mover(self, place: int, number: int) -> Callable[[torch.Tensor], None]:
        view = self._views[place]

        def move(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if self._filled[place]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
                self._filled[place] = True
            parameter.grad = None
            self._missing[number] -= 1
            if self._missing[number] == 0:
                self._launch()

        return move

    def _launch(self) -> None:
        while len(self._works) < len(self._buckets) and self._missing[len(self._works)] <= 0:
            self._works.append(_launch(self._buckets[len(self._works)]))


@dataclass(frozen=True)
class _Work:
    """A sum under way: into `wide`, which is then rounded into `target`."""

    handle: dist.Work | None
    wide: torch.Tensor
    target: torch.Tensor

    def finish(self) -> None:
        if self.handle is not None:
            self.handle.wait()
        if self.wide is not self.target:
            self.target.copy_(self.wide)


def _launch(bucket: GradBucket) -> _Work:
    if bucket.axis.group is None:
        return _Work(None, bucket.flat, bucket.flat)
    is_narrow = bucket.flat.dtype.itemsize < torch.float32.itemsize
    wide = bucket.flat.float() if is_narrow else bucket.flat
    if not bucket.is_scattered:
        handle = dist.all_reduce(wide, group=bucket.axis.group, async_op=True)
        return _Work(handle, wide, bucket.flat)
    # The part that is kept is summed in its own place, as both gloo and NCCL allow.
    part = wide[bucket.span]
    handle = dist.reduce_scatter_single(part, wide, group=bucket.axis.group, async_op=True)
    return _Work(handle, part, bucket.flat[bucket.span] if is_narrow else part)
