"""Seeds by logical name, and torch's random state as a tensor that a checkpoint can hold.

The rule for random state: each rank has its own stream, derived from (run seed, "rng", rank), and a
checkpoint holds the state of every rank as one row of a tensor. Back on the same number of ranks, each rank
goes on with its own row, bit for bit. At another number the rows have no owner: each rank is seeded anew
from (run seed, "rng", step, rank), and `restore_rng` returns the line that says so. Does not touch Python's
or numpy's random state: nothing here draws from them.
"""

import hashlib

import torch

from jobs.state import Chunk

RNG_NAME = "rng/torch"
"""Logical name of the saved state: uint8, shape [world_size, bytes of one rank's state]."""


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed for one named stream: 63 bits of blake2b over the run's seed and the names."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_rank(seed: int, rank: int) -> None:
    """Start this rank's stream: what a fresh run does before its first step. Seeds every device."""
    torch.manual_seed(derive_seed(seed, "rng", rank))


def rng_state(device: torch.device) -> torch.Tensor:
    """A copy of this rank's random state: the host generator's, followed by the device's where that is a GPU.

    Returns:
        [n] uint8 on the host.
    """
    host = torch.get_rng_state()
    if device.type != "cuda":
        return host
    return torch.cat((host, torch.cuda.get_rng_state(device)))


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Go on from a state that `rng_state` gave for the same kind of device.

    Args:
        state: [n] uint8 on the host.
        device: this rank's device.
    """
    n_host = torch.get_rng_state().numel()
    torch.set_rng_state(state[:n_host])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[n_host:], device)


def rng_chunk(rank: int, world_size: int, device: torch.device) -> Chunk:
    """This rank's row of the random state, as it is now; writing into it does nothing until restore_rng."""
    row = rng_state(device)[None]
    return Chunk(
        name=RNG_NAME,
        global_shape=(world_size, row.shape[1]),
        offsets=(rank, 0),
        tensor=row,
        is_writer=True,
    )


def restore_rng(
    row: torch.Tensor | None, *, seed: int, step: int, rank: int, world_size: int, device: torch.device
) -> str | None:
    """Take up this rank's stream after a checkpoint of `step` was read.

    Args:
        row: this rank's row, [1, n] or [n] uint8; None where the checkpoint was written by another number of
            ranks or on another kind of device.
        seed: the run's seed.
        step: completed steps.
        rank: global rank.
        world_size: ranks of this run.
        device: this rank's device.

    Returns:
        None where the stream goes on bit for bit, else the line to log.
    """
    if row is not None and row.numel() == rng_state(device).numel():
        set_rng_state(row.flatten(), device)
        return None
    torch.manual_seed(derive_seed(seed, "rng", step, rank))
    return (
        f"random state was not saved by {world_size} ranks on this kind of device: streams are seeded anew "
        f"from run.seed={seed} and step {step}, so random draws are not those of an unbroken run"
    )
