"""The reducer by itself: gradients from hooks and from .grad, sums of parts, sums of bf16 in fp32."""

import pytest
import torch

from jobs.comm.buckets import plan_buckets
from jobs.comm.groups import Axis
from jobs.comm.reducer import GradBucket, GradReducer
from tests.support.ranks import run_ranks

ALONE = Axis((0,), 0, None)
SHAPES = {"a": (5, 7), "b": (3,), "c": (40,)}


def _reducer(axis, dtype=torch.float32, *, is_scattered=False, n_holders=1):
    """Two buckets of three parameters; `a` may be held several times."""
    n_parts = axis.size if is_scattered else 1
    buckets = []
    for plan in plan_buckets(SHAPES, 100, n_parts):
        length = plan.stop // n_parts
        span = slice(axis.rank * length, (axis.rank + 1) * length) if is_scattered else slice(0, plan.stop)
        buckets.append(GradBucket(plan, torch.full((plan.stop,), 9.0, dtype=dtype), axis, span))
    parameters = {
        name: [
            torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(n_holders if name == "a" else 1)
        ]
        for name, shape in SHAPES.items()
    }
    return buckets, parameters, GradReducer(buckets, parameters)


def _found(buckets):
    return {
        slot.name: bucket.flat[slot.start : slot.stop].view(slot.shape).clone()
        for bucket in buckets
        for slot in bucket.plan.slots
    }


def _backward(parameters, factor):
    total = sum((p * factor).sum() for holders in parameters.values() for p in holders)
    total.backward()


def test_what_hooks_do_not_deliver_is_collected_and_what_nobody_has_is_zero():
    buckets, parameters, reducer = _reducer(ALONE)
    reducer.start(2)
    (parameters["a"][0].sum() * 2).backward()
    parameters["a"][0].grad = torch.full((5, 7), 3.0)  # as a schedule that splits backward does
    parameters["b"][0].grad = torch.full((3,), 4.0)
    reducer.collect()
    reducer.finish(lambda number: None)
    found = _found(buckets)
    assert [found[name].unique().tolist() for name in "abc"] == [[5.0], [4.0], [0.0]]
    assert all(p.grad is None for holders in parameters.values() for p in holders)


def test_holders_of_one_piece_of_memory_add_up_over_micro_batches():
    buckets, parameters, reducer = _reducer(ALONE, n_holders=2)
    for _ in range(2):  # a second step begins from nothing
        reducer.start(3)
        for factor in (1.0, 2.0, 3.0):
            _backward(parameters, factor)
        done = []
        reducer.finish(done.append)
        assert done == list(range(len(buckets)))
    found = _found(buckets)
    assert [found[name].unique().tolist() for name in "abc"] == [[12.0], [6.0], [6.0]]


def _sum_of_parts(groups, dtype):
    axis = groups.dp
    buckets, parameters, reducer = _reducer(axis, dtype, is_scattered=True)
    launches = []
    launch = torch.distributed.reduce_scatter_single

    def watch(out, flat, **kwargs):
        launches.append(flat.dtype)
        return launch(out, flat, **kwargs)

    torch.distributed.reduce_scatter_single = watch
    reducer.start(2)
    _backward(parameters, 1.0)
    n_early = len(launches)
    _backward(parameters, float(groups.rank))
    n_in_backward = len(launches)
    reducer.finish(lambda number: None)
    torch.distributed.reduce_scatter_single = launch
    return n_early, n_in_backward, launches, [(b.flat[b.span].clone(), b.plan.stop) for b in buckets]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gets_its_part_of_the_sum_while_backward_runs(tmp_path, dtype):
    ranks = run_ranks(_sum_of_parts, 3, tmp_path, dtype)
    expected = 3 * 1.0 + 0.0 + 1.0 + 2.0
    for n_early, n_in_backward, launches, _ in ranks:
        assert (n_early, n_in_backward) == (0, len(launches))
        assert set(launches) == {torch.float32}, "never summed in less than fp32"
    for number, plan in enumerate(plan_buckets(SHAPES, 100, 3)):
        whole = torch.cat([parts[number][0] for *_, parts in ranks])
        assert len(whole) == plan.stop
        for slot in plan.slots:
            assert whole[slot.start : slot.stop].unique().tolist() == [expected]


def _tiny_terms(groups):
    buckets, parameters, reducer = _reducer(groups.dp, torch.bfloat16)
    reducer.start(1)
    _backward(parameters, 256.0 if groups.rank == 0 else 1.0)
    reducer.finish(lambda number: None)
    return _found(buckets)["a"].unique().tolist()


def test_bf16_gradients_are_summed_in_fp32(tmp_path):
    """256 + 1 + 1 + 1: in bf16 each 1 is lost (its neighbours are 2 apart); the sum 259 rounds to 260."""
    assert run_ranks(_tiny_terms, 4, tmp_path) == [[260.0]] * 4
