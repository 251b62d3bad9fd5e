"""Another optimizer than the model's own, and what wraps or replaces the model, the optimizer or its step."""

import copy
import gc
import pickle
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from tests.conftest import AT_REST_TIERS, Pair, Workshop, adamw, batches, refused, squared_error, train
from tests.small_models import Stack


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_step_of_an_optimizer_that_was_not_passed_is_refused(pair: Pair) -> None:
    other = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    squared_error(pair.model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"this SGD was not passed to outsize\.prepare, and steps on 'blocks\.0"):
        other.step()
    pair.optimizer.zero_grad()
    pair.train(batches(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_steps_of_other_models_are_of_no_concern(workshop: Workshop) -> None:
    """torch has one list of hooks for all optimizers: it may not change while one steps, and compiled steps read it."""
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    @torch.compile(backend="eager", fullgraph=False)
    def step(x: torch.Tensor) -> None:
        plain(x).sum().backward()
        optimizer.step()

    workshop.pair(tier="host")
    hooks = len(_global_optimizer_pre_hooks)
    workshop.pair(tier="host")
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == hooks
    before = plain.weight.detach().clone()
    step(torch.ones(2, 4))
    torch.testing.assert_close(plain.weight, before - 0.2)


def test_where_nothing_moves_another_optimizer_may_step(workshop: Workshop) -> None:
    pair = workshop.pair(tier="device")
    for model, _ in pair.both:
        squared_error(model, batches(1)[0]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    pair.check()


def test_what_wraps_the_models_own_optimizer_steps(workshop: Workshop, tier: str) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, wrapped: torch.optim.Optimizer) -> None:
            super().__init__([torch.ones(1)], {})
            self.wrapped, self.param_groups = wrapped, wrapped.param_groups

        def step(self, closure: Any = None) -> None:
            self.wrapped.step()

    pair = workshop.pair(tier=tier)
    train(pair.plain, pair.plain_optimizer, batches(3))
    train(pair.model, Wrapper(pair.optimizer), batches(3))
    pair.check()


@pytest.mark.parametrize("what", ["deepcopy", "pickle"])
def test_copies_of_the_optimizer_are_refused_with_the_remedy(workshop: Workshop, what: str) -> None:
    pair = workshop.pair(tier="disk")
    with pytest.raises(RuntimeError, match=r"optimizer of a prepared model cannot be copied .*outsize\.save"):
        copy.deepcopy(pair.optimizer) if what == "deepcopy" else pickle.dumps(pair.optimizer)
    pair.train(batches(2))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_models_that_are_wrapped_for_data_parallelism_are_refused() -> None:
    model: Any = nn.parallel.DistributedDataParallel(Stack())
    refused(model, adamw(model), r"the model is wrapped in DistributedDataParallel: .*pass the plain module")
    refused(nn.Sequential(model), None, r"'0' is wrapped in DistributedDataParallel")


@pytest.mark.usefixtures("alone")
def test_wrapping_a_prepared_model_for_data_parallelism_is_refused(workshop: Workshop) -> None:
    model = Stack()
    workshop.prepare(model, adamw(model), "squeezed", stage=0)
    with pytest.raises(RuntimeError, match="do not wrap a prepared model"):
        nn.parallel.DistributedDataParallel(model)


def replaced_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer that halves its learning rate in a step of its own."""
    inner = optimizer.step

    def step(self: torch.optim.Optimizer, *args: Any) -> Any:
        self.param_groups[0]["lr"] *= 0.5
        return inner(*args)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


def test_a_step_that_was_replaced_on_the_optimizer_is_refused_in_prepare(workshop: Workshop) -> None:
    model = Stack()
    optimizer = replaced_step(adamw(model))
    refused(
        model,
        optimizer,
        r"`step` of this AdamW .* replaced by 'replaced_step.<locals>.step'.* call prepare first",
        **workshop.fields("host"),
    )
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps it
    refused(
        model,
        optimizer,
        r"`step` of this AdamW .* replaced by 'replaced_step.<locals>.step'.* call prepare first",
        **workshop.fields("host"),
    )


def test_a_compiled_step_is_the_step(pair: Pair) -> None:
    for model, optimizer, step in (
        (pair.plain, pair.plain_optimizer, pair.plain_optimizer.step),
        (pair.model, pair.optimizer, torch.compile(pair.optimizer.step, backend="eager")),
    ):
        for batch in batches(2):
            squared_error(model, batch).backward()
            step()
            optimizer.zero_grad()
    pair.check()
    torch.compiler.reset()
