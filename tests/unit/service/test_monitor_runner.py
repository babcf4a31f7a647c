"""Monitors of a node, asked in turn: one that raises or blocks is switched off and takes nobody with it."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ops.monitors.catalog import CATALOG
from ops.signal import Entity, EntityKind, Signal
from service.monitor_runner import MonitorRunner, Scheduled, SwitchedOff
from service.node_monitors import node_monitors


class Probe:
    """Tells one signal a check, or does what it is told to."""

    def __init__(self, name: str, act: Callable[[], None] = lambda: None, *, works: bool = True) -> None:
        self.name = name
        self.n_checks = 0
        self._act = act
        self._works = works

    def is_supported(self) -> bool:
        return self._works

    def check(self, now: float) -> list[Signal]:
        self.n_checks += 1
        self._act()
        return [Signal(now, self.name, "seen", Entity(EntityKind.NODE, "n1"))]


def turns(
    runner: MonitorRunner, until: Callable[[list[Signal]], bool], limit_s: float = 10.0
) -> list[Signal]:
    found: list[Signal] = []
    deadline = time.monotonic() + limit_s
    while not until(found):
        assert time.monotonic() < deadline, found
        found += runner.turn()
        time.sleep(0.01)
    return found


def fail() -> None:
    raise RuntimeError("boom")


def test_one_that_raises_is_said_once_and_the_others_go_on() -> None:
    good, bad = Probe("good"), Probe("bad", fail)
    runner = MonitorRunner([Scheduled(bad, 0.05), Scheduled(good, 0.05)])
    turns(runner, lambda found: len(found) >= 3)
    assert runner.switched_off() == [SwitchedOff("bad", "RuntimeError: boom")]
    turns(runner, lambda found: len(found) >= 3)
    assert runner.switched_off() == []
    assert bad.n_checks == 1
    runner.close()


def test_one_that_blocks_is_left_behind_with_its_thread() -> None:
    release = threading.Event()
    stuck, good = Probe("stuck", lambda: bool(release.wait(20)) and None), Probe("good")
    runner = MonitorRunner([Scheduled(stuck, 0.05, limit_s=0.2), Scheduled(good, 0.05)])
    begun = time.monotonic()
    found = turns(runner, lambda found: len(found) >= 3)
    assert time.monotonic() - begun < 5
    assert {one.source for one in found} == {"good"}
    assert runner.switched_off() == [SwitchedOff("stuck", "no answer within 0.2 s")]
    release.set()  # it comes back: nobody hears it any more
    found = turns(runner, lambda found: len(found) >= 3)
    assert {one.source for one in found} == {"good"}
    runner.close()


def test_who_cannot_work_is_absent_and_who_stands_in_for_it_is_asked() -> None:
    away, instead, unneeded = Probe("away", works=False), Probe("instead"), Probe("unneeded")
    good = Probe("good")
    runner = MonitorRunner(
        [
            Scheduled(instead, 0.05, stands_in_for="away"),
            Scheduled(away, 0.05),
            Scheduled(good, 0.05),
            Scheduled(unneeded, 0.05, stands_in_for="good"),
        ]
    )
    turns(runner, lambda found: {one.source for one in found} == {"good", "instead"})
    assert runner.absent == {"away"}
    assert (away.n_checks, unneeded.n_checks) == (0, 0)
    assert runner.switched_off() == []
    runner.close()


def test_each_is_asked_at_its_own_interval() -> None:
    now = [0.0]
    often, rarely = Probe("often"), Probe("rarely")
    runner = MonitorRunner([Scheduled(often, 1.0), Scheduled(rarely, 10.0)], clock=lambda: now[0])
    for second in range(21):
        now[0] = float(second)
        runner.turn()
        deadline = time.monotonic() + 5
        while (often.n_checks, rarely.n_checks) != (second + 1, second // 10 + 1):
            assert time.monotonic() < deadline
            time.sleep(0.002)
    runner.close()


def test_the_urgent_ones_answer_at_once_and_a_slow_one_does_not_keep_them() -> None:
    release = threading.Event()
    log, rare = Probe("log"), Probe("rare")
    runner = MonitorRunner([Scheduled(log, 1000.0, is_urgent=True), Scheduled(rare, 1000.0)])
    turns(runner, lambda found: len(found) == 2)
    assert [one.source for one in runner.ask_urgent(5.0)] == ["log"]
    assert (log.n_checks, rare.n_checks) == (2, 1)
    slow = Probe("slow", lambda: bool(release.wait(20)) and None)
    late = MonitorRunner([Scheduled(slow, 1000.0), Scheduled(log, 1000.0, is_urgent=True)])
    late.turn()
    begun = time.monotonic()
    assert late.ask_urgent(0.2) == []
    assert time.monotonic() - begun < 2
    release.set()
    found = turns(late, lambda found: len(found) >= 2)
    assert {one.source for one in found} == {"slow", "log"}
    runner.close()
    late.close()


def test_a_node_is_asked_for_everything_in_the_catalogue(tmp_path: Path) -> None:
    scheduled = node_monitors("n1", tmp_path, dict, tmp_path / "kmsg", tmp_path / "health.jsonl")
    assert sorted(one.monitor.name for one in scheduled) == sorted(CATALOG)
    assert {one.monitor.name for one in scheduled if one.is_urgent} == {"kernel_log", "cgroup_memory"}
