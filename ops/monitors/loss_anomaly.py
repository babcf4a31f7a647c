"""Losses that are not as they should be: not finite, a spike, or a level that only rises.

A loss is compared with the run's own last ones by a robust score, (loss - median) / (1.4826 MAD), after the
fall inside the window is taken out; a floor keeps a very quiet run from calling every ripple a spike. What is
to be done (stop, skip the data, roll back) is the policy's affair. A non-finite gradient never reaches the
parameters: the engine skips the step. Reads no files.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ops.signal import Entity, EntityKind, Signal

NAME = "loss_anomaly"
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


N_REMEMBERED = 4096
"""Steps back to which a run can go and still be compared with what it was like there."""
History = list[tuple[int, float]]
"""Step and value, ascending."""


class AnomalyKind(StrEnum):
    """What is wrong with it."""

    NOT_FINITE = "not_finite"
    SPIKE = "spike"
    DIVERGENCE = "divergence"


@dataclass(frozen=True)
class LossAnomaly:
    """One finding, at the step where it was found."""

    kind: AnomalyKind
    quantity: str
    """ "loss" or "grad_norm"."""
    step: int
    value: float
    expected: float
    """What the run's own last steps let expect; NaN where there are none."""
    score: float
    """How far above it, in the unit of `threshold`; infinite where the value is not finite."""
    threshold: float
    since_step: int
    """First step that belongs to it: go back to before it."""
    reason: str

    def signal(self, now: float) -> Signal:
        """As a reading."""
        kind = f"{self.quantity}_{self.kind}"
        return Signal(now, NAME, kind, Entity(EntityKind.JOB, "loss"), value=self.value, text=self.reason)


@dataclass(frozen=True)
class LossRules:
    """Where an anomaly begins."""

    n_window: int = 64
    """Steps that a new one is compared with."""
    n_needed: int = 20
    """With fewer known steps only what is not finite is told."""
    spike_score: float = 8.0
    spike_floor_frac: float = 0.1
    """A spike is above what is expected by this share of it at least."""
    grad_norm_ratio: float = 5.0
    """A gradient norm spikes when it is so many times the usual, and its logarithm scores as a spike."""
    n_spikes_lost: int = 8
    """Spikes in a row after which the loss is taken not to come back."""
    rise_frac: float = 0.1
    """Divergence: the median of the last half window is above its best by this share, plus three sigma."""
    warm_up_factor: float = 3.0
    """Times the above while the learning rate rises, and as long after it as it rose."""
    n_rise_steps: int = 32
    """Steps in a row for which it has to be so."""


