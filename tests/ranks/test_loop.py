"""What a user's loop does around the step, on several ranks."""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import outsize
from outsize.run.buffers import unused
from tests.conftest import take_step
from tests.ranks.launching import in_turn, run_on_ranks
from tests.ranks.training import Setting, assert_near, batches, fields_of, made, make, prepared, same_bits, weights_of
from tests.small_models import Built


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
        model, optimizer = made(setting, disk)
        found.append(ask(model, optimizer, [dist.get_rank()], outsize.gathered))
    return found


def add_to_held_gradients(settings: list[Setting], disk: str) -> list[list[Tensor]]:
    """What is added up where nobody zeroes, while the gradients of the step before are held back."""
    found = []
    for setting in settings:
        model, optimizer = made(setting, disk)
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


def penalize(settings: list[Setting], disk: str) -> list[list[Tensor]]:
    """Weights after two steps with a penalty on the gradients of this rank, clipped; plain ones at last."""
    found = []
    ranks = range(dist.get_world_size())
    for setting in (*settings, None):
        model, optimizer = make(setting or Setting())
        if setting is not None:
            outsize.prepare(model, optimizer, **fields_of(setting, disk))
        params = list(model.parameters())
        for step in range(2):
            for part in ranks if setting is None else [dist.get_rank()]:
                loss = loss_of(model, step, [part]) / (len(ranks) if setting is None else 1)
                slopes = torch.autograd.grad(loss, params, create_graph=True)
                penalty = sum(each.square().sum() for each in slopes) * (len(ranks) if setting is None else 1)
                (loss + penalty).backward(create_graph=step == 1)
            if setting is not None and step == 1:
                with pytest.raises(RuntimeError, match=r"use `torch.autograd.grad\(loss, params, create_graph=True\)`"):
                    params[0].grad.square()  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(params, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights_of(model))
    return found


def test_a_penalty_on_gradients_trains_as_in_torch_and_those_of_several_ranks_have_no_graph(tmp_path: Path) -> None:
    settings = [Setting(0, "host"), Setting(2, "disk"), Setting(3, "device"), Setting(3, "disk")]
    for *found, plain in run_on_ranks(2, penalize, settings, str(tmp_path)):
        for each in found:
            assert_near(each, plain)


def scale(stage: int, disk: str) -> tuple[list[float], list[float], int]:
    """Training in fp16 whose second step overflows on one rank alone."""
    setting = Setting(stage, "host", dtype=torch.float16)
    model, optimizer = made(setting, disk)
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
    model, optimizer = made(setting, disk)
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


class Offset(Built, values=lambda: nn.Parameter(torch.zeros(4, 16))):
    """Added without broadcasting: its gradient is the very tensor that comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.values.view(4, 16)


class Skip(
    Built, first=(16, 16), offset=Offset, beside=lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
):
    """The gradient of the offset waits for the skip connection while the layers beside that are reduced."""

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
