"""What users do with an optimizer between steps: groups, hyper-parameters, hooks, state. Plain torch is the oracle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.api.shards import Shards
from outsize.move.shard import UnitShard
from outsize.run.unit import Unit
from tests.comparing import assert_same, weights
from tests.conftest import AT_REST_TIERS, Pair, Workshop, batches, sgd, squared_error, take_step, train
from tests.small_models import Stack, linears


def head_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.head.parameters(), lr=1e-2)  # type: ignore[union-attr]


def body(model: nn.Module) -> dict[str, Any]:
    return {"params": list(model.blocks.parameters()), "lr": 1e-3, "weight_decay": 0.3}  # type: ignore[union-attr]


@pytest.mark.parametrize("state_format", ["exact", "compact"])
def test_a_group_added_in_mid_run_trains_as_in_torch(workshop: Workshop, tier: str, state_format: str) -> None:
    pair = workshop.pair(optimizer=head_only, tier=tier, state_format=state_format)
    for model, optimizer in pair.both:
        train(model, optimizer, batches(2))
        optimizer.add_param_group(body(model))
        train(model, optimizer, batches(4), clip=1.0)
    pair.check(atol=1e-5 if state_format == "exact" else 2e-2)
    assert [len(group["params"]) for group in pair.optimizer.param_groups] == [2, 18]


def test_a_group_added_in_mid_run_is_in_the_checkpoint(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(optimizer=head_only, tier=tier)
    train(pair.model, pair.optimizer, batches(2))
    pair.optimizer.add_param_group(body(pair.model))
    train(pair.model, pair.optimizer, batches(2))
    outsize.save(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    again = workshop.pair(optimizer=head_only, tier=tier)
    again.optimizer.add_param_group(body(again.model))
    outsize.load(workshop.disk.parent / "ckpt", again.model, again.optimizer)
    expected = train(pair.model, pair.optimizer, batches(3)).losses
    assert train(again.model, again.optimizer, batches(3)).losses == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_parameter_of_a_unit_added_leaves_its_neighbours_weights(
    workshop: Workshop, tier: str, dtype: torch.dtype
) -> None:
    """The unit gets masters, which checkpoints and exports take for the truth about all of its parameters."""
    model, optimizer = workshop.made(optimizer=head_only, tier=tier, compute_dtype=dtype)
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(2)]
    train(model, optimizer, data)
    start = weights(model)
    optimizer.add_param_group({"params": [model.blocks[0].up.bias], "lr": 0.0, "weight_decay": 0.0})
    train(model, optimizer, data)
    before = weights(model)
    for name in start:
        assert name.startswith("head") or torch.equal(before[name], start[name]), name  # their rate is 0
    outsize.save(workshop.disk.parent / "ckpt", model, optimizer)
    again = Stack()
    outsize.prepare(again, device=workshop.device)
    outsize.load(workshop.disk.parent / "ckpt", again)
    for name, value in weights(again).items():
        torch.testing.assert_close(value, before[name].float(), rtol=1e-2, atol=1e-2, msg=name)


def test_masters_are_added_when_nothing_of_their_unit_is_on_its_way(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share pages with masters of other parameters, which an update may be writing."""
    seen: list[object] = []
    await_written, add = Unit.await_written, Shards.add_late_arrays

    def awaited(unit: Unit) -> None:
        await_written(unit)
        seen.append(unit.shard)

    def added(arrays: Shards, shard: UnitShard) -> None:
        assert seen[-1] is shard
        add(arrays, shard)
        seen.append("added")

    monkeypatch.setattr(Unit, "await_written", awaited)
    monkeypatch.setattr(Shards, "add_late_arrays", added)
    model = Stack()
    optimizer = torch.optim.AdamW([model.blocks[0].up.weight, *model.head.parameters()])
    workshop.prepare(model, optimizer, compute_dtype=torch.bfloat16)
    train(model, optimizer, [(x.bfloat16(), y.bfloat16()) for x, y in batches(2)])
    seen.clear()
    optimizer.add_param_group({"params": [model.blocks[0].up.bias]})
    assert seen[-1] == "added"


def test_a_single_parameter_and_named_ones_may_be_added(workshop: Workshop) -> None:
    pair = workshop.pair(optimizer=lambda model: torch.optim.SGD([model.head.bias], lr=0.1), tier="disk")  # type: ignore[union-attr]
    for model, optimizer in pair.both:
        optimizer.add_param_group({"params": model.head.weight, "lr": 0.05})  # type: ignore[dict-item]
        train(model, optimizer, batches(3))
    pair.check()


def test_units_unfrozen_in_mid_run_go_where_the_others_had_to_go(workshop: Workshop) -> None:
    model = linears(256, 8)
    for layer in list(model)[:4]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outsize.prepare(model, optimizer, host_memory="1800KiB", disk=workshop.disk, device="cpu", units=nn.Linear)
    workshop.watch(model)
    data = [(torch.randn(4, 256), torch.randn(4, 256))]
    train(model, optimizer, data)
    before = outsize.memory(model)
    for layer in list(model)[:4]:
        layer.requires_grad_(True)
    train(model, optimizer, data * 2)
    after = outsize.memory(model)
    for account in after.now:
        if account.split("/")[0] in ("device", "host") and "resident" not in account and "flight" not in account:
            assert after.now[account] <= before.now.get(account, 0) + 4096, account


