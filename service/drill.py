"""Failures on purpose: SIGKILL at a chosen moment, said aloud and written to the ledger before it is done."""

import contextlib
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from service.run_store import last_step

if TYPE_CHECKING:
    from service.supervisor import Supervisor

Target = Literal["rank_pid", "shell_pid"]


class KillAtStep:
    """Kills one process of the run, once, at a step. Only processes of this host can be hit."""

    def __init__(self, target: Target, step: int, say: Callable[[str], None]) -> None:
        """Nothing happens yet.

        Args:
            target: "rank_pid", the process that trains, or "shell_pid", the Ray worker that holds it.
            step: completed steps at which to strike.
            say: shows one line to the user.
        """
        self._target: Target = target
        self._step = step
        self._say = say
        self._is_done = False

    def poll(self, supervisor: "Supervisor") -> None:
        """Strike when it is time."""
        if self._is_done or last_step(supervisor.run_dir) < self._step:
            return
        processes = supervisor.processes()
        if not processes:
            return
        rank = max(processes)
        pid = processes[rank][self._target]
        if pid is None:
            return
        self._is_done = True
        what = "the process of" if self._target == "rank_pid" else "the Ray worker that holds"
        self._say(f"drill: kill -9 {pid} ({what} rank {rank}) at step {last_step(supervisor.run_dir)}")
        supervisor.note("drill", fault="sigkill", target=self._target, rank=rank, pid=pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
