"""Lightning's `Trainer` and `Fabric` on a model whose state is larger than memory.

```python
from lightning.pytorch import Trainer
from outsize.integrations.lightning import OutsizeStrategy

trainer = Trainer(strategy=OutsizeStrategy(host_memory="4GiB", disk="/mnt/nvme"), max_epochs=3)
trainer.fit(model, loader)
```

`Fabric` takes an `OutsizeFabricStrategy`. Both know the name `"outsize"` once this module is imported.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partialmethod
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import lightning
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

import outsize
from outsize.api.assemble import first_prepared
from outsize.config import Fields, make_config, shows_fields

if TYPE_CHECKING:
    from typing_extensions import Unpack

if tuple(map(int, lightning.__version__.split(".")[:2])) < (2, 6):
    raise ImportError(
        f"outsize needs lightning 2.6 or newer, this is {lightning.__version__}: pip install -U lightning"
    )

STATE = "lightning"
"""The key of Lightning's own state in the `extra` of a checkpoint."""

OF_DDP = ("accelerator", "parallel_devices", "cluster_environment", "process_group_backend", "timeout")
"""Arguments of Lightning's strategies that ours take too; a precision plugin has another name in each."""

_AVERAGES = "holds a second model in memory", "average in a callback of your own, inside outsize.gathered"
CALLBACKS = {
    WeightAveraging: _AVERAGES,
    StochasticWeightAveraging: _AVERAGES,
    BaseFinetuning: (
        "compares the values of all parameters",
        "in a callback of your own set requires_grad and call optimizer.add_param_group",
    ),
    ModelPruning: (
        "writes to weights between steps",
        "set weights to zero in a callback of your own, inside outsize.gathered(model, modify=True)",
    ),
}
"""Callbacks that cannot work on parameters at rest: why, and the remedy."""


class _OnRanks:
    """What both strategies have in common. Lightning's `DDPStrategy` starts the ranks and lets them speak; it wraps
    nothing here."""

    _precision_argument: str
    accelerator: Any
    broadcast: Any
    num_nodes: int
    num_processes: int
    root_device: torch.device
    world_size: int

    @shows_fields
    def __init__(self, **fields: Unpack[Fields]) -> None:
        given: dict[str, Any] = dict(fields)
        own = {name: given.pop(name) for name in (*OF_DDP, self._precision_argument) if name in given}
        super().__init__(**own)
        make_config(None, given)  # raises for a field that makes no sense
        self._given = given
        self._saving: Any = None

    @property
    def _fields(self) -> Any:
        return {"device": self.root_device, **self._given}

    @property
    def _alone(self) -> bool:
        return self.num_processes * self.num_nodes == self.world_size == 1

    @property
    def checkpoint_io(self) -> Any:
        """Removes checkpoints, and reads those of other strategies."""
        return TorchCheckpointIO()

    @checkpoint_io.setter
    def checkpoint_io(self, _: Any) -> None:
        raise ValueError("outsize writes its checkpoints itself: leave the CheckpointIO out of the plugins")

    def _configure_launcher(self) -> None:
        if not self._alone:
            os.environ["LOCAL_WORLD_SIZE"] = str(self.num_processes)  # as torchrun says it: they share memory and cores
            super()._configure_launcher()  # type: ignore[misc]

    def setup_environment(self) -> None:
        if self._alone:
            self.accelerator.setup_device(self.root_device)
        else:
            super().setup_environment()  # type: ignore[misc]

    @contextmanager
    def _at_rest(self, outer: AbstractContextManager[Any]) -> Iterator[None]:
        """`outer`: Lightning's own context. Its device is left out: parameters are made on the host, and rest."""
        with outer, torch.device("cpu"), outsize.init(**self._fields):
            yield

    def _save(self, path: Any, model: nn.Module, optimizer: Any, state: Any, storage_options: Any) -> None:
        if storage_options is not None:
            raise TypeError("outsize writes its checkpoints itself, and has no storage_options: leave them out")
        content = io.BytesIO()
        torch.save(state, content)
        extra = {STATE: torch.frombuffer(content.getbuffer(), dtype=torch.uint8)}
        self._saving = outsize.save(self.broadcast(path), model, optimizer, extra)

    def _load(self, path: Any, model: nn.Module, optimizer: Any, strict: bool, weights_only: bool | None) -> Any:
        extra = outsize.load(path, model, optimizer, strict=strict)
        if not isinstance(extra, dict) or STATE not in extra:
            raise ValueError(f"{path} was not saved by Lightning; outsize.load(path, model, optimizer) loads it")
        return torch.load(io.BytesIO(extra[STATE].numpy().tobytes()), map_location="cpu", weights_only=weights_only)