@pytest.mark.parametrize("update", ["fetch", "backward"])
def test_units_unfrozen_in_mid_run_train_as_in_torch_where_they_rest_in_memory(workshop: Workshop, update: str) -> None:
    def build() -> nn.Module:
        model = linears(256, 8)
        for layer in list(model)[:4]:
            layer.requires_grad_(False)
        return model

    fields: Any = dict.fromkeys(("params", "grads", "states"), "auto") | {"host_memory": "3MiB", "disk": workshop.disk}
    pair = workshop.pair(build, sgd, device="cpu", update=update, **fields)
    data = [(torch.randn(4, 256), torch.randn(4, 256)) for _ in range(4)]
    pair.train(data)
    for model, _ in pair.both:
        model.requires_grad_(True)
    pair.train(data)
    x: Any = data[0][0]
    loss = pair.model[:4](x).square().mean()  # of those that were frozen
    loss.backward(retain_graph=True)
    pair.optimizer.step()
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_hyper_parameters_change_in_mid_run(pair: Pair) -> None:
    for step, batch in enumerate(batches(6)):
        for model, optimizer in pair.both:
            group = optimizer.param_groups[0]
            group["lr"] = 1e-2 / (step + 1)
            group["betas"] = (0.9 - 0.1 * step, 0.99)
            group["weight_decay"] = 0.1 * step
            group["eps"] = 10.0 ** -(8 - step)
            train(model, optimizer, [batch])
    pair.check()


def test_what_changes_after_step_belongs_to_the_next_one(pair: Pair) -> None:
    for model, optimizer in pair.both:
        squared_error(model, batches(1)[0]).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 100.0
        optimizer.param_groups[0]["params"], kept = [], optimizer.param_groups[0]["params"]
        optimizer.zero_grad()
        optimizer.param_groups[0]["params"] = kept
        for param in kept:
            param.grad = None
    pair.check()


def test_an_emptied_group_trains_nothing(workshop: Workshop, tier: str) -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        return torch.optim.AdamW([{"params": params[:4]}, {"params": params[4:]}], lr=1e-2)

    pair = workshop.pair(optimizer=grouped, tier=tier)
    for model, optimizer in pair.both:
        train(model, optimizer, batches(1))
        optimizer.param_groups[0]["params"].clear()
        train(model, optimizer, batches(3))
    pair.check()


def test_step_hooks_fire_once_a_step_and_may_change_the_gradients(pair: Pair) -> None:
    calls: list[str] = []
    for model, optimizer in pair.both:

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, model: nn.Module = model) -> None:
            calls.append("pre")
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        train(model, optimizer, batches(3))
    assert calls == ["pre", "post"] * 6
    pair.check()


def test_load_state_dict_runs_its_hooks(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    pair.train(batches(2))
    state = copy.deepcopy(pair.optimizer.state_dict())
    seen: list[str] = []

    def doubled(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append("pre")
        groups = [{**group, "lr": 2 * group["lr"]} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    pair.optimizer.register_load_state_dict_pre_hook(doubled)
    pair.optimizer.register_load_state_dict_post_hook(lambda _: seen.append("post"))
    pair.optimizer.load_state_dict(state)
    assert seen == ["pre", "post"]
    assert pair.optimizer.param_groups[0]["lr"] == 2e-2


def test_nan_in_the_state_spreads_as_in_torch(pair: Pair) -> None:
    for model, optimizer in pair.both:
        train(model, optimizer, batches(1))
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][0]["exp_avg"].view(-1)[3] = float("nan")
        optimizer.load_state_dict(state)
        take_step(squared_error(model, batches(1)[0]), optimizer)
    mine, theirs = weights(pair.model), weights(pair.plain)
    assert all(torch.equal(mine[name].isnan(), value.isnan()) for name, value in theirs.items())
    assert sum(int(value.isnan().sum()) for value in mine.values()) == 1


def test_a_state_dict_without_state_starts_afresh(workshop: Workshop, tier: str) -> None:
    def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)

    pair = workshop.pair(optimizer=amsgrad, tier=tier)
    fresh = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in pair.both]
    for (model, optimizer), state in zip(pair.both, fresh, strict=True):
        train(model, optimizer, batches(2))
        optimizer.load_state_dict(state)
        assert not optimizer.state_dict()["state"]
        train(model, optimizer, batches(3))
    pair.check()


def test_a_state_dict_is_copied(workshop: Workshop) -> None:
    def tensor_lr(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)

    pair = workshop.pair(optimizer=tensor_lr, tier="disk")
    state = copy.deepcopy(pair.optimizer.state_dict())
    pair.optimizer.load_state_dict(state)
    state["param_groups"][0]["lr"].fill_(9.0)
    assert float(pair.optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2)


