import math

import pytest
import torch

from jobs.optim.grad_norm import ROW, clip_factor, squared_norm
from jobs.optim.param_groups import is_decayed


@pytest.mark.parametrize("n", [0, 1, ROW - 1, ROW, 3 * ROW + 5])
def test_squared_norm_of_any_length(n):
    flat = torch.randn(n, generator=torch.Generator().manual_seed(n))
    assert squared_norm(flat).item() == pytest.approx(flat.double().square().sum().item(), rel=1e-6)


def test_squared_norm_stays_exact_where_one_fp32_sum_drifts():
    flat = torch.randn(8_000_000, generator=torch.Generator().manual_seed(1))
    exact = flat.double().square().sum().sqrt().item()
    assert squared_norm(flat).sqrt().item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_element_shows(bad):
    flat = torch.zeros(2 * ROW + 7)
    for place in (0, ROW, 2 * ROW + 6):
        flat[place] = bad
        assert not math.isfinite(squared_norm(flat).item())
        flat[place] = 0.0


def test_clip_factor_is_that_of_torch():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    torch.nn.utils.clip_grad_norm_([weight], 0.5)
    assert clip_factor(5.0, 0.5) * 3.0 == pytest.approx(weight.grad[0].item(), rel=1e-6)
    assert clip_factor(0.4, 0.5) == 1.0
    assert clip_factor(1e9, None) == 1.0


def test_only_matrices_are_decayed():
    assert is_decayed((4, 4))
    assert not is_decayed((4,))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.bfloat16, 1e-5)])
def test_squared_norm_of_wider_and_narrower_elements(dtype, tolerance):
    """Squares of bf16 numbers have few digits and all round the same way when they are summed in fp32."""
    flat = torch.randn(3 * ROW + 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = flat.double().square().sum().item()
    assert squared_norm(flat).item() == pytest.approx(exact, rel=tolerance)
