"""Ring attention (arXiv 2310.01889) over zig-zag parts: keys and values travel, queries stay.

    cp = 4, chunks of the sequence 0 .. 7         step 0      step 1      step 2      step 3
    rank 0 holds 0 7, has the keys of parts         0           3           2           1
    rank 1 holds 1 6                                1           0           3           2
    rank 2 holds 2 5                                2           1           0           3
    rank 3 holds 3 4                                3           2           1           0

    own part             causal, 2 s x 2 s
    an earlier rank's    both chunks of rows come after its first chunk and before its second: 2 s x s, full
    a later rank's       the second chunk of rows comes after both of its chunks: s x 2 s, full

So each step is the same work on each rank (s = S / 2 cp), and no block that causality empties is computed.
While a block is computed, its keys and values are on their way to the next rank. Kept for the backward pass
are this rank's q, k, v, out and lse; then keys and values go round once more, followed by the sums of their
gradients, which begin one rank after the owner and end at the owner: cp - 1 hops for each of the three.

Knows no other way of context parallelism.

Shapes: B micro-batch, S sequence, H query heads, K kv heads, C head_dim, all of this rank.
"""

from typing import Any

import torch

from jobs.comm.groups import Axis
from jobs.comm.p2p import pass_on
from jobs.parallel.context_blocks import (
    Block,
    accumulator_type,
    attend,
    attend_backward,
    merge,
    same_document,
)
from jobs.parallel.zigzag import part_of


def ring_block(rank: int, source: int, n_rows: int) -> Block:
    """Which rows of `rank` see which keys of the part of `source`.

    Args:
        rank: place on the ring of the rows' owner.
        source: place on the ring of the keys' owner.
        n_rows: S/cp, rows of each part.
    """
    whole, half = slice(0, n_rows), n_rows // 2
    if source == rank:
        return Block(whole, whole, causal=True)
    if source < rank:
        return Block(whole, slice(0, half), causal=False)
    return Block(slice(half, n_rows), whole, causal=False)


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor | None, *, cp: Axis
) -> torch.Tensor:
    """Causal attention over the whole sequence. Collective over cp.

    Args:
        q: [B, H, S/cp, C], the zig-zag part of this rank.
        k: [B, K, S/cp, C].
        v: [B, K, S/cp, C].
        document_ids: [B, S] of the whole sequence in its true order, or None: plainly causal.
        cp: the ring, two ranks or more.

    Returns:
        [B, H, S/cp, C].
    """
    out: torch.Tensor = _Ring.apply(q, k, v, document_ids, cp)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ids: torch.Tensor | None,
        cp: Axis,
    ) -> torch.Tensor:
        kind = accumulator_type(q.dtype)
        parts = _Parts(ids, q.shape[2], cp)
        kv = torch.stack((k, v))  # [2, B, K, S/cp, C]
        transfer = pass_on(kv, cp)
        block, _, same = parts.block(cp.rank)
        out, lse = attend(q, k, v, block.causal, same)
        out = out.to(kind)
        for step in range(1, cp.size):
            kv = transfer.wait()
            if step < cp.size - 1:
                transfer = pass_on(kv, cp)
            block, has_work, same = parts.block((cp.rank - step) % cp.size)
            if has_work:
                rows, keys = block.rows, block.keys
                found = attend(q[:, :, rows], kv[0, :, :, keys], kv[1, :, :, keys], block.causal, same)
                merge(out[:, :, rows], lse[:, :, rows], *found)
        out = out.to(q.dtype)
        ctx.cp = cp
        ctx.save_for_backward(q, k, v, ids, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, ids, out, lse = ctx.saved_tensors
        cp: Axis = ctx.cp
        kind = accumulator_type(q.dtype)
        parts = _Parts(ids, q.shape[2], cp)
        transfer = pass_on(torch.stack((k, v)), cp)
        block, _, same = parts.block(cp.rank)
        d_q, d_k, d_v = attend_backward(grad, q, k, v, out, lse, block.causal, same)
        d_q, own_k, own_v = d_q.to(kind), d_k.to(kind), d_v.to(kind)
        sums = None  # the gradients of the part at hand, from the ranks between its owner and this one
        for step in range(1, cp.size):
            kv = transfer.wait()
            if step < cp.size - 1:
                transfer = pass_on(kv, cp)
            added = torch.zeros_like(kv, dtype=kind)  # [2, B, K, S/cp, C]
            block, has_work, same = parts.block((cp.rank - step) % cp.size)
            if has_work:
                rows, keys = block.rows, block.keys
                d_rows, d_k, d_v = attend_backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    kv[0, :, :, keys],
                    kv[1, :, :, keys],
                    out[:, :, rows],
                    lse[:, :, rows],
                    block.causal,
                    same,
                )
                d_q[:, :, rows] += d_rows
                added[0, :, :, keys] = d_k
                added[1, :, :, keys] = d_v
            if sums is not None:
                added += sums.wait()
            sums = pass_on(added, cp)
        assert sums is not None
        from_others = sums.wait()
        own_k += from_others[0]
        own_v += from_others[1]
        return d_q.to(q.dtype), own_k.to(k.dtype), own_v.to(v.dtype), None, None


class _Parts:
    """The blocks of this rank's rows, with their documents."""

    def __init__(self, ids: torch.Tensor | None, n_rows: int, cp: Axis) -> None:
        self._ids, self._n_rows, self._cp = ids, n_rows, cp

    def block(self, source: int) -> tuple[Block, bool, torch.Tensor | None]:
        """The block against a rank's keys, whether anything of it is seen, and its document mask."""
        block = ring_block(self._cp.rank, source, self._n_rows)
        if self._ids is None:
            return block, True, None
        row_ids = part_of(self._ids, self._cp.size, self._cp.rank, 1)[:, block.rows]
        key_ids = part_of(self._ids, self._cp.size, source, 1)[:, block.keys]
        return block, *same_document(row_ids, key_ids)
