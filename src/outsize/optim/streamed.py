"""Any other optimizer: its own `step()`, run on pieces or on whole parameters, with its own state names."""

from __future__ import annotations

import copy
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from numbers import Complex, Real
from typing import Any, final

import torch

from outsize.optim.probe import (
    NARROW,
    Found,
    expect_groups_apart,
    expect_on_what_it_is_given,
    hidden_grads,
    probe,
)
from outsize.optim.rules import Piece, Rule, join_master, refuse_new_array, split_master
from outsize.optim.worker import Pilot, Subject, Unsuited, Worker, attributes_of, plain_step, taken

# Note [Options after prepare]
# A scheduler or the user may set an option that makes the optimizer keep another array (RMSprop's momentum, centered).
# Arrays are made by `prepare` alone, so such an option is found before a step by the same probe, and so is one that
# makes the optimizer look at whole parameters (a norm) where it has run on pieces, and one that its step cannot compute
# with, which raises what it raises in torch. What is set on the optimizer itself counts as an option here. All of that
# depends on the kind of each number (zero, a fraction, above one, not finite) and not on its value: a learning rate
# that changes every step is looked up.

# Note [Narrow states]
# Arrays rest as fp32. One that fp32 holds exactly (a mask, signs, bf16) is given to the step in its own dtype again.

# Note [Arrays that come later]
# An optimizer may make an array in a later step than its first (Lookahead's slow weights), or for some of its groups
# only (a momentum). Room for it is made by `prepare` for all parameters. A parameter whose state is without it has None
# for it in its scalars, which checkpoints keep, and the step is not given the zeros that lie there. (Where there is no
# such record the state has all arrays: so it is in older checkpoints.) One that the step itself had as None in the
# trial is given as None.

# Note [Marked as elementwise]
# A trial on small tensors does not show what a step does above a size (AdafactorBigVision factors above 16 only). So
# only torch's own elementwise optimizers run on pieces, and classes that say `elementwise = True`. A mark holds for the
# `step` of the class that has it: a subclass with a step of its own says it again. All others get whole parameters.

_KNOWN_OPTIONS = 64
"""Combinations of options whose arrays are remembered; real runs have a few."""

_KNOWN_ATTRIBUTES = 16
"""Combinations of what the user hangs on parameters that are tried."""

_NO_OPTIONS = {"params", "param_names"}
_ORDINARY_ERRORS = (ValueError, TypeError, RuntimeError, ZeroDivisionError, OverflowError, AssertionError)


