"""What a user's loop does around the step, on several ranks."""

from __future__ import annotations

import contextlib
import gc
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
from outsize.move.lanes import REDUCE, Going
from outsize.run.buffers import unused
from tests.conftest import take_step
from tests.ranks.launching import in_turn, run_on_ranks
from tests.ranks.training import Setting, assert_near, batch, batches, fields_of, make, prepared, same_bits, weights_of


def loss_of(model: nn.Module, step: int, parts: list[int]) -> Tensor:
    x, y = batches(step, parts)
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(x.to(dtype)).float(), y)


def ask(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[int], shown: Any) -> dict[str, Any]:
    """Norms, values, accumulation, changed gradients and weights."""
    params = list(model.parameters())
    loss_of(model, 0, parts).backward()
    found: dict[str, Any] = {
        f"norm {order}": float(
            torch.nn.utils.get_total_norm([each.grad for each in params if each.grad is not None], order)
        )
        for order in (1.0, 2.0, 3.0, float("inf"))
    }
    with shown(model, grads=True):
        found["gradients"] = [each.grad.clone() for each in params if each.grad is not None]
    torch.nn.utils.clip_grad_value_(params, 0.01)
    found["norm of the clamped"] = float(
        torch.nn.utils.get_total_norm([each.grad for each in params if each.grad is not None])
    )
    with shown(model, grads=True, modify=True):
        for each in params:
            assert each.grad is not None
            each.grad.mul_(0.5)
    loss_of(model, 1, parts).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    take_step(loss_of(model, 2, parts), optimizer)
    with shown(model, modify=True), torch.no_grad():
        for each in params:
            each.mul_(1.5)
    loss_of(model, 3, parts).backward()
    optimizer.step()
    with shown(model):
        found["weights"] = [each.detach().clone() for each in params]
    return found


def ask_on_ranks(settings: list[Setting], disk: str) -> list[dict[str, Any]]:
    found = []
    for setting in settings:
        model, optimizer = make(setting)
        outsize.prepare(model, optimizer, **fields_of(setting, disk))
        found.append(ask(model, optimizer, [dist.get_rank()], outsize.gathered))
    return found


def add_to_held_gradients(settings: list[Setting], disk: str) -> list[list[Tensor]]:
    """What is added up where nobody zeroes, while the gradients of the step before are held back."""
    found = []
    for setting in settings:
        model, optimizer = make(setting)
        outsize.prepare(model, optimizer, **fields_of(setting, disk))
        for step in range(3):
            loss_of(model, step, [dist.get_rank()]).backward()
            if step < 2:
                optimizer.step()
        with outsize.gathered(model, grads=True):
            found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    return found


def test_gradients_are_added_to_those_that_a_delayed_update_holds_back(tmp_path: Path) -> None:
    places = [
        [Setting(stage, at, fields={"delayed_update": 1}) for at in ("device", "host", "disk")] for stage in (0, 3)
    ]
    for found in run_on_ranks(2, in_turn, *((add_to_held_gradients, each, str(tmp_path)) for each in places)):
        for device, *others in found:
            assert all(same_bits(device, other) for other in others)


