"""Presets and Hugging Face config.json: the published parameter counts, and what is refused."""

import json
from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.spec.compare import model_fingerprint
from jobs.spec.hf_config import read_hf_config
from jobs.spec.load import load_spec
from jobs.spec.presets import PRESETS
from tests.unit.jobs.spec.conftest import VALID

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def with_config(config: object) -> str:
    return VALID.replace("preset: tiny", f"hf_config: {config}")


@pytest.mark.parametrize(
    ("preset", "n_params"),
    [
        ("1b", 1_235_814_400),
        ("3b", 3_212_749_824),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
        ("llama2_7b", 6_738_415_616),
        ("mixtral_8x7b", 46_702_792_704),
        ("deepseek_16b", 16_375_728_128),
    ],
)
def test_published_parameter_counts(write_spec, preset, n_params):
    assert load_spec(write_spec(VALID.replace("tiny", preset))).model.n_params == n_params


@pytest.mark.parametrize(
    ("preset", "low", "high"), [("tiny", 0.5e6, 2e6), ("small", 1e6, 3e6), ("125m", 120e6, 130e6)]
)
def test_small_presets_have_their_size(write_spec, preset, low, high):
    assert low < load_spec(write_spec(VALID.replace("tiny", preset))).model.n_params < high


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_a_model_by_itself(write_spec, preset):
    model = load_spec(write_spec(VALID.replace("tiny", preset))).model
    assert model.preset == preset
    assert model.head_dim * model.n_heads == model.d_model


def test_explicit_keys_win_over_the_preset(write_spec):
    text = VALID.replace(
        "preset: tiny", "preset: 8b\n  d_model: 1024\n  n_heads: 16\n  rope_scaling: null\n  norm_eps: 1e-6"
    )
    model = load_spec(write_spec(text)).model
    assert (model.d_model, model.head_dim, model.n_kv_heads, model.d_ff) == (1024, 64, 8, 14_336)
    assert model.rope_scaling is None
    assert model.norm_eps == 1e-6


def test_explicit_keys_of_experts_win_one_by_one(write_spec):
    text = VALID.replace("preset: tiny", "preset: mixtral_8x7b\n  moe: {n_experts: 4, balance_loss_coef: 0}")
    moe = load_spec(write_spec(text)).model.moe
    assert (moe.n_experts, moe.balance_loss_coef) == (4, 0.0)
    assert (moe.top_k, moe.d_ff, moe.z_loss_coef) == (2, 14_336, 1e-3)


MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    "left_out",
    [(), ("num_key_value_heads", "num_local_experts", "num_experts_per_tok", "rope_theta", "rms_norm_eps")],
    ids=["published", "defaults left out"],
)
def test_mixtral_config(write_spec, tmp_path, left_out):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in MIXTRAL_8X7B.items() if k not in left_out}))
    model = load_spec(write_spec(with_config(path))).model
    assert model.n_params == 46_702_792_704
    preset = load_spec(write_spec(VALID.replace("tiny", "mixtral_8x7b"))).model
    assert model_fingerprint(model) == model_fingerprint(preset)


def test_explicit_head_dim_stays(write_spec):
    assert (
        load_spec(write_spec(VALID.replace("preset: tiny", "preset: tiny\n  head_dim: 64"))).model.head_dim
        == 64
    )


def test_preset_and_hf_config_together(problems_of):
    text = VALID.replace("preset: tiny", "preset: tiny\n  hf_config: /a/config.json")
    assert problems_of(text) == [
        "spec.yaml:3: model.hf_config: preset and hf_config both give the model's defaults; keep one of them"
    ]


@pytest.mark.parametrize(
    ("changed", "n_params"),
    [
        ({}, 8_030_261_248),
        (
            {
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
            },
            70_553_706_496,
        ),
        (
            {
                "hidden_size": 16384,
                "intermediate_size": 53248,
                "num_hidden_layers": 126,
                "num_attention_heads": 128,
            },
            405_853_388_800,
        ),
        (
            {
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "head_dim": 64,
                "tie_word_embeddings": True,
            },
            1_235_814_400,
        ),
    ],
)
def test_hf_config_gives_the_model(write_spec, tmp_path, changed, n_params):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B | changed))
    model = load_spec(write_spec(with_config("config.json"))).model
    assert model.n_params == n_params
    assert (model.rope_theta, model.norm_eps, model.max_seq_len, model.rope_scaling) == (
        500_000.0,
        1e-5,
        131_072,
        None,
    )
    assert model.hf_config == str(tmp_path / "config.json")
    folder = load_spec(write_spec(with_config("."))).model
    assert folder.n_params == n_params


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": LLAMA3_SCALING},
        {"rope_scaling": {**LLAMA3_SCALING, "type": "llama3"}},
        {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0}, "rope_theta": None},
    ],
)
def test_llama3_scaling(tmp_path, rope):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_31_8B | rope))
    found = read_hf_config(file)
    assert found["rope_theta"] == 500_000.0
    assert found["rope_scaling"] == {
        "kind": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_seq_len": 8192,
    }


