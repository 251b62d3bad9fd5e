"""On which streams an accelerator works, shown without one: what comes after what, by a stand-in that keeps account."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outsize.move import comm
from outsize.move.buffer import AcceleratorBuffer
from outsize.move.comm import Ranks
from outsize.move.memory import Ledger
from outsize.move.shard import GatherStep

NBYTES = 64


class Stream:
    """A queue of an accelerator: what is put in comes after all that is in it, and after the events waited for."""

    def __init__(self, of: Accelerator | None = None) -> None:
        self.past: frozenset[str] = frozenset()
        self._of = of
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        assert self._of is not None
        self._before.append(self._of.current)
        self._of.current = self

    def __exit__(self, *_: object) -> None:
        assert self._of is not None
        self._of.current = self._before.pop()

    def put(self, name: str) -> None:
        self.past |= {name}

    def record_event(self) -> Stream:
        event = Stream()
        event.past = self.past
        return event

    def wait_event(self, event: Stream) -> None:
        self.past |= event.past


class Accelerator:
    """Its streams, and which is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compute, self.lane, self.collectives = Stream(), Stream(self), Stream()
        self.current = self.compute
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: self.current)

    def _allgather_base(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        return self._collective("gather")

    def allreduce(self, values: list[torch.Tensor], options: Any) -> Any:
        return self._collective("reduce")

    def _collective(self, name: str) -> Any:
        """As NCCL's: on a stream of its own, after what is in the current one; who waits makes the current one wait."""
        self.collectives.wait_event(self.current.record_event())
        self.collectives.put(name)
        over = self.collectives.record_event()
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: self.current.wait_event(over))


def ranks_on(accelerator: Accelerator) -> Any:
    """The first of two ranks, without a job."""
    ranks: Any = Ranks.__new__(Ranks)
    ranks.rank, ranks.size, ranks.step, ranks.counts = 0, 2, 0, comm.Counts()
    ranks._agree = lambda lane, purpose: None
    ranks.waiting = SimpleNamespace(
        promise=lambda lane, times: None,
        until_over=lambda work, purpose, asking: None,
        finish=lambda work, purpose: work.wait(),
    )
    ranks._agreeing, ranks._groups = {"gather": SimpleNamespace()}, {"gather": accelerator, "reduce": accelerator}
    return ranks


def gather(accelerator: Accelerator, buffer: Any) -> None:
    segments = [SimpleNamespace(dtype="float32")]
    shard: Any = SimpleNamespace(
        buffer=buffer,
        buffer_segments=lambda: iter([buffer.flat]),
        whole=SimpleNamespace(segments=segments),
        layout=SimpleNamespace(index=0),
    )
    GatherStep(shard, ranks_on(accelerator)).finish()


def test_a_gathering_runs_beside_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(monkeypatch)
    buffer: Any = AcceleratorBuffer(NBYTES, torch.device("cpu"), Ledger(), accelerator.lane)  # type: ignore[arg-type]
    accelerator.compute.put("unit before")
    buffer.materialize()
    accelerator.compute.put("this unit's predecessor")  # queued after the room was made: nobody waits for it
    buffer.fill(0, torch.zeros(NBYTES // 2, dtype=torch.uint8))
    accelerator.lane.put("own part")  # what `fill` has just copied
    gather(accelerator, buffer)
    assert accelerator.collectives.past == {"unit before", "own part", "gather"}
    assert "gather" not in accelerator.compute.past
    buffer.await_filled()
    assert {"own part", "gather"} <= accelerator.compute.past


def test_what_the_computation_wrote_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(monkeypatch)
    buffer: Any = AcceleratorBuffer(NBYTES, torch.device("cpu"), Ledger(), accelerator.lane)  # type: ignore[arg-type]
    buffer.materialize()
    accelerator.compute.put("the user's loop writes")
    buffer.mark_written()
    gather(accelerator, buffer)
    assert "the user's loop writes" in accelerator.collectives.past


def test_a_reduction_runs_behind_its_gradients_and_beside_the_next_units_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Accelerator(monkeypatch)
    accelerator.compute.put("gradients")
    going = ranks_on(accelerator).all_reduce(torch.zeros(8), unit=0)
    accelerator.compute.put("the next unit's backward")
    assert accelerator.collectives.past == {"gradients", "reduce"}
    assert "reduce" not in accelerator.compute.past
    going.wait()
    assert "reduce" in accelerator.compute.past


def test_a_gradient_on_the_device_is_read_behind_what_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conveyor's thread has a current stream of its own, which knows nothing of the computation's."""
    accelerator = Accelerator(monkeypatch)
    buffer: Any = AcceleratorBuffer(NBYTES, torch.device("cpu"), Ledger(), accelerator.lane)  # type: ignore[arg-type]
    past: list[frozenset[str]] = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: past.append(accelerator.current.past) or tensor)
    accelerator.compute.put("gradient")
    buffer.mark_written()  # as the fetch does that runs the update
    with Stream(accelerator):
        buffer.on_host(torch.ones(3))
    assert past == [frozenset({"gradient"})]
