"""`packtrain replay`: a step of a run once more, from the checkpoint before it, beside what was recorded.

On this machine and without Ray; run it on another machine than the suspicious one. The same figures come from
the code or the data, others from the chip that the run had. What came out goes into the run's ledger, where
the next decision about that step finds it; nothing else changes in the run's folder.
"""

import math
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from jobs.errors import SpecError
from jobs.events import Ranges
from ops.blame import STEP_REPLAYED
from ops.checkpoint.layout import CHECKPOINTS_DIR, committed_steps, folder_name, is_committed
from ops.ledger import LEDGER_DIR, Event, LedgerWriter, number, read_ledger, read_metrics
from ops.rollback import skipped_so_far
from service.local_ranks import LocalRanks
from service.run_store import read_spec, read_state

if TYPE_CHECKING:
    from service.replayed_steps import ReplayedStep

CLOSE_FRAC = 1e-4
"""Losses on another kind of chip, or summed up in another order, differ by less."""

Verdict = Literal["same", "close", "same_fault", "clean_here", "differs", "not_recorded"]


@dataclass(frozen=True)
class StepComparison:
    """One step, as it was recorded and as it came out now."""

    step: int
    verdict: Verdict
    loss: float
    recorded_loss: float | None
    grad_norm: float
    recorded_grad_norm: float | None
    digests_equal: bool | None
    """Of the parameters after it; None where none were recorded."""


@dataclass(frozen=True)
class StepReplay:
    """All steps from the checkpoint to the one asked for."""

    checkpoint: str
    """Folder that it began from; empty: the start of the run."""
    steps: tuple[StepComparison, ...]

    @property
    def conclusion(self) -> str:
        """One sentence about the last step."""
        words: dict[Verdict, str] = {
            "same": "the same to the last bit: nothing speaks against the chip that the run had",
            "close": "the same within rounding: nothing speaks against the chip that the run had",
            "same_fault": "not finite again: it follows the code or the data, not the chip",
            "clean_here": "clean here, not finite in the run: the chip or memory that it had is to blame",
            "differs": "not what was recorded: chip, memory, or a change of code or environment since",
            "not_recorded": "the run recorded no such step with these samples",
        }
        last = self.steps[-1]
        text = words[last.verdict]
        if last.digests_equal is False:
            text += "; the parameters after it are not those of the run"
        return f"step {last.step}: {text}"

    @property
    def ok(self) -> bool:
        """What came out is what was recorded."""
        last = self.steps[-1]
        return last.verdict in ("same", "close", "same_fault") and last.digests_equal is not False

    def to_json(self) -> dict[str, Any]:
        """As printed by --json."""
        return {**asdict(self), "conclusion": self.conclusion, "ok": self.ok}


def run_replay(run_dir: Path, step: int, note: Callable[[str], None]) -> StepReplay:
    """Take the steps up to `step` again, in the foreground.

    Args:
        run_dir: folder of the run.
        step: the step in question, 1 for the first.
        note: says where it begins.

    Raises:
        SpecError: there is no such step, or this machine has no room for the ranks.
        PacktrainError: the ranks failed.
    """
    spec, state = read_spec(run_dir), read_state(run_dir)
    if not 1 <= step <= spec.train.steps:
        raise SpecError(f"--step {step}: this run has steps 1 to {spec.train.steps}")
    events = read_ledger(run_dir)
    checkpoint, begin = checkpoint_before(run_dir, step, events)
    note(f"from step {begin} ({checkpoint or 'start weights'}), {spec.world_size} ranks on this machine")
    from jobs.engines.preload import preload_modules
    from jobs.parallel.placement import kv_replicas
    from service.replayed_steps import replay_steps

    with tempfile.TemporaryDirectory(prefix="packtrain-replay-") as folder:
        ranks = LocalRanks((*preload_modules(spec.strategy.kind), "service.replayed_steps"), Path(folder))
        mesh = spec.strategy.mesh
        lines = [line for line in read_metrics(run_dir) if "grad_norm" in line]
        for skipped in _ways(events):
            of_ranks: list[list[ReplayedStep]] = ranks.run(
                replay_steps,
                mesh,
                kv_replicas(spec.model, mesh),
                spec,
                state.data_dir,
                checkpoint,
                step,
                skipped,
            )
            if line_of(lines, of_ranks[0][-1]) is not None:
                break
    recorded = {
        event.integer("step"): event.fields.get("digests", {}) for event in events if event.kind == "digests"
    }
    found = StepReplay(checkpoint, tuple(compare(lines, recorded, of_ranks)))
    ledger = LedgerWriter(run_dir / LEDGER_DIR / "replay.jsonl")
    verdict, here = found.steps[-1].verdict, sorted(own_addresses())
    ledger.write(STEP_REPLAYED, step=step, verdict=verdict, addresses=here)
    return found


