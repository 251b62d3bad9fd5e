"""`optimizer.state` after `prepare`: read from, and written to, where each parameter's state rests."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch

from outsize.move.shard import SlotState, UnitShard
from outsize.move.store import DTYPES, MASTER
from outsize.optim.rules import Rule, join_master, split_master
from outsize.planning.layout import Slot
from outsize.run.local import copy_like, local
from outsize.run.owner import Owner
from outsize.run.parameters import Parameters
from outsize.run.state_entry import (
    CopiedEntry,
    check_counts,
    check_entry,
    given_entry,
    own_part,
    read_entry,
    store_entry,
)
from outsize.run.streamer import Streamer
from outsize.run.unit import Unit
from outsize.run.wrappers import is_wrapper

MASTER_KEY = "fp32_master"
"""In a state dict. See Note [Masters in a state dict]."""
STATE_OF = "the optimizer's state of "


@dataclass(frozen=True)
class _Given:
    """One parameter's state as somebody gives it, found to fit."""

    unit: Unit
    name: str
    entry: dict[str, Any]
    master: torch.Tensor | None = None


# Note [Masters in a state dict]
# A model's state dict has the 16-bit weights. What completes them is the optimizer's: the entry of a parameter that
# was stepped has its fp32 values under `MASTER_KEY`. Loaded, they are the truth: the weight becomes their rounding.
# So it does not matter which of the two state dicts is loaded first. torch's own optimizers keep the key unused.


