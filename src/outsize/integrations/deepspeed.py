"""DeepSpeed's configuration as fields of outsize; DeepSpeed itself is not needed.

```python
from outsize.integrations.deepspeed import config_from

found = config_from("ds_config.json")
optimizer = found.optimizer(model.parameters())  # where the file names one
model, optimizer = outsize.prepare(model, optimizer, host_memory="64GiB", **found.fields)
```
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from outsize.optim import Lion

ZERO, OFFLOAD = "zero_optimization", ("offload_optimizer", "offload_param")
READ = (ZERO, "fp16", "bf16", "optimizer", "activation_checkpointing")
"""Sections some keys of which have a counterpart."""
OLD_NAMES = {"bfloat16": "bf16"}
"""Sections that DeepSpeed takes under another name too."""

BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

TIERS = {None: "device", "none": "device", "cpu": "host", "nvme": "disk"}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "bfp16": torch.bfloat16}
OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.AdamW,  # so DeepSpeed has it, unless adam_w_mode is false
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "lion": Lion,
}

DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "adam": {"weight_decay": 0.0},
    "adamw": {"weight_decay": 0.0},
    "lion": {"lr": 1e-3},
}
"""DeepSpeed's, where torch has others."""

FROM_ARGUMENTS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", lambda args: args.per_device_train_batch_size),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", lambda args: args.gradient_accumulation_steps),
    "train_batch_size": (
        "world_size * per_device_train_batch_size * gradient_accumulation_steps",
        lambda args: args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps,
    ),
    "gradient_clipping": ("max_grad_norm", lambda args: args.max_grad_norm),
    "optimizer.params.lr": ("learning_rate", lambda args: args.learning_rate),
    "optimizer.params.betas": ("adam_beta1, adam_beta2", lambda args: [args.adam_beta1, args.adam_beta2]),
    "optimizer.params.eps": ("adam_epsilon", lambda args: args.adam_epsilon),
    "optimizer.params.weight_decay": ("weight_decay", lambda args: args.weight_decay),
    "fp16.enabled": ("fp16 or fp16_full_eval", lambda args: args.fp16 or args.fp16_full_eval),
    "bf16.enabled": ("bf16 or bf16_full_eval", lambda args: args.bf16 or args.bf16_full_eval),
}
"""What transformers fills in for "auto", and compares where it is not: (the arguments, their value)."""

