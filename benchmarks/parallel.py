"""Is each parallelism as fast as what others offer for it?

    python benchmarks/parallel.py [--quick] [--only tp cp ep zero]

    tp     a step with tensor (and sequence) parallelism against DTensor's plan with loss_parallel
    cp     a step with ring attention against torch's context_parallel where that runs, against the ring
           inside of it around the CPU's kernel, against gathering keys and values as one writes it first, and
           against our own all_gather method
    ep     a layer of routed experts, forward and backward, against DeepSpeed's MoE layer without dropped
           tokens and against a loop over experts on gathered tokens
    zero   a step with sharded updates against DeepSpeed ZeRO-1 and FSDP2

Pipelines have a benchmark of their own, pipeline_bubble.py. Two ranks, in fp32: gloo with one thread each, or
NCCL where there are two CUDA devices. Steps are whole ones: forward, backward, gradient norm, clipping, fused
AdamW, and the loss on every rank. The other side is on PlainLlama or on our layer, with the same start
weights and batches: before anything is timed, the losses of three steps must agree.

Both sides live in the same processes and take turns of a few steps, so both meet the same machine. Goal:
ratio <= 1.0, the median over turns, each compared with the other's turns before and after it. Where other
programs use the machine, waiting for a rank that has no core blurs times: the ratio of CPU time (rank 0, all
its threads) stands beside it.
"""

import argparse
import gc
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")  # torch reads them when it is imported

import harness
import parallel_peers as peers
import torch
import torch.distributed as dist

from jobs.comm.groups import Groups, destroy_groups, init_groups
from jobs.engines.base import MicroBatch
from jobs.engines.build import build_engine
from jobs.mesh import Mesh
from jobs.models.init import initial_value
from jobs.models.moe import Moe
from jobs.models.operations import Operations
from jobs.parallel.expert import experts_over
from jobs.spec.job import JobSpec
from jobs.spec.model import MoeSpec

GOAL = 1.0
RANKS = 2
TURN = 2
"""Steps in one turn of either side."""
CHECKED_STEPS, AGREEMENT = 3, 1e-4
LR = 1e-3
N_BATCHES = 4
"""Different ones, taken in rotation."""
MODEL = {
    "vocab_size": 4096, "n_layers": 4, "d_model": 512, "n_heads": 8, "n_kv_heads": 4, "head_dim": 64,
    "d_ff": 1408, "max_seq_len": 2048, "rope_theta": 10_000.0,
}  # fmt: skip
SEQ_LEN, LONG_SEQ_LEN = 512, 1024
D_MODEL, TOKENS = 512, 1024
"""Of the layer of experts; tokens of one rank."""
EXPERTS = MoeSpec(n_experts=8, top_k=2, d_ff=1024)

Build = Callable[[Groups, torch.device], tuple[peers.Step, peers.Step]]


@dataclass(frozen=True)
class Pair:
    """One comparison: how its two sides are made, ours first."""

    name: str
    build: Build
    counts: bool = True
    """Whether the goal is for this one."""
    may_refuse: bool = False
    """The other side may not run on this device: then its reason is reported."""


def job(strategy: dict[str, Any], seq_len: int = SEQ_LEN, **model: Any) -> JobSpec:
    """A run with one sequence on each data-parallel rank in a step."""
    return JobSpec.model_validate(
        {
            "run": {"seed": 3},
            "model": MODEL | model,
            "data": {"seq_len": seq_len},
            "optim": {"lr": LR, "beta2": 0.95, "weight_decay": 0.1, "grad_clip_norm": peers.CLIP_NORM},
            "train": {"steps": 1000, "global_batch_size": strategy.get("dp", 1), "micro_batch_size": 1},
            "strategy": {"kind": "native"} | strategy,
        }
    )


