import math

import pytest
import torch

from jobs.models.init import build_llama, initial_value
from tests.support.tiny_runs import tiny_model

CPU = torch.device("cpu")


def test_a_parameter_depends_on_its_name_and_the_seed_alone():
    small, large = tiny_model(n_layers=2), tiny_model(n_layers=2, d_ff=64, tie_embeddings=True)
    name = "layers.1.self_attn.q_proj.weight"
    one = dict(build_llama(small, 7, CPU).named_parameters())
    other = dict(build_llama(large, 7, CPU).named_parameters())
    assert torch.equal(one[name], other[name])
    assert torch.equal(one[name], initial_value(name, (32, 32), small, 7))
    assert not torch.equal(one[name], initial_value(name, (32, 32), small, 8))
    assert not torch.equal(one[name], one["layers.0.self_attn.q_proj.weight"])


def test_it_does_not_touch_the_random_state_of_others():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    build_llama(tiny_model(), 7, CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embed_tokens.weight", 0.1),
        ("layers.0.mlp.up_proj.weight", 0.1),
        ("layers.0.mlp.down_proj.weight", 0.1 / math.sqrt(8)),
        ("layers.3.self_attn.o_proj.weight", 0.1 / math.sqrt(8)),
    ],
)
def test_standard_deviations(name, std):
    spec = tiny_model(n_layers=4)
    assert initial_value(name, (200, 300), spec, 0).std().item() == pytest.approx(std, rel=0.02)


def test_norms_begin_at_one():
    assert torch.equal(initial_value("norm.weight", (32,), tiny_model(), 0), torch.ones(32))


def test_bf16_weights_are_the_rounded_fp32_ones():
    exact = dict(build_llama(tiny_model(), 7, CPU).named_parameters())
    for name, rounded in build_llama(tiny_model(), 7, CPU, torch.bfloat16).named_parameters():
        assert torch.equal(rounded, exact[name].bfloat16())
