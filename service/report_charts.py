"""The report's drawings as SVG text: the loss curve with its marks, the time as one bar, ETTR by the hour.

Coordinates are pixels of a view box 1120 wide; colours are CSS classes of the page, see report_html.py.
"""

import math
from collections.abc import Sequence
from html import escape

from ops.goodput import Phase, Segment
from ops.report import CurvePoint, Report
from service.progress import duration_text

WIDTH, LEFT, RIGHT = 1120, 74, 18
PLOT_TOP, PLOT_HEIGHT = 34, 300
MAX_POINTS = 1500
"""Points that are drawn of a curve; of more, each stretch shows its lowest and highest, so spikes stay."""
MAX_SEGMENTS = 2000
MIN_ETTR_POINTS = 3
"""A run of a few minutes has no curve of hours."""


def loss_chart(report: Report) -> str:
    """The loss over steps: training and evaluation, lost steps, incidents and new attempts."""
    train, evals = finite(report.losses), finite(report.eval_losses)
    if not train:
        return '<p class="quiet">No step was completed.</p>'
    x_range = (min(0, train[0].step), max(report.steps, train[-1].step, 1))
    values = [point.value for point in train + evals]
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.5
    y_ticks = nice_ticks(low - margin, high + margin, 8)
    y_range = (min(y_ticks[0], low), max(y_ticks[-1], high))
    x_of, y_of = _Scale(x_range, LEFT, WIDTH - RIGHT), _Scale(y_range, PLOT_TOP + PLOT_HEIGHT, PLOT_TOP)
    bottom = PLOT_TOP + PLOT_HEIGHT
    parts = [_open("Loss over steps", bottom + 56)]
    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts += [
        f'<text x="{x_of(tick):.1f}" y="{bottom + 20}" text-anchor="middle">{tick:,.0f}</text>'
        for tick in nice_ticks(*x_range, 10)
        if x_range[0] <= tick <= x_range[1] and tick == int(tick)
    ]
    middle = PLOT_TOP + PLOT_HEIGHT / 2
    parts.append(
        f'<text class="axis" x="{(LEFT + WIDTH) / 2}" y="{bottom + 44}" text-anchor="middle">step</text>'
    )
    parts.append(
        f'<text class="axis" transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">'
        "loss (nats per token)</text>"
    )
    parts += _lost_bands(report, x_of, bottom)
    parts.append(f'<polyline class="train" points="{_points(train, x_of, y_of)}"/>')
    if evals:
        parts.append(f'<polyline class="eval" points="{_points(evals, x_of, y_of)}"/>')
        parts += [
            f'<circle class="eval-dot" cx="{x_of(p.step):.1f}" cy="{y_of(p.value):.1f}" r="4">'
            f"<title>evaluation after step {p.step}: {p.value:.4f}</title></circle>"
            for p in thinned(evals)
        ]
    parts += _incident_marks(report, x_of, bottom)
    parts.append("</svg>")
    return "\n".join(parts)


def timeline(report: Report) -> str:
    """The run's time as one bar of phases, with attempts, generations and incidents."""
    goodput = report.goodput
    if not goodput.wall_us:
        return '<p class="quiet">No time is on record.</p>'
    x_of = _Scale((goodput.start_us, goodput.end_us), LEFT, WIDTH - RIGHT)
    top, height = 62, 46
    parts = [_open("Time by phase", top + height + 62)]
    for segment in _visible(goodput.segments):
        x, end = x_of(segment.start_us), x_of(segment.end_us)
        length = duration_text((segment.end_us - segment.start_us) / 1e6)
        parts.append(
            f'<rect class="p-{segment.phase}" x="{x:.2f}" y="{top}" width="{max(end - x, 0.6):.2f}" '
            f'height="{height}"><title>{segment.phase}: {length}</title></rect>'
        )
    parts += _generations(goodput.segments, x_of, top)
    for number, bill in enumerate(report.bills, start=1):
        x = x_of(bill.event.seconds("detected_at", bill.event.at) * 1e6)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{top + height + 6}"/>')
        parts.append(_badge(number, x, top + height + 16, bill.event.text("class")))
    unit_us, unit = _time_unit(goodput.wall_us)
    for tick in nice_ticks(0, goodput.wall_us / unit_us, 10):
        x = x_of(goodput.start_us + tick * unit_us)
        if x <= WIDTH - RIGHT + 1:
            y = top + height + 38
            parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text class="axis" x="{(LEFT + WIDTH) / 2}" y="{top + height + 58}" text-anchor="middle">'
        f"time since the run was created ({unit})</text>"
    )
    parts.append(f'<text x="{LEFT - 8}" y="{top + height / 2 + 4}" text-anchor="end">phase</text>')
    parts.append(f'<text x="{LEFT - 8}" y="{top - 26}" text-anchor="end">ranks</text></svg>')
    return "\n".join(parts)


def ettr_chart(report: Report) -> str:
    """ETTR over the hour before each moment, below the timeline and on its scale; nothing for a short run."""
    points = [point for point in report.ettr_hours if point.frac is not None]
    if len(points) < MIN_ETTR_POINTS:
        return ""
    goodput, height = report.goodput, 110
    x_of = _Scale((goodput.start_us, goodput.end_us), LEFT, WIDTH - RIGHT)
    y_of = _Scale((0.0, 1.0), PLOT_TOP + height, PLOT_TOP)
    parts = [_open("ETTR over a sliding hour", PLOT_TOP + height + 24)]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>')
    line = " ".join(f"{x_of(point.at * 1e6):.1f},{y_of(point.frac or 0.0):.1f}" for point in points)
    parts.append(f'<polyline class="train" points="{line}"/>')
    parts.append(
        f'<text class="axis" x="{(LEFT + WIDTH) / 2}" y="{PLOT_TOP - 14}" text-anchor="middle">'
        "ETTR: steps that counted as a share of the hour before (of the run, in its first hour)</text></svg>"
    )
    return "\n".join(parts)


