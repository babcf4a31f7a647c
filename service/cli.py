"""The command line: the verbs of a run. Parses and prints; what a verb does is in the module it calls.

Exit codes: 0 done, 1 the run failed, 2 wrong input, 3 stopped or preempted, 93 the run failed and would
fail again the same way: a scheduler must not start it again.
"""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.errors import PacktrainError
from service import cli_checkpoint, cli_data, cli_diagnose, cli_drill, cli_nodes, cli_replay

if TYPE_CHECKING:
    from jobs.spec.job import JobSpec

app = typer.Typer(
    name="packtrain",
    help="Long LLM training runs on Ray clusters that survive failures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_checkpoint.app, name="checkpoint")
app.add_typer(cli_nodes.app, name="nodes")
app.command()(cli_diagnose.diagnose)
app.command()(cli_drill.drill)
app.command()(cli_replay.replay)

SpecPath = Annotated[Path, typer.Argument(help="A spec (YAML).", show_default=False)]
RunName = Annotated[str, typer.Argument(help="Run id, or path of a run's folder.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override one key: a.b=c. Repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Storage = Annotated[Path, typer.Option("--storage", help="Folder of runs.")]
Address = Annotated[str | None, typer.Option("--address", help="Ray address; none embeds a cluster.")]
DEFAULT_STORAGE = Path("runs")


def say(line: str) -> None:
    """One line to the user."""
    typer.echo(line)


def note(line: str) -> None:
    """One line to the user beside the output proper."""
    typer.echo(line, err=True)


def _load(spec: Path, overrides: list[str] | None) -> "JobSpec":
    """Load a spec and tell what became of each key of a DeepSpeed JSON that it names."""
    from jobs.spec.load import load_spec_with_report

    loaded = load_spec_with_report(spec, overrides or [])
    if loaded.deepspeed is not None:
        for line in loaded.deepspeed.lines():
            note(line)
    return loaded.spec


@app.command()
def validate(spec: SpecPath, set_: Overrides = None, *, as_json: AsJson = False) -> None:
    """Check a spec: prints the resolved JSON, or every error with file:line."""
    from jobs.spec.lesson import load_lesson
    from jobs.spec.load import resolved_json

    if lesson := load_lesson(spec, set_ or []):
        say(json.dumps(lesson.model_dump(mode="json"), indent=2))
        if not as_json:
            note(f"ok: lesson {lesson.lesson}, {lesson.n_ranks} ranks")
        return
    loaded = _load(spec, set_)
    say(resolved_json(loaded))
    if not as_json:
        note(f"ok: {loaded.model.n_params:,} parameters, {loaded.world_size} ranks")


@app.command()
def run(
    spec: SpecPath,
    set_: Overrides = None,
    address: Address = None,
    *,
    demo_kill: Annotated[
        bool, typer.Option(help="Kill a rank and a Ray worker with -9 on the way, to see the recovery.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(help="Export the trained weights in Hugging Face form to this folder.")
    ] = None,
) -> None:
    """Train in the foreground: embedded Ray when no cluster is named; Ctrl-C saves and stops.

    A lesson (model.kind: mlp) runs on this machine without Ray, and compares itself with one process.
    """
    from jobs.spec.lesson import load_lesson

    if lesson := load_lesson(spec, set_ or []):
        from service.lesson import run_lesson

        if address is not None or demo_kill or export is not None:
            raise PacktrainError("a lesson runs by itself: it takes no --address, --demo-kill or --export")
        raise typer.Exit(run_lesson(lesson, say))
    from service.run_store import new_run_id
    from service.runner import RunOptions, start_run, with_absolute_storage

    loaded = with_absolute_storage(_load(spec, set_))
    run_dir = (Path(loaded.run.storage) / new_run_id(loaded, spec)).resolve()
    raise typer.Exit(
        start_run(loaded, run_dir, RunOptions(address, demo_kill=demo_kill, export_dir=export), say)
    )


@app.command()
def resume(
    run_name: RunName,
    set_: Overrides = None,
    storage: Storage = DEFAULT_STORAGE,
    address: Address = None,
) -> None:
    """Go on with a run from its newest verified checkpoint (its driver died, or it was stopped or failed)."""
    from service.run_store import find_run
    from service.runner import RunOptions, resume_run

    run_dir = find_run(run_name, storage)
    raise typer.Exit(resume_run(run_dir, set_ or [], RunOptions(address), say))


@app.command()
def submit(
    spec: SpecPath,
    set_: Overrides = None,
    address: Annotated[str, typer.Option(help="Dashboard of the cluster.")] = "http://127.0.0.1:8265",
    *,
    as_json: AsJson = False,
) -> None:
    """Run a spec through Ray Jobs on a cluster; prints the run id and returns."""
    from service.submit import submit_run

    submitted = submit_run(spec, set_ or [], address)
    say(json.dumps(submitted) if as_json else f"run {submitted['run_id']}  job {submitted['job_id']}")


@app.command(name="list")
def list_(storage: Storage = DEFAULT_STORAGE, *, as_json: AsJson = False) -> None:
    """All runs below a storage folder."""
    from service.run_status import summaries

    rows = summaries(storage.resolve())
    if as_json:
        say(json.dumps(rows, indent=2))
        return
    for row in rows:
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        progress = f"step {row['step']}/{row['steps']}  loss {loss}  attempts {row['attempts']}"
        say(f"{row['run_id']:40} {row['status']:10} {progress}")
    if not rows:
        say(f"no runs in {storage}")


@app.command()
def status(run_name: RunName, storage: Storage = DEFAULT_STORAGE, *, as_json: AsJson = False) -> None:
    """Where one run is."""
    from service.run_status import lines, told_summary
    from service.run_store import find_run

    row = told_summary(find_run(run_name, storage))
    say(json.dumps(row, indent=2) if as_json else "\n".join(lines(row)))


@app.command()
def logs(
    run_name: RunName,
    storage: Storage = DEFAULT_STORAGE,
    rank: Annotated[int | None, typer.Option(help="One rank only.")] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """What the ranks printed, newest attempt last."""
    from service.logs import print_logs
    from service.run_store import find_run

    print_logs(find_run(run_name, storage), rank, follow=follow, say=say)


@app.command()
def stop(
    run_name: RunName,
    storage: Storage = DEFAULT_STORAGE,
    wait_s: Annotated[float, typer.Option(help="Wait at most so long for the end.")] = 180.0,
) -> None:
    """Save a checkpoint and stop; the run can be resumed."""
    from service.run_store import find_run, read_state, stop_request

    run_dir = find_run(run_name, storage)
    state = read_state(run_dir)
    if state.current_status(run_dir) != "RUNNING":
        say(f"run {run_dir.name} is {state.current_status(run_dir)}: nothing to stop")
        return
    stop_request(run_dir).touch()
    deadline = time.monotonic() + wait_s
    while read_state(run_dir).current_status(run_dir) == "RUNNING":
        if time.monotonic() > deadline:
            raise PacktrainError(
                f"run {run_dir.name} has not ended {wait_s:g} s after the stop request; see packtrain logs"
            )
        time.sleep(0.2)
    say(f"run {run_dir.name} is {read_state(run_dir).status}")


@app.command()
def report(run_name: RunName, storage: Storage = DEFAULT_STORAGE, *, as_json: AsJson = False) -> None:
    """Losses, attempts, incidents with their bill, goodput by phase; also writes report.html and loss.png."""
    from service.run_report import make_report, show_report
    from service.run_store import find_run

    run_dir = find_run(run_name, storage)
    made = make_report(run_dir, note)
    if as_json:
        say(json.dumps(made.to_json(), indent=2))
    else:
        show_report(made, run_dir)


@app.command()
def metrics(
    run_name: RunName,
    storage: Storage = DEFAULT_STORAGE,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 9877,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    *,
    once: Annotated[bool, typer.Option("--once", help="Print the metrics and leave.")] = False,
) -> None:
    """Serve a run's figures to Prometheus, while it lives and after; reads its folder only."""
    from service.metrics_server import MetricsServer, metrics_text
    from service.run_follower import RunFollower
    from service.run_store import find_run

    run_dir = find_run(run_name, storage)
    if once:
        say(metrics_text(run_dir).rstrip("\n"))
        return
    with MetricsServer(RunFollower(run_dir), host, port) as server:
        say(f"http://{host}:{server.port}/metrics")
        try:
            server.wait()
        except KeyboardInterrupt:
            note("no more metrics are served; the run is not affected")


@app.command()
def parity(
    spec: SpecPath,
    set_: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps over which losses are compared.")] = 10,
    max_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Lower dp until there are no more ranks; by default 4 a core, at least 8."),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Compare a layout, on a tiny model, with one process: losses, gradients, steps. 1 if they differ."""
    from service.parity import parity_lines, run_parity

    outcome = run_parity(_load(spec, set_), steps, max_ranks, note)
    if as_json:
        say(json.dumps(outcome.to_json(), indent=2))
    else:
        for line in parity_lines(outcome):
            say(line)
    if not outcome.report.ok:
        raise typer.Exit(1)


def main() -> None:
    """Called by service/__main__.py: every error meant for the user is one text and exit code 2."""
    try:
        app()
    except PacktrainError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        sys.exit(2)
