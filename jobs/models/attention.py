"""Grouped-query attention and its document mask. Knows no mesh axis: a layout hands in its own AttentionFn.

Shapes: B micro-batch, S sequence, D d_model, H query heads, K kv heads, C head_dim.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from jobs.models.rope import rotate
from jobs.spec.model import ModelSpec

if TYPE_CHECKING:
    from jobs.models.operations import Operations

AttentionFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(q [B, H, S, C], k [B, K, S, C], v [B, K, S, C], mask [B, 1, S, S] or None = causal) -> [B, H, S, C]."""
MaskFn = Callable[[torch.Tensor], torch.Tensor]
"""document_ids [B, S] -> the mask that the layout's AttentionFn takes."""


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """True where a query may look: the same document, and not ahead. Every row sees at least itself.

    Args:
        document_ids: [B, S].

    Returns:
        [B, 1, S, S] bool, indexed [batch, head, query, key].
    """
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]  # [B, 1, S, S]
    return same.tril_()


def local_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(C)) v on one device, the AttentionFn of every layout that does not cut sequences.

    Args:
        q: [B, H, S, C].
        k: [B, K, S, C]; each of the K heads serves H/K query heads.
        v: [B, K, S, C].
        mask: [B, 1, S, S] bool, or None for plainly causal attention.

    Returns:
        [B, H, S, C].
    """
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


class Attention(nn.Module):
    """Projections around an AttentionFn."""

    def __init__(self, spec: ModelSpec, operations: "Operations") -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.operations = operations
        self.q_proj = nn.Linear(spec.d_model, spec.n_heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.d_model, spec.n_kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.d_model, spec.n_kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.n_heads * spec.head_dim, spec.d_model, bias=False)

    def forward(
        self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Mix the sequence.

        Args:
            x: [B, S, D].
            cosines: [B, 1, S, C].
            sines: [B, 1, S, C].
            mask: what the layout's AttentionFn takes: [B, 1, S, S] bool on one device, None = causal.

        Returns:
            [B, S, D].
        """
        weights = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        q, k, v = (self._heads(y) for y in self.operations.columns(x, weights))  # [B, H | K | K, S, C]
        mixed = self.operations.attention(rotate(q, cosines, sines), rotate(k, cosines, sines), v, mask)
        joined = mixed.transpose(1, 2).flatten(2)  # [B, S, H*C]
        return self.operations.row(joined, self.o_proj.weight)  # [B, S, D]

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