def batches(spec: JobSpec, groups: Groups, device: torch.device) -> Iterator[MicroBatch]:
    """This data-parallel rank's whole sequences, on the device."""
    generator = torch.Generator().manual_seed(groups.dp.rank)
    shape = (N_BATCHES, 1, spec.data.seq_len + 1)
    tokens = torch.randint(0, spec.model.vocab_size, shape, generator=generator).to(device)
    positions = torch.arange(spec.data.seq_len, device=device)[None]
    return itertools.cycle([MicroBatch(t[:, :-1], t[:, 1:].contiguous(), positions, None) for t in tokens])


def our_step(spec: JobSpec, groups: Groups, device: torch.device) -> peers.Step:
    """A step of the engine that a run of this spec has."""
    engine, source = build_engine(spec, groups, device), batches(spec, groups, device)
    n_valid = spec.train.global_batch_size * spec.data.seq_len
    return lambda: engine.train_step([next(source)], n_valid, LR).loss


def steps_of(spec: JobSpec, other: Callable[..., peers.Step]) -> Build:
    """Our step of a spec, and the other's, which is given the same spec, and batches of its own."""

    def build(groups: Groups, device: torch.device) -> tuple[peers.Step, peers.Step]:
        theirs = other(spec, groups, device, batches(spec, groups, device))
        return our_step(spec, groups, device), theirs

    return build


def tensor_pairs(is_cuda: bool) -> list[Pair]:
    """DTensor."""
    pairs = []
    for sequence, name in ((False, "tp"), (True, "tp+sp")):
        spec = job({"tp": RANKS, "sequence_parallel": sequence})

        def other(*place: Any, sequence: bool = sequence) -> peers.Step:
            return peers.dtensor_step(*place, sequence=sequence)

        pairs.append(Pair(f"{name} / DTensor", steps_of(spec, other)))
    return pairs


def context_pairs(is_cuda: bool) -> list[Pair]:
    """Torch's own, what one writes first, and our other method."""
    heads = {"n_kv_heads": MODEL["n_heads"]}  # torch's ring takes no groups of heads
    ring, gathering = (
        job({"cp": RANKS, "context_method": method}, LONG_SEQ_LEN, **heads)
        for method in ("ring", "all_gather")
    )

    def torch_ring(spec: JobSpec, groups: Groups, *rest: Any) -> peers.Step:
        attention = peers.torch_ring_attention(groups.cp.group)
        return peers.ddp_context_step(spec, groups, *rest, attention)

    def first_idea(spec: JobSpec, groups: Groups, device: torch.device, source: Any) -> peers.Step:
        attention = peers.gathering_attention(groups.cp, spec.data.seq_len, device)
        return peers.ddp_context_step(spec, groups, device, source, attention)

    pairs = [] if is_cuda else [Pair("cp ring / torch's ring, CPU kernel", steps_of(ring, torch_ring))]
    return [
        *pairs,
        Pair("cp ring / gathered keys, one mask", steps_of(ring, first_idea)),
        Pair(
            "cp ring / our all_gather",
            steps_of(ring, lambda _, groups, device, __: our_step(gathering, groups, device)),
            counts=False,
        ),
        # Last: what it patched in torch may stay patched where it does not run.
        Pair("cp ring / torch context_parallel", steps_of(ring, peers.torch_context_step), may_refuse=True),
    ]


