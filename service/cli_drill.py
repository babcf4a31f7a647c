"""The verb `packtrain drill`: a fault on purpose. Parses and prints; drill.py asks for it."""

from pathlib import Path
from typing import Annotated

import typer


def drill(
    fault: Annotated[str, typer.Argument(help="kill, kill-shell, stop, xid, sleep, spin, hold-gil, ...")],
    run_name: Annotated[str, typer.Argument(metavar="RUN", help="Run id, or path of a run's folder.")],
    rank: Annotated[int | None, typer.Option(help="Who has it; none takes the last rank.")] = None,
    storage: Annotated[Path, typer.Option("--storage", help="Folder of runs.")] = Path("runs"),
) -> None:
    """Inject a fault on purpose into a run that trains."""
    from service.drill import request_drill
    from service.run_store import find_run

    run_dir = find_run(run_name, storage)
    request_drill(run_dir, fault, rank)
    typer.echo(f"asked for: {fault}; see packtrain status {run_dir.name} and its ledger")
