"""Frozen parameters beside trainable ones in a unit: no gradients and no state for them, until they are unfrozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.run.room import Room
from tests.comparing import assert_same, weights
from tests.conftest import Pair, Workshop, train
from tests.small_models import Built

WIDTH, RANK = 256, 4


class Adapted(
    Built,
    base=lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    down=lambda: nn.Linear(WIDTH, RANK, bias=False),
    up=lambda: nn.Linear(RANK, WIDTH, bias=False),
    last=lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
):
    """A frozen layer with a small trainable detour (LoRA, Hu et al. 2021), and a layer that is all frozen."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.base(x) + self.up(self.down(x))))  # type: ignore[no-any-return]


def model() -> nn.Module:
    return nn.Sequential(Adapted(), Adapted())


def all_of(model: nn.Module) -> torch.optim.Optimizer:
    """Frozen parameters too, as most scripts have it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


TRAINED = 2 * 2 * WIDTH * RANK
"""Elements."""


def data(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randn(4, WIDTH, generator=generator).to(dtype) for _ in "xy") for _ in range(count)]  # type: ignore[misc]


def account(model: nn.Module, kind: str) -> int:
    return sum(nbytes for name, nbytes in outsize.memory(model).now.items() if name.split("/")[1] == kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_and_states_at_rest_are_those_of_trainable_parameters(
    workshop: Workshop, tier: str, dtype: torch.dtype
) -> None:
    pair = workshop.pair(model, all_of, tier, compute_dtype=dtype, units=Adapted)
    train(pair.model, pair.optimizer, data(2, dtype))
    workshop.settle(pair.model)
    pages = 2 * 4096  # elements that round up, of both units
    master = 2 if dtype is torch.bfloat16 else 0
    assert account(pair.model, "states") <= (8 + master) * (TRAINED + pages)
    assert account(pair.model, "grads") <= 4 * (TRAINED + pages)
    if dtype is torch.float32:
        train(pair.plain, pair.plain_optimizer, data(2))
        pair.check()


def test_what_is_planned_is_what_is_taken(workshop: Workshop) -> None:
    pair = workshop.pair(model, all_of, "host", units=Adapted)
    train(pair.model, pair.optimizer, data(1))
    planned = outsize.plan(pair.plain, pair.plain_optimizer, host_memory="64MiB", device="cpu", units=Adapted)
    states = sum(unit.size.states for unit in planned.units)
    assert 8 * TRAINED < states <= 8 * TRAINED + 2 * 8 * 4096  # with what pads two units to whole pages
    assert account(pair.model, "states") == states


@pytest.mark.parametrize("update", ["fetch", "backward"])
@pytest.mark.parametrize("state_format", ["exact", "compact"])
def test_what_is_unfrozen_gets_room_for_its_state(
    workshop: Workshop, tier: str, update: str, state_format: str
) -> None:
    pair = workshop.pair(model, all_of, tier, update=update, state_format=state_format, units=Adapted)
    for each, optimizer in pair.both:
        train(each, optimizer, data(2))
        each[0].base.requires_grad_(True)  # type: ignore[index,union-attr]
        each[1].last.requires_grad_(True)  # type: ignore[index,union-attr]
        train(each, optimizer, data(3))
        assert len(optimizer.state) == 4 + 4
    if state_format == "exact":
        pair.check()


def test_masters_of_what_is_unfrozen_begin_at_its_weights(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(model, all_of, tier, compute_dtype=torch.bfloat16, units=Adapted)
    before = weights(pair.model)
    train(pair.model, pair.optimizer, data(2, torch.bfloat16))
    pair.model[0].base.requires_grad_(True)  # type: ignore[index,union-attr]
    for name, value in weights(pair.model).items():
        assert torch.equal(value, before[name]) == ("base" in name or "last" in name)
    train(pair.model, pair.optimizer, data(2, torch.bfloat16))
    with outsize.gathered(pair.model):
        base = pair.model[0].base.weight  # type: ignore[index,union-attr]
        masters = pair.optimizer.state_dict()["state"][0]["fp32_master"]
    torch.testing.assert_close(
        masters.bfloat16(), weights(pair.model)["0.base.weight"].to(masters.device), rtol=2**-7, atol=0
    )
    assert not torch.equal(masters, masters.bfloat16().float())
    assert base.requires_grad


def unfrozen(pair: Pair) -> None:
    for each, optimizer in pair.both:
        train(each, optimizer, data(1))
        each[0].base.requires_grad_(True)  # type: ignore[index,union-attr]
        train(each, optimizer, data(2))


def test_a_checkpoint_with_more_state_than_the_run_has_room_for_makes_room(
    workshop: Workshop, tier: str, tmp_path: Path
) -> None:
    pair = workshop.pair(model, all_of, tier, units=Adapted)
    unfrozen(pair)
    outsize.save(tmp_path / "ckpt", pair.model, pair.optimizer).wait()
    outsize.export(tmp_path / "dcp", pair.model, format="dcp", optimizer=pair.optimizer)
    for folder in ("ckpt", "dcp"):
        again = workshop.pair(model, all_of, tier, units=Adapted)
        outsize.load(tmp_path / folder, again.model, again.optimizer)
        again.model[0].base.requires_grad_(True)  # type: ignore[index,union-attr]
        train(again.model, again.optimizer, data(2))
        _, mine = pair.both[0], weights(again.model)
        if folder == "ckpt":
            train(pair.model, pair.optimizer, data(2))
        assert_same(mine, weights(pair.model))


def test_a_state_dict_with_more_state_makes_room(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(model, all_of, tier, units=Adapted)
    unfrozen(pair)
    again = workshop.pair(model, all_of, tier, units=Adapted)
    with outsize.gathered(again.model, modify=True):
        again.model.load_state_dict(pair.plain.state_dict())
    again.optimizer.load_state_dict(pair.plain_optimizer.state_dict())
    again.model[0].base.requires_grad_(True)  # type: ignore[index,union-attr]
    both: Any = Pair(pair.plain, pair.plain_optimizer, again.model, again.optimizer)
    both.train(data(2))


def test_state_of_a_frozen_parameter_is_taken_over(workshop: Workshop) -> None:
    torch.manual_seed(0)
    plain, other = model(), model()
    other.load_state_dict(plain.state_dict())
    optimizers = [all_of(plain), all_of(other)]
    for each, optimizer in zip((plain, other), optimizers, strict=True):
        each[0].base.requires_grad_(True)  # type: ignore[index,union-attr]
        train(each, optimizer, data(2))
        each[0].base.requires_grad_(False)  # type: ignore[index,union-attr]
    workshop.prepare(other, optimizers[1], "disk", units=Adapted)
    for each in (plain, other):
        each[0].base.requires_grad_(True)  # type: ignore[index,union-attr]
    Pair(plain, optimizers[0], other, optimizers[1]).train(data(2))


def test_room_that_the_budget_has_not_got_is_refused_before_anything_changes(workshop: Workshop) -> None:
    pair = workshop.pair(model, all_of, "host", units=Adapted, host_memory="3MiB")
    train(pair.model, pair.optimizer, data(1))
    before = weights(pair.model)
    pair.model[0].requires_grad_(True)  # type: ignore[index]
    pair.model[1].requires_grad_(True)  # type: ignore[index]
    with pytest.raises(outsize.BudgetError, match=r"needs .* of host_memory=3.0 MiB are taken; raise host") as caught:
        train(pair.model, pair.optimizer, data(1))
    assert caught.value.field == "host_memory" and caught.value.needed > caught.value.available
    assert_same(weights(pair.model), before)


def test_a_gradient_rests_that_made_those_before_it_leave_memory(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(room: Room, nbytes: int) -> None:
        with room.lock:
            while room._flush_grads():
                continue

    def with_fixed_bias() -> nn.Module:
        layer = nn.LayerNorm(WIDTH)
        layer.bias.requires_grad_(False)
        return nn.Sequential(layer)

    monkeypatch.setattr(Room, "make", make)  # as where the budget has no byte to spare
    pair = workshop.pair(with_fixed_bias, all_of, "disk")
    pair.train(data(1))
    for each in (pair.plain, pair.model):
        each.requires_grad_(True)
    pair.train(data(2))


@pytest.mark.parametrize("way", ["save", "dcp", "state_dict"])
def test_masters_of_what_is_frozen_again_go_on_exactly(workshop: Workshop, tier: str, way: str, tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        return model().requires_grad_(False)

    def begin(state: bool) -> Pair:
        pair = workshop.pair(frozen, all_of, tier, compute_dtype=torch.bfloat16, units=Adapted)
        pair.model.requires_grad_(state)
        return pair

    pair, again = begin(True), begin(False)
    train(pair.model, pair.optimizer, data(2, torch.bfloat16))
    if way == "save":
        outsize.save(tmp_path / "it", pair.model, pair.optimizer).wait()
    elif way == "dcp":
        outsize.export(tmp_path / "it", pair.model, format="dcp", optimizer=pair.optimizer, dtype=torch.float32)
    if way == "state_dict":
        with outsize.gathered(pair.model), outsize.gathered(again.model, modify=True):
            again.model.load_state_dict(pair.model.state_dict())
        again.optimizer.load_state_dict(pair.optimizer.state_dict())
    else:
        outsize.load(tmp_path / "it", again.model, again.optimizer)
    again.model.requires_grad_(True)
    for each in (pair, again):
        train(each.model, each.optimizer, data(2, torch.bfloat16))
    mine, expected = again.optimizer.state_dict()["state"], pair.optimizer.state_dict()["state"]
    for index, entry in expected.items():
        assert_same(mine[index], entry)
