"""The picture of the README: memory of the process over two training steps, in plain PyTorch and with state on disk.

    python -m benchmarks.picture [docs/pictures/memory.png] --disk DIR [--layers 6] [--tokens 128]

A Llama of 106 M parameters in fp32 with AdamW, in a process for each. The memory is RssAnon, without the files of the
libraries, over what the process had before the model was built. Seconds are printed, not drawn: they follow the drive.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.common import machine, run_child

BUDGET = "256MiB"
WARMUP, STEPS = 2, 2
EVERY_SECONDS = 0.02
MIB = 1 << 20


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


class Samples(threading.Thread):
    """(seconds, bytes) from now on, until `stop`."""

    def __init__(self, before: int) -> None:
        super().__init__(daemon=True)
        self.found: list[tuple[float, int]] = []
        self._before = before
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        began = time.perf_counter()
        while not self._over.wait(EVERY_SECONDS):
            self.found.append((time.perf_counter() - began, anonymous_bytes() - self._before))

    def stop(self) -> list[tuple[float, int]]:
        self._over.set()
        self.join()
        return self.found


def child(kind: str, layers: int, length: int, disk: str) -> dict[str, Any]:
    import torch

    import outsize
    from benchmarks.models import llama, tokens, train_step

    llama(1, 64, 128)  # what is imported at the first model
    before = anonymous_bytes()
    fields: dict[str, Any] = {"device": "cpu", "host_memory": BUDGET, "disk": disk}
    if kind == "outsize":
        with outsize.init(**fields):
            model = llama(layers)
    else:
        model = llama(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if kind == "outsize":
        outsize.prepare(model, optimizer, **fields)
    losses = [train_step(model, optimizer, tokens(step, length=length))[0] for step in range(WARMUP)]
    samples = Samples(before)
    losses += [train_step(model, optimizer, tokens(WARMUP + step, length=length))[0] for step in range(STEPS)]
    parameters = sum(param.numel() for param in model.parameters())
    return {"samples": samples.stop(), "losses": losses, "parameters": parameters}


def draw(path: Path, plain: dict[str, Any], ours: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.4, 3.3), dpi=110, layout="constrained")
    for found, name, color in ((plain, "plain PyTorch", "#9aa5b1"), (ours, "outsize", "#2563eb")):
        steps = [when / found["samples"][-1][0] * STEPS for when, _ in found["samples"]]
        mebibytes = [nbytes / MIB for _, nbytes in found["samples"]]
        axes.fill_between(steps, mebibytes, color=color, alpha=0.25, linewidth=0)
        axes.plot(steps, mebibytes, color=color, linewidth=1.6)
        most = max(mebibytes)
        axes.annotate(
            f"{name}: at most {most:,.0f} MiB",
            (0.02, most),
            xytext=(0, 4),
            textcoords="offset points",
            color="#4b5563" if name != "outsize" else color,
            fontweight="bold",
        )
    axes.set_xlim(0, STEPS)
    axes.set_xticks(range(STEPS + 1))
    axes.set_ylim(0, max(nbytes for _, nbytes in plain["samples"]) / MIB * 1.15)
    axes.set_xlabel("training steps: forward, backward, clipping, AdamW")
    axes.set_ylabel("memory, MiB")
    axes.set_title(f"{ours['parameters'] / 1e6:.0f} M parameters in fp32, the same losses", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/pictures/memory.png"))
    parser.add_argument("--disk", default=".", help="a directory on the drive to use")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.layers, options.tokens, options.disk)))
        return
    print(machine())
    found: dict[str, Any] = {}
    for kind in ("plain", "outsize"):
        with tempfile.TemporaryDirectory(dir=options.disk) as disk:
            words = ("--layers", str(options.layers), "--tokens", str(options.tokens), "--disk", disk)
            found[kind] = run_child("benchmarks.picture", "--child", kind, *words)
        seconds, most = found[kind]["samples"][-1][0], max(nbytes for _, nbytes in found[kind]["samples"])
        print(f"{kind}: {most / MIB:,.0f} MiB at most, {seconds / STEPS:.1f} s a step, losses {found[kind]['losses']}")
    pairs = zip(found["plain"]["losses"], found["outsize"]["losses"], strict=True)
    if any(abs(one - other) > 1e-4 for one, other in pairs):
        raise SystemExit("the losses differ: no picture")
    draw(options.path, found["plain"], found["outsize"])


if __name__ == "__main__":
    main()
