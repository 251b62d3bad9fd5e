"""The manifest: which arrays a checkpoint holds, where, and every value that is not an array."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from outsize.checkpoint.regions import AnyRegion, Region, natural, region_from
from outsize.checkpoint.values import DTYPE_NAMES, decode, encode, inline
from outsize.move.generations import crc32c
from outsize.move.grad_ops import GradOps
from outsize.move.store import MASTER_DTYPE, TRAINED_DTYPES
from outsize.planning.sizes import format_bytes

FORMAT = "outsize checkpoint"
VERSION = 5
READS = (4, VERSION)
"""In version 4 rows lie one behind the other."""
MANIFEST_NAME = "manifest.json"
CHUNK_BYTES = 1 << 20
"""Bytes that share a checksum."""

MAX_MANIFEST_BYTES = 256 << 20
GRADS = ("grad", "held")
"""A gradient that was not used up, and the one that a delayed update holds back until the next step."""

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


GradNote = tuple[GradOps, Mapping[float, float]]
"""What was done to a gradient and not yet applied, and its norms where they are known."""


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter.

    `arrays` has its "weight"; "master", where it is a 16-bit one with an fp32 master; "state.NAME" for each array of
    the optimizer; "grad" and "held" (see `GRADS`), which `grads` has a note for.
    """

    arrays: Mapping[str, AnyRegion]
    scalars: Any = None
    """The optimizer's other values of this parameter, encoded; None where it has no state yet."""
    grads: Mapping[str, GradNote] = field(default_factory=dict)
    rows: Mapping[str, Region] = field(default_factory=dict)
    """Values that belong to `scalars`, one a row: those of one rank, until the parts of all ranks are merged."""

    @property
    def weight(self) -> AnyRegion:
        return self.arrays["weight"]

    @property
    def master(self) -> AnyRegion | None:
        return self.arrays.get("master")

    @property
    def state(self) -> dict[str, AnyRegion]:
        return {key[6:]: region for key, region in self.arrays.items() if key.startswith("state.")}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def leaves(self, weights: bool = True, state: bool = True) -> list[Region]:
        """The arrays as they lie in files: of the values, and those of optimizer and gradients."""
        return [
            leaf
            for key, region in self.arrays.items()
            if (weights if key in ("weight", "master") else state)
            for leaf in region.leaves()
        ]

    def changed(self, change: Callable[[str, AnyRegion], AnyRegion]) -> ParameterRecord:
        """The same with each array changed."""
        return replace(self, arrays={key: change(key, region) for key, region in self.arrays.items()})

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"weight": None, "master": None, "state": {}, "scalars": self.scalars}
        found |= dict.fromkeys(GRADS)
        for key, region in self.arrays.items():
            if key.startswith("state."):
                found["state"][key[6:]] = region.to_json()
            else:
                found[key] = region.to_json()
        for key, (ops, norms) in self.grads.items():
            note = {"ops": asdict(ops), "norms": [list(norm) for norm in norms.items()]}
            found[key] |= encode(note, "grad", inline)
        return found

    @classmethod
    def from_json(cls, value: Any) -> ParameterRecord:
        stored = {key: value[key] for key in ("weight", "master", *GRADS) if value[key] is not None}
        arrays = {key: region_from(each) for key, each in stored.items()}
        if any(leaf.codec for each in arrays.values() for leaf in each.leaves()):
            raise ValueError("8-bit codes are for optimizer state alone, not for weights, masters and gradients")
        arrays |= {f"state.{name}": region_from(each) for name, each in value["state"].items()}
        grads = {key: _grad_note(value[key], arrays[key].dtype) for key in GRADS if key in arrays}
        record = cls(arrays, value["scalars"], grads)
        if any(region.shape != record.shape for region in arrays.values()):
            raise ValueError("the arrays of one parameter have different shapes")
        if record.master is not None and MASTER_DTYPE.get(DTYPE_NAMES[record.dtype]) is not record.master.dtype:
            raise ValueError("a master is int16 beside a bfloat16 weight and float32 beside a float16 one")
        if not all(region.dtype.is_floating_point for region in record.state.values()):
            raise ValueError("optimizer state is floating-point")
        return record


