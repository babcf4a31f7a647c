"""Runs the monitors of a node, each at its own interval and within its own time limit.

One thread asks them one after another. A monitor that raises, or does not answer in time, is switched off for
good and said once; a thread that is stuck in one is left behind, and a new one goes on with the others. Knows
neither Ray nor what the signals mean.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ops.monitors.base import Monitor
from ops.monitors.catalog import supported
from ops.signal import Signal


@dataclass(frozen=True)
class Scheduled:
    """A monitor and when it is asked."""

    monitor: Monitor
    every_s: float
    limit_s: float = 5.0
    """It is switched off when a check takes longer."""
    is_urgent: bool = False
    """Asked again when ranks have died: it may know why. Its checks are quick."""
    stands_in_for: str = ""
    """Asked only where the monitor of this name cannot work."""


@dataclass(frozen=True)
class SwitchedOff:
    """A monitor that is not asked any more."""

    name: str
    reason: str


@dataclass(frozen=True)
class _Answer:
    name: str
    signals: tuple[Signal, ...] = ()
    error: str = ""
    is_absent: bool = False


class _Asker:
    """The thread that asks, and the way to and from it."""

    def __init__(self, working: Iterable[str] = ()) -> None:
        self.answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self.waiting: list[Scheduled] = []
        """Asked for and not answered, in their order; the first may be under way."""
        self.began_at_mono_s = 0.0
        self._working = set(working)
        self._jobs: queue.SimpleQueue[Scheduled | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="monitors", daemon=True).start()

    def ask(self, wanted: Scheduled) -> None:
        if not self.waiting:
            self.began_at_mono_s = time.monotonic()
        self.waiting.append(wanted)
        self._jobs.put(wanted)

    def end(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (wanted := self._jobs.get()) is not None:
            self.answers.put(self._answer(wanted.monitor))

    def _answer(self, monitor: Monitor) -> _Answer:
        name = monitor.name
        if name not in self._working:  # asked here, since that may block as well
            if supported([monitor]).absent:
                return _Answer(name, is_absent=True)
            self._working.add(name)
        try:
            return _Answer(name, tuple(monitor.check(time.time())))
        except Exception as error:  # of a monitor, which is never training's
            return _Answer(name, error=f"{type(error).__name__}: {error}")


class MonitorRunner:
    """Asks the monitors that can work on this node. Not for several threads at once."""

    def __init__(self, scheduled: Sequence[Scheduled], clock: Callable[[], float] = time.monotonic) -> None:
        """Asks nobody yet.

        Args:
            scheduled: all that might be asked.
            clock: monotonic, seconds.
        """
        self._on = {one.monitor.name: one for one in scheduled}
        self._working: set[str] = set()
        self.absent: set[str] = set()
        """Names of those that cannot work here, which is no fault."""
        self._due = dict.fromkeys(self._on, 0.0)
        self._clock = clock
        self._asker = _Asker()
        self._told_off: list[SwitchedOff] = []

    def turn(self) -> list[Signal]:
        """Ask whoever is due, without waiting; what was answered since the last turn."""
        signals = self._collect()
        self._look_for_late()
        now = self._clock()
        for name, one in self._on.items():
            is_wanted = not one.stands_in_for or one.stands_in_for in self.absent
            if is_wanted and now >= self._due[name] and one not in self._asker.waiting:
                self._due[name] = now + one.every_s
                self._asker.ask(one)
        return signals

    def ask_urgent(self, limit_s: float) -> list[Signal]:
        """Ask the urgent ones now, and wait for all answers that are outstanding.

        Args:
            limit_s: of the wait; what comes later is in the next turn.
        """
        for one in self._on.values():
            if one.is_urgent:
                self._asker.ask(one)
        deadline = time.monotonic() + limit_s
        signals: list[Signal] = []
        while self._asker.waiting and (left_s := deadline - time.monotonic()) > 0:
            signals += self._collect(left_s)
        return signals

    def switched_off(self) -> list[SwitchedOff]:
        """Who was switched off since the last call."""
        told, self._told_off = self._told_off, []
        return told

    def close(self) -> None:
        """Let the thread end."""
        self._asker.end()

    def _collect(self, wait_s: float = 0.0) -> list[Signal]:
        signals: list[Signal] = []
        while self._asker.waiting:
            try:
                answer = self._asker.answers.get(timeout=wait_s) if wait_s else self._asker.answers.get(False)
            except queue.Empty:
                break
            wait_s = 0.0
            self._asker.waiting.pop(0)
            self._asker.began_at_mono_s = time.monotonic()
            signals += answer.signals
            if answer.is_absent:
                self.absent.add(answer.name)
                self._on.pop(answer.name, None)
                continue
            self._working.add(answer.name)
            if answer.error:
                self._switch_off(answer.name, answer.error)
        return signals

    def _look_for_late(self) -> None:
        waiting = self._asker.waiting
        if not waiting:
            return
        late = waiting[0]
        taken_s = time.monotonic() - self._asker.began_at_mono_s
        if taken_s <= late.limit_s:
            return
        self._switch_off(late.monitor.name, f"no answer within {late.limit_s:g} s")
        self._asker.end()  # should it ever come back
        self._asker = _Asker(self._working)
        for one in waiting[1:]:
            if one.monitor.name in self._on and one not in self._asker.waiting:
                self._asker.ask(one)

    def _switch_off(self, name: str, reason: str) -> None:
        if self._on.pop(name, None) is not None:
            self._told_off.append(SwitchedOff(name, reason))
