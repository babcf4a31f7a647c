import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jobs.errors import SpecError
from jobs.exchange import hf_config, is_ignored, to_huggingface
from jobs.models.llama import Llama
from jobs.spec.model import ModelSpec, MoeSpec, RopeScaling, parameter_shapes


def spec(**changes: object) -> ModelSpec:
    values = {
        "vocab_size": 61, "n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8,
        "d_ff": 48, "max_seq_len": 64, "norm_eps": 1e-5, "rope_theta": 1e4,
    }  # fmt: skip
    return ModelSpec.model_validate({**values, **changes})


VARIANTS = {
    "gqa": spec(),
    "tied": spec(tie_embeddings=True),
    "mha": spec(n_kv_heads=4),
    "mqa_wide_heads": spec(n_kv_heads=1, head_dim=16),
    "scaled": spec(rope_scaling=RopeScaling(factor=4.0, original_max_seq_len=16)),
}


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_names_and_shapes_are_those_of_our_model(model: ModelSpec) -> None:
    with torch.device("meta"):
        ours = Llama(model)
    assert parameter_shapes(model) == {name: tuple(p.shape) for name, p in ours.named_parameters()}
    assert sum(torch.Size(shape).numel() for shape in parameter_shapes(model).values()) == model.n_params


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_names_and_shapes_are_those_of_transformers(model: ModelSpec) -> None:
    with torch.device("meta"):
        theirs = LlamaForCausalLM(LlamaConfig(**hf_config(model)))
    found = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert found == {to_huggingface(name): shape for name, shape in parameter_shapes(model).items()}


def test_config_is_read_as_meant_by_transformers() -> None:
    config = LlamaConfig(**hf_config(VARIANTS["scaled"], end_of_document_id=7))
    assert config.rope_parameters == {
        "rope_theta": 1e4,
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    assert (config.eos_token_id, config.bos_token_id, config.head_dim) == (7, None, 8)
    plain = LlamaConfig(**hf_config(VARIANTS["tied"]))
    assert plain.rope_parameters == {"rope_theta": 1e4, "rope_type": "default"}
    assert plain.tie_word_embeddings


def test_buffers_are_told_from_weights() -> None:
    assert is_ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_ignored("model.layers.0.self_attn.q_proj.weight")


def test_experts_have_the_names_of_mixtral_files() -> None:
    assert to_huggingface("layers.3.mlp.gate.weight") == "model.layers.3.block_sparse_moe.gate.weight"
    matrices = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for ours, theirs in matrices.items():
        name = to_huggingface(f"layers.3.mlp.experts.17.{ours}.weight")
        assert name == f"model.layers.3.block_sparse_moe.experts.17.{theirs}.weight"
    assert to_huggingface("layers.3.mlp.gate_proj.weight") == "model.layers.3.mlp.gate_proj.weight"


def test_experts_that_mixtral_has_not_are_refused() -> None:
    moe = MoeSpec(n_experts=4, top_k=2, d_ff=16, n_shared_experts=1, router="sigmoid")
    with pytest.raises(SpecError) as refusal:
        hf_config(spec(moe=moe))
    assert str(refusal.value) == (
        "of models with experts only Mixtral's kind has a Hugging Face form here; model.moe has "
        "router=sigmoid (Mixtral: softmax), n_shared_experts=1 (Mixtral: 0)"
    )