def expert_pairs(is_cuda: bool) -> list[Pair]:
    """One layer, forward and backward; DeepSpeed's and the loop."""

    def layers(groups: Groups, device: torch.device) -> tuple[Moe, Moe]:
        n_held = EXPERTS.n_experts // RANKS
        held = range(groups.ep.rank * n_held, (groups.ep.rank + 1) * n_held)
        made = []
        for experts in (
            experts_over(groups.ep, groups.etp, EXPERTS.n_experts),
            peers.looping_experts(groups.ep, held),
        ):
            with device:
                layer = Moe(D_MODEL, EXPERTS, Operations(experts=experts), held)
            with torch.no_grad():
                for name, parameter in layer.named_parameters():
                    parameter.copy_(initial_value(name, tuple(parameter.shape), job({}).model, 0))
            made.append(layer)
        return made[0], made[1]

    def pass_through(layer: torch.nn.Module, groups: Groups, device: torch.device) -> peers.Step:
        generator = torch.Generator().manual_seed(groups.rank)
        x = torch.randn(1, TOKENS, D_MODEL, generator=generator).to(device).requires_grad_()
        probe = torch.randn(1, TOKENS, D_MODEL, generator=generator).to(device)

        def step() -> float:
            for tensor in (x, *layer.parameters()):
                tensor.grad = None
            out = layer(x)
            out = out[0] if isinstance(out, tuple) else out
            out.backward(probe)
            # No loss, but one figure of each pass.
            assert x.grad is not None
            return float((out.detach().square().sum() + x.grad.square().sum()).item())

        return step

    def with_deepspeed(groups: Groups, device: torch.device) -> tuple[peers.Step, peers.Step]:
        ours, _ = layers(groups, device)
        theirs = peers.deepspeed_moe(ours, EXPERTS.n_experts, D_MODEL, groups.ep)
        return pass_through(ours, groups, device), pass_through(theirs, groups, device)

    def with_loop(groups: Groups, device: torch.device) -> tuple[peers.Step, peers.Step]:
        ours, theirs = layers(groups, device)
        return pass_through(ours, groups, device), pass_through(theirs, groups, device)

    return [Pair("ep layer / DeepSpeed MoE", with_deepspeed), Pair("ep layer / loop over experts", with_loop)]


def zero_pairs(is_cuda: bool) -> list[Pair]:
    """DeepSpeed and FSDP2."""
    ours = job({"dp": RANKS, "zero_stage": 1})
    theirs = job({"kind": "deepspeed_zero", "dp": RANKS, "stage": 1})

    def deepspeed(_: JobSpec, *place: Any) -> peers.Step:
        return peers.deepspeed_zero_step(theirs, *place)

    return [
        Pair("zero-1 / DeepSpeed ZeRO-1", steps_of(ours, deepspeed)),
        Pair("zero-1 / FSDP2", steps_of(ours, peers.fsdp2_step)),
    ]


QUESTIONS: dict[str, tuple[Mesh, Callable[[bool], list[Pair]]]] = {
    "tp": (Mesh(tp=RANKS), tensor_pairs),
    "cp": (Mesh(cp=RANKS), context_pairs),
    "ep": (Mesh(dp=RANKS, ep=RANKS), expert_pairs),
    "zero": (Mesh(dp=RANKS), zero_pairs),
}


# ---------------------------------------------------------------------- turns


