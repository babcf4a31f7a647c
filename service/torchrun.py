"""The same ranks without Ray: `torchrun --nproc-per-node 2 -m service.torchrun SPEC [a.b=c ...]`.

Rank 0 prepares the data and makes the run's folder; the others hear of it through torchrun's store. After
a restart by torchrun the ranks go on from the newest verified checkpoint of the same folder. There is no
supervisor here: no incident is named, nothing is tracked; `packtrain report` reads the folder afterwards
as it reads any other. Rank 0 drives the run: it holds the driver's place and keeps the lease, so that a
resume from elsewhere is refused.
"""

import contextlib
import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from jobs.data.prepare import prepare
from jobs.spec.job import JobSpec
from jobs.spec.load import load_spec
from ops.findings import Finding
from ops.ledger import LedgerWriter
from service.env import environment
from service.preflight import check_before_start
from service.rank_process import STORE_TIMEOUT_S, RankRequest, StopFlag, train_rank
from service.run_store import (
    FINISHED,
    STOPPED,
    create_run,
    new_run_id,
    read_state,
    sole_driver,
    touch_lease,
    write_state,
)
from service.runner import with_absolute_storage

LEASE_EVERY_S = 1.0
PREPARE_LIMIT_S = 3600.0
"""How long the other ranks wait for rank 0 to prepare the data."""


def main(arguments: list[str]) -> int:
    """One rank of the run; returns its exit code. Called by torchrun on every rank.

    Raises:
        PacktrainError: the spec or the data are wrong, or another process has come to drive the run;
            torchrun shows the traceback and ends the run.
    """
    numbers = {name: int(value) for name, value in environment().items() if value.isdecimal()}
    spec = with_absolute_storage(load_spec(arguments[0], arguments[1:]))
    if spec.world_size != numbers["WORLD_SIZE"]:
        raise SystemExit(
            f"the spec wants {spec.world_size} ranks (strategy.{spec.strategy.mesh.factors}), torchrun has "
            f"{numbers['WORLD_SIZE']}: make --nnodes x --nproc-per-node the same"
        )
    shared = TCPStore(environment()["MASTER_ADDR"], numbers["MASTER_PORT"], is_master=False)
    if numbers["RANK"] == 0 and not shared.check(["packtrain/folders"]):
        shared.set("packtrain/folders", json.dumps(_make_folders(spec, Path(arguments[0]))))
    shared.wait(["packtrain/folders"], timedelta(seconds=PREPARE_LIMIT_S))
    run_dir, data_dir = json.loads(shared.get("packtrain/folders"))
    generation = numbers.get("TORCHELASTIC_RESTART_COUNT", 0)
    request = RankRequest(
        run_dir=run_dir,
        data_dir=data_dir,
        attempt=0,
        generation=generation,
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        node_rank=numbers["GROUP_RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        node=socket.gethostname(),
        log_path="",
    )
    stop = StopFlag()
    signal.signal(signal.SIGTERM, stop.set)

    def open_store() -> Store:
        # torchrun's agent keeps the store for all generations: each meets at a prefix of its own.
        shared.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        return PrefixStore(f"packtrain/{generation}", shared)

    if request.rank != 0:
        train_rank(request, open_store, stop, _say)
        return 0
    with _driving(Path(run_dir)):
        outcome = train_rank(request, open_store, stop, _say)
        status = FINISHED if outcome == "finished" else STOPPED
        LedgerWriter(Path(run_dir) / "ledger" / "driver.jsonl").write("run_ended", status=status)
        write_state(Path(run_dir), replace(read_state(Path(run_dir)), status=status))
    return 0


def _say(finding: Finding) -> None:
    """Nobody decides here: what the ranks find is in their output."""
    sys.stderr.write(f"{finding.detector}: {finding.signal.text}\n")


@contextlib.contextmanager
def _driving(run_dir: Path) -> Iterator[None]:
    """Be the run's driver for the length of a with-block: after a restart by torchrun that is a new process.

    The lease is kept by a thread: it must not grow old in a long step, save or restore.

    Raises:
        SpecError: another process drives the run.
    """
    is_over = threading.Event()

    def keep_lease() -> None:
        while not is_over.wait(LEASE_EVERY_S):
            touch_lease(run_dir)

    with sole_driver(run_dir):
        touch_lease(run_dir)
        write_state(run_dir, read_state(run_dir).driven_by_me())
        keeper = threading.Thread(target=keep_lease, name="lease", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            is_over.set()
            keeper.join()


def _make_folders(spec: JobSpec, spec_path: Path) -> tuple[str, str]:
    run_dir = Path(spec.run.storage) / new_run_id(spec, spec_path)
    for warning in check_before_start(spec, run_dir, None, environment()):
        sys.stderr.write(f"warning: {warning}\n")
    prepared = prepare(spec.data, Path(spec.run.storage))
    state = create_run(spec, run_dir)
    write_state(
        run_dir, replace(state, data_dir=str(prepared.cache_dir), data_fingerprint=prepared.fingerprint)
    )
    ledger = LedgerWriter(run_dir / "ledger" / "driver.jsonl")
    ledger.write("run_created", run_id=state.run_id)
    ledger.write("attempt_started", attempt=0, world_size=spec.world_size)
    return str(run_dir), str(prepared.cache_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
