"""What a real accelerator would wait for, on the simulated one of the tests.

    python -m benchmarks.accelerator [weights] [activations]

The simulated device takes modelled time for each kernel and each copy, with Python's real cost in it. Nothing else may
use the machine.

weights      32 layers, all on the host, room for four of them. A layer computes for 20 ms; its weights come in twice,
             13 ms in all as 325 MB do at 50 GB/s, or twice that long. Gradients leave meanwhile.
activations  32 layers whose weights are on the device. A layer's forward computes for 10 ms; its input takes 5 ms to
             the host and as long back, or 20 ms, which no forward hides. Beside `activations="offload"` what torch and
             TRL move of a plain model, which is all that it saves: an input and the result of the cheap operation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import outsize
from benchmarks.common import Row, run_rows
from outsize.api.assemble import prepared_of
from tests.accelerator import sim as simulator

LAYERS, WIDTH, ROWS, TOKENS, STEPS = 32, 64, 8, 256, 9
COMPUTE_SECONDS = 0.02
"""Of one layer, forward and backward."""

FORWARD_SECONDS = 0.01
"""Of one layer, where inputs move."""


def median_of(
    steps: int,
    clock: Callable[[], None],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    around: AbstractContextManager[Any] | None = None,
    clip: float | None = None,
) -> float:
    """Seconds of a step, once some are over and the `clock` of the device is set; `around` each forward."""

    def step() -> float:
        began = time.perf_counter()
        with around or nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        return time.perf_counter() - began

    for _ in range(3):
        step()
    clock()
    return statistics.median(step() for _ in range(steps))


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
    rate, flops = 2 * 4 * WIDTH**2 / transfer_seconds, 3 * 2 * ROWS * WIDTH**2 / COMPUTE_SECONDS
    clock = partial(sim.set_clock, flops, memory=1e15, to_device=rate, to_host=rate)
    return median_of(STEPS, clock, model, optimizer, x, clip=1.0)


class Layer(nn.Module):
    """Two products with a cheap operation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def moving(kind: str, model: nn.Module) -> AbstractContextManager[Any]:
    """What torch and TRL have to move what a forward saves. Raises `ImportError` where there is no TRL."""
    if kind == "save_on_cpu":
        return torch.autograd.graph.save_on_cpu(pin_memory=True)
    if kind == "TRL":
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        return get_act_offloading_ctx_manager(model, warn_if_no_head=False)
    return nullcontext()


def moved_seconds(sim: Any, kind: str, transfer_seconds: float) -> float:
    """The median of some steps. `transfer_seconds`: of a layer's input."""
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if kind in ("recompute", "offload"):
        places: Any = dict.fromkeys(("params", "grads", "states"), "device")
        outsize.prepare(model, optimizer, device="sim", host_memory="64MiB", activations=kind, **places)
    else:
        model.to("sim")
    x = torch.randn(TOKENS, WIDTH, device="sim")
    rate, flops = 4 * TOKENS * WIDTH / transfer_seconds, 2 * 2 * TOKENS * WIDTH**2 / FORWARD_SECONDS
    clock = partial(sim.set_clock, flops, memory=1e15, to_device=rate, to_host=rate)
    return median_of(5, clock, model, optimizer, x, moving(kind, model))


def activations(directory: str) -> list[Row]:
    rows = []
    for transfer_seconds in (0.005, 0.02):
        seconds, absent = {}, ""
        for kind in ("recompute", "offload", "plain torch", "save_on_cpu", "TRL"):
            try:
                with simulator.switched_on() as sim:
                    seconds[kind] = moved_seconds(sim, kind, transfer_seconds)
            except ImportError:
                absent = ", TRL is not installed"
        forward, transfers = LAYERS * FORWARD_SECONDS, (LAYERS - 1) * transfer_seconds
        formula = max(forward, transfers) + max(seconds["recompute"] - forward, transfers)
        ratio = seconds["offload"] / formula
        told = ", ".join(f"{kind} {each:.2f} s" for kind, each in seconds.items())
        what = f"32 layers, inputs of {transfer_seconds * 1e3:.0f} ms, forwards of 10 ms: a step that moves them"
        of = "one that computes again" if transfers <= forward else f"the formula's {formula:.2f} s"
        rows.append(Row(f"{what}, over {of}", f"{ratio:.2f} x ({told}{absent})", "<= 1.05 x", ratio <= 1.05))
    return rows


def weights(directory: str) -> list[Row]:
    rows = []
    for name, transfer_seconds in (("transfers of 13 ms", 0.013), ("half the bandwidth: 26 ms", 0.026)):
        with simulator.switched_on() as sim:
            seconds = step_seconds(sim, transfer_seconds)
        ratio = seconds / (LAYERS * max(COMPUTE_SECONDS, transfer_seconds))
        what = f"32 layers of 20 ms, {name} a layer: a step over the larger of the two"
        rows.append(Row(what, f"{ratio:.3f} x", "<= 1.05 x", ratio <= 1.05))
    return rows


if __name__ == "__main__":
    simulator.load()
    raise SystemExit(run_rows(__doc__, {"weights": weights, "activations": activations}))
