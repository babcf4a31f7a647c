"""The loops that a user would write by hand for the same model: what Packtrain is measured against.

    torchrun --nproc-per-node 2 benchmarks/hand_loop.py MODEL.json TOKENS.bin EVENTS.jsonl [--steps N] ...

DdpLoop is torch's DistributedDataParallel, DeepspeedLoop is deepspeed.initialize. Both read random windows of
a memory-mapped token file, clip, and average the loss over ranks for the log. As good as a careful user
makes them (fused AdamW, gradients as bucket views), and nothing of Packtrain in them but the model.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

BEGUN_AT = time.time()

import numpy as np  # noqa: E402 - the time before the imports is one of the figures
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from jobs.models.llama import Llama  # noqa: E402
from jobs.spec.model import ModelSpec  # noqa: E402

BETAS, WEIGHT_DECAY, CLIP_NORM, LR = (0.9, 0.95), 0.1, 1.0, 1e-3


def build_model(spec: ModelSpec) -> Llama:
    """Start weights as GPT-2 has them."""
    torch.manual_seed(0)
    model = Llama(spec)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def build_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)


class Windows:
    """Random windows of a file of uint16 tokens."""

    def __init__(self, path: Path, batch_size: int, seq_len: int, rank: int) -> None:
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self._batch_size, self._seq_len = batch_size, seq_len
        self._random = np.random.default_rng(rank)
        self._positions = torch.arange(seq_len).expand(batch_size, seq_len)

    def next(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, labels and positions, [B, S] each."""
        starts = self._random.integers(0, len(self._tokens) - self._seq_len - 1, self._batch_size)
        rows = np.stack([self._tokens[start : start + self._seq_len + 1] for start in starts])
        whole = torch.from_numpy(rows.astype(np.int64))
        return whole[:, :-1], whole[:, 1:], self._positions


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the batch, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class DdpLoop:
    """torch DDP; bf16 is autocast over fp32 weights."""

    def __init__(self, spec: ModelSpec, precision: str, windows: Windows) -> None:
        self.model = build_model(spec)
        self.optimizer = build_optimizer(self.model)
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._windows = windows
        self._casts = precision == "bf16"

    def step(self) -> tuple[float, float]:
        """One optimizer step; returns loss (mean over ranks) and gradient norm."""
        tokens, labels, positions = self._windows.next()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if self._casts else nullcontext():
            loss = cross_entropy(self._ddp(tokens, positions, None), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        logged = loss.detach()
        dist.all_reduce(logged)
        return logged.item() / dist.get_world_size(), norm.item()


class DeepspeedLoop:
    """DeepSpeed alone, with the configuration it is given."""

    def __init__(self, spec: ModelSpec, config: dict[str, Any], windows: Windows) -> None:
        import deepspeed

        model = build_model(spec)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model), config=config, dist_init_required=False
        )
        self._windows = windows

    def step(self) -> tuple[float, float]:
        """One optimizer step; returns loss (mean over ranks) and gradient norm."""
        tokens, labels, positions = self._windows.next()
        loss = cross_entropy(self._engine(tokens, positions, None), labels)
        self._engine.backward(loss)
        self._engine.step()
        logged = loss.detach()
        dist.all_reduce(logged)
        return logged.item() / dist.get_world_size(), float(self._engine.get_global_grad_norm())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("events", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--every", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    log = args.events.open("a", buffering=1) if rank == 0 else None

    def note(event: str, at: float | None = None, **fields: Any) -> None:
        if log is not None:
            log.write(
                json.dumps({"event": event, "at": at or time.time(), "pid": os.getpid(), **fields}) + "\n"
            )

    note("begun", BEGUN_AT)
    note("imported")
    dist.init_process_group("gloo")
    note("joined")
    spec = ModelSpec.model_validate_json(args.model.read_text())
    loop = DdpLoop(spec, args.precision, Windows(args.tokens, args.batch_size, args.seq_len, rank))
    first = 0
    if args.checkpoint is not None and args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        loop.model.load_state_dict(saved["model"])
        loop.optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    note("loaded", step=first)
    for step in range(first + 1, args.steps + 1):
        begun = time.monotonic()
        loss, norm = loop.step()
        note("step", step=step, loss=loss, grad_norm=norm, step_time_s=time.monotonic() - begun)
        if args.checkpoint is not None and step % args.every == 0 and rank == 0:
            state = {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict(), "step": step}
            torch.save(state, args.checkpoint.with_suffix(".tmp"))
            args.checkpoint.with_suffix(".tmp").replace(args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
