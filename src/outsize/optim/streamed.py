"""Any other optimizer: its own `step()`, run on pieces or on whole parameters, with its own state names."""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Complex, Real
from typing import Any, final

import torch

from outsize.optim.rules import Piece, Rule, join_master, refuse_new_array, split_master
from outsize.optim.worker import Subject, Unsuited, Worker, attributes_of, same_values

# Note [The probe]
# What an optimizer needs is found out by trying it on small matrices (`optim/worker.py` runs its step): if a step on
# the matrix is, bit for bit, a step on its two halves, it is elementwise and runs on pieces. If not, but a step on two
# matrices is a step on each alone, it runs on whole parameters (Muon, Adafactor, LAMB). One that ties parameters
# together, that needs a closure, draws random numbers or keeps what it learns outside of its parameters' state can do
# neither and is refused with the reason. Weights and gradients come in several magnitudes, since a threshold on a norm
# shows on one side of it only. What first happens in a later step than the probe's last one is not seen.

# Note [Options after prepare]
# A scheduler or the user may set an option that makes the optimizer keep another array (RMSprop's momentum, centered).
# Arrays are made by `prepare` alone, so such an option is found before a step by the same probe, and so is one that
# makes the optimizer look at whole parameters (a norm) where it has run on pieces, and one that its step cannot compute
# with, which raises what it raises in torch. All of that depends on the kind of each number (zero, a fraction, above
# one, not finite) and not on its value: a learning rate that changes every step is looked up.

# Note [Narrow states]
# Arrays rest as fp32. One that fp32 holds exactly (a mask, signs, bf16) is given to the step in its own dtype again.

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

_KNOWN_OPTIONS = 64
"""Combinations of options whose arrays are remembered; real runs have a few."""

_KNOWN_ATTRIBUTES = 16
"""Combinations of what the user hangs on parameters that are tried."""

_NO_OPTIONS = {"params", "param_names"}
_NARROW = {torch.bool, torch.int8, torch.uint8, torch.int16, torch.bfloat16, torch.float16}
_ORDINARY_ERRORS = (ValueError, TypeError, RuntimeError, ZeroDivisionError, OverflowError, AssertionError)


@dataclass
class _Found:
    """What the probe has found: the dtype of each per-element array, the per-parameter counts, and whether whole
    parameters are needed."""

    arrays: dict[str, torch.dtype]
    counts: tuple[str, ...]
    whole: bool


