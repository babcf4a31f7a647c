"""The smallest TorchTrainer script for the same model: what the start of Packtrain is measured against.

    python benchmarks/plain_ray.py MODEL.json TOKENS.bin EVENTS.jsonl

Written as Ray's documentation shows it: an embedded cluster, two workers, prepare_model, AdamW.
"""

import json
import sys
import time
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_loop(config: dict[str, Any]) -> None:
    """A few steps; the first worker writes down when each was done."""
    from pathlib import Path

    import ray.train
    import ray.train.torch
    import torch
    from hand_loop import Windows, build_model, build_optimizer, cross_entropy

    from jobs.spec.model import ModelSpec

    rank = ray.train.get_context().get_world_rank()
    spec = ModelSpec.model_validate_json(Path(config["model"]).read_text())
    model = ray.train.torch.prepare_model(build_model(spec))
    optimizer = build_optimizer(model)
    windows = Windows(Path(config["tokens"]), config["batch_size"], config["seq_len"], rank)
    for step in range(config["steps"]):
        tokens, labels, positions = windows.next()
        loss = cross_entropy(model(tokens, positions, None), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            with Path(config["events"]).open("a") as file:
                line = {"event": "step", "step": step + 1, "loss": loss.item(), "at": time.time()}
                file.write(json.dumps(line) + "\n")


def main() -> None:
    model, tokens, events = sys.argv[1:4]
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={
            "model": model,
            "tokens": tokens,
            "events": events,
            "steps": 3,
            "batch_size": 4,
            "seq_len": 256,
        },
        scaling_config=ScalingConfig(num_workers=2),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
