"""`optimizer.state` after `prepare`: read from, and written to, where each parameter's state rests."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, MutableMapping
from typing import Any, NoReturn, final

import torch

from outsize.move.shard import SlotState, UnitShard
from outsize.run.engine import Engine
from outsize.run.local import like, local


def _as_torch(key: str, value: Any) -> Any:
    """A per-parameter value as torch's optimizers keep it: counts of steps are tensors."""
    return torch.tensor(value, device="cpu") if key == "step" and isinstance(value, float) else snapshot(value)


def snapshot(value: Any) -> Any:
    """The value as it is now, whatever becomes of the tensor that holds it."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def store_state(shard: UnitShard, name: str, state: dict[str, Any]) -> None:
    """Write one parameter's optimizer state, as torch keeps it, into the unit's stores."""
    slot = shard.slots[name]
    scalars = {}
    for key, value in state.items():
        if key in shard.arrays and isinstance(value, torch.Tensor):
            array = shard.arrays[key]
            content = local(value.detach()).to("cpu", array.value_dtype(slot.dtype)).reshape(-1)
            if content.numel() == shard.whole_slots[name].numel:  # else it is what this rank gave
                content = shard.own(name, content)
            shard.write_array(array, slot.offset, slot.end, content)
        else:
            scalars[key] = value.clone() if isinstance(value, torch.Tensor) else value
    before = shard.slot_states.get(name)
    for key, array in shard.arrays.items():
        if array.public and before is not None and before.initialised and not isinstance(state.get(key), torch.Tensor):
            shard.write_array(
                array, slot.offset, slot.end, torch.zeros(slot.numel, dtype=array.value_dtype(slot.dtype), device="cpu")
            )
    shard.slot_states[name] = SlotState(scalars, initialised=bool(state))


@final
class StateEntry(dict[str, Any]):
    """A copy of one parameter's state, which says so where another value is put in. (Writes into a tensor of it go
    unseen, and are lost.)"""

    def __setitem__(self, key: str, value: Any) -> None:
        known = self.get(key)
        if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor) and value.shape == known.shape:
            same = torch.equal(value.to(known.device, known.dtype), known)
        else:
            same = value is known
        if not same:
            self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "optimizer.state[param] is a copy after outsize.prepare, and a change of it would be lost: write the whole "
            "entry, `optimizer.state[param] = {**optimizer.state[param], key: value}`"
        )

    __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


@final
class _PlainItems(ItemsView[torch.Tensor, dict[str, Any]]):
    """What `optimizer.state_dict()` reads and the user stores: plain dicts, one after the other."""

    def __init__(self, state: StreamedState) -> None:
        super().__init__(state)
        self._state = state

    def __iter__(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        for param in self._state:
            yield param, dict(self._state[param])


@final
class StreamedState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """`optimizer.state` after `prepare`: reading a parameter's entry reads it from where it rests, as a copy."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        if not self._engine.owns(param):
            raise KeyError(param)
        unit, slot = self._engine.unit_of(param)
        self._engine.streamer.settle(unit)
        unit.await_written()
        state = unit.shard.slot_states.get(slot.name)
        if state is None or not state.initialised:
            return StateEntry()
        entry: dict[str, Any] = {key: _as_torch(key, value) for key, value in state.scalars.items()}
        for name, array in unit.shard.arrays.items():
            if array.public and name not in state.scalars:  # SGD without momentum has None there
                value = unit.shard.read_array(array, slot.offset, slot.end).view(slot.shape)
                entry[name] = value if unit.shard.ranks > 1 else like(unit.parameters[slot.name], value)
        return StateEntry(entry)

    def items(self) -> ItemsView[torch.Tensor, dict[str, Any]]:
        return _PlainItems(self)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for unit in self._engine.units:
            self._engine.streamer.settle(unit)  # the first update makes the state
            for name, param in unit.parameters.items():
                state = unit.shard.slot_states.get(name)
                if state is not None and state.initialised and (state.scalars or unit.shard.has_state):
                    yield param

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        return any(param is each for each in self)

    def __setitem__(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        unit, slot = self._engine.unit_of(param)
        self._engine.streamer.settle(unit)
        unit.await_written()
        store_state(unit.shard, slot.name, state)

    def __delitem__(self, param: torch.Tensor) -> None:
        """The parameter's state begins anew at its next update, as in torch."""
        self[param] = {}

    def clear(self) -> None:
        for param in list(self):
            del self[param]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "the optimizer of a prepared model cannot be copied or pickled: its state may be on disk. Use "
            "outsize.save, or optimizer.state_dict()"
        )
