"""Collectives over an Axis: plain ones, and autograd pairs whose backward pass is the transposed exchange.

    pair             forward            backward           where (arXiv 1909.08053, 2205.05198, 4.2.2)
    enter            identity           sum                f: into a region where ranks share the weights out
    leave            sum                identity           g: out of it
    gather           all-gather         reduce-scatter     the same with the sequence cut outside of it
    scatter_sum      reduce-scatter     all-gather
    exchange         all-to-all         all-to-all back    tokens to experts, heads to sequences

All of them are collective over the axis and do nothing where it is one rank. (With `group=None`
torch.distributed would take the whole world: nobody else should call it with an axis' group unchecked.)

Sums are taken in the tensor's own type: a bf16 sum over n ranks is rounded to bf16 after each of its n - 1
additions. Along a dimension with only ones in front of it (the sequence of a batch of one) pieces lie one
after another in memory, so gathering and scattering copy nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from jobs.comm.groups import Axis


@dataclass(frozen=True)
class Pending:
    """A collective that may still be under way. Nobody may write to what was sent before `wait`."""

    _out: torch.Tensor
    _work: dist.Work | None = None
    _joined_dim: int | None = None
    """Where the pieces of the ranks, received as dim 0, belong."""

    def wait(self) -> torch.Tensor:
        """The result, complete (on a GPU: for whatever this stream does next). Call it once."""
        if self._work is not None:
            self._work.wait()
        if self._joined_dim is None:
            return self._out
        return self._out.movedim(0, self._joined_dim).flatten(self._joined_dim, self._joined_dim + 1)


def start_sum_in_place(tensor: torch.Tensor, axis: Axis) -> Pending:
    """Begin to sum a contiguous tensor over the axis, into itself. Not differentiable."""
    if axis.group is None:
        return Pending(tensor)
    return Pending(tensor, dist.all_reduce(tensor, group=axis.group, async_op=True))


def start_gather(tensor: torch.Tensor, axis: Axis, dim: int) -> Pending:
    """Begin to collect equal pieces of all ranks, one after another along `dim` >= 0. Not differentiable."""
    if axis.group is None:
        return Pending(tensor)
    pieces = tensor.new_empty((axis.size, *tensor.shape))
    work = dist.all_gather_single(pieces.flatten(0, 1), tensor.contiguous(), group=axis.group, async_op=True)
    return Pending(pieces, work, dim)


def start_scatter_sum(tensor: torch.Tensor, axis: Axis, dim: int) -> Pending:
    """Begin to form this rank's piece along `dim` >= 0 of the sum over the axis. Not differentiable.

    Raises:
        ValueError: the dimension does not divide by the axis.
    """
    if axis.group is None:
        return Pending(tensor)
    if tensor.shape[dim] % axis.size:
        raise ValueError(f"{tensor.shape[dim]} entries of dim {dim} do not divide over {axis.size} ranks")
    cut = (axis.size, tensor.shape[dim] // axis.size)
    pieces = tensor.reshape(*tensor.shape[:dim], *cut, *tensor.shape[dim + 1 :])
    pieces = pieces.movedim(dim, 0).contiguous()  # [size, ...]
    own = pieces.new_empty(pieces.shape[1:])
    work = dist.reduce_scatter_single(own, pieces.flatten(0, 1), group=axis.group, async_op=True)
    return Pending(own, work)


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
    """Equal pieces of all ranks, one after another along `dim` >= 0. Not differentiable."""
    return start_gather(tensor, axis, dim).wait()


def scatter_sum_plain(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's piece along `dim` >= 0 of the sum over the axis. Not differentiable.

    Raises:
        ValueError: the dimension does not divide by the axis.
    """
    return start_scatter_sum(tensor, axis, dim).wait()


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
        # A copy: autograd may hand the same memory to another branch.
        return sum_in_place(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return sum_in_place(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _LeaveInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.mark_dirty(x)
        return sum_in_place(x, axis)

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


def leave_in_place(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`leave` without its copy, for a contiguous result that nobody else holds or needs for a gradient."""
    if axis.group is None:
        return x
    out: torch.Tensor = _LeaveInPlace.apply(x, axis)  # type: ignore[no-untyped-call]
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