def _grad_note(value: Any, dtype: torch.dtype) -> GradNote:
    if dtype not in TRAINED_DTYPES.values():
        raise ValueError(f"a gradient of {dtype}")
    ops: Any = {key: each if isinstance(each, bool) else float(each) for key, each in _decoded(value["ops"]).items()}
    if any(math.isfinite(each) and abs(each) > torch.finfo(torch.float32).max for each in ops.values()):
        raise ValueError(f"{ops} are not fp32 numbers")
    norms = {float(order): float(norm) for order, norm in _decoded(value["norms"])}
    most = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).max
    if any(math.isfinite(norm) and not 0 <= norm <= most for norm in norms.values()):
        raise ValueError(f"{norms} are not norms of a gradient")
    return GradOps(**ops), norms


def _decoded(value: Any) -> Any:
    def no_tensor(value: Any) -> torch.Tensor:
        raise ValueError("a tensor where none can be")

    return decode(value, no_tensor)


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
        named = {"class": self.kind, "arrays": list(self.arrays), "groups": groups}
        return {**named, "steps": self.steps, "delayed": self.delayed}

    @classmethod
    def from_json(cls, value: Any) -> OptimizerRecord:
        groups = tuple(
            GroupRecord(dict(each["hyper"]), tuple(map(str, each["parameters"]))) for each in value["groups"]
        )
        steps, delayed = natural(value["steps"]), bool(value["delayed"])
        return cls(str(value["class"]), tuple(map(str, value["arrays"])), groups, steps, delayed)


