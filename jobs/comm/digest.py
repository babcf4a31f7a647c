"""Digests of parameters: 64 bits that tell every flipped bit, to compare replicas without sending them.

The bytes are read as 32-bit words x and hashed multilinearly modulo 2^64 (Carter and Wegman, "Universal
classes of hash functions", 1979):

    digest = sum over rows r of v[r] * (sum over columns c of w[c] * x[r, c])  +  number of bytes

with fixed odd pseudo-random weights. A flipped bit b <= 31 adds an odd number times 2^b, which is never 0;
two errors cancel with a probability of at most 2^-32. Whole numbers add up to the same in any order, so the
same bytes give the same digest on a CPU and on a GPU. Not for adversaries. What
has replicas is replicas.py's business.
"""

from functools import lru_cache

import torch

N_COLUMNS = 1 << 14
"""A row of the words and its product stay in a CPU's second-level cache."""
N_ROWS_AT_ONCE = 1 << 10
"""On a GPU so many rows are multiplied in one go: 128 MiB of scratch."""
_ROW_SEED = 1 << 40


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Digest of a tensor's bytes in row-major order; its type and shape do not count.

    Local; on a GPU it does not wait for the device.

    Returns:
        [] int64 on the tensor's device.
    """
    words, n_bytes = _words(tensor)
    n_rows = -(-words.numel() // N_COLUMNS)
    columns = _odd_weights(N_COLUMNS, 0, tensor.device)
    sums = torch.zeros(max(1, n_rows), dtype=torch.int64, device=tensor.device)
    n_whole = words.numel() // N_COLUMNS
    whole = words[: n_whole * N_COLUMNS].view(n_whole, N_COLUMNS)
    if tensor.device.type == "cpu":
        row = torch.empty(N_COLUMNS, dtype=torch.int64)
        for number in range(n_whole):
            sums[number] = torch.dot(row.copy_(whole[number]), columns)
    else:
        for start in range(0, n_whole, N_ROWS_AT_ONCE):
            rows = whole[start : start + N_ROWS_AT_ONCE]
            torch.sum(rows * columns, dim=1, out=sums[start : start + rows.shape[0]])
    rest = words[n_whole * N_COLUMNS :]
    if rest.numel():
        sums[n_whole] = (rest * columns[: rest.numel()]).sum()
    return (sums * _odd_weights(sums.numel(), _ROW_SEED, tensor.device)).sum() + n_bytes


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The bytes as int32 (filled up with zeros to a whole word), and how many they are."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    n_bytes = raw.numel()
    if n_bytes % 4 or raw.storage_offset() % 4:
        padded = raw.new_zeros(-(-n_bytes // 4) * 4)
        padded[:n_bytes] = raw
        raw = padded
    return raw.view(torch.int32), n_bytes


@lru_cache(maxsize=64)
def _odd_weights(n: int, seed: int, device: torch.device) -> torch.Tensor:
    """The first n outputs of SplitMix64 from `seed` on, made odd (Steele et al., OOPSLA 2014)."""
    z = (torch.arange(1, n + 1, dtype=torch.int64, device=device) + seed) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: torch.Tensor, n_bits: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (z >> n_bits) & ((1 << (64 - n_bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
