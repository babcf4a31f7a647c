"""The effective training time ratio over a sliding hour. Pure; the whole run's is Goodput.ettr_frac.

Does not share out the time (goodput.py) and judges nothing: what is too low is for the alert rules.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ops.goodput import Goodput, Phase

HOUR_S = 3600.0


@dataclass(frozen=True)
class EttrPoint:
    """ETTR over the window that ends at a moment."""

    at: float
    """Unix seconds of the window's end."""
    frac: float | None
    """Steps that counted, as a share of the time that the run was driven; None where it was not driven."""
    is_full: bool
    """The run is as old as the window is long; else the window begins with the run."""


def sliding_ettr(goodput: Goodput, window_s: float = HOUR_S, max_points: int = 240) -> list[EttrPoint]:
    """ETTR over the window before each of evenly spaced moments, of which the last is the run's end.

    Args:
        goodput: the time of the run.
        window_s: length of the window in seconds.
        max_points: how many moments there are at most; they lie at least a tenth of a window apart.
    """
    wall_us, window_us = goodput.wall_us, max(1, round(window_s * 1e6))
    if not wall_us:
        return []
    every_us = max(1, window_us // 10, math.ceil(wall_us / max(1, max_points)))
    ends = range(goodput.end_us, goodput.start_us, -every_us)
    step_sum, driven_sum = _Sum(goodput, (Phase.STEP,)), _Sum(goodput, set(Phase) - {Phase.STOPPED})
    points = []
    for end_us in reversed(ends):
        start_us = max(goodput.start_us, end_us - window_us)
        driven_us = driven_sum.until(end_us) - driven_sum.until(start_us)
        step_us = step_sum.until(end_us) - step_sum.until(start_us)
        is_full = end_us - window_us >= goodput.start_us
        points.append(EttrPoint(end_us / 1e6, step_us / driven_us if driven_us else None, is_full))
    return points


class _Sum:
    """Microseconds that some phases took up to any moment: one pass, then a search for each question."""

    def __init__(self, goodput: Goodput, phases: Sequence[Phase] | set[Phase]) -> None:
        wanted = frozenset(phases)
        self._starts = [one.start_us for one in goodput.segments]
        self._counts = [one.phase in wanted for one in goodput.segments]
        lengths = (one.end_us - one.start_us if one.phase in wanted else 0 for one in goodput.segments)
        self._before = list(accumulate(lengths, initial=0))

    def until(self, at_us: int) -> int:
        index = bisect_right(self._starts, at_us) - 1
        if index < 0:
            return 0
        return self._before[index] + (at_us - self._starts[index] if self._counts[index] else 0)
