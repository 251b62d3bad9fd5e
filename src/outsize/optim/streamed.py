"""Any other optimizer: its own `step()`, run on pieces or on whole parameters, with its own state names."""

from __future__ import annotations

import copy
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from numbers import Number
from typing import Any, final

import torch

from outsize.optim.rules import FLOAT32_MAX, Piece, Rule, join_master, split_master
from outsize.optim.trial import NARROW, PLAIN, STEPS, Found, Kind, fault_with_closure, on_what_it_is_given, try_out
from outsize.optim.worker import NO_OPTIONS, Subject, Unsuited, Values, Worker, attributes_of, plain_step, snapshots

# Note [Options after prepare]
# A scheduler or the user may set an option that makes the optimizer keep another array (RMSprop's momentum, centered).
# Arrays are made by `prepare` alone, so such an option is found before a step by the same trial, and so is one that
# makes the optimizer look at whole parameters (a norm) where it has run on pieces, and one that its step cannot compute
# with, which raises what it raises in torch. What is set on the optimizer itself counts as an option here. All of that
# depends on the kind of each number (zero, a fraction, above one, not finite) and not on its value: a learning rate
# that changes every step is looked up.

# Note [Narrow states]
# Arrays rest as fp32. One that fp32 holds exactly (a mask, signs, bf16) is given to the step in its own dtype again.

# Note [Arrays that come later]
# An optimizer may make an array in a later step than its first (Lookahead's slow weights), or for some of its groups
# only (a momentum). Room for it is made by `prepare` for all parameters. A parameter whose state is without it has None
# for it in its scalars, which checkpoints keep, and the step is not given the zeros that lie there. One that the step
# itself had as None in the trial is given as None.

# Note [Marked as elementwise]
# A trial on small tensors does not show what a step does above a size (AdafactorBigVision factors above 16 only). So
# only torch's own elementwise optimizers run on pieces, and classes that say `elementwise = True`. A mark holds for the
# `step` of the class that has it: a subclass with a step of its own says it again. All others get whole parameters.

# Note [What a step changes of its groups]
# Many optimizers count steps in their groups (`group["step"] += 1`) or on themselves. Here every parameter is stepped
# alone and later. So when the user calls `step()`, the worker steps on one small parameter a group, the pilot, and what
# it makes of the groups is put into the user's own. Every parameter's step starts from the groups as they were before.
# The trial has shown that these changes do not depend on the parameters.

_KNOWN_OPTIONS = 64
"""Combinations of options whose arrays are remembered; real runs have a few."""

_KNOWN_ATTRIBUTES = 16
"""Combinations of what the user hangs on parameters that are tried."""

_IN_FIRST_STEP = "what a parameter keeps must be made in its first step, not with the optimizer"

_PILOT = (16, 16)
_MOST_TO_CATCH_UP = 1000
"""Steps of a pilot that begins anew, about a tenth of a millisecond each."""
_ORDINARY_ERRORS = (ValueError, TypeError, RuntimeError, ZeroDivisionError, OverflowError, AssertionError)


