"""What an optimizer needs, found out by trying it on small parameters."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, final

import torch

from outsize.optim.worker import Subject, Unsuited, Worker, differs, same_values, taken

# Note [The probe]
# One question is asked by trying (`optim/worker.py` runs the step): does stepping two parameters together equal
# stepping each alone, bit for bit, in values, states and groups? It is asked at sizes where optimizers factor or
# quantize, over several steps, with gradients of different scale. An optimizer for which it does not (a norm over all
# gradients, Prodigy's estimate), that needs a closure, draws random numbers or keeps what it learns outside of its
# parameters' state is refused with the reason. The trial also shows what there is for each element. What first happens
# in a later step than the last one of the trial is not seen.

# Note [Steps on what is not given]
# An optimizer that wraps another one, or has a list of the parameters of its own, steps on the real parameters and not
# on the worker's; one that looks something up by parameter does not find the worker's. Both are seen by what the
# optimizer holds, before it is tried. The real gradients are out of sight meanwhile, and one whose trial moves nothing
# and keeps nothing is refused too.

NARROW = {torch.bool, torch.int8, torch.uint8, torch.int16, torch.bfloat16, torch.float16}
"""What fp32 holds exactly."""

_STEPS = 5
_SMALL = ((8, 12), (8, 12))
"""For what is known to compute each element alone."""
_LARGE = ((256, 272), (256, 272))
"""Not square, so that an array for each row or column is not taken for one for each element."""
_VECTOR = (4096,)
_SCALES = (1.0, 1e-3, 30.0)
"""Of the gradients of each parameter; they double from step to step."""
_CUT = 48
"""Where the small parameters are cut: vectorised arithmetic rounds the elements that fill no vector otherwise."""

_NESTED = 4
"""How deep in the optimizer's attributes its parameters are looked for: in a list of groups' lists."""

_DRAWS = "its step() draws random numbers, which would come in another order"


@dataclass
class Found:
    """What the probe has found."""

    arrays: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtype of each per-element array of a matrix."""
    always: set[str] | None = None
    """The arrays that there were after every step."""
    nones: set[str] = field(default_factory=set)
    """What was None for a while."""
    counts: tuple[str, ...] = ()
    whole: bool = False
    moved: bool = False
    """Whether any step changed its parameter, or kept anything of it."""
    changes: set[str] = field(default_factory=set)
    """The options, and the attributes of the optimizer, that a step changes."""
    scalars: dict[str, object] = field(default_factory=dict)
    """What else there is of a matrix."""

    def note(self, subject: Subject) -> None:
        """Look at what there is of a matrix after a step."""
        arrays = {key for key, value in subject.state.items() if _is_array(value, subject.param)}
        self.always = arrays if self.always is None else self.always & arrays
        self.nones |= {key for key, value in subject.state.items() if value is None}


def probe(
    worker: Worker,
    hyper: dict[str, object],
    attributes: Iterable[Mapping[str, object]],
    own: Mapping[str, object],
    pieces: bool,
    vectors: bool,
) -> Found:
    """Raises `Unsuited` if parameters cannot be stepped one at a time, and what the step raises. See Note [The probe].

    `pieces`: the class says that it computes each element alone; `vectors`: there are parameters of one dimension.
    """
    rate = hyper.get("lr")
    if isinstance(rate, (int, float)) and 0 <= rate < 1e9:
        hyper = {**hyper, "lr": 0.01}  # a warm-up may start at 0, where nothing could be seen
    if isinstance(rate, torch.Tensor) and rate.numel() == 1 and rate.is_floating_point() and bool(0 <= rate < 1e9):
        hyper = {**hyper, "lr": torch.full_like(rate, 0.01)}
    found = Found()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    try:
        for each in attributes:
            if not pieces:
                _look_briefly(_Trial(worker, hyper, each, own, Found()))
            trial = _Trial(worker, hyper, each, own, found)
            trial.run(_SMALL if pieces else (*_LARGE, *[_VECTOR] * vectors), pieces)
        if python_state != random.getstate() or not torch.equal(torch_state, torch.get_rng_state()):
            raise Unsuited(_DRAWS)
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
    return found


