"""`optimizer.state` after `prepare`: read from, and written to, where each parameter's state rests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn, final

import torch

from outsize.move.shard import SlotState, UnitShard
from outsize.optim.rules import Rule
from outsize.plan.layout import Slot
from outsize.run.entry import StateEntry, plain
from outsize.run.local import like, local
from outsize.run.owner import Owner
from outsize.run.parameters import Parameters
from outsize.run.streamer import Streamer
from outsize.run.unit import Unit


def _as_torch(key: str, value: Any) -> Any:
    """A per-parameter value as torch's optimizers keep it: counts of steps are tensors, of a dtype that counts on."""
    if key != "step" or not isinstance(value, float):
        return snapshot(value)
    wide = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    return torch.tensor(value, dtype=wide, device="cpu")


def snapshot(value: Any) -> Any:
    """The value as it is now, whatever becomes of the tensor that holds it."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def entry_of(state: object, name: str, kept: Rule) -> dict[str, Any]:
    """One parameter's state as somebody gives it, of DTensors what this rank has; None for an array it is without."""
    if not isinstance(state, Mapping):
        raise TypeError(f"the optimizer's state of {name!r} must be a dict, not {type(state).__name__}")
    entry = {key: local(plain(value)) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    return {**dict.fromkeys(sorted(kept.optional)), **entry} if entry else {}


def check_entry(
    shard: UnitShard,
    slot: Slot,
    entry: Mapping[str, Any],
    kept: Rule,
    optimizer: str,
    hyper: Mapping[str, Any] | None,
) -> None:
    """Raise `ValueError`, with the parameter's name, for a state that is not this optimizer's.

    `hyper`: the options of the parameter's group; None where it is in none.
    """
    names = set(kept.arrays)
    own, slot = slot, shard.whole_slots[slot.name]
    arrays = {key: value for key, value in entry.items() if isinstance(value, torch.Tensor)}
    wrong = {key for key, value in arrays.items() if value.shape == slot.shape != ()} - names
    wrong = wrong if slot.numel > 1 and not kept.whole else set()
    if kept.scalars is not None:
        wrong |= entry.keys() - names - set(kept.scalars)
        wrong |= {
            key for key in names & entry.keys() - arrays.keys() if key not in kept.scalars or entry[key] is not None
        }
    missing = {key for key in names if key not in entry or (entry[key] is None and key in kept.optional)}
    missing.discard("max_exp_avg_sq")
    if missing and hyper is not None and not kept.whole:  # torch's state has what the parameter's own group needs
        kept.check(hyper, f"the parameter group of {slot.name!r}")
        missing &= set(kept.always(hyper))
    else:
        missing -= kept.optional
    shapes = [key for key in names & arrays.keys() if arrays[key].numel() not in (slot.numel, own.numel)]
    if wrong or missing or shapes:
        found = {key: tuple(value.shape) if key in arrays else value for key, value in entry.items()}
        raise ValueError(
            f"the state does not fit {optimizer}: for {slot.name!r} it has {found}, this optimizer keeps "
            f"{sorted(names)} of shape {tuple(slot.shape)}{_and_counts(kept)}; give the state of the same optimizer. "
            f"Nothing was changed"
        )
    check_counts(slot.name, entry, kept)


def _and_counts(kept: Rule) -> str:
    return f" and {', '.join(map(repr, kept.counts))}" if kept.counts else ""


def check_counts(name: str, values: Mapping[str, Any], kept: Rule) -> None:
    """Raise `ValueError`, with the parameter's name, where counts of steps are none."""
    for key in kept.counts:
        value = values.get(key)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        good = isinstance(value, (int, float)) and 0 <= value < _MOST_STEPS and math.floor(value) == value
        if not good:
            raise ValueError(
                f"the optimizer's state of {name!r} needs {key!r}, a count of steps, and "
                f"{'has none' if key not in values else f'has {values[key]!r}'}; load the state of the same optimizer"
            )


_MOST_STEPS = 2**53  # the last that a float counts


def store_state(shard: UnitShard, name: str, state: dict[str, Any]) -> None:
    """Write one parameter's optimizer state, as torch keeps it, into the unit's stores."""
    slot = shard.slots[name]
    if state:
        shard.make_room([name])
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
class StreamedState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """`optimizer.state` after `prepare`: reading a parameter's entry reads it from where it rests, as a copy."""

    def __init__(
        self,
        parameters: Parameters,
        streamer: Streamer,
        owner: Owner,
        kept: Rule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """`kept`: what the optimizer keeps."""
        self._parameters = parameters
        self._streamer = streamer
        self._owner = owner
        self._kept = kept
        self._optimizer = optimizer
        self.on_host = False  # whether arrays are shown in host memory, in place of the device that torch has them on

    def get(self, param: Any, default: Any = None) -> Any:
        """As of a dict: the default where the parameter has no state yet."""
        has_state = param in self
        return self[param] if has_state else default

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        if not self._parameters.owns(param):
            raise KeyError(param)
        with self._owner.turn("optimizer.state"):
            return self._entry(*self._parameters.unit_of(param))

    def _entry(self, unit: Unit, slot: Slot) -> StateEntry:
        self._streamer.settle(unit)
        unit.await_written()
        state = unit.shard.slot_states.get(slot.name)
        if state is None or not state.initialised:
            return StateEntry()
        shown = {
            key: value for key, value in state.scalars.items() if value is not None or key not in self._kept.optional
        }
        with torch.inference_mode(False):  # which makes tensors whose writes nobody counts
            entry: dict[str, Any] = {key: _as_torch(key, value) for key, value in shown.items()}
            for name, array in unit.shard.arrays.items():
                if array.public and name not in state.scalars:  # SGD without momentum has None there
                    value = unit.shard.read_array(array, slot.offset, slot.end).view(slot.shape)
                    value = value if self.on_host else value.to(unit.shard.device)
                    entry[name] = value if unit.shard.ranks > 1 else like(unit.parameters[slot.name], value)
            return StateEntry(entry)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for unit in self._parameters.units:
            self._streamer.settle(unit)  # the first update makes the state
            for name, param in unit.parameters.items():
                if _has_state(unit.shard, name):
                    yield param

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        if not isinstance(param, torch.Tensor) or not self._parameters.owns(param):
            return False
        unit, slot = self._parameters.unit_of(param)
        with self._owner.turn("optimizer.state"):
            self._streamer.settle(unit)  # the first update makes the state
            return _has_state(unit.shard, slot.name)

    def __setitem__(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        if not isinstance(param, torch.Tensor) or not self._parameters.owns(param):
            shown = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
            raise ValueError(
                f"optimizer.state was given an entry for {shown}, which is no parameter of the model that "
                f"outsize.prepare prepared"
            )
        unit, slot = self._parameters.unit_of(param)
        entry = entry_of(state, slot.name, self._kept)
        if entry:
            hyper = options_of(param, self._optimizer)
            check_entry(unit.shard, slot, entry, self._kept, type(self._optimizer).__name__, hyper)
        with self._owner.turn("optimizer.state"):
            self._streamer.settle(unit)
            unit.await_written()
            store_state(unit.shard, slot.name, entry)

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


def options_of(param: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The options of the parameter's group; None where it is in none."""
    groups = optimizer.param_groups
    found = next((group for group in groups if any(param is each for each in group["params"])), None)
    return None if found is None else {key: value for key, value in found.items() if key != "params"}


def was_stepped(shard: UnitShard, name: str) -> bool:
    """Whether the optimizer has stepped on the parameter, whatever it keeps."""
    return name in shard.slot_states and shard.slot_states[name].initialised


def _has_state(shard: UnitShard, name: str) -> bool:
    return was_stepped(shard, name) and bool(shard.slot_states[name].scalars or shard.has_state)
