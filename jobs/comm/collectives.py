"""Collectives over an Axis: plain ones, and autograd pairs whose backward pass is the transposed exchange.

    pair             forward            backward           where (arXiv 1909.08053, 2205.05198, 4.2.2)
    enter            identity           sum                f: into a region where ranks share the weights out
    leave            sum                identity           g: out of it
    gather           all-gather         reduce-scatter     the same with the sequence cut outside of it
    scatter_sum      reduce-scatter     all-gather
    exchange         all-to-all         all-to-all back    tokens to experts, heads to sequences

All of them are collective over the axis and do nothing where it is one rank. (With `group=None`
torch.distributed would take the whole world: nobody else should call it with an axis' group unchecked.)
"""

from typing import Any

import torch
import torch.distributed as dist

from jobs.comm.groups import Axis


def sum_in_place(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum over the axis, into `tensor`, which is returned. Not differentiable."""
    if axis.group is not None:
        dist.all_reduce(tensor, group=axis.group)
    return tensor


def max_in_place(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Largest over the axis, into `tensor`, which is returned. Not differentiable."""
    if axis.group is not None:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=axis.group)
    return tensor


def gather_plain(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Equal pieces of all ranks, one after another along `dim`. Not differentiable."""
    if axis.group is None:
        return tensor
    whole = tensor.new_empty((axis.size, *tensor.shape))
    dist.all_gather_into_tensor(whole, tensor.contiguous(), group=axis.group)
    if dim == 0:
        return whole.flatten(0, 1)
    return torch.cat(whole.unbind(0), dim)


def scatter_sum_plain(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's piece along `dim` of the sum over the axis. Not differentiable.

    Raises:
        ValueError: the dimension does not divide by the axis.
    """
    if axis.group is None:
        return tensor
    if tensor.shape[dim] % axis.size:
        raise ValueError(f"{tensor.shape[dim]} entries of dim {dim} do not divide over {axis.size} ranks")
    pieces = torch.stack(tensor.chunk(axis.size, dim))  # [size, ...]
    own = pieces.new_empty(pieces.shape[1:])
    dist.reduce_scatter_tensor(own, pieces, group=axis.group)
    return own


def exchange_plain(
    tensor: torch.Tensor, axis: Axis, n_sent: list[int], n_received: list[int]
) -> torch.Tensor:
    """All-to-all of rows (dim 0). Not differentiable.

    Args:
        tensor: [sum(n_sent), ...], the rows for rank 0 first.
        axis: the ranks.
        n_sent: rows for each rank; zero is allowed.
        n_received: rows from each rank.

    Returns:
        [sum(n_received), ...], the rows of rank 0 first.
    """
    if axis.group is None:
        return tensor
    received = tensor.new_empty((sum(n_received), *tensor.shape[1:]))
    dist.all_to_all_single(received, tensor.contiguous(), n_received, n_sent, group=axis.group)
    return received


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_in_place(grad.contiguous().clone(), ctx.axis), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return sum_in_place(x.contiguous().clone(), axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return gather_plain(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return scatter_sum_plain(grad, ctx.axis, ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return scatter_sum_plain(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather_plain(grad, ctx.axis, ctx.dim), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, n_sent: list[int], n_received: list[int]
    ) -> torch.Tensor:
        ctx.axis, ctx.n_sent, ctx.n_received = axis, n_sent, n_received
        return exchange_plain(x, axis, n_sent, n_received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange_plain(grad, ctx.axis, ctx.n_received, ctx.n_sent), None, None, None


def enter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Identity; the gradient is summed over the axis."""
    if axis.group is None:
        return x
    out: torch.Tensor = _Enter.apply(x, axis)  # type: ignore[no-untyped-call]
    return out


def leave(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum over the axis; the gradient passes as it is (it is equal on all ranks)."""
    if axis.group is None:
        return x
    out: torch.Tensor = _Leave.apply(x, axis)  # type: ignore[no-untyped-call]
    return out


def gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """All-gather along `dim`; the gradient is summed and scattered."""
    if axis.group is None:
        return x
    out: torch.Tensor = _Gather.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return out


def scatter_sum(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Reduce-scatter along `dim`; the gradient is gathered."""
    if axis.group is None:
        return x
    out: torch.Tensor = _ScatterSum.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return out


def exchange(x: torch.Tensor, axis: Axis, n_sent: list[int], n_received: list[int]) -> torch.Tensor:
    """All-to-all of rows; the gradient travels back. Arguments as in exchange_plain."""
    if axis.group is None:
        return x
    out: torch.Tensor = _Exchange.apply(x, axis, n_sent, n_received)  # type: ignore[no-untyped-call]
    return out
