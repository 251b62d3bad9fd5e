"""A checkpoint that several ranks write together: each its part, one manifest over all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar, final

from outsize.checkpoint.manifest import FileRecord, ParameterRecord
from outsize.checkpoint.regions import AnyRegion, Joined, Region
from outsize.move.codes import blocks_of
from outsize.move.comm import Ranks, exchange
from outsize.move.lanes import CONTROL, SAVE

T = TypeVar("T")

# Note [One checkpoint of several ranks]
# Rank 0 makes the hidden folder; every rank links, copies and writes the files of its slices into it, under names of
# its own. When all have said that their part is on the drive, rank 0 writes the manifest over all parts and publishes.
# If one rank fails, it says so in the same place, and nothing is published. The arrays of a parameter are the pieces of
# the ranks, one behind the other: a reader asks for elements, and does not see how many ranks there were.


@final
class Peers:
    """The ranks that save together: those of one tensor-parallel place of a stage, then those of the next place, then
    those of the next stage. A process that is alone is the only one."""

    def __init__(self, ranks: Ranks | None) -> None:
        groups = (None,) * 4 if ranks is None else (ranks, ranks.tensor, ranks.stages, ranks.copies)
        self.groups = [group for group in groups[:3] if group is not None]
        at = [(0, 1) if group is None else (group.rank, group.size) for group in groups]
        (rank, size), (place, self.tensor), (stage, self.stages), (copy, self.copies) = at
        self.rank = (stage * self.tensor + place) * size + rank
        self.size = self.stages * self.tensor * size
        self.number = copy * self.size + self.rank
        """This rank among those of all copies of the model."""
        self.leads = rank == 0
        """Whether this rank is the first of those that have the same parts of the parameters."""


class PeerFailedError(OSError):
    """Another rank could not write its part."""


def together(
    groups: Sequence[Ranks], action: Callable[[], T], verb: str, what: str = "", behind: bool = False
) -> list[T]:
    """What `action` gives on every rank that the groups reach. Where it fails on one, every rank raises: that one its
    error, the others which rank it was.

    `verb`: the function of the API. `what` they do, in words, if it is not that. `behind`: on a thread of its own,
    behind the training."""
    if all(group.size == 1 for group in groups):
        return [action()]
    own = groups[0].members[groups[0].rank]  # in the job
    value: Any = None
    error: Exception | None = None
    try:
        value = action()
    except Exception as raised:
        error = raised
    said = None if error is None else f"{type(error).__name__}: {error}"
    try:
        every = exchange(groups, (own, said, value), verb, SAVE if behind else CONTROL)
    except Exception as ended:  # the others cannot go on without this one
        if error is None:
            raise
        raise error from ended
    gone = isinstance(error, FileNotFoundError)  # the folder goes with the rank that fails first, unless all miss it
    all_gone = all((other or "").startswith(FileNotFoundError.__name__) for _, other, _ in every)
    if error is not None and (not gone or all_gone):
        raise error
    for name, other, _ in every:
        if other is not None and name != own:
            raise PeerFailedError(f"{what or f'outsize.{verb}'}: rank {name} failed ({other})") from error
    if error is not None:
        raise error
    return [each for _, _, each in every]


def name_of_rank(name: str, rank: int) -> str:
    """A file's name, told apart from those of the other ranks."""
    return name if not rank else f"rank-{rank:04d}-{name}"


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that a tensor-parallel rank has: `count` entries from `first` on of dimension `dim`."""

    dim: int
    first: int
    count: int

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.dim < len(shape) and self.first + self.count <= shape[self.dim]


@dataclass(frozen=True)
class RankPart:
    """What one rank has written: its files, and its slices of the parameters' arrays."""

    files: Mapping[str, FileRecord]
    parameters: Mapping[str, ParameterRecord]
    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole parameters, as far as they are this tensor-parallel place's."""
    buffers: Mapping[str, Region]
    """Those that no rank before it has."""
    persistent: Sequence[str]
    """Those of them that are in the model's state_dict."""
    states: Sequence[Any]
    """What the rank, and those at its place in the further copies of the model, have of their own, encoded."""
    cuts: Mapping[str, Cut]


def merged_parts(parts: Sequence[RankPart], tensor: int, stages: int) -> dict[str, ParameterRecord]:
    """Each parameter with the pieces of all ranks."""
    size = len(parts) // stages
    found: dict[str, ParameterRecord] = {}
    for first in range(0, len(parts), size):
        found |= _of_one_stage(parts[first : first + size], tensor)
    return found


def _of_one_stage(parts: Sequence[RankPart], tensor: int) -> dict[str, ParameterRecord]:
    size = len(parts) // tensor
    places = [_of_one_place(parts[first : first + size]) for first in range(0, len(parts), size)]
    cuts = parts[0].cuts

    def whole(name: str, record: ParameterRecord) -> ParameterRecord:
        if name not in cuts:
            return record
        return record.changed(lambda key, _: Joined(cuts[name].dim, tuple(place[name].arrays[key] for place in places)))

    return {name: whole(name, record) for name, record in places[0].items()}


def _of_one_place(parts: Sequence[RankPart]) -> dict[str, ParameterRecord]:
    """What the data-parallel ranks of one tensor-parallel place have."""
    found = {}
    for name, first in parts[0].parameters.items():
        records = [part.parameters[name] for part in parts if name in part.parameters]
        shape = parts[0].shapes[name]
        keys = dict.fromkeys(key for record in records for key in record.arrays)
        values = {
            key: {"$tensor": _joined([each.rows[key] for each in records], shape[:1]).to_json()} for key in first.rows
        }
        found[name] = ParameterRecord(
            {key: _joined([each.arrays[key] for each in records if key in each.arrays], shape) for key in keys},
            {**first.scalars, **values} if values else first.scalars,
            {key: note for record in reversed(records) for key, note in record.grads.items()},
        )
    return found


def _joined(regions: Sequence[AnyRegion | None], shape: tuple[int, ...]) -> Region:
    """One array of the slices of all ranks."""
    found = [each for each in regions if isinstance(each, Region)]
    pieces = tuple(piece for region in found for piece in region.pieces if piece.numel) or found[0].pieces
    scales = None
    if found[0].scales is not None:
        scales = _joined([each.scales for each in found], (blocks_of(prod(shape)),))
    return replace(found[0], shape=shape, pieces=pieces, scales=scales)
