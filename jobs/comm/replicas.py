"""Digests of what this rank shares with replicas: equal keys on two ranks mean that the bytes must be equal.

    masters    the state that is saved, where another rank holds the same pieces of it
    weights    what the forward pass reads, where it is other memory than the masters (ZeRO shares those out)

Experts have keys of their own: fewer ranks hold the same ones. A sharded piece has no replica, so nothing
meets it under its key. Local: compares nothing (ops/monitors/replica_digest.py does) and sends nothing.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jobs.comm.digest import digest
from jobs.mesh import Mesh
from jobs.state import Chunk

N_BUCKETS = 16
"""Digests a key at most: enough to say which part of the model differs."""
_SIGN, _ALL = 1 << 63, (1 << 64) - 1


def replica_digests(
    chunks: Sequence[Chunk], weights: Mapping[str, torch.Tensor], mesh: Mesh, rank: int
) -> dict[str, list[int]]:
    """Digests of this rank's parameters by key.

    Args:
        chunks: the engine's.
        weights: parameters of the module by path; empty ones are left out.
        mesh: the layout.
        rank: this one.

    Returns:
        Key -> up to N_BUCKETS digests of 64 bits. Waits for the device once.
    """
    masters = [chunk for chunk in chunks if chunk.name.startswith("model/")]
    known = {chunk.tensor.untyped_storage().data_ptr() for chunk in masters}
    if sum(chunk.tensor.numel() for chunk in masters) < sum(weight.numel() for weight in weights.values()):
        known = set()  # masters that are shared out have no replicas, also where they lie inside the weights
    families: dict[str, list[tuple[Any, torch.Tensor]]] = {}
    for chunk in masters:
        place = (chunk.name, chunk.offsets, tuple(chunk.tensor.shape))
        families.setdefault(f"masters-{_family(chunk.name)}", []).append((place, chunk.tensor))
    at = mesh.coordinates(rank)
    for path, weight in weights.items():
        if not weight.numel() or weight.untyped_storage().data_ptr() in known:
            continue
        family = _family(path)
        axes = ("pp", "ep", "etp") if family == "experts" else ("pp", "tp")
        name = f"weights-{family}-" + "-".join(f"{axis}{at[axis]}" for axis in axes)
        families.setdefault(name, []).append(((path, tuple(weight.shape)), weight))
    return {
        f"{name}-{_hash([place for place, _ in parts])}": _buckets([tensor for _, tensor in parts])
        for name, parts in families.items()
    }


def _family(name: str) -> str:
    return "experts" if ".experts." in name else "dense"


def _hash(places: Sequence[Any]) -> str:
    return hashlib.blake2b(repr(places).encode(), digest_size=8).hexdigest()


def _buckets(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Neighbours together; the place of a tensor in its bucket counts."""
    digests = torch.stack([digest(tensor) for tensor in tensors]).tolist()
    n_buckets = min(N_BUCKETS, len(digests))
    found = [0] * n_buckets
    for number, value in enumerate(digests):
        at = number * n_buckets // len(digests)
        found[at] = (found[at] * 0x9E3779B97F4A7C15 + value) & _ALL
    return [value - (1 << 64) if value & _SIGN else value for value in found]
