"""Loss curves of a long run on real text, over each other: plain torch, and outsize with all state on disk: exact, with
8-bit moments, and with the delayed update.

    python -m benchmarks.long_run [run ...] --disk DIR --size 8M --steps 2000     # about an hour on two cores
    python -m benchmarks.long_run --disk DIR --size 8M --steps 300                # about ten minutes

The text is that of `outsize train`: the source of Python's standard library. All runs have the same weights, batches,
learning rates and clipping, in fp32. Each is a process of its own. Losses are kept in `build/long_run`: a second call
does the missing runs. The picture and the table are written when all are there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import machine, run_child

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "long_run"
PICTURE = ROOT / "docs" / "pictures" / "long-run.svg"
SIZES = {"8M": (256, 6), "40M": (512, 8), "120M": (768, 12)}  # width, layers
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact": {},
    "compact": {"state_format": "compact"},
    "delayed": {"delayed_update": True},
}
SEQUENCES, LENGTH, LR, WARMUP = 4, 128, 1e-3, 50
HELD_OUT, LAST = 32, 50
"""Windows of text that no run learns from; the steps that count as the end."""


def learning_rate(step: int, steps: int) -> float:
    """A part of LR: a warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP))


def child(kind: str, size: str, steps: int, disk: str) -> dict[str, Any]:
    import torch

    import outsize
    from benchmarks.models import llama, train_step
    from outsize.cli import corpus, models

    corpus.prepare(FOLDER / "corpus", (), None, models.VOCABULARY)
    width, layers = SIZES[size]
    model = llama(layers, width, 4 * width, models.VOCABULARY).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=kind == "plain")
    if kind != "plain":
        places = dict.fromkeys(("params", "grads", "states"), "disk")
        fields = {"device": "cpu", "host_memory": "256MiB", "disk": disk, "activations": "keep"}
        outsize.prepare(model, optimizer, **fields, **places, **RUNS[kind])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    windows = corpus.Windows(FOLDER / "corpus" / corpus.TRAIN, LENGTH)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).tolist()
    losses, began = [], time.perf_counter()
    for step in range(steps):
        rows = [order[(step * SEQUENCES + row) % len(order)] for row in range(SEQUENCES)]
        batch = torch.stack([windows[row]["input_ids"] for row in rows])
        losses.append(train_step(model, optimizer, batch)[0])
        scheduler.step()
        if step % 50 == 0:
            print(f"{kind}, step {step}: {losses[-1]:.4f}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    seconds = time.perf_counter() - began
    unseen = corpus.Windows(FOLDER / "corpus" / corpus.HELD_OUT, LENGTH, HELD_OUT)
    with torch.no_grad():
        tokens = torch.stack([unseen[index]["input_ids"] for index in range(len(unseen))]).split(SEQUENCES)
        held_out = statistics.fmean(model.eval()(input_ids=part, labels=part).loss.item() for part in tokens)
    parameters = sum(param.numel() for param in model.parameters())
    return {"losses": losses, "held_out": held_out, "seconds": seconds / steps, "parameters": parameters}


def table(found: dict[str, dict[str, Any]]) -> str:
    """The end of each run against that of plain torch."""
    plain = found["plain"]
    ends = f"last {LAST} losses | over plain torch | largest difference of a step | held-out loss | over plain torch"
    lines = [f"| run | {ends} | seconds a step |", "|---|---|---|---|---|---|---|"]
    base = statistics.fmean(plain["losses"][-LAST:])
    for kind, run in found.items():
        last = statistics.fmean(run["losses"][-LAST:])
        apart = max(abs(a - b) for a, b in zip(run["losses"], plain["losses"], strict=True))
        cells = (f"{last:.4f}", f"{last / base - 1:+.3%}", f"{apart:.1e}", f"{run['held_out']:.4f}")
        over = f"{run['held_out'] / plain['held_out'] - 1:+.3%}"
        lines.append(f"| {' | '.join((kind, *cells, over))} | {run['seconds']:.2f} |")
    return "\n".join(lines)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """The curves, smoothed, and below them their differences from plain torch."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "long run"
    from matplotlib import pyplot

    def smooth(values: list[float]) -> list[float]:
        return [statistics.fmean(values[max(0, step - LAST + 1) : step + 1]) for step in range(len(values))]

    figure, (above, below) = pyplot.subplots(
        2, figsize=(7, 4.6), sharex=True, layout="constrained", height_ratios=(2, 1)
    )
    for (kind, run), line in zip(found.items(), ("-", "--", "-.", ":"), strict=False):
        above.plot(smooth(run["losses"]), line, label=kind, linewidth=1.3)
        differences = [a - b for a, b in zip(run["losses"], found["plain"]["losses"], strict=True)]
        below.plot(smooth(differences), line, linewidth=1.3)
    above.set(ylabel=f"loss, mean of {LAST} steps")
    above.legend()
    below.set(xlabel="step", ylabel="less plain torch's")
    figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="run", help=f"of {', '.join(RUNS)}; all if none is named")
    parser.add_argument("--disk", default=".", help="a directory on the drive to use")
    parser.add_argument("--size", choices=list(SIZES), default="8M", help="parameters of the model")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--again", action="store_true", help="do runs that are there, too")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if unknown := sorted(set(wanted.runs) - set(RUNS)):
        parser.error(f"no such run: {', '.join(unknown)}")
    if wanted.child:
        print(json.dumps(child(wanted.child, wanted.size, wanted.steps, wanted.disk)))
        return 0
    print(machine())
    FOLDER.mkdir(parents=True, exist_ok=True)
    files = {kind: FOLDER / f"{wanted.size}-{wanted.steps}-{kind}.json" for kind in RUNS}
    for kind in wanted.runs or RUNS:
        if files[kind].exists() and not wanted.again:
            continue
        with tempfile.TemporaryDirectory(dir=wanted.disk) as disk:
            words = ("--child", kind, "--size", wanted.size, "--steps", str(wanted.steps), "--disk", disk)
            found = run_child("benchmarks.long_run", *words, timeout=7200)
        files[kind].write_text(json.dumps(found) + "\n")
        print(f"{kind}: {found['seconds']:.2f} s a step, held-out loss {found['held_out']:.4f}", flush=True)
    if all(file.exists() for file in files.values()):
        runs = {kind: json.loads(file.read_text()) for kind, file in files.items()}
        print(f"{runs['plain']['parameters'] / 1e6:.1f} M parameters, {wanted.steps} steps\n\n{table(runs)}")
        draw(runs, wanted.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
