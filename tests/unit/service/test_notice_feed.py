"""The driver's messages from a real run folder to real HTTP servers, and what must never hold it."""

import contextlib
import time

import pytest

from ops.ledger import MetricsWriter
from ops.notify import NotifyLimits
from service.notice_feed import NoticeFeed
from service.run_follower import RunFollower
from tests.support.http_target import dead_port, target
from tests.support.runs import make_run, step_record, tiny_spec

pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")  # by a plug-in that Apprise loads

QUICK = NotifyLimits(request_s=0.5, retry_after_s=0.05)


class Stage:
    """A run folder with one step done, and its feed."""

    def __init__(self, tmp_path):
        self.run_dir, self.ledger = make_run(tmp_path, tiny_spec(tmp_path))
        self.begun = time.time() - 10
        self.ledger.write("run_created", at=self.begun)
        self.ledger.write("attempt_started", at=self.begun, attempt=0, world_size=2)
        self.ranks(0, self.begun)
        MetricsWriter(self.run_dir / "metrics.jsonl", 0, 0).write_step(step_record(1), at=self.begun + 1)
        self.lines = []

    def ranks(self, generation, at):
        self.ledger.write("ranks_started", at=at, attempt=0, generation=generation)
        self.ledger.write("restored", at=at + 0.1, attempt=0, generation=generation, step=0, load_s=0.0)

    def incident(self, action="RESTART_RANKS", **more):
        named = {"class": "hang", "culprit": "rank 1 (node 10.0.0.3)", "action": action, "step": 1}
        ranks = {"attempt": 0, "generation": 0}
        now = time.time()
        self.ledger.write("incident", failed_at=now - 1, detected_at=now, **{**ranks, **named, **more})

    def feed(self, environment, **more):
        variables = [f"${{{name}}}" for name in environment]
        follower = RunFollower(self.run_dir)
        feed = NoticeFeed(
            self.run_dir, variables, follower, self.lines.append, interval_s=0.05, limits=QUICK, **more
        )
        feed.start({name: url for name, url in environment.items() if url})
        return feed


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def until(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_begin_over_and_end_of_what_happens_while_it_watches(stage):
    stage.incident(evidence="of another driver's time")
    with target() as (port, got):
        feed = stage.feed({"OPS_URL": f"json://127.0.0.1:{port}/"}, n_ranks=2)
        stage.incident(evidence="stuck in all_reduce")
        until(lambda: len(got) == 1)
        assert got[0]["title"] == "demo: hang, rank 1 (node 10.0.0.3), RESTART_RANKS"
        assert "stuck in all_reduce" in got[0]["message"]
        stage.ranks(1, time.time() + 0.5)
        until(lambda: len(got) == 2)
        assert got[1]["title"].endswith(": over")
        assert "rank-hours" in got[1]["message"]
        stage.incident("PAGE", generation=1)
        until(lambda: len(got) == 3)
        assert got[2]["type"] == "failure"
        feed.close("FAILED", "boom")
        assert got[3]["title"] == "demo: FAILED"
        assert got[3]["message"].endswith("error\nboom")
    assert len(got) == 4
    assert stage.lines == []


def test_dead_and_hanging_targets_hold_nobody_and_are_named_without_their_secrets(stage, capfd):
    with target() as (good, got), target(answer_after_s=30) as (slow, _):
        environment = {
            "GOOD": f"json://127.0.0.1:{good}/",
            "SLOW": f"json://u:s3cret@127.0.0.1:{slow}/s3cret",
            "DEAD": f"json://u:s3cret@127.0.0.1:{dead_port()}/?token=s3cret",
            "NONSENSE": "s3cret",
            "MISSING": "",
        }
        feed = stage.feed(environment)
        stage.incident()
        until(lambda: got)
        began = time.monotonic()
        feed.close("FINISHED", timeout_s=1.0)
        assert time.monotonic() - began < 3.0
        assert [message["title"] for message in got][-1] == "demo: FINISHED"
    shown = capfd.readouterr()
    assert len(stage.lines) == 4
    assert "MISSING is not set where the driver runs" in stage.lines[0]
    assert [line.split(" (")[0] for line in stage.lines[1:]] == [
        f"notifications, target {n}" for n in (2, 3, 4)
    ]
    assert "s3cret" not in " ".join([*stage.lines, shown.out, shown.err])


def test_the_end_is_told_when_the_ledger_and_the_run_folder_are_gone(stage):
    with target() as (port, got):
        feed = stage.feed({"URL": f"json://127.0.0.1:{port}/"})
        for path in sorted(stage.run_dir.rglob("*"), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        time.sleep(0.2)
        feed.close("FAILED", "the storage is gone")
        assert [message["title"] for message in got] == ["demo: FAILED"]


def test_without_targets_there_is_no_thread(stage):
    feed = stage.feed({})
    stage.incident()
    feed.close("FINISHED")
    assert stage.lines == []
