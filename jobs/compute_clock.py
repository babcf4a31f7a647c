"""How long this rank computes, pass by pass, without waiting for anybody: what stragglers are known by.

On the host the processor time of the thread that trains is taken: waiting for a peer, for a batch or for the
disk costs none, whatever library waits. On a GPU events in the stream are taken, without a synchronisation
before somebody asks; collectives inside a pass count there, so ranks of one tp or cp line show the same.
Judges nobody (ops/monitors/straggler.py does).
"""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

PassKind = Literal["forward", "backward"]


@dataclass(frozen=True)
class ComputedPass:
    """One forward or backward of one micro-batch through one stage."""

    kind: PassKind
    stage: int
    micro_batch: int
    compute_s: float


class ComputeClock:
    """Takes the time of passes while it is on. One thread."""

    def __init__(self, device: torch.device) -> None:
        """Off.

        Args:
            device: where the passes compute.
        """
        self.is_on = False
        self.pause_s = 0.0
        """Of Python's garbage collector since the last `take`, on the thread that trains: no computing."""
        self._is_cuda = device.type == "cuda"
        self._paused_s = 0.0
        self._pause_began_s = 0.0
        self._noted: list[tuple[PassKind, int, int, Any, Any]] = []

    @contextmanager
    def measure(self, kind: PassKind, stage: int, micro_batch: int) -> Iterator[None]:
        """Note that what happens inside is a pass."""
        if not self.is_on:
            yield
            return
        start = self._now()
        yield
        self._noted.append((kind, stage, micro_batch, start, self._now()))

    def take(self) -> list[ComputedPass]:
        """The passes since the last call, in order. Waits for the device."""
        noted, self._noted = self._noted, []
        self.pause_s = 0.0
        if self._is_cuda and noted:
            noted[-1][4].synchronize()
        return [
            ComputedPass(kind, stage, micro_batch, self._between(start, end))
            for kind, stage, micro_batch, start, end in noted
        ]

    def switch(self, *, on: bool) -> None:
        """Begin or end to take times; the collector's pauses are followed meanwhile."""
        if on is self.is_on:
            return
        self.is_on = on
        self._noted.clear()
        if on:
            gc.callbacks.append(self._on_collector)
        else:
            gc.callbacks.remove(self._on_collector)

    def _on_collector(self, phase: str, _info: Mapping[str, int]) -> None:
        now_s = time.thread_time()
        if phase == "start":
            self._pause_began_s = now_s
        else:
            self._paused_s += now_s - self._pause_began_s
            self.pause_s += now_s - self._pause_began_s

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.thread_time() - self._paused_s
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3 if self._is_cuda else end - start)
