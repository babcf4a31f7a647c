import io
import itertools
import json
import math
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from jobs.events import EvalRecord
from ops.goodput import Phase, Segment
from ops.ledger import MetricsWriter
from ops.report import CurvePoint, build_report
from service.report_charts import MAX_POINTS, MAX_SEGMENTS, _visible, nice_ticks, thinned
from service.report_html import render_html, write_report_files
from service.report_style import PHASE_COLOURS, PHASE_WORDS
from service.report_text import print_report
from tests.support.runs import make_run, step_record, tiny_spec

VOID = {"meta"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what the page holds."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def run_dir(tmp_path):
    """6 steps; a rank dies after step 4; the newest checkpoint is that of step 2; texts hold HTML."""
    spec = tiny_spec(tmp_path, steps=6)
    spec = spec.model_copy(
        update={"resources": spec.resources.model_copy(update={"env": {"HF_TOKEN": "s3cret"}})}
    )
    run, ledger = make_run(tmp_path, spec, "FINISHED")
    ledger.write("run_created", at=100.0)
    ledger.write("attempt_started", at=100.0, attempt=0, world_size=2)
    ledger.write("ranks_started", at=101.0, attempt=0, generation=0)
    ledger.write("restored", at=102.0, attempt=0, generation=0, step=0, load_s=0)
    ledger.write("checkpoint_committed", at=104.1, step=2, n_bytes=3 << 20, write_s=0.1, path="step-00000002")
    ledger.write(
        "incident",
        at=106.5,
        **{"class": "worker_killed"},
        culprit="rank 1 <script>alert(1)</script>",
        action="RESTART_RANKS",
        step=4,
        failed_at=106.25,
        detected_at=106.5,
        evidence="Traceback <b>&amp; more</b>",
        attempt=0,
        generation=0,
    )
    ledger.write("ranks_started", at=107.0, attempt=0, generation=1)
    ledger.write("restored", at=108.0, attempt=0, generation=1, step=2, load_s=0.5)
    ledger.write("training_ended", at=112.0, attempt=0, generation=1, step=6, outcome="finished")
    ledger.write("run_ended", at=112.5, status="FINISHED")
    for generation, steps, start in ((0, (1, 2, 3, 4), 102.0), (1, (3, 4, 5, 6), 106.0)):
        writer = MetricsWriter(run / "metrics.jsonl", attempt=0, generation=generation)
        for step in steps:
            writer.write_step(step_record(step, loss=6.0 - step / 2, step_time_s=1.0), at=start + step)
    writer.write_eval(EvalRecord(step=6, loss=3.5, n_tokens=50, eval_time_s=0.25), at=112.3)
    return run


def test_the_page_is_whole_escaped_and_needs_no_network(run_dir):
    text = render_html(build_report(run_dir))
    page = Page(text)
    words = " ".join(page.text)
    assert "script" not in page.tags
    assert "rank 1 <script>alert(1)</script>" in words
    assert "Traceback <b>&amp; more</b>" in words
    assert "s3cret" not in text
    assert "http://" not in text
    assert "https://" not in text
    assert not [item for item in page.attributes if item[1] in ("src", "href")]
    assert text.isascii()


def test_the_page_shows_curve_incidents_phases_and_checkpoints(run_dir):
    page = Page(render_html(build_report(run_dir)))
    classes = [value for _, name, value in page.attributes if name == "class"]
    assert classes.count("badge") == 2  # the incident in the curve and in the timeline
    assert classes.count("lost") == 1
    assert classes.count("eval-dot") == 1
    for phase in (Phase.STEP, Phase.LOST_WORK, Phase.DETECTION, Phase.RESTART, Phase.LOAD):
        assert f"p-{phase}" in classes
    words = " ".join(page.text)
    for expected in (
        "loss (nats per token)",
        "time since the run was created (s)",
        "FINISHED",
        "3.0 MiB",
        "0.25 s",
    ):
        assert expected in words
    points = next(value for tag, name, value in page.attributes if tag == "polyline" and name == "points")
    heights = [float(pair.split(",")[1]) for pair in points.split()]
    assert heights == sorted(heights)  # the loss falls, pixels grow downwards
    assert len(heights) == 6


def test_a_long_run_shows_its_ettr_by_the_hour_and_a_short_one_does_not(run_dir, tmp_path):
    assert "sliding hour" not in render_html(build_report(run_dir))
    long, ledger = make_run(tmp_path / "long", tiny_spec(tmp_path / "long"), "FINISHED")
    ledger.write("run_created", at=0.0)
    ledger.write("attempt_started", at=0.0, attempt=0, world_size=2)
    ledger.write("ranks_started", at=0.0, attempt=0, generation=0)
    ledger.write("restored", at=3600.0, attempt=0, generation=0, step=0, load_s=0)
    MetricsWriter(long / "metrics.jsonl", 0, 0).write_step(step_record(1, step_time_s=7200.0), at=10_800.0)
    ledger.write("run_ended", at=10_800.0, status="FINISHED")
    chart = render_html(build_report(long)).partition("ETTR over a sliding hour")[2].partition("</svg>")[0]
    heights = [float(pair.split(",")[1]) for pair in chart.partition('points="')[2].partition('"')[0].split()]
    assert heights[0] == 144.0  # nothing counted in the first minutes
    assert heights[-1] == 34.0  # all of the last hour did
    assert heights == sorted(heights, reverse=True)


def test_the_picture_shows_the_curve(run_dir):
    report = build_report(run_dir)
    write_report_files(report, run_dir)
    pixels = image.imread(run_dir / "loss.png")
    assert pixels.shape[:2] == (675, 1500)
    blue = np.array([0x25, 0x63, 0xEB]) / 255
    assert (np.abs(pixels[:, :, :3] - blue).max(axis=2) < 0.02).sum() > 500
    assert json.loads((run_dir / "report.json").read_text()) == report.to_json()
    assert (run_dir / "report.html").read_text() == render_html(report)


def test_an_empty_run_has_a_page_a_picture_and_a_text(tmp_path):
    (tmp_path / "empty").mkdir()
    report = build_report(tmp_path / "empty")
    write_report_files(report, tmp_path)
    assert "No step was completed" in " ".join(Page((tmp_path / "report.html").read_text()).text)
    print_report(report, Console(file=io.StringIO()))


def test_non_finite_losses_leave_a_page_that_says_so(run_dir):
    writer = MetricsWriter(run_dir / "metrics.jsonl", 0, 1)
    writer.write_step(step_record(7, loss=math.nan), at=112.0)
    report = build_report(run_dir)
    write_report_files(report, run_dir)
    text = render_html(report)
    assert "1 non-finite losses" in text
    assert "nan," not in text


def test_the_text_report(run_dir):
    out = io.StringIO()
    print_report(
        build_report(run_dir), Console(file=out, width=120), "mlflow ui --backend-store-uri sqlite:///x.db"
    )
    text = out.getvalue()
    for expected in (
        "demo  FINISHED",
        "6 of 6",
        "5.5000 -> 3.0000",
        "1 restarts in place",
        "2 steps trained for nothing",
        "lost_work",
        "worker_killed",
        "rank 1 <script>alert(1)</script>",
        "0.25 s",
        "1.50 s",
        str(run_dir),
        "open it with: mlflow ui --backend-store-uri sqlite:///x.db",
    ):
        assert expected in text


def test_thinning_keeps_spikes_and_ends():
    points = [CurvePoint(step, 0.0, 1.0) for step in range(1, 20_001)]
    points[12_345] = CurvePoint(12_346, 0.0, 99.0)
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS + 2
    assert max(point.value for point in kept) == 99.0
    assert (kept[0].step, kept[-1].step) == (1, 20_000)
    assert [p.step for p in kept] == sorted(p.step for p in kept)


def test_too_many_segments_become_one_a_pixel_without_gaps():
    phases = [Phase.STEP, Phase.SAVE_STALL]
    segments = [Segment(n * 1000, (n + 1) * 1000, phases[n % 2], 0, 0) for n in range(MAX_SEGMENTS * 3)]
    drawn = _visible(segments)
    assert len(drawn) < MAX_SEGMENTS
    assert drawn[0].start_us == 0
    assert drawn[-1].end_us >= segments[-1].end_us
    assert all(a.end_us == b.start_us for a, b in itertools.pairwise(drawn))


@pytest.mark.parametrize(("low", "high"), [(0, 400), (1.97, 5.6), (0, 1), (-3, 1e6), (2, 2)])
def test_ticks_are_round_and_cover_the_range(low, high):
    ticks = nice_ticks(low, high, 8)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 20 or low == high


def test_each_phase_has_a_colour_of_its_own_and_words():
    assert set(PHASE_COLOURS) == set(PHASE_WORDS) == set(Phase)
    assert len(set(PHASE_COLOURS.values())) == len(Phase)