@final
@dataclass(eq=False, repr=False)
class OptimizerState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """`optimizer.state`: reading a parameter's entry reads it from where it rests, as a copy. Entries given one by one,
    in another mapping or in a state dict are checked and stored in the same way."""

    _parameters: Parameters
    _streamer: Streamer
    _owner: Owner
    _optimizer: Any
    _rule: Rule
    _expect_stepped: Callable[[Iterable[torch.Tensor], str], None]
    """Raises for parameters that a backward has updated and whose step is still to come."""
    _for_a_state_dict: bool = False  # entries are plain and in host memory

    def __post_init__(self) -> None:
        self.keep()

    def keep(self) -> None:
        """What the user may have put in place of `optimizer.state` is not wanted any more: the state was loaded."""
        self._optimizer.state = self
        self._counted = False

    def check_counts(self) -> None:
        """Raise `ValueError` if a state that came from elsewhere does not count its steps."""
        if not self._counted:
            for unit in self._parameters.units:
                for name, state in unit.shard.slot_states.items():
                    if state.initialised:
                        check_counts(name, state.scalars, self._rule)
            self._counted = True

    def get(self, param: Any, default: Any = None) -> Any:
        """As of a dict: the default where the parameter has no state yet."""
        has_state = param in self
        return self[param] if has_state else default

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        if not self._parameters.owns(param):
            raise KeyError(param)
        unit, slot = self._parameters.unit_of(param)
        with self._owner.turn("optimizer.state"), torch.inference_mode(False):  # whose tensors' writes count
            self._settle(unit)
            entry = read_entry(unit, slot, self._rule, self._for_a_state_dict)
        return entry if self._for_a_state_dict else CopiedEntry(entry)

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
        given = self._checked(param, state, self._options_of(param))
        self._expect_stepped([param], STATE_OF)
        with self._owner.turn("optimizer.state"):
            self._store(given.unit, [given])

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

    def take(self) -> None:
        """Take over a mapping that the user has put in place of `optimizer.state`: an empty one begins anew."""
        given: Any = self._optimizer.state
        if given is self:
            return
        if not isinstance(given, Mapping):
            raise TypeError(f"optimizer.state must be a mapping of parameters to their state, not {given!r:.80}")
        checked = [self._checked(param, state, self._options_of(param)) for param, state in given.items()]
        try:
            self._expect_stepped(
                [param for unit in self._parameters.units for param in unit.parameters.values()], STATE_OF
            )
        except RuntimeError:
            self._optimizer.state = self
            raise
        with self._streamer.live.changing("taking over optimizer.state"):
            self._store_all(checked)
        self._optimizer.state = self

    def state_dict(self) -> dict[str, Any]:
        """A plain optimizer's state dict, with masters, in host memory: a device that had room for all of it would need
        no tiers. See Note [Masters in a state dict]."""
        self._for_a_state_dict = True
        try:
            found: dict[str, Any] = type(self._optimizer).state_dict(self._optimizer)
        finally:
            self._for_a_state_dict = False
        groups, _ = _parts_of(found)
        for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
            for param, index in zip(group["params"], saved["params"], strict=True):
                if is_wrapper(param):
                    continue  # frozen: it has no state
                unit, slot = self._parameters.unit_of(param)
                if was_stepped(unit.shard, slot.name) and unit.shard.array(MASTER, slot):
                    unit.await_written()
                    rest = unit.shard.read_array(unit.shard.arrays[MASTER], slot.offset, slot.end)
                    master = join_master(unit.shard.read_weight(slot.name), rest).view(slot.shape)
                    entry = found["state"].setdefault(index, {})  # there is none for SGD without momentum
                    entry[MASTER_KEY] = master if unit.shard.ranks > 1 else copy_like(param, master)
        return found

    def load_state_dict(self, state_dict: dict[str, Any], forget: Callable[[], None]) -> None:
        """Take over a plain optimizer's state dict: hyper-parameters, arrays and step counts.

        `forget`: called once it is found to fit. Raises `ValueError`, with nothing changed, for the state of another
        optimizer or of other parameters.
        """
        optimizer = self._optimizer
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(optimizer, state_dict)
            state_dict = state_dict if replaced is None else replaced
        saved, state = _parts_of(state_dict)
        if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            beside = sorted(map(str, state_dict.keys() - {"param_groups", "state"}))
            if beside:
                raise ValueError(
                    f"the state dict of this {type(optimizer).__name__} also has {beside}, for the load_state_dict of "
                    f"its class, which is not called here: take them out, and set them on the optimizer yourself"
                )
        groups = optimizer.param_groups
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            raise ValueError(
                f"the state dict has parameter groups of {[len(g['params']) for g in saved]} parameters, the optimizer "
                f"of {[len(g['params']) for g in groups]}; load the state of the same optimizer"
            )
        checked: list[_Given] = []
        for at, (group, other) in enumerate(zip(groups, saved, strict=True)):
            hyper = _options({**group, **other})
            if group["params"]:
                self._rule.check(hyper, f"the state dict's param_groups[{at}]")
            for param, index in zip(group["params"], other["params"], strict=True):
                if not (is_wrapper(param) and index not in state):  # a frozen one, which has none
                    checked.append(self._checked(param, state.get(index) or {}, hyper))
        with self._streamer.live.changing("optimizer.load_state_dict"):
            for group, other in zip(groups, copy.deepcopy(saved), strict=True):
                group.update(_options(other))
            self.put_options_right()
            forget()
            self._store_all(checked)
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)

    # Note [Options of another optimizer's state]
    # torch hands what it has loaded to the optimizer's `__setstate__`, which adds the options that earlier versions did
    # not have, and puts right those that make the class what it is: AdamW's decay stays decoupled whatever the state of
    # an Adam says. Here it is shown no state, which would be read from where it rests, one parameter after the other.

    def put_options_right(self) -> None:
        """Parameter groups were loaded from what may be another optimizer's."""
        try:
            self._optimizer.__setstate__({"state": defaultdict(dict), "param_groups": self._optimizer.param_groups})
        finally:
            self._optimizer.state = self

    def _options_of(self, param: object) -> dict[str, Any] | None:
        """The options of the parameter's group; None where it is in none."""
        groups = self._optimizer.param_groups
        return next((_options(group) for group in groups if any(param is each for each in group["params"])), None)

    def _checked(self, param: object, state: object, hyper: Mapping[str, Any] | None) -> _Given:
        """One parameter's state. Raises `TypeError` or `ValueError` for what is none of this optimizer and model."""
        if not isinstance(param, torch.Tensor) or not self._parameters.owns(param):
            shown = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
            raise ValueError(
                f"optimizer.state was given an entry for {shown}, which is no parameter of the model that "
                f"outsize.prepare prepared"
            )
        unit, slot = self._parameters.unit_of(param)
        entry, master = given_entry(state, slot.name, self._rule), None
        if MASTER_KEY in entry and MASTER_KEY not in unit.shard.arrays:
            master = _checked_master(entry.pop(MASTER_KEY), unit.shard, slot)
        if entry or master is not None:
            check_entry(unit.shard, slot, entry, self._rule, type(self._optimizer).__name__, hyper)
        return _Given(unit, slot.name, entry, master)

    def _store_all(self, given: list[_Given]) -> None:
        """Replace the state of all parameters; those that are not given one begin anew."""
        named = {each.name: each for each in given}
        for unit in self._parameters.units:
            known = [name for name in unit.parameters if name in named or name in unit.shard.slot_states]
            self._store(unit, [named.get(name, _Given(unit, name, {})) for name in known])

    def _store(self, unit: Unit, given: list[_Given]) -> None:
        self._settle(unit)
        for each in given:
            store_entry(unit.shard, each.name, each.entry)
        masters = {each.name: each.master for each in given if each.master is not None}
        for name, master in masters.items():
            unit.shard.make_room([name])
            _store_master(unit.shard, unit.shard.slots[name], own_part(unit.shard, name, master, torch.float32))
            unit.shard.slot_states[name] = SlotState(unit.shard.slot_states[name].scalars, initialised=True)
        if masters:
            unit.updates += 1  # a graph of before must not be used
            if unit.shard.ranks > 1:
                self._streamer.regather(unit)

    def _settle(self, unit: Unit) -> None:
        self._streamer.settle(unit)
        unit.await_written()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def was_stepped(shard: UnitShard, name: str) -> bool:
    """Whether the optimizer has stepped on the parameter, whatever it keeps."""
    return name in shard.slot_states and shard.slot_states[name].initialised


def _has_state(shard: UnitShard, name: str) -> bool:
    return was_stepped(shard, name) and bool(shard.slot_states[name].scalars or shard.has_state)


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


def _checked_master(value: object, shard: UnitShard, slot: Slot) -> torch.Tensor:
    whole = shard.whole_slots[slot.name]
    if not isinstance(value, torch.Tensor) or local(value).numel() not in (slot.numel, whole.numel):
        raise ValueError(
            f"the state of {slot.name!r} has no fp32 values of shape {tuple(whole.shape)} under {MASTER_KEY!r}; give "
            f"the state dict of the same model. Nothing was changed"
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
