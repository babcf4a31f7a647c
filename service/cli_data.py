"""The command line: `packtrain data ...`."""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Prepare and look at the data of a spec.", no_args_is_help=True)
SpecPath = Annotated[Path, typer.Argument(help="A spec (YAML).", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override one key: a.b=c. Repeatable.")]


@app.command()
def prepare(
    spec: SpecPath,
    set_: Overrides = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokenise the sources of a spec into memory-mapped shards (`run` does this when needed)."""
    from jobs.spec.load import load_spec
    from service.runner import prepare_data, with_absolute_storage

    prepared = prepare_data(
        with_absolute_storage(load_spec(spec, set_ or [])), lambda line: typer.echo(line, err=True)
    )
    facts = prepared.to_json()
    typer.echo(
        json.dumps(facts, indent=2)
        if as_json
        else "\n".join(f"{key:20} {value}" for key, value in facts.items())
    )


@app.command()
def peek(
    spec: SpecPath,
    step: Annotated[int, typer.Option(help="Step to look at: 1 is the first.", min=1)] = 1,
    set_: Overrides = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The token ids, sample ids and documents that one step trains on."""
    from jobs.data.batches import peek_step
    from jobs.spec.load import load_spec
    from service.runner import prepare_data, with_absolute_storage

    loaded = with_absolute_storage(load_spec(spec, set_ or []))
    prepared = prepare_data(loaded, lambda line: typer.echo(line, err=True))
    found = peek_step(prepared, loaded, step)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(f"step {step}: {len(found['sample_ids'])} sequences")
    for sample, tokens, documents in zip(
        found["sample_ids"], found["tokens"], found["documents"], strict=True
    ):
        typer.echo(
            f"sample {sample}  documents {documents}\n  {tokens[:24]}{' ...' if len(tokens) > 24 else ''}"
        )
