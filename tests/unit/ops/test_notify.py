import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ops.ledger import Event
from ops.losses import IncidentBill
from ops.notify import (
    Level,
    Notice,
    Notifier,
    NotifyLimits,
    begun_notices,
    cost_notices,
    end_notice,
    may_send,
)
from tests.support.http_target import dead_port, target

pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")  # by a plug-in that Apprise loads

QUICK = NotifyLimits(request_s=0.5, retry_after_s=0.05)


def bill(action="RESTART_RANKS", detected_at=100.0, restart_s=2.5, failure_class="hang", **more):
    fields = {
        "class": failure_class,
        "culprit": "rank 3 (node 10.0.0.3)",
        "action": action,
        "reason": "restart 1 of 10",
        "step": 40,
        "attempt": 0,
        "generation": 1,
        "detected_at": detected_at,
        "evidence": "x" * 2000 + "the last line",
        **more,
    }
    event = Event(at=detected_at + 0.25, kind="incident", writer="coordinator", fields=fields)
    return IncidentBill(event, 1.0, 0.25, restart_s, 0.5, 4, 4.0)


def notice(number=0, level=Level.WARNING):
    return Notice(f"key-{number}", f"title {number}", "body", level)


def until(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_incident_is_told_when_it_begins_and_when_it_is_over():
    with target() as (port, got):
        notifier = Notifier([f"json://user:s3cret@127.0.0.1:{port}/hook"], QUICK)
        for _ in range(3):  # the driver looks again and again
            notifier.send(begun_notices("demo", [bill().event]))
            notifier.send(cost_notices("demo", [bill()], now=103.0, n_ranks=64))
        until(lambda: len(got) == 2)
        assert notifier.close() == []
    begun, over = got
    assert begun["title"] == "demo: hang, rank 3 (node 10.0.0.3), RESTART_RANKS"
    assert begun["type"] == "warning"
    what = [
        "class    hang",
        "culprit  rank 3 (node 10.0.0.3)",
        "action   RESTART_RANKS: restart 1 of 10",
        "step     40",
        "runbook  ops/runbooks/hang.md",
    ]
    assert begun["message"].splitlines()[:5] == what
    assert begun["message"].endswith("the last line")
    assert len(begun["message"]) < 1200
    assert over["title"] == f"{begun['title']}: over"
    assert over["type"] == "success"
    assert over["message"].splitlines() == [
        *what,
        "cost     7.5 s (detect 1.0 s, decide 0.2 s, restart 1.8 s, reload 0.5 s, recompute 4.0 s), "
        "4 steps to be trained again; 0.13 rank-hours",
    ]


def test_an_incident_that_does_not_end_is_told_of_once_more():
    open_bill = bill(restart_s=0.0)
    assert cost_notices("demo", [open_bill], now=150.0) == []
    (late,) = cost_notices("demo", [open_bill], now=400.0)
    assert "so far: it does not train again yet" in late.body
    assert (late.level, late.title[-8:]) == (Level.FAILURE, "not over")
    (over,) = cost_notices("demo", [bill()], now=401.0)
    (begun,) = begun_notices("demo", [open_bill.event])
    assert len({late.key, over.key, begun.key}) == 3


@pytest.mark.parametrize("action", ["STOP", "PAGE"])
def test_what_ends_the_run_or_calls_people_is_told_once_and_asks_for_somebody(action):
    told = bill(action, restart_s=0.0)
    (found,) = begun_notices("demo", [told.event])
    assert found.level is Level.FAILURE
    assert cost_notices("demo", [told], now=1e6) == []


def test_a_restart_that_somebody_should_look_at_asks_for_somebody():
    (found,) = begun_notices("demo", [bill(calls_people=True).event])
    assert found.level is Level.FAILURE


def test_nobody_is_told_of_what_is_only_observed_or_benign():
    quiet = [bill("OBSERVE"), bill(failure_class="benign")]
    assert begun_notices("demo", [one.event for one in quiet]) == []
    assert cost_notices("demo", quiet, now=1000.0) == []


def test_other_events_are_no_incidents():
    assert begun_notices("demo", [Event(at=1.0, kind="restored", writer="rank-00000")]) == []


@pytest.mark.parametrize(
    ("status", "level"), [("FINISHED", "success"), ("FAILED", "failure"), ("STOPPED", "info")]
)
def test_the_end_says_status_step_and_error(status, level):
    found = end_notice("demo", status, "Traceback" + "x" * 5000, 40)
    assert (found.title, found.level) == (f"demo: {status}", level)
    assert found.body.startswith(f"status   {status}\nstep     40\nerror\nTraceback")
    assert len(found.body) < 1600
    assert "error" not in end_notice("demo", status, "", 40).body


def test_two_incidents_of_one_moment_are_two_messages():
    found = begun_notices("demo", [bill().event, bill(failure_class="network").event])
    assert len({one.key for one in found}) == 2


def test_dead_slow_refusing_and_misspelt_targets_hold_nobody_and_the_good_one_is_told(capfd, caplog):
    with (
        target() as (good, got),
        target(answer_after_s=30) as (slow, _),
        target(status=500) as (bad, refused),
    ):
        urls = [
            f"json://127.0.0.1:{dead_port()}/",
            f"json://127.0.0.1:{slow}/",
            f"json://u:s3cret@127.0.0.1:{bad}/",
            "nonsense://s3cret-token/",
            "",
            f"json://127.0.0.1:{good}/",
        ]
        began = time.monotonic()
        notifier = Notifier(urls, QUICK)
        notifier.send(notice(number) for number in range(5))
        assert time.monotonic() - began < 5  # the slow target alone takes 30 s to answer
        until(lambda: len(got) == 5)
        until(lambda: len(refused) >= QUICK.tries)
        began = time.monotonic()
        lines = notifier.close(timeout_s=1.0)
        assert time.monotonic() - began < 2.0
    assert len(lines) == 5
    assert all("5 of 5 messages did not reach it" in line for line in lines)
    assert sum("no URL that Apprise knows" in line for line in lines) == 2
    assert lines[3].startswith("notifications, target 4 (nonsense): ")
    shown = capfd.readouterr()
    assert "s3cret" not in " ".join([*lines, shown.out, shown.err, caplog.text])


def test_a_target_that_comes_back_is_told_by_a_later_try():
    port = dead_port()
    notifier = Notifier(
        [f"json://127.0.0.1:{port}/"], NotifyLimits(request_s=0.5, tries=200, retry_after_s=0.05)
    )
    notifier.send([notice()])
    time.sleep(0.3)
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        until(lambda: got)
        assert notifier.close() == []
        server.shutdown()
        thread.join()
    assert len(got) == 1


def test_a_flood_is_held_back_and_counted():
    with target() as (port, got):
        notifier = Notifier([f"json://127.0.0.1:{port}/"], NotifyLimits(per_hour=3))
        notifier.send(notice(number) for number in range(10))
        until(lambda: len(got) == 3)
        (line,) = notifier.close()
    assert [message["title"] for message in got] == ["title 0", "title 1", "title 2"]
    assert line == "notifications, target 1 (json): 7 were held back by the limit of 3 an hour"


def test_what_asks_for_somebody_is_not_held_back_by_a_flood_of_the_rest():
    with target() as (port, got):
        notifier = Notifier([f"json://127.0.0.1:{port}/"], NotifyLimits(per_hour=3))
        notifier.send(notice(number) for number in range(5))
        notifier.send([notice(5, Level.FAILURE)])
        until(lambda: len(got) == 4)
        notifier.close()
    assert got[-1]["title"] == "title 5"
    assert "2 earlier messages were held back" in got[-1]["message"]


def test_the_limit_is_of_each_hour():
    sent = [0.0, 10.0, 20.0]
    assert not may_send(sent, 3599.0, 3)
    assert may_send(sent, 3600.0, 3)
    assert may_send([], 0.0, 1)


def test_no_targets_are_no_work():
    notifier = Notifier([])
    notifier.send([notice()])
    assert notifier.close(0.0) == []
