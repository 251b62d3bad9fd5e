"""What an optimizer needs, found out by trying it on small parameters."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import prod
from typing import Any, final

import torch

from outsize.optim.worker import Subject, Unsuited, Worker, differs, same_values

# Note [The probe]
# What an optimizer needs is found out by trying it on small matrices (`optim/worker.py` runs its step): if a step on
# the matrix is, bit for bit, a step on its two halves, it is elementwise and runs on pieces. If not, but a step on two
# matrices is a step on each alone, it runs on whole parameters (Muon, Adafactor, LAMB). One that ties parameters
# together, that needs a closure, draws random numbers or keeps what it learns outside of its parameters' state can do
# neither and is refused with the reason. Weights and gradients come in several magnitudes, since a threshold on a norm
# shows on one side of it only. What first happens in a later step than the probe's last one is not seen.

# Note [Small shapes]
# A step may look at the number of dimensions (it centres the gradients of convolutions) or at the proportions (a rate
# for tall matrices), so it is tried on a small tensor for each kind of parameter that there is: as many dimensions,
# in the same order of size. Such a tensor only tells whether pieces will do. The arrays of an optimizer that needs
# whole parameters are those of a matrix; what it keeps for another shape alone stays a value of that parameter.
# Vectorised arithmetic rounds the elements that fill no vector otherwise, so cuts lie where vectors begin.

# Note [Steps on what is not given]
# An optimizer that wraps another one, or has a list of the parameters of its own, steps on the real parameters and not
# on the worker's; one that looks something up by parameter does not find the worker's. Both are seen by what the
# optimizer holds, before it is tried. The real gradients are out of sight meanwhile, and one whose trial moves nothing
# and keeps nothing is refused too.

NARROW = {torch.bool, torch.int8, torch.uint8, torch.int16, torch.bfloat16, torch.float16}
"""What fp32 holds exactly."""

_PROBE_STEPS = 3
_MAGNITUDES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (1.0, (1.0, 1.0, 1.0)),
    (1.0, (1e3, 1e3, 1e3)),
    (1.0, (1e-3, 1e-3, 1e-3)),
    (1.0, (1e-3, 1.0, 1e3)),
    (1e3, (1.0, 1.0, 1.0)),
    (1e-3, (1.0, 1.0, 1.0)),
)
"""Of the probe's weights, and of its gradients in each step."""

_MATRIX = (8, 12)
_VECTOR = (96,)
_LARGE = ((256, 256), (256, 256))
_LONG = (4096,)
"""Where optimizers that factor or quantize do so."""
_LANES = 16
"""Elements of the longest vector of a processor. See Note [Small shapes]."""
_KNOWN_SHAPES = 16
"""Kinds of parameters that are tried."""

_NESTED = 4
"""How deep in the optimizer's attributes its parameters are looked for: in a list of groups' lists."""

_DRAWS = "its step() draws random numbers, which would come in another order"


@dataclass
class Found:
    """What the probe has found."""

    arrays: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtype of each per-element array of a matrix."""
    further: dict[str, torch.dtype] = field(default_factory=dict)
    """Those of parameters of another shape."""
    always: set[str] | None = None
    """The arrays that there were after every step."""
    nones: set[str] = field(default_factory=set)
    """What was None for a while."""
    counts: tuple[str, ...] = ()
    whole: bool = False
    moved: bool = False
    """Whether any step changed its parameter, or kept anything of it."""

    def note(self, subject: Subject) -> None:
        """Look at what there is after a step."""
        arrays = {key for key, value in subject.state.items() if _is_array(value, subject.param)}
        self.always = arrays if self.always is None else self.always & arrays
        self.nones |= {key for key, value in subject.state.items() if value is None}


def probe(
    worker: Worker,
    hyper: dict[str, object],
    attributes: Iterable[Mapping[str, object]],
    own: Mapping[str, object],
    shapes: Sequence[tuple[int, ...]],
) -> Found:
    """Raises `Unsuited` if neither pieces nor whole parameters will do, and what the step raises. See Note [The probe].

    `shapes`: further ones than a matrix, as `small_shapes` gives them.
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
            trial = _Trial(worker, hyper, each, own, found)
            for weight, steps in _MAGNITUDES:
                trial.on_matrices(weight, steps)
                for shape in shapes:
                    trial.on_shape(shape, weight, steps)
            trial.on_large(any(len(shape) == 1 for shape in shapes))
        if python_state != random.getstate() or not torch.equal(torch_state, torch.get_rng_state()):
            raise Unsuited(_DRAWS)
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
    return found


