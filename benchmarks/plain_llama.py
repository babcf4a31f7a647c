"""A Llama as a user of torch alone writes it: nn.Linear and nn.RMSNorm modules, no layout in it anywhere.

What torch's and DeepSpeed's own parallelism is applied to. The same maths, parameter names and start weights
as jobs/models/llama.py, of which it has only the rotary positions.
"""

import torch
import torch.nn.functional as F
from torch import nn

from jobs.models.attention import AttentionFn
from jobs.models.init import initial_value
from jobs.models.rope import inverse_frequencies, rotate, rotation
from jobs.spec.model import ModelSpec


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Looks F.scaled_dot_product_attention up at each call: torch's context_parallel replaces it there."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class PlainAttention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, spec: ModelSpec, attention: AttentionFn) -> None:
        super().__init__()
        self.head_dim, self.attention = spec.head_dim, attention
        self.q_proj = nn.Linear(spec.d_model, spec.n_heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.d_model, spec.n_kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.d_model, spec.n_kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.n_heads * spec.head_dim, spec.d_model, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]; how many heads there are is read off the projections' results."""
        q, k, v = (
            y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        mixed = self.attention(rotate(q, cosines, sines), rotate(k, cosines, sines), v, None)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class PlainMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainLayer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, spec: ModelSpec, attention: AttentionFn) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.d_model, spec.norm_eps)
        self.self_attn = PlainAttention(spec, attention)
        self.post_attention_layernorm = nn.RMSNorm(spec.d_model, spec.norm_eps)
        self.mlp = PlainMlp(spec.d_model, spec.d_ff)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLlama(nn.Module):
    """The decoder, with the start weights of a run of this seed."""

    def __init__(
        self,
        spec: ModelSpec,
        seed: int,
        device: torch.device,
        attention: AttentionFn = causal_attention,
    ) -> None:
        super().__init__()
        self.spec = spec
        with device:
            self.embed_tokens = nn.Embedding(spec.vocab_size, spec.d_model)
            self.layers = nn.ModuleList(PlainLayer(spec, attention) for _ in range(spec.n_layers))
            self.norm = nn.RMSNorm(spec.d_model, spec.norm_eps)
            self.lm_head = nn.Linear(spec.d_model, spec.vocab_size, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(initial_value(name, tuple(parameter.shape), spec, seed))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, S] tokens and positions -> logits [B, S, V]."""
        x = self.embed_tokens(tokens)
        frequencies = inverse_frequencies(
            self.spec.head_dim, self.spec.rope_theta, self.spec.rope_scaling, positions.device
        )
        cosines, sines = rotation(positions, frequencies, torch.float32)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        return self.lm_head(self.norm(x))