@final
class StreamedRule(Rule):
    """Runs `type(optimizer).step` on one piece, or one whole parameter, at a time. See Note [A worker optimizer]."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._lock = threading.Lock()  # the conveyor's thread steps and, for units in memory, the user's
        self._optimizer = weakref.ref(optimizer)
        self._worker = Worker(optimizer)
        self._name = type(optimizer).__name__
        self._elementwise = _is_elementwise(type(optimizer))
        self._known: dict[Hashable, Found] = {}
        self._nones: set[str] = set()
        self._changes: set[str] = set()
        self._start: dict[str, Any] = {}
        self._pilots: list[dict[str, Any]] = []
        self._takes_closures: frozenset[Hashable] | None = None  # the options with which it does
        optimizer.defaults.setdefault("differentiable", False)  # as torch does when a state is loaded
        groups = list({self._key(group): group for group in optimizer.param_groups}.values())
        tried = groups * 2 if len(groups) == 1 < len(optimizer.param_groups) else groups
        try:
            inspect.signature(type(optimizer).step).bind(optimizer)
            with on_what_it_is_given(optimizer):
                found, self.whole = self._try_out(tried)
            if not any(each.moved for each in found):
                raise Unsuited("its step() does not change the parameter that it is given")
            of_kind = dict(zip(map(self._key, groups), found, strict=False))
            for group in optimizer.param_groups:
                _expect_no_part(group["params"], optimizer.state, of_kind[self._key(group)])
        except Exception as error:
            reason = str(error) if isinstance(error, Unsuited) else f"its step() on one parameter raised {error!r}"
            if isinstance(error, KeyError) and "param_names" in error.args:
                reason += "; a step is given one parameter, without its name"
            elif isinstance(error, KeyError) and any(optimizer.state.values()):
                reason += f"; {_IN_FIRST_STEP}"
            if of_none := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
                reason += f"; its state has {of_none[0]!r}, which is of no parameter: count in its groups"
            raise ValueError(
                f"{self._name} can run neither on pieces of parameters nor on whole parameters one at a time "
                f"({reason}), so it cannot run on streamed state; use an optimizer such as AdamW, SGD, Adagrad, Muon "
                f"or Adafactor"
            ) from error
        dtypes = {key: dtype for each in found for key, dtype in each.arrays.items()}
        self.arrays = tuple(dtypes)
        self.narrow = {key: dtype for key, dtype in dtypes.items() if dtype in NARROW}
        self.tried = {key: value for each in found for key, value in each.scalars.items()}
        self.counts = ("step",) if all("step" in each.scalars for each in found) else ()
        self._changes = {key for each in found for key in each.changes}
        present = {**vars(optimizer), **optimizer.param_groups[0]}
        self._start = snapshots({key: present[key] for key in self._changes if key in present})
        for group, each in zip(groups, found, strict=False):
            self._keep(self._key(group), each)

    def _keep(self, key: Hashable, found: Found) -> None:
        """See Note [Arrays that come later]."""
        if len(self._known) >= _KNOWN_OPTIONS:
            self._known.clear()
        self._known[key] = found
        self._changes |= found.changes
        self._nones |= found.nones
        self.optional = (self.optional | set(self.arrays) - (found.always or set())) - self._nones

    def _try_out(self, groups: Sequence[Values]) -> tuple[list[Found], bool]:
        """Try these options."""
        return try_out(self._worker, self._to_try(groups), self._at_start(self._worker.own()), self._elementwise)

    def _to_try(self, groups: Sequence[Values]) -> list[Kind]:
        """These options, with what parameters there are in groups that have them."""
        optimizer = self._optimizer()
        present = [] if optimizer is None else optimizer.param_groups
        kinds = []
        for options in groups:
            params = [p for each in present if self._kinds_of(each) == self._kinds_of(options) for p in each["params"]]
            hung = {_kinds(each): each for each in map(attributes_of, params)}
            attributes = list(hung.values())[:_KNOWN_ATTRIBUTES] or [{}]
            longest = max((param.numel() for param in params if param.dim() == 1), default=0)
            kinds.append(Kind(self._at_start(options), attributes, longest))
        return kinds

    def _key(self, options: Values) -> Hashable:
        """What the arrays depend on; parameters that are added may be of another kind."""
        optimizer = self._optimizer()
        counts = () if optimizer is None else tuple(len(group["params"]) for group in optimizer.param_groups)
        return counts, self._kinds_of(options), self._kinds_of(self._worker.own())

    def _kinds_of(self, options: Values) -> Hashable:
        """Without what a step changes by itself."""
        return _kinds({key: value for key, value in options.items() if key not in self._changes})

    def _at_start(self, options: Values) -> dict[str, Any]:
        """With counts as they were, since a step may make its state at the first count."""
        kept = {key: value for key, value in options.items() if key not in NO_OPTIONS | self._changes}
        return kept | {key: value for key, value in self._start.items() if key in options}

    def check(self, hyper: Values, where: str) -> None:
        """See Note [Options after prepare]."""
        key = self._key(hyper)
        if key in self._known:
            return
        try:
            with self._lock:
                [found], whole = self._try_out([hyper])
        except Unsuited as error:
            raise RuntimeError(
                f"{self._name} cannot run on streamed state with the present options of {where}: {error}"
            ) from error
        except Exception as error:
            kind = type(error) if type(error) in _ORDINARY_ERRORS else RuntimeError
            shown = {key: value for key, value in hyper.items() if key not in NO_OPTIONS}
            raise kind(f"{self._name} raises with the options of {where}: {error!r}; they are {shown}") from error
        if whole and not self.whole:
            raise RuntimeError(
                f"with its present options {self._name} needs whole parameters, and it was prepared to run on "
                f"pieces of them: set such options before prepare. Nothing was updated"
            )
        self._keep(key, found)

    def needs(self, hyper: Values) -> tuple[str, ...]:
        """One that runs on whole parameters keeps a further array as it is."""
        return () if self.whole else tuple(self._known[self._key(hyper)].arrays)

    def always(self, hyper: Values) -> tuple[str, ...]:
        return () if self.whole else tuple(self._known[self._key(hyper)].always or ())

    def note(self, param: torch.Tensor) -> tuple[Values, Values]:
        return snapshots(attributes_of(param)), self._worker.own()

    def check_closure(self, groups: Sequence[Values]) -> None:
        """By trying steps with and without. The user's closure is called before a step is marked, and once."""
        keys = frozenset(map(self._key, groups))
        if keys == self._takes_closures:
            return
        try:
            with self._lock:
                own = self._at_start(self._worker.own())
                fault = fault_with_closure(self._worker, self._to_try(groups), own, self.whole)
        except Exception as error:
            fault = f"raised {error!r} when it was tried"
        if fault is not None:
            raise RuntimeError(
                f"{self._name}.step(closure) {fault}, and all that can be done here is to call the closure once, at "
                f"first. Call loss.backward() yourself and step() without a closure, if what the optimizer does then "
                f"is what you want; or use another optimizer. Nothing was updated"
            )
        self._takes_closures = keys

    def look_ahead(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Values], stepped: Sequence[bool]
    ) -> Callable[[], None] | None:
        """See Note [What a step changes of its groups]."""
        if not self._changes:
            return None
        own = self._worker.own()
        pilots, of_groups, of_optimizer = [], [], dict[str, Any]()
        before = [*self._pilots, *[{}] * (len(groups) - len(self._pilots))]  # at first, or where a group was added
        for hyper, with_grad, state in zip(groups, stepped, before, strict=True):
            pilot = _pilot(with_grad, copy.deepcopy(state))
            with self._lock:
                try:
                    [changed], changed_own = self._worker.run([(hyper, [pilot])], own)
                except Exception as error:
                    if not with_grad:
                        raise
                    # The groups have counted on without the pilot (a checkpoint was loaded): it makes its state first.
                    pilot, changed, changed_own = self._caught_up(hyper, own, error)
            pilots.append(pilot.state)
            of_groups.append(changed)
            of_optimizer.update(changed_own)

        def commit() -> None:
            self._pilots = pilots
            for group, changed in zip(optimizer.param_groups, of_groups, strict=True):
                group.update(changed)
            vars(optimizer).update(of_optimizer)

        return commit

    def _caught_up(
        self, hyper: Values, own: Values, error: Exception
    ) -> tuple[Subject, dict[str, Any], dict[str, Any]]:
        """A step with these options by a pilot that has begun anew, after as many steps as make it possible."""
        options, owned, state = self._at_start(hyper), self._at_start(own), dict[str, Any]()
        for count in range(1, _MOST_TO_CATCH_UP + 1):
            pilot = _pilot(True, state)
            [changed], changed_own = self._worker.run([(options, [pilot])], owned)
            options, owned, state = {**options, **changed}, {**owned, **changed_own}, pilot.state
            if count >= STEPS:
                pilot = _pilot(True, copy.deepcopy(state))
                with suppress(Exception):
                    [changed], changed_own = self._worker.run([(hyper, [pilot])], own)
                    return pilot, changed, changed_own
        raise RuntimeError(
            f"{self._name} cannot go on with the options of its param_groups: step() on a small parameter raised "
            f"{error!r}, also after {_MOST_TO_CATCH_UP} steps of its own. If it makes an array at a late count, "
            f"make it in the first step. Nothing was updated"
        ) from error

    def apply(self, piece: Piece) -> dict[str, object]:
        master = piece.param if piece.master is None else join_master(piece.param, piece.master).view(piece.param.shape)
        grad = piece.ops.apply_(piece.grad.to(device=master.device, dtype=master.dtype, copy=True))
        attributes, own = piece.noted or ({}, self._worker.own())
        beside = {key: _moved(value, master.device) for key, value in attributes.items()}
        subject = Subject(master, grad, self._given(piece, master.device), beside)
        with self._lock:
            of_groups, of_optimizer = self._worker.run([(piece.hyper, [subject])], own)
        new = sorted(set(chain(*of_groups, of_optimizer)) - self._changes)
        if new:
            raise Unsuited(f"its step() has begun to change {new[0]!r}, which it did not do when it was tried")
        without = [name for name in self.arrays if name not in subject.state]
        self.optional |= set(without) - self._nones
        scalars: dict[str, object] = dict.fromkeys(without)
        for key, value in subject.state.items():
            for_each = isinstance(value, torch.Tensor) and value.shape == master.shape
            if for_each and key in self.arrays:
                tried = self.narrow.get(key)
                plain = type(value) in PLAIN
                if not plain or (value.dtype != tried and (tried is not None or value.dtype in NARROW)):
                    kept = str(value.dtype).removeprefix("torch.") if plain else type(value).__name__
                    raise Unsuited(f"it keeps {key!r} as {kept}, which it did not do when it was tried")
                if value.data_ptr() != piece.states[key].data_ptr():
                    piece.states[key].copy_(value)
            elif for_each and not self.whole and master.shape != (1,):
                raise RuntimeError(
                    f"the optimizer started to keep {key!r} for each element after outsize.prepare; set the option "
                    f"that needs it (a momentum, for example) before prepare"
                )
            else:
                scalars[key] = value
        if piece.master is not None:
            split_master(master, piece.param, piece.master)
        return scalars

    def _given(self, piece: Piece, device: torch.device) -> dict[str, Any]:
        """The state for the worker to change, scalars on the device where torch has them; a checkpoint leaves all in
        host memory. See Notes [Narrow states] and [Arrays that come later]."""
        if not piece.state.initialised:
            return {}
        on_host = set() if piece.hyper.get("capturable") or piece.hyper.get("fused") else {"step"}
        scalars = piece.state.scalars
        state = {
            key: copy.deepcopy(value if key in on_host else _moved(value, device)) for key, value in scalars.items()
        }
        for name in self.arrays:
            if name not in scalars:
                state[name] = piece.states[name].to(self.narrow.get(name, piece.states[name].dtype))
            elif scalars[name] is None and name not in self._nones:
                del state[name]
        return state