def expect_groups_apart(worker: Worker, groups: Sequence[Mapping[str, object]], own: Mapping[str, object]) -> None:
    """Raise `Unsuited` where the step on a parameter depends on what other groups there are, or on their options."""
    generator = torch.Generator().manual_seed(0)
    starts = [_random(generator, _LARGE[0]) for _ in groups]
    grads = [_random(generator, _LARGE[0]) for _ in groups]
    hypers = [
        {**hyper, "lr": 0.01 * (1 + at)} if isinstance(hyper.get("lr"), float) else dict(hyper)
        for at, hyper in enumerate(groups)
    ]

    def step(which: Sequence[int]) -> tuple[list[Subject], list[dict[str, object]], dict[str, object]]:
        subjects = [Subject(starts[at].clone(), grads[at].clone()) for at in which]
        changes = worker.run_groups(
            [(hypers[at], [subject]) for at, subject in zip(which, subjects, strict=True)], {}, own
        )
        return subjects, *changes

    drawn = torch.get_rng_state(), random.getstate()
    try:
        together, changed, changed_own = step(range(len(groups)))
        for at in range(len(groups)):
            [one], [alone], alone_own = step([at])
            if (
                not same_values(one.param, together[at].param)
                or differs(one.state, together[at].state)
                or differs(alone, changed[at])
                or differs(alone_own, changed_own)
            ):
                raise Unsuited("its step on the parameters of one group depends on the other groups")
    finally:
        torch.set_rng_state(drawn[0])
        random.setstate(drawn[1])


