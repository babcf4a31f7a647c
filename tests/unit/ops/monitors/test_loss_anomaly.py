"""Loss anomalies on made curves with known faults, and none on curves without one."""

import json
import math
import random
from pathlib import Path

import pytest

from ops.monitors.loss_anomaly import AnomalyKind, LossAnomaly, LossRules, LossWatch

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "llama_losses.json"
N_STEPS = 1500
WARM_UP = 100


def lr_at(step: int) -> float:
    if step <= WARM_UP:
        return 3e-4 * step / WARM_UP
    return 3e-5 + 2.7e-4 * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (N_STEPS - WARM_UP)))


def curve(seed: int, sigma: float = 0.05, n_steps: int = N_STEPS, bump: float = 0.0) -> list[float]:
    """A power law with noise, flat through the first steps; `bump` nats at the top of warm-up."""
    draw = random.Random(seed)
    losses = []
    for step in range(1, n_steps + 1):
        gone = max(0.0, step - 20.0)
        loss = 1.8 + 9.0 * (1.0 + gone / 25.0) ** -0.55
        loss += bump * math.exp(-(((step - 1.3 * WARM_UP) / 40.0) ** 2))
        losses.append(loss + draw.gauss(0.0, sigma) * (1.0 + 0.1 * loss))
    return losses


def watch(losses: list[float], first: int = 1, lrs: bool = True) -> list[LossAnomaly]:
    watching = LossWatch()
    found = []
    for step, loss in enumerate(losses, start=first):
        found += watching.push(step, loss, lr=lr_at(step) if lrs else None)
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sigma", [0.001, 0.05, 0.15])
def test_a_sound_run_raises_no_alarm(seed, sigma):
    assert watch(curve(seed, sigma)) == []


@pytest.mark.parametrize("seed", range(3))
def test_nor_without_learning_rates_or_with_a_bump_at_the_top_of_warm_up(seed):
    assert watch(curve(seed), lrs=False) == []
    assert watch(curve(seed, bump=0.6)) == []


def test_a_hump_is_excused_by_a_rising_learning_rate_only():
    draw = random.Random(7)
    losses = [
        4.0 + 0.9 * math.exp(-(((step - 250) / 60.0) ** 2)) + draw.gauss(0, 0.03) for step in range(500)
    ]
    for is_told, kinds in ((True, []), (False, [AnomalyKind.DIVERGENCE])):
        watching = LossWatch()
        found = []
        for step, loss in enumerate(losses):
            found += watching.push(step, loss, lr=min(step, 260) * 1e-6 if is_told else None)
        assert [a.kind for a in found] == kinds


def test_nor_do_odd_batches():
    """Now and then a batch of another kind, a quarter of a nat above the rest."""
    draw = random.Random(9)
    losses = [loss + (0.25 if draw.random() < 0.03 else 0.0) for loss in curve(4)]
    assert watch(losses) == []


def test_nor_do_the_recorded_losses_of_a_real_run():
    recorded = json.loads(GOLDEN.read_text())
    assert watch(recorded, lrs=False) == []
    assert watch(recorded) == []


def test_nor_does_a_sudden_fall():
    draw = random.Random(2)
    losses = [6.9 - 3.5 / (1.0 + math.exp(-(step - 200) / 3.0)) + draw.gauss(0, 0.03) for step in range(800)]
    assert watch(losses, lrs=False) == []


@pytest.mark.parametrize("seed", range(12))
def test_every_spike_is_told_at_its_step_once(seed):
    draw = random.Random(seed)
    losses = curve(seed)
    at = draw.randrange(150, N_STEPS - 50)
    length = draw.randrange(1, 6)
    height = draw.uniform(0.35, 1.0) * losses[at] + 0.6
    for i in range(length):
        losses[at + i] += height * (1.0 - 0.1 * i)
    (found,) = watch(losses)
    assert (found.kind, found.step, found.since_step) == (AnomalyKind.SPIKE, at + 1, at + 1)
    assert found.score > found.threshold
    assert found.value == losses[at]
    assert found.expected == pytest.approx(losses[at - 1], rel=0.15)


def test_a_level_that_jumps_and_stays_is_a_divergence_and_told_once():
    losses = [loss if step < 600 else loss + 4.0 for step, loss in enumerate(curve(1))]
    spike, divergence = watch(losses)
    assert (spike.kind, spike.step) == (AnomalyKind.SPIKE, 601)
    assert (divergence.kind, divergence.step, divergence.since_step) == (AnomalyKind.DIVERGENCE, 608, 601)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("per_step", [0.002, 0.01])
def test_a_slow_rise_is_a_divergence(seed, per_step):
    begins = 700
    losses = [loss + per_step * max(0, step - begins) for step, loss in enumerate(curve(seed))]
    found = [a for a in watch(losses) if a.kind is AnomalyKind.DIVERGENCE]
    assert found
    assert begins < found[0].step < begins + 64 + 0.8 / per_step
    assert begins - 100 < found[0].since_step < found[0].step


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [1, 300])
def test_what_is_not_finite_is_told_at_once(value, step):
    losses = curve(0, n_steps=400)
    losses[step - 1] = value
    (found,) = watch(losses)
    assert (found.kind, found.quantity, found.step) == (AnomalyKind.NOT_FINITE, "loss", step)
    assert found.signal(7.0).kind == "loss_not_finite"


def test_gradient_norms():
    draw = random.Random(3)
    watching = LossWatch()
    found = []
    losses = curve(3, n_steps=400)
    for step, loss in enumerate(losses, start=1):
        norm = (0.4 + 8.0 / step) * math.exp(draw.gauss(0.0, 0.2))
        if step == 250:
            norm *= 20.0
        if step == 300:
            norm = math.inf
        found += watching.push(step, loss, grad_norm=norm)
    assert [(a.kind, a.quantity, a.step) for a in found] == [
        (AnomalyKind.SPIKE, "grad_norm", 250),
        (AnomalyKind.NOT_FINITE, "grad_norm", 300),
    ]


def test_steps_told_again_after_a_restart_begin_anew_there():
    losses = curve(5)
    watching = LossWatch()
    told = [a for step, loss in enumerate(losses[:500], start=1) for a in watching.push(step, loss)]
    told += watching.push(501, 9.0)
    assert [a.step for a in told] == [501]
    for step in range(481, 1001):
        assert watching.push(step, losses[step - 1]) == []


def test_a_run_that_went_back_is_compared_with_what_it_was_like_there():
    """It diverged and went back by 250 steps: the losses of the lost steps must not excuse what comes."""
    losses = curve(6)
    watching = LossWatch()
    told = []
    for step in range(1, 851):
        told += watching.push(step, losses[step - 1] + 0.01 * max(0, step - 600))
    assert {a.kind for a in told} == {AnomalyKind.DIVERGENCE}
    assert watching.push(601, losses[600]) == []
    (spike,) = watching.push(602, losses[601] + 0.8)
    assert (spike.kind, spike.step) == (AnomalyKind.SPIKE, 602)
    assert [a for step in range(603, 801) for a in watching.push(step, losses[step - 1])] == []


def test_rules_can_be_given():
    losses = [2.0 + 0.01 * (i % 3) for i in range(100)]
    deaf, keen = LossWatch(LossRules(spike_floor_frac=2.0)), LossWatch(LossRules(spike_floor_frac=0.05))
    for step, loss in enumerate(losses, start=1):
        assert deaf.push(step, loss) == keen.push(step, loss) == []
    assert deaf.push(101, 2.3) == []
    assert [a.kind for a in keen.push(101, 2.3)] == [AnomalyKind.SPIKE]
