"""Compensated bf16 updates: of tiny changes none is lost, and one step is that of torch's AdamW and SGD."""

import pytest
import torch

from jobs.optim.kahan import PORTION, KahanRun, update
from jobs.spec.optim import OptimSpec

N = 5000


def _random(seed, n=N):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def _run(weight, *, has_moments=True, weight_decay=0.1):
    def zeros(dtype):
        return torch.zeros(len(weight), dtype=dtype)

    moments = (zeros(torch.bfloat16), zeros(torch.float32)) if has_moments else (None, None)
    return KahanRun(
        weight.to(torch.bfloat16, copy=True),
        zeros(torch.bfloat16),
        zeros(torch.bfloat16),
        *moments,
        weight_decay,
    )


def _value(run):
    return run.weight.double() + run.lost.double()


def test_a_thousand_changes_below_the_last_digit_add_up():
    """1 + 1000 * 1e-4 is 1.1; plain bf16 rounding stays at 1 for ever.

    What is kept is itself rounded, to 8 digits of what is at most half of the weight's last one: 2^-17.
    """
    run = _run(torch.ones(4), has_moments=False, weight_decay=0.0)
    run.gradient.fill_(-1.0)
    plain = torch.ones(4, dtype=torch.bfloat16)
    for step in range(1000):
        update(run, OptimSpec(kind="sgd", lr=1e-4), 1e-4, step + 1, 1.0)
        plain += 1e-4
    assert torch.equal(plain, torch.ones(4, dtype=torch.bfloat16))
    assert (_value(run) - 1.1).abs().max() < 1000 * 2**-18
    assert (run.weight.double() - 1.1).abs().max() < 1000 * 2**-18 + 2**-8


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_steps_are_those_of_torch_in_fp32(kind, factor):
    optim = OptimSpec(kind=kind, lr=1e-2, weight_decay=0.1)
    start = _random(1).bfloat16()
    run = _run(start, has_moments=kind == "adamw")
    exact = start.float().requires_grad_()
    settings = {"lr": optim.lr, "weight_decay": optim.weight_decay, "foreach": False}
    theirs = (
        torch.optim.SGD([exact], **settings)
        if kind == "sgd"
        else torch.optim.AdamW([exact], betas=(optim.beta1, optim.beta2), eps=optim.eps, **settings)
    )
    for step in range(1, 6):
        gradient = _random(10 + step).bfloat16()
        run.gradient.copy_(gradient)
        exact.grad = gradient.float() * factor
        theirs.step()
        update(run, optim, optim.lr, step, factor)
    moved = exact.detach() - start.float()
    # First moments are rounded to bf16, so a step may be off by some of their last digits.
    assert (_value(run) - exact.detach()).norm() < 0.01 * moved.norm()


def test_portions_do_not_change_the_result():
    n = PORTION + 777
    weight, gradient = _random(1, n), _random(2, n).bfloat16()
    whole = _run(weight)
    whole.gradient.copy_(gradient)
    update(whole, OptimSpec(lr=1e-2), 1e-2, 1, 1.0)
    tail = _run(weight[PORTION:])
    tail.gradient.copy_(gradient[PORTION:])
    update(tail, OptimSpec(lr=1e-2), 1e-2, 1, 1.0)
    assert torch.equal(whole.weight[PORTION:], tail.weight)
    assert torch.equal(whole.lost[PORTION:], tail.lost)
