"""On which streams an accelerator works, shown without one: what comes after what, by a stand-in that keeps account."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outsize.move.buffer import Buffer
from outsize.move.comm import Ranks
from outsize.move.device import Lanes
from outsize.move.lanes import LANES, Lane, Model
from outsize.move.memory import Ledger
from outsize.move.shard import Gathering

NBYTES = 64


class Stream:
    """A queue of an accelerator: what is put in comes after all that is in it, and after the events waited for."""

    def __init__(self, of: Accelerator | None = None) -> None:
        self.stream_id = id(self)
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
        self.compute, self.collectives = Stream(), Stream()
        self.current = self.compute
        self.lanes = Lanes.__new__(Lanes)
        self.lanes.device = torch.device("cpu")
        self.lanes.incoming, self.lanes.outgoing = Stream(self), Stream(self)  # type: ignore[assignment]
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch._C, "_accelerator_maybeExchangeDevice", lambda index: 0)

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
    ranks.rank, ranks.size = 0, 2
    ranks.model = Model(0, False, SimpleNamespace(closed=False, apart={}, said=None))  # type: ignore[arg-type]
    ranks._lanes = {name: Lane(f"0/{name}", [0, 1], ranks.model) for name in LANES}
    for lane in ranks._lanes.values():
        lane.moving, lane.on_device = accelerator, True
        lane.exchange = lambda turn: None
    return ranks


def gather(accelerator: Accelerator, buffer: Any) -> None:
    segments = [SimpleNamespace(dtype="float32", byte_start=0, numel=NBYTES // 4, itemsize=4)]
    shard: Any = SimpleNamespace(
        buffer=buffer, whole=SimpleNamespace(segments=segments), layout=SimpleNamespace(index=0)
    )
    Gathering(shard, ranks_on(accelerator)).start()


def test_a_gathering_runs_beside_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(monkeypatch)
    buffer = Buffer(NBYTES, Ledger(), accelerator.lanes)
    before = Buffer(NBYTES, Ledger(), accelerator.lanes)
    before.materialize()
    before.use()
    accelerator.compute.put("unit before")
    before.leave()
    accelerator.compute.put("this unit's predecessor")  # queued after the unit before was left: nobody waits for it
    before.drop()
    buffer.materialize()
    buffer.write(0, torch.zeros(NBYTES // 2, dtype=torch.uint8))
    accelerator.lanes.incoming.put("own part")  # type: ignore[attr-defined]  # what `fill` has just copied
    gather(accelerator, buffer)
    assert accelerator.collectives.past == {"unit before", "own part", "gather"}
    assert "gather" not in accelerator.compute.past
    buffer.use()
    assert {"own part", "gather"} <= accelerator.compute.past


def test_a_transfer_is_no_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what a rank keeps would depend on what its transfers have reached."""
    buffer = Buffer(NBYTES, Ledger(), Accelerator(monkeypatch).lanes)
    buffer.note_views()
    buffer.materialize()
    moving = buffer.in_place(0, 8)
    assert moving.numel() and not buffer.viewed
    seen = buffer.values[:8]
    assert seen.data_ptr() == moving.data_ptr() and buffer.viewed


def test_what_the_computation_wrote_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(monkeypatch)
    buffer = Buffer(NBYTES, Ledger(), accelerator.lanes)
    buffer.materialize()
    buffer.use()
    accelerator.compute.put("the user's loop writes")
    gather(accelerator, buffer)
    assert "the user's loop writes" in accelerator.collectives.past


def test_a_reduction_runs_behind_its_gradients_and_beside_the_next_units_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Accelerator(monkeypatch)
    accelerator.compute.put("gradients")
    going, _ = ranks_on(accelerator).reduce(torch.zeros(8), unit=0, split=False)
    accelerator.compute.put("the next unit's backward")
    assert accelerator.collectives.past == {"gradients", "reduce"}
    assert "reduce" not in accelerator.compute.past
    going.wait()
    assert "reduce" in accelerator.compute.past


def test_a_gradient_on_the_device_is_read_behind_what_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conveyor's thread has a current stream of its own, which knows nothing of the computation's."""
    accelerator = Accelerator(monkeypatch)
    past: list[frozenset[str]] = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda *args, **how: past.append(accelerator.current.past) or copy(*args)
    )
    accelerator.compute.put("gradient")
    accelerator.lanes.follow(accelerator.lanes.outgoing)  # as the fetch does that runs the update
    with Stream(accelerator):
        accelerator.lanes.bring_home(torch.ones(3), torch.empty(3))
    assert past == [frozenset({"gradient"})]


def test_what_two_streams_read_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(monkeypatch)
    buffer = Buffer(NBYTES, Ledger(), accelerator.lanes)
    buffer.materialize()
    buffer.write(0, torch.zeros(NBYTES, dtype=torch.uint8))
    accelerator.lanes.incoming.put("weights")  # type: ignore[attr-defined]
    buffer.write(0, torch.zeros(0, dtype=torch.uint8))
    beside = Stream(accelerator)
    for stream, work in ((accelerator.compute, "training"), (beside, "evaluation")):
        accelerator.current = stream
        buffer.use()
        assert "weights" in stream.past
        stream.put(work)
    buffer.drop()
    buffer.materialize()
    assert {"training", "evaluation"} <= accelerator.lanes.incoming.past  # type: ignore[attr-defined]
