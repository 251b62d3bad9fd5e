"""`outsize report`: what a run of `outsize train` was, as one page with its charts. A run that ends writes it too."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from outsize.cli import options
from outsize.planning.sizes import format_bytes

SUMMARY = "write the report of a run again"
DESCRIPTION = (
    "Write report.html and report.png of a run of `outsize train`, also of one that was killed: then up to its newest "
    "checkpoint. The run may go on meanwhile."
)
GIB = 1 << 30
HISTORY = "history.json"
"""The Trainer's log, in the folder of a run that has ended."""

Record = dict[str, Any]
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
img { width: 100% } td { padding: 0 1.5rem 0 0; vertical-align: top } pre { white-space: pre-wrap; background: #f5f5f5;
padding: 1rem } h2 { margin-top: 2rem }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=os.path.abspath, metavar="RUN", help="folder of the run")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.run)
    if not options.options_file(folder).exists():
        raise FileNotFoundError(f"{folder} is no folder of a run of `outsize train`: it has no options.json")
    if not write_report(folder, read_history(folder)):
        raise ValueError(f"{folder} has no step yet, or none that a checkpoint or the end of the run has kept")
    print(f"report: {folder / 'report.html'}")
    return 0


def read_history(folder: Path) -> list[Record]:
    """The longest log that the run has left."""
    found: list[tuple[int, list[Record]]] = []
    for path in (*folder.glob(HISTORY), *folder.glob("checkpoint-*/trainer_state.json")):
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            log = read if path.name == HISTORY else read["log_history"]
            found.append((max((int(record["step"]) for record in log), default=0), log))
        except (ValueError, OSError, KeyError, TypeError):  # of a run that was killed, or goes on; or no log
            continue
    return max(found, key=lambda each: each[0], default=(0, []))[1]


def keep_history(folder: Path, history: Sequence[Record]) -> None:
    fresh = folder / f".{HISTORY}.new"
    fresh.write_text(json.dumps(history), encoding="utf-8")
    fresh.replace(folder / HISTORY)


def write_report(folder: Path, history: Sequence[Record]) -> bool:
    """`report.html` and `report.png`. False where there was no step."""
    steps = {
        record["step"]: record for record in history if "seconds" in record
    }  # of a step that was done again: the last
    if not steps:
        return False
    records = [steps[step] for step in sorted(steps)]
    chosen = options.stored_in(folder)
    _draw(folder / "report.png", records, history)
    _write_page(folder / "report.html", records, history, chosen)
    return True


def peak_of(records: Sequence[Record], history: Sequence[Record]) -> int:
    """Of the process over the imports. It is never below the curve."""
    curve: list[int] = [record["process_bytes"] for record in records]
    curve += [each["peak_bytes"] for each in history if "peak_bytes" in each]
    return max(curve)


