"""fp8: the scaling maths against fp32, through the widened product; the refusal of other devices."""

import pytest
import torch

from jobs.comm.groups import Axis
from jobs.models.init import build_llama
from jobs.models.losses import cross_entropy_sum
from jobs.models.operations import Operations
from jobs.parallel.float8 import (
    float8_linears,
    float8_operations,
    fp8_refusal,
    hardware_product,
    quantise,
    reference_product,
)
from tests.support.tiny_runs import tiny_model, whole_batch

ALONE = Axis((0,), 0, None)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DIGITS = {E4M3: 2**-4, E5M2: 2**-3}
"""Half of the distance between neighbours, relative to the smaller one."""


def _random(*shape, seed=0, factor=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * factor


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("factor", [1e-8, 1.0, 1e8])
def test_each_tensor_uses_the_whole_range_of_its_format(dtype, factor):
    x = _random(64, 32, factor=factor)
    rounded = quantise(x, dtype)
    assert rounded.values.float().abs().max() == torch.finfo(dtype).max
    back = rounded.values.float() / rounded.scale
    is_normal = x.abs() > x.abs().max() * 1e-3
    assert ((back - x).abs() / x.abs())[is_normal].max() <= DIGITS[dtype]


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden():
    zeros = quantise(torch.zeros(16, 16), E4M3)
    assert torch.equal(zeros.values.float() / zeros.scale, torch.zeros(16, 16))
    for bad in (float("nan"), float("inf")):
        x = _random(16, 16)
        x[3, 5] = bad
        rounded = quantise(x, E5M2)
        assert not (rounded.values.float() / rounded.scale).isfinite().all()


def _gradients(linears, x, weights, seeds):
    outs = linears(x, weights)
    sum((out * seed).sum() for out, seed in zip(outs, seeds, strict=True)).backward()
    return [*(out.detach() for out in outs), x.grad, *(weight.grad for weight in weights)]


def test_forward_and_backward_are_the_products_of_fp32_within_the_rounding_of_8_bits():
    def fresh():
        weights = [_random(n, 64, seed=n, factor=0.02).requires_grad_() for n in (32, 48)]
        return _random(4, 16, 64, seed=1, factor=3.0).requires_grad_(), weights

    seeds = [_random(4, 16, n, seed=2 * n, factor=1e-5) for n in (32, 48)]
    ours = _gradients(lambda x, w: float8_linears(x, w, reference_product), *fresh(), seeds)
    exact = _gradients(lambda x, ws: [torch.nn.functional.linear(x, w) for w in ws], *fresh(), seeds)
    assert len(ours) == len(exact) == 5
    for number, (found, expected) in enumerate(zip(ours, exact, strict=True)):
        assert found.shape == expected.shape
        distance = ((found - expected).norm() / expected.norm()).item()
        assert 1e-3 < distance < (0.05 if number < 2 else 0.08), number


def test_sizes_that_do_not_fit_the_hardware_are_multiplied_as_they_are():
    x, weight = _random(2, 5, 24), _random(7, 24, seed=1)
    plain = torch.nn.functional.linear(x, weight)
    assert torch.equal(float8_linears(x, [weight], reference_product)[0], plain)


def test_a_model_learns_the_same_in_8_bits_and_its_head_stays_exact():
    spec = tiny_model(n_kv_heads=4, d_ff=64)
    batch = whole_batch(0)

    def losses(operations):
        model = build_llama(spec, 3, torch.device("cpu"), torch.float32, operations)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        found = []
        for _ in range(6):
            logits = model(batch.tokens, batch.positions, batch.document_ids)
            loss = cross_entropy_sum(logits, batch.labels) / 150
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found, model.lm_head.weight.grad

    seen = []

    def watched(left, right, dtype):
        seen.append((left.values.shape[0], right.values.shape[1]))
        return reference_product(left, right, dtype)

    ours, head = losses(float8_operations(Operations(), ALONE, False, watched))
    exact, exact_head = losses(Operations())
    assert ours == pytest.approx(exact, rel=0.02)
    assert ours != exact
    assert ours[-1] < 0.97 * ours[0]
    assert len(seen) == 6 * spec.n_layers * 7 * 3
    assert not any(spec.vocab_size in sizes for sizes in seen)
    assert (head - exact_head).norm() < 0.2 * exact_head.norm()


def test_a_device_without_8_bit_products_is_refused_with_the_reason(monkeypatch):
    assert fp8_refusal(torch.device("cpu")) == (
        "train.precision=fp8 needs a GPU of compute capability 8.9 or above (Ada, Hopper or newer); "
        "the ranks compute on cpu: set train.precision to bf16"
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for capability, is_refused in (((8, 0), True), ((8, 9), False), ((9, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        refusal = fp8_refusal(torch.device("cuda", 0))
        assert (refusal is not None) == is_refused
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "NVIDIA A100 has 8.0" in str(fp8_refusal(torch.device("cuda", 0)))


@pytest.mark.gpu
def test_the_hardware_multiplies_what_the_reference_does():
    device = torch.device("cuda")
    refusal = fp8_refusal(device)
    if refusal is not None:
        pytest.skip(refusal)
    for left_type in (E4M3, E5M2):
        left = quantise(_random(64, 128, factor=5.0).to(device), left_type)
        right = quantise(_random(96, 128, seed=1, factor=0.02).to(device), E4M3).t()
        ours = hardware_product(left, right, torch.float32)
        assert torch.allclose(ours, reference_product(left, right, torch.float32), rtol=1e-3, atol=1e-4)
