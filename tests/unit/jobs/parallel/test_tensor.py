"""Tensor and sequence parallelism against one process, fp64: whole models, and each operation by itself."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from jobs.comm.collectives import Pending, enter, gather, max_in_place
from jobs.mesh import Mesh
from jobs.models.losses import IGNORED_LABEL, cross_entropy_sum
from jobs.models.operations import Operations
from jobs.parallel import tensor
from jobs.parallel.placement import chunk, kv_replicas
from jobs.parallel.tensor import sum_replicated_gradients, tensor_operations
from jobs.planner.stages import Stage
from tests.support.layouts import gathered, gradients, local_model, plain_gradients, sum_gradients
from tests.support.ranks import RankFailedError, run_ranks
from tests.support.tiny_runs import tiny_model

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
SP = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sp"])


def _batch(vocab_size, all_ignored=False):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, vocab_size, (3, 9), generator=generator)
    tokens[0, :2] = torch.tensor([0, vocab_size - 1])
    labels = tokens[:, 1:].clone()
    labels[1, 2:5] = IGNORED_LABEL
    if all_ignored:
        labels[:] = IGNORED_LABEL
    positions = torch.arange(8).expand(3, 8).clone()
    positions[2, 5:] -= 5
    document_ids = torch.zeros(3, 8, dtype=torch.int32)
    document_ids[2, 5:] = 1
    return tokens[:, :-1], labels, positions, document_ids


def _recomputed(layer, *arguments):
    return checkpoint(layer, *arguments, use_reentrant=False)


def _train_once(groups, spec, sequence_parallel, all_ignored=False, is_recomputed=False):
    """Loss, and on rank 0 each whole gradient."""
    operations = tensor_operations(Operations(), groups.tp, sequence_parallel)
    if is_recomputed:
        operations = replace(operations, layer=_recomputed)
    model, placements = local_model(
        spec, groups.mesh, groups, operations, sequence_parallel=sequence_parallel
    )
    tokens, labels, positions, document_ids = _batch(spec.vocab_size, all_ignored)
    loss = operations.loss(model(tokens, positions, document_ids), labels)
    loss.backward()
    grads = sum_gradients(model, placements, groups)
    return loss.detach(), gathered(grads, placements, groups)


def _assert_equals_one_process(tmp_path, spec, tp, sequence_parallel, all_ignored=False, is_recomputed=False):
    mesh = Mesh(tp=tp)
    want_loss, want = plain_gradients(spec, *_batch(spec.vocab_size, all_ignored))
    results = run_ranks(
        _train_once,
        mesh,
        tmp_path,
        spec,
        sequence_parallel,
        all_ignored,
        is_recomputed,
        kv_replicas=kv_replicas(spec, mesh),
    )
    for loss, _ in results:
        torch.testing.assert_close(loss, want_loss, **TIGHT)
        assert torch.equal(loss, results[0][0])
    got = results[0][1]
    assert got.keys() == want.keys()
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, **TIGHT, msg=lambda text, n=name: f"{n}: {text}")


@SP
@pytest.mark.parametrize(
    ("tp", "changes"),
    [
        (2, {"vocab_size": 511}),
        (4, {"vocab_size": 511}),  # two kv heads on four ranks
        (2, {"vocab_size": 259, "tie_embeddings": True}),
        (4, {"vocab_size": 259, "n_kv_heads": 1}),
    ],
)
def test_a_model_equals_one_process(tmp_path, tp, changes, sequence_parallel):
    _assert_equals_one_process(tmp_path, tiny_model(**changes), tp, sequence_parallel)


@SP
def test_a_batch_without_labels_has_no_loss_and_no_gradient(tmp_path, sequence_parallel):
    _assert_equals_one_process(tmp_path, tiny_model(vocab_size=511), 2, sequence_parallel, all_ignored=True)


@SP
def test_recomputed_layers_give_the_same_gradients(tmp_path, sequence_parallel):
    _assert_equals_one_process(tmp_path, tiny_model(), 2, sequence_parallel, is_recomputed=True)


def _not_summed(tensor_, axis):
    return Pending(tensor_)


def _own_part(x, axis, dim):
    return x.chunk(axis.size, dim)[axis.rank].contiguous()


def _own_largest(x, axis):
    return x if x.is_floating_point() else max_in_place(x, axis)


class _Unmasked(tensor._Vocabulary):
    def local(self, ids, n_rows):
        local, elsewhere = super().local(ids, n_rows)
        return local, torch.zeros_like(elsewhere)


MUTATIONS = {
    False: {
        "columns: gradient of the input not summed": {"start_sum_in_place": _not_summed},
        "row and embed: output not summed": {"leave_in_place": lambda x, axis: x},
        "loss: exponentials and targets not summed": {"sum_in_place": lambda x, axis: x},
        "loss: each rank takes off its own largest logit": {"max_in_place": _own_largest},
        "embed and loss: other ranks' ids are row 0": {"_Vocabulary": _Unmasked},
        "columns: no gradient wanted of a weight": {
            "wanted_gradients": lambda ctx: [True] + [False] * (len(ctx.next_functions) - 1)
        },
    },
    True: {
        "columns: gradient of the input cut, not summed": {
            "start_scatter_sum": lambda x, axis, dim: Pending(_own_part(x, axis, dim))
        },
        "columns: own part of the input again in place of all": {
            "start_gather": lambda x, axis, dim: Pending(torch.cat([x] * axis.size, dim))
        },
        "columns: own part of the input in place of all": {
            "gather_plain": lambda x, axis, dim: torch.cat([x] * axis.size, dim)
        },
        "row and embed: output cut, not summed": {"scatter_sum": _own_part},
    },
}


def _train_with_each_mutation(groups, spec, sequence_parallel):
    """As _train_once for each mutation, the first being none; None where copies of a gradient differ."""
    found = {}
    for name, attributes in {"none": {}, **MUTATIONS[sequence_parallel]}.items():
        kept = {attribute: getattr(tensor, attribute) for attribute in attributes}
        for attribute, broken in attributes.items():
            setattr(tensor, attribute, broken)
        try:
            found[name] = _train_once(groups, spec, sequence_parallel)
        except AssertionError:
            found[name] = None
        for attribute, right in kept.items():
            setattr(tensor, attribute, right)
    return found


@SP
def test_the_comparison_sees_every_sum_that_is_left_out(tmp_path, sequence_parallel):
    spec = tiny_model(vocab_size=511)
    _, want = plain_gradients(spec, *_batch(spec.vocab_size))
    found = run_ranks(_train_with_each_mutation, Mesh(tp=2), tmp_path, spec, sequence_parallel)[0]
    for name, result in found.items():
        if result is None:
            worst = float("inf")
        else:
            worst = max(((result[1][key] - want[key]).norm() / want[key].norm()).item() for key in want)
        assert worst < 1e-12 if name == "none" else not worst < 1e-3, (name, worst)


def _norm_gradients(groups, spec, is_summed):
    operations = tensor_operations(Operations(), groups.tp, sequence_parallel=True)
    if is_summed:
        operations = sum_replicated_gradients(operations, groups.tp)
    model, _ = local_model(spec, groups.mesh, groups, operations)
    tokens, labels, positions, document_ids = _batch(spec.vocab_size)
    operations.loss(model(tokens, positions, document_ids), labels).backward()
    return {name: grad for name, grad in gradients(model).items() if "norm" in name}


def test_replicated_gradients_are_whole_where_the_engine_does_not_sum_them(tmp_path):
    spec = tiny_model()
    _, want = plain_gradients(spec, *_batch(spec.vocab_size))
    for got in run_ranks(_norm_gradients, Mesh(tp=2), tmp_path, spec, True):
        assert len(got) == 5
        for name, grad in got.items():
            torch.testing.assert_close(grad, want[name], **TIGHT)
    for got in run_ranks(_norm_gradients, Mesh(tp=2), tmp_path, spec, False):
        assert all((grad - want[name]).norm() > 1e-3 * want[name].norm() for name, grad in got.items())


class _Counted:
    """Calls of the collectives that columns starts in its backward pass."""

    def __init__(self):
        self.calls = []
        for name in ("start_gather", "start_scatter_sum", "start_sum_in_place"):
            setattr(tensor, name, self._counting(name, getattr(tensor, name)))

    def _counting(self, name, fn):
        def call(*args):
            self.calls.append(name)
            return fn(*args)

        return call

    def take(self):
        taken, self.calls = self.calls, []
        return taken


def _column_inputs(groups, sequence_parallel, dtype=torch.float64):
    tp = groups.tp
    generator = torch.Generator().manual_seed(11)
    whole = torch.randn(3, 2 * tp.size, 6, dtype=torch.float64, generator=generator).to(dtype)
    weights = [
        torch.randn(n * tp.size, 6, dtype=torch.float64, generator=generator).to(dtype) for n in (4, 2, 3)
    ]
    outs = [
        torch.randn(3, 2 * tp.size, len(w), dtype=torch.float64, generator=generator).to(dtype)
        for w in weights
    ]
    x = (whole.chunk(tp.size, 1)[tp.rank] if sequence_parallel else whole).clone().requires_grad_()
    own = [w.chunk(tp.size)[tp.rank].clone().requires_grad_() for w in weights]
    own_outs = [g.chunk(tp.size, 2)[tp.rank] for g in outs]
    return x, own, own_outs


def _two_backward_passes(groups, sequence_parallel):
    """As zero-bubble schedules do: first what the input wants, later what the weights want."""
    counted = _Counted()
    columns = tensor_operations(Operations(), groups.tp, sequence_parallel).columns
    x, weights, grads = _column_inputs(groups, sequence_parallel)

    def outs():
        return columns(2 * x, weights)

    want_x, *want = torch.autograd.grad(outs(), [x, *weights], grads)
    at_once = counted.take()
    ys = outs()
    (got_x,) = torch.autograd.grad(ys, x, grads, retain_graph=True)
    for_input = counted.take()
    got = torch.autograd.grad(ys, weights, grads)
    for_weights = counted.take()
    assert torch.equal(got_x, want_x)
    assert all(map(torch.equal, got, want))
    sum_of_input = "start_scatter_sum" if sequence_parallel else "start_sum_in_place"
    gathered_again = ["start_gather"] if sequence_parallel else []
    assert at_once == [*gathered_again, sum_of_input]
    assert for_input == [sum_of_input]
    assert for_weights == gathered_again
    # Frozen weights: none is multiplied, and nothing is gathered for them.
    frozen = [weights[0].detach(), weights[1], weights[2].detach()]
    one = torch.autograd.grad(columns(2 * x, frozen), [x, weights[1]], grads)
    assert torch.equal(one[0], want_x)
    assert torch.equal(one[1], want[1])
    counted.take()
    (alone,) = torch.autograd.grad(columns(2 * x, [w.detach() for w in weights]), x, grads)
    assert torch.equal(alone, want_x)
    assert counted.take() == [sum_of_input]
    # An input that needs none, and an output that nobody used.
    last = columns(x.detach(), weights)[2]
    assert torch.equal(torch.autograd.grad(last, weights[2], grads[2])[0], want[2] / 2)
    unused = torch.autograd.grad(columns(2 * x, weights)[0], [x, weights[1]], grads[0], allow_unused=True)
    assert unused[1] is None


@SP
def test_two_backward_passes_communicate_what_one_does(tmp_path, sequence_parallel):
    run_ranks(_two_backward_passes, Mesh(tp=2), tmp_path, sequence_parallel)


def _split_stage(groups, sequence_parallel):
    """The last stage of a pipeline, as torch.distributed.pipelining splits its backward pass."""
    counted = _Counted()
    spec = tiny_model()
    operations = tensor_operations(Operations(), groups.tp, sequence_parallel)
    model, _ = local_model(
        spec,
        groups.mesh,
        groups,
        operations,
        stage=Stage(1, 0, range(2), is_first=False, is_last=True),
        sequence_parallel=sequence_parallel,
    )
    _, labels, positions, document_ids = _batch(spec.vocab_size)
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(3, 8, spec.d_model, dtype=torch.float64, generator=generator)
    own = whole.chunk(groups.tp.size, 1)[groups.tp.rank] if sequence_parallel else whole

    def forward():
        x = own.clone().requires_grad_()
        return x, operations.loss(model(x, positions, document_ids), labels)

    x, loss = forward()
    loss.backward()
    at_once = counted.take()
    want_x, want = x.grad, {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    x, loss = forward()
    d_inputs, later = stage_backward_input([loss], None, [x], model.parameters())
    stage_backward_weight(model.parameters(), later)
    torch.testing.assert_close(d_inputs[0], want_x, **TIGHT)
    torch.testing.assert_close(gradients(model), want, **TIGHT)
    assert sorted(counted.take()) == sorted(at_once)


@SP
def test_a_split_pipeline_stage_equals_the_whole_backward_pass(tmp_path, sequence_parallel):
    run_ranks(_split_stage, Mesh(tp=2), tmp_path, sequence_parallel)


def _naive_columns(groups, sequence_parallel):
    """One sum a weight, nothing overlapped: the version that one would write first."""
    x, weights, grads = _column_inputs(groups, sequence_parallel)
    columns = tensor_operations(Operations(), groups.tp, sequence_parallel).columns
    ours = columns(x, weights)
    if sequence_parallel:
        naive = [F.linear(gather(x, groups.tp, 1), weight) for weight in weights]
    else:
        naive = [F.linear(enter(x, groups.tp), weight) for weight in weights]
    assert all(map(torch.equal, ours, naive))
    got = torch.autograd.grad(ours, [x, *weights], grads)
    want = torch.autograd.grad(naive, [x, *weights], grads)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)


@SP
@pytest.mark.parametrize("tp", [2, 4])
def test_overlapped_columns_equal_the_plain_ones(tmp_path, tp, sequence_parallel):
    run_ranks(_naive_columns, Mesh(tp=tp), tmp_path, sequence_parallel)


def _bf16_columns(groups, sequence_parallel):
    tp = groups.tp
    operations = tensor_operations(Operations(), tp, sequence_parallel)
    x, weights, grads = _column_inputs(groups, sequence_parallel, torch.bfloat16)
    outs = operations.columns(x, weights)
    got = torch.autograd.grad(outs, [x, *weights], grads)
    assert all(tensor_.dtype == torch.bfloat16 for tensor_ in (*outs, *got))
    exact = [tensor_.detach().double().requires_grad_() for tensor_ in (x, *weights)]
    wide = operations.columns(exact[0], exact[1:])
    want = torch.autograd.grad(wide, exact, [grad.double() for grad in grads])
    for narrow, right in zip(got, want, strict=True):
        # At most tp * 3 products and sums of them, each rounded to 8 bits.
        assert (narrow.double() - right).norm() < 3 * tp.size * 2.0**-8 * right.norm()


@SP
def test_bf16_columns_stay_bf16_and_near(tmp_path, sequence_parallel):
    run_ranks(_bf16_columns, Mesh(tp=2), tmp_path, sequence_parallel)


def _losses(groups, vocab_size):
    tp = groups.tp
    tensor.CPU_BLOCK_ELEMENTS = 700  # several blocks, the last one shorter
    loss = tensor_operations(Operations(), tp, sequence_parallel=False).loss
    start, length = chunk(vocab_size, tp.size, tp.rank)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 7, vocab_size, dtype=torch.float64, generator=generator) * 3
    labels = torch.randint(0, vocab_size, (3, 7), generator=generator)
    labels[0, :3] = IGNORED_LABEL
    border, _ = chunk(vocab_size, tp.size, 1)
    labels[1, :4] = torch.tensor([0, border - 1, border, vocab_size - 1])
    for shift in (0.0, 1e4, -1e4):  # exp of them overflows or vanishes unless the largest is taken off
        for dtype, close in (
            (torch.float64, {"rtol": 1e-11, "atol": 1e-11}),
            (torch.float32, {"rtol": 1e-5, "atol": 1e-6}),
            (torch.bfloat16, {"rtol": 2.0**-8, "atol": 1e-6}),
        ):
            whole = (logits + shift).to(dtype).requires_grad_()
            want = cross_entropy_sum(whole, labels)
            (want * 0.3).backward()
            own = whole.detach()[..., start : start + length].clone().requires_grad_()
            before = own.detach().clone()
            got = loss(own, labels)
            (got * 0.3).backward()
            assert got.dtype == want.dtype
            tight = TIGHT if dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-6}
            torch.testing.assert_close(got, want, **tight)
            assert own.grad.dtype == dtype
            torch.testing.assert_close(own.grad, whole.grad[..., start : start + length], **close)
            assert torch.equal(own.detach(), before)


@pytest.mark.parametrize(("tp", "vocab_size"), [(2, 511), (4, 258), (3, 64)])
def test_the_loss_equals_cross_entropy_over_whole_logits(tmp_path, tp, vocab_size):
    run_ranks(_losses, Mesh(tp=tp), tmp_path, vocab_size)


def _look_up_a_wrong_id(groups):
    operations = tensor_operations(Operations(), groups.tp, sequence_parallel=False)
    start, length = chunk(11, 2, groups.tp.rank)
    weight = torch.arange(11.0)[start : start + length, None]
    assert operations.embed(torch.tensor([[0, 5, 6, 10]]), weight).flatten().tolist() == [0, 5, 6, 10]
    operations.embed(torch.tensor([[11]]), weight)


def test_an_id_outside_the_vocabulary_fails_as_on_one_device(tmp_path):
    with pytest.raises(RankFailedError, match="index out of range"):
        run_ranks(_look_up_a_wrong_id, Mesh(tp=2), tmp_path, collective_timeout_s=2.0)
