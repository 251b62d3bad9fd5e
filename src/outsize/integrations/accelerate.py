"""Accelerate's loop on a model whose state is larger than memory.

```python
from accelerate import Accelerator
from outsize.integrations.accelerate import prepare

accelerator = Accelerator()
model, optimizer, loader, scheduler = prepare(
    accelerator, model, optimizer, loader, scheduler, host_memory="4GiB", disk="/mnt/nvme"
)
```

The rest of the loop stays as it is: `backward`, `accumulate`, `clip_grad_norm_`, `save_state`, `load_state`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

import outsize
from outsize.api.assemble import first_prepared

if tuple(map(int, accelerate.__version__.split(".")[:2])) < (1, 1):
    raise ImportError(f"outsize needs accelerate 1.1 or newer, not {accelerate.__version__}: pip install -U accelerate")

STATE = "outsize"
"""The folder in another library's checkpoint that `outsize.save` writes."""


def prepare(accelerator: Any, *objects: Any, **fields: Any) -> Any:
    """As `accelerator.prepare(*objects)`, where one of the objects is a model that outsize trains.

    A plain model is prepared here; `fields` are those of `outsize.Config`, and the device is that of the accelerator. A
    model that `outsize.prepare` has prepared comes with its optimizer and without fields. Each model takes a call.

    `save_state` writes what outsize holds to the folder `outsize` inside its own, and `load_state` reads it there. A
    model without an optimizer is not saved. Raises `ValueError` for what cannot train, before anything is moved.
    """
    models = [each for each in objects if isinstance(each, nn.Module)]
    optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
    if len(models) != 1 or len(optimizers) > 1:
        found = f"{len(models)} models and {len(optimizers)} optimizers"
        raise ValueError(f"prepare takes one model and its optimizer, not {found}: call it once for each model")
    model: Any = models[0]
    optimizer = optimizers[0] if optimizers else None
    own = getattr(optimizer, "optimizer", optimizer)
    _refuse(accelerator, model, optimizer)
    prepared = first_prepared(model.parameters())
    if fields or prepared is None:
        outsize.prepare(model, own, **{"device": accelerator.device, **fields})
    elif prepared.optimizer is not own:
        raise ValueError(
            "the model is prepared: pass the optimizer that was prepared with it, or make the model a plain one first: "
            "outsize.release(model)"
        )
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # casts as the accelerator says
    model.no_sync = partial(outsize.no_sync, model)  # which `accumulate` looks for
    if own is not None and not isinstance(optimizer, _Optimizer):
        optimizer = _Optimizer(own, accelerator.scaler, model)
    ours = vars(accelerator).setdefault("_of_outsize", {})
    if not ours:
        held: list[Any] = []
        first = accelerator.register_save_state_pre_hook(partial(_save, ours, held))
        accelerator._save_model_state_pre_hook.move_to_end(first.id, last=False)
        accelerator.register_load_state_pre_hook(partial(_load, ours))
        _register_last(accelerator, "save", partial(_leave_no_weights, held))
        _register_last(accelerator, "load", partial(_leave_no_models, ours))
    ours[model] = optimizer
    return accelerator.prepare(*(optimizer if isinstance(each, torch.optim.Optimizer) else each for each in objects))


def _refuse(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    kind, compiles = accelerator.distributed_type.value, accelerator.state.dynamo_plugin.backend.value != "NO"
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    processes = accelerator.num_processes
    wrapper = None if accelerator.unwrap_model(model) is model else type(model).__name__
    taken = isinstance(optimizer, AcceleratedOptimizer) and not isinstance(optimizer, _Optimizer)
    for refused, what, remedy in (
        (kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"), f"{kind} is on", "outsize takes its place: leave it out"),
        (accelerator.mixed_precision == "fp8", "mixed_precision is fp8", "use bf16 or fp16"),
        (compiles, "torch.compile is on", "call .compile() of the model's layers"),
        (processes != ranks, f"of {ranks} ranks the Accelerator knows {processes}", "on CPUs pass cpu=True to it"),
        (wrapper is not None, f"the model is wrapped in {wrapper}", "pass the model itself"),
        (taken, "accelerator.prepare had the optimizer already", "call this prepare in its place"),
    ):
        if refused:
            raise ValueError(f"{what}, and outsize cannot train so; {remedy}")


class _Optimizer(AcceleratedOptimizer):  # type: ignore[misc]  # not read by mypy
    """Steps when the accelerator says so. outsize saves its state."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any, model: nn.Module) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self._is_accelerate_prepared = True
        self._model = model
        self.saved = False  # just now, and Accelerate asks next

    def step(self, closure: Any = None) -> None:
        before = outsize.memory(self._model).skipped_steps
        super().step(closure)
        self._is_overflow = outsize.memory(self._model).skipped_steps > before  # what `step_was_skipped` says

    def state_dict(self) -> Any:
        saved, self.saved = self.saved, False
        return {STATE: "the state is in this folder"} if saved else super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        if STATE not in state_dict:
            super().load_state_dict(state_dict)


Ours = dict[nn.Module, _Optimizer | None]


def _trained(ours: Ours, models: list[Any], inside: str) -> Iterator[tuple[Path, nn.Module, _Optimizer]]:
    pairs = [(model, optimizer) for model, optimizer in ours.items() if optimizer is not None]
    for number, (model, optimizer) in enumerate(pairs):
        if model in models:  # `accelerator.free_memory` forgets it
            yield Path(inside, f"{STATE}_{number}" if number else STATE), model, optimizer


def _save(ours: Ours, held: list[Any], models: list[Any], weights: list[Any], output_dir: str) -> None:
    """`held`: the weights of ours, for `_leave_no_weights`; hooks of the user may take some out before."""
    held[:] = [each for model, each in zip(models, weights, strict=True) if model in ours]
    for folder, model, optimizer in _trained(ours, models, output_dir):
        base_too = not hasattr(model, "peft_config")  # PEFT's base stays where it is
        outsize.save(folder, model, optimizer.optimizer, frozen=base_too).wait()
        optimizer.saved = True


def _load(ours: Ours, models: list[Any], input_dir: str) -> None:
    for folder, model, optimizer in _trained(ours, models, input_dir):
        outsize.load(folder, model, optimizer.optimizer)


def _register_last(accelerator: Any, kind: str, hook: Callable[..., None]) -> None:
    """The hook stays behind those that the user registers later, so they are given our models too."""
    name, hooks = f"register_{kind}_state_pre_hook", getattr(accelerator, f"_{kind}_model_state_pre_hook")
    register = getattr(accelerator, name)
    own = register(hook)

    def registered(other: Callable[..., None]) -> Any:
        found = register(other)
        hooks.move_to_end(own.id)
        return found

    setattr(accelerator, name, registered)


def _leave_no_weights(held: list[Any], models: list[Any], weights: list[Any], output_dir: str) -> None:
    weights[:] = [each for each in weights if not any(each is one for one in held)]
    held.clear()


def _leave_no_models(ours: Ours, models: list[Any], input_dir: str) -> None:
    models[:] = [model for model in models if model not in ours]
