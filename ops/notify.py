"""Messages to people about incidents, through Apprise: mail, chat, pagers, webhooks; one message an incident.

A target that is slow, dead or misspelt never matters to a run: each has a thread and a short queue of its
own, send() only puts into queues, and close() waits for a limited time. What could not be told is counted and
said in one line. URLs hold tokens in every part, so only their scheme is ever shown. Decides about no
incident (policy.py) and watches nothing (alerts/packtrain.yaml is for what only Prometheus sees).
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ops.losses import IncidentBill, does_restart

QUIET_ACTIONS = frozenset({"OBSERVE", "NONE"})
"""Actions that nobody is told of: the ledger has them."""
PATIENCE_S = 300.0
"""An incident that costs so long is told before its bill is known."""
EVIDENCE_CHARS = 600


@dataclass(frozen=True)
class Notice:
    """One message."""

    key: str
    """What it is about: each is sent once."""
    title: str
    body: str
    is_urgent: bool
    """Somebody has to do something."""


@dataclass(frozen=True)
class NotifyLimits:
    """What one target may take."""

    per_hour: int = 20
    """Messages; those beyond are counted and mentioned in the next one that goes out."""
    request_s: float = 10.0
    """Limit of connecting, and of waiting for each part of the answer."""
    tries: int = 3
    retry_after_s: float = 15.0
    n_waiting: int = 50
    """Messages that wait for a slow target; those beyond are lost and counted."""


def incident_notices(
    run_id: str,
    bills: Iterable[IncidentBill],
    now: float,
    *,
    n_ranks: int = 0,
    since: float = 0.0,
    patience_s: float = PATIENCE_S,
) -> list[Notice]:
    """The messages about those incidents whose cost is known, or that have cost more than `patience_s`. Pure.

    Asked again it gives the same ones again: their keys tell the sender which are new.

    Args:
        run_id: the run.
        bills: of its incidents.
        now: Unix seconds.
        n_ranks: ranks that stood still; 0 leaves rank-hours out.
        since: incidents noticed before (Unix seconds) are left out.
        patience_s: seconds after the notice when the message goes out in any case.
    """
    notices = []
    for bill in bills:
        event = bill.event
        action, detected = event.text("action").upper(), event.seconds("detected_at", event.at)
        if detected < since or action in QUIET_ACTIONS or event.text("class") == "benign":
            continue
        is_over = action == "STOP" or not does_restart(event) or bill.restart_s > 0
        if is_over or now - detected >= patience_s:
            notices.append(_notice(run_id, bill, n_ranks, is_over=is_over))
    return notices


class Notifier:
    """Sends notices to targets. Never blocks for longer than it says and never raises."""

    def __init__(self, urls: Sequence[str], limits: NotifyLimits | None = None) -> None:
        """Start a thread for each target; nothing is loaded or contacted here.

        Args:
            urls: Apprise's URLs (mailto://, slack://, json://, ...).
            limits: of each target.
        """
        self._known: set[str] = set()
        kept = limits or NotifyLimits()
        self._targets = [_Target(url, kept, number) for number, url in enumerate(urls, start=1)]

    def send(self, notices: Iterable[Notice]) -> None:
        """Queue those notices whose keys are new. Call from one thread."""
        for notice in notices:
            if notice.key not in self._known:
                self._known.add(notice.key)
                for target in self._targets:
                    target.put(notice)

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """Send what waits, for `timeout_s` at most over all targets.

        Returns:
            A line for each target that was not told everything.
        """
        deadline = time.monotonic() + timeout_s
        for target in self._targets:
            target.finish()
        for target in self._targets:
            target.join(max(0.0, deadline - time.monotonic()))
        return [line for target in self._targets if (line := target.complaint())]


class _Target:
    """One URL with its thread, its queue and what became of its messages."""

    def __init__(self, url: str, limits: NotifyLimits, number: int) -> None:
        self._url = url
        scheme = url.partition("://")[0] if "://" in url else "no URL"
        self._name = f"target {number} ({scheme})"
        self._limits = limits
        self._queue: queue.Queue[Notice | None] = queue.Queue(limits.n_waiting)
        self._is_closing = threading.Event()
        self._sent_at: deque[float] = deque(maxlen=max(1, limits.per_hour))
        self._n_given = 0
        self._n_told = 0
        self._n_held_back = 0
        self._last_error = "no answer yet"
        self._thread = threading.Thread(target=self._run, name=f"notify-{number}", daemon=True)
        self._thread.start()

    def put(self, notice: Notice) -> None:
        self._n_given += 1
        with contextlib.suppress(queue.Full):  # it is counted by what was told in the end
            self._queue.put_nowait(notice)

    def finish(self) -> None:
        """Let the thread end once the queue is empty; retries are given up."""
        self._is_closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def complaint(self) -> str:
        """One line where not everything was told; empty where it was."""
        n_held_back, limit = self._n_held_back, self._limits.per_hour
        n_lost = self._n_given - self._n_told - n_held_back
        parts = []
        if n_lost:
            parts.append(f"{n_lost} of {self._n_given} messages did not reach it ({self._last_error})")
        if n_held_back:
            parts.append(f"{n_held_back} were held back by the limit of {limit} an hour")
        return f"notifications, {self._name}: {', '.join(parts)}" if parts else ""

    def _run(self) -> None:
        try:
            deliver = _delivery(self._url, self._limits.request_s)
        except Exception as error:  # whatever a plug-in does while it loads
            self._last_error = f"Apprise fails to load it: {type(error).__name__}"
            return
        if deliver is None:
            self._last_error = "it is no URL that Apprise knows; see its list of services"
            return
        while True:
            try:
                notice = self._queue.get(timeout=1.0)
            except queue.Empty:
                if self._is_closing.is_set():
                    return
                continue
            if notice is None:
                return
            self._handle(deliver, notice)

    def _handle(self, deliver: "Callable[[Notice], bool]", notice: Notice) -> None:
        if not may_send(self._sent_at, time.monotonic(), self._limits.per_hour):
            self._n_held_back += 1
            return
        self._sent_at.append(time.monotonic())
        if self._n_held_back:
            limit = f"more than {self._limits.per_hour} an hour"
            held = f"{self._n_held_back} earlier messages were held back: {limit}"
            notice = replace(notice, body=f"{notice.body}\n{held}")
        for left in reversed(range(self._limits.tries)):
            try:
                if deliver(notice):
                    self._n_told += 1
                    return
                self._last_error = "it refused, or did not answer in time"
            except Exception as error:  # a plug-in's own
                self._last_error = f"its plug-in raised {type(error).__name__}"
            if left == 0 or self._is_closing.wait(self._limits.retry_after_s):
                return


def may_send(sent_at: Sequence[float], now: float, per_hour: int) -> bool:
    """Whether fewer than `per_hour` were sent within the hour before `now` (seconds of one clock). Pure."""
    return sum(now - at < 3600.0 for at in sent_at) < per_hour


def _delivery(url: str, request_s: float) -> "Callable[[Notice], bool] | None":
    """A function that sends to a URL and says whether it arrived; None for what Apprise does not know."""
    import apprise  # loading its plug-ins takes a second: in the target's thread, and only where there is one

    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # it logs URLs with all that is in them
    target = apprise.Apprise.instantiate(url)
    if target is None:
        return None
    target.socket_connect_timeout = request_s
    target.socket_read_timeout = request_s

    def deliver(notice: Notice) -> bool:
        kind = apprise.NotifyType.FAILURE if notice.is_urgent else apprise.NotifyType.WARNING
        return bool(target.notify(body=notice.body, title=notice.title, notify_type=kind))

    return deliver


def _notice(run_id: str, bill: IncidentBill, n_ranks: int, *, is_over: bool) -> Notice:
    event = bill.event
    action, failure_class = event.text("action"), event.text("class", "unknown")
    culprit = event.text("culprit", "unknown")
    detected = event.seconds("detected_at", event.at)
    reason = event.text("reason")
    evidence = event.text("evidence").strip()
    lines = [
        f"class    {failure_class}",
        f"culprit  {culprit}",
        f"action   {action}{': ' + reason if reason else ''}",
        f"step     {event.integer('step')}",
        f"cost     {cost_words(bill, n_ranks, is_over=is_over)}",
        f"runbook  ops/runbooks/{failure_class}.md",
    ]
    if evidence:
        cut = "..." if len(evidence) > EVIDENCE_CHARS else ""
        lines.append(f"evidence\n{cut}{evidence[-EVIDENCE_CHARS:]}")
    return Notice(
        key=f"{run_id}/{event.integer('attempt')}.{event.integer('generation')}/{failure_class}/{detected:.3f}",
        title=f"{run_id}: {failure_class}, {culprit}, {action}",
        body="\n".join(lines),
        is_urgent=action.upper() in ("STOP", "PAGE") or not is_over,
    )


def cost_words(bill: IncidentBill, n_ranks: int, *, is_over: bool) -> str:
    """The bill of an incident in one line. Pure."""
    parts = {
        "detect": bill.detect_s,
        "decide": bill.decide_s,
        "restart": bill.relaunch_s,
        "reload": bill.reload_s,
        "recompute": bill.redo_s,
    }
    told = ", ".join(f"{name} {part_s:.1f} s" for name, part_s in parts.items() if part_s >= 0.05)
    words = f"{bill.total_s:.1f} s"
    words += f" ({told})" if told else ""
    words += f", {bill.lost_steps} steps to be trained again" if bill.lost_steps else ""
    if n_ranks:
        words += f"; {bill.total_s * n_ranks / 3600:.2f} rank-hours"
    return words if is_over else f"{words} so far: it does not train again yet"