class OutsizeStrategy(_OnRanks, DDPStrategy):  # type: ignore[misc]  # Lightning is not read by mypy
    """Trains within budgets: `Trainer(strategy=OutsizeStrategy(host_memory="4GiB", disk="/mnt/nvme"))`.

    Keywords are the fields of `outsize.Config`, and of `DDPStrategy` what starts ranks (`process_group_backend`,
    `timeout`, ...). The model is prepared when `fit`, `validate`, `test` or `predict` begins, and stays so. The loggers
    get the figures of `outsize.Monitor`.

    A checkpoint is a folder of `outsize.save`, with Lightning's own state in its `extra`. Training that is resumed from
    it is bit for bit that of a run that never stopped. Raises `ValueError` for what cannot train such a model, before
    anything is moved.
    """

    _precision_argument = "precision_plugin"
    restore_checkpoint_after_setup = True
    lightning_module: Any
    optimizers: Any
    precision_plugin: Any
    prepared: ClassVar[WeakSet[nn.Module]] = WeakSet()
    """What a Trainer has prepared: the next `fit` prepares it anew."""
    _keeps_grads = False

    def setup(self, trainer: Any) -> None:
        """Prepare the model, with the optimizer of `configure_optimizers` where it is to be trained."""
        model, self._fits, self._keeps_grads = self.lightning_module, trainer.state.fn == TrainerFn.FITTING, False
        self._refuse_what_cannot_train(trainer.callbacks)
        self.accelerator.setup(trainer)
        if self._alone:  # batches come in the loader's own order
            trainer._accelerator_connector.use_distributed_sampler = False
        if self._fits and _is_prepared(model):
            outsize.release(model)
        if not _is_prepared(model):
            if self._layer_sync:
                self._layer_sync.apply(model)
            self.precision_plugin.convert_module(model)
            outsize.prepare(model, self._only_optimizer(trainer) if self._fits else None, **self._fields)
            self.prepared.add(model)
        self.setup_precision_plugin()
        self._monitor, self._between_steps, self._rng = outsize.Monitor(model), True, None

    def _refuse_what_cannot_train(self, callbacks: Any) -> None:
        model, precision = self.lightning_module, type(self.precision_plugin)
        taken = self._fits and _is_prepared(model) and model not in self.prepared
        for refused, what, remedy in (
            (taken, "the model is prepared already", "pass a plain one: outsize.release(model) makes it so"),
            (model._compiler_ctx, "the model is compiled", "call .compile() of its layers"),
            (
                issubclass(precision, (DeepSpeedPrecision, FSDPPrecision)),
                f"{precision.__name__} is of another strategy",
                'pass precision="bf16-mixed" or the like',
            ),
            *(
                (isinstance(each, kind), f"{type(each).__name__} {why}", remedy)
                for each in callbacks
                for kind, (why, remedy) in CALLBACKS.items()
            ),
        ):
            if refused:
                raise ValueError(f"{what}, and outsize cannot train so; {remedy}")

    def _only_optimizer(self, trainer: Any) -> Any:
        self.setup_optimizers(trainer)
        real = [each for each in self.optimizers if each.param_groups]  # Lightning's stand-in for none has no group
        if not real:
            raise ValueError("configure_optimizers gives no optimizer, and outsize trains a model with one: return it")
        if len(real) > 1:
            raise ValueError(
                f"configure_optimizers gives {len(real)} optimizers, and outsize trains a model with one: give it "
                f"several parameter groups, or train parts of the model with Fabric, each with its own"
            )
        return real[0]

    def model_to_device(self) -> None:
        """Nothing: `outsize.prepare` places the model."""

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Of `configure_model` and `Trainer.init_module`: what is built inside rests."""
        return self._at_rest(super().tensor_init_context(empty_init))

    def block_backward_sync(self) -> AbstractContextManager[None]:
        return outsize.no_sync(self.lightning_module)

    def _as_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A step of the module, as its call: so the step may use parameters itself."""
        short = name.replace("training", "train").replace("validation", "val")
        with getattr(self.precision_plugin, f"{short}_context")():
            return self._forward_redirection(self.lightning_module, self.lightning_module, name, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.lightning_module.automatic_optimization:
            return self._as_forward("training_step", *args, **kwargs)
        return super().training_step(*args, **kwargs)  # backward and the optimizer's step are in it

    validation_step = partialmethod(_as_forward, "validation_step")
    test_step = partialmethod(_as_forward, "test_step")
    predict_step = partialmethod(_as_forward, "predict_step")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._between_steps:  # evaluations and checkpoints that came there are no part of a step's figures
            self._monitor.begin()
            self._between_steps = False
        if self._rng is not None and batch_idx:  # in an epoch that goes on, a new iterator has drawn from it since
            _set_rng_states(self._rng)
        self._rng = None

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """As in Lightning; then the loggers get what the step took, where they get its loss. A `training_step` that
        returns None skips its batch: where no other one has given a gradient, there is no step."""

        def learn() -> Any:
            loss = closure()
            if loss is None and self.lightning_module.automatic_optimization and not _has_gradient(optimizer):
                raise _NothingToLearnError
            return loss

        try:
            result = super().optimizer_step(optimizer, learn, model, **kwargs)
        except _NothingToLearnError:
            return None
        self._between_steps, trainer = True, self.lightning_module.trainer
        record = {f"outsize/{name}": value for name, value in self._monitor.step().items() if name != "step"}
        if trainer._logger_connector.should_update_logs:
            for logger in trainer.loggers:
                logger.log_metrics(record, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        return result

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: `outsize.save` writes the weights, and the state of the optimizer."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        model, optimizer = self.lightning_module, None
        if checkpoint.get("optimizer_states"):
            optimizer = self.optimizers[0]
            plain = model.automatic_optimization and not is_overridden("optimizer_zero_grad", model)
            if plain and self._between_steps:
                optimizer.zero_grad()  # as the next batch begins: gradients that are used up are not saved
        self._save(_undotted(filepath), model, optimizer, checkpoint, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Restore the model and, where it is trained, its optimizer; returns Lightning's own state. A file is of
        another strategy."""
        path = _undotted(checkpoint_path)
        if not path.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        model, optimizer = self.lightning_module, self.optimizers[0] if self._fits else None
        try:
            found = self._load(path, model, optimizer, model.strict_loading, weights_only)
        except UnpicklingError as error:  # the Trainer passes no `weights_only` of its caller
            raise ValueError(
                f"{path} has values of classes that torch reads only where they are named before: "
                f"torch.serialization.add_safe_globals([...]). The Trainer does not pass weights_only= on"
            ) from error
        self._rng = _collect_rng_states() if self._fits else None
        self._keeps_grads = optimizer is not None and _has_gradient(optimizer) and _between_batches(found)
        return found

    def barrier(self, name: str = "") -> None:
        super().barrier(name)
        if name == "run-stage" and self._keeps_grads:  # the Trainer's next call would drop the gradients
            self._keeps_grads, model = False, self.lightning_module
            model.zero_grad = lambda *_, **__: delattr(model, "zero_grad")

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if checkpoint["state_dict"]:
            with outsize.gathered(self.lightning_module, modify=True):
                super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if state:
                optimizer.load_state_dict(state)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Once the newer one is on the drive."""
        self.on_train_end()
        super().remove_checkpoint(_undotted(filepath))

    def on_train_end(self) -> None:
        """The last checkpoint is on the drive; raises what went wrong with it."""
        if self._saving is not None:
            self._saving.wait()

    def teardown(self) -> None:
        """The model stays where it rests: it can be evaluated, saved and exported."""
        for each in (self.cluster_environment, self.precision_plugin, self.accelerator):
            each.teardown()


class OutsizeFabricStrategy(_OnRanks, FabricDDPStrategy):  # type: ignore[misc]
    """For `Fabric(strategy=OutsizeFabricStrategy(host_memory="4GiB", disk="/mnt/nvme"))`: `setup(model, optimizer)`
    prepares them, `init_module` builds a model at rest, `save` and `load` are those of outsize.

    Keywords as for `OutsizeStrategy`. Call `fabric.launch()`, with one rank too.
    """

    _precision_argument = "precision"

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._backward_sync_control = _NoSync()

    @property
    def distributed_sampler_kwargs(self) -> Any:
        return None if self._alone else super().distributed_sampler_kwargs

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: `outsize.prepare` places the model."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        return self._at_rest(super().module_init_context(empty_init))

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        if len(optimizers) != 1:
            raise ValueError(
                f"fabric.setup got {len(optimizers)} optimizers, and outsize trains a model with one: give it several "
                f"parameter groups, or call setup for each part of the model with its own"
            )
        outsize.prepare(module, optimizers[0], **self._fields)
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """For a model that is only run."""
        outsize.prepare(module, **self._fields)
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        raise ValueError("outsize prepares a model and its optimizer together: fabric.setup(model, optimizer)")

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        if filter is not None:
            raise TypeError("outsize saves whole models: fabric.save takes no filter")
        model, optimizer, rest = _parted(state)
        self._save(path, model, optimizer, self._convert_stateful_objects_in_state(rest, {}), storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As `Fabric.load`. A file is of another strategy."""
        if not Path(path).is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[no-any-return]
        if isinstance(state, nn.Module):
            outsize.load(path, state, strict=strict)
            return {}
        model, optimizer, rest = _parted(state or {})
        stored: dict[str, Any] = self._load(path, model, optimizer, strict, weights_only)
        missing = rest.keys() - stored.keys()
        if missing and strict:
            raise KeyError(f"{path} has no {min(missing)!r}; with strict=False it is left as it is")
        for name in rest.keys() - missing:
            if hasattr(rest[name], "load_state_dict"):
                rest[name].load_state_dict(stored.pop(name))
            else:
                state[name] = stored.pop(name)
        return stored

    def load_module_state_dict(self, module: nn.Module, state_dict: Any, strict: bool = True) -> None:
        with outsize.gathered(module, modify=True):
            module.load_state_dict(state_dict, strict=strict)


class _NothingToLearnError(Exception):
    """Ends a step from inside."""


class _NoSync(_BackwardSyncControl):  # type: ignore[misc]
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return outsize.no_sync(module) if enabled else nullcontext()


def _parted(state: Mapping[str, Any]) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The model in what Fabric saves or loads, its optimizer, and the rest."""
    models = [each for each in state.values() if isinstance(each, nn.Module) and _is_prepared(each)]
    optimizers = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
    if len(models) != 1 or len(optimizers) > 1:
        raise ValueError(
            f"the state has {len(models)} models that fabric.setup prepared and {len(optimizers)} optimizers, and a "
            f"checkpoint of outsize has one model and its optimizer: save each model to a folder of its own"
        )
    taken = {id(each) for each in (*models, *optimizers)}
    rest = {name: each for name, each in state.items() if id(each) not in taken}
    return models[0], optimizers[0] if optimizers else None, rest


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])


def _between_batches(checkpoint: Mapping[str, Any]) -> bool:
    """An exception may save one in the midst of a batch, which then runs again."""
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    return bool(batches["ready"] == batches["processed"])


def _undotted(path: Any) -> Path:
    """Lightning's tuner names its checkpoints `.lr_find_...`; outsize takes a dot for what a killed save has left."""
    return Path(path).with_name(Path(path).name.lstrip("."))


def _is_prepared(model: nn.Module) -> bool:
    return first_prepared(model.parameters()) is not None


for _registry, _strategy in ((StrategyRegistry, OutsizeStrategy), (STRATEGY_REGISTRY, OutsizeFabricStrategy)):
    _registry.register("outsize", _strategy, description="trains within budgets of memory and disk")
