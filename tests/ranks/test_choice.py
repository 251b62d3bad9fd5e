"""`activations="auto"` on several ranks: all choose the same, and keep what is spare as one rank does."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import outsize
from outsize.move.activations import ActivationStore
from outsize.run import choice
from tests.conftest import take_step
from tests.ranks.launching import run_on_ranks
from tests.ranks.training import same_bits, weights_of
from tests.small_models import InTurn

WIDTH, DEPTH, ROWS, STEPS = 32, 4, 64, 2
ONCE, TWICE = DEPTH, 2 * DEPTH


class Layer(nn.Module):
    """Counts its forwards, in a list out of sight: one of its own would be as it was. `speaks`: it asks the other
    ranks something."""

    ran: ClassVar[int] = 0

    def __init__(self, counts: list[int], speaks: bool) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.counts, self.speaks = (counts,), speaks

    def forward(self, x: Tensor) -> Tensor:
        self.counts[0][-1] += 1
        Layer.ran += 1
        if self.speaks:
            dist.all_reduce(torch.ones(1))
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def run(
    rows: list[list[int]], mesh: tuple[int, ...] = (), speaks: bool = False, holds: int = -1, **fields: Any
) -> dict[str, Any]:
    """`rows` of each step, by rank. `holds`: the step after which rank 0 still has a graph."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    counts: list[int] = []
    model = InTurn(lambda: Layer(counts, speaks), DEPTH, (WIDTH, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    at = dict.fromkeys(("params", "grads", "states"), "host")
    if mesh:
        fields["mesh"] = init_device_mesh("cpu", mesh)
    outsize.prepare(model, optimizer, **{"host_memory": "64MiB", **at, **fields})
    torch.manual_seed(rank)
    losses, held = [], None
    for step, count in enumerate(each[rank] for each in rows):
        counts.append(0)
        loss = model(torch.randn(count, WIDTH)).square().mean()
        loss.backward()
        if step == holds and rank == 0:
            held = model.layers[0](torch.randn(count, WIDTH))
            counts[-1] -= 1
        if step == holds + 1:
            del held
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    chosen = outsize.plan(model).activations
    modes = {} if chosen is None else dict(chosen.modes)
    return {"losses": losses, "weights": weights_of(model), "counts": counts, "modes": modes, "chosen": chosen}


def in_all_modes(rows: list[list[int]], fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [run(rows, activations=mode, **fields) for mode in ("auto", "keep", "recompute")]


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [(2, {}), (2, {"stage": 0}), (3, {}), (4, {"mesh": (2, 2)})],
    ids=["stage 3", "stage 0", "three ranks", "two copies"],
)
def test_what_fits_is_kept_after_the_first_step(ranks: int, fields: dict[str, Any]) -> None:
    for auto, keep, recompute in run_on_ranks(ranks, in_all_modes, [[ROWS] * ranks] * STEPS, fields):
        for each in (auto, recompute):
            assert each["losses"] == keep["losses"]
            assert same_bits(each["weights"], keep["weights"])
        assert auto["counts"] == [TWICE] + [ONCE] * (STEPS - 1)
        assert set(auto["modes"].values()) == {"keep"}
        assert recompute["counts"] == [TWICE] * STEPS


def test_ranks_whose_inputs_have_other_sizes_keep_too() -> None:
    """A rank whose input is larger than all before it computes again alone, in that step."""
    rows = [[ROWS, 40], [ROWS, 40], [ROWS, 90], [ROWS, 50], [30, 90]]
    (one, keep, _), (other, as_well, _) = run_on_ranks(2, in_all_modes, rows, {})
    assert one["counts"] == [TWICE, ONCE, ONCE, ONCE, ONCE]
    assert other["counts"] == [TWICE, ONCE, TWICE, ONCE, ONCE]
    assert one["losses"] + other["losses"] == keep["losses"] + as_well["losses"]
    assert same_bits(one["weights"], keep["weights"])


def with_clocks() -> list[dict[str, Any]]:
    """Under several budgets, where each rank takes another time for everything."""
    ticks = itertools.count(step=1 + 7 * dist.get_rank())
    choice.time = SimpleNamespace(perf_counter=ticks.__next__)  # type: ignore[assignment]
    rows = [[ROWS, ROWS // 2]] * 3
    return [run(rows, host_memory=memory) for memory in range(1400 << 10, 2000 << 10, 100 << 10)]


def test_under_a_budget_all_ranks_choose_the_same_layers() -> None:
    parts = 0
    for one, other in zip(*run_on_ranks(2, with_clocks), strict=True):
        assert one["modes"] == other["modes"]
        assert one["counts"] == other["counts"]
        parts += ONCE < one["counts"][-1] < TWICE
        assert one["chosen"] is None or one["chosen"].nbytes <= one["chosen"].spare
    assert parts > 0


def moved_out(disk: str) -> list[dict[str, Any]]:
    """Where a forward takes a second, and all else nothing."""
    choice.time = SimpleNamespace(perf_counter=lambda: Layer.ran)  # type: ignore[assignment]
    ActivationStore.seconds_a_byte = 0.0  # type: ignore[assignment,method-assign]
    at = dict.fromkeys(("params", "grads", "states"), "disk")
    rows = [[16 * ROWS, 12 * ROWS]] * 5
    return [run(rows, activations=mode, host_memory="7MiB", disk=disk, **at) for mode in ("auto", "keep")]


def test_all_ranks_move_out_what_layers_save(tmp_path: Path) -> None:
    for auto, keep in run_on_ranks(2, moved_out, str(tmp_path)):
        assert set(auto["modes"].values()) == {"offload"}
        assert auto["counts"][-1] == ONCE
        assert auto["losses"] == keep["losses"]
        assert same_bits(auto["weights"], keep["weights"])


def others() -> list[list[int]]:
    """Where ranks cannot choose alike."""
    same = [[ROWS, ROWS]] * 3
    return [run(same, speaks=True)["counts"], run(same, unused="sync")["counts"], run(same, holds=0)["counts"]]


def test_where_ranks_cannot_choose_alike_they_compute_again() -> None:
    one, other = run_on_ranks(2, others)
    assert one == other
    speaking, synced, holding = one
    assert speaking == synced == [TWICE] * 3
    assert holding == [TWICE, TWICE, ONCE]


def in_segments(mode: str) -> tuple[list[float], Any, int]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(24)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outsize.prepare(model, optimizer, host_memory="64MiB", params="host", activations=mode)
    torch.manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        losses.append(take_step(model(torch.randn(ROWS * (1 + 3 * rank), 16)).square().mean(), optimizer).item())
    chosen = outsize.plan(model).activations
    return losses, weights_of(model), 1 if chosen is None else chosen.segment


def keep_and_segments() -> list[tuple[list[float], Any, int]]:
    return [in_segments(mode) for mode in ("keep", "recompute")]


def test_ranks_make_segments_of_the_same_length_and_change_no_bit() -> None:
    lengths = set()
    for keep, segments in run_on_ranks(2, keep_and_segments):
        assert segments[0] == keep[0]
        assert same_bits(segments[1], keep[1])
        lengths.add(segments[2])
    assert len(lengths) == 1
    assert lengths.pop() > 1
