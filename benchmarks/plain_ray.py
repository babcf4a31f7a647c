"""The smallest TorchTrainer script for the same model: what our start and restart are measured against.

    python benchmarks/plain_ray.py MODEL.json TOKENS.bin EVENTS.jsonl [--steps 3] [--every N --storage DIR]

Written as Ray's documentation shows it: an embedded cluster, two workers, prepare_model, AdamW. With --every
it reports a checkpoint each N steps, and FailureConfig has Ray Train start the workers again from the newest.
"""

import argparse
import json
import time
from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_loop(config: dict[str, Any]) -> None:
    """Steps; each worker writes down that it began, the first one when each step was done."""
    import os
    import tempfile
    from pathlib import Path

    import ray.train.torch
    import torch
    from hand_loop import Windows, build_model, build_optimizer, cross_entropy

    from jobs.spec.model import ModelSpec

    rank = ray.train.get_context().get_world_rank()

    def note(event: str, **fields: Any) -> None:
        with Path(config["events"]).open("a") as file:
            line = {"event": event, "rank": rank, "pid": os.getpid(), "at": time.time(), **fields}
            file.write(json.dumps(line) + "\n")

    note("begun")
    spec = ModelSpec.model_validate_json(Path(config["model"]).read_text())
    model = ray.train.torch.prepare_model(build_model(spec))
    optimizer = build_optimizer(model)
    windows = Windows(Path(config["tokens"]), config["batch_size"], config["seq_len"], rank)
    done = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            kept = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        done = kept["step"]
    note("loaded", step=done)
    for step in range(done + 1, config["steps"] + 1):
        tokens, labels, positions = windows.next()
        loss = cross_entropy(model(tokens, positions, None), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            note("step", step=step, loss=loss.item())
        if config["every"] and step % config["every"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(folder) / "state.pt")
                    saved = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": step}, checkpoint=saved)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("tokens")
    parser.add_argument("events")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--storage")
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    names = ("model", "tokens", "events", "steps", "every", "batch_size")
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={**{name: getattr(args, name) for name in names}, "seq_len": 256},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=args.storage,
            failure_config=FailureConfig(max_failures=3 if args.every else 0),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
