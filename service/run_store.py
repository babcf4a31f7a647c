"""The folder of a run: where everything of it lies, its state file, and how to find runs. Starts nothing.

<storage>/<run id>/  spec.json  run.json  control/  ledger/  metrics.jsonl  logs/  checkpoints/  attempts/
report.html  loss.png
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from jobs.errors import SpecError
from jobs.spec.job import JobSpec
from jobs.spec.load import resolved_json, spec_from_json
from jobs.spec.yaml_tree import read_text
from ops.durable import write_atomically

LEASE_S = 60.0
"""A driver on another host that has not touched its lease for so long counts as dead."""
RUNNING, FINISHED, FAILED, STOPPED, PREEMPTED = "RUNNING", "FINISHED", "FAILED", "STOPPED", "PREEMPTED"


@dataclass(frozen=True)
class RunState:
    """What run.json says: the last known state of a run and who drives it."""

    run_id: str
    status: str
    created_at: float
    """Wall clock, unix seconds."""
    data_dir: str = ""
    """Folder of the prepared data."""
    data_fingerprint: str = ""
    """Hash of the prepared data: a resume must find the same."""
    attempts: int = 0
    """Attempts begun so far."""
    mlflow_run_id: str | None = None
    driver_pid: int = 0
    driver_host: str = ""
    driver_started_at: float = 0.0
    """Start time of the driver process, which tells it from a later process with its pid."""
    error: str = ""

    def is_driver_alive(self, run_dir: Path) -> bool:
        """The driver still runs: its process here, or a young lease where it is on another host."""
        if self.driver_host != socket.gethostname():
            lease = run_dir / "control" / "driver_alive"
            return lease.exists() and time.time() - lease.stat().st_mtime < LEASE_S
        try:
            driver = psutil.Process(self.driver_pid)
            is_same = abs(driver.create_time() - self.driver_started_at) < 1.0
            return is_same and driver.status() != psutil.STATUS_ZOMBIE  # killed, and its parent does not reap
        except psutil.NoSuchProcess:
            return False

    def current_status(self, run_dir: Path) -> str:
        """The status, with a run whose driver died told from one that runs: it counts as FAILED."""
        return FAILED if self.status == RUNNING and not self.is_driver_alive(run_dir) else self.status

    def driven_by_me(self) -> "RunState":
        """The same, with this process as its driver."""
        me = psutil.Process()
        return replace(
            self,
            driver_pid=me.pid,
            driver_host=socket.gethostname(),
            driver_started_at=me.create_time(),
            error="",
        )


def new_run_id(spec: JobSpec, spec_path: Path) -> str:
    """The spec's own name, or one made from the file's name and the time."""
    if spec.run.name:
        return spec.run.name
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", spec_path.stem).strip("-.") or "run"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid() % 1000:03d}"


def create_run(spec: JobSpec, run_dir: Path) -> RunState:
    """Make the folder of a new run, with its resolved spec, its state and a first lease.

    The folder is made beside its place and renamed: killed at any moment, this leaves a whole run or a free
    name.

    Raises:
        SpecError: the name is in use, be it by an empty folder.
    """
    in_use = SpecError(
        f"run name in use: {run_dir} exists; choose another run.name, or go on with it: "
        f"packtrain resume {run_dir.name}"
    )
    if os.path.lexists(run_dir):  # rename would put the run in the place of an empty folder
        raise in_use
    making = run_dir.with_name(f".{run_dir.name}.tmp-{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)  # of a process that had this pid and was killed
    try:
        for name in ("control", "ledger", "logs", "checkpoints"):
            (making / name).mkdir(parents=True)
        _lock_file(making).touch()
        touch_lease(making)
        write_atomically(making / "spec.json", resolved_json(spec))
        state = RunState(run_dir.name, RUNNING, time.time()).driven_by_me()
        write_state(making, state)
        try:
            making.rename(run_dir)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise in_use from None
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)  # renamed, it is not there any more
    return state


def read_spec(run_dir: Path, attempt: int | None = None) -> JobSpec:
    """The resolved spec: the truth of the run.

    Args:
        run_dir: folder of the run.
        attempt: one that has a smaller layout gives the spec that it runs with.

    Raises:
        SpecError: it is missing or damaged.
    """
    file = run_dir / "spec.json"
    if attempt is not None and (own := _attempt_spec(run_dir, attempt)).exists():
        file = own
    return spec_from_json(read_text(file), str(file))


def write_attempt_spec(run_dir: Path, attempt: int, spec: JobSpec) -> None:
    """Keep what an attempt runs with that has another layout than the run."""
    file = _attempt_spec(run_dir, attempt)
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, resolved_json(spec))


def _attempt_spec(run_dir: Path, attempt: int) -> Path:
    return run_dir / "attempts" / f"attempt-{attempt:03d}.json"


def read_state(run_dir: Path) -> RunState:
    """The state file.

    Raises:
        SpecError: there is no such run, or its state file is damaged.
    """
    file = run_dir / "run.json"
    try:
        return RunState(**json.loads(file.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        known = sorted(r.name for r in iter_runs(run_dir.parent))
        raise SpecError(
            f"no run {run_dir.name!r} in {run_dir.parent}; there: {', '.join(known) or 'none'}"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise SpecError(f"{file} is not the state of a run that this version can read: {error}") from error


def write_state(run_dir: Path, state: RunState) -> None:
    """Replace the state file; a reader sees the old or the new one, never half of one."""
    write_atomically(run_dir / "run.json", json.dumps(asdict(state), indent=2))


def iter_runs(storage: Path) -> Iterator[Path]:
    """Folders of runs below a storage folder, in name order; one that is still being made is none."""
    if storage.is_dir():
        named = (path for path in sorted(storage.iterdir()) if not path.name.startswith("."))
        yield from (path for path in named if (path / "run.json").is_file())


def find_run(run: str, storage: Path) -> Path:
    """Folder of a run given by id, or by path.

    Raises:
        SpecError: no such run.
    """
    as_path = Path(run)
    run_dir = as_path.resolve() if (as_path / "run.json").is_file() else (storage / run).resolve()
    read_state(run_dir)
    return run_dir


def log_path(run_dir: Path, attempt: int, rank: int) -> Path:
    """Where a rank's output goes; generations of one attempt share the file."""
    return run_dir / "logs" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log"


