"""What a rank holds and what it sends, against the ZeRO formulas (Rajbhandari et al. 2020, sections 5 and 7)."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import outsize
from outsize.move.memory import Ledger, resident_bytes
from outsize.run.buffers import Buffers
from tests.conftest import take_step
from tests.ranks.launching import in_turn, run_on_ranks
from tests.ranks.training import assert_near, named_weights, prepared
from tests.small_models import Built, linears

BF16 = torch.bfloat16
WIDTH, LAYERS, VOCABULARY = 128, 6, 16
ROOMY = "64MiB"


def wide_model(dtype: torch.dtype, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return linears(WIDTH, layers).to(dtype)


def measure(stage: int, tiers: str, dtype: torch.dtype, memory: str, steps: int, disk: str) -> dict[str, Any]:
    """Over so many steps. With much memory each ends when all updates are done."""
    model = wide_model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    places = {"params": "device" if stage in (1, 2) else tiers, "grads": tiers, "states": tiers}
    outsize.prepare(model, optimizer, host_memory=memory, disk=disk, stage=stage, units=["Linear"], **places)
    inside = prepared(model)
    reduction = inside.engine.reduction
    counts = []
    for _ in range(steps):
        before = {} if reduction is None else dict(reduction.ranks.model.counts)
        model(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        if memory == ROOMY:
            inside.engine.streamer.settle_all()
        for unit in inside.engine.parameters.units:  # gathers that run ahead belong to the step that began them
            inside.engine.streamer.room.arrive(unit)
        after = {} if reduction is None else dict(reduction.ranks.model.counts)
        counts.append({kind: after[kind] - before.get(kind, 0) for kind in after})
        held = dict(outsize.memory(model).now)
        optimizer.zero_grad()
    numel = sum(layout.numel for layout in inside.placed.layouts)  # padding included
    agreed = [each.get("agreement calls", 0) for each in counts]
    return {
        "agreed": agreed,
        "held": held,
        "numel": numel,
        "sent": counts[-1],
        "calls": after,
        "units": len(inside.engine.parameters.units),
    }


BYTES = {torch.float32: (4, 4, 8), BF16: (2, 2, 10)}
"""Of parameters, gradients and states for one parameter."""


def expected_bytes(numel: int, stage: int, ranks: int, dtype: torch.dtype) -> float:
    params, grads, states = BYTES[dtype]
    split = {0: 0, 1: states + grads, 2: states + grads, 3: states + grads + params}[stage]
    return numel * (params + grads + states - split + split / ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_holds_what_the_formulas_say(ranks: int, tmp_path: Path) -> None:
    cases = [
        (stage, tier, dtype, ROOMY, 2)
        for dtype in (torch.float32, BF16)
        for stage in ((0, 3) if ranks == 1 else (0, 1, 3) if dtype is BF16 else (0, 2, 3))  # 1 and 2 are the same to us
        for tier in ("device", "host", "disk")
        if (stage == 3 or tier != "disk") and (ranks < 4 or (tier != "host" and dtype is BF16))
    ]
    calls = [(measure, *case, str(tmp_path)) for case in cases]
    found = run_on_ranks(ranks, in_turn, *calls) if ranks > 1 else [in_turn(*calls)]
    for rank in found:
        for (stage, tier, dtype, *_), each in zip(cases, rank, strict=True):
            resting = stage in (1, 2) or (tier == "device" and (ranks == 1 or stage == 0))  # in the gathered buffers
            cached = 0 if resting else each["held"].get("device/resident", 0)
            names = ("host/staging", "host/grads in flight", "device/kept buffers")
            passing = cached + sum(each["held"].get(name, 0) for name in names)
            held = sum(each["held"].values()) - passing
            expected = expected_bytes(each["numel"], stage, ranks, dtype)
            if tier == "disk" and dtype is BF16:  # files of gradients have room for sums in fp32
                expected += each["numel"] * 2 / ranks
            if tier == "device":  # the gradients are tensors of autograd's, which no ledger sees
                expected -= each["numel"] * BYTES[dtype][1] / (ranks if stage else 1)
            assert held == pytest.approx(expected, rel=0.05, abs=64 << 10), (stage, tier, dtype, each["held"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_sends_what_the_formulas_say(ranks: int, tmp_path: Path) -> None:
    memory = "680KiB"  # of six units of 96 KiB three stay
    cases = [(stage, "host", torch.float32, ROOMY, 3) for stage in (0, 1 if ranks == 2 else 2)]
    cases.append((3, "disk", torch.float32, memory, 3))
    for rank in run_on_ranks(ranks, in_turn, *((measure, *case, str(tmp_path)) for case in cases)):
        for (stage, *_), each in zip(cases, rank, strict=True):
            numel, sent = each["numel"], each["sent"]
            assert sent["reduce"] == (2 * numel if stage == 0 else numel)
            if stage in (1, 2):
                assert sent["gather"] == numel
            if stage == 3:
                assert 1.4 * numel < sent["gather"] <= 2 * numel
            assert each["calls"]["reduce calls"] == 3 * each["units"]  # one collective a unit and step
            assert each["agreed"][0] > each["units"]
            assert each["agreed"][-1] == 1, "a step that repeats the one before is agreed on once"


def train_preset(name: str, disk: str) -> list[float]:
    model = wide_model(BF16, layers=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    outsize.prepare(model, optimizer, host_memory="64MiB", disk=disk, **outsize.presets[name])
    return [
        take_step(model(torch.ones(2, WIDTH, dtype=BF16)).float().square().mean(), optimizer).item() for _ in range(2)
    ]


def train_presets(disk: str) -> dict[str, list[float]]:
    return {name: train_preset(name, disk) for name in outsize.presets}


def test_every_preset_trains_alike(tmp_path: Path) -> None:
    for found in run_on_ranks(2, train_presets, str(tmp_path)):
        assert len(found) >= 6
        assert all(losses == found["ddp"] for losses in found.values())
        assert found["ddp"][-1] < found["ddp"][0]


class Branches(nn.Module):
    """Of two branches each step takes one; a frozen layer before them, and a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.left.weight

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.head((self.left if left else self.right)(self.frozen(x)))


