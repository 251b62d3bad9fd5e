"""A gradient at rest that the user keeps over later backwards never passes for one of theirs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from outsize.run.grads import RestingGrad
from tests.conftest import AT_REST_TIERS, Pair, batches, squared_error
from tests.ranks.launching import run_on_ranks
from tests.ranks.training import Setting, batch, made

BACKWARDS = 4

at_rest = pytest.mark.parametrize("tier", AT_REST_TIERS)


def keep(pair: Pair, zero: Callable[[], None]) -> list[Tensor]:
    """The gradient of one weight after each of several backwards."""
    kept = []
    for each in batches(BACKWARDS):
        zero()
        squared_error(pair.model, each).backward()
        kept.append(pair.model.head.weight.grad)
    return kept


@at_rest
@pytest.mark.parametrize("earlier", range(1, BACKWARDS))
def test_a_step_with_a_gradient_of_an_earlier_backward_is_refused(pair: Pair, earlier: int) -> None:
    kept = keep(pair, pair.optimizer.zero_grad)
    pair.model.head.weight.grad = kept[-1 - earlier]
    with pytest.raises(RuntimeError, match=r"'head\.weight' was at rest and a later backward has taken its place"):
        pair.optimizer.step()


@at_rest
def test_every_question_to_an_earlier_gradient_is_refused(pair: Pair) -> None:
    *earlier, last = keep(pair, pair.optimizer.zero_grad)
    questions: list[Callable[[RestingGrad], object]] = [
        lambda grad: grad.norm(),
        lambda grad: grad.norm(1.0),
        lambda grad: torch.nn.utils.get_total_norm([grad]),
        lambda grad: grad.finite,
        lambda grad: grad.add_(torch.ones(4, 16)),
        lambda grad: grad.mul_(0.5),
        lambda grad: grad.clamp_(-1.0, 1.0),
        lambda grad: grad.zero_(),
    ]
    for ask in questions:
        for grad in earlier:
            with pytest.raises(RuntimeError, match="a later backward has taken its place"):
                ask(grad)
        ask(last)


@at_rest
def test_keeping_gradients_leaves_the_training_as_it_is(pair: Pair) -> None:
    kept: list[list[Tensor | None]] = []
    for model, optimizer in pair.both:
        for each in batches(BACKWARDS):
            squared_error(model, each).backward()
            kept.append([param.grad for param in model.parameters()])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


@at_rest
def test_a_gradient_kept_as_that_of_another_tensor_is_not_filled_again(pair: Pair) -> None:
    holder = nn.Parameter(torch.zeros(4, 16))
    squared_error(pair.model, batches(1)[0]).backward()
    holder.grad = pair.model.head.weight.grad
    keep(pair, pair.optimizer.zero_grad)
    with pytest.raises(RuntimeError, match="a later backward has taken its place"):
        holder.grad.norm()


@at_rest
def test_gradients_that_nobody_keeps_are_made_once(pair: Pair) -> None:
    """See Note [Small things that live long]."""
    shown = []
    for each in batches(6):
        squared_error(pair.model, each).backward()
        torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 0.3)
        pair.optimizer.step()
        shown.append([weakref.ref(param.grad) for param in pair.model.parameters()])
        pair.optimizer.zero_grad()
    for first, *others in zip(*shown[::2], strict=True):
        assert first() is not None
        assert all(other() is first() for other in others)


def keep_on_ranks(settings: list[Setting], disk: str) -> list[tuple[list[str], bool]]:
    """What is said of each gradient that was kept, and whether one that was not kept was filled again."""
    found = []
    for setting in settings:
        model, optimizer = made(setting, disk)
        kept, unkept = [], []
        for step in range(BACKWARDS):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
            kept.append(model.head.weight.grad)
            unkept.append(weakref.ref(model.head.bias.grad))
        found.append(([told(grad) for grad in kept], unkept[0]() is unkept[2]() is not None))
    return found


def told(grad: Tensor) -> str:
    try:
        return f"norm {float(grad.norm()) > 0}"
    except RuntimeError as error:
        return str(error)


def test_on_two_ranks_a_kept_gradient_is_refused_and_others_are_filled_again(tmp_path: Path) -> None:
    settings = [Setting(0), Setting(2), Setting(3), Setting(3, "disk")]
    for found in run_on_ranks(2, keep_on_ranks, settings, str(tmp_path)):
        for said, filled_again in found:
            assert all("a later backward has taken its place" in each for each in said[:-1])
            assert said[-1] == "norm True"
            assert filled_again
