"""The node's clock: offset to a reference, jumps, and whether the kernel takes it as synchronised.

Logs of several nodes are ordered by time, so a clock that is off blames the wrong node. Sets no clock.
"""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from ops.monitors.changes import States
from ops.signal import Entity, EntityKind, Signal

STA_UNSYNC = 0x0040
TIME_ERROR = 5


@dataclass(frozen=True)
class SyncState:
    """What adjtimex(2) says; chrony, ntpd and systemd-timesyncd keep it up to date."""

    is_synchronised: bool
    max_error_s: float


class _Timex(ctypes.Structure):
    """Head of struct timex on Linux with a 64-bit long; the rest is room for what is not read."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_sync_state() -> SyncState:
    """Ask the kernel, changing nothing.

    Raises:
        OSError: it may not be asked (a seccomp filter).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    timex = _Timex()  # modes = 0: only read.
    result = libc.adjtimex(ctypes.byref(timex))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    is_synchronised = result != TIME_ERROR and not timex.status & STA_UNSYNC
    return SyncState(is_synchronised, timex.maxerror / 1e6)


class ClockSkewMonitor:
    """Compares the wall clock with a reference, with the monotonic clock, and asks the kernel."""

    name = "clock_skew"

    def __init__(
        self,
        node: str,
        reference: Callable[[], float] | None = None,
        limit_s: float = 0.5,
        sync_state: Callable[[], SyncState] = read_sync_state,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember whom to ask.

        Args:
            node: address of this node.
            reference: asks another node for its wall clock, unix seconds; may be slow, may raise OSError.
            limit_s: offsets and jumps below it are not told. Half the round trip is always allowed for.
            sync_state: as read_sync_state.
            monotonic: as time.monotonic.
        """
        self._entity = Entity(EntityKind.NODE, node)
        self._reference = reference
        self._limit_s = limit_s
        self._sync_state = sync_state
        self._monotonic = monotonic
        self._last: tuple[float, float] | None = None
        self._states = States()

    def is_supported(self) -> bool:
        """There is a reference, or the kernel answers."""
        try:
            self._sync_state()
        except OSError:
            return self._reference is not None
        return True

    def check(self, now: float) -> list[Signal]:
        """What turned: clock_skew (offset, s), clock_unsynchronised (error, s); and each clock_jump (s)."""
        asked_at = self._monotonic()
        return [
            *self._check_jump(now, asked_at),
            *self._check_offset(now, asked_at),
            *self._check_kernel(now),
        ]

    def _check_jump(self, now: float, now_mono_s: float) -> list[Signal]:
        last, self._last = self._last, (now, now_mono_s)
        if last is None:
            return []
        jump_s = (now - last[0]) - (now_mono_s - last[1])
        if abs(jump_s) <= self._limit_s:
            return []
        return [
            Signal(
                now, self.name, "clock_jump", self._entity, jump_s, f"the wall clock jumped {jump_s:+.3f} s"
            )
        ]

    def _check_offset(self, now: float, asked_at: float) -> list[Signal]:
        if self._reference is None:
            return []
        try:
            reference_at = self._reference()
        except OSError:
            return []  # Whether a node answers is told by others.
        half_round_trip_s = (self._monotonic() - asked_at) / 2
        offset_s = now + half_round_trip_s - reference_at
        is_off = abs(offset_s) - half_round_trip_s > self._limit_s
        text = f"ahead of the reference by {offset_s:+.3f} s (known to {half_round_trip_s:.3f} s)"
        return self._turn("clock_skew", is_off, offset_s, text, now)

    def _check_kernel(self, now: float) -> list[Signal]:
        try:
            state = self._sync_state()
        except OSError:
            return []
        text = f"adjtimex: synchronised {state.is_synchronised}, largest error {state.max_error_s:.3f} s"
        return self._turn("clock_unsynchronised", not state.is_synchronised, state.max_error_s, text, now)

    def _turn(self, kind: str, is_bad: bool, value: float, text: str, now: float) -> list[Signal]:
        turned = self._states.turned(kind, is_bad)
        if turned is None:
            return []
        return [Signal(now, self.name, kind if turned else f"{kind}_cleared", self._entity, value, text)]
