"""The command line: `packtrain checkpoint ...`."""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Checkpoints of a run, and Hugging Face form.", no_args_is_help=True)
RunName = Annotated[
    str, typer.Argument(help="Run id, or path of a run's or an imported folder.", show_default=False)
]
Storage = Annotated[Path, typer.Option("--storage", help="Folder of runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_STORAGE = Path("runs")


@app.command()
def ls(run_name: RunName, storage: Storage = DEFAULT_STORAGE, *, as_json: AsJson = False) -> None:
    """The committed checkpoints of a run."""
    from ops.checkpoint.verify import list_checkpoints
    from service.exchange import folder_of_checkpoints

    rows = [
        entry.to_json()
        for entry in list_checkpoints(folder_of_checkpoints(run_name, storage) / "checkpoints")
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo("  ".join(f"{key} {value}" for key, value in row.items()))
    if not rows:
        typer.echo("no committed checkpoint")


@app.command()
def verify(run_name: RunName, storage: Storage = DEFAULT_STORAGE, *, as_json: AsJson = False) -> None:
    """Read every committed checkpoint: sizes, checksums, finite values. Exit code 1 when one is bad."""
    from ops.checkpoint.verify import verify_all
    from service.exchange import folder_of_checkpoints

    results = verify_all(folder_of_checkpoints(run_name, storage) / "checkpoints")
    if as_json:
        typer.echo(json.dumps([result.to_json() for result in results], indent=2))
    else:
        for result in results:
            typer.echo(f"{result.path.name}  {'good' if result.ok else 'BAD: ' + '; '.join(result.problems)}")
    if not all(result.ok for result in results):
        raise typer.Exit(1)


@app.command()
def export(
    run_name: RunName,
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.", show_default=False)],
    storage: Storage = DEFAULT_STORAGE,
    step: Annotated[
        int | None, typer.Option(help="Step to export; the newest verified one by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """Write the weights in Hugging Face form: safetensors, config.json, tokenizer."""
    from service.exchange import export_checkpoint, folder_of_checkpoints

    typer.echo(export_checkpoint(folder_of_checkpoints(run_name, storage), out, step, dtype))


@app.command(name="import")
def import_(
    folder: Annotated[
        Path, typer.Argument(help="Hugging Face folder: config.json and safetensors.", show_default=False)
    ],
    out: Annotated[
        Path, typer.Argument(help="Checkpoint folder to write; must not exist.", show_default=False)
    ],
) -> None:
    """Turn a Hugging Face Llama into a checkpoint of step 0."""
    from service.exchange import import_folder

    typer.echo(import_folder(folder, out))
