"""A run whose truth is known, written by several writers, then damaged: the time still adds up exactly."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.ettr import sliding_ettr
from ops.goodput import Phase, account
from ops.ledger import LedgerWriter, MetricsWriter, read_ledger, read_metrics
from ops.losses import bill_incidents, judge_steps
from tests.support.runs import step_record


class History:
    """Writes a run with crashes as its processes would, and keeps what each second was."""

    def __init__(self, folder, skew):
        self.now, self.truth = 1_000_000.0, dict.fromkeys(Phase, 0.0)
        self._folder, self._skew, self._writers = folder, skew, {}

    def spend(self, phase, seconds):
        self.now += seconds
        self.truth[phase] += seconds

    def write(self, writer, kind, **fields):
        ledger = self._writers.setdefault(writer, LedgerWriter(self._folder / "ledger" / f"{writer}.jsonl"))
        ledger.write(kind, at=self.now + self._skew(writer), **fields)

    def step(self, metrics, step, phase):
        self.spend(phase, 1.0)
        metrics.write_step(step_record(step, step_time_s=1.0), at=self.now + self._skew("rank-00000"))


def write_history(folder, crashes, skew=lambda _writer: 0.0):
    """Checkpoints at step 0 only after each two steps; `crashes` steps are trained before each crash."""
    run = History(folder, skew)
    run.write("driver", "run_created")
    run.spend(Phase.SCHEDULING, 2.0)
    run.write("supervisor", "attempt_started", attempt=0, world_size=2)
    saved = 0
    for generation in range(len(crashes) + 1):
        who = {"attempt": 0, "generation": generation}
        run.spend(Phase.RESTART if generation else Phase.SCHEDULING, 0.5)
        run.write("coordinator", "ranks_started", **who)
        run.spend(Phase.INIT, 1.5)
        run.spend(Phase.LOAD, 0.25)
        run.write("rank-00000", "restored", **who, step=saved, load_s=0.25)
        metrics = MetricsWriter(folder / "metrics.jsonl", **who)
        last = generation == len(crashes)
        wanted = saved + (4 if last else crashes[generation])
        saving = wanted - wanted % 2  # what a crash after `wanted` steps can come back to
        for step in range(saved + 1, wanted + 1):
            run.step(metrics, step, Phase.STEP if last or step <= saving else Phase.LOST_WORK)
            if step % 2 == 0:
                run.spend(Phase.SAVE_STALL, 0.125)
                run.write("rank-00000", "checkpoint_blocked", step=step, blocked_s=0.125)
        if last:
            run.write("rank-00000", "training_ended", **who, step=wanted, outcome="finished")
            run.spend(Phase.FINISH, 1.0)
            run.write("supervisor", "attempt_ended", attempt=0, outcome="finished")
            break
        saved = saving
        failed = run.now + 0.5
        run.spend(Phase.LOST_WORK, 0.5)
        run.spend(Phase.DETECTION, 0.75)
        times = {"failed_at": failed + skew("coordinator"), "detected_at": run.now + skew("coordinator")}
        run.write("coordinator", "incident", **who, **times, action="RESTART_RANKS", **{"class": "hang"})
    run.spend(Phase.IDLE, 0.25)
    run.write("supervisor", "run_ended", status="FINISHED")
    return run


def assert_partition(events, lines, now=None):
    goodput = account(events, lines, now)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ops.goodput._thinned", lambda steps, _others_us: list(steps))
        assert account(events, lines, now) == goodput
    at = goodput.start_us
    for one in goodput.segments:
        assert one.start_us == at < one.end_us
        at = one.end_us
    assert at == goodput.end_us
    assert sum(goodput.phases_us.values()) == goodput.wall_us
    assert goodput.ettr_frac is None or 0.0 <= goodput.ettr_frac <= 1.0
    assert all(point.frac is None or 0.0 <= point.frac <= 1.0 for point in sliding_ettr(goodput, 5.0))
    for bill in bill_incidents(events, judge_steps(events, lines)):
        assert min(bill.detect_s, bill.decide_s, bill.relaunch_s, bill.reload_s, bill.redo_s) >= 0.0
    return goodput


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), st.randoms(use_true_random=False))
def test_an_undamaged_run_is_cut_as_it_was_whatever_the_order_of_lines(tmp_path_factory, crashes, rng):
    folder = tmp_path_factory.mktemp("run")
    truth = write_history(folder, crashes).truth
    events, lines = read_ledger(folder), read_metrics(folder)
    goodput = assert_partition(events, lines)
    found = {phase: us / 1e6 for phase, us in goodput.phases_us.items()}
    assert found == pytest.approx(truth)
    rng.shuffle(lines)
    assert account(events, lines, None) == goodput


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.dictionaries(
        st.sampled_from(["driver", "supervisor", "coordinator", "rank-00000"]), st.floats(-40.0, 40.0)
    ),
    st.floats(0.0, 0.6),
    st.integers(0, 2**32),
)
def test_torn_tails_missing_lines_and_clocks_that_jump_keep_every_microsecond(
    tmp_path_factory, crashes, skews, missing_frac, seed
):
    folder, rng = tmp_path_factory.mktemp("run"), random.Random(seed)
    jumps = {name: iter([skew, skew, -skew, *[skew / 2] * 99]) for name, skew in skews.items()}
    write_history(folder, crashes, lambda writer: next(jumps[writer], 0.0) if writer in jumps else 0.0)
    for path in [*(folder / "ledger").iterdir(), folder / "metrics.jsonl"]:
        kept = [line for line in path.read_bytes().splitlines(keepends=True) if rng.random() > missing_frac]
        data = b"".join(kept)
        path.write_bytes(data[: len(data) - rng.randrange(0, 60)])
    events, lines = read_ledger(folder), read_metrics(folder)
    goodput = assert_partition(events, lines, rng.choice([None, 999_000.0, 1_000_500.0]))
    rng.shuffle(events)
    assert account(events, lines, None).wall_us == account(read_ledger(folder), lines, None).wall_us
    assert goodput.wall_us >= 0


def test_a_line_with_an_absurd_instant_breaks_nothing(tmp_path):
    write_history(tmp_path, [3])
    LedgerWriter(tmp_path / "ledger" / "rank-00001.jsonl").write("restored", at=1e308, step=0, load_s=1e308)
    assert_partition(read_ledger(tmp_path), read_metrics(tmp_path))