BY_ITSELF = (
    *(f"{ZERO}.{name}" for name in ("allgather_", "overlap_comm", "reduce_", "contiguous_gradients", "round_robin_")),
    *(f"{ZERO}.{name}" for name in ("sub_group_size", "stage3_", "ignore_unused_", "elastic_checkpoint", "load_from_")),
    *(f"{ZERO}.{name}" for name in ("memory_efficient_linear", "use_multi_rank_", "module_granularity_", "legacy_")),
    *(f"{ZERO}.{name}" for name in ("aio.", "prefetch_bucket_size", "max_live_", "max_reuse_", "gather_16bit_")),
    *(f"{ZERO}.{name}" for name in ("param_persistence_", "model_persistence_")),
    *(f"{ZERO}.{each}.{name}" for each in OFFLOAD for name in ("pin_memory", "buffer_", "fast_init", "pipeline")),
    f"{ZERO}.offload_param.max_in_cpu",
    *("aio.", "steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "disable_allgather"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "checkpoint."),
    *("fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale", "bf16.immediate_grad_update"),
    *(
        f"activation_checkpointing.{name}"
        for name in ("partition_", "contiguous_", "number_", "synchronize_", "profile")
    ),
)
"""How keys begin that do not change what is learnt: outsize decides by budgets, or has no such choice."""

AUTOCAST = "write torch.autocast around the forward in your loop"
MONITOR = "outsize.Monitor gives the figures of each step"
PROFILER = "torch.profiler shows the time"
NO_COUNTERPART: Mapping[str, tuple[tuple[Any, ...], str]] = {
    f"{ZERO}.zero_hpz_partition_size": ((1,), "there is no second partition inside a machine"),
    f"{ZERO}.zero_quantized_": (
        (False,),
        "ranks exchange no quantized values; reduce_dtype=torch.bfloat16 halves them",
    ),
    f"{ZERO}.mics_": ((-1, False), "pass mesh=, a DeviceMesh of copies and parts"),
    f"{ZERO}.cpu_offload": ((False, None), "DeepSpeed has given it up: write offload_optimizer or offload_param"),
    f"{ZERO}.offload_optimizer.ratio": ((1, 1.0), "states='auto' with device_memory= splits them by bytes"),
    "fp16.loss_scale": ((0, 0.0), "a constant scale: multiply the loss in your loop"),
    "fp16.fp16_master_weights_and_grads": ((False,), "masters are exact; state_format='compact' saves memory"),
    "bf16.bf16_": ((False,), "masters and moments are exact; state_format='compact' saves memory"),
    "fp16.auto_cast": ((False,), AUTOCAST),
    "amp": ((), AUTOCAST),
    "torch_autocast": ((), AUTOCAST),
    "scheduler": ((), "make a scheduler of torch.optim.lr_scheduler, or leave it to transformers' Trainer"),
    "prescale_gradients": ((False,), "gradients are divided after their sum in reduce_dtype"),
    "gradient_predivide_factor": ((1, 1.0), "gradients are divided after their sum in reduce_dtype"),
    "sparse_gradients": ((False,), "embeddings with sparse=True train with outsize.optim.LazyAdamW"),
    "data_types.grad_accum_dtype": ((None, "fp32"), "sums of gradients are in fp32"),
    "tensorboard": ((), MONITOR),
    "wandb": ((), MONITOR),
    "comet": ((), MONITOR),
    "csv_monitor": ((), MONITOR),
    "flops_profiler": ((), PROFILER),
    "comms_logger": ((), PROFILER),
    "tensor_parallel": ((), "call torch's parallelize_module, then outsize.prepare with mesh="),
    "compile": ((), "call .compile() of the model's layers"),
}
"""How keys begin of which outsize has nothing, with the values that ask for nothing, and the reason or the remedy."""


@final
@dataclass(frozen=True)
class FromDeepSpeed:
    """What a DeepSpeed configuration says, in terms of outsize and torch."""

    fields: Mapping[str, Any]
    """Of `outsize.prepare`; add budgets."""
    max_grad_norm: float
    """For `torch.nn.utils.clip_grad_norm_`; 0: no clipping."""
    accumulation_steps: int
    micro_batch_size: int | None
    """Samples of one rank in one backward, if the configuration says so."""
    optimizer: Callable[..., torch.optim.Optimizer] | None
    """Call it with the parameters."""
    scaler: Callable[..., torch.amp.GradScaler] | None
    """Call it with the device's name, for fp16."""


def config_from(source: str | os.PathLike[str] | Mapping[str, Any], args: Any = None) -> FromDeepSpeed:
    """Read a DeepSpeed configuration: stages, offload to CPU and NVMe, precision, clipping, accumulation, optimizer.

    Args:
        source: the file, or what is in it.
        args: transformers' `TrainingArguments`, made without `deepspeed=`: they fill in "auto" as transformers does. A
            value that is not "auto" must be theirs.

    Keys that tune DeepSpeed (buckets, buffers, pinning) have no meaning here and are passed over. Everything else that
    has no counterpart is one `ValueError`, which lists each key with the reason or the remedy.

    >>> from outsize.integrations.deepspeed import config_from
    >>> zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    >>> found = config_from({"bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_optimization": zero})
    >>> found.fields["params"], found.fields["states"], found.fields["compute_dtype"], found.max_grad_norm
    ('host', 'host', torch.bfloat16, 1.0)
    """
    return _Reader(source if isinstance(source, Mapping) else _read(Path(source)), args).read()


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}; a configuration of DeepSpeed is an object: {{...}}")
    return found


