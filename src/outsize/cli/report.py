"""report.png: loss, step time, memory and traffic of a run, as four small charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outsize.cli.metrics import Record, human

INK, BLUE, ORANGE, GREEN, GREY = "#222222", "#2b6cb0", "#dd6b20", "#2f855a", "#a0aec0"
_GB = 1e9


def write(path: Path, records: Sequence[Record], held_out: Sequence[tuple[int, float]], peak_rss: int = 0) -> None:
    """Draw the records; `held_out` adds (step, loss) measured before and after, `peak_rss` the highest RSS seen."""
    if not records:
        raise ValueError("there is nothing to report: no step was taken")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    charts = figure.subplots(2, 2)
    figure.suptitle(_headline(records, held_out), x=0.01, ha="left", fontsize=12, color=INK)
    _loss(charts[0][0], records, held_out)
    _step_time(charts[0][1], records)
    _memory(charts[1][0], records, peak_rss)
    _traffic(charts[1][1], records)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(str(path))


def _headline(records: Sequence[Record], held_out: Sequence[tuple[int, float]]) -> str:
    last = records[-1]
    fell = f", held-out loss {held_out[0][1]:.2f} → {held_out[-1][1]:.2f}" if held_out else ""
    return f"{len(records)} steps in {last.elapsed_seconds / 60:.1f} min{fell}, {human(last.state_bytes)} of state"


def _loss(chart: Any, records: Sequence[Record], held_out: Sequence[tuple[int, float]]) -> None:
    steps, losses = [record.step for record in records], [record.loss for record in records]
    chart.plot(steps, losses, color=GREY, linewidth=1, label="training, each step")
    chart.plot(steps, smooth(losses), color=BLUE, linewidth=2, label="training, smoothed")
    points = {record.step: record.held_out_loss for record in records if record.held_out_loss is not None}
    points.update(held_out)
    if points:
        marked = sorted(points.items())
        chart.plot(*zip(*marked, strict=True), color=ORANGE, marker="o", linewidth=1, label="held-out")
        for step, loss in (marked[0], marked[-1]):
            chart.annotate(f"{loss:.2f}", (step, loss), xytext=(4, 6), textcoords="offset points", color=ORANGE)
    _dress(chart, "Loss (nats a token)", "step")
    chart.set_ylim(bottom=min(losses) * 0.9, top=max([*losses, *points.values()]) * 1.05)


def _step_time(chart: Any, records: Sequence[Record]) -> None:
    steps = [record.step for record in records]
    parts = [[record.compute_seconds for record in records], [record.wait_seconds for record in records]]
    chart.stackplot(steps, *parts, labels=["compute", "wait for disk"], colors=[BLUE, ORANGE], alpha=0.75, linewidth=0)
    updates = [record.update_seconds for record in records]
    chart.plot(steps, updates, color=INK, linewidth=1.2, linestyle="--", label="update, behind the computation")
    _dress(chart, "Step time (s)", "step")
    usual = sorted(record.step_seconds for record in records)[int(0.98 * (len(records) - 1))]
    chart.set_ylim(0, max(usual, *updates) * 1.35 or 1)


def _memory(chart: Any, records: Sequence[Record], peak_rss: int) -> None:
    last, minutes = records[-1], [record.elapsed_seconds / 60 for record in records]
    chart.axhline(last.state_bytes / _GB, color=GREEN, linewidth=2, label="parameters + gradients + optimizer state")
    resident = [record.rss_over_imports / _GB for record in records]
    chart.plot(minutes, resident, color=BLUE, linewidth=2, label="RSS over the imports")
    if peak_rss:
        peak = max(0, peak_rss - last.base_rss_bytes) / _GB
        chart.axhline(peak, color=BLUE, linewidth=1, linestyle=":", label=f"its peak, {peak:.2f} GB")
    _dress(chart, "Memory (GB)", "minutes")
    chart.set_ylim(0, max(last.state_bytes / _GB, *resident) * 1.4)


def _traffic(chart: Any, records: Sequence[Record]) -> None:
    minutes = [record.elapsed_seconds / 60 for record in records]
    for name, values, color in (
        ("read", [record.bytes_read / _GB for record in records], BLUE),
        ("written", [record.bytes_written / _GB for record in records], ORANGE),
    ):
        chart.plot(minutes, values, color=color, linewidth=1.5, label=f"{name}: {sum(values):,.0f} GB in all")
    _dress(chart, "Disk traffic of each step (GB)", "minutes")
    most = max(max(record.bytes_read, record.bytes_written) for record in records)
    chart.set_ylim(0, most / _GB * 1.4 or 1)


def _dress(chart: Any, title: str, x_label: str) -> None:
    chart.set_title(title, loc="left", fontsize=10, color=INK)
    chart.set_xlabel(x_label, fontsize=9)
    chart.tick_params(labelsize=8)
    chart.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    chart.set_axisbelow(True)
    for side in ("top", "right"):
        chart.spines[side].set_visible(False)
    chart.legend(frameon=False, fontsize=8, loc="upper right")


def smooth(values: Sequence[float], keep: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        smoothed.append(total / weight)
    return smoothed
