import pytest

from jobs.flops import flops_per_token, mfu_frac, n_active_params, n_matmul_params, tflops_per_rank
from jobs.spec.model import ModelSpec, MoeSpec
from jobs.spec.presets import PRESETS


def _llama(n_layers, d_model, n_heads, d_ff):
    return ModelSpec(
        vocab_size=128_256,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        d_ff=d_ff,
        max_seq_len=8192,
    )


LLAMA_8B = _llama(32, 4096, 32, 14_336)
LLAMA_70B = _llama(80, 8192, 64, 28_672)
LLAMA_405B = _llama(126, 16_384, 128, 53_248)


@pytest.mark.parametrize(
    ("model", "full_gflops", "half_gflops"),
    [(LLAMA_8B, 57.91, 51.47), (LLAMA_70B, 481.44, 449.22), (LLAMA_405B, 2625.45, 2523.96)],
)
def test_flops_per_token_of_the_llama_3_models_at_8k(model, full_gflops, half_gflops):
    assert flops_per_token(model, 8192, "full_attention") / 1e9 == pytest.approx(full_gflops, abs=0.005)
    assert flops_per_token(model, 8192, "causal_half") / 1e9 == pytest.approx(half_gflops, abs=0.005)


@pytest.mark.parametrize(
    ("model", "tokens_per_s", "tflops"),
    [
        (LLAMA_8B, 14_451, 743.8),
        (LLAMA_8B, 14_079, 724.7),
        (LLAMA_70B, 1_602, 719.7),
        (LLAMA_405B, 292, 737.0),
        (LLAMA_405B, 328, 827.9),
    ],
)
def test_published_rates_come_out_with_the_causal_half(model, tokens_per_s, tflops):
    found = tflops_per_rank(model, 8192, "causal_half", tokens_per_s=tokens_per_s, n_ranks=1)
    assert found == pytest.approx(tflops, abs=0.06)


def test_mfu_is_of_all_ranks_together():
    one = tflops_per_rank(LLAMA_8B, 8192, "causal_half", tokens_per_s=8000.0, n_ranks=1)
    eight = tflops_per_rank(LLAMA_8B, 8192, "causal_half", tokens_per_s=64_000.0, n_ranks=8)
    assert one == pytest.approx(eight)
    assert mfu_frac(eight, peak_tflops=989.0) == pytest.approx(8000 * 51.47e9 / 989e12, rel=1e-3)


def test_tied_embeddings_still_make_the_logits():
    tied = LLAMA_8B.model_copy(update={"tie_embeddings": True})
    for convention in ("causal_half", "full_attention"):
        assert flops_per_token(tied, 8192, convention) == flops_per_token(LLAMA_8B, 8192, convention)


def _preset(name):
    return ModelSpec.model_validate({**PRESETS[name].defaults(), "head_dim": 128})


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral_8x7b", 12.88), ("deepseek_16b", 2.83), ("llama2_7b", 6.74)]
)
def test_active_parameters_as_published(name, billions):
    assert n_active_params(_preset(name)) / 1e9 == pytest.approx(billions, abs=0.005)


def test_a_token_pays_for_the_experts_it_visits_and_for_the_router():
    dense = LLAMA_8B.model_copy(update={"d_ff": 2 * 1000 + 3 * 1000})
    moe = MoeSpec(n_experts=16, top_k=2, d_ff=1000, n_shared_experts=3)
    sparse = LLAMA_8B.model_copy(update={"moe": moe})
    routers = 32 * 16 * 4096
    assert n_matmul_params(sparse) == n_matmul_params(dense) + routers
    assert n_active_params(sparse) == dense.n_params + routers
    for convention in ("causal_half", "full_attention"):
        extra = flops_per_token(sparse, 8192, convention) - flops_per_token(dense, 8192, convention)
        assert extra == pytest.approx(6 * routers)


def test_leading_dense_layers_pay_for_their_own_network():
    moe = MoeSpec(n_experts=4, top_k=1, d_ff=100, n_dense_layers=32)
    assert n_matmul_params(LLAMA_8B.model_copy(update={"moe": moe})) == n_matmul_params(LLAMA_8B)
