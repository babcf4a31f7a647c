"""Learning rate as a pure function of the step: nothing to save, nothing to restore. No torch.

It is a function of the step about to be taken, so a resumed run cannot warm up twice.
"""

import math
from typing import assert_never

from jobs.spec.optim import Constant, Cosine, Linear, OptimSpec, Wsd


def lr_at(optim: OptimSpec, total_steps: int, step: int) -> float:
    """Learning rate of the step about to be taken.

    Warm-up, all kinds: lr * (step + 1) / warmup_steps for step < warmup_steps, so no step has rate 0 and step
    warmup_steps - 1 is the first at the peak. After it, x is the share of the decay that lies behind the
    step, and the factor falls from 1 at x = 0 to m = min_lr_frac at x = 1, where step = total_steps (the
    step that is never taken):

        cosine    m + (1 - m) * (1 + cos(pi x)) / 2  x = (step - warmup) / (total - warmup) (arXiv 1608.03983)
        linear    1 - (1 - m) * x                    x as above
        constant  1
        wsd       1 until total - decay_steps, then   x = (step - total + decay) / decay   (arXiv 2404.06395)
            linear   1 - (1 - m) * x
            sqrt     1 - (1 - m) * sqrt(x)   (arXiv 2405.18392)
            cosine   m + (1 - m) * (1 + cos(pi x)) / 2

    Args:
        optim: peak rate and schedule.
        total_steps: train.steps.
        step: completed steps, 0 before the first; steps past total_steps keep the last rate.
    """
    schedule = optim.schedule
    warmup = schedule.warmup_steps
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    match schedule:
        case Constant():
            return optim.lr
        case Cosine():
            return optim.lr * _cosine(_share(step, warmup, total_steps), schedule.min_lr_frac)
        case Linear():
            return optim.lr * _linear(_share(step, warmup, total_steps), schedule.min_lr_frac)
        case Wsd():
            x = _share(step, max(warmup, total_steps - schedule.decay_steps), total_steps)
            match schedule.decay:
                case "linear":
                    factor = _linear(x, schedule.min_lr_frac)
                case "sqrt":
                    factor = _linear(math.sqrt(x), schedule.min_lr_frac)
                case "cosine":
                    factor = _cosine(x, schedule.min_lr_frac)
            return optim.lr * factor
    assert_never(schedule)


def _share(step: int, first: int, last: int) -> float:
    """Where `step` lies in [first, last), as 0 .. 1."""
    if last <= first:
        return 1.0 if step >= last else 0.0
    return min(1.0, max(0.0, (step - first) / (last - first)))


def _linear(x: float, floor: float) -> float:
    return 1.0 - (1.0 - floor) * x


def _cosine(x: float, floor: float) -> float:
    return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * x)) / 2.0
