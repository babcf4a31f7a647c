"""Our names and settings in Hugging Face's terms: names, shapes, config.json. Pure: touches no file.

No weight is ever permuted: rotary positions are in Hugging Face's rotate-half form already.
"""

from typing import Any

from jobs.spec.model import ModelSpec

MODEL_PREFIX = "model/"
"""Beginning of the logical names of weights in checkpoints."""

_LM_HEAD = "lm_head.weight"
_IGNORED_ENDINGS = (".rotary_emb.inv_freq",)
"""Buffers that old exports hold and that follow from the config."""


def to_huggingface(parameter: str) -> str:
    """Hugging Face's name of a parameter: `norm.weight` -> `model.norm.weight`, lm_head.weight as it is."""
    return parameter if parameter == _LM_HEAD else f"model.{parameter}"


def is_ignored(name: str) -> bool:
    """A tensor of a Hugging Face file that holds no weight."""
    return name.endswith(_IGNORED_ENDINGS)


def hf_config(
    model: ModelSpec, dtype: str = "float32", end_of_document_id: int | None = None
) -> dict[str, Any]:
    """config.json of the same model for transformers' LlamaForCausalLM.

    Rotary settings stand there twice: `rope_parameters` for transformers 5 and later, `rope_theta` with
    `rope_scaling` for older readers.

    Args:
        model: the model.
        dtype: element type of the weights beside it: float32 or bfloat16.
        end_of_document_id: token that ends a text, where there is one.
    """
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
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
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