def _expect_no_part(params: Iterable[torch.Tensor], states: Mapping[Any, Any], found: Found) -> None:
    """Raise `Unsuited` for a matrix that has a state before its first step, and not what each step leaves."""
    always = {*(found.always or ()), *({"step"} & found.scalars.keys())}
    for param in params:
        state = states.get(param) or always
        if param.dim() > 1 and always - set(state):
            raise Unsuited(f"a parameter has {sorted(state)} and not {sorted(always - set(state))}; {_IN_FIRST_STEP}")


def _pilot(with_grad: bool, state: dict[str, Any]) -> Subject:
    """A small parameter, the same every time."""
    generator = torch.Generator().manual_seed(0)
    start, grad = torch.randn(2, *_PILOT, generator=generator, device="cpu", dtype=torch.float32)
    return Subject(start, grad if with_grad else None, state)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


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


def _is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether the class whose `step` this is computes each element alone. See Note [Marked as elementwise]."""
    step = plain_step(kind)  # torch wraps it anew in the first class that is made an object of
    owners = [each for each in kind.__mro__ if plain_step(each) is step]
    return any(each in _ELEMENTWISE or vars(each).get("elementwise", False) for each in owners)


def _kinds(options: Values) -> Hashable:
    """The options with their numbers reduced to their kind. See Note [Options after prepare]."""
    return tuple((key, _kind(value)) for key, value in options.items() if key not in NO_OPTIONS)


def _kind(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, Number):
        return _kind_of_number(value)
    if isinstance(value, Mapping):
        return _kinds(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    try:
        hash(value)
    except TypeError:  # a frozen record that holds a list
        return str(type(value))
    return value  # type: ignore[no-any-return]


def _kind_of_number(value: Any) -> Hashable:
    try:
        plain = float(value)
    except (TypeError, OverflowError):
        return f"no float: {type(value)}"
    if not math.isfinite(plain) or plain in (0, 1):
        return str(plain)
    return "too large" if abs(plain) > FLOAT32_MAX else (plain > 0, abs(plain) < 1)
