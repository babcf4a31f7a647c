"""How long does a save block training, against torch.save of the same state? How fast are saves and loads?

    python benchmarks/checkpoint.py [--mib 1024] [--rounds 7] [--folder DIR]

One process and one rank; the two ways alternate, so that both meet the same disk and the same neighbours.
torch.save writes to the page cache only (no fsync), which favours it. Prints one JSON object; times are
medians.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from jobs.events import Progress
from jobs.mesh import Mesh
from jobs.state import Chunk
from ops.checkpoint.layout import folder_name
from ops.checkpoint.manifest import Identity
from ops.checkpoint.reader import check_shards, load_into, open_checkpoint
from ops.checkpoint.writer import AsyncWriter, Peers


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
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="packtrain-bench-", dir=args.folder))
    state = make_state(args.mib)
    n_bytes = sum(t.nbytes for t in state.values())
    chunks = [Chunk(n, tuple(t.shape), (0, 0), t, is_writer=True) for n, t in state.items()]
    events = []
    writer = AsyncWriter(
        folder, Identity("{}", "native", Mesh()), Peers(), lambda kind, f: events.append((kind, f))
    )
    writer.prepare(chunks)
    plain_s, blocked_s, verify_s, load_s, verified_load_s = [], [], [], [], []
    try:
        for step in range(args.rounds):
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
    mid = statistics.median

    def gb_per_s(seconds):
        return round(n_bytes / mid(seconds) / 1e9, 2)

    print(
        json.dumps(
            {
                "n_bytes": n_bytes,
                "torch_save_s": round(mid(plain_s), 4),
                "blocked_s": round(mid(blocked_s), 4),
                "ratio": round(mid(blocked_s) / mid(plain_s), 3),
                "ratio_by_round": [round(b / p, 3) for b, p in zip(blocked_s, plain_s, strict=True)],
                "write_with_fsync_gb_per_s": gb_per_s(write_s),
                "verify_gb_per_s": gb_per_s(verify_s),
                "load_gb_per_s": gb_per_s(load_s),
                "verified_load_gb_per_s": gb_per_s(verified_load_s),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
