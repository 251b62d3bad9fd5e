"""The optimizer inside the engine: an update from disk, its share of a step, and what compact state costs in loss."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outsize
from benchmarks.common import IO_BYTES, Row, plain_disk_bandwidth, run_child
from benchmarks.models import llama, tokens
from outsize.api.assemble import prepared_of
from outsize.move.disk import open_engine
from outsize.move.memory import HostBuffer

GB = 1e9
DISK_PLACES = dict.fromkeys(("params", "grads", "states"), "disk")


def settle(model: nn.Module) -> None:
    """Run every update that is owed, and let it arrive where it rests."""
    prepared = prepared_of(next(model.parameters()))
    assert prepared is not None
    prepared.engine.streamer.settle_all()
    for unit in prepared.engine.parameters.units:
        unit.await_written()


def mixed_bandwidth(path: Path, read_share: float, nbytes: int = 2 << 30, in_flight: int = 16) -> float:
    """Bytes a second of large direct reads and writes and nothing else, with this share of reads, 64 MiB in flight."""
    engine = open_engine()
    memory = HostBuffer(in_flight * IO_BYTES)
    memory.bytes.fill_(1)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    began = time.perf_counter()
    tickets: list[int] = []
    for index in range(nbytes // IO_BYTES):
        if index >= in_flight:
            engine.wait(tickets[index - in_flight])
        reads = int((index + 1) * read_share) > int(index * read_share)
        start = engine.read if reads else engine.write
        tickets.append(start(fd, index * IO_BYTES, memory.address + index % in_flight * IO_BYTES, IO_BYTES))
    for ticket in tickets[-in_flight:]:
        engine.wait(ticket)
    rate = nbytes / (time.perf_counter() - began)
    os.close(fd)
    engine.close()
    return rate


def disk_update_child(disk: str, dtype: str, host_memory: str, repeats: int = 7) -> dict[str, Any]:
    """The update alone of the 162 M Llama, all on disk, beside plain direct I/O in the same minute."""
    model = llama(12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    places: Any = DISK_PLACES
    outsize.prepare(
        model,
        optimizer,
        disk=disk,
        host_memory=host_memory,
        activations="recompute",
        compute_dtype=getattr(torch, dtype),
        **places,
    )
    plain_disk_bandwidth(Path(disk) / "probe", 2 << 30, "write", repeats=1)  # makes the file
    ratios, seconds, bandwidths, busy, share = [], [], [], [], 0.5
    for step in range(repeats + 1):
        batch = tokens(step, length=16)
        model(input_ids=batch, labels=batch).loss.backward()
        settle(model)
        prepared = prepared_of(next(model.parameters()))
        assert prepared is not None
        prepared.engine.streamer.drop_idle()
        rates = [mixed_bandwidth(Path(disk) / "probe", share)]
        before = outsize.memory(model)
        began = time.perf_counter()
        optimizer.step()
        settle(model)
        taken = time.perf_counter() - began
        after = outsize.memory(model)
        rates.append(mixed_bandwidth(Path(disk) / "probe", share))
        optimizer.zero_grad()
        moved = after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written
        share = (after.bytes_read - before.bytes_read) / moved
        if step:  # the first one tells the share of reads
            bandwidth = statistics.mean(rates)
            ratios.append(taken / (moved / bandwidth))
            seconds.append(taken)
            bandwidths.append(bandwidth)
            busy.append(after.update_seconds - before.update_seconds)
    os.remove(Path(disk) / "probe")
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "seconds": statistics.median(seconds),
        "bandwidth": statistics.median(bandwidths),
        "update": statistics.median(busy),
        "bytes": moved,
    }


def disk_update(disk: str) -> list[Row]:
    """The update of an all-on-disk step against the bytes that it moves."""
    rows = []
    for memory, dtype in itertools.product(("256MiB", "512MiB"), ("float32", "bfloat16")):
        found: Any = run_child("benchmarks.optimizer_engine", "disk-update", disk, dtype, memory)
        what = (
            f"update of the 162 M Llama, {dtype}, all on disk, host_memory={memory}, over bytes / disk bandwidth at "
            f"that share of reads ({found['seconds']:.2f} s for {found['bytes'] / GB:.2f} GB at "
            f"{found['bandwidth'] / GB:.2f} GB/s; arithmetic {found['update']:.2f} s behind it)"
        )
        rows.append(Row(what, f"{found['ratio']:.2f} x", "<= 1.10 x", found["ratio"] <= 1.10))
    return rows


def host_update_child(rounds: int = 15) -> dict[str, Any]:
    """Forward and backward alone, with the update at the fetch and in the backward; states in memory, in turns."""
    results: dict[str, list[float]] = {}
    made = {}
    for kind in ("fetch", "backward"):
        model = llama(6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        outsize.prepare(model, optimizer, host_memory="8GiB", params="host", grads="host", states="host", update=kind)
        made[kind] = (model, optimizer)
    for step in range(rounds + 2):
        for kind in ("compute", "fetch", "backward"):
            model, optimizer = made["fetch" if kind == "compute" else kind]
            batch = tokens(step, batch=4)
            settle(model)
            before = outsize.memory(model)
            began = time.perf_counter()
            for _ in range(2):
                model(input_ids=batch, labels=batch).loss.backward()
                if kind != "compute":
                    optimizer.step()
                optimizer.zero_grad()
            settle(model)
            taken = (time.perf_counter() - began) / 2
            after = outsize.memory(model)
            if step > 1:
                results.setdefault(kind, []).append(taken)
                results.setdefault(f"{kind} arithmetic", []).append((after.update_seconds - before.update_seconds) / 2)
                results.setdefault(f"{kind} waits", []).append((after.wait_seconds - before.wait_seconds) / 2)
        gc.collect()
    return {name: statistics.median(values) for name, values in results.items()}


def host_update(_: str) -> list[Row]:
    """What the update adds to a step when the states are in memory and the computation is on the same cores."""
    found: Any = run_child("benchmarks.optimizer_engine", "host-update")
    rows = [Row("forward and backward of the 105 M Llama, 4 x 128 tokens", f"{found['compute']:.2f} s", "", True)]
    for kind in ("fetch", "backward"):
        added = found[kind] - found["compute"]
        what = (
            f"time that the update at the {kind} adds (arithmetic {found[f'{kind} arithmetic']:.2f} s on one core of "
            f"two, waits {found[f'{kind} waits']:.2f} s)"
        )
        rows.append(Row(what, f"{added:.2f} s = {100 * added / found['compute']:.0f} %", "measured", True))
    return rows


def compact(_: str, steps: int = 40) -> list[Row]:
    """Held-out loss of the main job with 8-bit moments against exact ones; in memory, where the bits are the same."""
    losses = {}
    for state_format in ("exact", "compact"):
        with tempfile.TemporaryDirectory() as folder:
            command = f"train --out {folder} --name run --minutes 0 --steps {steps} --eval-every {steps // 2}"
            tiers = "--host-memory 6GiB --params auto --grads auto --states auto --activations keep --save-every 0"
            words = [
                str(Path(sys.executable).with_name("outsize")),
                *command.split(),
                *tiers.split(),
                "--state-format",
                state_format,
            ]
            printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            held_out = re.search(r"held-out loss: \S+ before, (\S+) after", printed)
            assert held_out is not None, printed
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            losses[state_format] = ([record["loss"] for record in records], float(held_out[1]))
    exact, ours = losses["exact"], losses["compact"]
    gap = abs(ours[1] - exact[1]) / exact[1]
    worst = max(abs(a - b) / b for a, b in zip(ours[0], exact[0], strict=True))
    what = f"held-out loss of the main job after {steps} steps, compact against exact ({ours[1]:.4f}, {exact[1]:.4f})"
    return [
        Row(what, f"{100 * gap:.2f} % apart", "<= 0.5 %", gap <= 0.005),
        Row("(largest difference of a training loss on the way)", f"{100 * worst:.2f} %", "", True),
    ]


ROWS = {"disk-update": disk_update, "host-update": host_update, "compact": compact}


def main() -> None:
    kind, *rest = sys.argv[1:]
    result = disk_update_child(*rest) if kind == "disk-update" else host_update_child()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
