"""A checkpoint that several ranks write together: each its part, one manifest over all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from outsize.checkpoint.manifest import FileRecord, GradRecord, ParameterRecord
from outsize.checkpoint.regions import AnyRegion, CodedRegion, Joined, Region
from outsize.move.shard import BLOCK

# Note [One checkpoint of several ranks]
# Rank 0 makes the hidden folder; every rank links, copies and writes the files of its slices into it, under names of
# its own. When all have said that their part is on the drive, rank 0 writes the manifest over all parts and publishes.
# A rank that fails says so in the same place, and then the checkpoint has not been. The arrays of a parameter are the
# pieces of the ranks, one behind the other: who loads asks for elements, and does not see how many ranks there were.


class Peers(Protocol):
    """The ranks that save together, those of one tensor-parallel place after those of the other."""

    rank: int
    size: int
    tensor: int
    """Tensor-parallel places."""
    name: int
    """This rank's number in the job."""

    def exchange(self, value: object) -> list[Any]:
        """`value` of every rank, in the order of ranks. Raises where a rank is gone."""
        ...


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that a tensor-parallel rank has: `count` entries from `first` on of dimension `dim`."""

    dim: int
    first: int
    count: int

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.dim < len(shape) and self.first + self.count <= shape[self.dim]


@dataclass(frozen=True)
class Part:
    """What one rank has written: its files, and its slices of the parameters' arrays."""

    files: Mapping[str, FileRecord]
    parameters: Mapping[str, ParameterRecord]
    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole parameters, as far as they are this tensor-parallel place's."""
    asides: Sequence[Any] = ()
    """What the rank, and those at its place in the further copies of the model, have of their own, encoded."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)


class PeerFailedError(OSError):
    """Another rank could not write its part."""


def own_name(name: str, rank: int) -> str:
    """A file's name, told apart from those of the other ranks."""
    return name if not rank else f"rank-{rank:04d}-{name}"


def together(peers: Peers, own: Callable[[], Any], what: str) -> list[Any]:
    """`own()` of every rank. Where it fails on one, every rank raises: that one its error, the others who it was."""
    value: Any = None
    error: Exception | None = None
    try:
        value = own()
    except Exception as raised:
        error = raised
    said = None if error is None else f"{type(error).__name__}: {error}"
    try:
        every = peers.exchange((peers.name, said, value))
    except Exception as ended:  # the others cannot go on without this one
        raise ended if error is None else error from ended
    gone = isinstance(error, FileNotFoundError)  # the folder goes with the rank that fails first, unless all miss it
    all_gone = all((other or "").startswith(FileNotFoundError.__name__) for _, other, _ in every)
    if error is not None and (not gone or all_gone):
        raise error
    for name, other, _ in every:
        if other is not None and name != peers.name:
            raise PeerFailedError(f"{what}: rank {name} failed ({other})") from error
    if error is not None:
        raise error
    return [each for _, _, each in every]


def merged_parts(parts: Sequence[Part], tensor: int) -> tuple[dict[str, FileRecord], dict[str, ParameterRecord]]:
    """The files of all ranks, and each parameter with the pieces of all ranks."""
    files = {name: record for part in parts for name, record in part.files.items()}
    size = len(parts) // tensor
    places = [_of_one_place(parts[first : first + size]) for first in range(0, len(parts), size)]
    cuts = parts[0].cuts
    return files, {
        name: _side_by_side([place[name] for place in places], cuts[name].dim) if name in cuts else record
        for name, record in places[0].items()
    }


def _of_one_place(parts: Sequence[Part]) -> dict[str, ParameterRecord]:
    """What the data-parallel ranks of one tensor-parallel place have."""
    parameters = {}
    for name, first in parts[0].parameters.items():
        records = [part.parameters[name] for part in parts if name in part.parameters]
        parameters[name] = _merged(first, records, parts[0].shapes[name])
    return parameters


def _side_by_side(records: Sequence[ParameterRecord], dim: int) -> ParameterRecord:
    """One parameter, of which each tensor-parallel place has a part."""
    arrays = [iter(record.arrays()) for record in records]

    def join(_: AnyRegion) -> AnyRegion:
        parts = [next(each) for each in arrays]
        return Joined(dim, tuple(part for part in parts if isinstance(part, (Region, CodedRegion))))

    return records[0].changed(join)


def _merged(first: ParameterRecord, records: Sequence[ParameterRecord], shape: tuple[int, ...]) -> ParameterRecord:
    def joined(regions: Sequence[AnyRegion | None]) -> Any:
        return None if regions[0] is None else _joined([each for each in regions if each is not None], shape)

    def grads(found: Sequence[GradRecord | None]) -> GradRecord | None:
        known = [each for each in found if each is not None]
        return replace(known[0], region=_joined([each.region for each in known], shape)) if known else None

    return ParameterRecord(
        weight=joined([record.weight for record in records]),
        master=joined([record.master for record in records]),
        state={key: joined([record.state[key] for record in records]) for key in first.state},
        scalars=first.scalars,
        grad=grads([record.grad for record in records]),
        held=grads([record.held for record in records]),
    )


def _joined(regions: Sequence[AnyRegion], shape: tuple[int, ...]) -> AnyRegion:
    if isinstance(regions[0], CodedRegion):
        coded = [each for each in regions if isinstance(each, CodedRegion)]
        codes = _pieces([each.codes for each in coded], shape)
        scales = _pieces([each.scales for each in coded], (-(-codes.numel // BLOCK),))
        return CodedRegion(codes, scales, regions[0].codec)
    return _pieces([each for each in regions if isinstance(each, Region)], shape)


def _pieces(regions: Sequence[Region], shape: tuple[int, ...]) -> Region:
    pieces = [piece for region in regions for piece in region.pieces if piece.numel]
    return Region(regions[0].dtype, shape, tuple(pieces or regions[0].pieces))


def folder_of(peers: Peers, make: Callable[[], Path]) -> Path:
    """The hidden folder, which rank 0 makes."""
    found = together(peers, lambda: str(make()) if peers.rank == 0 else "", "making the checkpoint's folder")
    return Path(found[0])