@final
@dataclass
class _Trial:
    """Steps of the worker with certain options, on parameters with certain attributes."""

    worker: Worker
    hyper: dict[str, object]
    attributes: Mapping[str, object]
    own: Mapping[str, object]
    found: Found

    def on_matrices(self, weight: float, steps: Sequence[float]) -> None:
        generator = torch.Generator().manual_seed(0)
        matrices = [_random(generator, _MATRIX) * weight for _ in range(2)]
        grads = [[_random(generator, _MATRIX) * scale for scale in steps] for _ in matrices]
        drawn = torch.get_rng_state(), random.getstate()
        note = self.found.note
        alone = [self.run([matrix], [grad], note)[0] for matrix, grad in zip(matrices, grads, strict=True)]
        together = self.run(matrices, grads)
        if not all(same_values(a.param, b.param) for a, b in zip(alone, together, strict=True)):
            draws = drawn[1] != random.getstate() or not torch.equal(drawn[0], torch.get_rng_state())
            raise Unsuited(_DRAWS if draws else "its step on one parameter depends on the others")
        _expect_shaped(alone[0])
        _note_arrays(alone[0], self.found.arrays)
        if "step" in alone[0].state:
            self.found.counts = ("step",)
        self._compare(matrices[0], grads[0], alone[0])

    def on_large(self, vectors: bool) -> None:
        """Whether parameters or their states are tied together at the sizes where optimizers factor or quantize."""
        generator = torch.Generator().manual_seed(0)
        starts = [_random(generator, shape) for shape in (*_LARGE, *[_LONG] * vectors)]
        scales = (1.0, 1e-3, 30.0)
        grads = [
            [_random(generator, tuple(start.shape)) * scale for _ in range(_PROBE_STEPS)]
            for start, scale in zip(starts, scales, strict=False)
        ]
        alone = [self.run([start], [each])[0] for start, each in zip(starts, grads, strict=True)]
        for one, other in zip(alone, self.run(starts, grads), strict=True):
            if not same_values(one.param, other.param) or differs(one.state, other.state):
                raise Unsuited("its step on one parameter depends on the others")
            _note_arrays(one, {})
        _expect_shaped(alone[0])

    def on_shape(self, shape: tuple[int, ...], weight: float, steps: Sequence[float]) -> None:
        """Only for whether pieces will do. See Note [Small shapes]."""
        generator = torch.Generator().manual_seed(0)
        start = _random(generator, shape) * weight
        grads = [_random(generator, shape) * scale for scale in steps]
        try:
            alone = self.run([start], [grads], self.found.note if start.numel() > 1 else None)[0]
        except Unsuited:
            raise
        except Exception:  # of a shape so small, perhaps; whole parameters are what torch steps on
            self.found.whole = True
            return
        self._compare(start, grads, alone)
        if start.numel() > 1 and not self.found.whole:
            _note_arrays(alone, self.found.further)

    def _compare(self, start: torch.Tensor, grads: list[torch.Tensor], alone: Subject) -> None:
        kept = any(value.numel() > 1 and bool(value.any()) for value in _tensors(alone.state))
        self.found.moved = self.found.moved or kept or not same_values(alone.param, start)
        self.found.whole = self.found.whole or not self.is_elementwise(start, grads, alone)

    def run(
        self,
        starts: list[torch.Tensor],
        grads: list[list[torch.Tensor]],
        note: Callable[[Subject], None] | None = None,
    ) -> list[Subject]:
        subjects = [Subject(start.clone(), start) for start in starts]
        for step in range(_PROBE_STEPS):
            for subject, each in zip(subjects, grads, strict=True):
                subject.grad = each[step].clone()
            self.worker.run(subjects, self.hyper, self.attributes, self.own)
            if note is not None:
                note(subjects[0])
        return subjects

    def is_elementwise(self, start: torch.Tensor, grads: list[torch.Tensor], alone: Subject) -> bool:
        numel = start.numel()
        for value in alone.state.values():
            sizes = (1, numel) if isinstance(value, torch.Tensor) else (1,)
            if any(tensor.numel() not in sizes for tensor in _tensors(value)):
                return False
        cut = numel // 2 // _LANES * _LANES
        cuts = [0, cut, numel] if cut else [0, numel]
        pieces = []
        try:
            for low, high in pairwise(cuts):
                parts = [grad.reshape(-1)[low:high] for grad in grads]
                pieces.append(self.run([start.reshape(-1)[low:high]], [parts])[0].param)
        except Exception:  # it wants a matrix
            return False
        return same_values(alone.param.reshape(-1), torch.cat(pieces))


def _random(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """In fp32 in host memory, whatever the defaults of dtype and device are."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def _is_array(value: object, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _note_arrays(subject: Subject, dtypes: dict[str, torch.dtype]) -> None:
    for key, value in subject.state.items():
        if any(type(each) not in (torch.Tensor, torch.nn.Parameter) for each in _tensors(value)):
            raise Unsuited(
                f"it keeps {key!r} as a subclass of torch.Tensor; AdamW with state_format='compact' has 8-bit states"
            )
        if _is_array(value, subject.param):
            if value.dtype is not torch.float32 and value.dtype not in NARROW:
                raise Unsuited(
                    f"it keeps {key!r} as {str(value.dtype).removeprefix('torch.')} for each element, which the "
                    f"float32 of streamed state cannot hold"
                )
            dtypes.setdefault(key, value.dtype)


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


def small_shapes(params: Iterable[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """One of each kind among the parameters, but for a matrix that is tried anyway. See Note [Small shapes]."""
    shapes = dict.fromkeys(_small(tuple(param.shape)) for param in params if param.numel())
    shapes.pop(_MATRIX, None)
    return tuple(shapes)[:_KNOWN_SHAPES]


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2:
        return _VECTOR if prod(shape) > 1 else shape
    sizes = sorted(set(shape) - {1})
    small = {size: 8 + 4 * at if len(shape) == 2 else 2 + at for at, size in enumerate(sizes)}
    reduced = [small.get(size, 1) for size in shape]
    while 1 < prod(reduced) < 2 * _LANES:
        reduced = [2 * size if size > 1 else 1 for size in reduced]
    rest = prod(shape[1:])
    if len(shape) > 2 and shape[0] > rest:  # tall as a matrix of rows, too
        reduced[0] = prod(reduced[1:]) + 2
    return tuple(reduced)


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
