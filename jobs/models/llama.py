"""Llama as single-device maths: RMSNorm, rotary positions, grouped-query attention, SwiGLU or routed experts.

Knows no mesh axis: a layout hands in `Operations`, and may put smaller pieces into the parameters. A
pipeline stage is a Llama with some of the layers.

Parameter names are the run's logical names (Hugging Face's without `model.`, layers with their global
numbers), so nothing ever renames or permutes. One exception: a last stage with tied embeddings that does not
hold the first layers has its own copy of the embedding as its head (see `logical_name`).

Shapes: B micro-batch, S sequence, D d_model, C head_dim, F d_ff, V vocab.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from jobs.models.attention import Attention
from jobs.models.moe import Moe
from jobs.models.operations import Operations
from jobs.models.rope import inverse_frequencies, rotation
from jobs.spec.model import ModelSpec


class Embedding(nn.Embedding):
    """Rows of the embedding matrix."""

    def __init__(self, spec: ModelSpec, operations: Operations) -> None:
        super().__init__(spec.vocab_size, spec.d_model)
        self.operations = operations

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, S] int64 -> [B, S, D]."""
        return self.operations.embed(tokens, self.weight)


class Head(nn.Linear):
    """Hidden states to logits."""

    def __init__(self, spec: ModelSpec, operations: Operations) -> None:
        super().__init__(spec.d_model, spec.vocab_size, bias=False)
        self.operations = operations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, V]."""
        return self.operations.columns(x, (self.weight,))[0]


class Mlp(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, d_model: int, d_ff: int, operations: Operations) -> None:
        super().__init__()
        self.operations = operations
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        gate, up = self.operations.columns(x, (self.gate_proj.weight, self.up_proj.weight))
        return self.operations.row(F.silu(gate) * up, self.down_proj.weight)  # [B, S, F] -> [B, S, D]


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467)."""

    def __init__(self, d_model: int, eps: float, operations: Operations) -> None:
        super().__init__()
        self.operations = operations
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        weight = self.operations.replicated(self.weight)
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, spec: ModelSpec, number: int, operations: Operations, experts: range) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.d_model, spec.norm_eps, operations)
        self.self_attn = Attention(spec, operations)
        self.post_attention_layernorm = Norm(spec.d_model, spec.norm_eps, operations)
        self.mlp: nn.Module
        if spec.moe is not None and spec.is_moe_layer(number):
            self.mlp = Moe(spec.d_model, spec.moe, operations, experts)
        else:
            self.mlp = Mlp(spec.d_model, spec.d_ff, operations)

    def forward(
        self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]; the other arguments as in Attention.forward."""
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines, mask)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The decoder, or the part of it that one pipeline stage computes."""

    def __init__(
        self,
        spec: ModelSpec,
        operations: Operations | None = None,
        layers: Iterable[int] | None = None,
        experts: range | None = None,
        *,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        """Make the modules, with whole parameters.

        Args:
            spec: the whole model.
            operations: how this layout computes; None is one device.
            layers: global numbers of the layers held here; None holds all.
            experts: global numbers of the routed experts held here; None holds all.
            is_first: tokens come in, else hidden states.
            is_last: logits go out, else hidden states.
        """
        super().__init__()
        self.spec = spec
        self.operations = operations or Operations()
        self.is_first, self.is_last = is_first, is_last
        if is_first:
            self.embed_tokens = Embedding(spec, self.operations)
        numbers = range(spec.n_layers) if layers is None else layers
        if experts is None:
            experts = range(spec.moe.n_experts if spec.moe is not None else 0)
        self.layers = nn.ModuleDict({str(i): Layer(spec, i, self.operations, experts) for i in numbers})
        if is_last:
            self.norm = Norm(spec.d_model, spec.norm_eps, self.operations)
            if not self._has_embedding_as_head:
                self.lm_head = Head(spec, self.operations)

    @property
    def _has_embedding_as_head(self) -> bool:
        return self.is_first and self.spec.tie_embeddings

    def logical_name(self, path: str) -> str:
        """Logical name of the parameter that this module has at `path`."""
        is_tied_head = self.spec.tie_embeddings and path == "lm_head.weight"
        return "embed_tokens.weight" if is_tied_head else path

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits of the next token, or hidden states for the next stage.

        Args:
            x: [B, S] int64 tokens on the first stage, else [B, S, D] hidden states.
            positions: [B, S] int64.
            document_ids: [B, S], equal inside a document; None where attention is plainly causal.

        Returns:
            [B, S, V] on the last stage, else [B, S, D]; in the parameters' type.
        """
        if self.is_first:
            x = self.embed_tokens(x)  # [B, S, D]
        # Not a buffer: casting the module to bf16 must not round the frequencies.
        frequencies = inverse_frequencies(
            self.spec.head_dim, self.spec.rope_theta, self.spec.rope_scaling, positions.device
        )
        cosines, sines = rotation(positions, frequencies, x.dtype)  # [B, 1, S, C]
        mask = None if document_ids is None else self.operations.mask(document_ids)  # [B, 1, S, S]
        for layer in self.layers.values():
            x = self.operations.layer(layer, x, cosines, sines, mask)
        if not self.is_last:
            return x
        x = self.norm(x)
        if self._has_embedding_as_head:
            return self.operations.columns(x, (self.embed_tokens.weight,))[0]
        logits: torch.Tensor = self.lm_head(x)
        return logits
