"""`packtrain replay`: prints what service/step_replay.py finds."""

import json
from pathlib import Path
from typing import Annotated

import typer


def replay(
    run_name: Annotated[str, typer.Argument(help="Run id, or path of a run's folder.", show_default=False)],
    step: Annotated[int, typer.Option(min=1, help="The step in question.", show_default=False)],
    storage: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    *,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Take a step of a run again on this machine, from the checkpoint before it; 1 if it differs."""
    from service.run_store import find_run
    from service.step_replay import run_replay

    found = run_replay(find_run(run_name, storage), step, lambda text: typer.echo(text, err=True))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        for one in found.steps:
            was = "-" if one.recorded_loss is None else f"{one.recorded_loss:.6f}"
            typer.echo(f"step {one.step:6}  loss {one.loss:.6f}  recorded {was}  {one.verdict}")
        typer.echo(found.conclusion)
    if not found.ok:
        raise typer.Exit(1)