@final
class _Reader:
    """Takes one key after the other; what is left at the end has no counterpart."""

    def __init__(self, given: Mapping[str, Any], args: Any) -> None:
        self._problems: list[str] = []
        for old, name in OLD_NAMES.items():
            if given.get(old) is not None and given.get(name) is not None:
                self._refuse(old, f"it is the older name of {name}, which is there too: keep one of them")
        sections = {OLD_NAMES.get(name, name): value for name, value in given.items() if value is not None}
        self._left = dict(_flat("", sections))
        for key, value in list(self._left.items()):
            if key in FROM_ARGUMENTS:
                self._fill(key, value, args)
        for key in [key for key in self._left if key.endswith(".enabled") and not self._left[key]]:
            for name in [name for name in self._left if name.startswith(key[: -len("enabled")])]:
                del self._left[name]

    def _fill(self, key: str, value: Any, args: Any) -> None:
        names, of = FROM_ARGUMENTS[key]
        if value == "auto" and args is None:
            self._refuse(key, 'it is "auto": pass args=, the TrainingArguments')
            del self._left[key]
        elif value == "auto":
            self._left[key] = of(args)
        elif args is not None and value != of(args):
            self._refuse(key, f"it is {value!r}, and {names} of the TrainingArguments is {of(args)!r}")

    def _refuse(self, key: str, why: str) -> None:
        self._problems.append(f"{key}: {why}")

    def _take(self, key: str, default: Any = None) -> Any:
        return self._left.pop(key, default)

    def read(self) -> FromDeepSpeed:
        fields = {**self._tiers(), **self._precision(), **self._activations()}
        scaler = self._scaler(fields.get("compute_dtype") is torch.float16)
        micro, steps = self._batches()
        norm, optimizer = float(self._take("gradient_clipping", 0.0)), self._optimizer()
        for key, value in self._left.items():
            name, nothing, why = _reason(key)
            if not key.startswith(BY_ITSELF) and value not in nothing:
                self._refuse(name, why)
        if self._problems:
            problems = "\n- ".join(dict.fromkeys(self._problems))
            raise ValueError(f"outsize cannot take over this DeepSpeed configuration:\n- {problems}")
        return FromDeepSpeed(fields, norm, steps, micro, optimizer, scaler)

    def _tiers(self) -> dict[str, Any]:
        stage, places, disks = self._take(f"{ZERO}.stage", 0), {}, []
        if whole := self._take(ZERO):  # an old form
            self._refuse(ZERO, f'it is {whole!r}; name the stage: {{"stage": 1}}')
        for name in OFFLOAD:
            key = f"{ZERO}.{name}"
            place, path = self._take(f"{key}.device"), self._take(f"{key}.nvme_path")
            places[name] = TIERS.get(place)
            if places[name] is None:
                self._refuse(f"{key}.device", f"it is {place!r}; outsize knows none, cpu and nvme")
            elif place == "nvme" and path is None:
                self._refuse(f"{key}.nvme_path", "it is missing: name a folder on the drive")
            elif place == "nvme":
                disks.append(path)
        states, params = places["offload_optimizer"], places["offload_param"]
        if isinstance(stage, bool) or stage not in range(4):
            self._refuse(f"{ZERO}.stage", f"it is {stage!r}; outsize knows 0, 1, 2 and 3")
        elif params != "device" and stage != 3:
            self._refuse(f"{ZERO}.offload_param", f"stage {stage} keeps whole parameters on the device; use stage 3")
        disk = {"disk": list(dict.fromkeys(disks))} if disks else {}
        return {"stage": stage, "params": params, "grads": states, "states": states, **disk}

    def _precision(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("fp16", "bf16"):
            if self._take(f"{name}.enabled", False):
                if found:
                    self._refuse("bf16.enabled", "fp16.enabled is true, too: turn one of them off")
                found["compute_dtype"] = DTYPES[name]
        wire = self._take("communication_data_type")
        if wire in DTYPES:
            found["reduce_dtype"] = DTYPES[wire]
        elif wire is not None:
            self._refuse("communication_data_type", f"it is {wire!r}; outsize knows {', '.join(DTYPES)}")
        return found

    def _activations(self) -> dict[str, Any]:
        moved = self._take("activation_checkpointing.cpu_checkpointing", False)
        return {"activations": "offload", "activations_tier": "host"} if moved else {}

    def _scaler(self, used: bool) -> Callable[..., torch.amp.GradScaler] | None:
        """Takes its keys, `used` or not."""
        scale, window = self._take("fp16.initial_scale_power", 16), self._take("fp16.loss_scale_window", 1000)
        return None if not used else partial(torch.amp.GradScaler, init_scale=2.0**scale, growth_interval=window)

    def _batches(self) -> tuple[int | None, int]:
        """(samples of one rank in one backward, backwards a step)"""
        whole, micro, steps = map(self._count, BATCHES)
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if whole is None:
            return micro, steps or 1
        micro = micro or whole // (ranks * (steps or 1))
        steps = steps or whole // (ranks * (micro or 1))
        if whole != micro * steps * ranks:
            self._refuse(
                "train_batch_size",
                f"it is {whole}, and {micro} samples in each of {steps} backwards on {ranks} ranks are "
                f"{micro * steps * ranks}",
            )
        return micro, steps

    def _count(self, key: str) -> int | None:
        value = self._take(key)
        if value is None or (type(value) is int and value > 0):
            return value
        self._refuse(key, f"it is {value!r}; it must be a whole number of 1 or more")
        return None

    def _optimizer(self) -> Callable[..., torch.optim.Optimizer] | None:
        name, prefix = self._take("optimizer.type"), "optimizer.params."
        options = {key[len(prefix) :]: self._take(key) for key in list(self._left) if key.startswith(prefix)}
        if name is None:
            return None
        kind = OPTIMIZERS.get(name.lower()) or getattr(torch.optim, name, None)
        if kind is None:
            self._refuse("optimizer.type", f"torch has no {name}; make the optimizer in your program")
            return None
        defaults = {} if options.pop("torch_adam", False) else DEFAULTS.get(name.lower(), {})
        if not options.pop("adam_w_mode", True) and name.lower() == "adam":
            kind = torch.optim.Adam
        if options.pop("bias_correction", True) is False:
            self._refuse("optimizer.params.bias_correction", f"{kind.__name__} always corrects bias")
        for unknown in sorted(set(options) - set(inspect.signature(kind).parameters)):
            self._refuse(f"optimizer.params.{unknown}", f"{kind.__name__} has no such option")
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        return partial(kind, **{**defaults, **options})


def _flat(prefix: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key; null says nothing, but to an optimizer."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(f"{key}.", value)
        elif value is not None or prefix == "optimizer.params.":
            yield key, value


def _reason(key: str) -> tuple[str, tuple[Any, ...], str]:
    """(the name of the key, or of the section where all of it has no counterpart; harmless values; the reason)"""
    section = key.partition(".")[0]
    for start, (nothing, why) in NO_COUNTERPART.items():
        if key.startswith(start):
            return key if nothing else section, nothing, why
    return key if section in READ else section, (), "outsize has nothing like it"
