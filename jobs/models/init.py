"""Start weights by logical name and seed: the same numbers under every layout, device and precision.

Does not read weights from files.
"""

import math

import torch

from jobs.models.attention import AttentionFn, local_attention
from jobs.models.llama import Llama
from jobs.seeds import derive_seed
from jobs.spec.model import ModelSpec

RESIDUAL_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""Projections that add to the residual stream; two a layer."""


def initial_value(name: str, shape: tuple[int, ...], spec: ModelSpec, seed: int) -> torch.Tensor:
    """The start value of one whole parameter, fp32 on the host.

    Norm weights are 1. Matrices are normal(0, init_std); the projections that end on the residual stream
    have their standard deviation divided by sqrt(2 n_layers), so that the stream's variance does not grow
    with depth (GPT-2, section 2.3). The draw is a generator of its own, seeded by (seed, name): no other
    parameter can shift it.

    Args:
        name: logical name.
        shape: global shape.
        spec: the model.
        seed: the run's seed.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    std = spec.init_std
    if name.endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * spec.n_layers)
    generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def build_llama(
    spec: ModelSpec,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    attention_fn: AttentionFn = local_attention,
) -> Llama:
    """A whole Llama with its start weights.

    Args:
        spec: the model.
        seed: the run's seed.
        device: where the parameters live.
        dtype: type of the parameters; values are drawn in fp32 and then rounded.
        attention_fn: how attention is computed under this layout.
    """
    with torch.device("meta"):
        model = Llama(spec, attention_fn)
    model = model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), spec, seed))
    return model
