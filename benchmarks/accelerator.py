"""What a real accelerator would wait for: `python -m benchmarks.accelerator`, on the simulated one of the tests.

The simulated device takes modelled time for each kernel and each copy, with Python's real cost in it. 32 layers, all on
the host, room for four of them. A layer computes for 20 ms; its weights come in twice, 13 ms in all as 325 MB do at
50 GB/s, or twice that long. Gradients leave meanwhile. Nothing else may use the machine.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

import outsize
from benchmarks.common import Row, print_rows
from outsize.api.assemble import prepared_of
from tests.accelerator import sim as simulator

LAYERS, WIDTH, ROWS, STEPS = 32, 64, 8, 9
COMPUTE_SECONDS = 0.02
"""Of one layer, forward and backward."""


def step_seconds(sim: Any, transfer_seconds: float) -> float:
    """The median of some steps."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    places: Any = dict.fromkeys(("params", "grads", "states"), "host")
    outsize.prepare(model, optimizer, device="sim", host_memory="64MiB", activations="keep", **places)
    prepared = prepared_of(next(model.parameters()))
    assert prepared is not None
    prepared.engine.streamer.room.planned_capacity = 4 * max(unit.nbytes for unit in prepared.engine.parameters.units)
    prepared.engine.streamer.drop_idle()
    x = torch.randn(ROWS, WIDTH, device="sim")

    def step() -> float:
        began = time.perf_counter()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        return time.perf_counter() - began

    for _ in range(3):
        step()
    rate = 2 * 4 * WIDTH**2 / transfer_seconds
    sim.set_clock(3 * 2 * ROWS * WIDTH**2 / COMPUTE_SECONDS, memory=1e15, to_device=rate, to_host=rate)
    return statistics.median(step() for _ in range(STEPS))


def main() -> None:
    simulator.load()
    rows = []
    for name, transfer_seconds in (("transfers of 13 ms", 0.013), ("half the bandwidth: 26 ms", 0.026)):
        with simulator.switched_on() as sim:
            seconds = step_seconds(sim, transfer_seconds)
        ratio = seconds / (LAYERS * max(COMPUTE_SECONDS, transfer_seconds))
        what = f"32 layers of 20 ms, {name} a layer: a step over the larger of the two"
        rows.append(Row(what, f"{ratio:.3f} x", "<= 1.05 x", ratio <= 1.05))
    print_rows(rows)


if __name__ == "__main__":
    main()
