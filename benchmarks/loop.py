"""What `optimizer.step()` adds to a loop with nothing to hide behind: 67 M parameters in bf16, one row a batch.

    python -m benchmarks.loop

Plain torch keeps fp32 masters: it casts the gradients, clips, steps with the fused AdamW and casts the weights back.
outsize keeps parameters, gradients and states on host. What either adds is the time of its loop less that of forward
and backward alone. All three take turns in one process, on all cores; the numbers are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import outsize
from benchmarks.common import Row, run_rows

LAYERS, WIDTH = 16, 2048
STEPS, WARM_UP = 24, 4


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def forward_and_backward(model: nn.Module, rows: torch.Tensor) -> None:
    model(rows).float().square().mean().backward()


def plain_loop(steps: bool) -> Callable[[torch.Tensor], None]:
    model = stack().bfloat16()
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def step(rows: torch.Tensor) -> None:
        forward_and_backward(model, rows)
        if steps:
            for master, weight in zip(masters, weights, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            with torch.no_grad():
                for master, weight in zip(masters, weights, strict=True):
                    weight.copy_(master)
        model.zero_grad()

    return step


def outsize_loop() -> Callable[[torch.Tensor], None]:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    places = dict.fromkeys(("params", "grads", "states"), "host")
    outsize.prepare(
        model, optimizer, device="cpu", host_memory="3GiB", compute_dtype=torch.bfloat16, activations="keep", **places
    )

    def step(rows: torch.Tensor) -> None:
        forward_and_backward(model, rows)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def added(directory: str) -> list[Row]:
    """What the update adds to a loop, in torch and here."""
    loops = {"alone": plain_loop(steps=False), "torch": plain_loop(steps=True), "outsize": outsize_loop()}
    taken: dict[str, list[float]] = {kind: [] for kind in loops}
    for number in range(STEPS):
        rows = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
        for kind, loop in loops.items():
            began = time.perf_counter()
            loop(rows)
            if number >= WARM_UP:
                taken[kind].append(time.perf_counter() - began)
    middle = {kind: statistics.median(times) for kind, times in taken.items()}
    theirs, ours = middle["torch"] - middle["alone"], middle["outsize"] - middle["alone"]
    what = "67 M parameters, bf16, all on host: what torch's casts, clip and fused step add, over what outsize adds"
    return [
        Row(what, f"{theirs * 1e3:.0f} / {ours * 1e3:.0f} ms, {theirs / ours:.2f} x", ">= 2.5 x", theirs >= 2.5 * ours)
    ]


if __name__ == "__main__":
    run_rows(__doc__ or "", {"added": added})