def _draw(path: Path, records: Sequence[Record], history: Sequence[Record]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record["step"] for record in records]
    held_out = [(record["step"], record["eval_loss"]) for record in history if "eval_loss" in record]
    peak, state = peak_of(records, history), format_bytes(records[-1]["state_bytes"])

    def of(name: str, scale: float = 1.0) -> list[float]:
        return [record.get(name, math.nan) / scale for record in records]

    figure = Figure(figsize=(11, 13), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    charts = figure.subplots(4, 2)
    loss, perplexity, rate, norm, tokens, seconds, memory, disk = charts.flat
    figure.suptitle(f"{steps[-1]} steps, {state} of parameters, gradients and optimizer state", x=0.01, ha="left")
    loss.plot(steps, of("loss"), label="training")
    perplexity.plot(steps, [math.exp(min(value, 50.0)) for value in of("loss")], label="training")
    perplexity.set_yscale("log")
    if held_out:
        loss.plot(*zip(*held_out, strict=True), marker="o", label="held-out")
        perplexity.plot(
            [at for at, _ in held_out],
            [math.exp(min(each, 50.0)) for _, each in held_out],
            marker="o",
            label="held-out",
        )
    rate.plot(steps, of("learning_rate"))
    norm.plot(steps, of("grad_norm"))
    tokens.plot(steps, of("tokens_per_second"))
    for name, label in (("seconds", "a step"), ("wait_seconds", "wait for disk"), ("update_seconds", "update, behind")):
        seconds.plot(steps, of(name), label=label)
    for tier in ("device", "host", "disk"):
        if any(record.get(f"{tier}_bytes") for record in records):
            memory.plot(steps, of(f"{tier}_bytes", GIB), label=f"of the model, on {tier}")
    memory.plot(steps, of("process_bytes", GIB), label="memory over the imports")
    memory.axhline(peak / GIB, linestyle=":", label=f"its peak, {format_bytes(peak)}")
    disk.plot(steps, of("bytes_read", GIB), label="read")
    disk.plot(steps, of("bytes_written", GIB), label="written")
    titles = {
        loss: "Loss (nats a token)",
        perplexity: "Perplexity",
        rate: "Learning rate",
        norm: "Gradient norm, before clipping",
        tokens: "Tokens a second",
        seconds: "Time (s)",
        memory: "Memory (GiB)",
        disk: "Disk traffic of each step (GiB)",
    }
    marks = {"saved": "#999999", "resumed": "#d62728"}
    for chart, title in titles.items():
        chart.set_title(title, loc="left", fontsize=10)
        chart.set_xlabel("step", fontsize=9)
        chart.spines[["top", "right"]].set_visible(False)
        for mark, color in marks.items():
            for number, step in enumerate(sorted({record["step"] for record in history if mark in record})):
                named = {"label": mark} if chart is loss and not number else {}
                chart.axvline(step, color=color, linewidth=0.7, linestyle="--", **named)
        if chart.get_legend_handles_labels()[0]:
            chart.legend(frameon=False, fontsize=8)
        if chart not in (loss, perplexity, rate):
            chart.set_ylim(bottom=0)
    figure.savefig(str(path))


def _write_page(path: Path, records: Sequence[Record], history: Sequence[Record], chosen: Record) -> None:
    held_out = [record["eval_loss"] for record in history if "eval_loss" in record]
    peak, state = peak_of(records, history), records[-1]["state_bytes"]
    seconds = sum(record["seconds"] for record in records)
    figures = {
        "steps": f"{records[-1]['step']} of {chosen.get('steps', '?')}",
        "training loss": f"{records[0]['loss']:.3f} at first, {records[-1]['loss']:.3f} at last",
        "held-out loss": f"{held_out[0]:.3f} at first, {held_out[-1]:.3f} at last" if held_out else "not measured",
        "time in steps": f"{seconds:,.0f} s, {seconds / len(records):.2f} s a step",
        "speed": f"{sum(r['tokens_per_second'] * r['seconds'] for r in records) / seconds:,.0f} tokens a second",
        "parameters, gradients, optimizer state": format_bytes(state),
        "peak memory over the imports": f"{format_bytes(peak)}, the state is {state / max(peak, 1):.1f} x that",
        "disk": f"{format_bytes(sum(r['bytes_read'] for r in records))} read, "
        f"{format_bytes(sum(r['bytes_written'] for r in records))} written",
    }
    for mark, words in (("saved", "saved at step"), ("resumed", "gone on from step")):
        found = sorted({record["step"] for record in history if mark in record})
        if found:
            figures[words] = ", ".join(map(str, found))
    samples = [(record["step"], record["sample"]) for record in history if "sample" in record]
    body = [
        f"<h1>{escape(path.parent.name)}</h1>",
        _table(figures),
        '<img src="report.png" alt="charts of the run">',
        *(["<h2>Samples</h2>"] if samples else []),
        *(f"<p>after step {step}</p><pre>{escape(text)}</pre>" for step, text in samples),
        "<h2>Options</h2>",
        _table({name: value for name, value in sorted(chosen.items()) if value is not None}),
    ]
    head = f'<meta charset="utf-8"><title>{escape(path.parent.name)}</title><style>{STYLE}</style>'
    path.write_text(f"<!doctype html><html><head>{head}</head><body>{''.join(body)}</body></html>\n", encoding="utf-8")


def _table(rows: Record) -> str:
    cells = (f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
    return f"<table>{''.join(cells)}</table>"