def stop_request(run_dir: Path) -> Path:
    """The file whose presence asks the driver to stop the run."""
    return run_dir / "control" / "stop"


@contextlib.contextmanager
def sole_driver(run_dir: Path, wait_s: float = 60.0) -> Iterator[None]:
    """Be the only driver of a run for the length of a with-block; the kernel frees the place of a dead one.

    A driver whose run has ended may still be closing its books: it is waited for.

    Args:
        run_dir: the run's folder.
        wait_s: limit of the wait.

    Raises:
        SpecError: another process drives the run.
    """
    deadline = time.monotonic() + wait_s
    with _lock_file(run_dir).open("a") as file:
        while True:
            if _is_locked_for_me(file.fileno()):
                break
            refuse_driven(run_dir)
            if time.monotonic() > deadline:
                raise SpecError(
                    f"run {run_dir.name} is held by another process, which has been starting it or closing "
                    f"its books for {wait_s:g} s: a second `packtrain resume`? Look with packtrain status"
                )
            time.sleep(0.1)
        yield


def refuse_driven(run_dir: Path) -> None:
    """Refuse a run whose state names a living driver.

    Raises:
        SpecError: it does.
    """
    state = read_state(run_dir)
    if state.status == RUNNING and state.is_driver_alive(run_dir):
        raise SpecError(
            f"run {run_dir.name} is being driven by process {state.driver_pid} on {state.driver_host}; "
            f"end that first: packtrain stop {run_dir.name}"
        )


def _lock_file(run_dir: Path) -> Path:
    return run_dir / "control" / "driver.lock"


def _is_locked_for_me(handle: int) -> bool:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # a file system without locks: the state and the lease must do
    return True


def touch_lease(run_dir: Path) -> None:
    """Say that the driver lives; other hosts go by the age of this file."""
    with contextlib.suppress(OSError):  # a full disk or a slow file server is no reason to end the run
        (run_dir / "control" / "driver_alive").touch()


def last_step(run_dir: Path) -> int:
    """Step of the last line of metrics.jsonl that is one; 0 before the first."""
    record = _last_step_line(run_dir)
    return int(record["step"]) if record else 0


def next_sample(run_dir: Path) -> int | None:
    """Global ordinal of the sample after those of the last step that was written; None before the first."""
    record = _last_step_line(run_dir)
    return int(record["sample_ordinal"]) if record else None


def last_sign_of_life(run_dir: Path, otherwise: float) -> float:
    """When the last step was written (unix seconds): ranks that vanish leave no later trace."""
    record = _last_step_line(run_dir)
    return float(record["at"]) if record else otherwise


def steps_of_ranks(run_dir: Path, attempt: int, generation: int) -> int:
    """Steps that one set of ranks has completed, counted as far back as the end of metrics.jsonl tells."""
    count = 0
    for record in _step_lines_backwards(run_dir):
        if (record.get("attempt"), record.get("generation")) != (attempt, generation):
            break
        count += 1
    return count


def recent_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Step lines at the end of metrics.jsonl, oldest first: a hundred or more of a long run."""
    return list(_step_lines_backwards(run_dir))[::-1]


def _last_step_line(run_dir: Path) -> dict[str, Any] | None:
    return next(_step_lines_backwards(run_dir), None)


def _step_lines_backwards(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Step lines within the last 64 KiB of metrics.jsonl, the newest first."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "grad_norm" in record:
            yield record
