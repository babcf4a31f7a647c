"""The driver's thread that tells people of a run: it reads the run folder, so training never waits.

    start()          looks for the targets' URLs in the environment; without any there is nothing to do
    every second     new incidents -> a message each; those under way: are they over, or do they take too long
    close(status)    the message of the end, then what still waits to be sent, within a limit

Neither a target nor a ledger that cannot be written holds or ends anything: the end is told by the driver's
own word. What the messages say is in ops/notify.py.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ops.ledger import Event, LedgerTail
from ops.notify import Notifier, NotifyLimits, awaits_cost, begun_notices, cost_notices, end_notice
from service.run_follower import RunFollower
from service.run_store import last_step

CLOSE_LIMIT_S = 5.0
"""How long the end of a run may wait for the targets, all of them together."""


class NoticeFeed:
    """Tells of one run. No method raises, none blocks beyond its limit."""

    def __init__(
        self,
        run_dir: Path,
        variables: Sequence[str],
        follower: RunFollower,
        say: Callable[[str], None],
        *,
        n_ranks: int = 0,
        interval_s: float = 1.0,
        limits: NotifyLimits | None = None,
    ) -> None:
        """Skips what the ledger holds already: it was told when it happened.

        Args:
            run_dir: the run's folder.
            variables: tracking.notify, each `${NAME}`.
            follower: of the run.
            say: shows one line to the user; called from the thread, never with a URL.
            n_ranks: ranks of the run, for its cost in rank-hours.
            interval_s: pause between two looks.
            limits: of each target.
        """
        self._dir = run_dir
        self._variables = variables
        self._follower = follower
        self._say = say
        self._n_ranks = n_ranks
        self._interval_s = interval_s
        self._limits = limits
        self._ledger = LedgerTail(run_dir)
        while self._ledger.read():
            pass
        self._open: list[Event] = []
        """Incidents whose cost is still to be told."""
        self._is_over = threading.Event()
        self._is_broken = False
        self._notifier: Notifier | None = None
        self._thread = threading.Thread(target=self._run, name="notice-feed", daemon=True)

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the thread where a target has a URL; a variable that is not set costs a line."""
        urls = []
        for variable in self._variables:
            name = variable.removeprefix("${").removesuffix("}")
            if environment.get(name):
                urls.append(environment[name])
            else:
                self._say(
                    f"warning: tracking.notify: {name} is not set where the driver runs: nobody is told by it"
                )
        if urls:
            self._notifier = Notifier(urls, self._limits)
            self._thread.start()

    def close(self, status: str, error: str = "", timeout_s: float = CLOSE_LIMIT_S) -> None:
        """Tell the end and send what waits, for about timeout_s; a line for each target that missed any.

        Args:
            status: final status of the run.
            error: why it failed; empty where it did not.
            timeout_s: limit of the whole.
        """
        if self._notifier is None:
            return
        self._is_over.set()
        self._thread.join(timeout_s / 2)
        step = 0
        if not self._thread.is_alive():  # the notifier takes notices from one thread at a time
            with contextlib.suppress(OSError):
                step = last_step(self._dir)
            self._notifier.send([end_notice(self._dir.name, status, error, step)])
        for line in self._notifier.close(timeout_s):
            self._say(line)

    def _run(self) -> None:
        while not self._is_over.wait(self._interval_s):
            self._look()
        self._look()

    def _look(self) -> None:
        """One look; a fault of ours is said once, and the next look tries again."""
        try:
            self._tell()
        except Exception as error:  # whatever it is, it must not reach training
            if not self._is_broken:
                self._is_broken = True
                self._say(f"notifications: {type(error).__name__}: {error}")

    def _tell(self) -> None:
        run_id = self._dir.name
        new = [event for event in self._ledger.read() if event.kind == "incident"]
        self._open += [event for event in new if awaits_cost(event)]
        if self._notifier is None:
            return
        self._notifier.send(begun_notices(run_id, new))
        if not self._open:
            return
        now = time.time()
        mine = {_identity(event) for event in self._open}
        bills = [bill for bill in self._follower.accounted(now).bills if _identity(bill.event) in mine]
        self._notifier.send(cost_notices(run_id, bills, now, n_ranks=self._n_ranks))
        over = {_identity(bill.event) for bill in bills if bill.restart_s > 0}
        self._open = [event for event in self._open if _identity(event) not in over]


def _identity(event: Event) -> tuple[float, str, str, str]:
    return event.at, event.writer, event.text("class"), event.text("culprit")
