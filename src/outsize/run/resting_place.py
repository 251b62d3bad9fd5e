"""Where the gradients of one unit rest: their bytes in memory, on the way to disk and there, and their norms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

import torch

from outsize.move.conveyor import Conveyor, Job, Step
from outsize.move.grad_ops import AS_IT_IS, GradOps, accumulate_, add_contribution, vector_norm, vector_norms
from outsize.move.gradients import GradShard
from outsize.move.shard import SlotUpdate
from outsize.move.tracing import begun, ended
from outsize.planning.layout import Slot
from outsize.planning.trace import OUT
from outsize.run.unit import Unit

if TYPE_CHECKING:
    from outsize.run.grads import RestingGrad


@final
class Laid(NamedTuple):
    """A gradient that has come to rest."""

    norm: torch.Tensor | None
    """None where it is found later: see `RestingPlace.find_norms`."""
    loose: torch.Tensor | None
    """The gradient itself, where it stays on the device."""


_LATER = Laid(None, None)


@final
class RestingPlace:
    """The bytes of one unit's gradients.

    On the device tier a gradient stays the tensor that autograd produced. On host and disk it is copied into the unit's
    `GradShard`; on disk the shard is written once all of the unit's gradients are in.
    """

    # Note [Gradients of two steps]
    # Under the delayed update the gradients of one step are held back until the next. A unit then has two gradient
    # shards: `turn` gives the one that holds them to the held update, and the next backward fills the other. Each
    # gradient at rest knows in which of them its bytes lie.

    def __init__(self, unit: Unit, conveyor: Conveyor) -> None:
        self._unit = unit
        self._conveyor = conveyor
        self._on_cpu = unit.shard.device.type == "cpu"
        self._writing: Job | None = None
        self._dirty = False
        self._left = 0.0  # the gradients, for the disk
        self.unknown: dict[str, RestingGrad] = {}  # whose norms are still to be found
        self.tiles: dict[int, torch.Tensor] = {}  # by first element: the norms of the tiles laid down in this backward
        self._tile_going: Job | None = None
        self.shard = shard = unit.shard.grads
        """Where the gradients of this backward come to rest; None on the device."""
        on_disk = shard is not None and shard.store is not None
        # Memory that the gradients take on their way to disk, and that sums of them take: alike on every rank.
        self.passing_bytes = shard.nbytes if shard is not None and on_disk else 0
        self.passing_sum_bytes = shard.sum_bytes if shard is not None and on_disk else 0

    def lay_down(
        self,
        grads: Sequence[tuple[str, torch.Tensor, RestingGrad | None]],
        live: Callable[[], Collection[str]],
        make_room: Callable[[int], None],
    ) -> list[Laid]:
        """Store contributions: (the parameter's name, the contribution, what it is added to).

        `live` names the gradients at rest that are still wanted; `make_room` is for so many bytes of gradients.
        """
        shard, slots = self.shard, self._unit.shard.slots
        laid: list[Laid] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, grad, previous in grads:
            ops = None if previous is None or previous.ops.zero else previous.ops
            if shard is None:
                loose = grad.detach()
                if ops is not None and previous is not None and previous.loose is not None:
                    loose = add_contribution(previous.loose, ops, loose)
                laid.append(Laid(vector_norm(loose, 2.0), loose))
                continue
            slot = slots[name]
            place = None if ops is not None or self._writing is not None else shard.place_of_first(slot, grad)
            if place is None:
                _copy(copies)  # before what follows moves these
                widens = ops is not None or grad.dtype.itemsize > shard.dtype(slot).itemsize
                if widens or self._writing is not None or not shard.is_open_for(slot):
                    before = {name for name, _, _ in grads[: len(laid)]}
                    self._open(shard, slot, widens, before.union(live()), make_room)
                place = None if ops is not None else shard.place_of_first(slot, grad)
            self._dirty = True  # not before `_open`, which may write out what was there
            if place is None:
                shard.put(slot, grad, ops)
                laid.append(self._laid(shard, slot, grad, ops))
            else:
                copies.append((place, grad.reshape(-1)))
                laid.append(_LATER if self._on_cpu else self._laid(shard, slot, grad, None))
        _copy(copies)
        return laid

    # -- tiles -------------------------------------------------------------------------------------------------------

    def lay_tile_down(
        self, name: str, first: int, grad: torch.Tensor, previous: GradOps | None, make_room: Callable[[int], None]
    ) -> None:
        """Store a contribution to the elements from `first` on; `previous` holds the operations on what rests there of
        earlier backwards, None for nothing."""
        shard, slot = self.shard, self._unit.shard.slots[name]
        assert shard is not None
        if first in self.tiles:  # the weight was used twice
            previous = AS_IT_IS
        source = grad.reshape(-1).cpu()
        if not source.numel():  # the last of several ranks may have none
            self.tiles[first] = torch.zeros(())
            return
        if shard.store is None:
            target = content = shard.place_of_tile(slot, first, source.numel())
        else:
            self.flush_and_drop()
            self._await_tile()
            if previous is not None:
                self._unit.await_written()
            make_room(source.numel() * shard.dtype(slot).itemsize)
            content = shard.copy_of_tile(slot, first, source.numel(), previous is not None)
            target = content[: source.numel()]
        if previous is None:
            target.copy_(source)
        else:
            accumulate_(target, previous, source)
        self.tiles[first] = vector_norm(target, 2.0)
        if shard.store is not None:
            step = Step(finish=partial(shard.write_tile, slot, first, content))
            self._tile_going = self._unit.submit(self._conveyor, iter([step]))

    def tiles_laid(self) -> Laid:
        """All tiles of the gradient are laid down."""
        norms, self.tiles = list(self.tiles.values()), {}
        self._await_tile()
        return Laid(torch.stack(norms).norm(), None)

    def _await_tile(self) -> None:
        if self._tile_going is not None:
            self._tile_going.written.wait()
            self._tile_going = None

    def _laid(self, shard: GradShard, slot: Slot, grad: torch.Tensor, ops: GradOps | None) -> Laid:
        """With its norm, where that is found at once."""
        if ops is None and (not self._on_cpu or grad.dtype is not shard.dtype(slot)):
            return Laid(vector_norm(grad, 2.0), None)  # on the device, where it is fast
        later = self._on_cpu or (grad.device.type != "cpu" and grad.numel() > 0)
        return _LATER if later else Laid(vector_norm(shard.of(slot), 2.0), None)

    def _open(
        self,
        shard: GradShard,
        slot: Slot,
        widens: bool,
        live: Collection[str],
        make_room: Callable[[int], None],
    ) -> None:
        """Bring the gradients at rest that are still wanted into memory; one of them becomes a sum, or is one."""
        if shard.in_memory and shard.bytes_beside(slot):
            make_room(shard.bytes_beside(slot))  # as below
        shard.use(slot)
        if widens and not shard.wide:
            self.find_norms()  # of what is narrow still
        if shard.in_memory and widens and shard.store is not None and shard.sum_bytes > shard.nbytes:
            make_room(shard.sum_bytes - shard.nbytes)  # which may write these gradients out
        if shard.in_memory:
            self._await_writing()  # what is being written must not change under the write
            if shard.wide:
                shard.open(live)  # fp32 sums that nobody wants any more make room for plain gradients
            return
        if shard.store is not None:
            make_room(shard.sum_bytes if widens else shard.nbytes)
            self._unit.await_written()
        shard.open(live)

    def content(self, grad: RestingGrad) -> torch.Tensor:
        """The gradient's values as they rest, 1-D."""
        if grad.loose is not None:
            return grad.loose.reshape(-1)
        assert grad.shard is not None
        if not grad.shard.in_memory:
            self._unit.await_written()
        return grad.shard.copy_of(self._unit.shard.slots[grad.label])  # to read changes nothing of what rests with it

    # -- norms -------------------------------------------------------------------------------------------------------

    def find_norms(self) -> None:
        """Those of gradients that lie in host memory, all at once: a call a gradient costs more than a small one."""
        if not self.unknown or not self._on_cpu:
            return
        grads, self.unknown = list(self.unknown.values()), {}
        slots = self._unit.shard.slots
        values = [grad.shard.of(slots[grad.label]) for grad in grads if grad.shard is not None]
        torch._foreach_copy_([grad.norms[2.0] for grad in grads], vector_norms(values))

    def await_norms(self) -> None:
        """Find the norms that are not known yet. Of sums of gradients from an accelerator it blocks until these are
        there."""
        if self.unknown:
            self.find_norms()
        while self.unknown:
            name, grad = self.unknown.popitem()
            assert grad.shard is not None
            grad.norms[2.0].copy_(grad.shard.norm_of_sum(self._unit.shard.slots[name]), non_blocking=True)

    # -- on the way to disk ------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Let the conveyor bring what is on its way from an accelerator, before what it is asked for next."""
        if self.shard is not None:
            self.shard.dispatch()

    def finish(self) -> None:
        """What came together goes to where it rests."""
        self.dispatch()
        self.find_norms()
        shard = self.shard
        if shard is not None and shard.store is not None and shard.in_memory and self._dirty:
            self._dirty, self._left = False, begun()
            self._writing = self._unit.submit(self._conveyor, iter([Step(finish=shard.write)]))

    def give_to_update(self) -> None:
        """The update that has just started reads the gradients out of memory: there is nothing to write."""
        self._writing = self._unit.job
        self._dirty = False

    def drop_if_written(self) -> None:
        """Give back the memory of gradients that are on disk by now. Raises what went wrong with the writing."""
        if self._writing is not None and self._writing.written.done():
            self._await_writing()
            if self.shard is not None and not self._dirty:
                self.shard.drop()

    def flush_and_drop(self) -> bool:
        """Write the gradients out now and give their memory back; whether there were any."""
        shard = self.shard
        if shard is None or shard.store is None or not shard.in_memory:
            return False
        self.finish()
        self._await_writing()
        shard.drop()
        return True

    def turn(self) -> None:
        """The gradients at rest are held back: the next backward uses the other shard."""
        if self.shard is not None:
            self.flush_and_drop()
            self._unit.shard.grad_shards.reverse()
            self.shard = self._unit.shard.grads

    def restore_held(self, held: Mapping[str, tuple[torch.Tensor, GradOps]]) -> None:
        """Hold gradients back as a checkpoint has them: bytes as they rested, and operations not yet applied."""
        shard = self.shard
        if shard is not None and held:
            shard.open(())
            for name, (content, _) in held.items():
                shard.put(self._unit.shard.slots[name], content, None)
            self._dirty = True
            self.finish()
            self.turn()
        self._unit.held = {}
        for name, (content, ops) in held.items():
            loose = content.to(self._unit.shard.device) if shard is None else None
            self._unit.held[name] = SlotUpdate({}, ops, loose, shard)

    def _await_writing(self) -> None:
        if self._writing is not None:
            self._writing.written.wait()
            self._writing = None
            ended(OUT, self._unit.name, self._left)


def _copy(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """All in one call, which costs as much as one for a small tensor; then there are none."""
    if copies:
        torch._foreach_copy_([place for place, _ in copies], [grad for _, grad in copies])
        copies.clear()
