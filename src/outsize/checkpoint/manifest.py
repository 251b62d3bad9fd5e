"""The manifest: which arrays a checkpoint holds, where, and every value that is not an array."""

from __future__ import annotations

import json
import marshal
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outsize.checkpoint.regions import AnyRegion, CodedRegion, Joined, Region, narrow, natural, region_from
from outsize.checkpoint.values import decode, encode, inline
from outsize.move.generations import crc32c
from outsize.move.grad_ops import GradOps
from outsize.plan.layout import round_up
from outsize.plan.sizes import format_bytes

FORMAT = "outsize checkpoint"
VERSION = 3
READABLE = (2, 3)
MANIFEST_NAME = "manifest.json"
ALIGN_BYTES = 64
CHUNK_BYTES = 1 << 20
"""Bytes that share a checksum."""

MAX_MANIFEST_BYTES = 256 << 20
TRAINABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MASTER_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class FileRecord:
    """One file: its length, and the CRC-32C of each `CHUNK_BYTES` of it."""

    nbytes: int
    sums: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.nbytes, "crc32c": [f"{each:08x}" for each in self.sums]}

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        nbytes = natural(value["bytes"])
        sums = tuple(int(each, 16) for each in value["crc32c"])
        if len(sums) != -(-nbytes // CHUNK_BYTES):
            raise ValueError(f"{len(sums)} checksums for {nbytes} bytes")
        return cls(nbytes, sums)


@dataclass(frozen=True)
class GradRecord:
    """A gradient at rest: its bytes, what was done to it and not yet applied, and its norms where they are known."""

    region: AnyRegion
    ops: GradOps = field(default_factory=GradOps)
    norms: Mapping[float, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        ops = {"scale": self.ops.scale, "low": self.ops.low, "high": self.ops.high, "zero": self.ops.zero}
        norms = [[order, norm] for order, norm in self.norms.items()]
        return encode({"ops": ops, "norms": norms}, "grad", inline) | self.region.to_json()  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, value: Any) -> GradRecord:
        ops, region = GradOps(**_numbers(value["ops"])), _uncoded(value)
        if region.dtype not in TRAINABLE:
            raise ValueError(f"a gradient of {region.dtype}")
        norms = {float(order): float(norm) for order, norm in decode(value["norms"], _no_tensor)}
        most = torch.finfo(torch.float64 if region.dtype is torch.float64 else torch.float32).max
        if any(math.isfinite(norm) and not 0 <= norm <= most for norm in norms.values()):
            raise ValueError(f"{norms} are not norms of a gradient")
        return cls(region, ops, norms)


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter: its weight, what completes a 16-bit one to its fp32 master, its optimizer state, its gradient."""

    weight: AnyRegion
    master: AnyRegion | None = None
    state: Mapping[str, AnyRegion] = field(default_factory=dict)
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

    def weights(self) -> list[Region]:
        """The arrays that make up the parameter's values."""
        return [leaf for each in (self.weight, self.master) if each is not None for leaf in each.leaves()]

    def states(self) -> list[Region]:
        """The arrays of optimizer and gradients, those of codes and scales included."""
        grads = [grad.region for grad in (self.grad, self.held) if grad is not None]
        return [leaf for each in (*self.state.values(), *grads) for leaf in each.leaves()]

    def arrays(self) -> list[AnyRegion]:
        """All of them, in the order of `changed`."""
        found: list[AnyRegion] = []

        def note(region: AnyRegion) -> AnyRegion:
            found.append(region)
            return region

        self.changed(note)
        return found

    def of_part(self, dim: int, first: int, count: int) -> ParameterRecord:
        """The same of these entries of a dimension alone."""
        return self.changed(lambda region: narrow(region, dim, first, count))

    def changed(self, change: Callable[[AnyRegion], AnyRegion]) -> ParameterRecord:
        """The same with each array changed."""
        grad, held = (
            None if each is None else replace(each, region=change(each.region)) for each in (self.grad, self.held)
        )
        return replace(
            self,
            weight=change(self.weight),
            master=None if self.master is None else change(self.master),
            state={name: change(region) for name, region in self.state.items()},
            grad=grad,
            held=held,
        )

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
            weight=_uncoded(value["weight"]),
            master=_uncoded(value["master"]) if value["master"] is not None else None,
            state={str(name): region_from(each) for name, each in value["state"].items()},
            scalars=value["scalars"],
            grad=GradRecord.from_json(value["grad"]) if value["grad"] is not None else None,
            held=GradRecord.from_json(value["held"]) if value["held"] is not None else None,
        )
        grads = [grad.region for grad in (record.grad, record.held) if grad is not None]
        masters = [record.master] if record.master is not None else []
        others = [*record.state.values(), *grads]
        if any(region.shape != record.shape for region in (*masters, *others)):
            raise ValueError("the arrays of one parameter have different shapes")
        if record.master is not None and MASTER_DTYPES.get(record.dtype) is not record.master.dtype:
            raise ValueError("a master is int16 beside a bfloat16 weight and float32 beside a float16 one")
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
        steps, delayed = natural(value["steps"]), bool(value["delayed"])
        return cls(str(value["class"]), tuple(map(str, value["arrays"])), groups, steps, delayed)


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the arrays' bytes. `saved_at` is in UTC and orders checkpoints by age."""

    files: Mapping[str, FileRecord]
    parameters: Mapping[str, ParameterRecord]
    buffers: Mapping[str, BufferRecord]
    optimizer: OptimizerRecord | None
    rng: Any
    extra: Any
    written_by: Mapping[str, str] = field(default_factory=dict)
    saved_at: str = ""
    world_size: int = 1
    tensor_ranks: int = 1
    ranks: Sequence[Any] = ()
    """Of the ranks but the first: {"rng": ..., "extra": ...} each, and "buffers" where some are not the first one's."""
    copies: Sequence[Sequence[Any]] = ()
    """The same of all ranks of each further copy of the model."""
    extra_states: Mapping[str, Any] | None = None
    """Of the modules, encoded, by their names in torch's state dicts; None in a checkpoint from before that."""

    def of_rank(self, copy: int, rank: int) -> Mapping[str, Any]:
        """What a rank of a copy of the model had of its own; its buffers as far as they are not the first one's."""
        if copy:
            return self.copies[copy - 1][rank]  # type: ignore[no-any-return]
        first = {"rng": self.rng, "extra": self.extra, "extra_states": self.extra_states or {}}
        return self.ranks[rank - 1] if rank else first

    def to_text(self) -> str:
        """Raises `ValueError` for a text that is larger than any reader takes."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "written_by": dict(self.written_by),
            "saved_at": self.saved_at,
            "world_size": self.world_size,
            "tensor_ranks": self.tensor_ranks,
            "chunk_bytes": CHUNK_BYTES,
            "files": self.files,
            "parameters": self.parameters,
            "buffers": self.buffers,
            "optimizer": self.optimizer and self.optimizer.to_json(),
            "rng": self.rng,
            "extra": self.extra,
            **({"extra_states": self.extra_states} if self.extra_states is not None else {}),
            **({"ranks": list(self.ranks)} if self.ranks else {}),
            **({"copies": list(map(list, self.copies))} if self.copies else {}),
        }
        text = sealed(_readable(content, 2, ""))
        check_text_bytes(len(text), "the manifest of this checkpoint")  # it is ASCII
        return text

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Raises `ValueError` that says what is wrong with the text."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is damaged: not JSON ({error})") from error
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError("is not the manifest of an outsize checkpoint")
        if value.get("version") not in READABLE:
            raise ValueError(
                f"has the format version {value.get('version')!r}; this version of outsize reads up to {VERSION}: "
                f"load it with the version of outsize that wrote it ({value.get('written_by')})"
            )
        if not _intact(text):
            raise ValueError("is damaged: its text does not have its checksum; load an earlier checkpoint")
        try:
            return cls._from_json(value)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"is damaged: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Manifest:
        optimizer = value["optimizer"]
        manifest = cls(
            files={str(name): FileRecord.from_json(each) for name, each in value["files"].items()},
            parameters={str(name): ParameterRecord.from_json(each) for name, each in value["parameters"].items()},
            buffers={str(name): BufferRecord.from_json(each) for name, each in value["buffers"].items()},
            optimizer=None if optimizer is None else OptimizerRecord.from_json(optimizer),
            rng=value["rng"],
            extra=value["extra"],
            written_by=dict(value["written_by"]),
            saved_at=str(value["saved_at"]),
            world_size=natural(value["world_size"]),
            tensor_ranks=natural(value.get("tensor_ranks", 1)),
            ranks=[dict(each) for each in value.get("ranks", [])],
            copies=[[dict(each) for each in copy] for copy in value.get("copies", [])],
            extra_states=dict(value["extra_states"]) if "extra_states" in value else None,
        )
        size, tensor = manifest.world_size, manifest.tensor_ranks
        if not 1 <= tensor <= size or size % tensor:
            raise ValueError(f"{tensor} tensor-parallel ranks of {size}")
        if len(manifest.ranks) not in (0, size - 1):
            raise ValueError(f"{len(manifest.ranks)} further ranks of {size}")
        if any(len(copy) != size for copy in manifest.copies):
            raise ValueError(f"copies of the model of {[len(copy) for copy in manifest.copies]} ranks, not of {size}")
        if value["chunk_bytes"] != CHUNK_BYTES:
            raise ValueError(f"checksums of {value['chunk_bytes']!r} bytes; they are of {CHUNK_BYTES}")
        for name in manifest.files:
            if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
                raise ValueError(f"{name!r} is not a file name that a checkpoint may use")
        for record in manifest.parameters.values():
            for region in (*record.weights(), *record.states()):
                manifest.check(region)
        for buffer in manifest.buffers.values():
            manifest.check(buffer.region)
        return manifest

    def check(self, region: Region) -> None:
        """Raise `ValueError` unless the region lies in one of the files."""
        for piece in region.pieces:
            nbytes = piece.numel * region.dtype.itemsize
            if not piece.numel:
                continue  # of an array without elements, for which nobody has written a file
            if piece.file not in self.files or piece.offset + nbytes > self.files[piece.file].nbytes:
                raise ValueError(f"an array of {nbytes} bytes at {piece.offset} lies outside of {piece.file!r}")


def check_values(value: Any, what: str) -> None:
    """Raise `ValueError` for encoded values that no manifest has room for."""
    # A look that costs next to nothing: no value is more than 8 times as long in JSON as in this form.
    if 8 * len(marshal.dumps(value, 2)) > MAX_MANIFEST_BYTES:
        check_text_bytes(len(_one_line(value)), what)


def check_text_bytes(nbytes: int, what: str) -> None:
    if nbytes > MAX_MANIFEST_BYTES:
        raise ValueError(
            f"{what} would take {format_bytes(nbytes)} of text, and a manifest has at most "
            f"{format_bytes(MAX_MANIFEST_BYTES)}; put long lists and texts of extra into tensors "
            f"(torch.tensor(values), torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)) or into files"
        )


def sealed(text: str) -> str:
    """A JSON object with the checksum of its text as the last entry."""
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body},\n  "crc32c": "{crc32c(body.encode()):08x}"\n}}\n'


def _intact(text: str) -> bool:
    end = text.rfind(',\n  "crc32c": ')
    return end > 0 and text == sealed(text[:end] + "}")


class FilePlan:
    """Hands out regions of one file, one behind the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = 0

    def reserve(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Region:
        region = Region.at(self.name, round_up(self.nbytes, ALIGN_BYTES), dtype, shape)
        self.nbytes = region.pieces[0].offset + region.nbytes
        return region


def _uncoded(value: Any) -> AnyRegion:
    """An array of anything but optimizer state, whole or joined."""
    region = region_from(value)
    parts = region.parts if isinstance(region, Joined) else (region,)
    if any(isinstance(part, CodedRegion) for part in parts):
        raise ValueError("8-bit codes are for optimizer state alone, not for weights, masters and gradients")
    return region


def _numbers(value: Any) -> Any:
    numbers = {key: each if isinstance(each, bool) else float(each) for key, each in decode(value, _no_tensor).items()}
    if any(math.isfinite(each) and abs(each) > torch.finfo(torch.float32).max for each in numbers.values()):
        raise ValueError(f"{numbers} are not fp32 numbers")
    return numbers


def _no_tensor(value: Any) -> torch.Tensor:
    raise ValueError("a tensor where none can be")


def _plain(record: FileRecord | ParameterRecord | BufferRecord) -> dict[str, Any]:
    return record.to_json()


# Records become plain values one at a time: tens of thousands of them at once set off the garbage collector.
_one_line = json.JSONEncoder(allow_nan=False, default=_plain).encode


def _readable(value: Any, levels: int, indent: str) -> str:
    """JSON with one line an entry down to `levels`, compact below."""
    deeper = indent + "  "
    if levels and isinstance(value, Mapping) and value:
        lines = (f"{deeper}{_one_line(key)}: {_readable(each, levels - 1, deeper)}" for key, each in value.items())
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if levels and isinstance(value, list) and value:
        return "[\n" + ",\n".join(deeper + _readable(each, levels - 1, deeper) for each in value) + f"\n{indent}]"
    return _one_line(value)