@final
class StreamedRule(Rule):
    """Runs `type(optimizer).step` on one piece, or one whole parameter, at a time. See Note [A worker optimizer]."""

    reads_attributes = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._lock = threading.Lock()
        self._worker = Worker(optimizer)
        self._name = type(optimizer).__name__
        self._known: dict[Hashable, tuple[str, ...]] = {}
        self._attributes = _attributes_of(optimizer)
        self._dtypes: dict[str, torch.dtype] = {}
        counts: dict[str, None] = {}
        try:
            _expect_parameters(optimizer)
            for group in optimizer.param_groups:
                found = self._probe(group)
                self._known[_signature(group)] = tuple(found.arrays)
                self._dtypes.update(found.arrays)
                counts.update(dict.fromkeys(found.counts))
                self.whole = self.whole or found.whole
        except Unsuited as error:
            raise _refusal(self._name, str(error)) from error
        except Exception as error:
            raise _refusal(self._name, f"its step() on one parameter raised: {error}") from error
        self.arrays = tuple(self._dtypes)
        self.counts = tuple(counts)

    def check(self, hyper: Mapping[str, object], where: str) -> None:
        """See Note [Options after prepare]."""
        options = _signature(hyper)
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
        self._known[options] = tuple(found.arrays)

    def needs(self, hyper: Mapping[str, object]) -> tuple[str, ...]:
        """One that runs on whole parameters keeps a further array as it is."""
        return () if self.whole else self._known[_signature(hyper)]

    def apply(self, piece: Piece) -> None:
        master = piece.param if piece.master is None else join_master(piece.param, piece.master).view(piece.param.shape)
        grad = piece.ops.apply_(piece.grad.to(device=master.device, dtype=master.dtype, copy=True))
        state: dict[str, Any] = {}
        if piece.state.initialised:
            state = {name: self._opened(name, view) for name, view in piece.states.items() if name in self.arrays}
            kept = piece.state.scalars
            state.update({key: _copied(key, value, master.device, piece.hyper) for key, value in kept.items()})
        subject = Subject(master, grad, state)
        with self._lock:  # the conveyor's thread and, for units in memory, the user's
            self._worker.run([subject], piece.hyper, piece.attributes)
        piece.state.next_scalars = {}
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

    def _opened(self, name: str, array: torch.Tensor) -> torch.Tensor:
        """See Note [Narrow states]."""
        dtype = self._dtypes[name]
        return array.to(dtype) if dtype in _NARROW else array

    def _probe(self, group: Mapping[str, object]) -> _Found:
        """Raises `Unsuited` if neither pieces nor whole parameters will do, and what the step raises. See Note [The
        probe]."""
        hyper = {key: value for key, value in group.items() if key != "params"}
        rate = hyper.get("lr")
        if isinstance(rate, (int, float)) and 0 <= rate < 1e9:
            hyper["lr"] = 0.01  # a warm-up may start at 0, where nothing could be seen
        found = _Found({}, (), False)
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        try:
            for attributes in self._attributes:
                for weight, steps in _MAGNITUDES:
                    self._try_magnitude(_Trial(self._worker, hyper, attributes), weight, steps, found)
            if python_state != random.getstate() or not torch.equal(torch_state, torch.get_rng_state()):
                raise Unsuited(_DRAWS)
        finally:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
        return found

    def _try_magnitude(self, trial: _Trial, weight: float, steps: Sequence[float], found: _Found) -> None:
        generator = torch.Generator().manual_seed(0)
        matrices = [_random(generator) * weight for _ in range(2)]
        grads = [[_random(generator) * scale for scale in steps] for _ in matrices]
        drawn = torch.get_rng_state(), random.getstate()
        alone = [trial.run([matrix], [grad])[0] for matrix, grad in zip(matrices, grads, strict=True)]
        together = trial.run(matrices, grads)
        if not all(same_values(a.param, b.param) for a, b in zip(alone, together, strict=True)):
            draws = drawn[1] != random.getstate() or not torch.equal(drawn[0], torch.get_rng_state())
            raise Unsuited(_DRAWS if draws else "its step on one parameter depends on the others")
        for key, value in alone[0].state.items():
            if isinstance(value, torch.Tensor) and value.shape == (4, 6):
                if value.dtype is not torch.float32 and value.dtype not in _NARROW:
                    raise Unsuited(
                        f"it keeps {key!r} as {str(value.dtype).removeprefix('torch.')} for each element, which the "
                        f"float32 of streamed state cannot hold"
                    )
                found.arrays.setdefault(key, value.dtype)
        if "step" in alone[0].state:
            found.counts = ("step",)
        found.whole = found.whole or not trial.is_elementwise(matrices[0], grads[0], alone[0])


_DRAWS = "its step() draws random numbers, which would come in another order"


@dataclass
class _Trial:
    """Steps of the worker with certain options, on parameters with certain attributes."""

    worker: Worker
    hyper: dict[str, object]
    attributes: Mapping[str, object]

    def run(self, starts: list[torch.Tensor], grads: list[list[torch.Tensor]]) -> list[Subject]:
        subjects = [Subject(start.clone(), start) for start in starts]
        for step in range(_PROBE_STEPS):
            for subject, each in zip(subjects, grads, strict=True):
                subject.grad = each[step].clone()
            self.worker.run(subjects, self.hyper, self.attributes)
        return subjects

    def is_elementwise(self, matrix: torch.Tensor, grads: list[torch.Tensor], whole: Subject) -> bool:
        if any(isinstance(value, torch.Tensor) and value.numel() not in (1, 24) for value in whole.state.values()):
            return False
        halves = []
        try:
            for at in (0, 12):
                pieces = [grad.reshape(-1)[at : at + 12] for grad in grads]
                halves.append(self.run([matrix.reshape(-1)[at : at + 12]], [pieces])[0].param)
        except Exception:  # it wants a matrix
            return False
        return same_values(whole.param.reshape(-1), torch.cat(halves))


def _random(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 6, generator=generator, device="cpu")  # whatever the default device is during a step


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
    return value if isinstance(value, Hashable) else type(value)


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
        return copy.copy(value)
    on_host = key == "step" and not (hyper.get("capturable") or hyper.get("fused"))
    return value.clone() if on_host else value.to(device, copy=True)
