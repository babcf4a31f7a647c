"""The layers' products in 8-bit floating point (arXiv 2209.05433), scaled tensor by tensor, on GPUs that can.

                   left                right
    Y  = X W^T     X     e4m3          W     e4m3     forward: more digits
    dX = dY W      dY    e5m2          W     e4m3     backward: more range
    dW = dY^T X    dY^T  e5m2          X     e4m3

Each tensor is multiplied by (largest number of its format) / (its largest absolute value) before it is
rounded, and the product is divided by both factors: sums are taken in fp32 by the hardware. X and W are kept
for the backward pass in 8 bits. Products whose sizes do not divide by 16, the head, the routers and the
routed experts stay in the weights' own type; master weights, moments and gradient sums are those of bf16.

Shapes: M tokens, K inputs, N outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jobs.comm.collectives import enter, gather, leave, scatter_sum
from jobs.comm.groups import Axis
from jobs.models.operations import Operations
from jobs.models.split_backward import wanted_gradients
from jobs.parallel.tensor import SEQUENCE

MULTIPLE = 16
"""What the hardware wants all three sizes of a product to divide by."""
SMALLEST_CAPABILITY = (8, 9)
"""Ada; Hopper is (9, 0)."""


@dataclass(frozen=True)
class Scaled:
    """A matrix in 8 bits: values / scale are the numbers it stands for."""

    values: torch.Tensor
    """[rows, columns] in one of torch's float8 types."""
    scale: torch.Tensor
    """Scalar fp32."""

    def t(self) -> "Scaled":
        """Transposed, a view."""
        return Scaled(self.values.t(), self.scale)


Product = Callable[[Scaled, Scaled, torch.dtype], torch.Tensor]
"""(left [M, K], right [K, N], type of the result) -> [M, N]."""


def fp8_refusal(device: torch.device) -> str | None:
    """Why this device cannot train with precision fp8; None where it can."""
    needs = "train.precision=fp8 needs a GPU of compute capability 8.9 or above (Ada, Hopper or newer)"
    if device.type != "cuda":
        return f"{needs}; the ranks compute on {device.type}: set train.precision to bf16"
    capability = torch.cuda.get_device_capability(device)
    if capability < SMALLEST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{needs}; {name} has {capability[0]}.{capability[1]}: set train.precision to bf16"
    return None


def quantise(x: torch.Tensor, dtype: torch.dtype) -> Scaled:
    """Round a tensor to 8 bits by its own largest value.

    Args:
        x: any shape and floating type; nan and inf spread to the whole tensor, so that the step is skipped.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
    """
    largest = torch.finfo(dtype).max
    # A tensor of zeros has no largest value to go by; any factor will do.
    scale = largest / x.abs().amax().float().clamp(min=1e-30)
    return Scaled((x.float() * scale).clamp(-largest, largest).to(dtype), scale)


def hardware_product(left: Scaled, right: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """The product on the tensor cores: [M, K] by [K, N], all sizes divisible by MULTIPLE."""
    return torch._scaled_mm(
        left.values.contiguous(),
        right.values.t().contiguous().t(),  # the right factor has to lie column by column
        scale_a=left.scale.reciprocal(),
        scale_b=right.scale.reciprocal(),
        out_dtype=dtype,
    )


def reference_product(left: Scaled, right: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """What hardware_product computes, on any device: both factors widened to fp32 first."""
    return ((left.values.float() / left.scale) @ (right.values.float() / right.scale)).to(dtype)


def float8_linears(
    x: torch.Tensor, weights: Sequence[torch.Tensor], product: Product = hardware_product
) -> list[torch.Tensor]:
    """Each x @ weight^T, differentiable; plain products where the sizes do not fit.

    Args:
        x: [..., K].
        weights: [N_i, K].
        product: how two 8-bit matrices are multiplied.
    """
    sizes = [x.numel() // x.shape[-1], x.shape[-1], *(weight.shape[0] for weight in weights)]
    if any(size % MULTIPLE for size in sizes):
        return [torch.nn.functional.linear(x, weight) for weight in weights]
    return list(_Float8Linears.apply(product, x, *weights))  # type: ignore[no-untyped-call]


def float8_operations(
    base: Operations, tp: Axis, sequence_parallel: bool, product: Product = hardware_product
) -> Operations:
    """Operations whose layers multiply in 8 bits.

    Args:
        base: the layout's operations; the head, a projection that shares its input with no other, stays its.
        tp: this rank's tensor-parallel line: sums and gathers are those of jobs.parallel.tensor, in the
            activations' own type, without the overlap.
        sequence_parallel: as there.
        product: how two 8-bit matrices are multiplied.
    """

    def columns(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(weights) == 1:
            return base.columns(x, weights)
        whole = gather(x, tp, SEQUENCE) if sequence_parallel else enter(x, tp)
        return float8_linears(whole, weights, product)

    def row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = float8_linears(x, (weight,), product)[0]
        return scatter_sum(out, tp, SEQUENCE) if sequence_parallel else leave(out, tp)

    return replace(base, columns=columns, row=row)


class _Float8Linears(torch.autograd.Function):
    """Y_i = X W_i^T, X rounded once."""

    @staticmethod
    def forward(
        ctx: Any, product: Product, x: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        flat = quantise(x.flatten(0, -2), torch.float8_e4m3fn)  # [M, K]
        rounded = [quantise(weight, torch.float8_e4m3fn) for weight in weights]  # [N_i, K]
        ctx.product, ctx.dtype, ctx.shape = product, x.dtype, x.shape
        ctx.save_for_backward(
            flat.values, flat.scale, *(w.values for w in rounded), *(w.scale for w in rounded)
        )
        return tuple(product(flat, w.t(), x.dtype).view(*x.shape[:-1], -1) for w in rounded)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, scale, *saved = ctx.saved_tensors
        wants_x, *wants = wanted_gradients(ctx)
        n_weights = len(saved) // 2
        x = Scaled(values, scale)
        weights = [Scaled(v, s) for v, s in zip(saved[:n_weights], saved[n_weights:], strict=True)]
        rounded = [quantise(grad.flatten(0, -2), torch.float8_e5m2) for grad in grads]  # [M, N_i]
        d_x: torch.Tensor | None = None
        if wants_x:
            parts = [ctx.product(g, w, ctx.dtype) for g, w in zip(rounded, weights, strict=True)]
            d_x = torch.stack(parts).sum(0).view(ctx.shape) if n_weights > 1 else parts[0].view(ctx.shape)
        d_weights = [
            ctx.product(g.t(), x, ctx.dtype) if is_wanted else None
            for g, is_wanted in zip(rounded, wants, strict=True)
        ]
        return None, d_x, *d_weights
