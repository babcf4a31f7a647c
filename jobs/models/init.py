"""Start weights by logical name and seed: the same numbers under every layout, device and precision.

Does not read weights from files.
"""

import math
from collections.abc import Mapping

import torch
from torch import nn

from jobs.models.llama import Llama
from jobs.models.operations import Operations
from jobs.seeds import derive_seed
from jobs.spec.model import ModelSpec

RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")
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


def take_parameters(model: Llama, tensors: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    """Put this rank's pieces in the place of a stage's parameters (which may be on the meta device). Local.

    Buffers (the router's selection biases and loads) become zeros beside them.

    Args:
        model: a stage.
        tensors: by logical name; each becomes the memory of a parameter, shape and type as they are.

    Returns:
        The new parameters by logical name.

    Raises:
        ValueError: the stage has a parameter that no tensor is given for, or the other way round.
    """
    taken: dict[str, nn.Parameter] = {}
    paths = [path for path, _ in model.named_parameters()]
    names = {path: model.logical_name(path) for path in paths}
    if set(names.values()) != set(tensors):
        only_built = sorted(set(names.values()) - set(tensors))
        only_placed = sorted(set(tensors) - set(names.values()))
        raise ValueError(
            f"the built model and its spec disagree: only built {only_built}, only placed {only_placed}"
        )
    for path in paths:
        owner, _, leaf = path.rpartition(".")
        taken[names[path]] = nn.Parameter(tensors[names[path]])
        setattr(model.get_submodule(owner), leaf, taken[names[path]])
    for path, buffer in list(model.named_buffers()):
        owner, _, leaf = path.rpartition(".")
        module = model.get_submodule(owner)
        device = next(module.parameters()).device
        setattr(module, leaf, torch.zeros_like(buffer, device=device))
    return taken


def build_llama(
    spec: ModelSpec,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    operations: Operations | None = None,
) -> Llama:
    """A whole Llama with its start weights.

    Args:
        spec: the model.
        seed: the run's seed.
        device: where the parameters live.
        dtype: type of the parameters; values are drawn in fp32 and then rounded.
        operations: how this layout computes; None is one device.
    """
    with torch.device("meta"):
        model = Llama(spec, operations)
    tensors = {
        name: initial_value(name, tuple(parameter.shape), spec, seed).to(device, dtype)
        for name, parameter in model.named_parameters()
    }
    take_parameters(model, tensors)
    return model
