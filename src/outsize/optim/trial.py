"""What an optimizer needs, found out by trying it on small parameters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from outsize.optim.worker import Subject, Unsuited, Values, Worker, differs, inside

# Note [The trial]
# One question is asked by trying: does a step on all parameters together equal, bit for bit, a step on each part alone,
# in values, states and groups? A part is a parameter, or half of one where the class says that it computes each element
# alone. It is asked with every kind of group at once, at sizes where optimizers factor or quantize, over several steps,
# with gradients of different scale. An optimizer for which it does not (a norm over all gradients, Prodigy's estimate),
# that needs a closure, draws random numbers or keeps what it learns outside of its parameters' state is refused with
# the reason. The trial also shows what there is for each element. What first happens in a later step than the last one
# of the trial is not seen.

# Note [Steps on what is not given]
# An optimizer that wraps another one, or has a list of the parameters of its own, steps on the real parameters and not
# on the worker's; one that looks something up by parameter does not find the worker's. Both are seen by what the
# optimizer holds, before it is tried. The real gradients are out of sight meanwhile, and one whose trial moves nothing
# and keeps nothing is refused too.

NARROW = {torch.bool, torch.int8, torch.uint8, torch.int16, torch.bfloat16, torch.float16}
"""What fp32 holds exactly."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Whose bytes are their values."""

STEPS = 5
_SMALL = (8, 12)
_LARGE = (128, 144)
"""Not square, so that an array for each row or column is not taken for one for each element. The large one is of whole
blocks of 2048 elements: optimizers quantize block by block, and leave other sizes as they are."""
_SHORTEST, _LONGEST = 96, 4096
"""A vector is as long as the longest that there is, since some keep a matrix of its length; but within these."""
_SCALES = (1.0, 1e-3, 30.0)
"""Of the gradients of each parameter; they double from step to step."""
_CUT = 48
"""Where small parameters are cut: vectorised arithmetic rounds the elements that fill no vector otherwise."""


@dataclass
class Kind:
    """A parameter group to try."""

    options: Values
    attributes: Sequence[Values]
    """What the user has hung on parameters, of each kind one."""
    longest: int
    """The elements of the longest parameter of one dimension; 0 without one."""


