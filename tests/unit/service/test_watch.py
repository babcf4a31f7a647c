"""What the coordinator makes of the agents' reports: hangs, and signals while they may explain something."""

import math
from dataclasses import replace

from ops.black_box import BoxReading, Phase, PhaseSums
from ops.monitors.collective_hang import Hang
from ops.signal import Entity, EntityKind, Signal
from service.watch import MAX_SIGNALS, SIGNALS_WINDOW_S, NodeReport, Watch, report_interval_s
from tests.support.simulated_ranks import box

STAGES = {0: 0, 1: 0}
NOW = 1_000_000.0


def stepping(rank: int, n_steps: int, step_s: float = 1.0, **changed: object) -> BoxReading:
    sums = [PhaseSums()] * len(Phase)
    sums[Phase.STEP] = PhaseSums(n_steps, step_s, step_s, n_steps * step_s)
    known = {"first_step_s": 5.0, "step": n_steps, "sums": tuple(sums), "collective": 10 * n_steps}
    return box(rank, **{**known, **changed})


def taught(watch: Watch, n_steps: int = 20, **changed: object) -> float:
    """Reports of a run that goes well, a step a second; the instant of the last."""
    for second in range(1, n_steps + 1):
        boxes = tuple((stepping(rank, second, **changed), 0.1) for rank in STAGES)
        watch.hear(NodeReport(0, "n1", boxes), STAGES, NOW + second)
        assert watch.look((0, 0), 2, NOW + second) is None
    return NOW + n_steps


def stand_still(watch: Watch, began: float, boxes: tuple[BoxReading, ...], seconds: int) -> Hang | None:
    for second in range(1, seconds):
        report = NodeReport(0, "n1", tuple((one, second + 0.1) for one in boxes))
        watch.hear(report, STAGES, began + second)
        found = watch.look((0, 0), 2, began + second)
        if found is not None:
            return found
    return None


def test_ranks_that_stop_are_found_in_ten_seconds_with_the_one_that_is_behind() -> None:
    watch = Watch()
    at = taught(watch)
    hang = stand_still(watch, at, (stepping(0, 20, collective=207), stepping(1, 20, collective=203)), 30)
    assert hang is not None
    assert hang.at - at <= 10.0
    assert hang.culprits == (1,)


def test_boxes_of_an_older_generation_or_attempt_are_not_heard() -> None:
    watch = Watch()
    at = taught(watch)
    old = tuple(replace(stepping(r, 20), identity=replace(box(r).identity, generation=0)) for r in STAGES)
    for second in range(1, 60):
        watch.hear(NodeReport(0, "n1", tuple((one, 100.0 + second) for one in old)), STAGES, at + second)
        assert watch.look((0, 1), 2, at + second) is None  # generation 1 runs, and has no boxes yet
    watch.begin_attempt()
    left_behind = tuple((stepping(rank, 20), 500.0) for rank in STAGES)
    for second in range(60, 120):
        watch.hear(NodeReport(1, "n1", left_behind), STAGES, at + second)  # boxes of attempt 0
        assert watch.look((1, 0), 2, at + second) is None


def test_what_the_first_generation_taught_holds_for_the_next() -> None:
    watch = Watch()
    at = taught(watch) + 1.0
    new = tuple(
        replace(stepping(rank, 3), identity=replace(box(rank).identity, generation=1, pid=900 + rank))
        for rank in STAGES
    )
    found = None
    for second in range(1, 30):
        watch.hear(NodeReport(0, "n1", tuple((one, second + 0.0) for one in new)), STAGES, at + second)
        found = found or watch.look((0, 1), 2, at + second)
    assert found is not None
    assert found.age_s <= 10.0


def test_a_look_is_taken_once_a_second_however_many_nodes_report() -> None:
    watch = Watch()
    at = taught(watch, first_step_s=math.nan)
    stale = tuple((stepping(rank, 20), 1e6) for rank in STAGES)
    for number in range(100):
        watch.hear(NodeReport(0, f"n{number}", stale), STAGES, at + 0.5)
        assert watch.look((0, 0), 2, at + 0.5) is None
    assert watch.look((0, 0), 2, at + 1.0) is not None


def test_ranks_that_are_not_of_the_attempt_are_not_heard() -> None:
    watch = Watch()
    at = taught(watch)
    watch.hear(NodeReport(0, "n1", ((stepping(7, 20), 1e6),)), STAGES, at + 1)
    assert watch.look((0, 0), 2, at + 1) is None


def test_signals_are_kept_for_a_while_and_a_flood_is_bounded() -> None:
    watch = Watch()
    old, new = (
        Signal(at, "nics", "nic_down", Entity(EntityKind.LINK, "eth0", "n1")) for at in (NOW, NOW + 600)
    )
    watch.hear(NodeReport(0, "n1", signals=(old, new)), STAGES, NOW + 600)
    assert watch.signals_since(NOW) == [old, new]
    assert watch.signals_since(NOW + 1) == [new]
    watch.look((0, 0), 2, NOW + SIGNALS_WINDOW_S + 1)
    assert watch.signals_since(0.0) == [new]
    watch.add_signals([new] * (2 * MAX_SIGNALS))
    assert len(watch.signals_since(0.0)) == MAX_SIGNALS


def test_many_nodes_report_less_often() -> None:
    assert [report_interval_s(n) for n in (1, 200, 400, 2048, 20_000)] == [1.0, 1.0, 2.0, 10.0, 10.0]


def test_boxes_that_come_every_ten_seconds_are_no_hang_by_their_age_and_a_hang_is_found_with_its_rank() -> (
    None
):
    """Rank 0's node reports when a second ends in 0, rank 1's when it ends in 5."""
    watch = Watch(reports_every_s=10.0)
    stopped_at = 100
    for second in range(1, 200):
        n_steps = min(second, stopped_at)
        rank = {0: 0, 5: 1}.get(second % 10)
        if rank is not None:
            reading = stepping(rank, n_steps, collective=10 * n_steps + (5 if rank == 0 else 0))
            watch.hear(NodeReport(0, f"n{rank}", ((reading, 0.1 + second - n_steps),)), STAGES, NOW + second)
        hang = watch.look((0, 0), 2, NOW + second)
        if hang is not None:
            break
    assert hang is not None
    assert stopped_at + 10 < second <= stopped_at + 20
    assert hang.culprits == (1,)
