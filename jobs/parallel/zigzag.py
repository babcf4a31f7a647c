"""Zig-zag parts of a sequence: which tokens each context-parallel rank holds. Pure; does not communicate.

The sequence is cut into 2 cp chunks; rank i holds chunks i and 2 cp - 1 - i:

    cp = 2    chunk      0   1   2   3
              rank       0   1   1   0

Under a causal mask a row costs as much as there are tokens before it. Contiguous parts would leave the last
rank with (2 cp - 1) times the work of the first; an early and a late chunk together cost the same everywhere
(arXiv 2407.21783, 3.3.2).
"""

import torch


def zigzag_indices(seq_len: int, cp: int, rank: int) -> torch.Tensor:
    """Places in the sequence of the tokens that a rank holds, ascending.

    Args:
        seq_len: S, a multiple of 2 cp.
        cp: ranks that share a sequence.
        rank: place on the cp axis.

    Returns:
        [S/cp] int64.

    Raises:
        ValueError: seq_len does not divide into 2 cp chunks.
    """
    check_divides(seq_len, cp)
    return part_of(torch.arange(seq_len), cp, rank, 0)


def check_divides(seq_len: int, cp: int) -> None:
    """Raise ValueError unless the sequence divides into 2 cp chunks."""
    if seq_len % (2 * cp):
        lower = seq_len - seq_len % (2 * cp)
        raise ValueError(
            f"seq_len={seq_len} does not divide into 2 * cp = {2 * cp} chunks; "
            f"choose {max(lower, 2 * cp)} or {lower + 2 * cp}"
        )


def part_of(x: torch.Tensor, cp: int, rank: int, dim: int) -> torch.Tensor:
    """A rank's part of a tensor that holds the whole sequence along `dim`."""
    chunk = x.shape[dim] // (2 * cp)
    early = x.narrow(dim, rank * chunk, chunk)
    late = x.narrow(dim, (2 * cp - 1 - rank) * chunk, chunk)
    return torch.cat((early, late), dim)


def in_true_order(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """The whole sequence along `dim`, from the parts of all ranks in rank order."""
    early = [part.chunk(2, dim)[0] for part in parts]
    late = [part.chunk(2, dim)[1] for part in parts]
    return torch.cat((*early, *reversed(late)), dim)


def in_parts(x: torch.Tensor, cp: int, dim: int) -> torch.Tensor:
    """The parts of all ranks, [cp, ...], of a tensor that holds the whole sequence along `dim`."""
    return torch.stack([part_of(x, cp, rank, dim) for rank in range(cp)])
