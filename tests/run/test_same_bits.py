"""The same bits on every tier and in every cut, and memory within the budget, in loops that are not the usual one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from tests.comparing import assert_same, assert_same_runs, weights
from tests.conftest import TIERS, Workshop, take_step
from tests.small_models import linears

MI = 1 << 20


def in_memory(model: nn.Module) -> int:
    """Bytes of everything that is not on disk, now."""
    return sum(nbytes for account, nbytes in outsize.memory(model).now.items() if not account.startswith("disk"))


def changed_and_clipped(workshop: Workshop, tier: str, change: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = linears(24, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if tier != "plain":
        workshop.prepare(model, optimizer, tier=tier, units=["Linear"])
    x, norms = torch.randn(8, 24), []
    for _ in range(6):
        model(x).square().mean().backward()
        for param in model.parameters():
            assert param.grad is not None
            if change == "divide":
                param.grad.div_(3)
            else:
                param.grad.mul_(0.7)
                param.grad.div_(4).div_(-7)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, weights(model)


@pytest.mark.parametrize("change", ["divide", "scale and divide"])
def test_the_norm_of_scaled_and_divided_gradients_is_that_of_their_values(workshop: Workshop, change: str) -> None:
    """To divide by 3 is not to multiply by a third, and a norm times a factor is not the norm of the products."""
    assert_same_runs(changed_and_clipped(workshop, tier, change) for tier in ("plain", *TIERS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_master_of_a_parameter_that_comes_later_depends_on_no_cut(workshop: Workshop, dtype: torch.dtype) -> None:
    def first(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[0].parameters(), lr=0.01)

    def run(tier: str, **fields: Any) -> tuple[None, dict[str, Tensor]]:
        model, optimizer = workshop.made(lambda: linears(16, 2), first, tier, compute_dtype=dtype, **fields)
        optimizer.add_param_group({"params": list(model[1].parameters())})
        for _ in range(4):
            take_step(model(torch.ones(4, 16, dtype=dtype)).float().square().mean(), optimizer)
        return None, weights(model)

    assert_same_runs(run(tier, units=units) for tier in TIERS for units in (None, ["Linear"], [nn.Sequential]))


@pytest.mark.parametrize("tier", TIERS)
def test_a_gradient_that_is_held_back_and_kept_may_be_scaled_again(workshop: Workshop, tier: str) -> None:
    """With `delayed_update` the bytes of what `param.grad` shows belong to an update that has not run yet."""
    model = linears(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    workshop.prepare(model, optimizer, tier=tier, delayed_update=1, units=["Linear"])

    def backward() -> None:
        model(torch.ones(4, 8)).square().mean().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    before = weights(model)
    backward()
    optimizer.step()  # held back
    grads = {name: param.grad for name, param in model.named_parameters()}
    with outsize.gathered(model, grads=True):
        held = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    for factor in (0.9, 0.7):
        for grad in grads.values():
            assert grad is not None
            grad.mul_(factor)
    with outsize.gathered(model, grads=True):
        for name, param in model.named_parameters():
            assert param.grad is not None and torch.equal(param.grad, held[name] * 0.9 * 0.7)
    optimizer.step()  # applies what was held back, as it was
    after = weights(model)
    assert_same(after, {name: value - held[name] for name, value in before.items()})
    optimizer.step()
    expected = {name: value - held[name] * 0.9 * 0.7 for name, value in after.items()}
    for name, value in weights(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("grads", ["host", "disk"])
def test_what_gathered_took_above_the_budget_is_given_back(workshop: Workshop, grads: str) -> None:
    model = linears(512, 16)  # 1 MiB each
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = (24 if grads == "host" else 5) * MI
    workshop.prepare(model, optimizer, grads=grads, host_memory=budget)
    for _ in range(2):
        with outsize.gathered(model):
            assert in_memory(model) > 16 * MI
        assert in_memory(model) <= budget
        model(torch.ones(4, 512)).square().mean().backward()
        assert in_memory(model) <= budget
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_sums_of_16_bit_gradients_keep_to_the_budget(workshop: Workshop, tier: str) -> None:
    """They are added in fp32, so the plan counts 4 bytes for what takes 2 in a loop that does not accumulate."""
    model = linears(512, 16).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fields = {**workshop.fields("disk"), "grads": tier, "host_memory": 12 * MI}
    if tier == "host":
        with pytest.raises(ValueError, match="grads of 1.0 MiB .* as sums of several in fp32 do not fit host_memory"):
            outsize.plan(model, optimizer, **fields)
        fields["host_memory"] = 24 * MI
    assert outsize.plan(model, optimizer, **fields).memory_bytes <= fields["host_memory"]
    outsize.prepare(model, optimizer, **fields)
    workshop.watch(model)
    for _ in range(3):
        model(torch.ones(4, 512, dtype=torch.bfloat16)).float().square().mean().backward()
        memory = outsize.memory(model)
        assert in_memory(model) <= fields["host_memory"], memory
    optimizer.step()
    optimizer.zero_grad()
    workshop.settle(model)
