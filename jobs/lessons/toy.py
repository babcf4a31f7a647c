"""The toy that the lessons cut up: random data, square layers with GELU, mean of squares; one process.

Shapes: B rows of the batch (train.batch_size), D d_model. A weight is [inputs, outputs], x @ weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from jobs.comm.groups import Axis
from jobs.spec.lesson import LessonSpec

Whole = dict[str, torch.Tensor]
"""What one process finds, by name: losses and gradients."""


@dataclass(frozen=True)
class Piece:
    """What one rank found of a result: all of it, or a box."""

    name: str
    """As in Whole."""
    value: torch.Tensor
    offsets: tuple[int, ...] | None = None
    """Where the box begins in the whole; None where the value is the whole."""


def dtype_of(spec: LessonSpec) -> torch.dtype:
    """The type that everything is computed in."""
    return torch.float64 if spec.train.precision == "fp64" else torch.float32


def sample_data(spec: LessonSpec) -> torch.Tensor:
    """The batch [B, D], the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(spec.train.batch_size, spec.model.d_model, generator=generator)
    return data.to(dtype_of(spec))


def initial_weight(spec: LessonSpec, n_outputs: int | None = None, seed: int = 0) -> torch.Tensor:
    """A whole weight [D, n_outputs], the same on every rank: randn / sqrt(outputs).

    A rank that holds a part cuts it out of the whole. Were each part drawn by itself from the same seed, all
    ranks would hold equal parts, and no single process would ever compute the same.
    """
    n_outputs = n_outputs or spec.model.d_model
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(spec.model.d_model, n_outputs, generator=generator) / math.sqrt(n_outputs)
    return weight.to(dtype_of(spec))


def trained(tensors: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Parameters of their own memory."""
    return [torch.nn.Parameter(tensor.clone()) for tensor in tensors]


def cut(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of a tensor along `dim`."""
    return tensor.chunk(axis.size, dim)[axis.rank]


def begin(length: int, axis: Axis) -> int:
    """Where this rank's part of `length` entries begins."""
    return axis.rank * (length // axis.size)


def forward(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B, D] -> [B, D] through all the layers."""
    for weight in weights:
        x = F.gelu(x @ weight)
    return x


def adamw(parameters: Sequence[torch.nn.Parameter], spec: LessonSpec) -> torch.optim.AdamW:
    """The optimizer of every lesson."""
    return torch.optim.AdamW(list(parameters), lr=spec.train.lr)


def summary(tensor: torch.Tensor) -> str:
    """Shape and first value: 128x1024[0.1234...]."""
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{shape}[{tensor.detach().flatten()[0].item():.4g}...]"


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Its gradient, copied out, so that it outlives zero_grad."""
    assert parameter.grad is not None
    return parameter.grad.clone()


def train_alone(spec: LessonSpec) -> Whole:
    """The layers on one process: the loss of every step and the gradients of the first."""
    data = sample_data(spec)
    weights = trained([initial_weight(spec)] * spec.model.n_layers)
    optimizer = adamw(weights, spec)
    found: Whole = {}
    for step in range(spec.train.steps):
        loss = forward(data, weights).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if step == 0:
            found |= {f"gradient of layer {i}": gradient_of(weight) for i, weight in enumerate(weights)}
        optimizer.step()
        found[f"loss of step {step}"] = loss.detach()
    return found
