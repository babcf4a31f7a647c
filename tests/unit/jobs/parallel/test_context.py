from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import jobs.parallel.context_blocks as context_blocks
import jobs.parallel.context_gather as context_gather
import jobs.parallel.context_ring as context_ring
from jobs.comm.groups import Axis
from jobs.engines.base import MicroBatch
from jobs.mesh import Mesh
from jobs.models.attention import document_mask, local_attention
from jobs.models.losses import IGNORED_LABEL, cross_entropy_sum
from jobs.models.operations import Operations
from jobs.parallel.context import context_operations, split_batch
from jobs.parallel.context_blocks import Block
from jobs.parallel.context_gather import gather_blocks
from jobs.parallel.context_ring import ring_block
from jobs.parallel.tensor import tensor_operations
from jobs.parallel.zigzag import in_parts, in_true_order, part_of, zigzag_indices
from tests.support.layouts import gathered, local_model, plain_gradients, sum_gradients
from tests.support.ranks import run_ranks
from tests.support.tiny_runs import tiny_model

METHODS = ("ring", "ulysses", "all_gather")
B, S, C = 2, 48, 8


def _documents(kind):
    """Ids of documents: none, some that cross every border between parts, or many that leave blocks empty."""
    if kind == "none":
        return None
    lengths = {"uneven": ([7, 26, 1, 14], [3, 44, 1]), "short": ([5] * 9 + [3], [1] * 48)}[kind]
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return torch.stack(rows).int()


def _inputs(n_heads, n_kv_heads, dtype):
    generator = torch.Generator().manual_seed(3)
    heads = (n_heads, n_kv_heads, n_kv_heads, n_heads)
    return [torch.randn(B, h, S, C, generator=generator, dtype=torch.float64).to(dtype) for h in heads]


