"""Exceptions and interrupts in mid-step: the next step is right, or the run stops."""

from typing import Any

import pytest
import torch

import outsize
from outsize.run.activations import in_backward
from tests.comparing import gradients
from tests.conftest import AT_REST_TIERS, Pair, Workshop, batches, prepared, squared_error, train


class Boom(Exception):
    """Raised by the user's code."""


def fail(*_: Any) -> None:
    raise Boom


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_after_an_exception_in_a_forward_the_next_step_is_right(
    workshop: Workshop, tier: str, error: type[BaseException], activations: str
) -> None:
    def interrupt(*_: Any) -> None:
        raise error

    pair = workshop.pair(tier=tier, activations=activations)
    pair.train(batches(2))
    handle = pair.model.blocks[2].up.register_forward_hook(interrupt)
    for _ in range(2):
        with pytest.raises(error):
            pair.model(batches(1)[0][0])
    handle.remove()
    pair.train(batches(3), clip=0.5)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_after_an_exception_in_a_backward_the_next_step_is_right(
    workshop: Workshop, tier: str, activations: str
) -> None:
    pair = workshop.pair(tier=tier, activations=activations)
    pair.train(batches(2))
    for name in ("blocks.1.up.weight", "blocks.2.norm.bias"):
        handle = pair.model.get_parameter(name).register_hook(fail)
        with pytest.raises(Boom):
            squared_error(pair.model, batches(1)[0]).backward()
        handle.remove()
        pair.optimizer.zero_grad()
        pair.train(batches(3), clip=0.5)


def test_after_an_exception_in_a_recomputation_the_next_step_is_right(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier, activations="recompute")
    handle = pair.model.blocks[1].up.register_forward_hook(lambda *_: fail() if in_backward() else None)
    loss = squared_error(pair.model, batches(1)[0])
    with pytest.raises(Boom):
        loss.backward()
    handle.remove()
    pair.optimizer.zero_grad()
    pair.train(batches(3), clip=0.5)


def test_after_an_exception_in_step_hooks_the_next_step_is_right(pair: Pair) -> None:
    handle = pair.optimizer.register_step_pre_hook(fail)
    squared_error(pair.model, batches(1)[0]).backward()
    with pytest.raises(Boom):
        pair.optimizer.step()
    handle.remove()
    pair.optimizer.zero_grad()
    pair.train(batches(3))


def test_gradients_that_arrived_before_an_exception_in_a_backward_stay_as_in_torch(pair: Pair) -> None:
    for model, _ in pair.both:
        handle = model.blocks[1].up.weight.register_hook(fail)
        with pytest.raises(Boom):
            squared_error(model, batches(1)[0]).backward()
        handle.remove()
    ours, theirs = gradients(pair.model), gradients(pair.plain)
    torch.testing.assert_close(ours["head.weight"], theirs["head.weight"])
    torch.testing.assert_close(ours["blocks.2.up.weight"], theirs["blocks.2.up.weight"])
    assert ours["blocks.0.up.weight"] is None and theirs["blocks.0.up.weight"] is None


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_step_that_is_interrupted_when_units_are_marked_stops_the_run(
    workshop: Workshop, pair: Pair, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.train(batches(2))
    streamer, marked = prepared(pair.model).engine.streamer, []
    owe = streamer.owe

    def interrupted(*args: Any) -> None:
        marked.append(args)
        if len(marked) == 2:
            raise error
        owe(*args)

    squared_error(pair.model, batches(1)[0]).backward()
    with monkeypatch.context() as patch:
        patch.setattr(streamer, "owe", interrupted)
        with pytest.raises(error):
            pair.optimizer.step()
    with pytest.raises(RuntimeError, match="training stopped after an error"):
        outsize.save(workshop.disk.parent / "half", pair.model, pair.optimizer)


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_step_that_is_interrupted_before_units_are_marked_may_be_tried_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model, optimizer in pair.both:
        train(model, optimizer, batches(2))
        squared_error(model, batches(1)[0]).backward()
        squared_error(model, batches(2)[1]).backward()
    streamer, settled = prepared(pair.model).engine.streamer, []
    settle = streamer.settle

    def interrupted(*args: Any) -> None:
        settled.append(args)
        if len(settled) == 3:
            raise KeyboardInterrupt
        settle(*args)

    with monkeypatch.context() as patch:
        patch.setattr(streamer, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.optimizer.step()
    for _, optimizer in pair.both:
        optimizer.step()
        optimizer.zero_grad()
    pair.train(batches(2))
