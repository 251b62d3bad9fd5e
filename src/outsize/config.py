"""The user's wishes as one frozen record; every check of a value that needs no model is made here."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args

import torch

from outsize.planning.sizes import parse_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tier = Literal["auto", "device", "host", "disk"]
Activations = Literal["auto", "keep", "recompute", "offload", "selective"]
ActivationsTier = Literal["auto", "host", "disk"]
StateFormat = Literal["exact", "compact"]
Update = Literal["fetch", "backward"]
Unused = Literal["error", "sync"]
Directory = str | os.PathLike[str]
ModuleKind = type[torch.nn.Module] | str

WARMUP_STEPS = 40
"""Exact steps before the delayed update begins (ZeRO-Offload, Ren et al. 2021, section 5.2)."""


class Fields(TypedDict, total=False):
    """The fields as keywords, for editors and type checkers; `Config` has the same types and the defaults."""

    device: torch.device | str | None
    """Where forward and backward run: any device that torch knows. None: the accelerator, else the CPU."""
    device_memory: int | str | None
    """Budget on the accelerator, in bytes (`"8GiB"` or an int). None: what is free, less a margin."""
    host_memory: int | str | None
    """Budget in host memory, staging included. None: what is free, less a margin."""
    disk: Directory | Sequence[Directory] | None
    """A directory on a fast drive, or several: files are striped over them. It is made if its parent exists. None: no
    disk tier."""
    disk_space: int | str | None
    """Bytes that the run may use there, without kept checkpoints. None: what is free."""
    stage: Literal[0, 1, 2, 3]
    """ZeRO stage, with several ranks."""
    reduce_dtype: torch.dtype | None
    """In which ranks sum gradients. None: the gradients' own."""
    params: Tier
    """Tier of the parameters; `"auto"`: by the budgets, unit by unit."""
    grads: Tier
    """Tier of the gradients."""
    states: Tier
    """Tier of the optimizer's state."""
    compute_dtype: torch.dtype | None
    """`torch.float32`, `torch.bfloat16` or `torch.float16`. None: the model's own."""
    state_format: StateFormat
    """`"exact"`: fp32 master and moments; `"compact"`: 8-bit moments."""
    delayed_update: bool | int
    """ZeRO-Offload's delay of one step: True, or the number of exact steps before it begins."""
    update: Update
    """When a unit is updated: at its next `"fetch"`, or in the `"backward"`, once its gradients are in."""
    verify: bool
    """Compare each read from disk with the checksum of what was written."""
    unused: Unused
    """`"sync"`: ranks may use different units (mixtures of experts)."""
    activations: Activations
    """What layers keep until the backward; `"auto"`: by spare bytes and measured times, layer by layer."""
    activations_tier: ActivationsTier
    """Where `"offload"` moves them."""
    micro_batches: int
    """Parts of the batch that a layer runs before it is released (L2L)."""
    tiles: Literal["auto", False]
    """Tiles of weights and calls that do not fit the budget. False: none."""
    units: ModuleKind | Sequence[ModuleKind] | None
    """Module classes or names that form units. None: cut by size."""
    mesh: DeviceMesh | Mapping[str, int] | None
    """Of torch: data-parallel dimensions, a tensor-parallel one, one of pipeline stages. None: one dimension over all
    ranks. `plan` also takes the size of each dimension by name."""
    progress: bool
    """A bar on a terminal, else lines in the log, for calls that take longer than two seconds."""


