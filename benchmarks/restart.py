"""How long from SIGKILL to the next trained step, against what else restarts?

    python benchmarks/restart.py [--quick] [--kills 5] [--only in-place new-attempt]

    in-place      a rank is killed: its shell forks the next, against torchrun's elastic restart of the
                  hand-written loop of hand_loop.py, which saves with torch.save and goes on from there
    new-attempt   a shell (Ray's worker actor) is killed: another fit(), against a killed worker of plain Ray
                  Train with FailureConfig (plain_ray.py)

The same model on two ranks, saved every few steps. Fresh runs in turns: each trains until a save is
committed, then one process is killed (of rank 1 and rank 0 in turns). The clock ends with the first step, be
it one that is trained again. Packtrain runs with its defaults: Ray, driver and MLflow on the same cores.
Goals: ratio of medians <= 0.3 in place, <= 0.5 for a new attempt.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import harness
import psutil
from step_time import MICRO_BATCH, MODEL, RANKS, SEQ_LEN, spec_values, write_tokens

GOAL = {"in-place": 0.3, "new-attempt": 0.5}
EVERY, KILL_AT = 5, {False: 8, True: 100}
"""A new attempt in steady state: half a minute after the start its controller waits."""
RAY_EVERY, RAY_KILL_AT = 10, 25
"""Ray Train counts a checkpoint when its controller has asked for it: every 2 s."""
ENOUGH_STEPS = 100_000
IN_PLACE_PHASES = ("noticed", "forked", "groups, engine, load", "first step")
NEW_ATTEMPT_PHASES = ("noticed", "new fit()", "shells, fork", "groups, engine, load", "first step")
TORCHRUN_PHASES = ("new process", "imports", "groups", "model, load", "first step")
RAY_PHASES = ("new workers", "model, load", "first step")


def kill_packtrain(folder: Path, number: int, *, new_attempt: bool) -> dict[str, float]:
    """One run with one kill, of a rank or of a shell; seconds of each phase."""
    name = f"{'attempt' if new_attempt else 'restart'}-{number}"
    path, run_dir = folder / f"{name}.json", folder / "runs" / name
    values = spec_values(folder, name, {"kind": "native"}, "fp32", ENOUGH_STEPS)
    values["checkpoint"] = {"every_steps": EVERY, "keep_last": 2}
    path.write_text(json.dumps(values))
    output = folder / f"{name}.txt"
    counter = "attempt" if new_attempt else "generation"

    def is_ready() -> bool:
        steps = harness.steps_of(run_dir)
        saved = [e for e in harness.events_of(run_dir) if e["kind"] == "checkpoint_committed"]
        return bool(saved) and steps[-1]["step"] >= KILL_AT[new_attempt]

    def again() -> list[dict[str, Any]]:
        return [line for line in harness.steps_of(run_dir) if line[counter] == 1]

    with harness.started([harness.PACKTRAIN, "run", str(path)], output) as process:
        harness.wait_until(is_ready, process, output, f"step {KILL_AT[new_attempt]}")
        rank = 1 - number % RANKS
        title = f"shell of rank {rank}" if new_attempt else f"rank {rank}:"
        pid = pid_of(process.pid, f"packtrain[{name}] {title}")
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        harness.wait_until(lambda: bool(again()), process, output, "a step after the kill")
        times = [killed_at]
        events = harness.events_of(run_dir)
        times.append(next(e["detected_at"] for e in events if e["kind"] == "incident"))
        second = [e for e in events if e.get(counter) == 1]
        kinds = (
            ("attempt_started", "ranks_started", "restored") if new_attempt else ("ranks_started", "restored")
        )
        times += [next(e["at"] for e in second if e["kind"] == kind) for kind in kinds]
        times.append(again()[0]["at"])
    names = NEW_ATTEMPT_PHASES if new_attempt else IN_PLACE_PHASES
    return phases_of(names, times)


def phases_of(names: Sequence[str], times: Sequence[float]) -> dict[str, float]:
    """Seconds between neighbours by name, and all of them."""
    found = {name: b - a for name, a, b in zip(names, times, times[1:], strict=False)}
    return {**found, "total": times[-1] - times[0]}


def kill_ray_train(folder: Path, number: int) -> dict[str, float]:
    """One plain Ray Train run with one kill of a worker; seconds of each phase."""
    output, events = folder / f"plain-{number}.txt", folder / f"plain-{number}.jsonl"
    words = [sys.executable, str(harness.ROOT / "benchmarks" / "plain_ray.py"), str(folder / "model.json")]
    words += [str(folder / "tokens.bin"), str(events), "--steps", str(ENOUGH_STEPS)]
    words += ["--every", str(RAY_EVERY), "--storage", str(folder / "plain"), "--batch-size", str(MICRO_BATCH)]

    def lines(event: str, but: Collection[int] = ()) -> list[dict[str, Any]]:
        found = harness.json_lines(events)
        return [e for e in found if e["event"] == event and e["rank"] == 0 and e["pid"] not in but]

    paths = f"{harness.ROOT / 'benchmarks'}:{harness.ROOT}"  # its workers are no children of this script
    with harness.started(words, output, PYTHONPATH=paths) as process:
        harness.wait_until(lambda: len(lines("step")) >= RAY_KILL_AT, process, output, f"step {RAY_KILL_AT}")
        begun = {e["rank"]: e["pid"] for e in harness.json_lines(events) if e["event"] == "begun"}
        killed_at = time.time()
        os.kill(begun[1 - number % RANKS], signal.SIGKILL)
        first = begun.values()
        harness.wait_until(lambda: bool(lines("step", first)), process, output, "a step after the kill")
        if lines("loaded", first)[0]["step"] == 0:
            raise SystemExit("Ray Train did not go on from its checkpoint")
        times = [lines(event, first)[0]["at"] for event in ("begun", "loaded", "step")]
    return phases_of(RAY_PHASES, [killed_at, *times])


def pid_of(driver_pid: int, title: str) -> int:
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
            lambda: checkpoint.exists() and len(lines("step")) >= KILL_AT[False],
            process,
            output,
            f"step {KILL_AT[False]}",
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
    return phases_of(TORCHRUN_PHASES, times)


def compare(what: str, ours: list[dict[str, float]], theirs: list[dict[str, float]], other: str) -> bool:
    """Print one comparison; whether its goal is met."""
    totals, others = ([one["total"] for one in side] for side in (ours, theirs))
    by_pair = harness.ratios(totals, others)
    ratio = harness.median(totals) / harness.median(others)
    rows = [[f"{what}: seconds from SIGKILL to the next step", "median [min..max]"]]
    rows += [["packtrain", harness.spread(totals)], [other, harness.spread(others)]]
    rows += [["ratio by pair", harness.spread(by_pair)]]
    phases: dict[str, dict[str, float]] = {}
    for side, measured in (("packtrain", ours), (other, theirs)):
        names = [name for name in measured[0] if name != "total"]
        phases[side] = {name: harness.median([one[name] for one in measured]) for name in names}
        rows += [[f"  {side}: {name}", harness.spread([one[name] for one in measured])] for name in names]
    harness.print_table(rows)
    figures = {"ours_s": harness.median(totals), "theirs_s": harness.median(others), "ratio": ratio}
    harness.print_json(
        f"restart {what}", GOAL[what], {**figures, "ratio_by_pair": by_pair, "phases_s": phases}
    )
    return ratio <= GOAL[what]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--only", nargs="*", choices=list(GOAL), default=list(GOAL))
    args = parser.parse_args()
    n_kills = args.kills or (2 if args.quick else 5)
    is_met = True
    with tempfile.TemporaryDirectory(prefix="packtrain-bench-") as name:
        folder = Path(name)
        (folder / "model.json").write_text(json.dumps(MODEL))
        write_tokens(folder / "tokens.bin")
        for what in args.only:
            is_new = what == "new-attempt"
            kill_other = kill_ray_train if is_new else kill_torchrun
            ours, theirs = [], []
            for number in range(n_kills):
                ours.append(kill_packtrain(folder, number, new_attempt=is_new))
                theirs.append(kill_other(folder, number))
            is_met &= compare(what, ours, theirs, "Ray Train" if is_new else "torchrun")
    if not is_met:
        raise SystemExit("missed")


if __name__ == "__main__":
    main()
