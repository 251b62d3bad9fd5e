"""Any other optimizer: its own `step()`, run on pieces or on whole parameters, with its own state names."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Complex
from typing import Any, final

import torch

from outsize.optim.rules import Piece, Rule, join_master, refuse_new_array, split_master

# Note [A worker optimizer]
# The user's optimizer object keeps its class, its param_groups and its hooks. The arithmetic is done by a worker: an
# object of the same class whose only parameter is the piece at hand (as fp32 master), whose state is the piece's state
# and whose hyper-parameters are those of the step being run. It calls the class's own step function below torch's
# profiling wrapper, so that hooks which the user registered fire once a step and not once a piece.

# Note [The probe]
# What an optimizer needs is found out by trying it on a small matrix: if a step on the matrix is, bit for bit, a step
# on its two halves, it is elementwise and runs on pieces. If not, but a step on two matrices is a step on each alone,
# it runs on whole parameters (Muon, Adafactor, LAMB). One that ties parameters together, that needs a closure or that
# keeps what it learns in its param_groups can do neither and is refused with the reason.

# Note [Options after prepare]
# A scheduler or the user may set an option that makes the optimizer keep another array (RMSprop's momentum, centered).
# Arrays are made by `prepare` alone, so such an option is found before a step by the same probe, and so is one that
# makes the optimizer look at whole parameters (a norm) where it has run on pieces. Which arrays there are
# depends on which numbers are zero and not on their values: a learning rate that changes every step is looked up.

_PROBE_STEPS = 3
_KNOWN_OPTIONS = 64
"""Combinations of options whose arrays are remembered; real runs have a few."""

_NO_OPTIONS = {"params", "param_names"}


@dataclass
class _Subject:
    """One parameter that the worker steps on."""

    param: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any] = field(default_factory=dict)


@final
class StreamedRule(Rule):
    """Runs `type(optimizer).step` on one piece, or one whole parameter, at a time. See Note [A worker optimizer]."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._lock = threading.Lock()
        self._worker = _worker_of(optimizer)
        self._step = _plain_step(type(optimizer))
        self._name = type(optimizer).__name__
        self._known: dict[Hashable, tuple[str, ...]] = {}
        names: dict[str, None] = {}
        for group in optimizer.param_groups:
            arrays, whole = self._probe(group)
            self._known[_signature(group)] = arrays
            names.update(dict.fromkeys(arrays))
            self.whole = self.whole or whole
        self.arrays = tuple(names)

    def needs(self, hyper: Mapping[str, object]) -> tuple[str, ...]:
        """See Note [Options after prepare]. One that runs on whole parameters keeps a further array as it is."""
        if self.whole:
            return ()
        options = _signature(hyper)
        if options not in self._known:
            if len(self._known) >= _KNOWN_OPTIONS:
                self._known.clear()
            with self._lock:
                arrays, whole = self._probe(hyper)
            if whole:
                raise RuntimeError(
                    f"with its present options {self._name} needs whole parameters, and it was prepared to run on "
                    f"pieces of them: set such options before prepare. Nothing was updated"
                )
            self._known[options] = arrays
        return self._known[options]

    def apply(self, piece: Piece) -> None:
        master = piece.param if piece.master is None else join_master(piece.param, piece.master).view(piece.param.shape)
        grad = piece.ops.apply_(piece.grad.to(device=master.device, dtype=master.dtype, copy=True))
        state: dict[str, Any] = {}
        if piece.state.initialised:
            state = {name: view for name, view in piece.states.items() if name in self.arrays}
            kept = piece.state.scalars
            state.update({key: _copied(key, value, master.device, piece.hyper) for key, value in kept.items()})
        subject = _Subject(master, grad, state)
        with self._lock:  # the conveyor's thread and, for units in memory, the user's
            self._run([subject], piece.hyper)
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

    def _run(self, subjects: Sequence[_Subject], hyper: dict[str, object]) -> None:
        """One step of the worker on these parameters; their values and states change in place."""
        worker = self._worker
        worker.state = defaultdict(dict)
        leaves = []
        for subject in subjects:
            leaf = subject.param.detach().requires_grad_()
            leaf.grad = subject.grad
            if subject.state:
                worker.state[leaf] = subject.state
            leaves.append(leaf)
        group = {**hyper, "params": leaves}
        worker.param_groups = [group]
        try:
            with torch.no_grad():
                self._step(worker)
            for subject, leaf in zip(subjects, leaves, strict=True):
                if leaf.data_ptr() != subject.param.data_ptr():  # it put another tensor in place of the values
                    subject.param.copy_(leaf)
                subject.state = dict(worker.state.get(leaf, {}))
            changed = [key for key, value in hyper.items() if _differs(group.get(key), value)]
            if changed or group.keys() - hyper.keys() - {"params"}:
                keys = changed or sorted(group.keys() - hyper.keys() - {"params"})
                raise RuntimeError(f"its step() changes its param_groups ({', '.join(map(repr, keys))})")
        finally:
            worker.state = defaultdict(dict)
            worker.param_groups = []

    def _probe(self, group: Mapping[str, object]) -> tuple[tuple[str, ...], bool]:
        """(names of the per-element arrays, whether it needs whole parameters); raises `ValueError` if neither will do.

        See Note [The probe].
        """
        hyper = {key: value for key, value in group.items() if key != "params"}
        if isinstance(hyper.get("lr"), (int, float)):
            hyper["lr"] = 0.01  # a warm-up may start at 0, where nothing could be seen
        with torch.random.fork_rng(devices=[]):
            generator = torch.Generator().manual_seed(0)
            matrices = [_random(generator) for _ in range(2)]
            grads = [[_random(generator) for _ in range(_PROBE_STEPS)] for _ in matrices]
            try:
                alone = [self._try([matrix], [grad], hyper) for matrix, grad in zip(matrices, grads, strict=True)]
            except Exception as error:
                raise _refusal(self._name, f"its step() on one parameter raised: {error}") from error
            together = self._try(matrices, grads, hyper)
        if not all(torch.equal(a[0].param, b.param) for a, b in zip(alone, together, strict=True)):
            raise _refusal(self._name, "its step on one parameter depends on the others")
        state = {key: value for key, value in alone[0][0].state.items() if isinstance(value, torch.Tensor)}
        arrays = tuple(key for key, value in state.items() if value.shape == (4, 6))
        return arrays, not self._is_elementwise(matrices[0], grads[0], hyper, alone[0][0])

    def _is_elementwise(
        self, matrix: torch.Tensor, grads: list[torch.Tensor], hyper: dict[str, object], whole: _Subject
    ) -> bool:
        if any(isinstance(value, torch.Tensor) and value.numel() not in (1, 24) for value in whole.state.values()):
            return False
        halves = []
        try:
            for at in (0, 12):
                pieces = [grad.reshape(-1)[at : at + 12] for grad in grads]
                halves.append(self._try([matrix.reshape(-1)[at : at + 12]], [pieces], hyper)[0].param)
        except Exception:  # it wants a matrix
            return False
        return torch.equal(whole.param.reshape(-1), torch.cat(halves))

    def _try(
        self, starts: list[torch.Tensor], grads: list[list[torch.Tensor]], hyper: dict[str, object]
    ) -> list[_Subject]:
        subjects = [_Subject(start.clone(), start) for start in starts]
        for step in range(_PROBE_STEPS):
            for subject, each in zip(subjects, grads, strict=True):
                subject.grad = each[step].clone()
            self._run(subjects, hyper)
        return subjects


