"""The optimizer's state as a whole: what the user puts in its place, and state dicts."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from outsize.move.shard import SlotState, UnitShard
from outsize.move.store import DTYPES, MASTER
from outsize.optim.rules import Rule, join_master, split_master
from outsize.plan.layout import Slot
from outsize.run.entry import StateEntry
from outsize.run.local import like, local
from outsize.run.owner import Owner
from outsize.run.parameters import Parameters
from outsize.run.state import (
    StreamedState,
    check_counts,
    check_entry,
    entry_of,
    options_of,
    store_state,
    was_stepped,
)
from outsize.run.streamer import Streamer
from outsize.run.unit import Unit

MASTER_KEY = "fp32_master"
"""In a state dict. See Note [Masters in a state dict]."""


def _with_plain_entries(_: object, state_dict: dict[str, Any]) -> None:
    """A state dict is the user's own: plain dicts of plain tensors, which may be written to."""
    entries = state_dict["state"].items()
    state_dict["state"] = {key: entry.plain() if isinstance(entry, StateEntry) else entry for key, entry in entries}


@final
class WholeState:
    """`optimizer.state` after `prepare`, replaced or loaded from a state dict."""

    def __init__(
        self,
        parameters: Parameters,
        streamer: Streamer,
        owner: Owner,
        optimizer: torch.optim.Optimizer,
        kept: Rule,
    ) -> None:
        self._parameters = parameters
        self._streamer = streamer
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._kept = kept
        self._state: Any = StreamedState(parameters, streamer, owner, kept, optimizer)
        self._hook = optimizer.register_state_dict_post_hook(_with_plain_entries, prepend=True)
        self.keep()

    def keep(self) -> None:
        """What the user may have put in place of `optimizer.state` is not wanted any more: the state was loaded."""
        self._optimizer.state = self._state
        self._counted = False

    def detach(self, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """The optimizer has a plain state from now on."""
        self._hook.remove()
        self._optimizer.state = states  # type: ignore[assignment]

    def check_counts(self) -> None:
        """Raise `ValueError` if a state that came from elsewhere does not count its steps."""
        if self._counted:
            return
        for unit in self._parameters.units:
            for name, state in unit.shard.slot_states.items():
                if state.initialised:
                    check_counts(name, state.scalars, self._kept)
        self._counted = True

    def take(self) -> None:
        """Take over a mapping that the user has put in place of `optimizer.state`: an empty one begins anew."""
        given: Any = self._optimizer.state
        if given is self._state:
            return
        if not isinstance(given, Mapping):
            raise TypeError(f"optimizer.state must be a mapping of parameters to their state, not {given!r:.80}")
        entries: dict[str, dict[str, Any]] = {}
        for param, state in given.items():
            if not self._parameters.owns(param):
                raise ValueError(
                    "optimizer.state was replaced, with an entry of a parameter that the model does not have"
                )
            if state:
                unit, slot = self._parameters.unit_of(param)
                entries[slot.name] = entry_of(state, slot.name, self._kept)
                hyper = options_of(param, self._optimizer)
                check_entry(unit.shard, slot, entries[slot.name], self._kept, self._name, hyper)
        with self._streamer.live.changing("taking over optimizer.state"):
            self._put(entries)
        self._optimizer.state = self._state

    def _put(self, entries: Mapping[str, dict[str, Any]]) -> None:
        """Replace the state of all parameters; those without an entry begin anew."""
        for unit in self._parameters.units:
            self._streamer.settle(unit)
            unit.await_written()
            for name in unit.parameters:
                if name in entries or name in unit.shard.slot_states:
                    store_state(unit.shard, name, entries.get(name, {}))

    # Note [Masters in a state dict]
    # A model's state dict has the 16-bit weights. What completes them is the optimizer's: the entry of a parameter that
    # was stepped has its fp32 values under `MASTER_KEY`. Loaded, they are the truth: the weight becomes their rounding.
    # So it does not matter which of the two state dicts is loaded first. torch's own optimizers keep the key unused.

    def state_dict(self) -> dict[str, Any]:
        """A plain optimizer's state dict, with masters, in host memory: a device that had room for all of it would need
        no tiers. See Note [Masters in a state dict]."""
        self._state.on_host = True
        try:
            found: dict[str, Any] = type(self._optimizer).state_dict(self._optimizer)
        finally:
            self._state.on_host = False
        for group, saved in zip(self._optimizer.param_groups, found["param_groups"], strict=True):
            for param, index in zip(group["params"], saved["params"], strict=True):
                unit, slot = self._parameters.unit_of(param)
                if was_stepped(unit.shard, slot.name) and unit.shard.array(MASTER, slot):
                    unit.await_written()
                    master = _master_of(unit.shard, slot).view(slot.shape)
                    entry = found["state"].setdefault(index, {})  # there is none for SGD without momentum
                    entry[MASTER_KEY] = master if unit.shard.ranks > 1 else like(param, master)
        return found

    def _put_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        for unit in self._parameters.units:
            names = [name for name in unit.parameters if name in masters]
            for name in names:
                value = local(masters[name].detach()).to("cpu", torch.float32).reshape(-1)
                if value.numel() == unit.shard.whole_slots[name].numel:  # else it is what this rank gave
                    value = unit.shard.own(name, value)
                unit.shard.make_room([name])
                _store_master(unit.shard, unit.shard.slots[name], value)
                before = unit.shard.slot_states[name]
                unit.shard.slot_states[name] = SlotState(before.scalars, initialised=True)
            if names:
                unit.updates += 1  # a graph of before must not be used
                if unit.shard.ranks > 1:
                    self._streamer.regather(unit)

    def load_state_dict(self, state_dict: dict[str, Any], forget: Callable[[], None]) -> None:
        """Take over a plain optimizer's state dict: hyper-parameters, arrays and step counts.

        `forget`: called once it is found to fit. Raises `ValueError`, with nothing changed, for the state of another
        optimizer or of other parameters.
        """
        optimizer: Any = self._optimizer
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(optimizer, state_dict)
            state_dict = state_dict if replaced is None else replaced
        saved, state = _parts_of(state_dict)
        groups = optimizer.param_groups
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            raise ValueError(
                f"the state dict has parameter groups of {[len(g['params']) for g in saved]} parameters, the optimizer "
                f"of {[len(g['params']) for g in groups]}; load the state of the same optimizer"
            )
        wanted: list[tuple[Unit, Slot, dict[str, Any]]] = []
        masters: dict[str, torch.Tensor] = {}
        for at, (group, other) in enumerate(zip(groups, saved, strict=True)):
            hyper = {key: value for key, value in {**group, **other}.items() if key != "params"}
            if group["params"]:
                self._kept.check(hyper, f"the state dict's param_groups[{at}]")
            for param, index in zip(group["params"], other["params"], strict=True):
                if state.get(index):
                    unit, slot = self._parameters.unit_of(param)
                    entry = entry_of(state[index], slot.name, self._kept)
                    if MASTER_KEY in entry and MASTER_KEY not in unit.shard.arrays:
                        masters[slot.name] = _checked_master(entry.pop(MASTER_KEY), unit, slot)
                    check_entry(unit.shard, slot, entry, self._kept, self._name, hyper)
                    wanted.append((unit, slot, entry))
        with self._streamer.live.changing("optimizer.load_state_dict"):
            for group, other in zip(groups, copy.deepcopy(saved), strict=True):
                group.update({key: value for key, value in other.items() if key != "params"})
            self.put_options_right()
            forget()
            self._put({slot.name: entry for _, slot, entry in wanted})
            self._put_masters(masters)
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)

    # Note [Options of another optimizer's state]
    # torch hands what it has loaded to the optimizer's `__setstate__`, which adds the options that earlier versions did
    # not have, and puts right those that make the class what it is: AdamW's decay stays decoupled whatever the state of
    # an Adam says. Here it is shown no state, which would be read from where it rests, one parameter after the other.

    def put_options_right(self) -> None:
        """Parameter groups were loaded from what may be another optimizer's."""
        optimizer: Any = self._optimizer
        try:
            optimizer.__setstate__({"state": defaultdict(dict), "param_groups": optimizer.param_groups})
        finally:
            optimizer.state = self._state


