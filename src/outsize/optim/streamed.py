"""Any elementwise `torch.optim` optimizer: its own `step()`, run on pieces, with its own state names."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict
from typing import Any, final

import torch

from outsize.optim.rules import Piece, Rule, join_master, split_master

# Note [A worker optimizer]
# The user's optimizer object keeps its class, its param_groups and its hooks. The arithmetic is done by a worker: an
# object of the same class whose only parameter is the piece at hand (as fp32 master), whose state is the piece's state
# and whose hyper-parameters are those of the step being run. It calls the class's own step function below torch's
# profiling wrapper, so that hooks which the user registered fire once a step and not once a piece.

_PROBE_STEPS = 3


@final
class StreamedRule(Rule):
    """Runs `type(optimizer).step` on one piece at a time. See Note [A worker optimizer]."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._lock = threading.Lock()
        self._worker = _worker_of(optimizer)
        self._step = _plain_step(type(optimizer))
        names: dict[str, None] = {}
        for group in optimizer.param_groups:
            hyper = {key: value for key, value in group.items() if key != "params"}
            names.update(dict.fromkeys(self._probe(type(optimizer).__name__, hyper)))
        self.arrays = tuple(names)

    def apply(self, piece: Piece) -> None:
        master = piece.param if piece.remainder is None else join_master(piece.param, piece.remainder)
        grad = piece.ops.apply_(piece.grad.to(device=master.device, dtype=master.dtype, copy=True))
        state: dict[str, Any] = {}
        if piece.state.initialised:
            state = {name: view for name, view in piece.states.items() if name in self.arrays}
            state.update({key: _copied(value) for key, value in piece.state.scalars.items()})
        after = self._run(master, grad, state, piece.hyper)
        piece.state.next_scalars = {}
        for key, value in after.items():
            if key in self.arrays and isinstance(value, torch.Tensor):
                if value.data_ptr() != piece.states[key].data_ptr():
                    piece.states[key].copy_(value)
            elif isinstance(value, torch.Tensor) and value.shape == master.shape and value.numel() != 1:
                raise RuntimeError(
                    f"the optimizer started to keep {key!r} for each element after outsize.prepare; set the option "
                    f"that needs it (a momentum, for example) before prepare"
                )
            else:
                piece.state.next_scalars[key] = value
        if piece.remainder is not None:
            split_master(master, piece.param, piece.remainder)

    def _run(
        self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], hyper: dict[str, object]
    ) -> dict[str, Any]:
        with self._lock:  # the conveyor's thread and, for units in memory, the user's
            return self._run_alone(param, grad, state, hyper)

    def _run_alone(
        self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], hyper: dict[str, object]
    ) -> dict[str, Any]:
        leaf = param.detach().requires_grad_()
        leaf.grad = grad
        self._worker.state = defaultdict(dict)
        if state:
            self._worker.state[leaf] = state
        self._worker.param_groups = [{**hyper, "params": [leaf]}]
        with torch.no_grad():
            self._step(self._worker)
        after = dict(self._worker.state.get(leaf, {}))
        self._worker.state = defaultdict(dict)
        self._worker.param_groups = []
        return after

    def _probe(self, name: str, hyper: dict[str, object]) -> list[str]:
        """The names of the elementwise arrays; raises `ValueError` if the update is not elementwise."""
        if isinstance(hyper.get("lr"), (int, float)):
            hyper = {**hyper, "lr": 0.01}  # a warm-up may start at 0, where nothing could be seen
        with torch.random.fork_rng(devices=[]):
            generator = torch.Generator().manual_seed(0)
            whole = torch.randn(4, 6, generator=generator)
            grads = [torch.randn(4, 6, generator=generator) for _ in range(_PROBE_STEPS)]
            try:
                together, state = self._probe_run(whole, grads, hyper)
                halves = [
                    self._probe_run(part, [grad.reshape(-1)[at : at + 12] for grad in grads], hyper)[0]
                    for at, part in ((0, whole.reshape(-1)[:12]), (12, whole.reshape(-1)[12:]))
                ]
            except Exception as error:
                raise _not_elementwise(name, f"its step() on a piece of a parameter raised: {error}") from error
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        for key, value in tensors.items():
            if value.numel() not in (1, whole.numel()):
                raise _not_elementwise(name, f"its state {key!r} has the shape {tuple(value.shape)}")
        if not torch.equal(together.reshape(-1), torch.cat(halves)):
            raise _not_elementwise(name, "its step on a whole parameter is not its step on the parameter's pieces")
        return [key for key, value in tensors.items() if value.shape == whole.shape]

    def _probe_run(
        self, start: torch.Tensor, grads: list[torch.Tensor], hyper: dict[str, object]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        param = start.clone()
        state: dict[str, Any] = {}
        for grad in grads:
            state = self._run(param, grad.clone(), state, hyper)
        return param, state


def _not_elementwise(name: str, reason: str) -> ValueError:
    return ValueError(
        f"{name} is not elementwise ({reason}), so it cannot run on streamed state; use an elementwise optimizer such "
        f"as AdamW, SGD or Adagrad"
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


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
