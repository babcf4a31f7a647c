"""How long does a save block training, against torch.save of the same state? How fast are saves and loads?

    python benchmarks/checkpoint.py [--quick] [--mib 1024] [--rounds 7] [--folder DIR]

One process and one rank; the two ways alternate, so that both meet the same disk and the same neighbours.
torch.save writes to the page cache only (no fsync), which favours it. The host buffer of a save is allocated
and touched beforehand, as a run does before its first step. Goal: ratio of medians <= 0.15.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import harness
import torch

from jobs.events import Progress
from jobs.mesh import Mesh
from jobs.state import Chunk
from ops.checkpoint.layout import folder_name
from ops.checkpoint.manifest import Identity
from ops.checkpoint.reader import check_shards, load_into, open_checkpoint
from ops.checkpoint.writer import AsyncWriter, Peers
from service.env import RANK_MEMORY

GOAL = 0.15


def make_state(mib: int) -> dict[str, torch.Tensor]:
    """Weights and two moments of a model with matrices of 4 MiB."""
    n_matrices = max(1, mib // 12)
    return {
        f"{kind}/layers.{i}.weight": torch.randn(1024, 1024)
        for kind in ("model", "optim/exp_avg", "optim/exp_avg_sq")
        for i in range(n_matrices)
    }


def timed(action):
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--mib", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    mib, rounds = args.mib or (256 if args.quick else 1024), args.rounds or (3 if args.quick else 7)
    folder = Path(tempfile.mkdtemp(prefix="packtrain-bench-", dir=args.folder))
    state = make_state(mib)
    n_bytes = sum(t.nbytes for t in state.values())
    chunks = [Chunk(n, tuple(t.shape), (0, 0), t, is_writer=True) for n, t in state.items()]
    events = []
    writer = AsyncWriter(
        folder, Identity("{}", "native", Mesh()), Peers(), lambda kind, f: events.append((kind, f))
    )
    writer.prepare(chunks)
    plain_s, blocked_s, verify_s, load_s, verified_load_s = [], [], [], [], []
    try:
        for step in range(rounds):
            plain = folder / "plain.pt"
            plain_s.append(timed(lambda path=plain: torch.save(state, path)))
            plain.unlink()
            os.sync()
            blocked_s.append(timed(lambda step=step: writer.save(chunks, Progress(step))))
            if not writer.wait(600):
                raise SystemExit(f"the save failed: {events[-1]}")
            ref = open_checkpoint(folder / folder_name(step))
            verify_s.append(timed(lambda ref=ref: check_shards(ref, [0])))
            load_s.append(timed(lambda ref=ref: load_into(ref, chunks, verify=False)))
            verified_load_s.append(timed(lambda ref=ref: load_into(ref, chunks)))
            shutil.rmtree(ref.path)
    finally:
        shutil.rmtree(folder)
    write_s = [f["write_s"] for kind, f in events if kind == "checkpoint_committed"]
    by_round = harness.ratios(blocked_s, plain_s)
    rows = [["", "seconds", "GB/s"]]
    for label, seconds in (
        ("torch.save", plain_s),
        ("save: training blocked", blocked_s),
        ("save: written and synced", write_s),
        ("verify", verify_s),
        ("load", load_s),
        ("load, verified", verified_load_s),
    ):
        rows.append(
            [label, harness.spread(seconds, digits=3), f"{n_bytes / harness.median(seconds) / 1e9:.2f}"]
        )
    rows.append(["ratio by round", harness.spread(by_round, digits=3), ""])
    harness.print_table(rows)
    harness.print_json(
        "checkpoint",
        GOAL,
        {
            "n_bytes": n_bytes,
            "ours_s": harness.median(blocked_s),
            "theirs_s": harness.median(plain_s),
            "ratio": harness.median(blocked_s) / harness.median(plain_s),
            "ratio_by_round": by_round,
            "write_s": harness.median(write_s),
            "verify_s": harness.median(verify_s),
            "load_s": harness.median(load_s),
            "verified_load_s": harness.median(verified_load_s),
        },
    )


if __name__ == "__main__":
    if "GLIBC_TUNABLES" not in os.environ:  # as in a rank process; glibc reads it at the start only
        os.environ["GLIBC_TUNABLES"] = RANK_MEMORY
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
