"""Is a step of Packtrain as fast as the loop a user would have written by hand?

    python benchmarks/step_time.py [--quick] [--only native zero ray]

    native   the whole rank process (data, trainer, all hooks, asynchronous saves) against torch DDP
    zero     the same with ZeRO 1, 2, 3 against DeepSpeed alone with the same configuration
    ray      `packtrain run` (driver, Ray, shells, MLflow on the same cores) against torchrun, in turns

Two ranks of one thread each; native and zero in fp32 and in bf16. For these, both loops live in the same two
processes and take turns of a few steps, so both meet the same machine: a hook that stands last in the rank's
list runs the other loop between two steps. Each save falls into Packtrain's own turn, with all that the
writer does. What the rank changes for its whole process (garbage collection by schedule, DeepSpeed's slow
corners patched out) helps the other loop as well, so the ratios err against Packtrain. The ratio of CPU time
(rank 0, all its threads) is the one to look at where other programs use the machine. For ray, whole runs
alternate, and a step of `packtrain run` is the time between two lines of metrics.jsonl, hooks included: with
one rank (a machine of two cores has one left for Ray) and with two (Ray's processes take from the ranks).
Goal: ratio <= 1.02, the median over turns, each compared with the other loop's turns before and after it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

GOAL = 1.02
MODEL = {
    "vocab_size": 2048, "n_layers": 4, "d_model": 256, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32,
    "d_ff": 688, "max_seq_len": 512, "rope_theta": 10_000.0,
}  # fmt: skip
SEQ_LEN, MICRO_BATCH, RANKS = 256, 3, 2
TURN = 2
"""Steps in one turn of either loop."""
SAVE_EVERY, SAVE_TURN = 20, 4
"""A save comes at the beginning of a turn, which is longer: the writing is over when the turn is."""
WARM_TURNS = 2
WARM_STEPS = 20
"""Of a whole run: Ray's processes and MLflow are still starting beside the first ones."""


def spec_values(
    folder: Path, name: str, strategy: dict[str, Any], precision: str, steps: int
) -> dict[str, Any]:
    """A run of MODEL on the default corpus, packed as the hand-written loop packs: plain windows."""
    return {
        "run": {"name": name, "storage": str(folder / "runs")},
        "model": MODEL,
        "data": {
            "seq_len": SEQ_LEN,
            "mask_documents": False,
            "sources": [{"kind": "python", "max_bytes": 3_000_000}],
            "validation_frac": 0.0,
        },
        "optim": {"lr": 1e-3, "beta2": 0.95, "weight_decay": 0.1, "grad_clip_norm": 1.0},
        "train": {
            "steps": steps,
            "global_batch_size": MICRO_BATCH * RANKS,
            "micro_batch_size": MICRO_BATCH,
            "precision": precision,
        },
        "strategy": {**strategy, "dp": RANKS},
        "checkpoint": {"every_steps": SAVE_EVERY, "keep_last": 1},
        "tracking": {"mlflow": True, "experiment": "bench"},
    }


def write_tokens(path: Path) -> None:
    """Tokens for the hand-written loops: any will do, a step's time does not depend on them."""
    import numpy as np

    np.random.default_rng(0).integers(0, MODEL["vocab_size"], 1_000_000).astype(np.uint16).tofile(path)


# ---------------------------------------------------------------------- both loops in one process


class TakeTurns:
    """A hook that stands last: times Packtrain's steps, and between its turns lets the other loop run."""

    def __init__(self, build_other: Any, path: Path | None) -> None:
        self._build_other, self._path = build_other, path
        self._times: dict[str, list[list[float]]] = {"ours": [[]], "theirs": []}
        self._cpu_s: dict[str, list[float]] = {"ours": [], "theirs": []}
        self._resumed_at = self._resumed_cpu_s = 0.0

    def on_start(self, engine: Any, progress: Any) -> None:
        """Build the other loop, which begins."""
        self._other = self._build_other()
        self._others_turn()

    def after_step(self, record: Any, engine: Any) -> None:
        """Note the time since the other loop, or the last step, was done."""
        self._times["ours"][-1].append(time.perf_counter() - self._resumed_at)
        if record.step % TURN == TURN - 1 and record.step % SAVE_EVERY >= SAVE_TURN - 1:
            self._cpu_s["ours"].append(time.process_time() - self._resumed_cpu_s)
            self._others_turn()
            self._times["ours"].append([])
        self._resumed_at = time.perf_counter()

    def after_evaluate(self, record: Any) -> None:
        """No evaluation here."""

    def on_end(self, outcome: str, engine: Any, progress: Any) -> None:
        """Write down what was measured."""
        if self._path is not None:
            self._path.write_text(json.dumps({"seconds": self._times, "cpu_s": self._cpu_s}))

    def _others_turn(self) -> None:
        import torch.distributed as dist

        turn = []
        dist.barrier()
        began_cpu_s = time.process_time()
        for _ in range(TURN):
            begun = time.perf_counter()
            self._other.step()
            turn.append(time.perf_counter() - begun)
        self._times["theirs"].append(turn)
        self._cpu_s["theirs"].append(time.process_time() - began_cpu_s)
        dist.barrier()
        self._resumed_cpu_s = time.process_time()
        self._resumed_at = time.perf_counter()


