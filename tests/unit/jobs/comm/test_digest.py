"""Digests of parameters: what they see, what they do not depend on, and what they cost."""

import random
import time

import pytest
import torch

from jobs.comm.digest import N_COLUMNS, digest

SIZES = [1, 3, 1000, N_COLUMNS, 3 * N_COLUMNS + 17]


def parameters(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


def flip(tensor: torch.Tensor, bit: int) -> None:
    tensor.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("n", SIZES)
def test_one_flipped_bit_is_always_seen(n, dtype):
    weights = parameters(n, dtype)
    clean = digest(weights).item()
    n_bits = 8 * n * weights.element_size()
    draw = random.Random(n)
    for bit in {0, n_bits - 1, *(draw.randrange(n_bits) for _ in range(8))}:
        flip(weights, bit)
        assert digest(weights).item() != clean
        flip(weights, bit)
    assert digest(weights).item() == clean


def test_two_sign_bits_do_not_cancel():
    """They would in a sum of 64-bit words: twice the top bit is nothing modulo 2^64."""
    weights = parameters(4096)
    clean = digest(weights).item()
    draw = random.Random(0)
    for _ in range(60):
        i, j = draw.sample(range(4096), 2)
        weights[i], weights[j] = -weights[i], -weights[j]
        assert digest(weights).item() != clean
        weights[i], weights[j] = -weights[i], -weights[j]


def test_what_is_moved_or_cut_is_seen():
    weights = parameters(3 * N_COLUMNS)
    clean = digest(weights).item()
    swapped = weights.clone()
    swapped[5], swapped[N_COLUMNS + 5] = weights[N_COLUMNS + 5], weights[5]
    shifted = weights.roll(1)
    rows = weights.view(3, N_COLUMNS)[[1, 0, 2]]
    longer = torch.cat([weights, torch.zeros(1)])
    others = [digest(t).item() for t in (swapped, shifted, rows, longer)]
    assert clean not in others
    assert digest(torch.tensor([0.0])).item() != digest(torch.tensor([-0.0])).item()
    assert digest(torch.zeros(0)).item() != digest(torch.zeros(1)).item()


def test_only_the_bytes_count():
    weights = parameters(6 * 7).view(6, 7)
    assert digest(weights) == digest(weights.flatten()) == digest(weights.view(torch.int32))
    assert digest(weights.t()) == digest(weights.t().contiguous()) != digest(weights)
    base = parameters(64, torch.bfloat16)
    for start in range(4):
        assert digest(base[start : start + 31]) == digest(base[start : start + 31].clone())
    assert digest(torch.tensor(1.5)) == digest(torch.tensor([1.5]))
    assert digest(weights.requires_grad_()).requires_grad is False


def splitmix(n: int, seed: int) -> list[int]:
    """In Python's own numbers, as the paper has it, made odd."""
    mask = (1 << 64) - 1
    numbers = []
    for i in range(1, n + 1):
        z = (i + seed) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        numbers.append((z ^ z >> 31) | 1)
    return numbers


def test_it_is_the_written_formula():
    """Ranks of one run may be on machines of many kinds: the digest is a fixed function of the bytes."""
    words = [(-1) ** i * i * 53_777 for i in range(2 * N_COLUMNS + 100)]
    columns, rows = splitmix(N_COLUMNS, 0), splitmix(3, 1 << 40)
    total = sum(x * columns[i % N_COLUMNS] * rows[i // N_COLUMNS] for i, x in enumerate(words)) + 4 * len(
        words
    )
    assert digest(torch.tensor(words, dtype=torch.int32)).item() % (1 << 64) == total % (1 << 64)


def test_cost():
    """Near the speed of zlib's crc32 here (about 1 GiB/s on one core); a tenth of it would be a mistake."""
    weights = torch.zeros(8 << 20)
    costs_s = []
    for _ in range(5):
        began_at_mono_s = time.perf_counter()
        digest(weights)
        costs_s.append(time.perf_counter() - began_at_mono_s)
    assert weights.nbytes / min(costs_s) > 0.08 * 2**30
