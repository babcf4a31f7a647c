"""All-gather attention (arXiv 2407.21783, 3.3.2): every rank gets all keys and values, queries stay.

One all-gather of the kv heads forward, one reduce-scatter of their gradients backward. With zig-zag parts
(s = S / 2 cp) rank i computes, for each of its two chunks of rows, a causal s x s block and one full block
against all keys before it: together 2 cp s^2 on every rank, as in the ring, in at most four kernels, but with
the keys and values of the whole sequence in memory until the layer's backward pass.

Knows no other way of context parallelism.

Shapes: B micro-batch, S sequence, H query heads, K kv heads, C head_dim, all of this rank.
"""

from typing import Any

import torch

from jobs.comm.collectives import gather_plain, scatter_sum_plain
from jobs.comm.groups import Axis
from jobs.parallel.context_blocks import (
    Block,
    accumulator_type,
    attend,
    attend_backward,
    merge,
    same_document,
)
from jobs.parallel.zigzag import in_parts, in_true_order, part_of


def gather_blocks(rank: int, cp: int, n_rows: int) -> list[Block]:
    """Which rows of `rank` see which keys of the whole sequence; each row's causal block comes first.

    Args:
        rank: place on the cp axis.
        cp: ranks on it.
        n_rows: S/cp, rows of each rank.
    """
    half = n_rows // 2
    blocks = []
    for rows, chunk in ((slice(0, half), rank), (slice(half, n_rows), 2 * cp - 1 - rank)):
        first = chunk * half
        blocks.append(Block(rows, slice(first, first + half), causal=True))
        if chunk:
            blocks.append(Block(rows, slice(0, first), causal=False))
    return blocks


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
        gathered = gather_plain(torch.stack((k, v)).unsqueeze(0), cp, 0)  # [cp, 2, B, K, S/cp, C]
        kv = in_true_order(list(gathered.unbind(0)), 3)  # [2, B, K, S, C]
        out = q.new_empty(q.shape, dtype=accumulator_type(q.dtype))
        lse = out.new_empty(q.shape[:3])
        for block in gather_blocks(cp.rank, cp.size, q.shape[2]):
            has_work, same = _mask(ids, block, cp)
            if not has_work:
                continue
            rows, keys = block.rows, block.keys
            found = attend(q[:, :, rows], kv[0, :, :, keys], kv[1, :, :, keys], block.causal, same)
            if block.causal:
                out[:, :, rows], lse[:, :, rows] = found
            else:
                merge(out[:, :, rows], lse[:, :, rows], *found)
        out = out.to(q.dtype)
        ctx.cp = cp
        ctx.save_for_backward(q, kv, ids, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, kv, ids, out, lse = ctx.saved_tensors
        cp: Axis = ctx.cp
        kind = accumulator_type(q.dtype)
        d_q = torch.zeros_like(q, dtype=kind)
        d_kv = torch.zeros_like(kv, dtype=kind)  # [2, B, K, S, C]
        for block in gather_blocks(cp.rank, cp.size, q.shape[2]):
            has_work, same = _mask(ids, block, cp)
            if not has_work:
                continue
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
            d_kv[0, :, :, keys] += d_k
            d_kv[1, :, :, keys] += d_v
        own = scatter_sum_plain(in_parts(d_kv, cp.size, 3), cp, 0)[0]  # [2, B, K, S/cp, C]
        return d_q.to(q.dtype), own[0].to(kv.dtype), own[1].to(kv.dtype), None, None


def _mask(ids: torch.Tensor | None, block: Block, cp: Axis) -> tuple[bool, torch.Tensor | None]:
    if ids is None:
        return True, None
    return same_document(part_of(ids, cp.size, cp.rank, 1)[:, block.rows], ids[:, block.keys])
