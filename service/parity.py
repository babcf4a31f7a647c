"""`packtrain parity`: a spec's layout, shrunk, on ranks of this machine against one process; and the table.

No Ray and no run folder. What is compared and how is in jobs/parity.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.parity.shrink import Shrunk, shrink
from jobs.spec.job import JobSpec
from service.local_ranks import LocalRanks

if TYPE_CHECKING:
    from jobs.parity.compare import Difference, ParityReport

RANKS_PER_CORE = 4
FEWEST_MAX_RANKS = 8
"""Enough for dp=2 x pp=2 x tp=2 on any machine."""
N_SHOWN = 8
"""Gradients in the table, the worst first; all of those that are out of tolerance are named below it."""


@dataclass(frozen=True)
class ParityOutcome:
    """The report, and how the tiny run came about."""

    report: "ParityReport"
    shrunk: Shrunk
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        """As printed by --json."""
        tiny = self.shrunk.spec
        return {
            **self.report.to_json(),
            "world_size": tiny.world_size,
            "n_params": tiny.model.n_params,
            "notes": list(self.shrunk.notes),
            "wall_s": round(self.wall_s, 3),
            "spec": tiny.model_dump(mode="json"),
        }


def default_max_ranks(n_cores: int) -> int:
    """Ranks with a tiny model that a machine takes unasked: they wait more than they compute."""
    return max(FEWEST_MAX_RANKS, RANKS_PER_CORE * n_cores)


def run_parity(
    spec: JobSpec, n_steps: int, max_ranks: int | None, note: Callable[[str], None]
) -> ParityOutcome:
    """Compare the spec's layout with one process, in the foreground.

    Args:
        spec: the run; only its layout and the shape of its model matter.
        n_steps: steps over which losses are compared.
        max_ranks: dp is lowered until there are no more ranks than this; None chooses by the machine's cores.
        note: says what could not be kept, while the ranks start.

    Raises:
        SpecError: the layout has too many ranks for this machine.
        PacktrainError: the layout does not run; holds the ranks' tracebacks.
    """
    began_s = time.monotonic()
    shrunk = shrink(spec, max_ranks or default_max_ranks(os.cpu_count() or 1))
    for line in shrunk.notes:
        note(f"note: {line}")
    with tempfile.TemporaryDirectory(prefix="packtrain-parity-") as folder:
        from jobs.engines.preload import preload_modules

        ranks = LocalRanks((*preload_modules(spec.strategy.kind), "jobs.parity.rank"), Path(folder))
        from jobs.parity.compare import compare_layout  # imports torch while the server does

        report = compare_layout(shrunk.spec, ranks.run, n_steps)
    return ParityOutcome(report, shrunk, time.monotonic() - began_s)


def parity_lines(outcome: ParityOutcome) -> list[str]:
    """The table as printed."""
    report, tiny = outcome.report, outcome.shrunk.spec
    limit = report.tolerances
    axes = " ".join(f"{axis}={size}" for axis, size in report.layout.items() if axis != "kind" and size != 1)
    model = tiny.model
    lines = [
        f"{report.layout['kind']} {axes or 'one rank'}: {tiny.world_size} ranks against one process, "
        f"{report.precision}",
        f"tiny model: {model.n_params:,} parameters, {model.n_layers} layers, {model.n_heads} heads, "
        f"{model.n_kv_heads} kv heads, vocabulary {model.vocab_size}, sequences of {tiny.data.seq_len}, "
        f"{tiny.grad_accum_steps} micro-batches",
        "",
        f"{'':44}{'differs by':>12}{'at most':>12}",
        _row("loss", report.loss_abs, limit.loss_abs),
        _row("gradient norm (relative)", report.grad_norm_rel, limit.grad_norm_rel),
        _row(f"loss, largest of {report.n_steps} steps", report.losses_abs, limit.losses_abs),
        _named("weights after one AdamW step", report.after_adamw[0], limit.weights_rel),
        _named("weights after one SGD step", report.after_sgd[0], limit.weights_rel),
        f"gradients, {min(N_SHOWN, len(report.gradients))} worst of {len(report.gradients)} (relative)",
        *(_row(f"  {d.name}", d.rel, limit.grad_rel) for d in report.gradients[:N_SHOWN]),
        "",
    ]
    if report.ok:
        lines.append(f"equal to one process ({outcome.wall_s:.1f} s)")
    else:
        lines += [*report.problems, f"NOT equal to one process ({outcome.wall_s:.1f} s)"]
    return lines


def _row(name: str, found: float, most: float) -> str:
    mark = "" if found <= most else "  <--"
    return f"{name:44}{found:12.1e}{most:12.0e}{mark}"


def _named(what: str, worst: "Difference", most: float) -> str:
    return f"{_row(what, worst.rel, most)}  {worst.name}"
