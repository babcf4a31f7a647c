"""The model against transformers' LlamaForCausalLM, written by others: logits, loss and every gradient."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jobs.models.attention import document_mask
from jobs.models.init import build_llama
from jobs.models.losses import cross_entropy_sum
from jobs.spec.model import ModelSpec, RopeScaling
from tests.support.tiny_runs import tiny_model, whole_batch

CPU = torch.device("cpu")
LLAMA_3_1 = RopeScaling(factor=8.0, original_max_seq_len=16)
TOLERANCE = 1e-5


def _transformers_twin(spec: ModelSpec) -> LlamaForCausalLM:
    rope = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_max_seq_len,
        }
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.d_model,
            intermediate_size=spec.d_ff,
            num_hidden_layers=spec.n_layers,
            num_attention_heads=spec.n_heads,
            num_key_value_heads=spec.n_kv_heads,
            head_dim=spec.head_dim,
            max_position_embeddings=spec.max_seq_len,
            rms_norm_eps=spec.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=spec.tie_embeddings,
            attn_implementation="eager",
        )
    )


VARIANTS = {
    "plain": tiny_model(n_kv_heads=4),
    "grouped-query": tiny_model(),
    "tied": tiny_model(tie_embeddings=True),
    "rope scaling": tiny_model(rope_scaling=LLAMA_3_1, rope_theta=10_000.0),
    "wide heads": tiny_model(head_dim=12),
}


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_loss_and_gradients_equal_transformers(spec):
    batch = whole_batch(0)
    ours, theirs = build_llama(spec, 0, CPU), _transformers_twin(spec)
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": p for name, p in ours.state_dict().items()
    }
    if spec.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    theirs.load_state_dict(weights, strict=True)
    where = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    logits = ours(batch.tokens, where, None)
    expected = theirs(input_ids=batch.tokens).logits
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    loss = cross_entropy_sum(logits, batch.labels) / (batch.labels != -100).sum()
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), batch.labels.flatten())
    torch.testing.assert_close(loss, expected_loss, atol=TOLERANCE, rtol=0)
    loss.backward()
    expected_loss.backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=TOLERANCE, rtol=0, msg=name)


def test_a_document_in_a_packed_row_sees_itself_alone():
    """Masked documents with positions of their own give the logits that each gives in a row of its own."""
    model = build_llama(tiny_model(rope_scaling=LLAMA_3_1), 0, CPU)
    batch = whole_batch(3)
    packed = model(batch.tokens, batch.positions, batch.document_ids)
    for row in range(4):
        for document in batch.document_ids[row].unique():
            own = batch.document_ids[row] == document
            alone = model(batch.tokens[row, own][None], torch.arange(int(own.sum()))[None], None)
            torch.testing.assert_close(packed[row, own], alone[0], atol=TOLERANCE, rtol=0)


def test_without_a_mask_documents_do_see_each_other():
    model = build_llama(tiny_model(), 0, CPU)
    batch = whole_batch(3)
    packed = model(batch.tokens, batch.positions, batch.document_ids)
    assert (packed - model(batch.tokens, batch.positions, None)).abs().max() > 0.01


def test_document_mask_of_a_row():
    mask = document_mask(torch.tensor([[4, 4, 9]]))
    assert mask.tolist() == [[[[True, False, False], [True, True, False], [False, False, True]]]]


def test_loss_is_a_sum_over_labelled_positions_in_fp32():
    logits = torch.zeros(1, 3, 5, dtype=torch.bfloat16)
    loss = cross_entropy_sum(logits, torch.tensor([[1, -100, 4]]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(2 * math.log(5), rel=1e-6)


def test_casting_the_model_does_not_round_the_rotary_frequencies():
    """At position 60 a bf16 frequency would turn the fastest pairs by a wrong angle."""
    spec = tiny_model()
    tokens, where = torch.arange(64)[None], torch.arange(64)[None]
    exact = build_llama(spec, 0, CPU).double()
    rounded = build_llama(spec, 0, CPU, torch.bfloat16).double()
    late = (exact(tokens, where, None) - rounded(tokens, where, None))[0, 32:].abs().max()
    early = (exact(tokens, where, None) - rounded(tokens, where, None))[0, :32].abs().max()
    assert late < 3 * early
