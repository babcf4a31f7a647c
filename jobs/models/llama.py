"""Llama as single-device maths: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Knows no mesh axis.

Parameter names are the run's logical names (Hugging Face's without `model.`), so nothing ever renames or
permutes.

Shapes: B micro-batch, S sequence, D d_model, C head_dim, F d_ff, V vocab.
"""

import torch
import torch.nn.functional as F
from torch import nn

from jobs.models.attention import Attention, AttentionFn, document_mask, local_attention
from jobs.models.rope import inverse_frequencies, rotation
from jobs.spec.model import ModelSpec

IGNORED_LABEL = -100
"""Label of a position where no loss is taken."""


class Mlp(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.d_model, spec.d_ff, bias=False)
        self.up_proj = nn.Linear(spec.d_model, spec.d_ff, bias=False)
        self.down_proj = nn.Linear(spec.d_ff, spec.d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)  # [B, S, F]
        out: torch.Tensor = self.down_proj(hidden)
        return out


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, spec: ModelSpec, attention_fn: AttentionFn) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.self_attn = Attention(spec, attention_fn)
        self.post_attention_layernorm = nn.RMSNorm(spec.d_model, eps=spec.norm_eps)
        self.mlp = Mlp(spec)

    def forward(
        self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]; the other arguments as in Attention.forward."""
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines, mask)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The whole decoder."""

    def __init__(self, spec: ModelSpec, attention_fn: AttentionFn = local_attention) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.d_model)
        self.layers = nn.ModuleList(Layer(spec, attention_fn) for _ in range(spec.n_layers))
        self.norm = nn.RMSNorm(spec.d_model, eps=spec.norm_eps)
        if not spec.tie_embeddings:
            self.lm_head = nn.Linear(spec.d_model, spec.vocab_size, bias=False)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits of the next token.

        Args:
            tokens: [B, S] int64.
            positions: [B, S] int64.
            document_ids: [B, S], equal inside a document; None where attention is plainly causal.

        Returns:
            [B, S, V] in the parameters' type.
        """
        x = self.embed_tokens(tokens)  # [B, S, D]
        # Not a buffer: casting the module to bf16 must not round the frequencies.
        frequencies = inverse_frequencies(
            self.spec.head_dim, self.spec.rope_theta, self.spec.rope_scaling, tokens.device
        )
        cosines, sines = rotation(positions, frequencies, x.dtype)  # [B, 1, S, C]
        mask = None if document_ids is None else document_mask(document_ids)  # [B, 1, S, S]
        for layer in self.layers:
            x = layer(x, cosines, sines, mask)
        head = self.embed_tokens if self.spec.tie_embeddings else self.lm_head
        return F.linear(self.norm(x), head.weight)


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of -log softmax(logits)[label] over the positions that have a label, in fp32.

    Args:
        logits: [B, S, V].
        labels: [B, S] int64, IGNORED_LABEL where no loss is taken.

    Returns:
        Scalar fp32.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
