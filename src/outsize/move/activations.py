"""Where a layer's inputs lie between its forward and its backward: in host memory or on disk.

The backward wants last what was saved first. So the call that saved last keeps its tensors where they are, and while
one call's tensors are used, those of the call before it come back.
"""

from __future__ import annotations

import errno
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, final

import torch

from outsize.move.conveyor import Conveyor, Job, Step
from outsize.move.device import EventTransfer, Lanes
from outsize.move.disk import StripedFile
from outsize.move.generations import crc32c, merged
from outsize.move.memory import PAGE_BYTES, HostBuffer, Ledger, copy
from outsize.move.storages import MadeOf
from outsize.move.transfer import ARRIVED, Transfer
from outsize.planning.errors import RoomError
from outsize.planning.layout import extent, round_up
from outsize.planning.sizes import format_bytes

LEAST_BYTES = 256
"""What is smaller stays where it is."""

PROBED_BYTES = 8 << 20
"""Which are moved out and back to see how fast that is."""


@final
class HostPlace:
    """Pinned memory beside an accelerator, for bytes (uint8, 1-D) that come and go. Each block is used again for as
    many bytes."""

    def __init__(
        self, lanes: Lanes, ledger: Ledger, most: Callable[[], int], before_pinning: Callable[[], None] | None = None
    ) -> None:
        """`most`: how many bytes more there may be now. `before_pinning` waits for collectives: pinning waits for the
        whole device, and a collective for other ranks, which may be pinning."""
        self._lanes, self._ledger, self._most = lanes, ledger, most
        self._before_pinning = before_pinning
        self._free: deque[tuple[HostBuffer, Transfer]] = deque()  # each with the last copy out of it

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more can be put, as far as one can tell."""
        return nbytes <= self._most() + sum(block.nbytes for block, _ in list(self._free))

    def put(self, source: torch.Tensor) -> tuple[Any, Transfer]:
        """Start to copy `source`; where it will lie, and a transfer that is over when `source` has been read."""
        block = self._take(source.numel())
        self._lanes.follow(self._lanes.outgoing)
        going = self._lanes.bring_home(source, block.bytes)
        return [block, going], going

    def get(self, where: Any, out: torch.Tensor) -> Callable[[], None]:
        """Start to copy into `out`; returns a function after which the current stream may use it."""
        block, before = where
        self._lanes.follow(self._lanes.incoming)
        self._lanes.incoming.wait_event(before.event)
        with self._lanes.on(self._lanes.incoming):
            out.copy_(block.bytes, non_blocking=True)
        where[1] = EventTransfer(self._lanes.incoming.record_event())
        return partial(self._lanes.wait_for, where[1].event)

    def free(self, where: Any) -> None:
        """The bytes are not wanted any more. The collector calls this on any thread."""
        self._free.append(tuple(where))

    def _take(self, nbytes: int) -> HostBuffer:
        for _ in range(len(self._free)):
            block, reading = self._free.popleft()
            if block.nbytes == nbytes:
                reading.wait()
                return block
            self._free.append((block, reading))
        while self._free and nbytes > self._most():
            self._close_one()
        if nbytes > self._most():
            used = self._ledger.now.get("host/activations", 0)
            raise RoomError(
                errno.ENOMEM,
                f"activations of {format_bytes(nbytes)} more do not fit in host_memory, where {format_bytes(used)} of "
                f"them lie already; raise host_memory by {format_bytes(nbytes - self._most())} at least, name a disk, "
                f'or pass activations="recompute"',
                None,
                "host_memory",
                nbytes,
                max(self._most(), 0),
            )
        if self._before_pinning is not None:
            self._before_pinning()
        self._ledger.add("host/activations", nbytes)
        return HostBuffer(nbytes, pinned=True)

    def _close_one(self) -> None:
        block, reading = self._free.popleft()
        reading.wait()
        block.close()
        self._ledger.remove("host/activations", block.nbytes)

    def close(self) -> None:
        while self._free:
            self._close_one()


@final
class DiskPlace:
    """Space of a file for such bytes: a hole where nothing lies. Bytes pass through the slabs of the conveyor."""

    def __init__(self, file: StripedFile, conveyor: Conveyor, lanes: Lanes | None, ledger: Ledger) -> None:
        self._file, self._conveyor, self._lanes, self._ledger = file, conveyor, lanes, ledger
        self._holes = [(0, file.nbytes)]
        self._freed: deque[tuple[int, int]] = deque()  # the collector adds to it at any time

    def has_room(self, nbytes: int) -> bool:
        return nbytes <= self._file.nbytes - self._ledger.now.get("disk/activations", 0)

    def put(self, source: torch.Tensor) -> tuple[Any, Transfer]:
        start = self._take(round_up(source.numel(), PAGE_BYTES))
        if self._lanes is not None:
            self._lanes.follow(self._lanes.outgoing)
        sums: list[int] = []  # of each chunk
        job = self._conveyor.submit(Job(self._away(at, [part], sums) for at, part in self._chunks(start, source)))
        return (start, source.numel(), sums, job), job

    def get(self, where: Any, out: torch.Tensor) -> Callable[[], None]:
        start, _, sums, written = where
        if self._lanes is not None:
            self._lanes.follow(self._lanes.incoming)
        chunks = zip(self._chunks(start, out), sums, strict=True)  # whose sums are there once they are written
        steps = (self._back(at, part, total) for (at, part), total in chunks)
        return partial(self._arrive, self._conveyor.submit(Job(steps, after=[written])))

    def _arrive(self, reading: Job) -> None:
        if not self._conveyor.is_here:  # the collector may run there; the job would wait for itself
            reading.wait()
            if self._lanes is not None:
                self._lanes.wait_for(self._lanes.incoming.record_event())

    def free(self, where: Any) -> None:
        nbytes = round_up(where[1], PAGE_BYTES)
        self._ledger.remove("disk/activations", nbytes)
        self._freed.append((where[0], nbytes))

    def close(self) -> None:
        self._file.unlink()
        self._file.close()

    def _take(self, nbytes: int) -> int:
        while self._freed:
            self._holes.append(self._freed.popleft())
        self._holes = merged(self._holes)
        for at, (start, size) in enumerate(self._holes):
            if size >= nbytes:
                self._holes[at] = start + nbytes, size - nbytes
                self._ledger.add("disk/activations", nbytes)
                return start
        used, largest = self._ledger.now.get("disk/activations", 0), max((size for _, size in self._holes), default=0)
        raise RoomError(
            errno.ENOSPC,
            f"activations of {format_bytes(nbytes)} more do not fit: {format_bytes(used)} of them lie on disk already, "
            f"and disk_space leaves {format_bytes(self._file.nbytes)} for them; raise disk_space or free space there, "
            f'by {format_bytes(nbytes - largest)} at least, or pass activations="recompute"',
            str(self._file.path),
            "disk_space",
            nbytes,
            largest,
        )

    def _chunks(self, start: int, content: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """What a slab holds at a time, and where it lies in the file."""
        size = self._conveyor.slab_bytes
        return ((start + at, content[at : at + size]) for at in range(0, content.numel(), size))

    def _away(self, at: int, held: list[torch.Tensor], sums: list[int]) -> Step:
        """Bytes on their way to the file. Once a slab has them they are `held` no more."""
        taken, nbytes = [], held[0].numel()

        def stage(slabs: Sequence[torch.Tensor]) -> Sequence[Transfer]:
            taken.append(slabs[0][: round_up(nbytes, PAGE_BYTES)])
            if self._lanes is not None:
                return [self._lanes.bring_home(held[0], slabs[0][:nbytes])]
            copy(slabs[0][:nbytes], held[0])
            return ()

        def write() -> Sequence[Transfer]:
            held.clear()
            sums.append(crc32c(taken[0][:nbytes]))
            return [self._file.write(at, taken[0])]

        return Step(stage, write, 1)

    def _back(self, at: int, part: torch.Tensor, total: int) -> Step:
        """Bytes on their way from the file, which have the checksum `total`."""
        taken = []

        def read(slabs: Sequence[torch.Tensor]) -> Sequence[Transfer]:
            taken.append(slabs[0][: part.numel()])
            return [self._file.read(at, slabs[0][: round_up(part.numel(), PAGE_BYTES)])]

        def deliver() -> Sequence[Transfer]:
            if crc32c(taken[0]) != total:
                raise OSError(errno.EIO, f"activations at byte {at} are not what was written there", self._file.path)
            if self._lanes is None:
                copy(part, taken[0])
                return ()
            with self._lanes.on(self._lanes.incoming):
                part.copy_(taken[0], non_blocking=True)
            return [EventTransfer(self._lanes.incoming.record_event())]

        return Step(read, deliver, 1)


Place = HostPlace | DiskPlace


@final
class _Span:
    """Some bytes of one storage: here, or at a place."""

    def __init__(self, content: torch.Tensor, tensor: torch.Tensor) -> None:
        self.nbytes = content.numel()
        self._here: torch.Tensor | None = content  # the bytes, uint8
        self._original: torch.Tensor | None = tensor  # tells of writes in place; None once the bytes have left
        self._version = tensor._version
        self._device = tensor.device
        self._place: Place | None = None
        self._where: Any = None
        self._leaving: Transfer = ARRIVED
        self._arrive: Callable[[], None] | None = None  # while the bytes come back
        self._stale = False
        self.uses = 0  # how many times the bytes are wanted

    @property
    def leaves(self) -> bool:
        """Whether the bytes are on their way out."""
        return self._place is not None and self._original is not None

    def send(self, place: Place) -> None:
        """Start to move the bytes out, once; `let_go` ends it."""
        if self._place is None and self._here is not None:
            self._where, self._leaving = place.put(self._here)
            self._place = place

    def let_go(self) -> None:
        """Wait until the bytes have been read that are on their way out, and keep them no more."""
        if self.leaves:
            self._leaving.wait()
            self._check()
            self._here = self._original = None

    def come(self) -> None:
        """Start to bring the bytes back, where they are away and will be used."""
        if self.uses > 0:
            self._bring()

    def lend(self) -> torch.Tensor:
        """The bytes, for the current stream. Raises `RuntimeError` where they were written to."""
        self._check()
        if self._stale:
            raise RuntimeError(
                "an input of a layer was written to in place after the layer's forward and before its backward, which "
                'needs it as it was: make the operation not in-place, or pass activations="keep"'
            )
        if self.leaves:
            self._leaving.wait()  # whoever reads the bytes next gives their memory back
        self._bring()
        content = self._here
        assert content is not None
        if self._arrive is not None:
            self._arrive()
            self._arrive = None
        self.uses -= 1
        if self._place is not None and self.uses <= 0:  # the place has the bytes: the memory is the last reader's
            self._here = self._original = None
        return content

    def _bring(self) -> None:
        if self._here is None:
            assert self._place is not None
            self._here = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
            self._arrive = self._place.get(self._where, self._here)

    def _check(self) -> None:
        if self._original is not None and self._original._version != self._version:
            self._stale = True

    def __del__(self) -> None:
        with suppress(Exception):  # the model may be closed
            if self._arrive is not None:
                self._arrive()
            if self._place is not None:
                self._place.free(self._where)


Packed = tuple["SavedCall", _Span, torch.dtype, torch.Size, tuple[int, ...]]


@final
class SavedCall:
    """What one call of a layer saves. `pack` and `unpack` are hooks for `torch.autograd.graph.saved_tensors_hooks`."""

    def __init__(self, store: ActivationStore, before: SavedCall | None) -> None:
        self._store = store
        self._before = None if before is None else weakref.ref(before)
        self.spans: list[_Span] = []

    def pack(self, tensor: torch.Tensor) -> Packed | torch.Tensor:
        """Keeps the tensor itself where it is small, or cannot be moved as plain bytes."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.numel():
            return tensor
        if tensor.device != self._store.device or tensor.is_conj() or tensor.is_neg():
            return tensor
        tensor = tensor.detach()
        numel = extent(tensor.size(), tensor.stride())
        if numel * tensor.itemsize < LEAST_BYTES:
            return tensor
        span = self._store.span_of(tensor, numel)
        self.spans.append(span)
        span.uses += 1
        return self, span, tensor.dtype, tensor.size(), tensor.stride()

    def unpack(self, packed: Packed | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        _, span, dtype, size, stride = packed
        for each in self.spans:
            each.come()
        try:
            content = span.lend()
        except OSError:
            self._store.begin_anew()
            raise
        earlier = None if self._before is None else self._before()
        for each in () if earlier is None else earlier.spans:
            each.come()
        self._store.forget_gone()
        return content.view(dtype).as_strided(size, stride)


@final
class ActivationStore:
    """The inputs of layers, saved call by call. Those of three calls at most are in memory at once."""

    def __init__(self, device: torch.device, host: HostPlace | None, disk: DiskPlace | None) -> None:
        """With both places, the host is filled first."""
        self.device = device
        self._host, self._disk = host, disk
        self._newest: weakref.ref[SavedCall] | None = None
        self._leaving: list[_Span] = []
        self._spans: MadeOf[_Span] = MadeOf()

    def call(self) -> SavedCall:
        """The next call. The tensors of the call before it move out; those of earlier calls are out by now."""
        try:
            for span in self._leaving:
                span.let_go()
        except OSError:
            self.begin_anew()
            raise
        newest = None if self._newest is None else self._newest()
        self._leaving = [] if newest is None else list(newest.spans)
        for span in self._leaving:
            span.send(self._place_for(span.nbytes))
        call = SavedCall(self, newest)
        self._newest = weakref.ref(call)
        return call

    def begin_anew(self) -> None:
        """After an error of a place: what is on its way ends, and the next step uses nothing of this one."""
        leaving, self._leaving = self._leaving, []
        for span in leaving:
            with suppress(OSError):
                span.let_go()
        self._spans, self._newest = MadeOf(), None

    def span_of(self, tensor: torch.Tensor, numel: int) -> _Span:
        """The bytes of the tensor, `numel` elements from first to last: one span for all calls that save them."""
        place = tensor.storage_offset() * tensor.itemsize, numel * tensor.itemsize
        return self._spans.get(
            tensor, place, lambda: _Span(tensor.as_strided((numel,), (1,)).view(torch.uint8), tensor)
        )

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more can move out."""
        return any(place is not None and place.has_room(nbytes) for place in (self._host, self._disk))

    @cached_property
    def seconds_a_byte(self) -> float:
        """What one byte takes one way, measured once: some are moved out and back."""
        if not self.has_room(PROBED_BYTES):
            return math.inf
        content = torch.zeros(PROBED_BYTES, dtype=torch.uint8, device=self.device)
        span = _Span(content, content)
        began = time.perf_counter()
        span.send(self._place_for(PROBED_BYTES))
        span.let_go()
        span.uses = 1
        span.lend()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return (time.perf_counter() - began) / (2 * PROBED_BYTES)

    def forget_gone(self) -> None:
        """Keep nothing that is not on its way out any more."""
        self._leaving = [span for span in self._leaving if span.leaves]

    def _place_for(self, nbytes: int) -> Place:
        if self._host is None or (self._disk is not None and not self._host.has_room(nbytes)):
            assert self._disk is not None
            return self._disk
        return self._host

    def close(self) -> None:
        for place in (self._host, self._disk):
            if place is not None:
                place.close()
