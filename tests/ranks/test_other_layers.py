"""Ranks that use other layers than each other by design (`unused="sync"`), against plain torch on all batches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import outsize
from outsize.move import meeting
from outsize.move.comm import Ranks
from outsize.move.lanes import REDUCE, Going
from tests.conftest import take_step
from tests.ranks.launching import in_turn, run_on_ranks
from tests.ranks.training import assert_near, batch, batches, prepared, same_bits, weights_of
from tests.small_models import Built, linears


class Experts(Built, experts=lambda: nn.ModuleList([nn.Linear(48, 48) for _ in range(4)]), head=(48, 8)):
    """Rows go to the expert that they ask for; one that nobody asks for gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] * 10).long().remainder(3)  # the fourth is for nobody
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = (chosen == index).nonzero().view(-1)
            out = out.index_copy(0, rows, self.experts[index](x[rows]))
        return self.head(out)


def train_experts(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[int]) -> list[Tensor]:
    for step in range(3):
        for micro in range(2):
            x, y = batches(10 * step + micro, parts, rows=2)
            nn.functional.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def experts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Experts()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def experts_on_ranks(disk: str) -> list[list[Tensor]]:
    found = []
    ways = [(stage, "device", states) for stage, states in ((0, "disk"), (2, "device"))]
    ways += [(3, tier, tier) for tier in ("device", "host")]
    cut = [(way, ["Linear"]) for way in ways]
    whole = [
        ((2, "device", "host"), ["Experts"]),
        ((3, "disk", "disk"), ["Experts"]),
    ]  # one unit, of which each rank uses a part
    for (stage, params, states), units in (*cut, *whole):
        model, optimizer = experts()
        places = {"params": params, "grads": states, "states": states}
        fields: dict[str, Any] = {"host_memory": "64MiB", "disk": disk, "unused": "sync", "units": units}
        outsize.prepare(model, optimizer, stage=stage, **places, **fields)
        found.append(train_experts(model, optimizer, [dist.get_rank()]))
    return found


def test_ranks_may_use_different_experts(tmp_path: Path) -> None:
    expected = train_experts(*experts(), [0, 1, 2])
    for rank in run_on_ranks(3, experts_on_ranks, str(tmp_path)):
        for found in rank:
            assert_near(found, expected)


def use_experts_at_stage_3(disk: str, folder: str) -> list[list[Tensor]]:
    """What a user does between steps, with every unit at rest as soon as it can be."""
    rank = dist.get_rank()
    model, optimizer = experts()
    every: dict[str, Any] = dict.fromkeys(("params", "grads", "states"), "disk")
    fields: dict[str, Any] = {**every, "host_memory": "64MiB", "disk": disk, "unused": "sync", "units": ["Linear"]}
    outsize.prepare(model, optimizer, stage=3, activations="recompute", **fields)
    inside = prepared(model)

    def forward(x: Tensor) -> Tensor:
        inside.engine.streamer.drop_idle()
        y: Tensor = model(x)
        dist.all_reduce(y.detach().sum())  # a collective of the user's own
        return y

    for step in range(4):
        x, y = batch(step, rank, rows=1)
        with outsize.no_sync(model) if step == 2 else contextlib.nullcontext():
            nn.functional.mse_loss(forward(x), y).backward()
        dist.all_reduce(torch.zeros(1))
        if step != 2:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            forward(batch(9, rank, rows=1)[0])
        if rank == step % 2:
            inside.engine.streamer.drop_idle()  # the others have more at hand
        if step == 1:
            with torch.no_grad(), outsize.gathered(model.get_submodule("experts"), modify=True):
                for param in model.get_submodule("experts").parameters():
                    param.mul_(1.5)
        if step == 2:
            outsize.save(folder, model, optimizer)
            outsize.load(folder, model, optimizer)
    return weights_of(model)


def test_experts_at_stage_3_between_the_steps(tmp_path: Path) -> None:
    model, optimizer = experts()
    for step in range(4):
        x, y = batches(step, range(2), rows=1)
        nn.functional.mse_loss(model(x), y).backward()
        if step != 2:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                for param in model.get_submodule("experts").parameters():
                    param.mul_(1.5)
    for found in run_on_ranks(2, use_experts_at_stage_3, str(tmp_path), str(tmp_path / "checkpoint")):
        assert_near(found, model.parameters())


