"""The gradients of one unit with several ranks: collected whole, and reduced, so that each rank keeps its slice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch

from outsize.move.lanes import Going
from outsize.move.shard import UnitShard
from outsize.move.store import DTYPES
from outsize.run.buffers import collecting_dtype, collecting_sizes, unused
from outsize.run.grads import RestingGrad
from outsize.run.local import expect_dense
from outsize.run.reduction import Reduction
from outsize.run.unit import Unit

if TYPE_CHECKING:
    from outsize.run.room import Room
    from outsize.run.unit_gradients import UnitGradients


@final
class WholeGradients:
    """The whole gradients of one unit while they are collected on one rank, a flat buffer a segment."""

    def __init__(
        self,
        shard: UnitShard,
        reduction: Reduction,
        make_room: Callable[[int], None],
        home: torch.Tensor | None = None,
    ) -> None:
        """`make_room` for a buffer, of so many bytes; `home`: memory to collect the gradients in, in place of one."""
        self._shard = shard
        self._ranks, self._buffers, dtype = reduction.ranks, reduction.buffers, reduction.dtype
        sizes = collecting_sizes(shard.whole, dtype)
        self._taken = home is None
        self._memory = self._buffers.take(sum(sizes), shard.device, make_room) if home is None else home
        self._flat: list[torch.Tensor] = []
        first = 0
        for segment, nbytes in zip(shard.whole.segments, sizes, strict=True):
            flat = self._memory[first : first + nbytes].view(collecting_dtype(segment.dtype, dtype))
            self._flat.append(flat)
            first += nbytes
        self.names: set[str] = set()
        self._sums: dict[int, torch.Tensor] = {}  # by segment; there once what goes on is over
        self._asked: tuple[Sequence[str], torch.Tensor] | None = None  # parameters, and which are there
        self._going: list[Going] = []  # in the group
        self._among_copies: list[Going] | None = None  # then among the copies of the model, which have seen other data

    def add(self, name: str, grad: torch.Tensor) -> None:
        """A contribution of this rank."""
        slot = self._shard.whole_slots[name]
        start = slot.offset - self._shard.whole.segment_of(slot).start
        target = self._flat[slot.segment][start : start + slot.numel]
        source = grad.detach().reshape(-1)
        if name in self.names:
            target.add_(source)
        else:
            target.copy_(source)
            self.names.add(name)

    def forget(self, name: str) -> None:
        """The user has thrown the gradient away."""
        self.names.discard(name)

    def start(self, trainable: Sequence[str] = ()) -> None:
        """Start to reduce; nothing is added any more. `trainable`: these parameters, whatever this rank has of them."""
        ranks, unit, split = self._ranks, self._shard.layout.index, self._shard.ranks > 1
        for index in sorted({self._shard.whole_slots[name].segment for name in trainable or self.names}):
            self._zero_the_rest(index)
            going, self._sums[index] = ranks.reduce(self._flat[index], unit, split, fixed=bool(trainable))
            self._going.append(going)
        if trainable:
            present = torch.tensor([name in self.names for name in trainable], dtype=torch.int32, device="cpu")
            self._asked = trainable, present
            self._going.append(ranks.most(present, unit))

    def over_unless_wanted(self) -> bool:
        """Wait, unless a rank waits for this one to meet it; whether it is reduced."""
        wanted = self._ranks.wanted
        if not all(going.over_unless(wanted) for going in self._going):
            return False
        return all(going.over_unless(wanted) for going in self._reduce_among_copies())

    def _reduce_among_copies(self) -> list[Going]:
        """Wait for the group, and start the same among the copies; what is on its way there."""
        if self._among_copies is None:
            for going in self._going:
                going.wait()
            copies, unit, begun = self._ranks.copies, self._shard.layout.index, []
            if copies is not None and self._asked is not None:
                begun.append(copies.most(self._asked[1], unit))
            for own in self._sums.values():
                own.div_(self._ranks.size)
                if copies is not None:
                    begun.append(copies.reduce(own, unit, split=False, fixed=self._asked is not None)[0])
            self._among_copies = begun
        return self._among_copies

    def result(self) -> Mapping[str, torch.Tensor]:
        """The mean over the ranks: of each parameter that has a gradient, what rests here, 1-D. Valid until `close`."""
        shard = self._shard
        for going in self._reduce_among_copies():
            going.wait()
        if self._asked is not None:
            names, present = self._asked
            self.names = {name for name, there in zip(names, present.tolist(), strict=True) if there}
        found: dict[str, torch.Tensor] = {}
        spent: list[torch.Tensor] = []
        for index, own in self._sums.items():
            if self._ranks.copies is not None:
                own.div_(self._ranks.copies.size)
            for slot in shard.layout.slots:
                if slot.segment == index and slot.name in self.names:
                    start = slot.offset - shard.layout.segments[index].start
                    found[slot.name] = own[start : start + slot.numel].to(DTYPES[slot.dtype])
            spent += _around(self._flat[index], own)
        if self._taken:
            self._buffers.spend(self._memory, spent)
        return found

    def _zero_the_rest(self, index: int) -> None:
        """Gaps between parameters, and parameters without a gradient, hold what was there before."""
        flat, segment, end = self._flat[index], self._shard.whole.segments[index], 0
        for slot in self._shard.whole.slots:
            if slot.segment == index and slot.name in self.names:
                start = slot.offset - segment.start
                flat[end:start].zero_()
                end = start + slot.numel
        flat[end:].zero_()

    def close(self, is_kept: bool = False) -> torch.Tensor:
        """Give back the memory, unless it is kept, which then stays in use and is not the buffers' any more."""
        self._flat.clear()
        if self._taken:
            self._buffers.give(self._memory, is_kept)
        return self._memory

    def holds(self, value: torch.Tensor) -> bool:
        """Whether a value lies in this memory."""
        return 0 <= value.data_ptr() - self._memory.data_ptr() < self._memory.numel()


