"""Seeds by logical name, and torch's random state as a tensor that a checkpoint can hold.

The rule for random state: each rank has its own stream, begun from (run seed, rank), and a checkpoint holds
the state of every rank. Back on the same number of ranks, each rank goes on with its own state, bit for
bit. At another number the saved states have no owner: each rank begins its stream anew, and the log says
that random draws are not those of an unbroken run. Start weights do not depend on it (see models/init.py).
Does not touch Python's or numpy's random state: nothing in jobs draws from them.
"""

import hashlib

import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed for one named stream: 63 bits of blake2b over the run's seed and the names."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_rank(seed: int, rank: int) -> None:
    """Begin this rank's stream, on the host and on every device.

    Args:
        seed: the run's seed.
        rank: global rank.
    """
    torch.manual_seed(derive_seed(seed, "rng", rank))


def rng_state(device: torch.device) -> torch.Tensor:
    """A copy of this rank's random state: the host generator's, followed by the device's where that is a GPU.

    Args:
        device: this rank's device.

    Returns:
        [n] uint8 on the host.
    """
    host = torch.get_rng_state()
    if device.type != "cuda":
        return host
    return torch.cat((host, torch.cuda.get_rng_state(device)))


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Go on from what `rng_state` gave for the same kind of device.

    Args:
        state: [n] uint8 on the host.
        device: this rank's device.
    """
    n_host = torch.get_rng_state().numel()
    torch.set_rng_state(state[:n_host])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[n_host:], device)