def rank_main(question: str, rank: int, store: str, n_turns: int, is_cuda: bool, replies: Any) -> None:
    """One rank: every comparison of a question, one after another; rank 0 replies with the figures."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))  # DeepSpeed asks for them
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    mesh, pairs_of = QUESTIONS[question]
    groups = init_groups(mesh, rank, dist.FileStore(store, RANKS), "nccl" if is_cuda else "gloo", 300.0)
    for pair in pairs_of(is_cuda):
        figures: dict[str, Any] = {"name": pair.name, "counts": pair.counts}
        try:
            figures |= take_turns(pair, groups, device, n_turns)
        except Exception as error:
            if not pair.may_refuse:
                raise
            figures["refused"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        if rank == 0:
            replies.send(figures)
        gc.collect()
    destroy_groups(groups)


def take_turns(pair: Pair, groups: Groups, device: torch.device, n_turns: int) -> dict[str, Any]:
    """Check that both sides compute the same, then let them take turns; the other side begins and ends."""
    ours, theirs = pair.build(groups, device)
    for _ in range(CHECKED_STEPS):
        mine, other = ours(), theirs()
        if not abs(mine - other) <= AGREEMENT * abs(other):
            raise ValueError(f"{pair.name}: ours computes {mine}, the other {other}")
    turns: dict[str, list[tuple[list[float], float]]] = {"ours": [], "theirs": []}
    for _ in range(n_turns):
        turns["theirs"].append(one_turn(theirs, device))
        turns["ours"].append(one_turn(ours, device))
    turns["theirs"].append(one_turn(theirs, device))
    seconds = {side: [steps for steps, _ in taken] for side, taken in turns.items()}
    cpu_s = {side: harness.median([cpu for _, cpu in taken]) for side, taken in turns.items()}
    around = [before + after for before, after in itertools.pairwise(seconds["theirs"])]
    by_turn = harness.ratios(
        [harness.median(t) for t in seconds["ours"]], [harness.median(t) for t in around]
    )
    return {
        "ours_s": [s for turn in seconds["ours"] for s in turn],
        "theirs_s": [s for turn in seconds["theirs"] for s in turn],
        "ratio_by_turn": by_turn,
        "ratio": harness.median(by_turn),
        "cpu_ratio": cpu_s["ours"] / cpu_s["theirs"],
    }


def one_turn(step: peers.Step, device: torch.device) -> tuple[list[float], float]:
    """Seconds of each step, and of CPU time for all."""
    dist.barrier()
    taken, begun_cpu_s = [], time.process_time()
    for _ in range(TURN):
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begun)
    return taken, time.process_time() - begun_cpu_s


def measure(question: str, n_turns: int, is_cuda: bool) -> list[dict[str, Any]]:
    """All comparisons of a question, in two fresh processes."""
    context = multiprocessing.get_context("spawn" if is_cuda else "fork")
    received, sent = context.Pipe(duplex=False)
    found = []
    with tempfile.TemporaryDirectory(prefix="packtrain-bench-") as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(
                target=rank_main, args=(question, rank, store, n_turns, is_cuda, sent), daemon=True
            )
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        sent.close()
        try:
            while True:
                found.append(received.recv())
                print(f"{found[-1]['name']}: {verdict(found[-1])}", file=sys.stderr, flush=True)
        except EOFError:
            pass
        finally:
            for process in ranks:
                process.join(60)
                process.kill()
        if any(process.exitcode != 0 for process in ranks):
            raise SystemExit(f"{question}: a rank failed")
    return found


def verdict(figures: dict[str, Any]) -> str:
    """In a word: met, missed, no goal, or why it does not run."""
    if "refused" in figures:
        return f"does not run here ({figures['refused']})"
    goal = "no goal" if not figures["counts"] else "met" if figures["ratio"] <= GOAL else "missed"
    return f"{figures['ratio']:.3f}, {goal}"


def main() -> None:
    """Measure, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", choices=list(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--turns", type=int)
    args = parser.parse_args()
    is_cuda = torch.cuda.device_count() >= RANKS
    n_turns = args.turns or (5 if args.quick else 15)
    found = [figures for question in args.only for figures in measure(question, n_turns, is_cuda)]
    rows = [["ours / other", "ours ms", "other ms", "ratio by turn", "of CPU time", "goal"]]
    for f in found:
        if "refused" in f:
            rows.append([f["name"], "", "", "", "", verdict(f)])
            continue
        times = [harness.spread(f[side], scale=1e3, digits=0) for side in ("ours_s", "theirs_s")]
        ratios = [harness.spread(f["ratio_by_turn"], digits=3), f"{f['cpu_ratio']:.3f}"]
        rows.append([f["name"], *times, *ratios, verdict(f).split(", ")[1]])
    harness.print_table(rows)
    figures = {
        f["name"]: {
            "ours_s": harness.median(f["ours_s"]),
            "theirs_s": harness.median(f["theirs_s"]),
            "ratio": f["ratio"],
            "ratio_by_turn": [min(f["ratio_by_turn"]), max(f["ratio_by_turn"])],
            "cpu_ratio": f["cpu_ratio"],
            "ok": f["ratio"] <= GOAL if f["counts"] else None,
        }
        if "refused" not in f
        else {"refused": f["refused"]}
        for f in found
    }
    backend = "nccl" if is_cuda else "gloo"
    harness.print_json("parallel", GOAL, {"backend": backend, "ranks": RANKS, **figures})


if __name__ == "__main__":
    main()