@dataclass
class LossWatch:
    """Looks at one step after another. Mutable; a step told again (after a restart) begins anew there."""

    rules: LossRules = field(default_factory=LossRules)
    _losses: History = field(init=False, repr=False, default_factory=list)
    _log_norms: History = field(init=False, repr=False, default_factory=list)
    _levels: History = field(init=False, repr=False, default_factory=list)
    _best: float = field(init=False, default=math.inf)
    _last_step: int = field(init=False, default=-1)
    _spikes: list[tuple[int, float]] = field(init=False, repr=False, default_factory=list)
    _is_norm_high: bool = field(init=False, default=False)
    _n_risen: int = field(init=False, default=0)
    _last_lr: float = field(init=False, default=math.inf)
    _n_warm_up: int = field(init=False, default=0)
    _n_since_warm_up: int = field(init=False, default=0)

    def push(
        self, step: int, loss: float, grad_norm: float | None = None, lr: float | None = None
    ) -> list[LossAnomaly]:
        """What is wrong with one step; an excursion is told when it begins, and again if it does not end.

        Args:
            step: completed steps; not above the last one's: that and all after it are forgotten.
            loss: mean over the global batch.
            grad_norm: before clipping, where it is known.
            lr: of the step, where it is known: a rising one is warm-up.
        """
        if step <= self._last_step:
            self._forget_from(step)
        self._last_step = step
        if lr is not None:
            self._follow_lr(lr)
        found = self._look_at_norm(step, grad_norm) if grad_norm is not None else []
        if not math.isfinite(loss):
            return [_not_finite("loss", step, loss), *found]
        return [*self._look_at_loss(step, loss), *found]

    def _look_at_loss(self, step: int, loss: float) -> list[LossAnomaly]:
        rules = self.rules
        known = self._window(self._losses)
        if len(known) >= rules.n_needed:
            expected, sigma = _expect(known)
            floor = rules.spike_floor_frac * abs(expected)
            sigma = max(sigma, floor / rules.spike_score)
            score = (loss - expected) / sigma if sigma else 0.0
            if score > rules.spike_score:
                return self._spike(step, loss, expected, score)
        self._spikes.clear()
        _remember(self._losses, step, loss)
        return self._look_at_level(step)

    def _spike(self, step: int, loss: float, expected: float, score: float) -> list[LossAnomaly]:
        rules = self.rules
        self._spikes.append((step, loss))
        if len(self._spikes) not in (1, rules.n_spikes_lost):
            return []
        since = self._spikes[0][0]
        if len(self._spikes) == 1:
            kind = AnomalyKind.SPIKE
            words = f"loss {loss:.4g} where the last steps let expect {expected:.4g}"
        else:
            kind = AnomalyKind.DIVERGENCE
            words = f"loss has not come back for {len(self._spikes)} steps: {loss:.4g}, before {expected:.4g}"
            self._take_as_normal()
        reason = f"step {step}: {words} (score {score:.1f}, limit {rules.spike_score:.1f})"
        return [LossAnomaly(kind, "loss", step, loss, expected, score, rules.spike_score, since, reason)]

    def _take_as_normal(self) -> None:
        """From here on the new level is what is compared with: the same excursion is not told for ever."""
        self._losses.clear()
        self._losses.extend(self._spikes)
        self._spikes.clear()
        self._levels.clear()
        self._best = math.inf
        self._n_risen = 0

    def _look_at_level(self, step: int) -> list[LossAnomaly]:
        rules = self.rules
        values = self._window(self._losses)
        if len(values) < rules.n_window:
            return []
        level = statistics.median(values[rules.n_window // 2 :])
        _, sigma = _expect(values)
        _remember(self._levels, step, level)
        self._best = min(self._best, level)
        factor = rules.warm_up_factor if self._is_warming_up() else 1.0
        allowed = factor * (rules.rise_frac * abs(self._best) + 3.0 * sigma)
        self._n_risen = self._n_risen + 1 if level - self._best > allowed else 0
        if self._n_risen < rules.n_rise_steps:
            return []
        best, score = self._best, (level - self._best) / allowed
        since = max((s for s, value in self._levels if value <= best), default=step)
        self._best, self._n_risen = level, 0
        reason = (
            f"step {step}: the loss rises: median {level:.4g} over the last {rules.n_window // 2} steps, "
            f"{best:.4g} at step {since}, and more than {allowed:.3g} above it for {rules.n_rise_steps} steps"
        )
        return [LossAnomaly(AnomalyKind.DIVERGENCE, "loss", step, level, best, score, 1.0, since, reason)]

    def _look_at_norm(self, step: int, grad_norm: float) -> list[LossAnomaly]:
        rules = self.rules
        if not math.isfinite(grad_norm):
            return [_not_finite("grad_norm", step, grad_norm)]
        if grad_norm <= 0.0:
            return []
        value = math.log(grad_norm)
        known = self._window(self._log_norms)
        _remember(self._log_norms, step, value)
        if len(known) < rules.n_needed:
            return []
        expected, sigma = _expect(known)
        sigma = max(sigma, math.log(rules.grad_norm_ratio) / rules.spike_score)
        score = (value - expected) / sigma
        was_high, self._is_norm_high = self._is_norm_high, score > rules.spike_score
        if was_high or not self._is_norm_high:
            return []
        usual = math.exp(expected)
        reason = (
            f"step {step}: gradient norm {grad_norm:.4g}, {grad_norm / usual:.1f} times the usual {usual:.4g}"
        )
        limit = rules.spike_score
        return [
            LossAnomaly(AnomalyKind.SPIKE, "grad_norm", step, grad_norm, usual, score, limit, step, reason)
        ]

    def _window(self, history: History) -> list[float]:
        return [value for _, value in history[-self.rules.n_window :]]

    def _follow_lr(self, lr: float) -> None:
        if lr > self._last_lr:
            self._n_warm_up = self._n_warm_up + 1 if self._n_since_warm_up == 0 else 1
            self._n_since_warm_up = 0
        else:
            self._n_since_warm_up += 1
        self._last_lr = lr

    def _is_warming_up(self) -> bool:
        return self._n_warm_up > 0 and self._n_since_warm_up <= max(self._n_warm_up, self.rules.n_window)

    def _forget_from(self, step: int) -> None:
        for known in (self._losses, self._log_norms, self._levels):
            while known and known[-1][0] >= step:
                known.pop()
        self._best = min((level for _, level in self._levels), default=math.inf)
        self._spikes = [spike for spike in self._spikes if spike[0] < step]
        self._n_risen = 0
        self._is_norm_high = False
        self._last_lr = math.inf


def _remember(history: History, step: int, value: float) -> None:
    history.append((step, value))
    if len(history) >= 2 * N_REMEMBERED:
        del history[:N_REMEMBERED]


def _expect(values: Sequence[float]) -> tuple[float, float]:
    """What comes next and its spread: median of the newer half, sigma around the line through both halves.

    Not along the line: a fall that ends would look like a rise.
    """
    half = len(values) // 2
    older, newer = statistics.median(values[:half]), statistics.median(values[half:])
    slope = (newer - older) / (len(values) / 2)
    centre = (len(values) - 1) / 2
    middle = (older + newer) / 2
    rests = [abs(value - middle - slope * (i - centre)) for i, value in enumerate(values)]
    return newer, MAD_TO_SIGMA * statistics.median(rests)


def _not_finite(quantity: str, step: int, value: float) -> LossAnomaly:
    reason = f"step {step}: {quantity} is {value}"
    return LossAnomaly(AnomalyKind.NOT_FINITE, quantity, step, value, math.nan, math.inf, 0.0, step, reason)