@dataclass
class Found:
    """What the parameters of a group keep."""

    arrays: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtype of each per-element array of a matrix."""
    dtypes: set[tuple[str, torch.dtype]] = field(default_factory=set)
    """Of the per-element arrays of all parameters."""
    always: set[str] | None = None
    """The arrays that there were after every step."""
    nones: set[str] = field(default_factory=set)
    """What was None for a while."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """What else there is of a parameter."""
    changes: set[str] = field(default_factory=set)
    """The options, and the attributes of the optimizer, that a step changes."""
    moved: bool = False
    """Whether any step changed a parameter, or kept anything of it."""


@dataclass
class _Sample:
    """A parameter to try, before the first step."""

    start: torch.Tensor
    grads: list[torch.Tensor]
    attributes: Values

    def part(self, low: int, high: int) -> _Sample:
        """Some of its elements, 1-D."""
        grads = [each.reshape(-1)[low:high] for each in self.grads]
        return _Sample(self.start.reshape(-1)[low:high], grads, self.attributes)


def try_out(worker: Worker, kinds: Sequence[Kind], own: Values, elementwise: bool) -> tuple[list[Found], bool]:
    """What each kind of group keeps, and whether a step needs whole parameters. See Note [The trial].

    `elementwise`: the class says that it computes each element alone. Raises `Unsuited` if parameters cannot be stepped
    one at a time, and what the step raises.
    """
    if elementwise:
        with suppress(Exception):  # whole parameters may do, or tell why not
            return _of_one_dtype(_compared(worker, kinds, own, _SMALL, cut=True)), False
    small: list[Found] = []
    try:  # some want gigabytes for large ones
        small = _compared(worker, kinds, own, _SMALL, cut=False)
    except Exception as error:
        if isinstance(error, Unsuited):
            raise
    large = _compared(worker, kinds, own, _LARGE, cut=False)
    _of_one_dtype([*small, *large])
    return large, True


def _of_one_dtype(found: list[Found]) -> list[Found]:
    """Raise `Unsuited` if an array is kept in several. What is given back is of the dtype that the trial has found."""
    known: dict[str, torch.dtype] = {}
    for key, dtype in sorted(set().union(*(each.dtypes for each in found)), key=str):
        if known.setdefault(key, dtype) != dtype:
            kinds = " and as ".join(str(each).removeprefix("torch.") for each in (known[key], dtype))
            raise Unsuited(
                f"it keeps {key!r} as {kinds}, by the size, the group or the step of a parameter; AdamW with "
                f"state_format='compact' has 8-bit states"
            )
    return found


def _compared(worker: Worker, kinds: Sequence[Kind], own: Values, shape: tuple[int, ...], cut: bool) -> list[Found]:
    generator = torch.Generator().manual_seed(0)
    options = [_with_rate(kind.options, 0.01 + 0.001 * at) for at, kind in enumerate(kinds)]
    samples = [list(_samples(kind, shape, generator)) for kind in kinds]
    with _random_numbers_kept():
        together, changes, own_changes, found = _stepped(worker, options, samples, own)
        for at, subjects in enumerate(together):
            for sample, subject in zip(samples[at], subjects, strict=True):
                _expect_kept_by_element(subject)
                found[at].moved = found[at].moved or _moved(sample, subject)
                numel = sample.start.numel()
                for low, high in ((0, _CUT), (_CUT, numel)) if cut else ((0, numel),):
                    part = sample.part(low, high) if cut else sample
                    [[alone]], [changed], changed_own, _ = _stepped(worker, options[at : at + 1], [[part]], own)
                    expected = _part(subject, low, high) if cut else subject
                    if differs((alone.param, alone.state), (expected.param, expected.state)):
                        raise Unsuited(
                            "its step on one parameter depends on the others, or on the other groups; if that is a "
                            "norm over all gradients, turn it off (max_grad_norm=None) and clip with "
                            "torch.nn.utils.clip_grad_norm_"
                        )
                    if differs((changed, changed_own), (changes[at], own_changes)):
                        raise Unsuited(
                            "what its step changes of its param_groups or of itself depends on the parameters"
                        )
    return found


def fault_with_closure(worker: Worker, kinds: Sequence[Kind], own: Values, whole: bool) -> str | None:
    """What a step does beside calling a closure once and then what it does without one; None where that is all."""
    calls: list[None] = []

    def closure() -> torch.Tensor:
        calls.append(None)
        return torch.full((), 2.0, device="cpu", requires_grad=True)

    generator = torch.Generator().manual_seed(0)
    options = [_with_rate(kind.options, 0.01) for kind in kinds]
    samples = [list(_samples(kind, _LARGE if whole else _SMALL, generator)) for kind in kinds]
    with _random_numbers_kept():
        without, with_one = (_stepped(worker, options, samples, own, given)[:3] for given in (None, closure))
    if not calls:
        return "does not call the closure"
    if len(calls) != STEPS:
        return "calls the closure more than once"
    values = [[[(each.param, each.state) for each in group] for group in found[0]] for found in (without, with_one)]
    return "uses the loss" if differs(*values) or differs(without[1:], with_one[1:]) else None


def _samples(kind: Kind, shape: tuple[int, ...], generator: torch.Generator) -> Iterator[_Sample]:
    for attributes in kind.attributes:
        vectors = [(min(max(kind.longest, _SHORTEST), _LONGEST),)] if kind.longest else []
        for each, scale in zip((shape, shape, *vectors), _SCALES, strict=False):
            # In fp32 in host memory, whatever the defaults of dtype and device are.
            start, *grads = torch.randn(STEPS + 1, *each, generator=generator, device="cpu", dtype=torch.float32)
            yield _Sample(start, [grad * scale * 2**step for step, grad in enumerate(grads)], attributes)


def _stepped(
    worker: Worker,
    options: Sequence[Values],
    samples: Sequence[Sequence[_Sample]],
    own: Values,
    closure: Callable[[], Any] | None = None,
) -> tuple[list[list[Subject]], list[list[dict[str, Any]]], list[dict[str, Any]], list[Found]]:
    """The parameters of each group after all steps, what each step changed of the groups and of the optimizer, and what
    was found."""
    subjects = [[Subject(each.start.clone(), None, {}, each.attributes) for each in group] for group in samples]
    hypers, own = [dict(each) for each in options], dict(own)
    changes: list[list[dict[str, Any]]] = [[] for _ in options]
    own_changes, found = [], [Found() for _ in options]
    for step in range(STEPS):
        for group, originals in zip(subjects, samples, strict=True):
            for subject, sample in zip(group, originals, strict=True):
                subject.grad = sample.grads[step].clone()
        of_groups, of_optimizer = worker.run(list(zip(hypers, subjects, strict=True)), own, closure)
        for at, changed in enumerate(of_groups):
            hypers[at].update(changed)
            changes[at].append(changed)
            _note(found[at], subjects[at], changed.keys() | of_optimizer.keys())
        own.update(of_optimizer)
        own_changes.append(of_optimizer)
    return subjects, changes, own_changes, found


def _note(found: Found, subjects: Sequence[Subject], changes: set[str]) -> None:
    """Look at what there is after a step."""
    found.changes |= changes
    for subject in subjects:
        arrays = {key: value.dtype for key, value in subject.state.items() if _is_array(value, subject.param)}
        found.scalars |= {key: value for key, value in subject.state.items() if key not in arrays}
        found.dtypes |= set(arrays.items())
        if subject.param.dim() > 1:
            found.arrays |= arrays
            found.always = arrays.keys() & (arrays.keys() if found.always is None else found.always)
            found.nones |= {key for key, value in subject.state.items() if value is None}


def _part(subject: Subject, low: int, high: int) -> Subject:
    """Some elements of a parameter that was stepped, and of its arrays."""
    state = {
        key: value.reshape(-1)[low:high] if _is_array(value, subject.param) else value
        for key, value in subject.state.items()
    }
    return Subject(subject.param.reshape(-1)[low:high], None, state)


def _with_rate(options: Values, rate: float) -> Values:
    """A warm-up may start at 0, where nothing could be seen."""
    lr = options.get("lr")
    if isinstance(lr, torch.Tensor) and lr.numel() == 1 and lr.is_floating_point() and 0 <= lr.item() < 1e9:
        return {**options, "lr": torch.full_like(lr, rate)}
    return {**options, "lr": rate} if isinstance(lr, (int, float)) and 0 <= lr < 1e9 else options


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Raise `Unsuited` if they were drawn, and put them back."""
    before = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        drawn = differs((torch.get_rng_state(), random.getstate()), before)
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if drawn:
            raise Unsuited("its step() draws random numbers, which would come in another order")