def of_all_stages(records: Sequence[OptimizerRecord | None]) -> OptimizerRecord | None:
    """One record over the optimizers of all stages of a pipeline. Raises `ValueError` where they differ in more than
    their parameters."""
    first = records[0]
    if all(each is None for each in records):
        return None
    if first is None or any(each is None for each in records):
        raise ValueError("the optimizer was given in some stages of the pipeline and not in others; give it in all")
    groups = list(first.groups)
    for other in records[1:]:
        assert other is not None
        bare = [
            replace(each, groups=tuple(replace(group, parameters=()) for group in each.groups))
            for each in (first, other)
        ]
        if bare[0] != bare[1]:
            raise ValueError(
                "the optimizers of the pipeline stages differ: give each stage the same optimizer with the same "
                "parameter groups and options, with an empty group where a stage has no parameter of that group"
            )
        groups = [
            replace(group, parameters=group.parameters + further.parameters)
            for group, further in zip(groups, other.groups, strict=True)
        ]
    return replace(first, groups=tuple(groups))


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the arrays' bytes. `saved_at` is in UTC and orders checkpoints by age."""

    files: Mapping[str, FileRecord]
    parameters: Mapping[str, ParameterRecord]
    buffers: Mapping[str, Region]
    """Of the first rank, those that are not in the model's state_dict included."""
    optimizer: OptimizerRecord | None
    ranks: Sequence[Any]
    """Of each rank of each copy of the model: {"rng", "extra", "extra_states", "buffers"}, the last as far as they
    differ from the first rank's."""
    persistent: Set[str] = frozenset()
    """The buffers that are in the model's state_dict."""
    written_by: Mapping[str, str] = field(default_factory=dict)
    saved_at: str = ""
    world_size: int = 1
    """Ranks of one copy of the model."""
    tensor_ranks: int = 1
    stages: int = 1
    """Of a pipeline."""
    left_out: Set[str] | None = None
    """The parameters of the model that are not in the checkpoint."""

    def extra_states(self, number: int = 0) -> dict[str, Any]:
        """Of the modules that have one, encoded: that of a rank, of the first rank for what it does not have."""
        found = {name: state for rank in reversed(self.ranks) for name, state in rank["extra_states"].items()}
        return {**found, **self.ranks[number]["extra_states"]}

    def to_text(self) -> str:
        """Raises `ValueError` for a text that is larger than any reader takes."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "written_by": dict(self.written_by),
            "saved_at": self.saved_at,
            "world_size": self.world_size,
            "tensor_ranks": self.tensor_ranks,
            "stages": self.stages,
            "chunk_bytes": CHUNK_BYTES,
            "files": self.files,
            "parameters": self.parameters,
            **({} if self.left_out is None else {"left_out": sorted(self.left_out)}),
            "buffers": self.buffers,
            "persistent": sorted(self.persistent),
            "optimizer": self.optimizer and self.optimizer.to_json(),
            "ranks": list(self.ranks),
        }
        lines = ",\n".join(f'  "{key}": {_json(value)}' for key, value in content.items())
        text = sealed(f"{{\n{lines}\n}}")  # it is ASCII
        if len(text) > MAX_MANIFEST_BYTES:
            raise ValueError(
                f"the manifest of this checkpoint would take {format_bytes(len(text))} of text, and has at most "
                f"{format_bytes(MAX_MANIFEST_BYTES)}; put long lists and texts of extra into tensors "
                f"(torch.tensor(values), torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)) or into files"
            )
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
        if value.get("version") not in READS:
            raise ValueError(
                f"has the format version {value.get('version')!r}; this version of outsize reads {READS}: "
                f"load it with the version of outsize that wrote it ({value.get('written_by')})"
            )
        end = text.rfind(',\n  "crc32c": ')
        if end < 0 or text != sealed(text[:end] + "}"):
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
            buffers={str(name): Region.from_json(each) for name, each in value["buffers"].items()},
            optimizer=None if optimizer is None else OptimizerRecord.from_json(optimizer),
            ranks=[dict(each) for each in value["ranks"]],
            persistent=frozenset(map(str, value["persistent"])),
            written_by=dict(value["written_by"]),
            saved_at=str(value["saved_at"]),
            world_size=natural(value["world_size"]),
            tensor_ranks=natural(value["tensor_ranks"]),
            stages=natural(value.get("stages", 1)),
            left_out=frozenset(map(str, value["left_out"])) if "left_out" in value else None,
        )
        size, ranks, whole = manifest.world_size, len(manifest.ranks), manifest.tensor_ranks * manifest.stages
        if not 1 <= whole <= size or size % whole:
            raise ValueError(f"{manifest.stages} stages of {manifest.tensor_ranks} tensor-parallel ranks, of {size}")
        if not ranks or ranks % size:
            raise ValueError(f"what {ranks} ranks have of their own, in copies of {size} ranks")
        if value["chunk_bytes"] != CHUNK_BYTES:
            raise ValueError(f"checksums of {value['chunk_bytes']!r} bytes; they are of {CHUNK_BYTES}")
        for name in manifest.files:
            if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
                raise ValueError(f"{name!r} is not a file name that a checkpoint may use")
        for record in manifest.parameters.values():
            for region in record.leaves():
                manifest.check(region)
        for region in manifest.buffers.values():
            manifest.check(region)
        if not manifest.persistent <= manifest.buffers.keys():
            raise ValueError("there are buffers in the state_dict that are not stored")
        return manifest

    def check(self, region: Region) -> None:
        """Raise `ValueError` unless the region lies in one of the files."""
        for piece in region.pieces:
            if not piece.numel:
                continue  # of an array without elements, for which nobody has written a file
            nbytes = region.extent(piece.numel)
            if piece.file not in self.files or piece.offset + nbytes > self.files[piece.file].nbytes:
                raise ValueError(f"an array of {nbytes} bytes at {piece.offset} lies outside of {piece.file!r}")


def sealed(text: str) -> str:
    """A JSON object with the checksum of its text as the last entry."""
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body},\n  "crc32c": "{crc32c(body.encode()):08x}"\n}}\n'


# Records become plain values one at a time: tens of thousands of them at once set off the garbage collector.
_json = json.JSONEncoder(allow_nan=False, default=lambda record: record.to_json()).encode