def test_step_hooks_see_and_replace_the_arguments_as_in_torch(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    seen: list[tuple[int, Any]] = []
    for _, optimizer in pair.both:

        def replaced(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, "closure": lambda: 7}

        optimizer.register_step_pre_hook(replaced)
        optimizer.register_step_post_hook(lambda _, args, kwargs: seen.append((len(args), sorted(kwargs))))
    results = []
    for model, optimizer in pair.both:
        squared_error(model, batches(1)[0]).backward()
        results.append(optimizer.step())
    assert results == [7, 7]
    assert seen[0] == seen[1] == (1, ["closure"])


def test_large_finite_gradients_are_finite(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3), tier=tier)
    for model, optimizer in pair.both:
        take_step(squared_error(model, batches(1)[0]) * 1e22, optimizer)
    pair.check()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(squared_error(pair.model, batches(1)[0]) * 1e22).backward()
    scaler.step(pair.optimizer)
    assert outsize.memory(pair.model).skipped_steps == 0


def test_what_is_zeroed_is_finite(pair: Pair) -> None:
    for model, optimizer in pair.both:
        (squared_error(model, batches(1)[0]) * float("inf")).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        train(model, optimizer, batches(2))
    pair.check()


@pytest.mark.parametrize("state_format", ["exact", "compact"])
def test_parameters_without_elements_have_state_as_in_torch(workshop: Workshop, tier: str, state_format: str) -> None:
    class Hollow(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.hollow = nn.Parameter(torch.empty(0, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.hollow.sum()

    pair = workshop.pair(Hollow, tier=tier, state_format=state_format)
    for model, optimizer in pair.both:
        train(model, optimizer, batches(2))
    mine, theirs = (optimizer.state_dict()["state"] for _, optimizer in reversed(pair.both))
    assert mine.keys() == theirs.keys()
    assert {float(entry["step"]) for entry in mine.values()} == {2.0}
    assert all(entry["exp_avg"].shape == theirs[index]["exp_avg"].shape for index, entry in mine.items())


@pytest.mark.parametrize("kind", ["list", "tensors"])
def test_betas_that_change_in_place_after_step_belong_to_the_next_one(workshop: Workshop, tier: str, kind: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
        both = (torch.tensor(0.9), torch.tensor(0.999))
        optimizer.param_groups[0]["betas"] = [0.9, 0.999] if kind == "list" else both
        return optimizer

    pair = workshop.pair(optimizer=make, tier=tier)
    for batch in batches(4):
        for model, optimizer in pair.both:
            train(model, optimizer, [batch])
            betas: Any = optimizer.param_groups[0]["betas"]
            if kind == "list":
                betas[0] -= 0.2
            else:
                betas[0].sub_(0.2)
    pair.check()


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_betas_in_a_list_that_change_after_an_update_in_the_backward_are_an_error(
    workshop: Workshop, tier: str
) -> None:
    pair = workshop.pair(tier=tier, update="backward")
    pair.optimizer.param_groups[0]["betas"] = [torch.tensor(0.9), 0.999]
    train(pair.model, pair.optimizer, batches(2))
    squared_error(pair.model, batches(1)[0]).backward()
    pair.optimizer.param_groups[0]["betas"][0].sub_(0.2)
    with pytest.raises(RuntimeError, match="'betas' of a parameter group changed between"):
        pair.optimizer.step()


def test_an_added_group_stays_the_users_own_dict(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(optimizer=head_only, tier=tier)
    for model, optimizer in pair.both:
        group = {**body(model), "params": (param for param in model.blocks.parameters())}
        optimizer.add_param_group(group)
        assert optimizer.param_groups[1] is group
        group["lr"] = 0.05
        train(model, optimizer, batches(3))
    pair.check()


def test_a_set_of_parameters_is_no_group(workshop: Workshop) -> None:
    pair = workshop.pair(optimizer=head_only, tier="host")
    for model, optimizer in pair.both:
        with pytest.raises(TypeError, match="ordering of tensors in sets"):
            optimizer.add_param_group({"params": set(model.blocks.parameters())})  # type: ignore[union-attr]
        assert len(optimizer.param_groups) == 1


def test_a_foreign_parameter_put_into_a_group_by_hand_is_refused_before_anything_changes(workshop: Workshop) -> None:
    pair = workshop.pair(optimizer=head_only, tier="host")
    pair.train(batches(2))
    before, params = weights(pair.model), pair.optimizer.param_groups[0]["params"]
    foreign = nn.Parameter(torch.ones(3))
    foreign.grad = torch.ones(3)
    squared_error(pair.model, batches(1)[0]).backward()
    params.append(foreign)
    with pytest.raises(ValueError, match=r"param_groups\[0\] has a parameter of shape \(3,\) that is not in the model"):
        pair.optimizer.step()
    params.pop()
    assert_same(weights(pair.model), before)


def test_parameters_put_into_a_group_by_hand_train_as_in_torch(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(optimizer=head_only, tier=tier)
    for model, optimizer in pair.both:
        train(model, optimizer, batches(2))
        optimizer.param_groups[0]["params"].append(model.blocks[0].up.weight)  # type: ignore[index,union-attr]
        train(model, optimizer, batches(2))
        assert len(optimizer.state) == 3
    pair.check()
