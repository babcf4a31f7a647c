"""Attention over one block of keys, forward and backward, and how blocks are put together.

A query row that has seen some of its keys keeps two things: `out`, the softmax average of their values, and
`lse`, the logsumexp of their scores. Two blocks of keys merge exactly (arXiv 1805.02867, 2205.14135):

    w   = exp(lse_b) / (exp(lse_a) + exp(lse_b)) = sigmoid(lse_b - lse_a)
    out = out_a + w (out_b - out_a)              lse = log(exp(lse_a) + exp(lse_b))

Backwards, a block needs only the final out and lse of its rows: p = exp(q k^T / sqrt(C) - lse) are the true
probabilities, whichever other blocks the row has seen. So nothing of size S x S is ever kept.

Does not communicate and does not know who holds which block.

Shapes: B micro-batch, H query heads, K kv heads, C head_dim, Q rows of the block, N keys of the block.
"""

import math
from dataclasses import dataclass

import torch

_FLASH_TYPES_CUDA = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Block:
    """Rows against keys, of the tensors at hand."""

    rows: slice
    keys: slice
    causal: bool
    """Rows and keys start at the same token, and row i sees keys 0 .. i; else each row is after every key."""


def accumulator_type(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are kept in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def same_document(
    row_ids: torch.Tensor | None, key_ids: torch.Tensor | None
) -> tuple[bool, torch.Tensor | None]:
    """Which keys a block's rows may see, causality apart.

    Args:
        row_ids: [B, Q] document of each row; None where documents do not matter.
        key_ids: [B, N].

    Returns:
        Whether there is anything to compute, and [B, 1, Q, N] bool, or None where every row sees every key.
        (Only a CPU looks whether the block is empty or full: on a device the answer would be waited for.)
    """
    if row_ids is None or key_ids is None:
        return True, None
    same = row_ids[:, None, :, None] == key_ids[:, None, None, :]  # [B, 1, Q, N]
    if same.is_cpu:
        if bool(same.all()):
            return True, None
        return bool(same.any()), same
    return True, same


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, same: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of rows to one block of keys.

    Args:
        q: [B, H, Q, C].
        k: [B, K, N, C].
        v: [B, K, N, C].
        causal: as in Block.
        same: [B, 1, Q, N] bool, or None where only causality counts.

    Returns:
        out [B, H, Q, C] and lse [B, H, Q] (fp32 or fp64); 0 and -inf for a row that sees no key of the block.
    """
    if q.is_cpu:
        # The kernel takes masks of the queries' type only, and calls the lse of a row without keys 0.
        bias = None if same is None else _bias(same, q.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias
        )
        if same is not None:
            lse = lse.masked_fill(~same.any(-1), -math.inf)
        return out, lse
    if _cuda_flash_takes(q, causal, k, same):
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return found[0], found[1]
    return attend_plainly(q, k, v, causal, same)


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    same: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What one block of keys adds to the gradients of its rows, keys and values.

    Args:
        grad: [B, H, Q, C], gradient of the rows' final output.
        q: [B, H, Q, C].
        k: [B, K, N, C].
        v: [B, K, N, C].
        out: [B, H, Q, C], final output of the rows, over all their blocks.
        lse: [B, H, Q], final logsumexp of the rows.
        causal: as in Block.
        same: as in `attend`.

    Returns:
        Additions to the gradients of q, k and v, in their shapes.
    """
    if q.is_cpu:
        bias = None if same is None else _bias(same, q.dtype)
        d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias
        )
        return d_q, d_k, d_v
    if _cuda_flash_takes(q, causal, k, same):
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        n_rows, n_keys = q.shape[2], k.shape[2]
        d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, n_rows, n_keys, 0.0, causal, seed, seed[0]
        )
        return d_q, d_k, d_v
    return attend_plainly_backward(grad, q, k, v, out, lse, causal, same)


