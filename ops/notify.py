"""Messages to people about a run, through Apprise: mail, chat, pagers, webhooks.

    an incident     at once: class, culprit, action, evidence
                    after patience_s: it does not train again yet
                    when it is over: what it cost
    the end         its status, and the error of a failed run

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
from enum import StrEnum

from ops.ledger import Event
from ops.losses import IncidentBill, does_restart

QUIET_ACTIONS = frozenset({"OBSERVE", "NONE"})
"""Actions that nobody is told of: the ledger has them."""
URGENT_ACTIONS = frozenset({"STOP", "PAGE"})
PATIENCE_S = 300.0
"""An incident that costs so long is told of once more, before its bill is known."""
EVIDENCE_CHARS = 600
ERROR_CHARS = 1500


class Level(StrEnum):
    """How much a message asks of who reads it; the words are Apprise's."""

    INFO = "info"
    SUCCESS = "success"
    WARNING = "warning"
    """Something failed and is being dealt with."""
    FAILURE = "failure"
    """Somebody has to do something."""


@dataclass(frozen=True)
class Notice:
    """One message."""

    key: str
    """What it is about: each is sent once."""
    title: str
    body: str
    level: Level


@dataclass(frozen=True)
class NotifyLimits:
    """What one target may take."""

    per_hour: int = 20
    """Messages; those beyond are counted and mentioned in the next one that goes out. Twice as many where
    somebody has to do something: other messages must not use up their place."""
    request_s: float = 10.0
    """Limit of connecting, and of waiting for each part of the answer."""
    tries: int = 3
    retry_after_s: float = 15.0
    n_waiting: int = 50
    """Messages that wait for a slow target; those beyond are lost and counted."""


def begun_notices(run_id: str, events: Iterable[Event]) -> list[Notice]:
    """The messages that these incidents have happened, whatever they will cost. Pure.

    Args:
        run_id: the run.
        events: of the ledger; all but incidents are passed over, and those that nobody is told of.
    """
    notices = []
    for event in events:
        if event.kind == "incident" and is_told(event):
            needs_people = event.text("action").upper() in URGENT_ACTIONS or bool(
                event.fields.get("calls_people")
            )
            level = Level.FAILURE if needs_people else Level.WARNING
            notices.append(Notice(f"{_key(run_id, event)}/begun", _title(run_id, event), _body(event), level))
    return notices


def cost_notices(
    run_id: str,
    bills: Iterable[IncidentBill],
    now: float,
    *,
    n_ranks: int = 0,
    patience_s: float = PATIENCE_S,
) -> list[Notice]:
    """The messages that incidents are over, or have cost more than `patience_s` and are not. Pure.

    Asked again it gives the same ones again: their keys tell the sender which are new. Incidents that take no
    ranks down, and those that end the run, are told of once, when they begin.

    Args:
        run_id: the run.
        bills: of its incidents.
        now: Unix seconds.
        n_ranks: ranks that stood still; 0 leaves rank-hours out.
        patience_s: seconds after the notice when the second kind goes out.
    """
    notices = []
    for bill in bills:
        event = bill.event
        if not awaits_cost(event):
            continue
        is_over = bill.restart_s > 0
        if not is_over and now - event.seconds("detected_at", event.at) < patience_s:
            continue
        key, cost = _key(run_id, event), cost_words(bill, n_ranks, is_over=is_over)
        title = f"{_title(run_id, event)}: {'over' if is_over else 'not over'}"
        body = f"{_body(event, with_evidence=False)}\ncost     {cost}"
        level = Level.SUCCESS if is_over else Level.FAILURE
        notices.append(Notice(f"{key}/{'over' if is_over else 'late'}", title, body, level))
    return notices


def end_notice(run_id: str, status: str, error: str, step: int) -> Notice:
    """The message that a run has ended. Pure."""
    lines = [f"status   {status}", f"step     {step}"]
    if error.strip():
        kept = error.strip()[:ERROR_CHARS]
        lines.append(f"error\n{kept}{'...' if len(error.strip()) > len(kept) else ''}")
    level = {"FINISHED": Level.SUCCESS, "FAILED": Level.FAILURE}.get(status, Level.INFO)
    return Notice(f"{run_id}/end", f"{run_id}: {status}", "\n".join(lines), level)


def awaits_cost(event: Event) -> bool:
    """Whether people are told of an incident a second time, when it is over. Pure."""
    return is_told(event) and does_restart(event) and event.text("action").upper() != "STOP"


def is_told(event: Event) -> bool:
    """Whether people hear of an incident at all. Pure."""
    return event.text("action").upper() not in QUIET_ACTIONS and event.text("class") != "benign"


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
        self._sent_at: deque[float] = deque(maxlen=max(1, 2 * limits.per_hour))
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
        per_hour = self._limits.per_hour * (2 if notice.level is Level.FAILURE else 1)
        if not may_send(self._sent_at, time.monotonic(), per_hour):
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
        kind = apprise.NotifyType(notice.level.value)
        return bool(target.notify(body=notice.body, title=notice.title, notify_type=kind))

    return deliver


def _key(run_id: str, event: Event) -> str:
    ranks = f"{event.integer('attempt')}.{event.integer('generation')}"
    detected = event.seconds("detected_at", event.at)
    return f"{run_id}/{ranks}/{event.text('class', 'unknown')}/{detected:.3f}"


def _title(run_id: str, event: Event) -> str:
    words = (event.text("class", "unknown"), event.text("culprit", "unknown"), event.text("action"))
    return f"{run_id}: {', '.join(words)}"


def _body(event: Event, *, with_evidence: bool = True) -> str:
    failure_class, reason = event.text("class", "unknown"), event.text("reason")
    lines = [
        f"class    {failure_class}",
        f"culprit  {event.text('culprit', 'unknown')}",
        f"action   {event.text('action')}{': ' + reason if reason else ''}",
        f"step     {event.integer('step')}",
        f"runbook  ops/runbooks/{failure_class}.md",
    ]
    evidence = event.text("evidence").strip()
    if evidence and with_evidence:
        cut = "..." if len(evidence) > EVIDENCE_CHARS else ""
        lines.append(f"evidence\n{cut}{evidence[-EVIDENCE_CHARS:]}")
    return "\n".join(lines)


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