def _is_array(value: object, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _moved(sample: _Sample, subject: Subject) -> bool:
    kept = any(value.numel() > 1 and bool(value.any()) for value in _tensors(subject.state))
    return kept or differs(subject.param, sample.start)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    return (each for each in inside(value) if isinstance(each, torch.Tensor))


def _expect_kept_by_element(subject: Subject) -> None:
    """What there is for each element must be a plain tensor of the parameter's shape, since only that is streamed."""
    for key, value in subject.state.items():
        if any(type(each) not in PLAIN for each in _tensors(value)):
            raise Unsuited(
                f"it keeps {key!r} as a subclass of torch.Tensor; AdamW with state_format='compact' has 8-bit states"
            )
        if not _is_array(value, subject.param):
            if any(tensor.numel() == subject.param.numel() for tensor in _tensors(value)):
                how = "in another shape" if isinstance(value, torch.Tensor) else f"in a {type(value).__name__}"
                raise Unsuited(
                    f"it keeps {key!r} for each element {how}, and only tensors of the parameter's shape are streamed"
                )
        elif value.dtype not in (torch.float32, *NARROW):
            raise Unsuited(
                f"it keeps {key!r} as {str(value.dtype).removeprefix('torch.')} for each element, which the float32 of "
                f"streamed state cannot hold"
            )
    places = {subject.param.data_ptr(): "the parameter"}
    for key, value in subject.state.items():
        if _is_array(value, subject.param):
            other = places.setdefault(value.data_ptr(), repr(key))
            if other != repr(key):
                raise Unsuited(
                    f"it keeps {key!r} in the memory of {other}, and each is streamed by itself; clone one of them"
                )


@contextmanager
def on_what_it_is_given(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Raise `Unsuited` for an optimizer that holds another one, or its parameters; whatever steps on the real ones all
    the same finds no gradient there. See Note [Steps on what is not given]."""
    params: list[Any] = [param for group in optimizer.param_groups for param in group["params"]]
    own = {id(param) for param in params}
    held = [(f"its attribute {key!r}", value) for key, value in vars(optimizer).items() if key not in _SEEN]
    for group in optimizer.param_groups:
        held += [(f"{key!r} of its param_groups", value) for key, value in group.items() if key not in _SEEN]
    shared = [(where, each) for where, value in held for each in inside(value)]  # with the worker, unlike numbers
    for where, each in shared:
        if isinstance(each, torch.optim.Optimizer):
            raise Unsuited(f"{where} is another optimizer, which has the parameters themselves: prepare that one")
        if id(each) in own or (type(each) is int and each in own):
            raise Unsuited(f"{where} holds parameters or their ids, and its step() is given pieces of them")
    own_classes = [("its class", each) for each in type(optimizer).__mro__ if each not in torch.optim.Optimizer.__mro__]
    objects = [(where, each) for where, each in (*shared, *own_classes) if hasattr(each, "__dict__")]
    before = [_numbers(each) for _, each in objects]
    grads = [param.grad for param in params]
    try:
        for param in params:
            param.grad = None
        yield
        for (where, each), numbers in zip(objects, before, strict=True):
            if differs(_numbers(each), numbers):
                raise Unsuited(f"its step() counts in {where}, and runs once a parameter here; count in its groups")
    finally:
        for (_, each), numbers in zip(objects, before, strict=True):
            now = _numbers(each)
            for key in [key for key in now.keys() | numbers.keys() if now.get(key) != numbers.get(key)]:
                with suppress(AttributeError, TypeError):  # what cannot be written to has not changed
                    if key in numbers:
                        setattr(each, key, numbers[key])
                    else:
                        delattr(each, key)
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                param.grad = grad


def _numbers(holder: object) -> dict[str, float]:
    """The attributes that may be counts. A flag or what is kept for later is none."""
    return {key: value for key, value in vars(holder).items() if type(value) in (int, float)}


_SEEN = {"param_groups", "params", "state"}
"""Where an optimizer has its parameters."""