def test_the_loop_may_ask_and_change_what_it_likes(tmp_path: Path) -> None:
    settings = [Setting(0, "host"), Setting(2, "host"), Setting(3, "disk"), Setting(3, "device")]

    def plainly(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    expected = ask(*make(Setting()), [0, 1], plainly)
    for found in run_on_ranks(2, ask_on_ranks, settings, str(tmp_path)):
        for each in found:
            for name, value in expected.items():
                if isinstance(value, float):
                    assert each[name] == pytest.approx(value, rel=1e-5), name
                else:
                    assert_near(each[name], value, rtol=2e-5, atol=2e-5)


def scale(stage: int, disk: str) -> tuple[list[float], list[float], int]:
    """Training in fp16 whose second step overflows on one rank alone."""
    setting = Setting(stage, "host", dtype=torch.float16)
    model, optimizer = make(setting)
    outsize.prepare(model, optimizer, **fields_of(setting, disk))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    scales, norms = [], []
    for step in range(3):
        factor = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        scaler.scale(loss_of(model, step, [dist.get_rank()]) * factor).backward()
        scaler.unscale_(optimizer)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, norms, outsize.memory(model).skipped_steps


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    calls = [(scale, stage, str(tmp_path)) for stage in (0, 3)]
    for first, second in zip(*run_on_ranks(2, in_turn, *calls), strict=True):
        assert first[0] == second[0] == [256.0, 128.0, 128.0]
        assert first[2] == second[2] == 1
        assert first[1][2:] == second[1][2:]


def state_dicts(disk: str) -> bool:
    setting = Setting(3, "host")
    model, optimizer = make(setting)
    outsize.prepare(model, optimizer, **fields_of(setting, disk))
    for step in range(2):
        take_step(loss_of(model, step, [dist.get_rank()]), optimizer)
    saved = optimizer.state_dict()
    before = [entry["exp_avg"].clone() for entry in saved["state"].values()]
    take_step(loss_of(model, 2, [dist.get_rank()]), optimizer)
    optimizer.load_state_dict(saved)
    after = [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values()]
    plain_model, plain = make(setting)
    loss_of(plain_model, 0, [0]).backward()
    plain.step()
    optimizer.load_state_dict(plain.state_dict())  # of whole parameters
    return same_bits(before, after)


def test_state_dicts_of_the_optimizer_go_around(tmp_path: Path) -> None:
    assert run_on_ranks(2, state_dicts, str(tmp_path)) == [True, True]


class Experts(nn.Module):
    """Rows go to the expert that they ask for; one that nobody asks for gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(48, 48) for _ in range(4)])
        self.head = nn.Linear(48, 8)

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
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
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
    torch.manual_seed(0)
    model = Routes(routes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        for part in range(len(routes)):
            x, y = batch(step, part, rows=2)
            (nn.functional.mse_loss(model(x, part), y) / len(routes)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for of_ways in run_on_ranks(len(routes), in_turn, *((run, fields, str(tmp_path)) for fields in ways)):
        for found in of_ways:
            assert_near(found, model.parameters())


def trained_alone(routes: Sequence[Sequence[int]]) -> nn.Module:
    """`Routes` in plain torch, after three steps on the batches of all ranks."""
    torch.manual_seed(0)
    model = Routes(routes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for part in range(len(routes)):
            x, y = batch(step, part, rows=2)
            (nn.functional.mse_loss(model(x, part), y) / len(routes)).backward()
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
        nn.functional.mse_loss(model(x, rank), y).backward()
        optimizer.step()
        optimizer.zero_grad()
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
        nn.functional.mse_loss(model(x, rank), y).backward()
        optimizer.step()
        optimizer.zero_grad()
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
    for of_stages in run_on_ranks(2, in_turn, *((interrupt_a_backward, str(tmp_path), stage) for stage in (2, 3))):
        for found in of_stages:
            assert_near(found, model.parameters())


class Offset(nn.Module):
    """Added without broadcasting: its gradient is the very tensor that comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.values.view(4, 16)


class Skip(nn.Module):
    """The gradient of the offset waits for the skip connection while the layers beside that are reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.offset = nn.Linear(16, 16), Offset()
        self.beside = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.offset(y + self.beside(y))


def train_with_skip(stage: int | None, disk: str) -> list[Tensor]:
    """On ranks with a stage, else plain torch on both parts of the batch."""
    torch.manual_seed(0)
    model = Skip()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if stage is not None:
        outsize.prepare(model, optimizer, stage=stage, disk=disk, host_memory="64MiB", units=["Linear", "Offset"])
    parts = (0, 1) if stage is None else (dist.get_rank(),)
    for step in range(3):
        for micro in range(2):
            for part in parts:
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + 10 * micro + part))
                (model(x).square().sum() / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def test_a_gradient_that_autograd_still_needs_stays_as_it_is(tmp_path: Path) -> None:
    expected = train_with_skip(None, "")
    for of_stages in run_on_ranks(2, in_turn, *((train_with_skip, stage, str(tmp_path)) for stage in (0, 3))):
        for found in of_stages:
            assert_near(found, expected)


def await_unused(memory: Tensor) -> None:
    """gloo's threads let go of what they have sent a little later."""
    began = time.monotonic()
    while not unused(memory):
        assert time.monotonic() - began < 20, "somebody has a view of the memory"
        gc.collect()


def where_means_stay(disk: str) -> list[list[int]]:
    """Of steps in fp32 and in bf16 the addresses at which units keep memory for their gradients; 0 for none."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        outsize.prepare(model, optimizer, stage=0, disk=disk, host_memory="64MiB", units=["Linear"])
        inside = prepared(model)
        held = []
        for step in range(5):
            model(torch.ones(2, 64, dtype=dtype)).sum().backward()
            held.append(model[0].weight.grad if step == 2 else None)  # a gradient that the user keeps
            optimizer.zero_grad()  # no step: an update that still runs has its gradients, too
            homes = [each.collector._home for each in inside.engine.gradients if each.collector]
            for index, home in enumerate(homes):
                if home is not None and not (step == 2 and index == 0):
                    await_unused(home)
            found.append([0 if home is None else home.data_ptr() for home in homes])
    return found


def test_a_unit_collects_again_where_its_mean_was_found(tmp_path: Path) -> None:
    for found in run_on_ranks(2, where_means_stay, str(tmp_path)):
        first, second, third, fourth, fifth = found[:5]
        assert first == second == third and all(first)
        assert fourth[0] != third[0], "somebody still has the gradient that lies there"
        assert fourth[1] == third[1] and fourth == fifth
        assert not any(map(any, found[5:])), "what is summed in fp32 and rests in bf16 lies elsewhere"


class TiedAcross(nn.Module):
    """The head's weight is the first layer's; its bias makes up a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8, bias=False)
        self.mid = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 8))
        self.head = nn.Linear(8, 8)
        self.head.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.inp(x)))  # type: ignore[no-any-return]


