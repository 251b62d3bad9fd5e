"""Who waits for an update gives it its cores."""

from __future__ import annotations

import threading

import pytest

from outsize.move.transfer import Promise
from outsize.optim import update
from outsize.optim.native import AdamRule
from outsize.optim.rules import Piece
from tests.conftest import Workshop, batches


def test_a_thread_that_waits_is_counted_until_its_wait_is_over() -> None:
    promise, before = Promise(), Promise.waiting
    thread = threading.Thread(target=promise.wait)
    thread.start()
    while Promise.waiting == before:
        pass
    assert Promise.waiting == before + 1
    promise.keep()
    thread.join()
    assert Promise.waiting == before
    broken = Promise()
    broken.break_(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        broken.wait()
    assert Promise.waiting == before


def test_an_update_that_is_waited_for_takes_all_cores(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    apply = AdamRule.apply

    def noted(rule: AdamRule, piece: Piece) -> dict[str, object]:
        seen.append(piece.threads)
        return apply(rule, piece)

    monkeypatch.setattr(update, "own_cores", lambda: 4)
    monkeypatch.setattr(AdamRule, "apply", noted)
    pair = workshop.pair(tier="host")
    promise, before = Promise(), Promise.waiting
    thread = threading.Thread(target=promise.wait)
    thread.start()
    while Promise.waiting == before:
        pass
    pair.train(batches(4))
    promise.keep()
    thread.join()
    assert set(seen) == {4}
    seen.clear()
    pair.train(batches(4))
    assert set(seen) <= {2, 4}