@final
@dataclass
class _Trial:
    """Steps of the worker with certain options, on parameters with certain attributes."""

    worker: Worker
    hyper: dict[str, object]
    attributes: Mapping[str, object]
    own: Mapping[str, object]
    found: Found

    def run(self, shapes: Sequence[tuple[int, ...]], pieces: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = [_random(generator, shape) for shape in shapes]
        grads = [
            [_random(generator, tuple(start.shape)) * scale * 2**step for step in range(_STEPS)]
            for start, scale in zip(starts, _SCALES, strict=False)
        ]
        drawn = torch.get_rng_state(), random.getstate()
        alone = [self.steps([start], [each]) for start, each in zip(starts, grads, strict=True)]
        together = self.steps(starts, grads)
        if drawn[1] != random.getstate() or not torch.equal(drawn[0], torch.get_rng_state()):
            raise Unsuited(_DRAWS)
        for ([one], changes), other in zip(alone, together[0], strict=True):
            if not same_values(one.param, other.param) or differs(one.state, other.state):
                raise Unsuited(
                    "its step on one parameter depends on the others; if that is a norm over all gradients, turn it "
                    "off (max_grad_norm=None) and clip with torch.nn.utils.clip_grad_norm_"
                )
            if differs(changes, together[1]):
                raise Unsuited("what its step changes of its param_groups or of itself depends on the parameters")
            _expect_plain(one)
        [first], _ = alone[0]
        _expect_shaped(first)
        for key, value in first.state.items():
            if _is_array(value, first.param):
                self.found.arrays.setdefault(key, value.dtype)
        self.found.scalars |= {key: value for key, value in first.state.items() if not _is_array(value, first.param)}
        if "step" in first.state:
            self.found.counts = ("step",)
        kept = any(value.numel() > 1 and bool(value.any()) for value in _tensors(first.state))
        self.found.moved = self.found.moved or kept or not same_values(first.param, starts[0])
        if pieces:
            self.found.whole = self.found.whole or not self.is_elementwise(starts[0], grads[0], first)

    def steps(
        self, starts: Sequence[torch.Tensor], grads: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[Subject], list[dict[str, object]]]:
        """The parameters after all steps, and what the steps changed of the group and of the optimizer."""
        subjects = [Subject(start.clone(), None) for start in starts]
        hyper, own = {key: taken(value) for key, value in self.hyper.items()}, dict(self.own)
        changes: list[dict[str, object]] = []
        for step in range(_STEPS):
            for subject, each in zip(subjects, grads, strict=True):
                subject.grad = each[step].clone()
            changes += self.worker.run(subjects, hyper, self.attributes, own)
            hyper.update(changes[-2])
            own.update(changes[-1])
            self.found.changes |= changes[-2].keys() | changes[-1].keys()
            if starts[0].dim() > 1:
                self.found.note(subjects[0])
        return subjects, changes

    def is_elementwise(self, start: torch.Tensor, grads: Sequence[torch.Tensor], alone: Subject) -> bool:
        """Whether a step on the halves is a step on the whole."""
        for value in alone.state.values():
            sizes = (1, start.numel()) if isinstance(value, torch.Tensor) else (1,)
            if any(tensor.numel() not in sizes for tensor in _tensors(value)):
                return False
        parts = []
        try:
            for low, high in ((0, _CUT), (_CUT, start.numel())):
                [part], _ = self.steps([start.reshape(-1)[low:high]], [[each.reshape(-1)[low:high] for each in grads]])
                parts.append(part.param)
        except Exception:  # it wants a matrix
            return False
        return same_values(alone.param.reshape(-1), torch.cat(parts))


def _look_briefly(trial: _Trial) -> None:
    """What shows on small matrices already need not be tried on large ones, for which some want gigabytes."""
    try:
        trial.run(_SMALL, pieces=False)
    except Unsuited:
        raise
    except Exception:
        return  # it wants larger ones


def _random(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """In fp32 in host memory, whatever the defaults of dtype and device are."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def _is_array(value: object, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _expect_plain(subject: Subject) -> None:
    for key, value in subject.state.items():
        if any(type(each) not in (torch.Tensor, torch.nn.Parameter) for each in _tensors(value)):
            raise Unsuited(
                f"it keeps {key!r} as a subclass of torch.Tensor; AdamW with state_format='compact' has 8-bit states"
            )
        if _is_array(value, subject.param) and value.dtype not in (torch.float32, *NARROW):
            raise Unsuited(
                f"it keeps {key!r} as {str(value.dtype).removeprefix('torch.')} for each element, which the "
                f"float32 of streamed state cannot hold"
            )


def _expect_shaped(subject: Subject) -> None:
    """What there is for each element must be a tensor of the parameter's shape, since only that is streamed."""
    for key, value in subject.state.items():
        if not _is_array(value, subject.param) and any(
            tensor.numel() == subject.param.numel() for tensor in _tensors(value)
        ):
            how = "in another shape" if isinstance(value, torch.Tensor) else f"in a {type(value).__name__}"
            raise Unsuited(
                f"it keeps {key!r} for each element {how}, and only tensors of the parameter's shape are streamed"
            )


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, *_CONTAINERS)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


_CONTAINERS = (list, tuple, set, frozenset, deque)


def expect_on_what_it_is_given(optimizer: torch.optim.Optimizer) -> None:
    """Raise `Unsuited` for an optimizer that holds another one, or its parameters. See Note [Steps on what is not
    given]."""
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state"):
            _expect_free(value, own, f"its attribute {name!r}")
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                _expect_free(value, own, f"{name!r} of its param_groups")


def _expect_free(value: object, own: set[int], where: str, depth: int = 0) -> None:
    if isinstance(value, torch.optim.Optimizer):
        raise Unsuited(f"{where} is another optimizer, which has the parameters themselves: prepare that one")
    if id(value) in own or (type(value) is int and value in own):
        raise Unsuited(f"{where} holds parameters or their ids, and its step() is given pieces of them")
    if depth < _NESTED:
        if isinstance(value, Mapping):
            for each in chain(value.keys(), value.values()):
                _expect_free(each, own, where, depth + 1)
        elif isinstance(value, _CONTAINERS):
            for each in value:
                _expect_free(each, own, where, depth + 1)


@contextmanager
def hidden_grads(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Whatever steps on the real parameters finds no gradient there."""
    params: Any = [param for group in optimizer.param_groups for param in group["params"]]
    held = [(param, param.grad) for param in params if param.grad is not None]
    try:
        for param, _ in held:
            param.grad = None
        yield
    finally:
        for param, grad in held:
            param.grad = grad
