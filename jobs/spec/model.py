"""The model section: a Llama's shape with every dimension resolved. Presets are in presets.py."""

from math import prod
from typing import Literal, Self

from pydantic import Field, model_validator

from jobs.spec.base import SpecSection


class RopeScaling(SpecSection):
    """Llama 3.1's frequency scaling of rotary embeddings: Hugging Face's `llama3` (arXiv 2407.21783, 3.4)."""

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(default=8.0, gt=0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_max_seq_len: int = Field(default=8192, gt=0)


class MoeSpec(SpecSection):
    """Routed experts in place of the feed-forward network, in all layers but the first n_dense_layers."""

    n_experts: int = Field(gt=1)
    top_k: int = Field(gt=0)
    """Experts that each token visits."""
    d_ff: int = Field(gt=0)
    """Hidden size of one expert."""
    n_shared_experts: int = Field(default=0, ge=0)
    """Experts that every token visits (arXiv 2401.06066); together one network of n * d_ff hidden units."""
    n_dense_layers: int = Field(default=0, ge=0)
    """Leading layers that keep the dense feed-forward network."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalize_weights: bool = True
    """The weights of a token's experts are divided by their sum."""
    routed_scale: float = Field(default=1.0, gt=0)
    """Factor on the weights after that."""
    balance_loss_coef: float = Field(default=0.0, ge=0)
    """Of the balance loss of each sequence (arXiv 2412.19437, eq. 17 to 20)."""
    z_loss_coef: float = Field(default=0.0, ge=0)
    """Of the mean square of the router's logsumexp (arXiv 2202.08906, eq. 5)."""
    bias_update_rate: float = Field(default=0.0, ge=0)
    """How far each expert's selection bias moves against its load after a step (arXiv 2408.15664)."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """Tokens of one sequence that an expert takes, over the even share; None drops no token."""

    @model_validator(mode="after")
    def _routes(self) -> Self:
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k={self.top_k} experts of n_experts={self.n_experts}; lower top_k")
        if self.bias_update_rate and self.router != "sigmoid":
            raise ValueError("bias_update_rate is for router=sigmoid; set it to 0 or change the router")
        return self


class ModelSpec(SpecSection):
    """A decoder-only Llama. A preset or a Hugging Face config.json gives defaults; explicit keys win."""

    kind: Literal["llama"] = "llama"
    preset: str | None = None
    """Name of the preset that gave the defaults (kept for the record once resolved)."""
    hf_config: str | None = None
    """Path of a Hugging Face config.json that gave the defaults (kept for the record once resolved)."""
    vocab_size: int = Field(gt=0)
    n_layers: int = Field(gt=0)
    d_model: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    n_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    """Size of one attention head; the loader fills in d_model / n_heads where it is left out."""
    d_ff: int = Field(gt=0)
    max_seq_len: int = Field(gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    rope_theta: float = Field(default=500_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    init_std: float = Field(default=0.02, gt=0)
    moe: MoeSpec | None = None
    """None: every layer is dense."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}; "
                f"choose n_kv_heads in {[k for k in range(1, self.n_heads + 1) if self.n_heads % k == 0]}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd; rotary embeddings need pairs: choose an even one"
            )
        return self

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer of this number has routed experts."""
        return self.moe is not None and layer >= self.moe.n_dense_layers

    @property
    def n_params(self) -> int:
        """Number of trained parameters of the whole model (tied embeddings counted once)."""
        return sum(prod(shape) for shape in parameter_shapes(self).values())


def parameter_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Global shape of each trained parameter by logical name, in the order of the forward pass.

    The names are Hugging Face's without `model.` (experts: those of DeepSeek). The router's selection bias is
    state, not a trained parameter: see `router_bias_names`.
    """
    d, c = model.d_model, model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (model.vocab_size, d)}
    for i in range(model.n_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (model.n_heads * c, d),
            "self_attn.k_proj": (model.n_kv_heads * c, d),
            "self_attn.v_proj": (model.n_kv_heads * c, d),
            "self_attn.o_proj": (d, model.n_heads * c),
            "post_attention_layernorm": (d,),
        }
        if model.moe is None or not model.is_moe_layer(i):
            layer |= _feed_forward("mlp", d, model.d_ff)
        else:
            layer["mlp.gate"] = (model.moe.n_experts, d)
            for expert in range(model.moe.n_experts):
                layer |= _feed_forward(f"mlp.experts.{expert}", d, model.moe.d_ff)
            if model.moe.n_shared_experts:
                layer |= _feed_forward("mlp.shared_experts", d, model.moe.n_shared_experts * model.moe.d_ff)
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (d,)
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, d)
    return shapes


def router_bias_names(model: ModelSpec) -> list[str]:
    """Logical names of the selection biases, [n_experts] fp32 each; empty unless they are updated."""
    if model.moe is None or not model.moe.bias_update_rate:
        return []
    return [
        f"layers.{i}.mlp.gate.e_score_correction_bias" for i in range(model.n_layers) if model.is_moe_layer(i)
    ]


def _feed_forward(path: str, d_model: int, d_ff: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{path}.gate_proj": (d_ff, d_model),
        f"{path}.up_proj": (d_ff, d_model),
        f"{path}.down_proj": (d_model, d_ff),
    }
