"""The command line: `packtrain diagnose FILES...`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ops.diagnosis.verdict import Verdict

Files = Annotated[
    list[Path],
    typer.Argument(help="Logs, kernel logs, flight recorder dumps, or folders of them.", show_default=False),
]
Rules = Annotated[
    list[Path] | None,
    typer.Option("--rules", help="YAML with patterns of your own, over the shipped ones. Repeatable."),
]


def diagnose(
    files: Files,
    rules: Rules = None,
    *,
    lines: Annotated[bool, typer.Option("--lines", help="One verdict for each line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What went wrong, who is to blame and what to do, from logs and dumps; needs no cluster."""
    from ops.diagnosis.files import diagnose_files, diagnose_lines, find_files
    from ops.diagnosis.pattern import shipped_registry, with_overrides

    registry = with_overrides(shipped_registry(), rules or [])
    paths = find_files(files)
    if lines:
        rows = [row for path in paths for row in diagnose_lines(path, registry)]
        if as_json:
            typer.echo(json.dumps([row.to_json() for row in rows], indent=2))
            return
        for row in rows:
            if row.verdict.pattern:
                v = row.verdict
                typer.echo(f"{row.file}:{row.line}: {v.failure_class} ({v.role})  {v.evidence}")
        return
    found = diagnose_files(paths, registry)
    if as_json:
        typer.echo(json.dumps([row.to_json() for row in found.files], indent=2))
        return
    for row in found.files:
        _show(row.file, row.verdict)
    if len(found.files) > 1:
        _show("all together", found.together)


def _show(title: str, verdict: "Verdict") -> None:
    """One verdict in a few lines."""
    if not verdict.evidence:
        typer.echo(f"{title}: nothing found that tells of a failure")
        return
    typer.echo(
        f"{title}: {verdict.failure_class} ({verdict.role}, confidence {verdict.confidence:.2f})\n"
        f"  culprit   {str(verdict.culprit).strip()}\n"
        f"  action    {verdict.action}  (runbook {verdict.runbook})\n"
        f"  evidence  {verdict.evidence}"
    )
    if verdict.advice:
        typer.echo(f"  advice    {verdict.advice}")
