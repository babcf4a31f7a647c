"""All-gather attention (arXiv 2407.21783, 3.3.2): every rank gets all keys and values, queries stay.

One all-gather of the kv heads forward, one reduce-scatter of their gradients backward; both travel while
the rank computes its own part (causal, 2 s x 2 s with s = S / 2 cp). The rows of rank i, which are chunks i
and 2 cp - 1 - i:

    cp = 4, i = 1, chunks of keys      0   1   2   3   4   5   6   7
    chunk 1 of the rows                x   own
    chunk 6 of the rows                x   own y   y   y   y   own

    x   both chunks of rows, the keys before the early one: 2 s x i s, full
    y   the late chunk of rows, the keys between the two: s x (2 cp - 2 - 2 i) s, full

Together 2 cp s^2 on every rank, as in a ring, in three kernels whatever cp is; but the keys and values of the
whole sequence stay in memory until the layer's backward pass.

Knows no other way of context parallelism.

Shapes: B micro-batch, S sequence, H query heads, K kv heads, C head_dim, all of this rank.
"""

from typing import Any

import torch

from jobs.comm.collectives import start_gather, start_scatter_sum
from jobs.comm.groups import Axis
from jobs.parallel.context_blocks import (
    Block,
    Rows,
    accumulator_type,
    attend,
    attend_backward,
    attend_more,
    same_document,
)
from jobs.parallel.zigzag import in_parts, in_true_order, part_of


def gather_blocks(rank: int, cp: int, n_rows: int) -> list[Block]:
    """Which rows of `rank` see which keys of the whole sequence, the rank's own part apart.

    Args:
        rank: place on the cp axis.
        cp: ranks on it.
        n_rows: S/cp, rows of each rank.
    """
    half = n_rows // 2
    before = Block(slice(0, n_rows), slice(0, rank * half), causal=False)
    between = Block(slice(half, n_rows), slice((rank + 1) * half, (2 * cp - 1 - rank) * half), causal=False)
    return [block for block in (before, between) if block.keys.start < block.keys.stop]


def gather_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None, *, cp: Axis
) -> torch.Tensor:
    """Causal attention over the whole sequence. Collective over cp.

    Args:
        q: [B, H, S/cp, C], the zig-zag part of this rank.
        k: [B, K, S/cp, C].
        v: [B, K, S/cp, C].
        document_ids: [B, S] of the whole sequence in its true order, or None: plainly causal.
        cp: the ranks that share the sequence, two or more.

    Returns:
        [B, H, S/cp, C].
    """
    out: torch.Tensor = _Gathered.apply(q, k, v, document_ids, cp)  # type: ignore[no-untyped-call]
    return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ids: torch.Tensor | None,
        cp: Axis,
    ) -> torch.Tensor:
        pending = start_gather(torch.stack((k, v)).unsqueeze(0), cp, 0)
        own_ids, others = _blocks(ids, q.shape[2], cp)
        _, same = same_document(own_ids, own_ids)
        out, lse = attend(q, k, v, True, same)
        out = out.to(accumulator_type(q.dtype))
        kv = in_true_order(list(pending.wait().unbind(0)), 3)  # [2, B, K, S, C]
        for block, same in others:
            attend_more(block, q, kv, same, out, lse)
        out = out.to(q.dtype)
        ctx.cp = cp
        ctx.save_for_backward(q, k, v, kv, ids, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, kv, ids, out, lse = ctx.saved_tensors
        cp: Axis = ctx.cp
        kind = accumulator_type(q.dtype)
        own_ids, others = _blocks(ids, q.shape[2], cp)
        rows = Rows(q, out, lse, grad)
        d_q = torch.zeros_like(q, dtype=kind)
        d_kv = torch.zeros_like(kv, dtype=kind)  # [2, B, K, S, C]
        for block, same in others:
            rows.add_gradients(block, kv, same, d_q, d_kv)
        pending = start_scatter_sum(in_parts(d_kv, cp.size, 3), cp, 0)
        _, same = same_document(own_ids, own_ids)
        d_rows, d_k, d_v = attend_backward(grad, q, k, v, out, lse, True, same)
        d_q += d_rows
        d_own = pending.wait()[0]  # [2, B, K, S/cp, C]
        d_own[0] += d_k
        d_own[1] += d_v
        return d_q.to(q.dtype), d_own[0].to(k.dtype), d_own[1].to(v.dtype), None, None


def _blocks(
    ids: torch.Tensor | None, n_rows: int, cp: Axis
) -> tuple[torch.Tensor | None, list[tuple[Block, torch.Tensor | None]]]:
    """Documents of this rank's rows [B, S/cp], and its blocks that have work with their document masks."""
    blocks = gather_blocks(cp.rank, cp.size, n_rows)
    if ids is None:
        return None, [(block, None) for block in blocks]
    own_ids = part_of(ids, cp.size, cp.rank, 1)
    found = []
    for block in blocks:
        has_work, same = same_document(own_ids[:, block.rows], ids[:, block.keys])
        if has_work:
            found.append((block, same))
    return own_ids, found