def rank_main(run_dir: Path, data_dir: str, rank: int) -> None:
    """A rank as the fork server would make it, with the hook that takes turns added."""
    from hand_loop import DdpLoop, DeepspeedLoop, Windows
    from torch._C._distributed_c10d import FileStore

    from service import rank_training
    from service.rank_process import RankRequest, StopFlag, train_rank
    from service.run_store import read_spec

    spec = read_spec(run_dir)

    def build_other() -> Any:
        windows = Windows(run_dir.parent / "tokens.bin", MICRO_BATCH, SEQ_LEN, rank)
        if spec.strategy.kind == "native":
            return DdpLoop(spec.model, spec.train.precision, windows)
        from jobs.engines.deepspeed_zero import zero_config

        return DeepspeedLoop(spec.model, zero_config(spec), windows)

    turns = TakeTurns(build_other, run_dir / "turns.json" if rank == 0 else None)
    plain_train = rank_training.train

    def train(spec: Any, engine: Any, source: Any, progress: Any, hooks: Any, *rest: Any) -> Any:
        return plain_train(spec, engine, source, progress, [*hooks, turns], *rest)

    rank_training.train = train
    request = RankRequest(
        run_dir=str(run_dir), data_dir=data_dir, attempt=0, generation=0, rank=rank, local_rank=rank,
        node_rank=0, world_size=RANKS, local_world_size=RANKS, node="127.0.0.1", log_path="",
    )  # fmt: skip
    train_rank(request, lambda: FileStore(str(run_dir / "store"), RANKS), StopFlag(), lambda finding: None)


def take_turns(folder: Path, strategy: dict[str, Any], precision: str, n_steps: int) -> dict[str, Any]:
    """Run both loops in turns; figures of one comparison."""
    from jobs.spec.load import load_spec
    from service.run_store import create_run
    from service.runner import prepare_data

    name = f"{strategy['kind']}{strategy.get('stage', '')}-{precision}"
    path = folder / f"{name}.json"
    path.write_text(json.dumps(spec_values(folder, name, strategy, precision, n_steps)))
    spec = load_spec(path)
    prepared = prepare_data(spec, lambda line: None)
    run_dir = folder / "runs" / name
    create_run(spec, run_dir)
    write_tokens(run_dir.parent / "tokens.bin")
    output = folder / f"{name}.txt"
    with output.open("w") as out:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(run_dir), str(prepared.cache_dir)],
                env=harness.child_environment(LOCAL_RANK=str(rank)),
                stdout=out,
                stderr=out,
            )
            for rank in range(RANKS)
        ]
        if any(rank.wait(900) for rank in ranks):
            raise SystemExit(output.read_text()[-4000:])
    measured = json.loads((run_dir / "turns.json").read_text())
    seconds, cpu_s = measured["seconds"], measured["cpu_s"]
    n_theirs = len(cpu_s["ours"])
    mine = [c / len(turn) for c, turn in zip(cpu_s["ours"], seconds["ours"], strict=False)]
    other = [c / TURN for c in cpu_s["theirs"][:n_theirs]]
    cpu_ratio = harness.median(mine[WARM_TURNS:]) / harness.median(other[WARM_TURNS:])
    return {**compare(seconds["ours"], seconds["theirs"]), "cpu_ratio": cpu_ratio}


def compare(ours: list[list[float]], theirs: list[list[float]]) -> dict[str, Any]:
    """Ratio of the medians of all steps, and the spread of the ratios of turns to their neighbours."""
    turns = [
        (turn, before, after)
        for turn, before, after in zip(ours, theirs, theirs[1:], strict=False)
        if len(turn) >= TURN
    ][WARM_TURNS:]
    mine = [s for turn, _, _ in turns for s in turn]
    other = [s for _, before, _ in turns for s in before]
    by_turn = [harness.median(turn) / harness.median(before + after) for turn, before, after in turns]
    return {
        "ours_s": mine,
        "theirs_s": other,
        "ratio": harness.median(by_turn),
        "ratio_of_medians": harness.median(mine) / harness.median(other),
        "ratio_of_sums": sum(mine) / sum(other) * len(other) / len(mine),
        "ratio_by_turn": by_turn,
    }


# ---------------------------------------------------------------------- whole runs in turns