def _master_of(shard: UnitShard, slot: Slot) -> torch.Tensor:
    """The fp32 values that a 16-bit parameter is the rounding of, as far as they rest here, 1-D."""
    rest = shard.read_array(shard.arrays[MASTER], slot.offset, slot.end)
    return join_master(shard.read_weight(slot.name), rest)


def _store_master(shard: UnitShard, slot: Slot, value: torch.Tensor) -> None:
    """Make `value` (fp32, what rests here, 1-D) the parameter's master, and the parameter its rounding."""
    array = shard.array(MASTER, slot)
    if array is None:
        shard.write_weight(slot.name, value)
        return
    weight = torch.empty(slot.numel, dtype=DTYPES[slot.dtype], device="cpu")
    rest = torch.empty(slot.numel, dtype=array.dtype(slot.dtype), device="cpu")
    split_master(value, weight, rest)
    shard.write_weight(slot.name, weight)
    shard.write_array(array, slot.offset, slot.end, rest)


def _checked_master(value: object, unit: Unit, slot: Slot) -> torch.Tensor:
    numels = (slot.numel, unit.shard.whole_slots[slot.name].numel)
    if not isinstance(value, torch.Tensor) or local(value).numel() not in numels:
        raise ValueError(
            f"the state of {slot.name!r} has no fp32 values of shape {tuple(unit.shard.whole_slots[slot.name].shape)} "
            f"under {MASTER_KEY!r}; give the state dict of the same model. Nothing was changed"
        )
    return value


def _parts_of(state_dict: object) -> tuple[list[Any], Mapping[Any, Any]]:
    """The groups and the state in a state dict."""
    wanted = "an optimizer's state dict is a dict with 'param_groups' and 'state'"
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"{wanted}, not {type(state_dict).__name__}. Nothing was changed")
    saved, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(saved, list) or not isinstance(state, Mapping):
        raise ValueError(f"{wanted}, this has {sorted(map(str, state_dict))}. Nothing was changed")
    for index, group in enumerate(saved):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f"param_groups[{index}] of the state dict is no dict with a list 'params'")
    return saved, state
