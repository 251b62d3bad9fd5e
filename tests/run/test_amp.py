"""`torch.amp.GradScaler` over gradients at rest: losses and scales of plain torch, overflow included."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from tests.comparing import assert_same, exact_masters, weights
from tests.conftest import Pair, Workshop, batches, squared_error
from tests.small_models import Stack

OVERFLOWS = (2, 5)


def small_decay(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_scaled(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]], clip: bool
) -> tuple[list[float], list[float]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    losses, scales = [], []
    for step, batch in enumerate(data):
        loss = squared_error(model, batch).float()
        scaler.scale(loss * (float("inf") if step in OVERFLOWS else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


@pytest.mark.parametrize("clip", [True, False])
def test_the_scaler_grows_backs_off_and_skips_as_in_torch(pair: Pair, clip: bool) -> None:
    expected_losses, expected_scales = train_scaled(pair.plain, pair.plain_optimizer, batches(8), clip)
    losses, scales = train_scaled(pair.model, pair.optimizer, batches(8), clip)
    assert scales == expected_scales
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    pair.check()
    assert outsize.memory(pair.model).skipped_steps == len(OVERFLOWS)


@pytest.mark.parametrize(("factor", "steps"), [(2.0**120, False), (2.0**-60, True)])
def test_a_factor_that_makes_gradients_infinite_skips_the_step(pair: Pair, factor: float, steps: bool) -> None:
    for model, optimizer in pair.both:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        scaler.scale(squared_error(model, batches(1)[0])).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(factor)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0 ** (20 if steps else 19)
    pair.check()
    assert outsize.memory(pair.model).skipped_steps == (not steps)


# -- fp16 ------------------------------------------------------------------------------------------------------------


def half_precision_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(x.half(), y.half()) for x, y in batches(count)]


def train_by_hand(data: list[tuple[Tensor, Tensor]], clip: bool) -> tuple[list[float], list[float], list[Tensor]]:
    """fp16 weights beside fp32 masters: what Micikevicius et al. 2018 describe, with torch's own scaler rules."""
    torch.manual_seed(0)
    model = Stack(depth=2)
    masters = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    model = model.half()
    scale, growth, losses, scales = 1024.0, 0, [], []
    for step, batch in enumerate(data):
        loss = squared_error(model, batch).float()
        (loss * scale * (float("inf") if step in OVERFLOWS else 1.0)).backward()
        grads = [param.grad.float() for param in model.parameters() if param.grad is not None]
        if all(torch.isfinite(grad).all() for grad in grads):
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad * (1.0 / scale)
            if clip:
                torch.nn.utils.clip_grad_norm_(masters, 0.1)
            optimizer.step()
            with torch.no_grad():
                for param, master in zip(model.parameters(), masters, strict=True):
                    param.copy_(master)
            growth += 1
        else:
            scale, growth = scale * 0.5, 0
        if growth == 2:
            scale, growth = scale * 2.0, 0
        model.zero_grad()
        losses.append(loss.item())
        scales.append(scale)
    return losses, scales, masters


@pytest.mark.parametrize("clip", [True, False])
def test_fp16_trains_as_with_masters_kept_by_hand(workshop: Workshop, tier: str, clip: bool) -> None:
    data = half_precision_batches(10)
    expected_losses, expected_scales, masters = train_by_hand(data, clip)
    model, optimizer = workshop.made(lambda: Stack(depth=2), small_decay, tier, compute_dtype=torch.float16)
    losses, scales = train_scaled(model, optimizer, data, clip)
    assert scales == expected_scales
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, value in zip(weights(model), masters, strict=True):
        torch.testing.assert_close(exact_masters(model)[name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(weights(model)[name], exact_masters(model)[name].half())
    assert outsize.memory(model).skipped_steps == len(OVERFLOWS)


def test_fp16_gives_the_same_bits_on_every_tier(workshop: Workshop) -> None:
    found = []
    for tier in workshop.exact_tiers:
        model, optimizer = workshop.made(lambda: Stack(depth=2), small_decay, tier, compute_dtype=torch.float16)
        found.append((train_scaled(model, optimizer, half_precision_batches(8), clip=True), exact_masters(model)))
    for trace, masters in found[1:]:
        assert trace == found[0][0]
        assert_same(masters, found[0][1])


@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_leaves_weights_and_moments_untouched(workshop: Workshop, tier: str, poison: float) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), tier=tier, compute_dtype=torch.float16)
    data = half_precision_batches(4)
    train_scaled(pair.model, pair.optimizer, data[:2], clip=False)
    before = (exact_masters(pair.model), copy.deepcopy(pair.optimizer.state_dict()["state"]))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    model, optimizer = pair.model, pair.optimizer
    model.blocks[0].up.weight.register_hook(  # type: ignore[union-attr]
        lambda grad: torch.where(torch.arange(grad.numel(), device=grad.device).view_as(grad) == 7, poison, grad)
    )
    scaler.scale(squared_error(model, data[2]).float()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert scaler.get_scale() == 8.0
    assert outsize.memory(model).skipped_steps == 1
    assert_same(exact_masters(model), before[0])
    for index, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(before[1][index][k])) for k, v in entry.items())


