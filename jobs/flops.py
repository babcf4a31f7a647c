"""FLOPs per trained token, and MFU, each with a named convention: the conventions differ by up to 12 percent.

Counts forward and backward once (no recomputation), multiply and add as two. Pure arithmetic: no torch.
"""

from typing import Literal, assert_never

from jobs.spec.model import ModelSpec

Convention = Literal["causal_half", "full_attention"]


def n_matmul_params(model: ModelSpec) -> int:
    """Weights that a token is multiplied with: the layers' matrices, and the logits' (tied or not).

    Of routed experts those that one token visits, and the router; capacity, which drops some, is not counted.
    """
    attention = model.d_model * model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads)
    dense, sparse = 3 * model.d_model * model.d_ff, 0
    n_sparse = 0
    if model.moe is not None:
        n_sparse = sum(model.is_moe_layer(layer) for layer in range(model.n_layers))
        visited = model.moe.top_k + model.moe.n_shared_experts
        sparse = model.d_model * (3 * model.moe.d_ff * visited + model.moe.n_experts)
    feed_forward = (model.n_layers - n_sparse) * dense + n_sparse * sparse
    return model.n_layers * attention + feed_forward + model.vocab_size * model.d_model


def n_active_params(model: ModelSpec) -> int:
    """Parameters that one token meets: all but the routed experts that it does not visit."""
    if model.moe is None:
        return model.n_params
    n_sparse = sum(model.is_moe_layer(layer) for layer in range(model.n_layers))
    idle = 3 * model.d_model * model.moe.d_ff * (model.moe.n_experts - model.moe.top_k)
    return model.n_params - n_sparse * idle


def flops_per_token(model: ModelSpec, seq_len: int, convention: Convention) -> float:
    """Model FLOPs per token, forward and backward.

    With L layers, h = n_heads * head_dim, s = seq_len:

        causal_half      6 * matmul parameters (logits included) + 6 L h s     (Megatron-LM)
        full_attention   6 * (N - N_embedding) + 12 L h s                      (torchtitan)

    Attention costs 12 L h s a token if every pair of positions is counted, half of it where the causal half
    is left out. N counts norm weights also, and of routed experts those that one token visits. Tied
    embeddings are kept in N: the same matrix makes the logits.

    Args:
        model: the model.
        seq_len: tokens of one sequence.
        convention: how attention is counted.
    """
    attention = model.n_layers * model.n_heads * model.head_dim * seq_len
    match convention:
        case "causal_half":
            return 6.0 * n_matmul_params(model) + 6.0 * attention
        case "full_attention":
            looked_up = 0 if model.tie_embeddings else model.vocab_size * model.d_model
            return 6.0 * (n_active_params(model) - looked_up) + 12.0 * attention
    assert_never(convention)


def tflops_per_rank(
    model: ModelSpec, seq_len: int, convention: Convention, *, tokens_per_s: float, n_ranks: int
) -> float:
    """Model FLOPs that one device does, in 1e12 FLOP/s.

    Args:
        model: the model.
        seq_len: tokens of one sequence.
        convention: how attention is counted.
        tokens_per_s: trained tokens a second of the whole run in this step (padding left out).
        n_ranks: devices.
    """
    return tokens_per_s * flops_per_token(model, seq_len, convention) / n_ranks / 1e12


def mfu_frac(rank_tflops: float, peak_tflops: float) -> float:
    """Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B): above 1 only where the peak is too low.

    Args:
        rank_tflops: what tflops_per_rank gave.
        peak_tflops: peak of one device in 1e12 FLOP/s.
    """
    return rank_tflops / peak_tflops
