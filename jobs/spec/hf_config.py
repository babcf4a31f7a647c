"""Reads a Hugging Face config.json of a Llama or Mixtral into the model section's keys. Reads no weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from jobs.errors import SpecError
from jobs.spec.tree import Json, describe
from jobs.spec.yaml_tree import read_text

_SHAPE: Final[Mapping[str, str]] = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
"""Keys that a Llama's config.json must have, and ours."""

_LOOKALIKES: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden_size": ("hidden_dim", "n_embd", "d_model", "dim"),
    "intermediate_size": ("ffn_embed_dim", "n_inner", "d_ff", "ffn_hidden_size", "ffn_dim"),
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("max_seq_len", "n_positions", "n_ctx", "max_sequence_length"),
}

_OTHER_MODELS: Final[Mapping[str, str]] = {
    "qwen3_moe": "it normalises queries and keys (QK norm)",
    "deepseek_v2": "its attention is latent (MLA)",
    "deepseek_v3": "its attention is latent (MLA)",
    "qwen2": "its query, key and value projections have a bias (attention bias)",
    "qwen3": "it normalises queries and keys (QK norm)",
    "gemma": "it scales embeddings, and its norms multiply by (1 + weight)",
    "gpt2": "it has learned positions, LayerNorm and GELU",
}

_MUST_BE: Final[Mapping[str, tuple[tuple[Json, ...], str]]] = {
    "hidden_act": (("silu", "swish"), "the feed-forward layer is SwiGLU with silu"),
    "attention_bias": ((False, None), "projections have no attention bias"),
    "mlp_bias": ((False, None), "feed-forward projections have no bias"),
    "attention_dropout": ((0, 0.0, None), "there is no dropout"),
    "sliding_window": ((None,), "attention has no sliding window"),
    "router_jitter_noise": ((0, 0.0, None), "the router has no noise"),
    "quantization_config": ((None,), "weights are not quantised"),
    "partial_rotary_factor": ((1, 1.0, None), "the whole head is rotated"),
}
"""Keys that change the maths: the values that mean a plain Llama, and what we have."""

_DENSE: Final = ((None, 0, 1), "a llama's layers have no experts (mixtral's have)")
"""The same of num_local_experts, in a Llama."""

_MIXTRAL_DEFAULTS: Final[Mapping[str, Json]] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
"""Where MixtralConfig's own defaults are not LlamaConfig's."""


def read_hf_config(path: Path) -> dict[str, Json]:
    """The model section's keys that a config.json gives, Hugging Face's own defaults filled in.

    Mixtral's layers become model.moe with a softmax router; its router_aux_loss_coef is of another loss (over
    all layers and the batch) and is left out.

    Args:
        path: a config.json, or the folder that holds one.

    Raises:
        SpecError: unreadable, no JSON object, neither Llama nor Mixtral (with the reason), or keys missing.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_object(file)
    is_mixtral = config.get("model_type") == "mixtral"
    if is_mixtral:
        config = {**_MIXTRAL_DEFAULTS, **config}
    problems = _refusals(config)
    if not problems:
        problems = _missing(config)
    scaling, theta = _rope(config, problems)
    if problems:
        raise SpecError("\n".join(f"{file}: {problem}" for problem in problems))
    found: dict[str, Json] = {"kind": "llama"}
    found.update({ours: config[theirs] for theirs, ours in _SHAPE.items()})
    found["n_kv_heads"] = _or(config.get("num_key_value_heads"), config["num_attention_heads"])
    if config.get("head_dim") is not None:
        found["head_dim"] = config["head_dim"]
    found["norm_eps"] = _or(config.get("rms_norm_eps"), 1e-6)
    found["rope_theta"] = theta
    found["rope_scaling"] = scaling
    found["tie_embeddings"] = _or(config.get("tie_word_embeddings"), False)
    found["init_std"] = _or(config.get("initializer_range"), 0.02)
    if is_mixtral:
        found["moe"] = _mixtral_experts(config)
    return found


def _mixtral_experts(config: Mapping[str, Json]) -> dict[str, Json]:
    return {
        "n_experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "d_ff": config["intermediate_size"],
        "n_shared_experts": 0,
        "n_dense_layers": 0,
        "router": "softmax",
        "normalize_weights": True,
        "routed_scale": 1.0,
    }


def _or(value: Json, default: Json) -> Json:
    return default if value is None else value


def _read_object(file: Path) -> dict[str, Json]:
    text = read_text(file)
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"{file}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise SpecError(f"{file}: a Hugging Face config is an object, got {describe(config)}")
    return config


def _refusals(config: Mapping[str, Json]) -> list[str]:
    kind = config.get("model_type")
    if kind not in ("llama", "mixtral"):
        if not isinstance(kind, str):
            return [f"model_type is {describe(kind)}; a Llama's config.json says llama"]
        why = _OTHER_MODELS.get(kind, "only plain Llama and Mixtral layers are implemented")
        return [f"model_type {kind} is not supported: {why}"]
    rules = _MUST_BE if kind == "mixtral" else {**_MUST_BE, "num_local_experts": _DENSE}
    return [
        f"{key} is {describe(config[key])}, but in the model that Packtrain trains {what}"
        for key, (allowed, what) in rules.items()
        if key in config and config[key] not in allowed
    ]


def _missing(config: Mapping[str, Json]) -> list[str]:
    missing = [key for key in _SHAPE if config.get(key) is None]
    if not missing:
        return []
    words = []
    for key in missing:
        like = next((name for name in _LOOKALIKES.get(key, ()) if name in config), None)
        words.append(f"{key} ({like}={config[like]} is another family's name)" if like else key)
    return [
        f"not Hugging Face's LlamaConfig: {', '.join(words)} missing. A value under another name may mean "
        "another thing (ffn_embed_dim of a plain feed-forward layer is not SwiGLU's intermediate_size), so "
        "nothing is guessed: use a preset, or write the model section's keys out"
    ]


def _rope(config: Mapping[str, Json], problems: list[str]) -> tuple[Json, Json]:
    """Scaling and base, from rope_scaling and rope_theta or from the newer rope_parameters."""
    newer = config.get("rope_parameters")
    scaling = newer if isinstance(newer, dict) else config.get("rope_scaling")
    theta = _or(config.get("rope_theta"), 10_000.0)
    if not isinstance(scaling, dict):
        return None, theta
    theta = _or(scaling.get("rope_theta"), theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None, theta
    if kind != "llama3":
        problems.append(f"rope scaling of type {kind} is not supported; Packtrain has llama3, or none")
        return None, theta
    keys = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_seq_len",
    }
    absent = [key for key in keys if scaling.get(key) is None]
    if absent:
        problems.append(f"rope scaling llama3 lacks {', '.join(absent)}")
        return None, theta
    return {"kind": "llama3", **{ours: scaling[theirs] for theirs, ours in keys.items()}}, theta
