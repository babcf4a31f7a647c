"""How long from SIGKILL of a rank to the next trained step, against torchrun's elastic restart?

    python benchmarks/restart.py [--quick] [--kills 5]

The same model on two ranks, saved every five steps. Fresh runs in turns: each trains until a save is
committed, then one rank is killed (rank 1 and rank 0 in turns). torchrun restarts the hand-written loop of
hand_loop.py, which saves with torch.save and goes on from there. The clock ends with the first step, be it$
one that is trained again. Packtrain runs
with its defaults: Ray, driver and MLflow on the same cores. Goal: ratio of medians <= 0.5.
"""

import argparse
import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import psutil
from step_time import MICRO_BATCH, MODEL, RANKS, SEQ_LEN, spec_values, write_tokens

GOAL = 0.5
EVERY, KILL_AT = 5, 8
ENOUGH_STEPS = 100_000
OUR_PHASES = ("noticed", "forked", "groups, engine, load", "first step")
THEIR_PHASES = ("new process", "imports", "groups", "model, load", "first step")


def kill_packtrain(folder: Path, number: int) -> dict[str, float]:
    """One run with one kill; seconds of each phase."""
    name = f"restart-{number}"
    path, run_dir = folder / f"{name}.json", folder / "runs" / name
    values = spec_values(folder, name, {"kind": "native"}, "fp32", ENOUGH_STEPS)
    values["checkpoint"] = {"every_steps": EVERY, "keep_last": 2}
    path.write_text(json.dumps(values))
    output = folder / f"{name}.txt"

    def is_ready() -> bool:
        steps = harness.steps_of(run_dir)
        saved = [e for e in harness.events_of(run_dir) if e["kind"] == "checkpoint_committed"]
        return bool(saved) and steps[-1]["step"] >= KILL_AT

    def again() -> list[dict[str, Any]]:
        return [line for line in harness.steps_of(run_dir) if line["generation"] == 1]

    with harness.started([harness.PACKTRAIN, "run", str(path)], output) as process:
        harness.wait_until(is_ready, process, output, f"step {KILL_AT}")
        pid = rank_pid(process.pid, f"packtrain[{name}] rank {1 - number % RANKS}:")
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        harness.wait_until(lambda: bool(again()), process, output, "a step after the kill")
        times = [killed_at]
        events = harness.events_of(run_dir)
        times.append(next(e["detected_at"] for e in events if e["kind"] == "incident"))
        second = [e for e in events if e.get("generation") == 1]
        times.append(next(e["at"] for e in second if e["kind"] == "ranks_started"))
        times.append(next(e["at"] for e in second if e["kind"] == "restored"))
        times.append(again()[0]["at"])
    phases = {phase: b - a for phase, a, b in zip(OUR_PHASES, times, times[1:], strict=False)}
    return {**phases, "total": times[-1] - killed_at}


def rank_pid(driver_pid: int, title: str) -> int:
    """Pid of a descendant by its title."""
    for process in psutil.Process(driver_pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(title):
                return process.pid
    raise SystemExit(f"no process is called {title}")


def kill_torchrun(folder: Path, number: int) -> dict[str, float]:
    """One torchrun with one kill; seconds of each phase."""
    events, checkpoint = folder / f"hand-{number}.jsonl", folder / f"hand-{number}.pt"
    output = folder / f"hand-{number}.txt"
    words = [harness.TORCHRUN, "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "3"]
    words += [str(harness.ROOT / "benchmarks" / "hand_loop.py"), str(folder / "model.json")]
    words += [str(folder / "tokens.bin"), str(events), "--steps", str(ENOUGH_STEPS)]
    words += ["--batch-size", str(MICRO_BATCH), "--seq-len", str(SEQ_LEN)]
    words += ["--checkpoint", str(checkpoint), "--every", str(EVERY)]

    def lines(name: str, at: float = 0.0) -> list[dict[str, Any]]:
        return [e for e in harness.json_lines(events) if e["event"] == name and e["at"] > at]

    # torchrun hands the old store to the new ranks: where rank 0 was killed, gloo often waits there for ever.
    fresh_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with harness.started(words, output, **fresh_store) as process:
        harness.wait_until(
            lambda: checkpoint.exists() and len(lines("step")) >= KILL_AT, process, output, f"step {KILL_AT}"
        )
        writer = lines("begun")[0]["pid"]
        ranks = [
            one.pid
            for one in psutil.Process(process.pid).children()
            if any("hand_loop.py" in word for word in one.cmdline())
        ]
        victim = writer if number % RANKS else next(pid for pid in ranks if pid != writer)
        killed_at = time.time()
        os.kill(victim, signal.SIGKILL)

        def again() -> list[dict[str, Any]]:
            second = [e for e in lines("begun") if e["pid"] != writer]
            return lines("step", second[0]["at"]) if second else []

        harness.wait_until(lambda: bool(again()), process, output, "a step after the kill")
        second = [e for e in harness.json_lines(events) if e["pid"] != writer]
    times = [killed_at, *(next(e["at"] for e in second if e["event"] == name) for name in (
        "begun", "imported", "joined", "loaded", "step"))]  # fmt: skip
    if next(e["step"] for e in second if e["event"] == "loaded") < EVERY:
        raise SystemExit("the hand-written loop did not go on from its checkpoint")
    phases = {phase: b - a for phase, a, b in zip(THEIR_PHASES, times, times[1:], strict=False)}
    return {**phases, "total": times[-1] - killed_at}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int)
    args = parser.parse_args()
    n_kills = args.kills or (2 if args.quick else 5)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="packtrain-bench-") as name:
        folder = Path(name)
        (folder / "model.json").write_text(json.dumps(MODEL))
        write_tokens(folder / "tokens.bin")
        for number in range(n_kills):
            ours.append(kill_packtrain(folder, number))
            theirs.append(kill_torchrun(folder, number))
    totals, others = ([one["total"] for one in side] for side in (ours, theirs))
    by_pair = harness.ratios(totals, others)
    rows = [["seconds from SIGKILL to the next step", "median [min..max]"]]
    rows += [["packtrain", harness.spread(totals)], ["torchrun", harness.spread(others)]]
    rows += [["ratio by pair", harness.spread(by_pair)]]
    rows += [[f"  packtrain: {phase}", harness.spread([one[phase] for one in ours])] for phase in OUR_PHASES]
    rows += [[f"  torchrun: {p}", harness.spread([one[p] for one in theirs])] for p in THEIR_PHASES]
    harness.print_table(rows)
    harness.print_json(
        "restart",
        GOAL,
        {
            "ours_s": harness.median(totals),
            "theirs_s": harness.median(others),
            "ratio": harness.median(totals) / harness.median(others),
            "ratio_by_pair": by_pair,
            "phases_s": {phase: harness.median([one[phase] for one in ours]) for phase in OUR_PHASES},
            "torchrun_phases_s": {p: harness.median([one[p] for one in theirs]) for p in THEIR_PHASES},
        },
    )


if __name__ == "__main__":
    main()