def finite(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """The points that can be drawn."""
    return [point for point in points if math.isfinite(point.value)]


def thinned(points: Sequence[CurvePoint], limit: int = MAX_POINTS) -> list[CurvePoint]:
    """At most about `limit` points: of each stretch the lowest and the highest, in order, ends kept."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept = [points[0]]
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        extremes = {min(stretch, key=lambda p: p.value), max(stretch, key=lambda p: p.value)}
        kept += sorted(extremes, key=lambda p: p.step)
    return [*kept, points[-1]]


def nice_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `wanted` of them."""
    span = max(high - low, 1e-9)
    raw = span / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


class _Scale:
    """Maps a range of values to a range of pixels."""

    def __init__(self, values: tuple[float, float], start: float, end: float) -> None:
        self._low, self._start = values[0], start
        self._factor = (end - start) / ((values[1] - values[0]) or 1)

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        return self._start + (value - self._low) * self._factor


def _open(title: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'


def _points(points: Sequence[CurvePoint], x_of: _Scale, y_of: _Scale) -> str:
    return " ".join(f"{x_of(p.step):.1f},{y_of(p.value):.1f}" for p in thinned(points))


def _lost_bands(report: Report, x_of: _Scale, bottom: float) -> list[str]:
    """The steps that each set of ranks trained for nothing, shaded."""
    by_ranks: dict[tuple[int, int], list[int]] = {}
    for line in report.lost:
        by_ranks.setdefault((line.attempt, line.generation), []).append(line.step)
    bands = []
    for steps in by_ranks.values():
        x, end = x_of(min(steps) - 1), x_of(max(steps))
        title = f"steps {min(steps)} to {max(steps)} were trained again"
        bands.append(
            f'<rect class="lost" x="{x:.1f}" y="{PLOT_TOP}" width="{max(end - x, 1.5):.1f}" '
            f'height="{bottom - PLOT_TOP}"><title>{title}</title></rect>'
        )
    return bands


def _incident_marks(report: Report, x_of: _Scale, bottom: float) -> list[str]:
    marks = []
    for number, bill in enumerate(report.bills, start=1):
        x = x_of(bill.event.integer("step"))
        marks.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{PLOT_TOP - 6}" y2="{bottom}"/>')
        marks.append(_badge(number, x, PLOT_TOP - 16, bill.event.text("class")))
    return marks


def _badge(number: int, x: float, y: float, title: str) -> str:
    return (
        f"<g><title>incident {number}: {escape(title)}</title>"
        f'<circle class="badge" cx="{x:.1f}" cy="{y:.1f}" r="10"/>'
        f'<text class="badge-text" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{number}</text></g>'
    )


def _generations(segments: Sequence[Segment], x_of: _Scale, top: float) -> list[str]:
    """A bracket over the time of each set of ranks, labelled attempt.generation where there is room."""
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for one in segments:
        if one.phase not in (Phase.STOPPED, Phase.IDLE):
            key = (one.attempt, one.generation)
            spans[key] = (spans.get(key, (one.start_us, 0))[0], one.end_us)
    drawn = []
    for (attempt, generation), (start, end) in spans.items():
        x, x_end = x_of(start) + 1, x_of(end) - 1
        drawn.append(f'<path class="bracket" d="M{x:.1f} {top - 8}v-8H{max(x_end, x):.1f}v8"/>')
        label, room = f"{attempt}.{generation}", x_end - x
        if room > 150:
            label = f"attempt {attempt}, generation {generation}"
        if room > 26:
            drawn.append(
                f'<text x="{(x + x_end) / 2:.1f}" y="{top - 24}" text-anchor="middle">{label}</text>'
            )
    return drawn


def _visible(segments: Sequence[Segment]) -> Sequence[Segment]:
    """The segments, or, of too many, for each pixel the phase that took most of it."""
    if len(segments) <= MAX_SEGMENTS:
        return segments
    start, end = segments[0].start_us, segments[-1].end_us
    width = (end - start) / (WIDTH - LEFT - RIGHT)
    columns: dict[int, dict[Phase, float]] = {}
    for one in segments:
        for column in range(int((one.start_us - start) / width), int((one.end_us - start - 1) / width) + 1):
            left = start + column * width
            share = min(one.end_us, left + width) - max(one.start_us, left)
            taken = columns.setdefault(column, {})
            taken[one.phase] = taken.get(one.phase, 0.0) + share
    return [
        Segment(
            round(start + c * width), round(start + (c + 1) * width), max(taken, key=lambda p: taken[p]), 0, 0
        )
        for c, taken in sorted(columns.items())
    ]


def _time_unit(wall_us: int) -> tuple[float, str]:
    seconds = wall_us / 1e6
    if seconds < 180:
        return 1e6, "s"
    if seconds < 3 * 3600:
        return 60e6, "min"
    return (3600e6, "h") if seconds < 72 * 3600 else (86400e6, "days")
