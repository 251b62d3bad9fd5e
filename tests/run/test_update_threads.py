"""Who waits for an update gives it its cores."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outsize.move.memory import COPIED_NUMEL
from outsize.move.transfer import Promise
from outsize.optim import update
from outsize.optim.native import AdamRule
from outsize.optim.rules import Piece
from tests.conftest import Workshop, batches
from tests.small_models import Stack


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


class _InOneThread(TorchDispatchMode):
    """Notes what torch might do with several threads: all that changes many elements at once."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        large = any(isinstance(each, torch.Tensor) and each.numel() > COPIED_NUMEL for each in tree_leaves(args))
        if large and func._schema.is_mutable and not func._schema.name.startswith("aten::_foreach"):
            self._noted.append(str(func))
        return out


@pytest.mark.parametrize(("tier", "fields"), [("host", {}), ("disk", {}), ("disk", {"activations": "offload"})])
def test_what_runs_beside_the_computation_takes_no_threads_of_torch(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tier: str, fields: Any
) -> None:
    noted: list[str] = []
    run = threading.Thread.run

    def watched(thread: threading.Thread) -> None:
        with _InOneThread(noted):
            run(thread)

    monkeypatch.setattr(threading.Thread, "run", watched)
    pair = workshop.pair(lambda: Stack(width=400, hidden=400, depth=2), tier=tier, **fields)
    pair.train([(torch.randn(256, 400), torch.randn(256, 4)) for _ in range(3)])
    assert noted == []
