"""Gradients summed over the data-parallel ranks while the backward pass still runs. Does not scale or clip.

    backward of the last micro-batch   layer 3   layer 2   layer 1   layer 0   embedding
    bucket 0 (layers 3, 2)                      |== all-reduce ==|
    bucket 1 (layers 1, 0)                                          |== all-reduce ==|
    bucket 2 (embedding, loss)                                                        |== all-reduce ==|

Autograd makes each gradient in a buffer of its own; a hook moves it into the bucket (copied on the first
micro-batch, added on later ones, so nothing is ever zeroed) and lets the buffer go. The sum is fp32
whatever the parameters are. Buckets are launched in one fixed order, so ranks cannot pair different
buckets.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from jobs.comm.buckets import Bucket


class GradReducer:
    """Fills flat fp32 gradient buckets from autograd and sums them over a group."""

    def __init__(
        self,
        buckets: list[Bucket],
        flats: list[torch.Tensor],
        parameters: Mapping[str, torch.nn.Parameter],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Hook every parameter.

        Args:
            buckets: where each parameter lies.
            flats: one fp32 tensor a bucket, at least as long as it. The last has one element more: the loss.
            parameters: by the names in `buckets`.
            group: ranks to sum over; None where there is nobody to sum with.
        """
        self._flats = flats
        self._group = group
        self._sizes = [len(bucket.slots) for bucket in buckets]
        self._views = [
            flat[slot.start : slot.stop].view(slot.shape)
            for bucket, flat in zip(buckets, flats, strict=True)
            for slot in bucket.slots
        ]
        self._loss = flats[-1][-1]
        self._filled = [False] * len(self._views)
        self._missing = list(self._sizes)
        self._works: list[dist.Work | None] = []
        self._is_last = False
        place = 0
        for number, bucket in enumerate(buckets):
            for slot in bucket.slots:
                hook = self._hook(place, number)
                parameters[slot.name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                place += 1

    def start(self) -> None:
        """Begin a step: what is in the buckets is forgotten."""
        self._filled = [False] * len(self._views)
        self._missing = list(self._sizes)
        self._works = []
        self._is_last = False

    def expect_last(self, loss: torch.Tensor) -> None:
        """The next backward pass is the step's last: buckets are reduced as they fill up.

        Args:
            loss: scalar, this rank's share of the step's loss; rides in the last bucket.
        """
        self._loss.copy_(loss)
        self._is_last = True

    def finish(self, after_bucket: Callable[[int], None]) -> torch.Tensor:
        """Wait for the sums. Collective over the group.

        Args:
            after_bucket: called with the number of each bucket as soon as its sum is there.

        Returns:
            Scalar: the loss summed over the group; valid until the next step.
        """
        for place, filled in enumerate(self._filled):
            if not filled:
                self._views[place].zero_()
        self._missing = [0] * len(self._sizes)
        self._launch()
        for number, work in enumerate(self._works):
            if work is not None:
                work.wait()
            after_bucket(number)
        return self._loss

    def _hook(self, place: int, number: int) -> Callable[[torch.Tensor], None]:
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
            if self._is_last:
                self._missing[number] -= 1
                self._launch()

        return move

    def _launch(self) -> None:
        while len(self._works) < len(self._flats) and self._missing[len(self._works)] == 0:
            flat = self._flats[len(self._works)]
            if self._group is None:
                self._works.append(None)
            else:
                self._works.append(dist.all_reduce(flat, group=self._group, async_op=True))