def train_branches(stage: int | None, disk: str) -> dict[str, torch.Tensor]:
    """On ranks with `stage`, plain without."""
    torch.manual_seed(0)
    rank = 0
    if stage is None:
        model, optimizer = Branches(), None
    else:
        with outsize.init(host_memory="256KiB", disk=disk):
            model = Branches()
        rank = dist.get_rank()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    if stage is not None:
        places = {} if stage in (1, 2) else {"params": "disk"}
        outsize.prepare(model, optimizer, host_memory="16MiB", disk=disk, stage=stage, **places)
    for step in range(3):
        rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        rows = rows if stage is None else rows[2 * rank : 2 * rank + 2]
        model(rows, step % 2 == 0).square().mean().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return named_weights(model)


def test_frozen_tied_and_unused_parameters_and_models_built_in_bounded_memory(tmp_path: Path) -> None:
    expected = train_branches(None, str(tmp_path))
    for found in run_on_ranks(2, in_turn, *((train_branches, stage, str(tmp_path)) for stage in (0, 2, 3))):
        for weights in found:
            assert_near(weights.values(), expected.values())


def accumulate(memory: str, disk: str) -> tuple[str, int, int]:
    """What the plan says, the most whole gradients there were at once, and the elements sent for a reduction."""
    model = wide_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    every: dict[str, Any] = dict.fromkeys(("params", "grads", "states"), "disk")
    outsize.prepare(model, optimizer, host_memory=memory, disk=disk, units=["Linear"], **every)
    inside = prepared(model)
    for micro in range(3):
        with contextlib.nullcontext() if micro == 2 else outsize.no_sync(model):
            model(torch.ones(2, WIDTH)).square().mean().backward()
    unit = max(each.nbytes for each in inside.engine.parameters.units)
    peak = inside.resources.ledger.peak["device/whole gradients"] // unit
    sent = inside.engine.reduction.ranks.model.counts["reduce"] * 4 // unit
    return str(outsize.plan(model)), peak, sent


def test_without_room_for_whole_gradients_each_backward_reduces(tmp_path: Path) -> None:
    units = 6
    for said, peak, sent in run_on_ranks(2, accumulate, "64MiB", str(tmp_path)):
        assert "inside no_sync each rank adds up whole gradients (576.0 KiB)" in said
        assert (peak, sent) == (units, units)
    for said, peak, sent in run_on_ranks(2, accumulate, "680KiB", str(tmp_path)):
        assert "inside no_sync each backward reduces its gradients: whole ones (576.0 KiB) do not fit" in said
        assert peak <= 2 and sent == 3 * units


