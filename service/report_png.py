"""The loss curve as a PNG, with the same marks as the page's. Draws without a display (Agg)."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ops.report import Report
from service.report_charts import finite

TRAIN, EVAL, BAD = "#2563eb", "#c2570c", "#d92d20"


def draw_loss_png(report: Report, path: Path) -> None:
    """Draw training and evaluation loss over steps, incidents and lost steps marked; 1500 x 675 pixels.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    train, evals = finite(report.losses), finite(report.eval_losses)
    if train:
        axes.plot(
            [p.step for p in train], [p.value for p in train], color=TRAIN, linewidth=1.6, label="training"
        )
    if evals:
        steps, values = [p.step for p in evals], [p.value for p in evals]
        axes.plot(steps, values, "--o", color=EVAL, linewidth=1.4, markersize=4, label="evaluation")
    spans: dict[tuple[int, int], list[int]] = {}
    for line in report.lost:
        spans.setdefault((line.attempt, line.generation), []).append(line.step)
    for index, lost in enumerate(spans.values()):
        label = "steps trained again" if index == 0 else None
        axes.axvspan(min(lost) - 1, max(lost), color=BAD, alpha=0.14, linewidth=0, label=label)
    for number, bill in enumerate(report.bills, start=1):
        step = bill.event.integer("step")
        axes.axvline(step, color=BAD, linestyle=":", linewidth=1.3, label="incident" if number == 1 else None)
        axes.annotate(
            str(number), (step, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom", color=BAD
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"{report.run_id}: {report.status}, step {report.steps:,}", loc="left", pad=18)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if train or evals:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