@final
class StreamedRule(Rule):
    """Runs `type(optimizer).step` on one piece, or one whole parameter, at a time. See Note [A worker optimizer]."""

    reads_attributes = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._lock = threading.Lock()
        self._optimizer = weakref.ref(optimizer)  # a thread that updates must not keep it alive
        self._worker = Worker(optimizer)
        self._name = type(optimizer).__name__
        self._known: dict[Hashable, tuple[str, ...]] = {}
        self._always: dict[Hashable, tuple[str, ...]] = {}
        self._numbers = _numbers(optimizer)
        self._attributes = _attributes_of(optimizer)
        self._pieces = _may_run_on_pieces(type(optimizer))
        self._changes: set[str] = set()
        self._start: dict[str, object] = {}
        optimizer.defaults.setdefault("differentiable", False)  # as torch does when a state is loaded
        try:
            _expect_no_arguments(optimizer)
            _expect_parameters(optimizer)
            expect_on_what_it_is_given(optimizer)
            with hidden_grads(optimizer):
                kinds = {self._key(group): group for group in optimizer.param_groups}
                found: dict[Hashable, Found] = {}
                for key, group in kinds.items():
                    self._changes = set()  # each begins with its options as they are
                    found[key] = self._probe(group)
                self._changes = {key for each in found.values() for key in each.changes}
                if not self._pieces and len(optimizer.param_groups) > 1:
                    ends = [optimizer.param_groups[at] for at in (0, -1)]
                    options = [{key: each[key] for key in each.keys() - {"params"}} for each in ends]
                    expect_groups_apart(self._worker, options, self.own())
            if not any(each.moved for each in found.values()):
                raise Unsuited("its step() does not change the parameter that it is given")
        except Unsuited as error:
            raise _refusal(self._name, str(error)) from error
        except Exception as error:
            raise _refusal(self._name, f"its step() on one parameter raised: {error}") from error
        self.whole = not self._pieces or any(each.whole for each in found.values())
        self._dtypes: dict[str, torch.dtype] = {}
        self._nones: set[str] = set()
        for key, each in found.items():
            self._dtypes.update(each.arrays)
            self._known[key] = tuple(each.arrays)
            self._always[key] = tuple(each.always or ())
        self.arrays = tuple(self._dtypes)
        self.tried = {key: value for each in found.values() for key, value in each.scalars.items()}
        self.counts = tuple(dict.fromkeys(count for each in found.values() for count in each.counts))
        for each in found.values():
            self._note_optional(each)
        self._pilot = Pilot(optimizer, self._at_start) if self._changes else None
        present = {**vars(optimizer), **optimizer.param_groups[0]}
        self._start = {key: taken(present[key]) for key in self._changes if key in present}

    def _note_optional(self, found: Found) -> None:
        """See Note [Arrays that come later]."""
        self._nones |= found.nones
        self.optional = (self.optional | set(self.arrays) - (found.always or set())) - self._nones

    def own(self) -> Mapping[str, object]:
        return self._worker.own()

    def look_ahead(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, object]], stepped: Sequence[bool]
    ) -> Callable[[], None] | None:
        return None if self._pilot is None else self._pilot.look_ahead(optimizer, groups, stepped)

    def _key(self, hyper: Mapping[str, object]) -> Hashable:
        return self._signature(hyper), self._signature(self.own())

    def _signature(self, hyper: Mapping[str, object]) -> Hashable:
        """Without what a step changes by itself."""
        return _signature({key: value for key, value in hyper.items() if key not in self._changes})

    def check(self, hyper: Mapping[str, object], where: str) -> None:
        """See Note [Options after prepare]."""
        optimizer = self._optimizer()
        numbers = self._numbers if optimizer is None else _numbers(optimizer)
        if numbers != self._numbers:  # what was added may be parameters of another kind
            self._known.clear()
            self._numbers = numbers
        options = self._key(hyper)
        if options in self._known:
            return
        if len(self._known) >= _KNOWN_OPTIONS:
            self._known.clear()
        try:
            with self._lock:
                found = self._probe(hyper)
        except Unsuited as error:
            raise RuntimeError(
                f"{self._name} cannot run on streamed state with the present options of {where}: {error}"
            ) from error
        except Exception as error:
            kind = type(error) if type(error) in _ORDINARY_ERRORS else RuntimeError
            shown = {key: value for key, value in hyper.items() if key not in _NO_OPTIONS}
            raise kind(f"{self._name} raises with the options of {where}: {error!r}; they are {shown}") from error
        if found.whole and not self.whole:
            raise RuntimeError(
                f"with its present options {self._name} needs whole parameters, and it was prepared to run on "
                f"pieces of them: set such options before prepare. Nothing was updated"
            )
        self._note_optional(found)
        self._known[options] = tuple(found.arrays)
        self._always[options] = tuple(found.always or ())

    def needs(self, hyper: Mapping[str, object]) -> tuple[str, ...]:
        """One that runs on whole parameters keeps a further array as it is."""
        return () if self.whole else self._known[self._key(hyper)]

    def always(self, hyper: Mapping[str, object]) -> tuple[str, ...]:
        return () if self.whole else self._always[self._key(hyper)]

    def apply(self, piece: Piece) -> None:
        master = piece.param if piece.master is None else join_master(piece.param, piece.master).view(piece.param.shape)
        grad = piece.ops.apply_(piece.grad.to(device=master.device, dtype=master.dtype, copy=True))
        state: dict[str, Any] = {}
        if piece.state.initialised:
            state = {name: self._opened(name, view) for name, view in piece.states.items() if name in self.arrays}
            kept = piece.state.scalars
            state.update({key: _copied(key, value, master.device, piece.hyper) for key, value in kept.items()})
            for name in self._absent(kept):
                del state[name]
        subject = Subject(master, grad, state)
        own = self.own() if piece.own is None else piece.own
        with self._lock:  # the conveyor's thread and, for units in memory, the user's
            changes = self._worker.run([subject], piece.hyper, piece.attributes, own)
        new = sorted(set(chain(*changes)) - self._changes) if any(changes) else []
        if new:
            raise Unsuited(f"its step() has begun to change {new[0]!r}, which it did not do when it was tried")
        without = [name for name in self.arrays if name not in subject.state]
        self.optional |= set(without) - self._nones
        piece.state.next_scalars = dict.fromkeys(without)
        for key, value in subject.state.items():
            if key in self.arrays and isinstance(value, torch.Tensor) and value.shape == master.shape:
                if value.data_ptr() != piece.states[key].data_ptr():
                    piece.states[key].copy_(value)
            elif not self.whole and isinstance(value, torch.Tensor) and value.shape == master.shape != (1,):
                refuse_new_array(key)
            else:
                piece.state.next_scalars[key] = value
        if piece.master is not None:
            split_master(master, piece.param, piece.master)

    def _absent(self, scalars: Mapping[str, object]) -> list[str]:
        """See Note [Arrays that come later]."""
        return [key for key in self.arrays if key in scalars and scalars[key] is None and key not in self._nones]

    def _opened(self, name: str, array: torch.Tensor) -> torch.Tensor:
        """See Note [Narrow states]."""
        dtype = self._dtypes[name]
        return array.to(dtype) if dtype in NARROW else array

    def _at_start(self, options: Mapping[str, object]) -> dict[str, object]:
        """With counts as they were, since a step may make its state at the first count."""
        return {
            key: self._start[key] if key in self._changes else value
            for key, value in options.items()
            if key != "params" and (key not in self._changes or key in self._start)
        }

    def _probe(self, group: Mapping[str, object]) -> Found:
        """Try these options, on what parameters there are in groups that have them."""
        optimizer, options = self._optimizer(), _signature(group)
        groups = [] if optimizer is None else optimizer.param_groups
        params = [param for each in groups if _signature(each) == options for param in each["params"]]
        vectors = any(param.dim() == 1 for param in params)
        hyper, own = self._at_start(group), self._at_start(self.own())
        found = probe(self._worker, hyper, self._attributes, own, self._pieces, vectors)
        self._changes |= found.changes
        return found