def gather_wide_layers(disk: str) -> tuple[int, int]:
    """What a forward adds to resident memory at most, and what of it is counted."""
    model = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) if n % 2 else nn.Linear(4096, 2048) for n in range(4)))
    outsize.prepare(model, host_memory="96MiB", disk=disk, params="disk", units=["Linear"])
    ledger, over, seen = prepared(model).resources.ledger, threading.Event(), []

    def look() -> None:
        while not over.wait(0.0005):
            seen.append(resident_bytes()[0])

    with torch.no_grad():
        model(torch.ones(1, 4096))
        before, counted = resident_bytes()[0], sum(ledger.now.values())
        ledger.peak, watcher = dict(ledger.now), threading.Thread(target=look, daemon=True)
        watcher.start()
        model(torch.ones(1, 4096))
    over.set()
    watcher.join()
    return max(seen) - before, sum(ledger.peak.values()) - counted


def test_a_gather_takes_no_memory_beside_the_unit(tmp_path: Path) -> None:
    unit = 32 << 20
    for added, counted in run_on_ranks(2, gather_wide_layers, str(tmp_path)):
        assert added <= counted + unit // 4


def train_in_little_memory(memory: str, disk: str) -> list[tuple[int, int, bool]]:
    """For several ways to train (on four ranks as two copies): the most bytes of units and gradients at once, the room
    for them, and whether outsize has gone above it."""
    found = []
    alone: list[dict[str, Any]] = [{}, {"update": "backward"}, {"delayed_update": 1}]
    for fields in alone if dist.get_world_size() == 2 else [{"mesh": init_device_mesh("cpu", (2, 2))}]:
        torch.manual_seed(0)
        model = wide_model(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        every: dict[str, Any] = dict.fromkeys(("params", "grads", "states"), "disk") | fields
        outsize.prepare(model, optimizer, host_memory=memory, disk=disk, units=["Linear"], **every)
        inside = prepared(model)
        streamer, ledger, used = inside.engine.streamer, inside.resources.ledger, [0]
        add = ledger.add

        def counted(account: str, nbytes: int, *, add: Any = add, streamer: Any = streamer, used: Any = used) -> None:
            add(account, nbytes)
            used.append(streamer.room.in_use)

        ledger.add = counted  # type: ignore[method-assign]
        for step in range(3):
            for _ in range(1 if "update" in fields else 2):
                rows = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
                model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((max(used), streamer.room.planned_capacity, streamer.room.excess.logged))
    return found


def test_units_and_gradients_stay_within_a_small_budget(tmp_path: Path) -> None:
    for ranks in (2, 4):
        for rank in run_on_ranks(ranks, train_in_little_memory, "640KiB", str(tmp_path)):
            for most, room, warned in rank:
                assert most <= room and not warned


class Adapted(
    Built,
    base=lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    down=lambda: nn.Linear(WIDTH, 32, bias=False),
    up=lambda: nn.Linear(32, WIDTH, bias=False),
):
    """A frozen layer and a low-rank addition to it, all of which lies in the slice of one rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def train_adapters(disk: str | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Adapted() for _ in range(8)], nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    if disk is not None:
        places = dict.fromkeys(("params", "grads", "states"), "disk")
        units = ["Adapted", "Linear"]  # of 96 KiB each, and four of them stay
        outsize.prepare(model, optimizer, host_memory="768KiB", disk=disk, stage=3, units=units, **places)
    rank = dist.get_rank() if disk is not None else 0
    for step in range(3):
        rows = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
        rows = rows if disk is None else rows[2 * rank : 2 * rank + 2]
        take_step(model(rows).square().mean(), optimizer, clip=(model.parameters(), 0.1))
    return named_weights(model)


def test_ranks_with_nothing_to_train_in_their_slices_keep_the_same_units(tmp_path: Path) -> None:
    expected = train_adapters(None)
    for found in run_on_ranks(3, train_adapters, str(tmp_path)):
        assert_near(found.values(), expected.values())


def test_collecting_buffers_are_used_again_and_make_room_for_larger_ones() -> None:
    buffers, device = Buffers(Ledger()), torch.device("cpu")
    large, small = buffers.take(8 << 12, device, [].append), buffers.take(2 << 12, device, [].append)
    at = large.data_ptr()
    buffers.give(large)
    gone = weakref.ref(small.untyped_storage())
    buffers.give(small)
    del large, small
    assert buffers.take(4 << 12, device, [].append).data_ptr() != at
    assert gone() is None
    assert buffers.take(8 << 12, device, [].append).data_ptr() == at


def test_buffers_give_back_what_is_spent_of_them() -> None:
    ledger = Ledger()
    buffers, device = Buffers(ledger), torch.device("cpu")
    wanted: list[int] = []
    memory = buffers.take(8 << 12, device, wanted.append).fill_(7)
    buffers.spend(memory, [memory[: 3 << 12], memory[(5 << 12) + 1 :]])
    assert buffers.held == 8 << 12
    assert buffers.drop_free() and not buffers.drop_free()
    assert buffers.held == (2 << 12) + 1
    assert memory[3 << 12 : (5 << 12) + 1].eq(7).all() and not memory[: 3 << 12].any()
    buffers.give(memory)
    assert not buffers.held, "memory that has gone is not kept for the next unit"
    buffers.give(buffers.take(8 << 12, device, wanted.append))
    assert wanted == [8 << 12, 8 << 12] and buffers.held == buffers.free == 8 << 12
    buffers.take(8 << 12, device, wanted.append)
    assert wanted == [8 << 12, 8 << 12], "what is kept needs no room"
    assert buffers.held == 8 << 12 and not buffers.free


def bytes_of_a_run(memory: str, disk: str) -> tuple[int, int]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 4 * WIDTH, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    places = dict.fromkeys(("params", "grads", "states"), "disk")
    outsize.prepare(model, optimizer, host_memory=memory, disk=disk, units=["Linear"], activations="keep", **places)
    inside = prepared(model)
    for _ in range(4):
        take_step(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
    inside.engine.streamer.settle_all()
    inside.engine.streamer.drop_idle()
    moved = outsize.memory(model)
    return moved.bytes_read, moved.bytes_written


def test_two_ranks_read_and_write_together_what_one_does(tmp_path: Path) -> None:
    """Of 12 units of memory some stay from the forward to the backward, and from there to the next forward."""
    runs = [(bytes_of_a_run, budget, str(tmp_path)) for budget in ("1024KiB", "1344KiB")]
    one = in_turn(*runs)
    two = [bytes for rank in run_on_ranks(2, in_turn, *runs) for bytes in rank]
    assert sum(written for _, written in two) == sum(written for _, written in one)
    assert sum(read for read, _ in two) <= 1.01 * sum(read for read, _ in one)


TIERS = ("device", "host", "disk")


def table_of_stages(disk: str) -> list[str]:
    """What each combination of stage and tiers does, as docs/ranks.md has it."""

    def entry(stage: int, combinations: list[dict[str, str]]) -> str:
        said = {refused({"stage": stage, **places}, "", disk) for places in combinations}
        return "yes" if said == {""} else "refused: use stage 3" if all("use stage=3" in each for each in said) else "?"

    rows = []
    for stage in range(4):
        entries = [entry(stage, [{"params": tier}]) for tier in TIERS]
        pairs = itertools.permutations(TIERS, 2)  # test_parity.py has both on the same tier
        entries.append(entry(stage, [{"grads": grads, "states": states} for grads, states in pairs]))
        rows.append(f"| stage {stage} | {' | '.join(entries)} |")
    return rows


def test_the_table_of_stages_and_tiers_is_what_happens(tmp_path: Path) -> None:
    rows = run_on_ranks(2, table_of_stages, str(tmp_path))[0]
    text = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text()
    assert "\n".join(rows) in text, "\n".join(rows)


def refused(fields: dict[str, Any], kind: str, disk: str) -> str:
    model = wide_model(torch.float32, layers=1)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if kind == "whole":
        optimizer = torch.optim.Adafactor(model.parameters())
    try:
        outsize.prepare(model, optimizer, disk=disk, host_memory="64MiB", **fields)
    except ValueError as error:
        return str(error)
    return ""


def test_what_makes_no_sense_is_refused_with_the_reason(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"stage": 2, "params": "host"}, "", "stage=3"),
        ({"stage": 1, "params": "disk"}, "", "stage=3"),
        ({"stage": 3}, "whole", "stage=0"),
        ({"stage": 0}, "whole", ""),
    ]
    for rank in run_on_ranks(2, in_turn, *((refused, fields, kind, str(tmp_path)) for fields, kind, _ in cases)):
        for said, (fields, _, words) in zip(rank, cases, strict=True):
            assert (words in said) if words else not said, fields
