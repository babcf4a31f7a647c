"""Straggler causes out of files: timelines in Chrome's trace format, and results of a what-if analysis.

Both as the public StragglerAnalysis tool writes them. Judges what-if results by itself; timelines become
passes for ops/monitors/straggler.py.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ops.monitors.straggler import HALF, THRESHOLD_FRAC, Cause, Pass, Pause, Straggler

_THREAD = re.compile(r"PP rank (\d+), TP rank (\d+), compute")
_KINDS: dict[str, Literal["forward", "backward"]] = {
    "forward-compute": "forward",
    "backward-compute": "backward",
}
_PAUSES: dict[str, Literal["data", "garbage_collection"]] = {"gc": "garbage_collection", "data": "data"}


def read_timeline(events: Iterable[Mapping[str, Any]]) -> tuple[list[Pass], list[Pause]]:
    """Passes and pauses of a timeline; what is not a computing thread's is left out.

    Args:
        events: trace events: pid is the replica, thread names say "PP rank p, TP rank t, compute", dur is in
            microseconds. Ranks are numbered with tp innermost, then pp, then dp.
    """
    events = list(events)
    places: dict[tuple[int, int], tuple[int, int, int]] = {}
    for event in events:
        name = str(event["args"].get("name", "")) if event.get("name") == "thread_name" else ""
        if found := _THREAD.fullmatch(name):
            places[event["pid"], event["tid"]] = (event["pid"], int(found[1]), int(found[2]))
    pp = 1 + max((stage for _, stage, _ in places.values()), default=0)
    tp = 1 + max((tp_rank for _, _, tp_rank in places.values()), default=0)
    passes, pauses = [], []
    for event in events:
        place = places.get((event.get("pid", -1), event.get("tid", -1)))
        if event.get("ph") != "X" or place is None:
            continue
        replica, stage, tp_rank = place
        rank = (replica * pp + stage) * tp + tp_rank
        step, seconds = int(event["args"]["step"]), event["dur"] / 1e6
        if kind := _KINDS.get(event["name"]):
            chunk, number = event["args"].get("model_chunk") or 0, event["args"].get("mb_id") or 0
            passes.append(Pass(step, rank, replica, stage, 1000 * chunk + number, kind, seconds))
        elif pause := _PAUSES.get(event["name"]):
            pauses.append(Pause(step, rank, pause, seconds))
    return passes, pauses


def judge_what_if(
    result: Mapping[str, Any],
    fixed_workers: Mapping[str, float] | None = None,
    fixed_stage: Mapping[str, float] | None = None,
    threshold: float = THRESHOLD_FRAC,
) -> Straggler | None:
    """The main cause that a what-if analysis shows; None: the slowdown is below the threshold.

    Args:
        result: `blocking_slowdown` and its decompositions: slowdown with only this replica's (stage's,
            operation's) passes as they were and all others ideal.
        fixed_workers: `Mw`: share of the slowdown that goes away with the slowest few workers put right.
        fixed_stage: `Ms`: the same for the last stage.
        threshold: share of a step.
    """
    total = float(result["blocking_slowdown"]) - 1.0
    if total < threshold:
        return None
    meta = result["job_meta"]
    n_stages, n_replicas = int(meta["pp_size"]), int(meta["dp_size"])
    replica, replica_share = _stands_alone(result["blocking_decompose_by_dp_rank"], total)
    stage, stage_share = _stands_alone(result["blocking_decompose_by_stage"], total)
    worker_share = min(replica_share, stage_share) if n_stages > 1 else replica_share
    if n_stages == 1:
        stage_share = 0.0
    if n_replicas == 1:
        # A slow rank and a stage with much to do look the same here.
        worker_share, stage_share = 0.0, min(stage_share, HALF)
    is_alone = worker_share >= HALF
    if fixed_workers is not None:
        worker_share = max(0.0, min(1.0, fixed_workers["Mw"]))
    if fixed_stage is not None and stage == n_stages - 1 and n_replicas > 1:
        stage_share = (stage_share + max(0.0, min(1.0, fixed_stage["Ms"]))) / 2
    op, op_share = _dearest_operation(result["blocking_decompose_by_optype"], total)
    shares = {Cause.WORKER: worker_share, Cause.STAGE: min(stage_share, 1.0 - worker_share)}
    if op == "gc":
        shares[Cause.GARBAGE_COLLECTION] = op_share
    if max(shares.values()) >= HALF:
        cause = max(shares, key=lambda c: shares[c])
        confidence = shares[cause]
    elif op.endswith("-compute"):
        cause, confidence = Cause.SEQUENCE, 1.0 - max(shares.values())
    else:
        cause, confidence = Cause.COMMUNICATION, min(1.0, op_share)
    is_worker = cause is Cause.WORKER and is_alone
    names_stage = is_worker or cause is Cause.STAGE
    tp = int(meta["tp_size"])
    first = (replica * n_stages + stage) * tp
    place = {
        Cause.WORKER: f"replica {replica}, stage {stage}" if is_alone else "a few workers",
        Cause.STAGE: f"stage {stage} on all replicas",
        Cause.SEQUENCE: "the passes of no one rank or stage",
    }.get(cause, op)
    return Straggler(
        cause=cause,
        score=total,
        threshold=threshold,
        confidence=round(min(1.0, confidence), 3),
        ranks=tuple(range(first, first + tp)) if is_worker else (),
        stage=stage if names_stage else None,
        replica=replica if is_worker else None,
        reason=f"steps are {total:.1%} longer than ideal; {place} account for {confidence:.0%} of it",
    )


def _stands_alone(slowdowns: Mapping[str, float], total: float) -> tuple[int, float]:
    """Who slows most, and the share of the whole slowdown by which it is ahead of the second."""
    excess = sorted(((float(v) - 1.0, int(k)) for k, v in slowdowns.items()), reverse=True)
    second = max(0.0, excess[1][0]) if len(excess) > 1 else 0.0
    return excess[0][1], max(0.0, min(1.0, (excess[0][0] - second) / total))


def _dearest_operation(slowdowns: Mapping[str, float], total: float) -> tuple[str, float]:
    name = max(slowdowns, key=lambda n: slowdowns[n])
    return name, (float(slowdowns[name]) - 1.0) / total