@dataclass(frozen=True)
class Rows:
    """What the backward pass of any block of keys needs of a rank's rows."""

    q: torch.Tensor
    """[B, H, S/cp, C]."""
    out: torch.Tensor
    """[B, H, S/cp, C], over all blocks."""
    lse: torch.Tensor
    """[B, H, S/cp], over all blocks."""
    grad: torch.Tensor
    """[B, H, S/cp, C], gradient of out."""

    def add_gradients(
        self,
        block: Block,
        kv: torch.Tensor,
        same: torch.Tensor | None,
        d_q: torch.Tensor,
        d_kv: torch.Tensor,
    ) -> None:
        """Add one block's gradients to d_q (as q) and d_kv (as kv), both in the accumulators' type.

        Args:
            block: which of the rows, and which keys of kv.
            kv: [2, B, K, N, C], keys and values.
            same: the block's document mask, as in `attend`.
            d_q: [B, H, S/cp, C].
            d_kv: [2, B, K, N, C].
        """
        rows, keys = block.rows, block.keys
        q, out, lse, grad = (x[:, :, rows] for x in (self.q, self.out, self.lse, self.grad))
        k, v = kv[:, :, :, keys].unbind(0)
        d_rows, d_k, d_v = attend_backward(grad, q, k, v, out, lse, block.causal, same)
        d_q[:, :, rows] += d_rows
        d_kv[0, :, :, keys] += d_k
        d_kv[1, :, :, keys] += d_v


def merge(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Put another block of keys into the rows' out [B, H, Q, C] and lse [B, H, Q], in place.

    The rows have seen a key before (their lse is finite); the block may hold none for them.
    """
    weight = torch.sigmoid(block_lse - lse)[..., None]  # [B, H, Q, 1]
    out.lerp_(block_out.to(out.dtype), weight)
    lse.copy_(torch.logaddexp(lse, block_lse))


def attend_more(
    block: Block,
    q: torch.Tensor,
    kv: torch.Tensor,
    same: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Put a block into out and lse of all rows, in place: `attend`, then `merge`.

    Args:
        block: which of the rows, and which keys of kv.
        q: [B, H, S/cp, C].
        kv: [2, B, K, N, C], keys and values.
        same: the block's document mask, as in `attend`.
        out: [B, H, S/cp, C], in the accumulators' type.
        lse: [B, H, S/cp].
    """
    rows = block.rows
    k, v = kv[:, :, :, block.keys].unbind(0)
    merge(out[:, :, rows], lse[:, :, rows], *attend(q[:, :, rows], k, v, block.causal, same))


def attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, same: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` by matrix products: where no fused kernel takes the type or the mask."""
    grouped, keys, values = _by_kv_head(q, k, v)
    scores = _scores(grouped, keys, causal, same)  # [B, K, H/K, Q, N]
    lse = scores.logsumexp(-1)  # [B, K, H/K, Q]
    out = _probabilities(scores, lse) @ values  # [B, K, H/K, Q, C]
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def attend_plainly_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    same: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attend_backward` by matrix products (arXiv 2205.14135, appendix B.2)."""
    grouped, keys, values = _by_kv_head(q, k, v)
    shape = grouped.shape
    d_out = grad.to(grouped.dtype).view(shape)  # [B, K, H/K, Q, C]
    p = _probabilities(_scores(grouped, keys, causal, same), lse.view(shape[:-1]))  # [B, K, H/K, Q, N]
    d_v = (p.transpose(-1, -2) @ d_out).sum(2)  # [B, K, N, C]
    delta = (d_out * out.to(grouped.dtype).view(shape)).sum(-1, keepdim=True)  # [B, K, H/K, Q, 1]
    d_scores = p * (d_out @ values.transpose(-1, -2) - delta) / math.sqrt(q.shape[-1])
    d_q = (d_scores @ keys).flatten(1, 2)  # [B, H, Q, C]
    d_k = (d_scores.transpose(-1, -2) @ grouped).sum(2)  # [B, K, N, C]
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def _by_kv_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kind = accumulator_type(q.dtype)
    grouped = torch.unflatten(q.to(kind), 1, (k.shape[1], -1))  # [B, K, H/K, Q, C]
    return grouped, k.to(kind).unsqueeze(2), v.to(kind).unsqueeze(2)  # [B, K, 1, N, C]


def _scores(
    grouped: torch.Tensor, keys: torch.Tensor, causal: bool, same: torch.Tensor | None
) -> torch.Tensor:
    scores = grouped @ keys.transpose(-1, -2) / math.sqrt(grouped.shape[-1])  # [B, K, H/K, Q, N]
    if same is not None:
        scores = scores.masked_fill(~same.unsqueeze(1), -math.inf)
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return scores


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    # A row without keys has lse -inf; subtracted from scores of -inf it would give nan in place of 0.
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])


def _bias(same: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(same.shape, dtype=dtype, device=same.device).masked_fill_(~same, -math.inf)


def _cuda_flash_takes(q: torch.Tensor, causal: bool, k: torch.Tensor, same: torch.Tensor | None) -> bool:
    # Its causal blocks are aligned at the end, ours at the start: the same only where they are square.
    square = not causal or q.shape[2] == k.shape[2]
    fits = q.dtype in _FLASH_TYPES_CUDA and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return same is None and square and fits
