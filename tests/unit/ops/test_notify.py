import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ops.ledger import Event
from ops.losses import IncidentBill
from ops.notify import Notice, Notifier, NotifyLimits, incident_notices, may_send

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


@contextlib.contextmanager
def target(answer_after_s=0.0, status=200):
    """A real HTTP server on loopback; gives its port and the messages that it got."""
    got, is_over = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            is_over.wait(answer_after_s)
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.end_headers()

        def log_message(self, *_args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_port, got
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def dead_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def notice(number=0):
    return Notice(f"key-{number}", f"title {number}", "body", is_urgent=True)


def until(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_message_an_incident_with_class_culprit_action_and_cost():
    with target() as (port, got):
        notifier = Notifier([f"json://user:s3cret@127.0.0.1:{port}/hook"], QUICK)
        for _ in range(3):  # the driver looks again and again
            notifier.send(incident_notices("demo", [bill()], now=103.0, n_ranks=64))
        until(lambda: got)
        assert notifier.close() == []
    (message,) = got
    assert message["title"] == "demo: hang, rank 3 (node 10.0.0.3), RESTART_RANKS"
    assert message["type"] == "warning"
    lines = message["message"].splitlines()
    assert lines[:6] == [
        "class    hang",
        "culprit  rank 3 (node 10.0.0.3)",
        "action   RESTART_RANKS: restart 1 of 10",
        "step     40",
        "cost     7.5 s (detect 1.0 s, decide 0.2 s, restart 1.8 s, reload 0.5 s, recompute 4.0 s), "
        "4 steps to be trained again; 0.13 rank-hours",
        "runbook  ops/runbooks/hang.md",
    ]
    assert message["message"].endswith("the last line")
    assert len(message["message"]) < 1200


def test_a_message_waits_for_its_cost_but_not_for_ever():
    open_bill = bill(restart_s=0.0)
    assert incident_notices("demo", [open_bill], now=150.0) == []
    (late,) = incident_notices("demo", [open_bill], now=400.0)
    assert "so far: it does not train again yet" in late.body
    assert late.is_urgent
    (over,) = incident_notices("demo", [bill()], now=101.0)
    assert over.key == late.key


@pytest.mark.parametrize("action", ["STOP", "PAGE"])
def test_what_ends_the_run_or_calls_people_is_told_at_once(action):
    (found,) = incident_notices("demo", [bill(action, restart_s=0.0)], now=100.0)
    assert found.is_urgent


def test_nobody_is_told_of_what_is_only_observed_benign_or_old():
    quiet = [bill("OBSERVE"), bill(failure_class="benign"), bill(detected_at=50.0)]
    assert incident_notices("demo", quiet, now=1000.0, since=60.0) == []


def test_two_incidents_of_one_moment_are_two_messages():
    found = incident_notices("demo", [bill(), bill(failure_class="network")], now=101.0)
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


def test_the_limit_is_of_each_hour():
    sent = [0.0, 10.0, 20.0]
    assert not may_send(sent, 3599.0, 3)
    assert may_send(sent, 3600.0, 3)
    assert may_send([], 0.0, 1)


def test_no_targets_are_no_work():
    notifier = Notifier([])
    notifier.send([notice()])
    assert notifier.close(0.0) == []
