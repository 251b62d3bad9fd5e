"""`outsize probe`: how fast this machine moves and multiplies, and what that means for a step."""

from __future__ import annotations

import argparse
from pathlib import Path

from outsize.api.probing import MEGABYTES, probe
from outsize.cli.options import at_least

SUMMARY = "measure the disk folder, memory and compute"
DESCRIPTION = (
    "Measure what bounds a step on this machine, in about 20 s, and remember it for `outsize plan` and `outsize.plan`: "
    "products, memory, updates, the drive of a folder, and an accelerator's links."
)
# A step of exact fp32 AdamW with everything on disk. Read: weight for the backward pass; for the update, which feeds
# the forward pass, weight, gradient and two moments. Written: gradient, weight and two moments.
STEP_READ_BYTES = 4 * (1 + 4)
STEP_WRITTEN_BYTES = 4 * (1 + 3)
GIGA = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--disk", type=Path, default=Path("."), metavar="DIR", help="folder on the drive to measure")
    parser.add_argument("--device", help="cpu, cuda, xpu, ... (default: the accelerator, else cpu)")
    parser.add_argument("--megabytes", type=at_least(8), default=MEGABYTES, help="how much to write and read back")


def run(args: argparse.Namespace) -> int:
    if not args.disk.is_dir():
        raise FileNotFoundError(f"--disk {args.disk}: no such folder")
    machine = probe(args.disk, device=args.device, again=True, megabytes=args.megabytes)
    print(machine)
    apart = STEP_READ_BYTES / machine.disk_read + STEP_WRITTEN_BYTES / machine.disk_write
    seconds = GIGA * max(apart, (STEP_READ_BYTES + STEP_WRITTEN_BYTES) / machine.disk_mixed)
    print(
        f"A step moves {STEP_READ_BYTES} B read and {STEP_WRITTEN_BYTES} B written a parameter with everything on disk "
        f"in fp32: about {seconds:.1f} s for 1 B parameters."
    )
    return 0