def test_defaults_are_hugging_faces(tmp_path):
    from transformers import LlamaConfig

    kept = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "max_position_embeddings",
    )
    small = {key: LLAMA_31_8B[key] for key in kept} | {"num_attention_heads": 32}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(small))
    found, theirs = read_hf_config(file), LlamaConfig(**small)
    assert found["n_kv_heads"] == theirs.num_key_value_heads == 32
    assert found["norm_eps"] == theirs.rms_norm_eps
    assert found["tie_embeddings"] == theirs.tie_word_embeddings
    assert found["init_std"] == theirs.initializer_range
    assert found["rope_theta"] == theirs.rope_parameters["rope_theta"]


def test_what_transformers_writes_is_read(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=128,
        head_dim=32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={**LLAMA3_SCALING, "rope_theta": 10_000.0},
    ).save_pretrained(tmp_path)
    found = read_hf_config(tmp_path)
    assert (found["d_model"], found["d_ff"], found["head_dim"], found["n_kv_heads"]) == (64, 96, 32, 2)
    assert found["tie_embeddings"] is True
    assert found["rope_theta"] == 10_000.0
    assert found["rope_scaling"]["original_max_seq_len"] == 8192


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            LLAMA_31_8B | {"num_local_experts": 8},
            "num_local_experts is 8, but in the model that Packtrain trains a llama's layers "
            "have no experts (mixtral's have)",
        ),
        (
            LLAMA_31_8B | {"model_type": "mixtral", "router_jitter_noise": 0.1},
            "router_jitter_noise is 0.1, but in the model that Packtrain trains the router has no noise",
        ),
        (
            LLAMA_31_8B | {"model_type": "deepseek_v3"},
            "model_type deepseek_v3 is not supported: its attention is latent (MLA)",
        ),
        (
            LLAMA_31_8B | {"model_type": "qwen2"},
            "model_type qwen2 is not supported: its query, key and value projections have a bias "
            "(attention bias)",
        ),
        (
            LLAMA_31_8B | {"model_type": "opt"},
            "model_type opt is not supported: only plain Llama and Mixtral layers are implemented",
        ),
        (
            {k: v for k, v in LLAMA_31_8B.items() if k != "model_type"},
            "model_type is nothing (null); a Llama's config.json says llama",
        ),
        (
            LLAMA_31_8B | {"attention_bias": True},
            "attention_bias is true, but in the model that Packtrain trains projections have no "
            "attention bias",
        ),
        (
            LLAMA_31_8B | {"hidden_act": "gelu"},
            "hidden_act is the text 'gelu', but in the model that Packtrain trains the feed-forward layer is "
            "SwiGLU with silu",
        ),
        (
            LLAMA_31_8B | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope scaling of type yarn is not supported; Packtrain has llama3, or none",
        ),
        (
            LLAMA_31_8B | {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
            "rope scaling llama3 lacks low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
    ],
)
def test_other_models_are_refused(problems_of, tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert problems_of(with_config("config.json")) == [
        f"spec.yaml:2: model.hf_config: config.json: {expected}"
    ]


def test_keys_of_another_family_are_refused(problems_of, tmp_path):
    # the shape of a public Llama-2-7B file whose keys are other libraries'; its 16384 is not Llama 2's 11008
    config = {
        "name": "Llama-2-7b",
        "num_layers": 32,
        "n_head": 32,
        "hidden_dim": 4096,
        "vocab_size": 32000,
        "max_seq_len": 4096,
        "num_key_value_heads": 32,
        "ffn_embed_dim": 16384,
        "model_type": "llama",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    [line] = problems_of(with_config("config.json"))
    assert "hidden_size (hidden_dim=4096 is another family's name)" in line
    assert "intermediate_size (ffn_embed_dim=16384 is another family's name)" in line
    assert "num_attention_heads (n_head=32 is another family's name)" in line
    assert "use a preset, or write the model section's keys out" in line


@pytest.mark.parametrize(
    ("content", "expected"), [("{", "config.json:1: not JSON"), ("[]", "is an object, got a list of 0")]
)
def test_not_a_config(tmp_path, content, expected):
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(SpecError, match=expected):
        read_hf_config(file)
    with pytest.raises(SpecError, match="no such file"):
        read_hf_config(Path(tmp_path) / "other.json")


def test_a_wrong_type_in_the_config_is_named(problems_of, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B | {"num_hidden_layers": "many"}))
    assert problems_of(with_config("config.json")) == [
        "spec.yaml:2: model.n_layers: wants a whole number, got the text 'many'"
    ]
