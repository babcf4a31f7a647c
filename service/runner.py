"""From a loaded spec to a finished run: checks, data, cluster, supervisor, report. The verbs run and resume end here."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs.data.prepare import PreparedData, check_validation, check_vocab, prepare
from jobs.errors import SpecError
from jobs.spec.job import JobSpec
from ops.ledger import LedgerWriter
from ops.report import Report, build_report
from service.drill import KillHalfway
from service.origin import find_source_root
from service.preflight import ClusterFacts, check_before_start
from service.progress import ProgressView
from service.report_html import write_report_files
from service.run_store import FINISHED, RunState, create_run, read_state, write_state
from service.tracking_feed import TrackingFeed

EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "STOPPED": 3, "PREEMPTED": 3}


@dataclass(frozen=True)
class RunOptions:
    """How the user wants the run to be driven, none of it part of what the run computes."""

    address: str | None = None
    """Ray address; None embeds a cluster (or takes RAY_ADDRESS)."""
    demo_kill: bool = False
    """Kill one rank and one worker by SIGKILL on the way, to show the recovery."""
    is_embedded_code: bool = True


def prepare_data(spec: JobSpec, say: Callable[[str], None]) -> PreparedData:
    """Token shards of the run, made when the cache has none, checked against the model."""
    prepared = prepare(spec.data, Path(spec.run.storage).resolve(), say)
    check_vocab(prepared, spec.model.vocab_size)
    if spec.train.evaluate_every_steps is not None:
        check_validation(prepared)
    return prepared


def start_run(spec: JobSpec, run_dir: Path, options: RunOptions, say: Callable[[str], None]) -> int:
    """Check everything, prepare the data, make the run's folder and drive the run; returns the exit code.

    Raises:
        PacktrainError: something is wrong with the input; nothing was started.
    """
    for warning in check_before_start(spec, run_dir, None):
        say(f"warning: {warning}")
    prepared = prepare_data(spec, say)
    _connect(spec, options)
    check_before_start(spec, run_dir, _cluster_facts())
    state = replace(create_run(spec, run_dir), data_dir=str(prepared.cache_dir))
    write_state(run_dir, state)
    LedgerWriter(run_dir / "ledger" / "driver.jsonl").write("run_created", run_id=state.run_id)
    return _drive(spec, run_dir, options, say)


def resume_run(spec: JobSpec, run_dir: Path, options: RunOptions, say: Callable[[str], None]) -> int:
    """Go on with a run whose driver is gone, or that was stopped or failed; returns the exit code."""
    state = read_state(run_dir)
    if state.status == FINISHED:
        raise SpecError(
            f"run {run_dir.name} is FINISHED: nothing is left to do (train.steps={spec.train.steps})"
        )
    if state.status == "RUNNING" and state.is_driver_alive(run_dir):
        raise SpecError(
            f"run {run_dir.name} is being driven by pid {state.driver_pid} on {state.driver_host}; stop it first"
        )
    prepared = prepare_data(spec, say)
    _connect(spec, options)
    write_state(run_dir, replace(state, status="RUNNING", data_dir=str(prepared.cache_dir)).driven_by_me())
    return _drive(spec, run_dir, options, say)


def _connect(spec: JobSpec, options: RunOptions) -> None:
    from service.cluster import connect  # imports Ray: seconds that a wrong spec must not cost

    connect(spec, options.address, find_source_root())


def _cluster_facts() -> ClusterFacts:
    from service.cluster import capacity

    have = capacity()
    return ClusterFacts(cpus=have.cpus, gpus=have.gpus, free_cpus=have.free_cpus, free_gpus=have.free_gpus)