def own_addresses() -> set[str]:
    """IP addresses that a run may know this machine by; containers of one machine have different ones."""
    every = [one for of_card in psutil.net_if_addrs().values() for one in of_card]
    return {one.address for one in every if one.family in (socket.AF_INET, socket.AF_INET6)}


def checkpoint_before(run_dir: Path, step: int, events: Sequence[Event]) -> tuple[str, int]:
    """Folder and step of the newest checkpoint before a step; "" and 0 for none.

    Those set aside are among them, unless they were found damaged.

    Args:
        run_dir: folder of the run.
        step: the step in question.
        events: the run's ledger.
    """
    found: list[tuple[int, Path]] = []
    folder = run_dir / CHECKPOINTS_DIR
    found += [(saved, folder / folder_name(saved)) for saved in committed_steps(folder)]
    damaged = {event.text("kept_as") for event in events if event.kind == "checkpoint_set_aside"}
    for path in (run_dir / "set_aside").glob("step-*-*"):
        if is_committed(path) and str(path) not in damaged:
            found.append((int(path.name.split("-")[1]), path))
    before = [one for one in found if one[0] < step]
    if not before:
        return "", 0
    saved, path = max(before, key=lambda one: (one[0], one[1].parent == folder))
    return str(path), saved


def _ways(events: Sequence[Event]) -> list[Ranges]:
    """What may have been passed over in that step: nothing more than the checkpoint knows, or all."""
    later = skipped_so_far(events)
    return [(), later] if later else [()]


def line_of(lines: Sequence[dict[str, Any]], replayed: "ReplayedStep") -> dict[str, Any] | None:
    """The recorded step on the same samples; of several the one that was not finite, else the last."""
    same = [
        line
        for line in lines
        if line["step"] == replayed.step and line["sample_ordinal"] == replayed.sample_ordinal
    ]
    bad = [line for line in same if line.get("skipped")]
    chosen = bad or same
    return chosen[-1] if chosen else None


def compare(
    lines: Sequence[dict[str, Any]],
    recorded: dict[int, dict[str, list[list[int]]]],
    of_ranks: Sequence[Sequence["ReplayedStep"]],
) -> list[StepComparison]:
    """Each replayed step beside what the run wrote down.

    Args:
        lines: step lines of metrics.jsonl.
        recorded: digests by step and key, the commonest variant first.
        of_ranks: the replayed steps of each rank.
    """
    found = []
    for place, first in enumerate(of_ranks[0]):
        line = line_of(lines, first)
        loss = number(line["loss"]) if line else None
        grad_norm = number(line["grad_norm"]) if line else None
        equal: bool | None = None
        of_run = recorded.get(first.step)
        if of_run and line:
            own = [(key, values) for rank in of_ranks for key, values in rank[place].digests.items()]
            known = [of_run[key][0] == values for key, values in own if key in of_run]
            equal = all(known) if known else None
        verdict = verdict_of(first.loss, first.grad_norm, loss, grad_norm)
        found.append(StepComparison(first.step, verdict, first.loss, loss, first.grad_norm, grad_norm, equal))
    return found


def verdict_of(loss: float, grad_norm: float, recorded: float | None, recorded_norm: float | None) -> Verdict:
    """How a replayed step stands to the recorded one."""
    if recorded is None or recorded_norm is None:
        return "not_recorded"
    is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
    was_finite = math.isfinite(recorded) and math.isfinite(recorded_norm)
    if not was_finite:
        return "clean_here" if is_finite else "same_fault"
    if (loss, grad_norm) == (recorded, recorded_norm):
        return "same"
    is_close = is_finite and math.isclose(loss, recorded, rel_tol=CLOSE_FRAC)
    is_close = is_close and math.isclose(grad_norm, recorded_norm, rel_tol=100 * CLOSE_FRAC)
    return "close" if is_close else "differs"
