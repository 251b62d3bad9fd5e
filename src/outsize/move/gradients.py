"""Gradients at rest outside the computing device: one flat buffer a unit, in memory or on disk.

They rest in the dtype in which backward produced them while there is one contribution; a second one is added in fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import torch

from outsize.move.conveyor import Job
from outsize.move.grad_ops import GradOps, accumulate_, wide_dtype
from outsize.move.memory import HostBuffer, Ledger
from outsize.move.outbox import Outbox
from outsize.move.store import DTYPES, OWN_BYTES, STATE_BYTES, DiskStore, Store
from outsize.move.transfer import Transfer
from outsize.planning.layout import PAGE_ELEMENTS, ArrayLayout, Slot, UnitLayout, array_layout, round_up


@final
class GradShard:
    """The gradients of one unit at rest on host or disk.

    They are collected in `flat`. On the host tier that is where they rest; on the disk tier it is written out when the
    unit's backward is over, and dropped.
    """

    def __init__(
        self,
        layout: UnitLayout,
        store: Store | None,
        ledger: Ledger,
        outbox: Outbox | None = None,
        in_tiles: bool = False,
    ) -> None:
        """`outbox`: through which gradients come from an accelerator. See Note [Gradients leave]. Those that come
        `in_tiles` rest in fp32 or wider from the first contribution on."""
        self.layout = layout
        self._outbox = outbox
        self._landing: Job | None = None  # what brings the last gradient that is on its way
        self.store = store  # the disk store; None on the host tier, where the flat buffer is the store
        self.wide = False
        self.in_memory = False
        self.at_rest: set[str] = set()
        self._used = {index for index, segment in enumerate(layout.segments) if segment.trainable}
        self._own = array_layout(layout, STATE_BYTES if in_tiles else OWN_BYTES)
        self._in_tiles = in_tiles
        self._wide = array_layout(layout, STATE_BYTES)
        self._ledger = ledger
        self._flat = HostBuffer(self._wide.nbytes)
        self._places: dict[bool, dict[str, torch.Tensor]] = {False: {}, True: {}}  # of each gradient, as they are wide
        self._norms = None if outbox is None else HostBuffer(8 * len(layout.slots), pinned=True)  # of sums, by slot
        self._account = "host/grads" if store is None else "host/grads in flight"
        self._counted = 0
        self._hold_disk()

    def _hold_disk(self) -> None:
        if isinstance(self.store, DiskStore):
            self.store.hold(self.sum_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the contents as they are now, padding included."""
        return sum(nbytes for _, nbytes in self._ranges(self.contents))

    @property
    def sum_bytes(self) -> int:
        """Bytes of the contents once something was added to one of them."""
        return sum(nbytes for _, nbytes in self._ranges(self._wide))

    @property
    def contents(self) -> ArrayLayout:
        """Where each gradient lies in the contents as they are now."""
        return self._wide if self.wide else self._own

    def dtype(self, slot: Slot) -> torch.dtype:
        own = DTYPES[slot.dtype]
        return wide_dtype(own) if self.wide or self._in_tiles else own

    def span(self, start: int, end: int) -> tuple[int, int]:
        """(first byte, bytes) of the elements [start, end) in the contents as they are now."""
        return self.contents.span(start, end)

    def view(self, start: int, end: int) -> torch.Tensor:
        """Where the elements [start, end) lie in memory. The conveyor, whose steps end in order, finds there what was
        on its way; others call `await_landed`."""
        assert self.in_memory, "the gradients are not in memory"
        first, nbytes = self.span(start, end)
        return self._flat.bytes[first : first + nbytes]

    def of(self, slot: Slot) -> torch.Tensor:
        """One gradient in memory, as it rests (its operations not applied), 1-D."""
        self.await_landed()
        return self._place(slot)

    def _place(self, slot: Slot) -> torch.Tensor:
        assert self.in_memory, "the gradients are not in memory"
        places = self._places[self.wide]
        if slot.name not in places:
            places[slot.name] = self.view(slot.offset, slot.end).view(self.dtype(slot))
        return places[slot.name]

    def dispatch(self) -> None:
        """Let the conveyor bring what is on its way from an accelerator, before what it is asked for next."""
        if self._outbox is not None:
            self._outbox.dispatch()

    def await_landed(self) -> None:
        """Block until all gradients are in place. Not for the conveyor's thread, which brings them."""
        if self._landing is not None:
            if not self._landing.done():
                self.dispatch()
            self._landing.wait()
            self._landing = None

    def copy_of(self, slot: Slot) -> torch.Tensor:
        """A copy of one gradient, as it rests, 1-D. Blocks."""
        if self.in_memory:
            return self.of(slot).clone()
        assert self.store is not None, "no gradient rests here"
        return self.store.get(*self.span(slot.offset, slot.end)).view(self.dtype(slot))

    def open(self, live: Collection[str]) -> None:
        """Make `flat` hold the contents. `live` names the gradients at rest that are still wanted."""
        wanted = self.at_rest & set(live)
        if self.in_memory and (wanted or not self.wide or self.store is not None):
            return
        self.at_rest = wanted
        if not wanted:
            self.wide = False
        self.in_memory = True
        self._count(self.nbytes)
        if wanted and self.store is not None:
            for first, nbytes in self._ranges(self.contents):
                self.store.read(first, self._flat.bytes[first : first + nbytes]).wait()

    def is_open_for(self, slot: Slot) -> bool:
        """Whether a first contribution to this gradient can be stored as things are."""
        return self.in_memory and not self.wide and slot.segment in self._used

    def bytes_beside(self, slot: Slot) -> int:
        """What the contents grow by for a gradient where there were none: of a parameter that was not trainable."""
        segment = self.layout.segment_of(slot)
        return 0 if slot.segment in self._used else self.span(segment.start, segment.end)[1]

    def use(self, slot: Slot) -> None:
        """Make the part of the unit that the parameter lies in one that has gradients."""
        if slot.segment not in self._used:
            self._used.add(slot.segment)
            self._count(self.nbytes if self.in_memory else 0)
            self._hold_disk()

    def norm_of_sum(self, slot: Slot) -> torch.Tensor:
        """The norm of a gradient to which something was added, fp32 or fp64, 0-d in pinned memory. Blocks until the sum
        is there."""
        self.await_landed()
        return self._norm(slot)

    def _norm(self, slot: Slot) -> torch.Tensor:
        assert self._norms is not None, "norms of sums come with gradients from an accelerator"
        dtype = torch.float64 if self.dtype(slot) is torch.float64 else torch.float32
        first = 8 * self.layout.slots.index(slot)
        return self._norms.bytes[first : first + dtype.itemsize].view(dtype)[0]

    def place_of_first(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor | None:
        """Where the caller copies a first contribution to. None where `put` must store it (from an accelerator, or of
        another dtype than what rests), or `open` comes first."""
        if self._outbox is not None or not self.is_open_for(slot):
            return None
        place = self._place(slot)
        if place.dtype is not grad.dtype:
            return None
        self.at_rest.add(slot.name)
        return place

    def put(self, slot: Slot, grad: torch.Tensor, previous: GradOps | None) -> None:
        """Store a contribution; `previous` holds the operations on what rests there already. Of a contribution from an
        accelerator that is added to others, `norm_of_sum` has the norm of the sum."""
        self.use(slot)
        source = grad.reshape(-1)
        second = previous is not None and wide_dtype(grad.dtype) is not grad.dtype
        restored = grad.dtype.itemsize > self.dtype(slot).itemsize  # a sum of several, from a checkpoint
        if (second or restored) and not self.wide:
            self._widen()
        self.at_rest.add(slot.name)
        target = self._place(slot)
        if self._outbox is not None and source.device.type != "cpu":
            if not source.numel():  # nothing is sent, and nothing would ever arrive
                return
            self._landing = self._outbox.send(source, target, previous, None if previous is None else self._norm(slot))
            return
        self.await_landed()
        if previous is None:
            target.copy_(source)
        else:
            accumulate_(target, previous, source.to(target.device))

    def place_of_tile(self, slot: Slot, first: int, numel: int) -> torch.Tensor:
        """Where some elements of a gradient rest in host memory, 1-D."""
        assert self.store is None
        if not self.in_memory:
            self.open(())
        self.at_rest.add(slot.name)
        return self._place(slot)[first : first + numel]

    def copy_of_tile(self, slot: Slot, first: int, numel: int, read: bool) -> torch.Tensor:
        """Memory for some elements of a gradient on disk, in whole pages, 1-D; with what rests there if `read`."""
        assert self.store is not None
        self.at_rest.add(slot.name)
        start, nbytes = self.span(slot.offset + first, slot.offset + first + round_up(numel, PAGE_ELEMENTS))
        content = HostBuffer(nbytes).bytes
        if read:
            self.store.read(start, content).wait()
        return content.view(self.dtype(slot))

    def write_tile(self, slot: Slot, first: int, content: torch.Tensor) -> Sequence[Transfer]:
        """Start to write what `copy_of_tile` gave."""
        assert self.store is not None
        start = self.span(slot.offset + first, slot.offset + first + content.numel())[0]
        return [self.store.write(start, content.view(torch.uint8))]

    def write(self) -> Sequence[Transfer]:
        """Start to write the contents to disk."""
        assert self.store is not None and self.in_memory
        return [
            self.store.write(first, self._flat.bytes[first : first + nbytes])
            for first, nbytes in self._ranges(self.contents)
        ]

    def drop(self) -> None:
        """Give the memory back; what was not written is lost."""
        if self.in_memory:
            self.in_memory = False
            self._flat.drop()
            self._count(0)

    def close(self) -> None:
        self.drop()
        if self.store is not None:
            self.store.drop()
        if self._norms is not None:
            self._norms.close()
            self._norms = None

    def _widen(self) -> None:
        """Turn the contents into fp32: exact, and the same bytes serve every later contribution."""
        self.await_landed()
        contents = [(slot, self.of(slot)) for slot in self.layout.slots if slot.name in self.at_rest]
        wide = HostBuffer(self._wide.nbytes)
        old, self._flat = self._flat, wide
        self._places = {False: {}, True: {}}
        self.wide = True
        for slot, value in contents:
            self._place(slot).copy_(value)
        self._count(self.nbytes)
        del contents, old

    def _ranges(self, contents: ArrayLayout) -> list[tuple[int, int]]:
        """(first byte, bytes) of each segment that has gradients."""
        segments = [self.layout.segments[index] for index in sorted(self._used)]
        return [contents.span(segment.start, segment.end) for segment in segments]

    def _count(self, nbytes: int) -> None:
        self._ledger.add(self._account, nbytes - self._counted)
        self._counted = nbytes