_ELEMENTWISE = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}


def _may_run_on_pieces(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether the class whose `step` this is computes each element alone. See Note [Marked as elementwise]."""
    step = plain_step(kind)  # torch wraps it anew in the first class that is made an object of
    owners = [each for each in kind.__mro__ if plain_step(each) is step]
    return any(each in _ELEMENTWISE or vars(each).get("elementwise", False) for each in owners)


def _attributes_of(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """What the user has hung on the parameters, of each kind one."""
    found: dict[Hashable, dict[str, object]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            attributes = attributes_of(param)
            kind = _signature(attributes)
            if kind not in found and len(found) < _KNOWN_ATTRIBUTES:
                found[kind] = attributes
    return list(found.values()) or [{}]


def _numbers(optimizer: torch.optim.Optimizer) -> list[int]:
    """Of parameters, by group."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _expect_no_arguments(optimizer: torch.optim.Optimizer) -> None:
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError as error:
        raise Unsuited(f"its step() cannot be called alone: {error}") from error


def _expect_parameters(optimizer: torch.optim.Optimizer) -> None:
    foreign = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if foreign:
        raise Unsuited(f"it keeps state under {foreign[0]!r}, which is no parameter")


def _signature(hyper: Mapping[str, object]) -> Hashable:
    """The options with their numbers reduced to their kind. See Note [Options after prepare]."""
    return tuple((key, _kind(value)) for key, value in hyper.items() if key not in _NO_OPTIONS)


def _kind(value: object) -> Hashable:
    if isinstance(value, Complex):
        return _kind_of_number(value)
    if isinstance(value, torch.Tensor):
        return _kind_of_number(value.item()) if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    if isinstance(value, Mapping):
        return _signature(value)
    kind = value if isinstance(value, Hashable) else type(value)
    try:
        hash(kind)
    except TypeError:  # a frozen record that holds a list
        return str(type(value))
    return kind


def _kind_of_number(value: object) -> Hashable:
    if not isinstance(value, Real):
        return "complex"
    try:
        plain = float(value)
    except OverflowError:
        return "too large"
    if not math.isfinite(plain) or plain in (0, 1):
        return str(plain)
    return "too large" if abs(plain) > _FLOAT32_MAX else (plain > 0, abs(plain) < 1)


_FLOAT32_MAX = torch.finfo(torch.float32).max


def _refusal(name: str, reason: str) -> ValueError:
    return ValueError(
        f"{name} can run neither on pieces of parameters nor on whole parameters one at a time ({reason}), so it "
        f"cannot run on streamed state; use an optimizer such as AdamW, SGD, Adagrad, Muon or Adafactor"
    )


def _copied(key: str, value: object, device: torch.device, hyper: Mapping[str, object]) -> object:
    """A state for the worker to change, on the device where torch has it; a checkpoint leaves all in host memory."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    on_host = key == "step" and not (hyper.get("capturable") or hyper.get("fused"))
    return value.clone() if on_host else value.to(device, copy=True)