def _random(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 6, generator=generator, device="cpu")  # whatever the default device is during a step


def _signature(hyper: Mapping[str, object]) -> Hashable:
    """The options with their numbers reduced to whether they are zero. See Note [Options after prepare]."""
    return tuple((key, _kind(value)) for key, value in hyper.items() if key not in _NO_OPTIONS)


def _kind(value: object) -> Hashable:
    if isinstance(value, Complex):
        return value != 0
    if isinstance(value, torch.Tensor):
        return bool(value) if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    if isinstance(value, Mapping):
        return _signature(value)
    return value if isinstance(value, Hashable) else type(value)


def _differs(now: object, before: object) -> bool:
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return not torch.equal(now, before)
    return bool(now != before)


def _refusal(name: str, reason: str) -> ValueError:
    return ValueError(
        f"{name} can run neither on pieces of parameters nor on whole parameters one at a time ({reason}), so it "
        f"cannot run on streamed state; use an optimizer such as AdamW, SGD, Adagrad, Muon or Adafactor"
    )


def _worker_of(optimizer: torch.optim.Optimizer) -> Any:
    worker = object.__new__(type(optimizer))
    worker.__dict__.update(optimizer.__dict__)
    for patched in ("step", "state_dict", "load_state_dict", "add_param_group", "zero_grad"):
        worker.__dict__.pop(patched, None)
    for name, value in worker.__dict__.items():
        if "hooks" in name and isinstance(value, (dict, OrderedDict)):
            worker.__dict__[name] = OrderedDict()
    return worker


def _plain_step(kind: type[torch.optim.Optimizer]) -> Any:
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _copied(key: str, value: object, device: torch.device, hyper: Mapping[str, object]) -> object:
    """A state for the worker to change, on the device where torch has it; a checkpoint leaves all in host memory."""
    if not isinstance(value, torch.Tensor):
        return copy.copy(value)
    on_host = key == "step" and not (hyper.get("capturable") or hyper.get("fused"))
    return value.clone() if on_host else value.to(device, copy=True)
