"""Ulysses (arXiv 2309.14509): an all-to-all turns parts of sequences into whole sequences of fewer heads.

    before      rank i holds part i of the sequence, all heads         [B, H, S/cp, C]
    attention   rank i holds the whole sequence, group i of the heads  [B, H/cp, S, C]
    after       as before

The attention in between is one device's own. Each rank sends (cp - 1)/cp of its q, k, v and output, whatever
cp is: S/cp (2 H + 2 K) C values in all, against (cp - 1) S/cp 2 K C of a ring; but H has to divide by cp. Kv
heads that do not divide by cp are repeated until they do, and a repeated head's gradients add up.

Knows no other way of context parallelism.

Shapes: B micro-batch, S sequence, H query heads, K kv heads, C head_dim, all of this rank.
"""

import math

import torch

from jobs.comm.collectives import exchange
from jobs.comm.groups import Axis
from jobs.models.attention import AttentionFn
from jobs.parallel.zigzag import in_parts, in_true_order


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    cp: Axis,
    attention: AttentionFn,
) -> torch.Tensor:
    """Causal attention over the whole sequence. Collective over cp.

    Args:
        q: [B, H, S/cp, C], the zig-zag part of this rank.
        k: [B, K, S/cp, C].
        v: [B, K, S/cp, C].
        mask: what `attention` takes for the whole sequence in its true order.
        cp: the ranks that share the sequence.
        attention: one device's attention.

    Returns:
        [B, H, S/cp, C].

    Raises:
        ValueError: the heads do not divide over the ranks.
    """
    if q.shape[1] % cp.size:
        raise ValueError(
            f"ulysses cannot share {q.shape[1]} query heads over cp={cp.size} ranks; "
            "choose a cp that divides n_heads / tp, or context_method=ring"
        )
    n_repeats = cp.size // math.gcd(cp.size, k.shape[1])
    if n_repeats > 1:
        k, v = k.repeat_interleave(n_repeats, dim=1), v.repeat_interleave(n_repeats, dim=1)
    groups = [torch.unflatten(x, 1, (cp.size, -1)) for x in (q, k, v)]  # [B, cp, H/cp | K/cp | K/cp, S/cp, C]
    n_heads = [group.shape[2] for group in groups]
    sent = torch.cat(groups, dim=2).transpose(0, 1)  # [cp, B, (H + 2 K)/cp, S/cp, C]
    whole = in_true_order(list(_swap(sent, cp).unbind(0)), 2)  # [B, (H + 2 K)/cp, S, C]
    q, k, v = torch.split(whole, n_heads, dim=1)
    mixed = attention(q, k, v, mask)  # [B, H/cp, S, C]
    back = _swap(in_parts(mixed, cp.size, 2), cp)  # [cp, B, H/cp, S/cp, C]
    return back.transpose(0, 1).flatten(1, 2)


def _swap(x: torch.Tensor, cp: Axis) -> torch.Tensor:
    """[cp, ...] by receiver -> [cp, ...] by sender."""
    one_each = [1] * cp.size
    return exchange(x.contiguous(), cp, one_each, one_each)