def test_fp16_state_goes_through_a_checkpoint_into_other_dtypes_and_back(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), tier="disk", compute_dtype=torch.float16)
    train_scaled(pair.model, pair.optimizer, half_precision_batches(5), clip=True)
    masters = exact_masters(pair.model)
    outsize.save(workshop.disk.parent / "half", pair.model, pair.optimizer)
    single = workshop.pair(lambda: Stack(depth=2), tier="host")
    outsize.load(workshop.disk.parent / "half", single.model, single.optimizer)
    assert_same(weights(single.model), masters)
    outsize.save(workshop.disk.parent / "single", single.model, single.optimizer)
    again = workshop.pair(lambda: Stack(depth=2), tier="host", compute_dtype=torch.float16)
    outsize.load(workshop.disk.parent / "single", again.model, again.optimizer)
    assert_same(exact_masters(again.model), masters)
    assert_same(weights(again.model), weights(pair.model))


def test_an_fp16_model_of_the_users_own_trains(workshop: Workshop, tier: str) -> None:
    model, optimizer = workshop.made(lambda: Stack(depth=2).half(), small_decay, tier)
    losses, _ = train_scaled(model, optimizer, half_precision_batches(1) * 12, clip=True)
    assert losses[-1] < losses[0] * 0.9


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_step_hook_that_raises_leaves_no_scale_behind(workshop: Workshop, tier: str, when: str) -> None:
    pair = workshop.pair(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), tier=tier)
    for model, optimizer in pair.both:
        scaler, fired = torch.amp.GradScaler("cpu", init_scale=1024.0), []

        def hook(*_: object, fired: list[int] = fired) -> None:
            fired.append(1)
            if len(fired) == 1:
                raise LookupError("from a hook")

        getattr(optimizer, f"register_step_{when}_hook")(hook)
        for batch in batches(3):
            scaler.scale(squared_error(model, batch)).backward()
            with contextlib.suppress(LookupError):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert len(fired) == 3
    pair.check()


@pytest.mark.parametrize("given", [False, True])
def test_a_scaled_step_that_is_refused_leaves_the_gradients_as_they_were(
    workshop: Workshop, tier: str, given: bool
) -> None:
    """`given`: the user has put a gradient of his own in place of one at rest."""
    moved = []
    for refused in (False, True):
        torch.manual_seed(0)
        model = Stack(depth=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        workshop.prepare(model, optimizer, tier, compute_dtype=torch.bfloat16)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x, y = batches(1)[0]
        scaler.scale(squared_error(model, (x.bfloat16(), y.bfloat16()))).backward()
        if given:
            model.head.weight.grad = torch.full((4, 16), 512.0, dtype=torch.bfloat16)
        if refused:
            with outsize.gathered(model.blocks[0], modify=True), pytest.raises(RuntimeError, match="Nothing was upda"):
                scaler.step(optimizer)
            if given:
                assert (model.head.weight.grad == 512.0).all()
        scaler.step(optimizer)
        scaler.update()
        if given:
            assert (model.head.weight.grad == 0.5).all()  # as torch leaves it
        moved.append(weights(model))
    assert_same(moved[1], moved[0])


def test_others_than_a_scaler_may_clip_the_gradients(workshop: Workshop) -> None:
    """Lightning refuses to clip for an optimizer that says it takes the loss scale out by itself."""
    optimizer: Any = workshop.pair().optimizer
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


@pytest.mark.parametrize("unscaled", [False, True])
def test_step_hooks_see_gradients_without_the_scale_and_no_step_that_is_skipped(
    workshop: Workshop, tier: str, unscaled: bool
) -> None:
    pair = workshop.pair(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), tier=tier)
    calls: list[list[str]] = []
    for model, optimizer in pair.both:
        scaler, called = torch.amp.GradScaler("cpu", init_scale=1024.0), list[str]()
        calls.append(called)

        def clamp(stepping: torch.optim.Optimizer, *_: object, called: list[str] = called) -> None:
            called.append("pre")
            assert getattr(stepping, "grad_scale", None) is None
            for group in stepping.param_groups:
                torch._foreach_clamp_max_([param.grad for param in group["params"]], 1e-3)

        optimizer.register_step_pre_hook(clamp)
        optimizer.register_step_post_hook(lambda *_, called=called: called.append("post"))  # type: ignore[misc]
        for index, batch in enumerate(batches(4)):
            scaler.scale(squared_error(model, batch) * (torch.inf if index == 1 else 1.0)).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert calls == [["pre", "post"] * 3] * 2
    assert outsize.memory(pair.model).skipped_steps == 1
    pair.check()


def test_a_scaled_step_that_is_refused_behind_a_hook_leaves_the_gradients_as_they_were(
    workshop: Workshop, tier: str
) -> None:
    pair = workshop.pair(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), tier=tier)
    for model, optimizer in pair.both:
        scaler, tries = torch.amp.GradScaler("cpu", init_scale=1000.0), list[int]()

        def refuse(*_: object, tries: list[int] = tries) -> None:
            tries.append(1)
            if len(tries) == 1:
                raise LookupError("from a hook")

        optimizer.register_step_pre_hook(refuse)
        scaler.scale(squared_error(model, batches(1)[0])).backward()
        with pytest.raises(LookupError):
            scaler.step(optimizer)
        scaler.step(optimizer)
    pair.check()
