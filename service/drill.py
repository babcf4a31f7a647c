"""Failures on purpose, each said aloud and written to the ledger before it is done.

    packtrain drill FAULT RUN --> control/drill.json --> supervisor --order--> shell of the rank --> rank

A rank or its shell has its fault wherever it runs. `packtrain run --demo-kill` asks for two of them itself.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.errors import SpecError
from ops.checkpoint.layout import CHECKPOINTS_DIR, folder_name, newest_committed_step
from ops.durable import write_atomically
from service.rank_faults import FAULTS as FAULTS_IN_RANK
from service.run_store import RUNNING, last_step, read_state

if TYPE_CHECKING:
    from service.supervisor import Supervisor

FAULTS_OF_PROCESSES = {
    "kill": "SIGKILL of the process that trains",
    "kill-shell": "SIGKILL of the Ray worker that holds it",
    "stop": "SIGSTOP of the process that trains",
    "corrupt": "one bit of the newest checkpoint, then SIGKILL of the process that trains",
    "xid": "an Xid 79 in the kernel log of its node, then SIGKILL of the process that trains",
}
XID_LINE = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus. (drill)\n"
)


def drill_request(run_dir: Path) -> Path:
    """The file that asks the driver of a run for a fault."""
    return run_dir / "control" / "drill.json"


def request_drill(run_dir: Path, fault: str, rank: int | None) -> None:
    """Ask the driver of a run for a fault.

    Args:
        run_dir: of a run that trains.
        fault: one of FAULTS_OF_PROCESSES or rank_faults.FAULTS.
        rank: who has it; None takes the last rank.

    Raises:
        SpecError: there is no such fault, or nobody drives the run.
    """
    known = (*FAULTS_OF_PROCESSES, *FAULTS_IN_RANK)
    if fault not in known:
        raise SpecError(f"no such fault: {fault!r}; there are {', '.join(known)}")
    status = read_state(run_dir).current_status(run_dir)
    if status != RUNNING:
        raise SpecError(f"run {run_dir.name} is {status}: a drill needs one that trains")
    write_atomically(drill_request(run_dir), json.dumps({"fault": fault, "rank": rank}))


def write_xid(kernel_log: Path) -> None:
    """Pretend that the GPU of a node fell off the bus.

    The kernel's own log is spared: others read it as well, and believe it.

    Args:
        kernel_log: a file; a device is left alone.
    """
    if kernel_log.is_file():
        with kernel_log.open("a") as log:
            log.write(XID_LINE)


def damage_newest(checkpoint_dir: Path) -> None:
    """Flip a bit in the middle of a file of the newest committed checkpoint; without one nothing happens."""
    step = newest_committed_step(checkpoint_dir)
    if step is None:
        return
    shard = min((checkpoint_dir / folder_name(step)).glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


class RequestedDrills:
    """Carries out what `packtrain drill` asks for."""

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        """Nothing was asked for yet.

        Args:
            run_dir: of the run.
            say: shows one line to the user.
        """
        self._file = drill_request(run_dir)
        self._say = say

    def poll(self, supervisor: "Supervisor") -> None:
        """Look whether something is asked for, and do it once the rank runs."""
        if not self._file.exists():
            return
        wanted = json.loads(self._file.read_bytes())
        if strike(supervisor, wanted["fault"], wanted["rank"], self._say):
            self._file.unlink(missing_ok=True)


class KillAtStep:
    """One fault, once, at a step."""

    def __init__(self, fault: str, step: int, say: Callable[[str], None]) -> None:
        """Nothing happens yet.

        Args:
            fault: "kill" or "kill-shell".
            step: completed steps at which to strike.
            say: shows one line to the user.
        """
        self._fault = fault
        self._step = step
        self._say = say
        self._is_done = False

    def poll(self, supervisor: "Supervisor") -> None:
        """Strike when it is time."""
        if not self._is_done and last_step(supervisor.run_dir) >= self._step:
            self._is_done = strike(supervisor, self._fault, None, self._say)


def strike(supervisor: "Supervisor", fault: str, rank: int | None, say: Callable[[str], None]) -> bool:
    """Have a rank fail; False where it does not run just now.

    Args:
        supervisor: of the run.
        fault: what happens.
        rank: to whom; None takes the last rank.
        say: shows one line to the user.
    """
    processes = supervisor.processes()
    if rank is None:
        rank = max(processes, default=-1)
    pid = processes.get(rank, {}).get("shell_pid" if fault == "kill-shell" else "rank_pid")
    if pid is None:
        return False
    what = FAULTS_OF_PROCESSES.get(fault, fault)
    say(f"drill: {what}: rank {rank}, process {pid}, at step {last_step(supervisor.run_dir)}")
    supervisor.note("drill", fault=fault, rank=rank, pid=pid, asked_at=time.time())
    if fault == "corrupt":
        damage_newest(supervisor.run_dir / CHECKPOINTS_DIR)
        fault = "kill"
    supervisor.order_fault(fault, rank)
    return True
