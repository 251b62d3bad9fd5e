"""The manifest: which arrays a checkpoint holds, where, and every value that is not an array."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from outsize.checkpoint.values import DTYPE_NAMES, DTYPES, decode, encode, inline
from outsize.move.gradients import GradOps
from outsize.plan.layout import round_up

FORMAT = "outsize checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
ALIGN_BYTES = 64
MASTER_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Region:
    """One array, contiguous and little-endian, in one file of the checkpoint."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        where = {"file": self.file, "offset": self.offset}
        return {**where, "dtype": DTYPE_NAMES[self.dtype], "shape": list(self.shape)}

    @classmethod
    def from_json(cls, value: Any) -> Region:
        shape = tuple(_natural(each) for each in value["shape"])
        return cls(str(value["file"]), _natural(value["offset"]), DTYPES[value["dtype"]], shape)


@dataclass(frozen=True)
class GradRecord:
    """A gradient at rest: its bytes, what was done to it and not yet applied, and its norms where they are known."""

    region: Region
    ops: GradOps = field(default_factory=GradOps)
    norms: Mapping[float, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        ops = {"scale": self.ops.scale, "low": self.ops.low, "high": self.ops.high, "zero": self.ops.zero}
        norms = [[order, norm] for order, norm in self.norms.items()]
        return encode({"ops": ops, "norms": norms}, "grad", inline) | self.region.to_json()  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, value: Any) -> GradRecord:
        ops = GradOps(**_numbers(value["ops"]))
        return cls(Region.from_json(value), ops, {float(o): float(n) for o, n in decode(value["norms"], _no_tensor)})


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter: its weight, what completes a 16-bit one to its fp32 master, its optimizer state, its gradient."""

    weight: Region
    master: Region | None = None
    state: Mapping[str, Region] = field(default_factory=dict)
    scalars: Any = None
    """The optimizer's other values of this parameter, encoded; None where it has no state yet."""
    grad: GradRecord | None = None
    held: GradRecord | None = None
    """The gradient that a delayed update holds back until the next step."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def regions(self) -> list[Region]:
        found = [self.weight, *self.state.values()]
        found += [self.master] if self.master is not None else []
        return found + [grad.region for grad in (self.grad, self.held) if grad is not None]

    def to_json(self) -> dict[str, Any]:
        return {
            "weight": self.weight.to_json(),
            "master": self.master and self.master.to_json(),
            "state": {name: region.to_json() for name, region in self.state.items()},
            "scalars": self.scalars,
            "grad": self.grad and self.grad.to_json(),
            "held": self.held and self.held.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any) -> ParameterRecord:
        record = cls(
            weight=Region.from_json(value["weight"]),
            master=Region.from_json(value["master"]) if value["master"] is not None else None,
            state={str(name): Region.from_json(each) for name, each in value["state"].items()},
            scalars=value["scalars"],
            grad=GradRecord.from_json(value["grad"]) if value["grad"] is not None else None,
            held=GradRecord.from_json(value["held"]) if value["held"] is not None else None,
        )
        if any(region.shape != record.shape for region in record.regions()):
            raise ValueError("the arrays of one parameter have different shapes")
        if record.master is not None and MASTER_DTYPES.get(record.dtype) is not record.master.dtype:
            raise ValueError("a master is int16 beside a bfloat16 weight and float32 beside a float16 one")
        grads = [grad.region for grad in (record.grad, record.held) if grad is not None]
        others = [*record.state.values(), *grads]
        if not all(region.dtype.is_floating_point for region in others):
            raise ValueError("optimizer state and gradients are floating-point")
        return record


@dataclass(frozen=True)
class BufferRecord:
    """A buffer of the model; the ones that are not in its state_dict are stored too."""

    region: Region
    persistent: bool

    def to_json(self) -> dict[str, Any]:
        return {**self.region.to_json(), "persistent": self.persistent}

    @classmethod
    def from_json(cls, value: Any) -> BufferRecord:
        return cls(Region.from_json(value), bool(value["persistent"]))


@dataclass(frozen=True)
class GroupRecord:
    """A parameter group: its hyper-parameters (encoded) and the names of its parameters."""

    hyper: Any
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerRecord:
    """The optimizer's class, the names of its per-element arrays, its groups, and the steps that it has taken."""

    kind: str
    arrays: tuple[str, ...]
    groups: tuple[GroupRecord, ...]
    steps: int = 0
    delayed: bool = False
    """Whether it delays its updates; only then can it hold gradients back."""

    def to_json(self) -> dict[str, Any]:
        groups = [{"hyper": group.hyper, "parameters": list(group.parameters)} for group in self.groups]
        return {
            "class": self.kind,
            "arrays": list(self.arrays),
            "groups": groups,
            "steps": self.steps,
            "delayed": self.delayed,
        }

    @classmethod
    def from_json(cls, value: Any) -> OptimizerRecord:
        groups = tuple(
            GroupRecord(dict(each["hyper"]), tuple(map(str, each["parameters"]))) for each in value["groups"]
        )
        steps, delayed = _natural(value["steps"]), bool(value["delayed"])
        return cls(str(value["class"]), tuple(map(str, value["arrays"])), groups, steps, delayed)


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the arrays' bytes. `files` gives each file's length."""

    files: Mapping[str, int]
    parameters: Mapping[str, ParameterRecord]
    buffers: Mapping[str, BufferRecord]
    optimizer: OptimizerRecord | None
    rng: Any
    extra: Any
    written_by: Mapping[str, str] = field(default_factory=dict)

    def to_text(self) -> str:
        content = {
            "format": FORMAT,
            "version": VERSION,
            "written_by": dict(self.written_by),
            "files": dict(self.files),
            "parameters": {name: record.to_json() for name, record in self.parameters.items()},
            "buffers": {name: record.to_json() for name, record in self.buffers.items()},
            "optimizer": self.optimizer and self.optimizer.to_json(),
            "rng": self.rng,
            "extra": self.extra,
        }
        return _readable(content, 3, "") + "\n"

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Raises `ValueError` that says what is wrong with the text."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is damaged: not JSON ({error})") from error
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError("is not the manifest of an outsize checkpoint")
        if value.get("version") != VERSION:
            raise ValueError(
                f"has the format version {value.get('version')!r}; this version of outsize reads version {VERSION}: "
                f"load it with the version of outsize that wrote it ({value.get('written_by')})"
            )
        try:
            return cls._from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"is damaged: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Manifest:
        optimizer = value["optimizer"]
        manifest = cls(
            files={str(name): _natural(nbytes) for name, nbytes in value["files"].items()},
            parameters={str(name): ParameterRecord.from_json(each) for name, each in value["parameters"].items()},
            buffers={str(name): BufferRecord.from_json(each) for name, each in value["buffers"].items()},
            optimizer=None if optimizer is None else OptimizerRecord.from_json(optimizer),
            rng=value["rng"],
            extra=value["extra"],
            written_by=dict(value["written_by"]),
        )
        for name in manifest.files:
            if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
                raise ValueError(f"{name!r} is not a file name that a checkpoint may use")
        for record in manifest.parameters.values():
            for region in record.regions():
                manifest.check(region)
        for buffer in manifest.buffers.values():
            manifest.check(buffer.region)
        return manifest

    def check(self, region: Region) -> None:
        """Raise `ValueError` unless the region lies in one of the files."""
        if region.file not in self.files or region.offset + region.nbytes > self.files[region.file]:
            raise ValueError(f"an array of {region.nbytes} bytes at {region.offset} lies outside of {region.file!r}")


class FilePlan:
    """Hands out regions of one file, one behind the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = 0

    def reserve(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Region:
        region = Region(self.name, round_up(self.nbytes, ALIGN_BYTES), dtype, shape)
        self.nbytes = region.offset + region.nbytes
        return region


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a size")
    return value


def _numbers(value: Any) -> Any:
    return {key: each if isinstance(each, bool) else float(each) for key, each in decode(value, _no_tensor).items()}


def _no_tensor(value: Any) -> torch.Tensor:
    raise ValueError("a tensor where none can be")


def _readable(value: Any, levels: int, indent: str) -> str:
    """JSON with one line an entry down to `levels`, compact below."""
    deeper = indent + "  "
    if levels and isinstance(value, dict) and value:
        lines = (f"{deeper}{json.dumps(key)}: {_readable(each, levels - 1, deeper)}" for key, each in value.items())
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if levels and isinstance(value, list) and value:
        return "[\n" + ",\n".join(deeper + _readable(each, levels - 1, deeper) for each in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)
