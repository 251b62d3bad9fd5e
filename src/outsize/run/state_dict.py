"""The optimizer's state as a whole: what the user puts in its place, and state dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from outsize.plan.layout import Slot
from outsize.run.engine import Engine
from outsize.run.local import local
from outsize.run.state import StreamedState, store_state
from outsize.run.unit import Unit


@final
class WholeState:
    """`optimizer.state` after `prepare`, replaced or loaded from a state dict."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, whole: bool) -> None:
        """`whole`: the optimizer sees whole parameters, and may keep arrays of other shapes."""
        self._engine = engine
        self._optimizer = optimizer
        self._whole = whole
        self._state: Any = StreamedState(engine)
        self.keep()

    def keep(self) -> None:
        """What the user may have put in place of `optimizer.state` is not wanted any more: the state was loaded."""
        self._optimizer.state = self._state

    def take(self) -> None:
        """Take over a mapping that the user has put in place of `optimizer.state`: an empty one begins anew."""
        given: Any = self._optimizer.state
        if given is self._state:
            return
        entries: dict[str, dict[str, Any]] = {}
        for param, state in given.items():
            if not self._engine.owns(param):
                raise ValueError(
                    "optimizer.state was replaced, with an entry of a parameter that the model does not have"
                )
            if state:
                unit, slot = self._engine.unit_of(param)
                entries[slot.name] = _entry_of(state)
                self._check(unit, slot, entries[slot.name])
        self._put(entries)
        self._optimizer.state = self._state

    def _put(self, entries: Mapping[str, dict[str, Any]]) -> None:
        """Replace the state of all parameters; those without an entry begin anew."""
        for unit in self._engine.units:
            self._engine.streamer.settle(unit)
            unit.await_written()
            for name in unit.parameters:
                if name in entries or name in unit.shard.slot_states:
                    store_state(unit.shard, name, entries.get(name, {}))

    def load_state_dict(self, state_dict: dict[str, Any], forget: Callable[[], None]) -> None:
        """Take over a plain optimizer's state dict: hyper-parameters, arrays and step counts.

        `forget`: called once it is found to fit. Raises `ValueError`, with nothing changed, for the state of another
        optimizer or of other parameters.
        """
        optimizer: Any = self._optimizer
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(optimizer, state_dict)
            state_dict = state_dict if replaced is None else replaced
        groups, saved, state = optimizer.param_groups, state_dict.get("param_groups"), state_dict.get("state")
        if not isinstance(saved, list) or not isinstance(state, dict):
            keys = sorted(map(str, state_dict))
            raise ValueError(f"an optimizer's state dict has 'param_groups' and 'state', this has {keys}")
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            raise ValueError(
                f"the state dict has parameter groups of {[len(g['params']) for g in saved]} parameters, the optimizer "
                f"of {[len(g['params']) for g in groups]}; load the state of the same optimizer"
            )
        wanted: list[tuple[Unit, Slot, dict[str, Any]]] = []
        for group, other in zip(groups, saved, strict=True):
            for param, index in zip(group["params"], other["params"], strict=True):
                if state.get(index):
                    unit, slot = self._engine.unit_of(param)
                    entry = _entry_of(state[index])
                    self._check(unit, slot, entry)
                    wanted.append((unit, slot, entry))
        for group, other in zip(groups, copy.deepcopy(saved), strict=True):
            group.update({key: value for key, value in other.items() if key != "params"})
        forget()
        self._put({slot.name: entry for _, slot, entry in wanted})
        optimizer.state = self._state
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)

    def _check(self, unit: Unit, slot: Slot, entry: dict[str, Any]) -> None:
        kept = {name for name, array in unit.shard.arrays.items() if array.public}
        own, slot = slot, unit.shard.whole_slots[slot.name]
        arrays = {
            key for key, value in entry.items() if isinstance(value, torch.Tensor) and value.shape == slot.shape != ()
        }
        wrong = [key for key in arrays - kept if slot.numel > 1 and not self._whole]
        missing = [key for key in kept - entry.keys() if key != "max_exp_avg_sq"]
        shapes = [key for key in kept & entry.keys() if isinstance(entry[key], torch.Tensor)]
        shapes = [key for key in shapes if entry[key].numel() not in (slot.numel, own.numel)]
        if wrong or missing or shapes:
            raise ValueError(
                f"the state dict does not fit {type(self._optimizer).__name__}: for {slot.name!r} it has "
                f"{sorted(map(str, entry))}, this optimizer keeps {sorted(kept)} of shape {tuple(slot.shape)}; load "
                f"the state of the same optimizer. Nothing was changed"
            )


def _entry_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's state, of DTensors what this rank has."""
    return {key: local(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
