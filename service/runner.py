"""From a loaded spec to the end of a run: checks, data, cluster, supervisor, report."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jobs.data.prepare import PreparedData, check_unchanged, check_validation, check_vocab, prepare
from jobs.errors import PacktrainError, SpecError
from jobs.spec.compare import announce_lr, compare_for_resume
from jobs.spec.job import JobSpec
from jobs.spec.load import load_spec, resolved_json
from ops.durable import write_atomically
from ops.ledger import LedgerWriter
from service.env import environment, get_env, is_inside_ray_job
from service.lasting_output import lasting_output
from service.metrics_server import MetricsServer
from service.notice_feed import NoticeFeed
from service.origin import find_source_root
from service.preflight import ClusterFacts, check_before_start, embedded_cpus
from service.progress import ProgressView
from service.run_follower import RunFollower
from service.run_report import finish_run
from service.run_store import (
    FINISHED,
    RUNNING,
    RunState,
    create_run,
    last_step,
    read_spec,
    read_state,
    refuse_driven,
    sole_driver,
    stop_request,
    touch_lease,
    write_state,
)
from service.tracking_feed import TrackingFeed

EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "STOPPED": 3, "PREEMPTED": 3}
Say = Callable[[str], None]


@dataclass(frozen=True)
class RunOptions:
    """How the user wants the run to be driven: none of it is part of what the run computes."""

    address: str | None = None
    """Ray address; None takes RAY_ADDRESS, else embeds a cluster."""
    demo_kill: bool = False
    """SIGKILL a rank, and later a Ray worker, to show the recovery."""
    export_dir: Path | None = None
    """Export the trained weights in Hugging Face form to this folder at the end."""


def with_absolute_storage(spec: JobSpec) -> JobSpec:
    """The spec with run.storage made absolute.

    A relative storage is below the current folder; inside a Ray job, whose working directory is a
    temporary copy that Ray deletes, it is below ~/packtrain.
    """
    base = Path.home() / "packtrain" if is_inside_ray_job() else Path.cwd()
    storage = str((base / Path(spec.run.storage).expanduser()).resolve())
    return spec.model_copy(update={"run": spec.run.model_copy(update={"storage": storage})})


def prepare_data(spec: JobSpec, say: Say) -> PreparedData:
    """Token shards of the run, made when the cache has none, checked against the model."""
    prepared = prepare(spec.data, Path(spec.run.storage), say)
    check_vocab(prepared, spec.model.vocab_size)
    if spec.train.evaluate_every_steps:
        check_validation(prepared)
    return prepared


def start_run(spec: JobSpec, run_dir: Path, options: RunOptions, say: Say) -> int:
    """Check everything, prepare the data, make the run's folder, drive the run. Returns the exit code.

    Raises:
        PacktrainError: something is wrong with the input; no worker was started.
    """
    for warning in check_before_start(spec, run_dir, None, environment()):
        say(f"warning: {warning}")
    if options.export_dir is not None and options.export_dir.exists():
        raise SpecError(f"--export: {options.export_dir} exists; name a folder that does not")
    if spec.train.init_from is not None:
        from service.exchange import check_start_weights  # imports torch, which other starts do without

        check_start_weights(Path(spec.train.init_from), spec.model)
    _refuse_too_large(spec, options)
    prepared = prepare_data(spec, say)
    _connect(spec, run_dir, options, resume=False)
    state = create_run(spec, run_dir)
    LedgerWriter(run_dir / "ledger" / "driver.jsonl").write("run_created", run_id=state.run_id)
    with sole_driver(run_dir), lasting_output():
        return _drive(spec, run_dir, _with_data(state, prepared), options, say)


def resume_run(run_dir: Path, overrides: Sequence[str], options: RunOptions, say: Say) -> int:
    """Go on with a run whose driver died, or that was stopped or failed. Returns the exit code.

    Raises:
        SpecError: the run is finished or being driven, or the overrides change what it may not.
    """
    with sole_driver(run_dir):
        return _go_on(run_dir, overrides, options, say)


def _go_on(run_dir: Path, overrides: Sequence[str], options: RunOptions, say: Say) -> int:
    state, old = read_state(run_dir), read_spec(run_dir)
    spec = load_spec(run_dir / "spec.json", overrides)
    refusal = compare_for_resume(old, spec).refusal()
    if refusal is not None:
        raise SpecError(refusal)
    step = last_step(run_dir)
    if state.status == FINISHED and step >= spec.train.steps:
        raise SpecError(
            f"run {run_dir.name} is FINISHED at step {step} of train.steps={spec.train.steps}: nothing is "
            f"left to do; train further with --set train.steps=N"
        )
    refuse_driven(run_dir)  # where the file system has no locks, or the driver is on another host
    for change in compare_for_resume(old, spec).announced:
        say(f"changed: {change}")
    for line in filter(None, [announce_lr(old, spec, step)]):
        say(line)
    for warning in check_before_start(spec, run_dir, None, environment(), resume=True):
        say(f"warning: {warning}")
    _refuse_too_large(spec, options)
    prepared = prepare_data(spec, say)
    if state.data_fingerprint:
        check_unchanged(prepared, state.data_fingerprint)
    _connect(spec, run_dir, options, resume=True)
    write_atomically(run_dir / "spec.json", resolved_json(spec))
    stop_request(run_dir).unlink(missing_ok=True)  # the old one, before a new one can be made
    with lasting_output():
        return _drive(spec, run_dir, _with_data(state, prepared), options, say)


def _with_data(state: RunState, prepared: PreparedData) -> RunState:
    known = replace(state, data_dir=str(prepared.cache_dir), data_fingerprint=prepared.fingerprint)
    return replace(known, status=RUNNING).driven_by_me()


def _refuse_too_large(spec: JobSpec, options: RunOptions) -> None:
    """For an embedded cluster; before the data is prepared, which may take long."""
    if not (options.address or get_env("RAY_ADDRESS")):
        embedded_cpus(spec, os.cpu_count() or 1)


def _connect(spec: JobSpec, run_dir: Path, options: RunOptions, *, resume: bool) -> None:
    from service.cluster import capacity, connect  # imports Ray: seconds that a wrong spec must not cost

    connect(spec, options.address, find_source_root())
    have = capacity()
    facts = ClusterFacts(have.cpus, have.gpus, have.free_cpus, have.free_gpus)
    check_before_start(spec, run_dir, facts, environment(), resume=resume)


def _drive(spec: JobSpec, run_dir: Path, state: RunState, options: RunOptions, say: Say) -> int:
    from service.drill import KillAtStep, RequestedDrills, drill_request
    from service.supervisor import Supervisor

    touch_lease(run_dir)
    write_state(run_dir, state)
    view = ProgressView(run_dir, spec.train.steps)
    follower = RunFollower(run_dir)
    feed = TrackingFeed(run_dir, spec, view.say, follower=follower)
    feed.start()
    notices = NoticeFeed(run_dir, spec.tracking.notify, follower, view.say, n_ranks=spec.world_size)
    notices.start(environment())
    drill_request(run_dir).unlink(missing_ok=True)  # of an earlier driver
    drills: list[KillAtStep | RequestedDrills] = [RequestedDrills(run_dir, view.say)]
    if options.demo_kill:
        drills += [
            KillAtStep("kill", round(0.45 * spec.train.steps), view.say),
            KillAtStep("kill-shell", 2 * round(0.45 * spec.train.steps), view.say),
        ]

    def watch(supervisor: Supervisor) -> None:
        view.poll()
        for drill in drills:
            drill.poll(supervisor)

    say(f"run {run_dir.name}: {spec.model.n_params:,} parameters, {spec.world_size} ranks, {run_dir}")
    code_dir = "" if is_inside_ray_job() else str(find_source_root())
    with served_metrics(follower, spec, view.say):
        try:
            end = Supervisor(spec, run_dir, code_dir, view.say, watch).run()
        finally:
            view.close()
        notices.close(end.status, end.error)
        finish_run(run_dir, feed, end.status, options.export_dir, say)
    return EXIT_CODES[end.status] if end.exit_code is None else end.exit_code


@contextlib.contextmanager
def served_metrics(follower: RunFollower, spec: JobSpec, say: Say) -> Iterator[None]:
    """Serve the run's figures meanwhile, where the spec asks for it; where that fails it costs a line."""
    server: MetricsServer | None = None
    tracking = spec.tracking
    if tracking.metrics_port:
        try:
            server = MetricsServer(follower, tracking.metrics_host, tracking.metrics_port)
            say(f"metrics for Prometheus: http://{tracking.metrics_host}:{server.port}/metrics")
        except PacktrainError as error:
            say(f"warning: tracking.metrics_port: {error}; the run goes on without")
    try:
        yield
    finally:
        if server is not None:
            server.close()