def through_ray(folder: Path, n_ranks: int, n_steps: int, n_pairs: int) -> dict[str, Any]:
    """`packtrain run` and torchrun, one after the other, n_pairs times."""
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    for pair in range(n_pairs):
        name = f"ray-{n_ranks}-{pair}"
        path = folder / f"{name}.json"
        values = spec_values(folder, name, {"kind": "native"}, "fp32", n_steps)
        values["strategy"]["dp"], values["train"]["global_batch_size"] = n_ranks, MICRO_BATCH * n_ranks
        path.write_text(json.dumps(values))
        output = folder / f"{name}.txt"
        with harness.started([harness.PACKTRAIN, "run", str(path)], output) as process:
            if process.wait(600) != 0:
                raise SystemExit(output.read_text()[-4000:])
        at = [line["at"] for line in harness.steps_of(folder / "runs" / name)]
        ours.append(harness.intervals(at, WARM_STEPS))
        model, tokens, events = (
            folder / "model.json",
            folder / "tokens.bin",
            folder / f"hand-{n_ranks}-{pair}.jsonl",
        )
        model.write_text(json.dumps(MODEL))
        write_tokens(tokens)
        words = [
            harness.TORCHRUN,
            "--standalone",
            "--nproc-per-node",
            str(n_ranks),
            str(harness.ROOT / "benchmarks/hand_loop.py"),
        ]
        words += [str(model), str(tokens), str(events), "--steps", str(n_steps)]
        words += ["--batch-size", str(MICRO_BATCH), "--seq-len", str(SEQ_LEN)]
        with harness.started(words, output) as process:
            if process.wait(600) != 0:
                raise SystemExit(output.read_text()[-4000:])
        at = [e["at"] for e in harness.json_lines(events) if e["event"] == "step"]
        theirs.append(harness.intervals(at, WARM_STEPS))
    by_run = [harness.median(a) / harness.median(b) for a, b in zip(ours, theirs, strict=True)]
    mine, other = ([s for run in side for s in run] for side in (ours, theirs))
    return {
        "ours_s": mine,
        "theirs_s": other,
        "ratio": harness.median(by_run),
        "ratio_of_medians": harness.median(mine) / harness.median(other),
        "ratio_of_sums": sum(mine) / sum(other) * len(other) / len(mine),
        "ratio_by_turn": by_run,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", default=["native", "zero", "ray"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("rank_paths", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(Path(args.rank_paths[0]), args.rank_paths[1], args.rank)
        return
    n_steps = args.steps or (40 if args.quick else 160)
    found: dict[str, dict[str, Any]] = {}

    def note(label: str, figures: dict[str, Any]) -> None:
        found[label] = figures
        print(f"{label}: {figures['ratio']:.3f}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="packtrain-bench-") as name:
        folder = Path(name)
        for precision in ("fp32", "bf16") if "native" in args.only else ():
            note(f"native {precision}", take_turns(folder, {"kind": "native"}, precision, n_steps))
        for stage in (1, 2, 3) if "zero" in args.only else ():
            for precision in ("fp32", "bf16"):
                strategy = {"kind": "deepspeed_zero", "stage": stage}
                note(f"zero{stage} {precision}", take_turns(folder, strategy, precision, n_steps))
        if "ray" in args.only:
            sizes = (60, 1) if args.quick else (160, 3)
            for n_ranks in (1, RANKS):
                note(f"native fp32, {n_ranks} ranks, through Ray", through_ray(folder, n_ranks, *sizes))
    rows = [
        [
            "comparison",
            "packtrain ms",
            "by hand ms",
            "ratio by turn",
            "of medians",
            "of sums",
            "of CPU time",
            "steps",
        ]
    ]
    for label, f in found.items():
        rows.append(
            [
                label,
                harness.spread(f["ours_s"], scale=1e3, digits=0),
                harness.spread(f["theirs_s"], scale=1e3, digits=0),
                harness.spread(f["ratio_by_turn"], digits=3),
                f"{f['ratio_of_medians']:.3f}",
                f"{f['ratio_of_sums']:.3f}",
                f"{f['cpu_ratio']:.3f}" if "cpu_ratio" in f else "",
                f"{len(f['ours_s'])}",
            ]
        )
    harness.print_table(rows)
    figures = {
        label: {
            "ours_s": harness.median(f["ours_s"]),
            "theirs_s": harness.median(f["theirs_s"]),
            "ratio": f["ratio"],
            "ratio_by_turn": [min(f["ratio_by_turn"]), max(f["ratio_by_turn"])],
            "ratio_of_medians": f["ratio_of_medians"],
            "ratio_of_sums": f["ratio_of_sums"],
            "cpu_ratio": f.get("cpu_ratio"),
        }
        for label, f in found.items()
    }
    harness.print_json("step_time", GOAL, figures)


if __name__ == "__main__":
    main()
