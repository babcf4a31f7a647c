"""Our names and settings in Hugging Face's terms: names, shapes, config.json. Pure: touches no file.

No weight is ever permuted: rotary positions are in Hugging Face's rotate-half form already.
"""

import re
from typing import Any

from jobs.errors import SpecError
from jobs.spec.model import ModelSpec

MODEL_PREFIX = "model/"
"""Beginning of the logical names of weights in checkpoints."""

_LM_HEAD = "lm_head.weight"
_IGNORED_ENDINGS = (".rotary_emb.inv_freq",)
"""Buffers that old exports hold and that follow from the config."""


_MIXTRAL_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(\w+)\.")


def to_huggingface(parameter: str) -> str:
    """Hugging Face's name of a parameter: `norm.weight` -> `model.norm.weight`, lm_head.weight as it is.

    Routers and experts have Mixtral's names: `layers.3.mlp.experts.7.up_proj.weight` ->
    `model.layers.3.block_sparse_moe.experts.7.w3.weight`.
    """
    if parameter == _LM_HEAD:
        return parameter
    renamed = _EXPERT.sub(
        lambda found: f".block_sparse_moe.experts.{found[1]}.{_MIXTRAL_MATRICES[found[2]]}.", parameter
    )
    return "model." + renamed.replace(".mlp.gate.", ".block_sparse_moe.gate.")


def is_ignored(name: str) -> bool:
    """A tensor of a Hugging Face file that holds no weight."""
    return name.endswith(_IGNORED_ENDINGS)


def hf_config(
    model: ModelSpec, dtype: str = "float32", end_of_document_id: int | None = None
) -> dict[str, Any]:
    """config.json of the same model for transformers' LlamaForCausalLM, or MixtralForCausalLM with experts.

    Transformers drops no token, whatever capacity a model was trained with. Rotary settings stand there
    twice: `rope_parameters` for transformers 5 and later, `rope_theta` with `rope_scaling` for older readers.

    Args:
        model: the model.
        dtype: element type of the weights beside it: float32 or bfloat16.
        end_of_document_id: token that ends a text, where there is one.

    Raises:
        SpecError: the model has experts of a kind that Mixtral has not.
    """
    experts = _mixtral_experts(model)
    scaling: dict[str, Any] | None = None
    if model.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": model.rope_scaling.factor,
            "low_freq_factor": model.rope_scaling.low_freq_factor,
            "high_freq_factor": model.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling.original_max_seq_len,
        }
    return {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if experts else "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        **experts,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": model.rope_theta, **(scaling or {"rope_type": "default"})},
        "bos_token_id": None,
        "eos_token_id": end_of_document_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _mixtral_experts(model: ModelSpec) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    others = {
        "router": (moe.router, "softmax"),
        "normalize_weights": (moe.normalize_weights, True),
        "routed_scale": (moe.routed_scale, 1.0),
        "n_shared_experts": (moe.n_shared_experts, 0),
        "n_dense_layers": (moe.n_dense_layers, 0),
    }
    differing = [
        f"{key}={ours} (Mixtral: {theirs})" for key, (ours, theirs) in others.items() if ours != theirs
    ]
    if differing:
        raise SpecError(
            f"of models with experts only Mixtral's kind has a Hugging Face form here; model.moe has "
            f"{', '.join(differing)}"
        )
    return {
        "intermediate_size": moe.d_ff,
        "num_local_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "output_router_logits": False,
    }
