"""How long from the command to the first trained step, against a plain TorchTrainer script?

    python benchmarks/start_time.py [--quick] [--pairs 5]

Both embed a Ray cluster with two workers and train the same model; each start is a fresh process, the two
alternate, and one start of each beforehand warms the page cache. Packtrain's data is prepared already. The
clock begins before the process is made and ends when the first step is written down. Also prints where
Packtrain's seconds go. Goal: ratio of medians <= 1.2.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness
from step_time import MODEL, spec_values, write_tokens

GOAL = 1.2
PHASES = ("connected", "attempt", "shells", "forked", "first step")
"""imports, checks and ray.init | until fit() is called | until both shells start their fork servers | until
both ranks are forked (imports and joining) | groups, engine, data, peak measurement, one step"""


def start_packtrain(folder: Path, number: int) -> dict[str, float]:
    """Seconds of each phase of one start, and their sum."""
    name = f"start-{number}"
    path, run_dir = folder / f"{name}.json", folder / "runs" / name
    values = spec_values(folder, name, {"kind": "native"}, "fp32", 3)
    path.write_text(json.dumps(values))
    logs = run_dir / "logs" / "attempt-000"
    watched = {
        "connected": [run_dir / "run.json"],
        "shells": [logs / f"forkserver-{rank:05d}.log" for rank in range(2)],
        "forked": [logs / f"rank-{rank:05d}.log" for rank in range(2)],
    }
    seen: dict[str, float] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02) and len(seen) < len(watched):
            for phase, paths in watched.items():
                if phase not in seen and all(p.exists() for p in paths):
                    seen[phase] = time.time()

    watcher = threading.Thread(target=watch)
    begun_at = time.time()
    watcher.start()
    output = folder / f"{name}.txt"
    with harness.started([harness.PACKTRAIN, "run", str(path)], output) as process:
        is_done = process.wait(300) == 0
    is_over.set()
    watcher.join()
    if not is_done:
        raise SystemExit(output.read_text()[-4000:])
    events = harness.events_of(run_dir)
    seen["attempt"] = next(e["at"] for e in events if e["kind"] == "attempt_started")
    seen["first step"] = harness.steps_of(run_dir)[0]["at"]
    times = [begun_at, *(seen[phase] for phase in PHASES)]
    phases = {phase: b - a for phase, a, b in zip(PHASES, times, times[1:], strict=False)}
    return {**phases, "total": times[-1] - begun_at}


def start_plain(folder: Path, number: int) -> float:
    """Seconds to the first step of the plain script."""
    output, events = folder / f"plain-{number}.txt", folder / f"plain-{number}.jsonl"
    script = str(harness.ROOT / "benchmarks" / "plain_ray.py")
    words = [sys.executable, script, str(folder / "model.json"), str(folder / "tokens.bin"), str(events)]
    begun_at = time.time()
    paths = f"{harness.ROOT / 'benchmarks'}:{harness.ROOT}"  # its workers are no children of this script
    with harness.started(words, output, PYTHONPATH=paths) as process:
        if process.wait(300) != 0:
            raise SystemExit(output.read_text()[-4000:])
    return harness.json_lines(events)[0]["at"] - begun_at


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pairs", type=int)
    args = parser.parse_args()
    n_pairs = args.pairs or (1 if args.quick else 5)
    ours: list[dict[str, Any]] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory(prefix="packtrain-bench-") as name:
        folder = Path(name)
        (folder / "model.json").write_text(json.dumps(MODEL))
        write_tokens(folder / "tokens.bin")
        for number in range(n_pairs + 1):
            one, other = start_packtrain(folder, number), start_plain(folder, number)
            if number:  # the first pair warms the page cache and prepares the data
                ours.append(one)
                theirs.append(other)
    totals = [one["total"] for one in ours]
    by_pair = harness.ratios(totals, theirs)
    rows = [["seconds to the first step", "median [min..max]"]]
    rows += [["packtrain run", harness.spread(totals)], ["plain TorchTrainer", harness.spread(theirs)]]
    rows += [["ratio by pair", harness.spread(by_pair)]]
    rows += [[f"  packtrain: {phase}", harness.spread([one[phase] for one in ours])] for phase in PHASES]
    harness.print_table(rows)
    harness.print_json(
        "start_time",
        GOAL,
        {
            "ours_s": harness.median(totals),
            "theirs_s": harness.median(theirs),
            "ratio": harness.median(totals) / harness.median(theirs),
            "ratio_by_pair": by_pair,
            "phases_s": {phase: harness.median([one[phase] for one in ours]) for phase in PHASES},
        },
    )


if __name__ == "__main__":
    main()
