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
gradients, which begin one rank after the owner and end at the owner: cp - 1 hops for each of the three. The
own part is then computed in two portions: one while the first keys travel, one while the last sums do.

Knows no other way of context parallelism.

Shapes: B micro-batch, S sequence, H query heads, K kv heads, C head_dim, all of this rank.
"""

from typing import Any

import torch

from jobs.comm.groups import Axis
from jobs.comm.p2p import pass_on
from jobs.parallel.context_blocks import (
    Block,
    Rows,
    accumulator_type,
    attend,
    attend_more,
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


def own_portions(n_rows: int) -> tuple[list[Block], Block]:
    """A rank's own part in two portions of work 3 : 1, of square causal blocks and full ones."""
    early, late = slice(0, n_rows // 2), slice(n_rows // 2, n_rows)
    first = [Block(late, early, causal=False), Block(early, early, causal=True)]
    return first, Block(late, late, causal=True)


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
        parts = _Parts(ids, cp)
        kv = torch.stack((k, v))  # [2, B, K, S/cp, C]
        transfer = pass_on(kv, cp)
        block = ring_block(cp.rank, cp.rank, q.shape[2])
        out, lse = attend(q, k, v, block.causal, parts.mask(block, cp.rank)[1])
        out = out.to(kind)
        for step in range(1, cp.size):
            kv = transfer.wait()
            if step < cp.size - 1:
                transfer = pass_on(kv, cp)
            source = (cp.rank - step) % cp.size
            block = ring_block(cp.rank, source, q.shape[2])
            has_work, same = parts.mask(block, source)
            if has_work:
                attend_more(block, q, kv, same, out, lse)
        out = out.to(q.dtype)
        ctx.cp = cp
        ctx.save_for_backward(q, k, v, ids, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, ids, out, lse = ctx.saved_tensors
        cp: Axis = ctx.cp
        kind = accumulator_type(q.dtype)
        parts = _Parts(ids, cp)
        rows = Rows(q, out, lse, grad)
        own = torch.stack((k, v))  # [2, B, K, S/cp, C]
        d_q, d_own = torch.zeros_like(q, dtype=kind), torch.zeros_like(own, dtype=kind)

        def add(block: Block, source: int, kv: torch.Tensor, d_kv: torch.Tensor) -> None:
            has_work, same = parts.mask(block, source)
            if has_work:
                rows.add_gradients(block, kv, same, d_q, d_kv)

        first, last = own_portions(q.shape[2])
        transfer = pass_on(own, cp)
        for block in first:
            add(block, cp.rank, own, d_own)
        sums = None  # gradients of the part at hand, from the ranks between its owner and this one
        for step in range(1, cp.size):
            kv = transfer.wait()
            if step < cp.size - 1:
                transfer = pass_on(kv, cp)
            d_kv = torch.zeros_like(kv, dtype=kind)
            source = (cp.rank - step) % cp.size
            add(ring_block(cp.rank, source, q.shape[2]), source, kv, d_kv)
            if sums is not None:
                d_kv += sums.wait()
            sums = pass_on(d_kv, cp)
        add(last, cp.rank, own, d_own)
        assert sums is not None
        d_own += sums.wait()
        return d_q.to(q.dtype), d_own[0].to(k.dtype), d_own[1].to(v.dtype), None, None


class _Parts:
    """The documents of this rank's rows and of the parts that pass by."""

    def __init__(self, ids: torch.Tensor | None, cp: Axis) -> None:
        self._ids, self._cp = ids, cp
        self._own_ids = None if ids is None else part_of(ids, cp.size, cp.rank, 1)

    def mask(self, block: Block, source: int) -> tuple[bool, torch.Tensor | None]:
        """Whether a block against the part of `source` has work, and its document mask."""
        if self._ids is None or self._own_ids is None:
            return True, None
        key_ids = part_of(self._ids, self._cp.size, source, 1)[:, block.keys]
        return same_document(self._own_ids[:, block.rows], key_ids)
