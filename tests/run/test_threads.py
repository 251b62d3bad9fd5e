"""One thread at a time uses a prepared model: another one waits for its turn, or is refused with the remedy."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
from benchmarks.checkpoint_threads import save_beside_training
from outsize.run import owner
from tests.comparing import weights
from tests.conftest import Pair, Workshop, batches, squared_error, train


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "host"])
def test_saves_of_another_thread_are_each_of_one_step(kind: str, tmp_path: Path) -> None:
    tally = save_beside_training(tmp_path, 12, kind)
    assert tally.saves == 12
    assert not tally.wrong


def beside(pair: Pair, action: Callable[[], Any], times: int = 5) -> list[Any]:
    """What another thread gets while this one trains."""
    found: list[Any] = []

    def act() -> None:
        try:
            found.extend(action() for _ in range(times))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    data = batches(20)
    expected = train(pair.plain, pair.plain_optimizer, data, clip=1.0)
    train(pair.model, pair.optimizer, data, clip=1.0).close_to(expected)
    thread.join()
    return found


def test_weights_gathered_in_another_thread_are_those_of_one_step(workshop: Workshop, pair: Pair) -> None:
    reference = workshop.pair(tier="disk")
    known = [weights(reference.model)]
    for batch in batches(20):
        train(reference.model, reference.optimizer, [batch], clip=1.0)
        known.append(weights(reference.model))
    for found in beside(pair, lambda: weights(pair.model)):
        assert any(all(torch.equal(found[name], value) for name, value in each.items()) for each in known)


def test_a_state_dict_made_in_another_thread_is_of_one_step(workshop: Workshop) -> None:
    pair = workshop.pair()
    train(pair.plain, pair.plain_optimizer, batches(1))
    train(pair.model, pair.optimizer, batches(1))
    for found in beside(pair, lambda: copy.deepcopy(pair.optimizer.state_dict())):
        assert len({float(entry["step"]) for entry in found["state"].values()}) == 1


def test_who_waits_for_a_block_that_does_not_end_is_refused(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = workshop.pair()
    monkeypatch.setattr(owner, "PATIENCE_SECONDS", 0.05)
    caught: list[BaseException] = []

    def save() -> None:
        try:
            outsize.save(tmp_path / "saved", pair.model, pair.optimizer)
        except BaseException as error:
            caught.append(error)

    with outsize.gathered(pair.model):
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
    assert "outsize.save waits for an outsize.gathered block of another thread" in str(caught[0])
    pair.train(batches(2))
    outsize.save(tmp_path / "saved", pair.model, pair.optimizer)


def test_after_a_backward_that_raised_another_thread_has_its_turn(workshop: Workshop) -> None:
    pair = workshop.pair()

    def fail(_: Any) -> None:
        raise ArithmeticError

    inputs = batches(1)[0][0].requires_grad_()
    loss = squared_error(pair.model, (inputs, batches(1)[0][1]))
    inputs.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    pair.optimizer.zero_grad()
    thread = threading.Thread(target=pair.train, args=(batches(2),))
    thread.start()
    thread.join()
    pair.train(batches(2))