def _reference(n_heads, n_kv_heads, documents, dtype):
    q, k, v, grad = _inputs(n_heads, n_kv_heads, dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ids = _documents(documents)
    out = local_attention(*leaves, None if ids is None else document_mask(ids))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _parallel(groups, method, n_heads, n_kv_heads, documents, dtype, wrap=None):
    """Output and gradients of this rank's part."""
    cp = groups.cp
    operations = context_operations(Operations(), method, cp, S)
    q, k, v, grad = (part_of(x, cp.size, cp.rank, 2) for x in _inputs(n_heads, n_kv_heads, dtype))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ids = _documents(documents)
    mask = None if ids is None else operations.mask(part_of(ids, cp.size, cp.rank, 1))
    attention = operations.attention if wrap is None else wrap(operations.attention)
    out = attention(*leaves, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _worst(groups, found, expected):
    """Largest relative error of output and gradients against this rank's part of the whole ones."""
    own = [part_of(x, groups.cp.size, groups.cp.rank, 2) for x in expected]
    assert [x.shape for x in found] == [x.shape for x in own]
    assert [x.dtype for x in found] == [x.dtype for x in own]
    pairs = zip(found, own, strict=True)
    return [((a - b).double().norm() / b.double().norm()).item() for a, b in pairs]


def _errors(groups, cases):
    return {case: max(_worst(groups, _parallel(groups, *case), _reference(*case[1:]))) for case in cases}


@pytest.mark.parametrize("cp", [2, 4])
def test_equals_one_process(cp, tmp_path):
    cases = [
        (method, 4, n_kv_heads, documents, torch.float64)
        for method in METHODS
        for n_kv_heads in (1, 2, 4)
        for documents in ("none", "uneven", "short")
    ]
    for errors in run_ranks(_errors, Mesh(cp=cp), tmp_path, cases):
        assert {case: error for case, error in errors.items() if not error <= 1e-12} == {}


def test_three_ranks_with_kv_heads_that_do_not_divide(tmp_path):
    cases = [(method, 6, 2, "uneven", torch.float64) for method in METHODS]
    for errors in run_ranks(_errors, Mesh(cp=3), tmp_path, cases):
        assert max(errors.values()) <= 1e-12


def test_bf16_sums_in_fp32(tmp_path):
    cases = [
        (method, 4, 2, documents, torch.bfloat16) for method in METHODS for documents in ("none", "uneven")
    ]
    exact = {case: _reference(*case[1:4], torch.float64) for case in cases}
    for case in cases:  # one process in bf16 is as far from the truth
        rounded = _reference(*case[1:])
        assert (
            max(((a - b).norm() / b.norm()).item() for a, b in zip(rounded, exact[case], strict=True)) < 0.01
        )
    for errors in run_ranks(_errors, Mesh(cp=4), tmp_path, cases):
        assert max(errors.values()) < 0.01


def _recomputed(groups, method):
    case = (4, 2, "uneven", torch.float64)
    recomputed = _parallel(groups, method, *case, wrap=lambda f: partial(checkpoint, f, use_reentrant=False))
    return max(_worst(groups, recomputed, _reference(*case)))


@pytest.mark.parametrize("method", METHODS)
def test_works_inside_a_checkpoint(method, tmp_path):
    assert max(run_ranks(_recomputed, Mesh(cp=2), tmp_path, method)) <= 1e-12


def test_ulysses_refuses_heads_that_do_not_divide():
    operations = context_operations(Operations(), "ulysses", Axis((0, 1), 0, None), S)
    q = torch.zeros(B, 3, S // 2, C)
    with pytest.raises(ValueError, match="3 query heads over cp=2"):
        operations.attention(q, q, q, None)


# The cut


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_parts_tile_the_sequence_and_cost_the_same(cp):
    parts = [zigzag_indices(48, cp, rank) for rank in range(cp)]
    assert sorted(torch.cat(parts).tolist()) == list(range(48))
    assert len({int(part.sum()) for part in parts}) == 1
    assert all(bool((part.diff() > 0).all()) for part in parts)
    x = torch.randn(2, 48, 3)
    assert torch.equal(in_true_order(list(in_parts(x, cp, 1).unbind(0)), 1), x)
    assert torch.equal(part_of(x, cp, cp - 1, 1), x[:, parts[-1]])


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(
        ValueError, match="seq_len=30 does not divide into 2 \\* cp = 8 chunks; choose 24 or 32"
    ):
        zigzag_indices(30, 4, 0)


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
@pytest.mark.parametrize("blocks_of", ["ring", "all_gather"])
def test_blocks_are_exactly_the_causal_mask_and_the_same_work_on_each_rank(cp, blocks_of):
    n_rows, works, n_blocks = 6, [], []
    for rank in range(cp):
        own = zigzag_indices(n_rows * cp, cp, rank)
        if blocks_of == "ring":
            sources = {source: ring_block(rank, source, n_rows) for source in range(cp)}
            placed = [(b, zigzag_indices(n_rows * cp, cp, source)[b.keys]) for source, b in sources.items()]
        else:
            everything = slice(0, n_rows)
            placed = [(Block(everything, everything, causal=True), own)]
            placed += [(b, torch.arange(n_rows * cp)[b.keys]) for b in gather_blocks(rank, cp, n_rows)]
        seen = torch.zeros(n_rows, n_rows * cp, dtype=torch.int64)
        work = 0
        for block, keys in placed:
            visible = torch.ones(len(own[block.rows]), len(keys), dtype=torch.int64)
            if block.causal:
                assert torch.equal(own[block.rows], keys)
                visible = visible.tril()
            seen[torch.arange(n_rows)[block.rows][:, None], keys[None, :]] += visible
            work += visible.sum().item()
        assert torch.equal(seen, (own[:, None] >= torch.arange(n_rows * cp)[None, :]).long())
        works.append(work)
        n_blocks.append(len(placed))
    assert len(set(works)) == 1
    if blocks_of == "ring":
        assert n_blocks == [cp] * cp
    else:
        assert max(n_blocks) <= 3


# Blocks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_matrix_products_give_what_the_kernel_gives(dtype, n_kv_heads, masked, causal):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 12, 8), (2, n_kv_heads, 12, 8), (2, n_kv_heads, 12, 8), (2, 4, 12, 8)]
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    same = None
    if masked:
        same = torch.rand(2, 1, 12, 12, generator=generator) < 0.5
        same |= torch.eye(12, dtype=torch.bool)
        if not causal:
            same[:, :, 3] = False  # a row that sees none of these keys
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-12, 1e-13)
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    plain = context_blocks.attend_plainly(q, k, v, causal, same)
    kernel = context_blocks.attend(q, k, v, causal, same)
    for a, b in zip(plain, kernel, strict=True):
        close(a, b)
    # The rows' final output and lse: they have seen another block as well.
    out, lse = (x.clone() for x in plain)
    if masked and not causal:
        assert torch.equal(lse[:, :, 3], torch.full_like(lse[:, :, 3], -torch.inf))
        lse[:, :, 3] = 0.3
    context_blocks.merge(out, lse, *context_blocks.attend(q, k.flip(2), v + 1, False, None))
    arguments = (grad, q, k, v, out, lse, causal, same)
    for a, b in zip(
        context_blocks.attend_plainly_backward(*arguments),
        context_blocks.attend_backward(*arguments),
        strict=True,
    ):
        close(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernels_of_another_device_take_the_same_calls(causal):
    # Shapes and types only: a meta tensor goes the way of a GPU's.
    q = torch.empty(2, 8, 16, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 16, 64, dtype=torch.bfloat16, device="meta")
    out, lse = context_blocks.attend(q, k, k, causal, None)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
    grads = context_blocks.attend_backward(out, q, k, k, out, lse, causal, None)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


# Whole models


def _batch():
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, 97, (B, S), generator=generator)
    labels = torch.randint(0, 97, (B, S), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORED_LABEL
    ids = _documents("uneven")
    firsts = [[row.tolist().index(i) for i in row.tolist()] for row in ids]
    return MicroBatch(tokens, labels, torch.arange(S) - torch.tensor(firsts), ids)


def _whole_batch(masked):
    batch = _batch()
    if masked:
        return batch
    return replace(batch, positions=torch.arange(S).expand(B, S), document_ids=None)


def _model_gradients(groups, method, masked, mutation=None):
    spec = tiny_model()
    operations = context_operations(Operations(), method, groups.cp, S)
    model, placements = local_model(spec, groups.mesh, groups, operations)
    batch = split_batch(_whole_batch(masked), groups.cp)
    if mutation == "local positions":
        batch = replace(batch, positions=torch.arange(S // groups.cp.size).expand(B, -1))
    logits = model(batch.tokens, batch.positions, batch.document_ids)
    loss = cross_entropy_sum(logits, batch.labels)
    loss.backward()
    return loss.item(), gathered(sum_gradients(model, placements, groups), placements, groups)


def _model_error(results, masked):
    batch = _whole_batch(masked)
    loss, expected = plain_gradients(
        tiny_model(), batch.tokens, batch.labels, batch.positions, batch.document_ids
    )
    found = results[0][1]
    assert found.keys() == expected.keys()
    errors = [((found[n] - g).norm() / g.norm()).item() for n, g in expected.items()]
    return max(*errors, abs(sum(part for part, _ in results) / loss.item() - 1.0))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("masked", [False, True])
def test_model_equals_one_process(method, masked, tmp_path):
    results = run_ranks(_model_gradients, Mesh(cp=2), tmp_path, method, masked)
    assert _model_error(results, masked) <= 1e-12


def test_model_equals_one_process_beside_data_parallel_sums(tmp_path):
    # Summed over dp x cp: both dp ranks have the same batch, so gradients and losses come out doubled.
    results = run_ranks(_model_gradients, Mesh(dp=2, cp=2), tmp_path, "ring", True)
    halved = [(loss / 2, {name: grad / 2 for name, grad in grads.items()}) for loss, grads in results]
    assert _model_error(halved, True) <= 1e-12


def _beside_tensor_parallel(groups, method, sequence_parallel):
    spec = tiny_model()
    cut = tensor_operations(Operations(), groups.tp, sequence_parallel)
    operations = context_operations(cut, method, groups.cp, S)
    model, placements = local_model(
        spec, groups.mesh, groups, operations, sequence_parallel=sequence_parallel
    )
    batch = split_batch(_whole_batch(True), groups.cp)
    loss = operations.loss(model(batch.tokens, batch.positions, batch.document_ids), batch.labels)
    loss.backward()
    grads = gathered(sum_gradients(model, placements, groups), placements, groups)
    return loss.item() / groups.tp.size, grads  # every tp rank has the loss of the same tokens


@pytest.mark.parametrize(
    ("method", "sequence_parallel"), [("ring", True), ("ulysses", True), ("ring", False)]
)
def test_model_equals_one_process_beside_tensor_parallel(method, sequence_parallel, tmp_path):
    mesh = Mesh(cp=2, tp=2)
    results = run_ranks(_beside_tensor_parallel, mesh, tmp_path, method, sequence_parallel)
    assert _model_error(results, True) <= 1e-12


def test_positions_of_the_part_are_noticed(tmp_path):
    # Half of the positions of rank 0 are right either way: rotary angles are relative, chunks are not.
    results = run_ranks(_model_gradients, Mesh(cp=2), tmp_path, "ring", False, "local positions")
    assert _model_error(results, False) > 1e-3


def _contiguous_mask(groups, method):
    """Error with the document mask of parts that are cut one after another."""
    module = context_ring if method == "ring" else context_gather
    module.part_of = lambda x, cp, rank, dim: x.chunk(cp, dim)[rank]
    return _errors(groups, [(method, 4, 2, "uneven", torch.float64)])


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_a_mask_of_contiguous_parts_is_noticed(method, tmp_path):
    for errors in run_ranks(_contiguous_mask, Mesh(cp=2), tmp_path, method):
        (error,) = errors.values()
        assert not error < 1e-3  # nan where a row no longer sees itself


# What is sent and computed


def _traffic(groups, documents):
    """Bytes sent and sizes of the blocks computed by a ring, forward and backward."""
    sent, computed = [], []
    exchange = dist.batch_isend_irecv
    attend, attend_backward = context_ring.attend, context_blocks.attend_backward

    def counted_exchange(operations):
        sent.extend(o.tensor.numel() * o.tensor.element_size() for o in operations if o.op is dist.isend)
        return exchange(operations)

    def counted_attend(q, k, *rest):
        computed.append(q.shape[2] * k.shape[2])
        return attend(q, k, *rest)

    def counted_backward(grad, q, k, *rest):
        computed.append(q.shape[2] * k.shape[2])
        return attend_backward(grad, q, k, *rest)

    dist.batch_isend_irecv = counted_exchange
    # The own part is attended to in context_ring, all others in context_blocks.
    context_ring.attend = context_blocks.attend = counted_attend
    context_blocks.attend_backward = counted_backward
    cp = groups.cp
    operations = context_operations(Operations(), "ring", cp, S)
    q, k, v, _ = (part_of(x, cp.size, cp.rank, 2) for x in _inputs(4, 2, torch.float32))
    ids = _documents(documents)
    mask = None if ids is None else operations.mask(part_of(ids, cp.size, cp.rank, 1))
    out = operations.attention(*(x.requires_grad_() for x in (q, k, v)), mask)
    forward = (sum(sent), list(computed))
    sent.clear()
    computed.clear()
    out.sum().backward()
    return *forward, sum(sent), computed


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_sends_each_other_part_once_and_each_rank_computes_the_same(cp, tmp_path):
    part_bytes = 2 * B * 2 * (S // cp) * C * 4  # K and V of the two kv heads
    own = (S // cp) ** 2
    for sent, computed, sent_backward, computed_backward in run_ranks(
        _traffic, Mesh(cp=cp), tmp_path, "none"
    ):
        assert sent == (cp - 1) * part_bytes
        assert computed == [own] + [own // 2] * (cp - 1)
        assert sent_backward == 2 * (cp - 1) * part_bytes  # once more, and their gradients
        assert computed_backward == [own // 4] * 2 + [own // 2] * (cp - 1) + [own // 4]


def test_blocks_without_a_common_document_are_not_computed(tmp_path):
    for _, computed, _, computed_backward in run_ranks(_traffic, Mesh(cp=4), tmp_path, "short"):
        assert len(computed) < 4
        assert len(computed_backward) < 6
