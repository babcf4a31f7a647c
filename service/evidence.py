"""Evidence of a generation of ranks before it is judged: gathered from agents and shells, and weighed.

    ranks died  --check_urgent--> agents of their nodes --signals--+
    ranks hang  --"witness"-----> every shell --testimonies, files-+--> Incident

Everything here is bounded in time: a verdict on little evidence is better than none. Decides nothing.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.diagnosis.flight_recorder import diagnose_dumps
from ops.diagnosis.hang_culprits import hang_incident
from ops.diagnosis.verdict import Verdict
from ops.incident import Incident
from ops.ledger import LedgerWriter
from ops.monitors.collective_hang import Hang
from ops.signal import Signal
from service.watch import NodeReport
from service.witness import STOPPED, Testimony, dump_path, groups_path

AGENTS_LIMIT_S = 1.0
"""For the agents to say why ranks have died. Shells reap the others meanwhile."""
WITNESS_LIMIT_S = 7.0
"""For all shells to take the stacks of their ranks."""
MAX_RECORDED_SIGNALS = 2000
"""An attempt's signals in the ledger: a monitor that floods does not fill the disk."""


def incident_folder(run_dir: Path, attempt: int, generation: int) -> Path:
    """Where stacks and flight recorders of a hung generation are kept."""
    return run_dir / "incidents" / f"{attempt:03d}-{generation:03d}"


async def ask_agents(agents: Iterable[Any], limit_s: float = AGENTS_LIMIT_S) -> list[Signal]:
    """What the monitors of some nodes know of the last moment. Agents that are gone or late say nothing."""
    tasks = [asyncio.ensure_future(_answer(agent)) for agent in agents]
    if not tasks:
        return []
    done, late = await asyncio.wait(tasks, timeout=limit_s)
    for task in late:
        task.cancel()
    return [signal for task in done if task.exception() is None for signal in task.result()]


def weigh_hang(
    hang: Hang,
    testimonies: Mapping[int, Testimony],
    node_of: Mapping[int, str],
    folder: Path,
) -> Incident:
    """The incident behind a hang, with what was found of each rank. Reads flight recorders in `folder`."""
    return hang_incident(
        hang,
        [rank for rank, found in testimonies.items() if found.state == STOPPED],
        read_recorders(testimonies, folder, len(node_of)),
        {rank: found.stacks for rank, found in testimonies.items()},
        node_of,
    )


def read_recorders(ranks: Iterable[int], folder: Path, n_ranks: int) -> Verdict | None:
    """What the flight recorders of ranks say together; None where none can be read.

    Args:
        ranks: that were asked; a rank without a dump could not write one.
        folder: of the incident.
        n_ranks: of the generation.
    """
    dumps = [path for rank in ranks if (path := dump_path(folder, rank)).exists()]
    groups: dict[str, Sequence[int]] = {}
    try:
        for rank in ranks:
            if (path := groups_path(folder, rank)).exists():
                groups |= json.loads(path.read_bytes())
        return diagnose_dumps(dumps, groups, n_ranks) if dumps else None
    except (OSError, ValueError):  # half written, or of a torch that writes otherwise
        return None


def record_report(ledger: LedgerWriter, report: NodeReport, n_recorded: int) -> int:
    """Write down what an agent has seen; returns how many signals of the attempt are in the ledger now."""
    for off in report.switched_off:
        ledger.write("monitor_off", node=report.node, monitor=off.name, reason=off.reason)
    for one in report.signals[: max(0, MAX_RECORDED_SIGNALS - n_recorded)]:
        n_recorded += 1
        ledger.write(
            "signal",
            node=report.node,
            source=one.source,
            signal=one.kind,
            entity=str(one.entity),
            value=one.value,
            text=one.text[:500],
        )
    return n_recorded


async def _answer(agent: Any) -> list[Signal]:
    found: list[Signal] = await agent.check_urgent.remote()
    return found