def accumulate_tied(fields: dict[str, Any], disk: str) -> float:
    """How far gradients of several backwards a step are from plain torch's on the whole batch, over the largest."""
    rank, ranks, apart = dist.get_rank(), dist.get_world_size(), 0.0
    torch.manual_seed(0)
    plain, model = TiedAcross(), TiedAcross()
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain)]
    outsize.prepare(model, optimizers[0], device="cpu", host_memory="64MiB", disk=disk, units=[nn.Linear], **fields)

    def loss(each: nn.Module, *seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed[0] * 100 + seed[1] * 10 + seed[2])
        return each(torch.randn(4, 8, generator=generator)).pow(2).mean()  # type: ignore[no-any-return]

    for step in range(4):
        for part in range(3):
            loss(model, step, part, rank).backward()
            for other in range(ranks):
                (loss(plain, step, part, other) / ranks).backward()
        with outsize.gathered(model, grads=True):
            for one, other_one in zip(model.parameters(), plain.parameters(), strict=True):
                assert one.grad is not None and other_one.grad is not None
                apart = max(apart, float((one.grad - other_one.grad).abs().max() / other_one.grad.abs().max()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return apart


def test_several_backwards_a_step_add_up_whatever_the_units(tmp_path: Path) -> None:
    fields: list[dict[str, Any]] = [{"stage": 0, "params": "disk"}, {"stage": 0}, {"stage": 3, "params": "disk"}]
    for found in run_on_ranks(2, in_turn, *((accumulate_tied, each, str(tmp_path)) for each in fields)):
        assert max(found) < 1e-5


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

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
