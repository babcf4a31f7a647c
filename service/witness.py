"""What the shell of a hung rank can tell before the rank is killed: process state and stacks, in a file.

By py-spy, of every thread, with C frames where that works in time. A rank that is stopped by a signal, or
holds the interpreter's lock, cannot tell anything of itself; py-spy reads its memory from outside. Judges
nothing.
"""

import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

STOPPED = "T"
"""State of a process that a signal has stopped."""
NATIVE_LIMIT_S = 2.5
PLAIN_LIMIT_S = 1.5
DUMP_LIMIT_S = 2.0
"""For a rank to write its flight recorder; one that cannot is told by the missing file."""
EXCERPT_BYTES = 3000


@dataclass(frozen=True)
class Testimony:
    """What was found of one rank."""

    rank: int
    state: str
    """First letter of the process's state in /proc: R, S, D, T, Z; empty where it is gone."""
    stacks: str
    """Beginning of what py-spy printed, or why there is nothing."""
    has_dump: bool
    """The rank wrote its flight recorder."""


def stacks_path(folder: Path, rank: int) -> Path:
    """Where the stacks of a rank lie in the folder of an incident."""
    return folder / f"rank-{rank:05d}.stacks.txt"


def dump_path(folder: Path, rank: int) -> Path:
    """The same for its flight recorder."""
    return folder / f"flight-{rank:05d}.pickle"


def groups_path(folder: Path, rank: int) -> Path:
    """The same for the members of its process groups: gloo's flight recorder does not know them."""
    return folder / f"groups-{rank:05d}.json"


def take_testimony(rank: int, pid: int | None, folder: Path) -> Testimony:
    """Take a rank's stacks, and wait for its flight recorder, which it was asked for already.

    Returns within NATIVE_LIMIT_S + PLAIN_LIMIT_S + DUMP_LIMIT_S.

    Args:
        rank: whose.
        pid: of its process; None where it has none.
        folder: of the incident.
    """
    asked_at_mono_s = time.monotonic()
    state = process_state(pid) if pid is not None else ""
    stacks = take_stacks(pid, state) if pid is not None and state else "the process is gone"
    with contextlib.suppress(OSError):  # a full disk does not keep what was read from the verdict
        folder.mkdir(parents=True, exist_ok=True)
        stacks_path(folder, rank).write_text(f"rank {rank}, process {pid}, state {state}\n{stacks}\n")
    dump = dump_path(folder, rank)
    while not dump.exists() and time.monotonic() - asked_at_mono_s < DUMP_LIMIT_S and state != STOPPED:
        time.sleep(0.05)
    return Testimony(rank, state, stacks[:EXCERPT_BYTES], dump.exists())


def process_state(pid: int) -> str:
    """State letter of a process; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def take_stacks(pid: int, state: str) -> str:
    """What py-spy prints of a process, or what kept it from that."""
    attempts = (("--native",), NATIVE_LIMIT_S), (("--nonblocking",), PLAIN_LIMIT_S)
    told = ""
    # It stops the process for C frames, which one that is stopped already does not survive undisturbed.
    for flags, limit_s in attempts[state == STOPPED :]:
        try:
            done = subprocess.run(
                [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(pid), *flags],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            told = f"py-spy {' '.join(flags)} did not answer within {limit_s:g} s"
        except OSError as error:
            return f"py-spy cannot be run: {error}"
        else:
            if done.returncode == 0:
                return done.stdout
            told = f"py-spy {' '.join(flags)}: {done.stderr.strip()}"
    return told