def _around(whole: torch.Tensor, part: torch.Tensor) -> list[torch.Tensor]:
    """What lies before and after a part of a 1-D tensor; all of it, if the part lies elsewhere."""
    first = (part.data_ptr() - whole.data_ptr()) // whole.itemsize
    if not 0 <= first < max(whole.numel(), 1):
        return [whole]
    return [whole[:first], whole[first + part.numel() :]]


@final
class Collector:
    """Collects the gradients of one unit on one rank, until all ranks have reduced them."""

    # Note [Collected and reduced]
    # With several ranks a backward's gradients are collected whole. What `param.grad` shows meanwhile is the gradient
    # at rest, to which the collected ones are added when they have been reduced: at the end of the unit's backward, or
    # when somebody asks. A gradient that the user throws away takes what was collected for it along.

    def __init__(self, unit: Unit, reduction: Reduction, rest: UnitGradients, room: Room) -> None:
        self._unit = unit
        self._reduction = reduction
        self._rest = rest
        self._room = room
        self._whole: WholeGradients | None = None  # what this rank has collected and nobody has reduced
        self._home: torch.Tensor | None = None  # see Note [Where the mean was found]
        self._expected: dict[str, RestingGrad] = {}  # what `param.grad` is, where something was collected for it
        self._fresh: set[str] = set()  # those of them that nothing was laid to rest for yet

    @property
    def collecting(self) -> bool:
        """Whether something was collected that nobody has reduced."""
        return self._whole is not None

    def expects(self, grad: RestingGrad) -> bool:
        """Whether something was collected that will be added to this gradient."""
        return grad is self._expected.get(grad.label)

    def collect(self, name: str, grad: torch.Tensor, previous: RestingGrad | None) -> RestingGrad:
        """A contribution of this rank; returns what `param.grad` shows, which is `previous` where there is one."""
        expect_dense(name, grad)
        if self._whole is None:
            self._whole = self._begin()
            shown = self._unit.parameters[name].grad
            if previous is None and isinstance(shown, RestingGrad):
                previous = shown  # what other ranks have was laid to rest, to make room
        if previous is None or not self.expects(previous):
            self._whole.forget(name)  # of a gradient that is not there any more
        self._whole.add(name, grad)
        self._reduction.collected()
        if previous is None:
            previous = self._rest.resting.unfilled(name)
            self._fresh.add(name)
        self._expected[name] = previous
        return previous

    # Note [Where the mean was found]
    # Where gradients stay on the device and are not split, the mean is left where it was found, and the unit collects
    # in that memory again once nobody has a view of it: fresh memory is slow to come by. Never in a tensor of
    # autograd's, which may be what waits at the other end of a skip connection.

    def _begin(self) -> WholeGradients:
        home = self._home if self._home is not None and unused(self._home) else None
        return WholeGradients(self._unit.shard, self._reduction, self._room.make_to_collect, home)

    def reduce(self, all_of_it: bool = False) -> None:
        """Start to reduce what was collected, on every rank; this rank's part is laid to rest when it is there.

        `all_of_it`: every rank does, whatever it has collected."""
        whole = self._unit.shard.whole
        trainable = [  # alike on every rank
            name
            for name, param in self._unit.parameters.items()
            if all_of_it and (param.requires_grad or whole.segment_of(self._unit.shard.whole_slots[name]).trainable)
        ]
        if self._whole is None and trainable:
            self._whole = self._begin()
        if self._whole is None:
            return
        gradients, self._whole = self._whole, None
        expected, self._expected = self._expected, {}
        fresh, self._fresh = self._fresh, set()
        for name, grad in expected.items():
            if self._unit.parameters[name].grad is not grad:
                gradients.forget(name)
        if not gradients.names and not trainable:  # all were thrown away, as on every rank
            gradients.close()
            return
        try:
            gradients.start(trainable)
        except BaseException:
            gradients.close(is_kept=True)  # a collective may still write to it
            self._withdraw(expected, fresh)
            raise
        self._reduction.launched(gradients, lambda: self._lay_to_rest(gradients, expected, fresh))

    def _lay_to_rest(self, whole: WholeGradients, expected: dict[str, RestingGrad], fresh: set[str]) -> None:
        try:
            reduced = whole.result()
            self._expect_others(set(reduced) - set(expected), expected, fresh)
        except BaseException:
            whole.close(is_kept=True)  # a collective may still write to it
            self._withdraw(expected, fresh)
            raise
        on_device = self._unit.shard.grads is None
        kept = False
        unfilled = set(fresh)
        try:
            adds = any(name not in fresh for name in reduced)
            self._room.make_to_rest(self._rest.place.passing_sum_bytes if adds else self._rest.place.passing_bytes)
            for name, own in reduced.items():
                grad = expected.get(name)
                if grad is None or self._unit.parameters[name].grad is not grad:
                    continue  # thrown away meanwhile
                own = own.clone() if on_device and self._reduction.split else own
                self._rest.rest_reduced(name, own, None if name in fresh else grad, grad)
                grad.reductions += 1
                unfilled.discard(name)
                kept = kept or (grad.loose is not None and whole.holds(grad.loose))
        except BaseException:
            self._withdraw(expected, unfilled)
            raise
        finally:
            if kept:
                self._home = whole.close(is_kept=True)
            else:
                whole.close()
        self._rest.all_at_rest()

    def _expect_others(self, names: Collection[str], expected: dict[str, RestingGrad], fresh: set[str]) -> None:
        """Of these parameters other ranks alone have a gradient."""
        for name in names if not self._reduction.dropping else ():
            param = self._unit.parameters[name]
            if not isinstance(param.grad, RestingGrad):
                param.grad = self._rest.resting.unfilled(name)
                fresh.add(name)
            elif name in self._fresh:  # this rank's own has come since: it will be added to these
                self._fresh.remove(name)
                fresh.add(name)
            expected[name] = param.grad

    def abandon(self) -> None:
        """An interrupted backward: what it has collected is worth nothing, for other ranks may have more or less."""
        whole, self._whole = self._whole, None
        fresh, self._fresh, expected, self._expected = self._fresh, set(), self._expected, {}
        self._withdraw(expected, fresh)
        if whole is not None:
            whole.close()

    def _withdraw(self, expected: Mapping[str, RestingGrad], fresh: Collection[str]) -> None:
        """Take back the gradients that were shown before there was anything in them."""
        for name in fresh:
            param = self._unit.parameters[name]
            if param.grad is expected[name]:
                param.grad = None

    def at_rest(self) -> Iterator[RestingGrad]:
        """The gradients at rest, in the order of the unit. Blocks until their norms are there."""
        self._rest.place.await_norms()
        for param in self._unit.parameters.values():
            if isinstance(param.grad, RestingGrad):
                yield param.grad
