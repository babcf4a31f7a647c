"""How much of a pipeline's step is idle, and is it what the schedule promises?

    python benchmarks/pipeline_bubble.py [--rounds N] [--draw FILE.svg]

Two ranks of one thread each run real steps (gloo, fp32) of one model whose stages cost the same: the
embedding and the head are small, and an action takes long beside what it hands over. All schedules live in
the same two processes and take turns of one step, so they meet the same machine; ranks begin each step
together. A figure is the median over the rounds of 1 - busy / (ranks * span), from the trace that
jobs/parallel/pipeline.py records of every step.

Beside it stands what the schedule has where sending costs nothing: for 1F1B (p - 1) / (m + p - 1) of the span
(arXiv 2104.04473, 2.2: (p - 1) / m of the busy time). Another program on either core makes one rank wait for
the other, which shows as bubble: look at load_1min in the JSON line. --draw writes what the ranks did in each
schedule's step of median bubble, to scale, with the larger number of micro-batches.
Goal: 1F1B within 15 % of that, interleaved and zero-bubble below 1F1B with as many micro-batches.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")  # torch reads them when it is imported

import harness
import torch
import torch.distributed as dist

from jobs.comm.groups import Groups, destroy_groups, init_groups
from jobs.engines.base import MicroBatch
from jobs.mesh import Mesh
from jobs.models.init import initial_value, take_parameters
from jobs.models.llama import Llama
from jobs.parallel.pipeline import Pipeline
from jobs.planner.bubble import ActionKind, Trace, bubble_frac, ideal_bubble, span_s
from jobs.planner.stages import Stage, plan_stages
from jobs.spec.data import DataSpec
from jobs.spec.job import JobSpec, RunSection, TrainSection
from jobs.spec.model import ModelSpec
from jobs.spec.optim import OptimSpec
from jobs.spec.strategy import NativeStrategy, PipelineSchedule, PipelineSection
from service.env import RANK_MEMORY

GOAL = 0.15
RANKS = 2
MICRO_BATCH, SEQ_LEN = 6, 128
MODEL = ModelSpec(
    vocab_size=64,
    n_layers=8,
    d_model=512,
    n_heads=16,
    n_kv_heads=16,
    head_dim=32,
    d_ff=2816,
    max_seq_len=SEQ_LEN,
)
SCHEDULES: list[tuple[PipelineSchedule, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_zero_bubble", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 2),
    ("dualpipev", 2),
]
MICRO_BATCHES = (4, 8)
COLOURS: dict[ActionKind, str] = {
    "forward": "#5b8def",
    "loss": "#8a63d2",
    "backward": "#4caf7a",
    "backward_input": "#2f9e8f",
    "backward_weight": "#e0a23b",
}
Key = tuple[PipelineSchedule, int, int]
"""Schedule, stages a rank, micro-batches."""
Models = dict[Stage, Llama]
"""Schedules with the same stages share them: weights that rest for a minute are slow at their next step."""


def build(
    schedule: PipelineSchedule, stages_per_rank: int, n_micro_batches: int, groups: Groups, models: Models
) -> Pipeline:
    """This rank's stages of one schedule, with start weights."""
    section = PipelineSection(schedule=schedule, stages_per_rank=stages_per_rank)
    spec = JobSpec(
        run=RunSection(),
        model=MODEL,
        data=DataSpec(seq_len=SEQ_LEN),
        optim=OptimSpec(lr=1e-3),
        train=TrainSection(
            steps=1, global_batch_size=MICRO_BATCH * n_micro_batches, micro_batch_size=MICRO_BATCH
        ),
        strategy=NativeStrategy(pp=RANKS, pipeline=section),
    )
    held = []
    for stage in plan_stages(MODEL, RANKS, schedule, stages_per_rank):
        if stage.pp_rank != groups.pp.rank:
            continue
        if stage not in models:
            models[stage] = built(stage)
        held.append((stage, models[stage]))
    return Pipeline(held, spec, groups, torch.device("cpu"))


def built(stage: Stage) -> Llama:
    """A stage's part of the model."""
    with torch.device("meta"):
        model = Llama(MODEL, None, stage.layers, is_first=stage.is_first, is_last=stage.is_last)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    take_parameters(model, {name: initial_value(name, shape, MODEL, 0) for name, shape in shapes.items()})
    return model