def train_a_stack(disk: str, unused: str) -> tuple[list[Tensor], int, int, int]:
    torch.manual_seed(0)
    model = linears(64, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    every: dict[str, Any] = dict.fromkeys(("params", "grads", "states"), "disk")
    outsize.prepare(model, optimizer, stage=3, host_memory="64MiB", disk=disk, unused=unused, units=["Linear"], **every)
    inside = prepared(model)
    for _ in range(3):
        loss = model(torch.randn(4, 64)).square().sum()
        inside.engine.streamer.drop_idle()
        take_step(loss, optimizer, clip=(model.parameters(), 1.0))
    counts, unit = inside.engine.reduction.ranks.model.counts, 64 * 65 * 4
    peak = inside.resources.ledger.peak["device/whole gradients"] // unit
    return weights_of(model), counts["gather calls"], counts["reduce"], peak


def test_where_all_use_all_each_unit_is_moved_once_a_pass_and_nothing_piles_up(tmp_path: Path) -> None:
    usual = run_on_ranks(2, train_a_stack, str(tmp_path), "error")
    synced = run_on_ranks(2, train_a_stack, str(tmp_path), "sync")
    for (one, gathers, reduced, _), (other, more_gathers, as_much, peak) in zip(usual, synced, strict=True):
        assert same_bits(one, other)
        assert gathers <= more_gathers == (3 * 2 + 1) * 8  # forwards, backwards and the block at the end
        assert reduced == as_much
        assert peak <= 3, f"the whole gradients of {peak} units of 8 at once"


def one_forward_too_many(disk: str) -> str:
    model, optimizer = experts()
    outsize.prepare(model, optimizer, stage=3, host_memory="64MiB", unused="sync", units=["Linear"])
    try:
        for step in range(2):
            for _ in range(1 + step * dist.get_rank()):
                x, y = batch(step, dist.get_rank(), rows=2)
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_another_number_of_forwards_are_told(tmp_path: Path) -> None:
    for said in run_on_ranks(2, one_forward_too_many, str(tmp_path)):
        assert "different ways" in said and "rank 1: forward in step 1" in said, said
        assert "rank 0: reduce of unit 'head' in step 1" in said, "in the backward"


def two_layers_of_experts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), nn.Linear(8, 48), Experts())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


ROUTES = ((0, 3, 1, 0), (2, 1, 0, 2), (3, 3))
"""The experts that each rank runs, in its order."""

UNEVEN_ROUTES = ((3,), (0, 1, 2, 0, 1, 2), (2, 0, 1, 0, 1, 2), (3,))
"""Of two copies of the model: in each one rank is over long before the other, and not the one of the same part."""


