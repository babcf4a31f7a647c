"""A rank of a run, forked from a warm server as a shell forks it, without Ray: for whole runs of one rank."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.engines.preload import preload_modules
from service.env import environment
from service.fork_client import ForkServer
from service.orders import StartPoint
from service.rank_process import RankRequest
from service.run_store import log_path, read_state

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended."""

    exit_code: int
    outcome: str = ""
    error: Mapping[str, Any] = field(default_factory=dict)
    """As service.rank_process.describe_error gives it; empty without an error."""


def start_server(folder: Path, kind: str = "native") -> ForkServer:
    """A fork server with what ranks of a strategy kind import; to be closed by the caller."""
    values = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", LOCAL_RANK="0")
    preload: Sequence[str] = (*preload_modules(kind), "service.rank_training")
    return ForkServer(preload, values, ROOT, folder / "server.log")


def request_of(run_dir: Path, attempt: int = 0, generation: int = 0, **more: Any) -> RankRequest:
    """What a shell asks for: rank 0, the only one; `more` are fields of RankRequest."""
    return RankRequest(
        run_dir=str(run_dir),
        data_dir=read_state(run_dir).data_dir,
        attempt=attempt,
        generation=generation,
        rank=0,
        local_rank=0,
        node_rank=0,
        world_size=1,
        local_world_size=1,
        node="127.0.0.1",
        log_path=str(log_path(run_dir, attempt, 0)),
        **more,
    )


def run_one_rank(
    server: ForkServer,
    run_dir: Path,
    generation: int = 0,
    limit_s: float = 45.0,
    start: StartPoint | None = None,
) -> RankEnd:
    """One generation of a run of one rank, from its newest checkpoint to its end."""
    request = request_of(
        run_dir,
        generation=generation,
        restore_before=start.restore_before if start else None,
        skip_samples=start.skip_samples if start else (),
    )
    server.fork(request)
    words: dict[str, Mapping[str, Any]] = {}
    deadline = time.monotonic() + limit_s
    while "exited" not in words:
        if time.monotonic() > deadline:
            raise AssertionError(f"no end within {limit_s} s:\n{Path(request.log_path).read_text()[-3000:]}")
        for message in server.wait(1.0):
            words[message.event] = message.fields
    outcome = str(words.get("outcome", {}).get("outcome", ""))
    return RankEnd(words["exited"]["exit_code"], outcome, words.get("error", {}))
