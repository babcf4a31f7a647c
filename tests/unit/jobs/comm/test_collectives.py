"""Every collective and every pair against what one process computes from all ranks' inputs (fp64)."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jobs.comm import collectives as comm
from jobs.mesh import Mesh
from tests.support.ranks import run_ranks

RANKS = pytest.mark.parametrize("n", [2, 4])


def _values(key, shape, n):
    """One tensor a rank, the same on all ranks; not contiguous."""
    generator = torch.Generator().manual_seed(key)
    return torch.randn((n, *reversed(shape)), dtype=torch.float64, generator=generator).permute(
        0, *range(len(shape), 0, -1)
    )


def _check(got, want):
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def _check_pair(axis, pair, plain, shape, is_shared=False):
    """`pair(x)` on this rank and its gradient, against `plain(all inputs) -> all outputs` on one process.

    The total is the sum over ranks of <output, a weight of the rank's own>. `is_shared`: the pair's output is
    one value that all ranks hold and use alike, so it counts once.
    """
    whole = _values(1, shape, axis.size).requires_grad_()
    outputs = plain(whole)
    weights = _values(2, tuple(outputs[0].shape), axis.size)
    if is_shared:
        (outputs[0] * weights[0]).sum().backward()
    else:
        sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)).backward()
    own = whole.detach()[axis.rank].requires_grad_()
    out = pair(own)
    _check(out, outputs[axis.rank].detach())
    out.backward(weights[0 if is_shared else axis.rank])
    _check(own.grad, whole.grad[axis.rank])


def _pairs(groups):
    axis = groups.tp
    n = axis.size
    _check_pair(axis, lambda x: comm.leave(x, axis), lambda x: [x.sum(0)] * n, (3, 5), is_shared=True)
    _check_pair(
        axis,
        lambda x: comm.leave_in_place((2 * x).contiguous(), axis),
        lambda x: [2 * x.sum(0)] * n,
        (3, 5),
        is_shared=True,
    )
    for batch in (1, 3):
        for dim in range(3):
            shape = (batch * n if dim == 0 else batch, 2 * n, 4)
            _check_pair(
                axis,
                lambda x, d=dim: comm.gather(x, axis, d),
                lambda x, d=dim: [torch.cat([*x], d)] * n,
                shape,
            )
            if shape[dim] % n == 0:
                _check_pair(
                    axis,
                    lambda x, d=dim: comm.scatter_sum(x, axis, d),
                    lambda x, d=dim: x.sum(0).chunk(n, d),
                    shape,
                )


@RANKS
def test_pairs_equal_one_process_forward_and_backward(tmp_path, n):
    run_ranks(_pairs, Mesh(tp=n), tmp_path)


def _enter(groups):
    axis = groups.tp
    x = _values(1, (3, 5), axis.size)[0].requires_grad_()
    weights = _values(2, (3, 5), axis.size)
    out = comm.enter(x, axis)
    assert torch.equal(out, x)
    branch = 3 * x  # its gradient arrives in the same tensor: the sum must not write to it
    (out * weights[axis.rank]).sum().backward()
    _check(x.grad, weights.sum(0))
    x.grad = None
    both = comm.enter(x, axis) + branch
    both.backward(weights[axis.rank])
    _check(x.grad, weights.sum(0) + 3 * weights[axis.rank])


@RANKS
def test_what_enters_gets_every_ranks_gradient(tmp_path, n):
    run_ranks(_enter, Mesh(tp=n), tmp_path)


def _exchange(groups):
    axis = groups.tp
    n = axis.size
    # Rows that rank r sends to rank s: uneven, some none, and rank 0 receives nothing.
    counts = [[(r + 2 * s) % 3 if s else 0 for s in range(n)] for r in range(n)]
    xs = [_values(10 + r, (sum(counts[r]), 4), 1)[0].requires_grad_() for r in range(n)]
    parts = [x.split(count) for x, count in zip(xs, counts, strict=True)]
    outputs = [torch.cat([parts[r][s] for r in range(n)]) for s in range(n)]
    weights = [_values(20 + s, tuple(outputs[s].shape), 1)[0] for s in range(n)]
    sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)).backward()
    own = xs[axis.rank].detach().requires_grad_()
    received = [counts[r][axis.rank] for r in range(n)]
    out = comm.exchange(own, axis, counts[axis.rank], received)
    _check(out, outputs[axis.rank].detach())
    out.backward(weights[axis.rank])
    _check(own.grad, xs[axis.rank].grad)


@RANKS
def test_an_exchange_with_uneven_and_empty_parts_goes_there_and_back(tmp_path, n):
    run_ranks(_exchange, Mesh(tp=n), tmp_path)


def _started(groups):
    axis = groups.tp
    xs = _values(3, (3, 2 * axis.size, 4), axis.size)
    own = xs[axis.rank]
    gathering = comm.start_gather(own, axis, 1)
    scattering = comm.start_scatter_sum(own, axis, 1)
    summing = comm.start_sum_in_place(own.contiguous(), axis)
    _check(summing.wait(), xs.sum(0))
    _check(scattering.wait(), xs.sum(0).chunk(axis.size, 1)[axis.rank])
    assert torch.equal(gathering.wait(), torch.cat([*xs], 1))
    largest = comm.max_in_place(own.contiguous(), axis)
    assert torch.equal(largest, xs.amax(0))
    with pytest.raises(ValueError, match="3 entries of dim 0 do not divide"):
        comm.start_scatter_sum(own, axis, 0)


@RANKS
def test_several_started_at_once_finish_in_any_order(tmp_path, n):
    run_ranks(_started, Mesh(tp=n), tmp_path)


class _Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (
            torch.ops.aten.clone,
            torch.ops.aten.cat,
            torch.ops.aten.stack,
        )  # not copy_: gloo's own reduce-scatter takes its part out of an all-reduce
        return func(*args, **(kwargs or {}))


def _copies(groups, batch):
    x = torch.ones(batch, 4, 8)
    with _Copies() as copies:
        comm.gather_plain(x, groups.tp, 1)
        comm.scatter_sum_plain(x, groups.tp, 1)
    return copies.count


def test_the_sequence_of_a_batch_of_one_is_not_copied(tmp_path):
    assert run_ranks(_copies, Mesh(tp=2), tmp_path, 1) == [0, 0]
    assert run_ranks(_copies, Mesh(tp=2), tmp_path, 3) == [2, 2]


def _bf16(groups):
    axis = groups.tp
    xs = _values(4, (64, 8), axis.size).bfloat16()
    total = comm.sum_in_place(xs[axis.rank].contiguous(), axis)
    part = comm.scatter_sum_plain(xs[axis.rank], axis, 0)
    assert total.dtype == part.dtype == torch.bfloat16
    if axis.size == 2:
        assert torch.equal(total, (xs[0].float() + xs[1].float()).bfloat16())
    # n - 1 additions, each rounded to 8 bits of a partial sum.
    limit = (axis.size - 1) * 2.0**-8 * xs.float().abs().sum(0)
    assert ((total.float() - xs.float().sum(0)).abs() <= limit).all()
    assert ((part.float() - total.chunk(axis.size)[axis.rank].float()).abs() <= 2 * limit.amax()).all()


@RANKS
def test_bf16_sums_round_once_an_addition(tmp_path, n):
    run_ranks(_bf16, Mesh(tp=n), tmp_path)


def test_one_rank_alone_communicates_nothing(tmp_path):
    run_ranks(_alone, 1, tmp_path)


def _alone(groups):
    x = torch.ones(2, 3, requires_grad=True)
    axis = groups.tp
    assert axis.group is None
    for out in (
        comm.enter(x, axis),
        comm.leave(x, axis),
        comm.leave_in_place(x, axis),
        comm.gather(x, axis, 1),
        comm.scatter_sum(x, axis, 1),
        comm.exchange(x, axis, [2], [2]),
        comm.start_sum_in_place(x, axis).wait(),
    ):
        assert out is x