@dataclass(frozen=True)
class Config:
    """What may be used and how, as one record. All budgets are bytes (`"8GiB"` or an int).

    The fields are those of `prepare`, in `docs/configuration.md`.

    >>> config = outsize.Config(host_memory="4GiB", disk="disk", compute_dtype=torch.bfloat16)
    >>> model, optimizer = outsize.prepare(model, optimizer, config)

    A budget bounds model states: parameters, gradients, optimizer state and their staging; of activations, what
    `activations="auto"` keeps. With `device="cpu"` the host budget bounds device and host together. Raises `ValueError`
    or `TypeError` that names the field, the value and the accepted forms.
    """

    device: torch.device | str | None = None
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    disk: Directory | Sequence[Directory] | None = None
    disk_space: int | str | None = None
    stage: Literal[0, 1, 2, 3] = 3
    reduce_dtype: torch.dtype | None = torch.float32
    params: Tier = "auto"
    grads: Tier = "auto"
    states: Tier = "auto"
    compute_dtype: torch.dtype | None = None
    state_format: StateFormat = "exact"
    delayed_update: bool | int = False
    update: Update = "fetch"
    verify: bool = True
    unused: Unused = "error"
    activations: Activations = "auto"
    activations_tier: ActivationsTier = "auto"
    micro_batches: int = 1
    tiles: Literal["auto", False] = "auto"
    units: ModuleKind | Sequence[ModuleKind] | None = None
    mesh: DeviceMesh | Mapping[str, int] | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        self._check_device()
        for name in ("device_memory", "host_memory", "disk_space"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_bytes(value, name))
        object.__setattr__(self, "disk", _directories(self.disk))
        for name in ("params", "grads", "states"):
            _one_of(name, getattr(self, name), get_args(Tier))
            if getattr(self, name) == "disk" and not self.disk:
                raise ValueError(f"{name}='disk' needs a directory: pass disk='/path/on/a/fast/drive'")
        _one_of("activations", self.activations, get_args(Activations))
        _one_of("activations_tier", self.activations_tier, get_args(ActivationsTier))
        if self.activations_tier == "disk" and not self.disk:
            raise ValueError("activations_tier='disk' needs a directory: pass disk='/path/on/a/fast/drive'")
        _one_of("state_format", self.state_format, get_args(StateFormat))
        _one_of("update", self.update, get_args(Update))
        _one_of("unused", self.unused, get_args(Unused))
        if self.unused == "sync" and self.update == "backward":
            raise ValueError(
                "unused='sync' may reduce when the backward is over and update='backward' updates in it; choose one"
            )
        for name in ("verify", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not _is_int(self.stage) or self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage is {self.stage!r}; ZeRO stages are 0, 1, 2 and 3")
        if self.reduce_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"reduce_dtype is {self.reduce_dtype!r}; use torch.float32, torch.bfloat16, torch.float16, or None for "
                f"each gradient's own dtype"
            )
        if not _is_int(self.micro_batches) or self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches!r}; it must be an integer of at least 1")
        if self.tiles is not False and self.tiles != "auto":
            raise ValueError(f"tiles is {self.tiles!r}; it must be 'auto' or False")
        if not isinstance(self.delayed_update, int):
            raise TypeError(
                f"delayed_update is {self.delayed_update!r}; it must be True, False or the number of exact steps "
                f"before the delay begins"
            )
        if self.delayed_update < 0 or (self.delayed_update == 0 and self.delayed_update is not False):
            raise ValueError(f"delayed_update is {self.delayed_update!r}; the number of exact steps is at least 1")
        if self.delayed_update and self.update == "backward":
            raise ValueError("update='backward' applies gradients at once and delayed_update a step later; choose one")
        object.__setattr__(self, "units", _unit_choice(self.units))
        if self.mesh is not None and not hasattr(self.mesh, "mesh_dim_names"):
            raise TypeError(f"mesh is {self.mesh!r}; it must be a torch.distributed.device_mesh.DeviceMesh")
        if self.compute_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"compute_dtype is {self.compute_dtype!r}; use torch.float32, torch.bfloat16, torch.float16 or leave "
                f"the model's own"
            )

    def _check_device(self) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        here = f"'cpu', '{accelerator}' or '{accelerator}:N'" if accelerator is not None else "'cpu'"
        try:
            device = torch.device((accelerator or "cpu") if self.device is None else self.device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device is {self.device!r}, which torch does not know; use {here}") from error
        if device.type == "meta":
            if self.device_memory is None:
                raise ValueError("device='meta' plans for an accelerator that is not here: give its device_memory")
            object.__setattr__(self, "device", device)
            return
        if device.type != "cpu" and (accelerator is None or device.type != accelerator.type):
            raise ValueError(f"device is {self.device!r}, and torch has no such accelerator here; use {here}")
        count = torch.accelerator.device_count()
        if device.type != "cpu" and (device.index or 0) >= count:
            raise ValueError(f"device is {self.device!r}, and torch has {count} of them; use {here} with N < {count}")
        object.__setattr__(self, "device", device)

    @property
    def warmup_steps(self) -> int | None:
        """Exact steps before updates are delayed by one; None where they never are."""
        if self.delayed_update is False:
            return None
        return WARMUP_STEPS if self.delayed_update is True else self.delayed_update

    @property
    def directories(self) -> tuple[Path, ...]:
        """The disk directories, one or several (striped); empty without a disk tier."""
        assert self.disk is None or isinstance(self.disk, tuple)
        return tuple(Path(entry) for entry in self.disk or ())

    @property
    def compute_device(self) -> torch.device:
        """The device that runs forward and backward: where the field names no accelerator, this process's own."""
        assert isinstance(self.device, torch.device)
        if self.device.type in ("cpu", "meta") or self.device.index is not None:
            return self.device
        return torch.device(self.device.type, _own_accelerator())


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def shows_fields(function: FunctionT) -> FunctionT:
    """Give the function's signature the fields that it takes as `**fields`: prompts and notebooks complete them."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    ours = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(Config)
    ]
    function.__signature__ = signature.replace(parameters=own + ours)  # type: ignore[attr-defined]
    return function


def make_config(config: Config | None, given: Mapping[str, Any]) -> Config:
    """The `Config` behind `prepare(model, optimizer, config)` and `prepare(..., **fields)`; both together override."""
    known = [field.name for field in fields(Config)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise TypeError(f"unknown field {name!r}{hint} The fields are: {', '.join(known)}")
    if config is None:
        return Config(**given)
    if not isinstance(config, Config):
        raise TypeError(f"config must be an outsize.Config, not {type(config).__name__}")
    return replace(config, **given)


def _own_accelerator() -> int:
    """The one that the script has chosen, else that of this process among those of its machine."""
    local = os.environ.get("LOCAL_RANK", "")
    if local.isdigit() and not has_chosen_accelerator():
        return int(local) % torch.accelerator.device_count()
    return torch.accelerator.current_device_index()


def has_chosen_accelerator() -> bool:
    """Whether the script has made another accelerator torch's current one than that with which every process begins."""
    return torch.accelerator.current_device_index() != 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")


def _directories(disk: object) -> tuple[str, ...] | None:
    if disk is None:
        return None
    entries = [disk] if isinstance(disk, (str, os.PathLike)) else disk
    if not isinstance(entries, Sequence) or not entries:
        raise TypeError(f"disk is {disk!r}; it must be a directory or a non-empty list of directories")
    for entry in entries:
        if not isinstance(entry, (str, os.PathLike)) or not os.fspath(entry):
            raise TypeError(f"disk holds {entry!r}; each entry must be the path of a directory")
    # The working directory may change while a run lasts. Not abspath: what `..` leads to is the file system's to say.
    return tuple(str(Path(entry).absolute()) for entry in entries)


def _unit_choice(units: object) -> tuple[type[torch.nn.Module] | str, ...] | None:
    if units is None:
        return None
    entries = [units] if isinstance(units, (str, type)) else units
    if not isinstance(entries, Sequence) or not entries:
        raise TypeError(f"units is {units!r}; it must be module classes or names, or a non-empty list of them")
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, torch.nn.Module)):
            raise TypeError(f"units holds {entry!r}; each entry must be a module class or a module's name")
    return tuple(entries)


def _placement(stage: int, params: str, grads: str, states: str, **fields: Any) -> Mapping[str, Any]:
    return MappingProxyType({"stage": stage, "params": params, "grads": grads, "states": states, **fields})


presets: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ddp": _placement(0, "device", "device", "device"),
        "zero-2": _placement(2, "device", "device", "device"),
        "zero-offload": _placement(2, "device", "host", "host"),
        "zero-3": _placement(3, "device", "device", "device"),
        "zero-infinity-cpu": _placement(3, "host", "host", "host"),
        "zero-infinity-nvme": _placement(3, "disk", "disk", "disk"),
        "l2l": _placement(3, "host", "host", "host", activations="offload", activations_tier="host", micro_batches=4),
    }
)
"""`outsize.prepare(model, optimizer, **outsize.presets["zero-offload"])`: the placements of ZeRO (Rajbhandari et al.
2020), ZeRO-Offload (Ren et al. 2021), ZeRO-Infinity (Rajbhandari et al. 2021, table 2) and L2L (Pudipeddi et al.
2020)."""
