"""The command line: `packtrain nodes ...`, the quarantine that all runs of one storage folder share."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from ops.quarantine import ChangeKind, NodeChange, Owner

app = typer.Typer(help="Which nodes runs stay off, and why.", no_args_is_help=True)
NodeName = Annotated[str, typer.Argument(help="Address of the node, as in reports.", show_default=False)]
Storage = Annotated[Path, typer.Option("--storage", help="Folder of runs.")]
Reason = Annotated[str, typer.Option("--reason", help="Kept in the book of nodes for those who come later.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_STORAGE = Path("runs")


@app.command()
def ls(storage: Storage = DEFAULT_STORAGE, *, as_json: AsJson = False) -> None:
    """Every node that anything was ever said about; all others are healthy."""
    from ops.lemons import lemon_score, lemon_signals
    from ops.node_book import NodeBook
    from ops.quarantine import DEFAULT_RULES, fold

    now = time.time()
    changes = NodeBook(storage).changes()
    lemons = lemon_signals(changes, now)
    rows = []
    for node, record in sorted(fold(changes).records.items()):
        hold = record.in_force
        last = record.strikes[-1] if record.strikes else None
        rows.append(
            {
                "node": node,
                "state": record.state(now).value,
                "owner": hold.owner.value if hold else None,
                "since": hold.at if hold else None,
                "strikes": round(record.strikes_at(now, DEFAULT_RULES.half_life_s), 2),
                "lemon_score": round(lemon_score(lemons[node]), 2),
                "reason": hold.reason if hold else last.reason if last else "",
            }
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        by = f"by {row['owner']}" if row["owner"] else ""
        figures = f"strikes {row['strikes']:<5g} lemon {row['lemon_score']:<5g}"
        typer.echo(f"{row['node']:<24} {row['state']:<12} {by:<10} {figures} {row['reason']}".rstrip())
    if not rows:
        typer.echo(f"nothing was ever said about a node in {storage}: all are healthy")


@app.command()
def cordon(node: NodeName, reason: Reason = "", storage: Storage = DEFAULT_STORAGE) -> None:
    """Take a node out of service. Runs leave it with their next attempt; automation never lifts this."""
    _change(storage, node, ChangeKind.CORDON, reason)
    typer.echo(f"node {node} is quarantined")


@app.command()
def uncordon(node: NodeName, reason: Reason = "", storage: Storage = DEFAULT_STORAGE) -> None:
    """Take a node back into service, whoever took it out; its strikes are forgotten."""
    _change(storage, node, ChangeKind.UNCORDON, reason)
    typer.echo(f"node {node} is healthy")


def _change(storage: Path, node: str, kind: ChangeKind, reason: str) -> None:
    from ops.node_book import NodeBook

    change = NodeChange(time.time(), node, kind, Owner.HUMAN, reason)
    NodeBook(storage).change(lambda _: [change])