def measure(rank: int, store: str, rounds: int, replies: Any) -> None:
    """One rank: its traces of every step, warm-up left out."""
    torch.set_num_threads(1)
    groups = init_groups(Mesh(pp=RANKS), rank, dist.FileStore(store, RANKS), "gloo", timeout_s=120.0)
    keys: list[Key] = [(name, each, m) for name, each in SCHEDULES for m in MICRO_BATCHES]
    models: Models = {}
    pipelines = {key: build(*key, groups, models) for key in keys}
    tokens = torch.randint(0, MODEL.vocab_size, (MICRO_BATCH, SEQ_LEN))
    batch = MicroBatch(tokens, tokens, torch.arange(SEQ_LEN).expand_as(tokens), None)
    traces: dict[Key, list[Trace]] = {key: [] for key in keys}
    for round_number in range(rounds + 1):
        for key, pipeline in pipelines.items():
            dist.barrier()
            pipeline.run([batch] * key[2], scale=1.0)
            if round_number > 0:
                traces[key].append(pipeline.last_trace())
    replies.send(traces)
    destroy_groups(groups)


def picture(steps: dict[str, list[Trace]]) -> str:
    """An SVG: of each step one row a rank, time to the right, later stages darker; gaps are the bubble."""
    width, height, left = 1000, 22, 10
    lines, top = [], 0
    for title, traces in steps.items():
        scale = width / max(span_s(trace) for trace in traces)
        lines.append(f'<text x="{left}" y="{top + 18}" font-size="13">{title}</text>')
        top += 26
        for trace in traces:
            first = min(action.stage for action in trace)
            for action in trace:
                x, w = left + action.start_s * scale, (action.end_s - action.start_s) * scale
                opacity = 0.55 if action.stage == first else 0.95
                lines.append(
                    f'<rect x="{x:.1f}" y="{top}" width="{w:.1f}" height="{height - 2}" stroke="white" '
                    f'stroke-width="0.5" fill="{COLOURS[action.kind]}" fill-opacity="{opacity}"/>'
                )
                if w > 12:
                    lines.append(
                        f'<text x="{x + w / 2:.1f}" y="{top + 14}" font-size="10" text-anchor="middle">'
                        f"{action.micro_batch}</text>"
                    )
            top += height
        top += 8
    top += 22
    for number, (kind, colour) in enumerate(COLOURS.items()):
        x = left + 150 * number
        lines.append(f'<rect x="{x}" y="{top - 16}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 17}" y="{top - 6}" font-size="12">{kind.replace("_", " ")}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 2 * left} {top + 6}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *lines, "</svg>", ""])


def main() -> None:
    """Measure, print the table and the JSON line, and fail where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draw", type=Path, help="write the steps of median bubble as SVG")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=measure, args=(rank, store, arguments.rounds, pipes[rank][1]))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        per_rank: list[dict[Key, list[Trace]]] = [ours.recv() for ours, _ in pipes]
        for process in ranks:
            process.join()
    bubbles = {
        key: [bubble_frac(step) for step in zip(*(traces[key] for traces in per_rank), strict=True)]
        for key in per_rank[0]
    }
    rows = [["schedule", "stages a rank", "micro-batches", "measured [smallest..largest]", "ideal"]]
    for (name, each, m), measured in bubbles.items():
        ideal = ideal_bubble(name, RANKS, m, each)
        rows.append([name, str(each), str(m), harness.spread(measured, digits=3), f"{ideal:.3f}"])
    harness.print_table(rows)
    if arguments.draw:
        most = max(MICRO_BATCHES)
        at = {key: sorted(range(len(x)), key=x.__getitem__)[len(x) // 2] for key, x in bubbles.items()}
        arguments.draw.write_text(
            picture(
                {
                    f"{key[0]}, {key[1]} stages a rank: bubble {bubbles[key][at[key]]:.3f}": [
                        traces[key][at[key]] for traces in per_rank
                    ]
                    for key in bubbles
                    if key[2] == most
                }
            )
        )
    missed = misses({key: harness.median(measured) for key, measured in bubbles.items()})
    figures = {f"{name} v{each} m{m}": harness.median(x) for (name, each, m), x in bubbles.items()}
    harness.print_json("pipeline_bubble", GOAL, {**figures, "ok": not missed})
    if missed:
        raise SystemExit("\n".join(missed))


def misses(measured: dict[Key, float]) -> list[str]:
    """What the goal asks for and the figures do not show."""
    found = []
    for m in MICRO_BATCHES:
        plain = measured["1f1b", 1, m]
        ideal = ideal_bubble("1f1b", RANKS, m)
        if abs(plain / ideal - 1) > GOAL:
            found.append(f"1f1b with {m} micro-batches: measured {plain:.3f}, ideal {ideal:.3f}")
        found += [
            f"{name} with {m} micro-batches: measured {value:.3f}, 1f1b {plain:.3f}"
            for (name, _, n), value in measured.items()
            if n == m and name not in ("gpipe", "1f1b") and value >= plain
        ]
    return found


if __name__ == "__main__":
    if "GLIBC_TUNABLES" not in os.environ:  # as in a rank process; glibc reads it at the start only
        os.environ["GLIBC_TUNABLES"] = RANK_MEMORY
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