class Routes(nn.Module):
    """Each rank runs the experts in an order of its own."""

    def __init__(self, routes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.routes = routes
        self.inp = nn.Linear(48, 48)
        self.experts = nn.ModuleList([nn.Linear(48, 48) for _ in range(4)])
        self.head = nn.Linear(48, 8)

    def forward(self, x: Tensor, part: int) -> Tensor:
        x = self.inp(x)
        for index in self.routes[part]:
            x = torch.tanh(self.experts[index](x))
        return self.head(x)  # type: ignore[no-any-return]


def run_experts_in_any_order(fields: dict[str, Any], disk: str) -> list[Tensor]:
    """With nothing kept beyond its use, on ranks of which each is at its own pace."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Routes(ROUTES if ranks == len(ROUTES) else UNEVEN_ROUTES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if ranks == len(UNEVEN_ROUTES):
        fields = {**fields, "mesh": init_device_mesh("cpu", (2, 2))}
    outsize.prepare(model, optimizer, host_memory="64MiB", disk=disk, unused="sync", units=["Linear"], **fields)
    streamer = prepared(model).engine.streamer

    def forget(*_: Any) -> None:
        streamer.drop_idle()
        streamer.room.last = None

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, y: forget() or (y.register_hook(forget) and None))
    for step in range(3):
        x, y = batch(step, rank, rows=2)
        take_step(nn.functional.mse_loss(model(x, rank), y), optimizer, clip=(model.parameters(), 0.5))
    return weights_of(model)


def run_experts_while_streams_wait(fields: dict[str, Any], disk: str) -> list[Tensor]:
    """As `run_experts_in_any_order`. Nobody waits for a reduction on the host, as where an accelerator reduces."""
    plain = Going.over_unless
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Going, "over_unless", lambda going, wanted: going._turn.kind == REDUCE or plain(going, wanted))
        return run_experts_in_any_order(fields, disk)


@pytest.mark.parametrize(
    ("routes", "run"),
    [
        (ROUTES, run_experts_in_any_order),
        (ROUTES, run_experts_while_streams_wait),
        (UNEVEN_ROUTES, run_experts_in_any_order),
    ],
    ids=["three ranks", "three ranks, streams wait", "two copies on two ranks each"],
)
def test_each_rank_may_run_experts_in_an_order_of_its_own(tmp_path: Path, routes: Any, run: Callable[..., Any]) -> None:
    ways: list[dict[str, Any]] = [
        {"stage": 3, "params": "host"},
        {"stage": 3, "params": "disk", "grads": "disk"},
        {"stage": 0},
    ]
    model = trained_alone(routes, torch.optim.AdamW, lr=1e-3, clip=0.5)
    for of_ways in run_on_ranks(len(routes), in_turn, *((run, fields, str(tmp_path)) for fields in ways)):
        for found in of_ways:
            assert_near(found, model.parameters())


def run_experts_and_look_late(disk: str) -> tuple[bool, list[Tensor]]:
    """Whether this rank was wanted elsewhere while it waited, and was slow to see it; the weights."""
    plain, was_late = Ranks.wanted, []

    def wanted(ranks: Ranks) -> bool:
        found = plain(ranks)
        if found and not was_late and threading.current_thread() is threading.main_thread():
            was_late.append(True)
            time.sleep(3 * meeting.STUCK_SECONDS)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "wanted", wanted)
        weights = run_experts_in_any_order({"stage": 3, "params": "host"}, disk)
    return bool(was_late), weights


def test_a_rank_that_is_slow_to_see_that_it_is_wanted_is_waited_for(tmp_path: Path) -> None:
    model = trained_alone(ROUTES, torch.optim.AdamW, lr=1e-3, clip=0.5)
    found = run_on_ranks(len(ROUTES), run_experts_and_look_late, str(tmp_path))
    assert any(was_late for was_late, _ in found)
    for _, weights in found:
        assert_near(weights, model.parameters())


def trained_alone(
    routes: Sequence[Sequence[int]], kind: Any = torch.optim.SGD, lr: float = 0.1, clip: float = float("inf")
) -> nn.Module:
    """`Routes` in plain torch, after three steps on the batches of all ranks."""
    torch.manual_seed(0)
    model = Routes(routes)
    optimizer = kind(model.parameters(), lr=lr)
    for step in range(3):
        for part in range(len(routes)):
            x, y = batch(step, part, rows=2)
            (nn.functional.mse_loss(model(x, part), y) / len(routes)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def run_experts_in_little_memory(routes: Any, fields: dict[str, Any], disk: str) -> list[Tensor]:
    """Gradients come to rest as soon as others need the room, and ranks have other units at hand after a step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Routes(routes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fields = {"device": "cpu", "disk": disk, "unused": "sync", "units": ["Linear"], **fields}
    with pytest.raises(outsize.BudgetError) as refused:
        outsize.prepare(model, optimizer, host_memory=1, **fields)
    outsize.prepare(model, optimizer, host_memory=refused.value.needed, **fields)
    for step in range(3):
        x, y = batch(step, rank, rows=2)
        take_step(nn.functional.mse_loss(model(x, rank), y), optimizer)
    if rank == 1:
        prepared(model).engine.streamer.drop_idle()
    outsize.release(model)
    return weights_of(model)


@pytest.mark.parametrize(
    "fields",
    [
        {"stage": 3, **dict.fromkeys(("params", "grads", "states"), "disk")},
        {"stage": 3, "params": "disk", "states": "device"},
        {"stage": 3, "params": "disk", "activations": "recompute"},
    ],
    ids=str,
)
def test_experts_of_several_orders_train_in_the_least_memory(tmp_path: Path, fields: dict[str, Any]) -> None:
    """The first expert's gradients may be complete before those behind it have any."""
    ways = (((1, 2, 3, 0), (0, 1, 2, 3), (0, 1, 2, 3)), ((1, 2, 3, 0), (0, 2, 3, 0), (0, 1, 3, 0)))
    jobs = [(run_experts_in_little_memory, routes, fields, str(tmp_path)) for routes in ways]
    found = run_on_ranks(3, in_turn, *jobs)
    for at, routes in enumerate(ways):
        expected = [*trained_alone(routes).parameters()]
        for rank in found:
            assert_near(rank[at], expected)


def keep_a_view_on_one_rank(disk: str) -> list[Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Routes(((0, 1), (2, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tiers = dict.fromkeys(("params", "grads", "states"), "disk")
    outsize.prepare(model, optimizer, host_memory="64MiB", disk=disk, unused="sync", units=["Linear"], **tiers)
    held: list[Tensor] = []
    if rank:
        model.experts[2].register_forward_hook(lambda module, *_: held.append(module.weight.t()))
    for step in range(3):
        x, y = batch(step, rank, rows=2)
        take_step(nn.functional.mse_loss(model(x, rank), y), optimizer)
        weight, _ = weights_of(model.experts[2])
        assert_near(held, [weight.t()] * len(held))
        held.clear()
    return weights_of(model)


def test_a_view_that_one_rank_keeps_shows_the_update(tmp_path: Path) -> None:
    model = trained_alone(((0, 1), (2, 3)))
    for found in run_on_ranks(2, keep_a_view_on_one_rank, str(tmp_path)):
        assert_near(found, model.parameters())


def interrupt_a_backward(disk: str, stage: int) -> list[Tensor]:
    """Where it is interrupted, each rank has the gradients of other experts."""
    rank = dist.get_rank()
    model, optimizer = two_layers_of_experts()
    outsize.prepare(model, optimizer, stage=stage, host_memory="64MiB", disk=disk, unused="sync", units=["Linear"])
    interrupting = [False]

    def interrupt(_: Tensor) -> None:
        if interrupting[0]:
            raise ValueError("interrupted")

    model.get_submodule("1").register_forward_hook(lambda _, __, y: y.register_hook(interrupt) and None)
    for step in range(4):
        interrupting[0] = step == 1
        x, y = batch(step, rank, rows=1)
        try:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        except ValueError:
            assert step == 1
        optimizer.zero_grad()
    return weights_of(model)


def test_an_interrupted_backward_leaves_nothing_of_other_experts(tmp_path: Path) -> None:
    model, optimizer = two_layers_of_experts()
    for step in (0, 2, 3):
        x, y = batches(step, range(2), rows=1)
        take_step(nn.functional.mse_loss(model(x), y), optimizer)
    for of_stages in run_on_ranks(2, in_turn, *((interrupt_a_backward, str(tmp_path), stage) for stage in (0, 2, 3))):
        for found in of_stages:
            assert_near(found, model.parameters())


class Routed(Built, inp=(8, 8), head=(8, 8), experts=lambda: nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])):
    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.head(self.experts[expert](self.inp(x)))  # type: ignore[no-any-return]


def routed_loss(model: nn.Module, rank: int, part: int) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + part))
    return model(x, rank).pow(2).mean()  # type: ignore[no-any-return]


def clip_after_no_sync(stage: int, disk: str) -> tuple[float, list[Tensor]]:
    """(norm, weights after a step) where each rank has used an expert of its own, in `no_sync` alone."""
    torch.manual_seed(0)
    model = Routed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outsize.prepare(model, optimizer, device="cpu", host_memory="64MiB", disk=disk, stage=stage, unused="sync")
    with outsize.no_sync(model):
        for part in range(2):
            routed_loss(model, dist.get_rank(), part).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    optimizer.step()
    return norm, weights_of(model)


def test_gradients_of_other_ranks_experts_are_there_to_be_clipped_after_no_sync(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Routed()
    for rank in range(2):
        for part in range(2):
            (routed_loss(plain, rank, part) / 2).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for found in run_on_ranks(2, in_turn, *((clip_after_no_sync, stage, str(tmp_path)) for stage in (0, 2, 3))):
        for norm, weights in found:
            assert norm == pytest.approx(expected, rel=1e-5)
            assert_near(weights, plain.parameters(), atol=1e-7)
