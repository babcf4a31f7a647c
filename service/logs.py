"""What the ranks of a run printed: whole, or followed until the run ends."""

import time
from collections.abc import Callable
from pathlib import Path

from jobs.errors import SpecError
from service.run_store import read_spec, read_state


def print_logs(run_dir: Path, rank: int | None, *, follow: bool, say: Callable[[str], None]) -> None:
    """Print all attempts' lines behind attempt and rank; with `follow`, new ones as they come.

    Raises:
        SpecError: the run has no such rank.
    """
    n_ranks = read_spec(run_dir).world_size
    has_log = any((run_dir / "logs").glob(f"attempt-*/rank-{rank:05d}.log")) if rank is not None else True
    if rank is not None and not has_log and not 0 <= rank < n_ranks:
        raise SpecError(f"--rank {rank}: run {run_dir.name} has ranks 0 to {n_ranks - 1}")
    read_up_to: dict[Path, int] = {}
    while True:
        is_running = read_state(run_dir).current_status(run_dir) == "RUNNING"
        for path in sorted((run_dir / "logs").glob("attempt-*/rank-*.log")):
            if rank is None or path.stem == f"rank-{rank:05d}":
                _print_new_lines(path, read_up_to, say)
        if not follow or not is_running:
            return
        time.sleep(0.3)


def _print_new_lines(path: Path, read_up_to: dict[Path, int], say: Callable[[str], None]) -> None:
    with path.open("rb") as file:
        file.seek(read_up_to.get(path, 0))
        data = file.read()
    whole = data.rfind(b"\n") + 1
    read_up_to[path] = read_up_to.get(path, 0) + whole
    attempt, rank = int(path.parent.name.removeprefix("attempt-")), int(path.stem.removeprefix("rank-"))
    for line in data[:whole].decode(errors="replace").splitlines():
        say(f"[attempt {attempt} rank {rank}] {line}")
