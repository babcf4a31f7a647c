"""Rotary position embeddings in the rotate-half form, with Llama 3's frequency scaling. Holds no parameter.

Shapes: B micro-batch, S sequence, H heads, C head_dim.
"""

import math

import torch

from jobs.spec.model import RopeScaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> torch.Tensor:
    """Angle per position of channel pair i: theta^(-2i / C), i = 0 .. C/2 - 1 (arXiv 2104.09864, 3.2.2).

    With scaling (published with the Llama 3.1 models): wavelengths above original_max_seq_len /
    low_freq_factor are stretched by `factor`, those below original_max_seq_len / high_freq_factor are kept,
    and between them the frequency is interpolated linearly in original_max_seq_len / wavelength.

    Returns:
        [C/2] fp32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents  # [C/2]
    if scaling is None:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_frac = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * (1 - kept_frac) + frequencies * kept_frac


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, computed in fp32 and shared by all layers.

    Args:
        positions: [B, S] int64.
        frequencies: [C/2] fp32.
        dtype: type of the result.

    Returns:
        cosines and sines, each [B, 1, S, C].
    """
    angles = positions[:, None, :, None].float() * frequencies  # [B, 1, S, C/2]
    angles = torch.cat((angles, angles), dim=-1)  # [B, 1, S, C]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn channels (i, i + C/2) by the position's angle.

    Args:
        x: [B, H, S, C].
        cosines: [B, 1, S, C].
        sines: [B, 1, S, C].
    """
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines
