"""Where the elements of an array lie in the files of a checkpoint, whoever wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from outsize.checkpoint.values import DTYPE_NAMES, DTYPES
from outsize.move.codes import CODE_DTYPES, blocks_of

MAX_DIMS = 64
"""As in torch's own kernels."""

# Note [Arrays in parts]
# Slices of data-parallel ranks lie one behind the other in the flattened array, so a region simply has several pieces.
# Tensor-parallel ranks have parts along a dimension, whose elements alternate in the flattened array: such an array is
# `Joined`, from arrays of its own. A rank that loads a part of an array takes the part in the file where that is the
# same, else the elements of each row that it has.


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of an array, little-endian, from a byte of one file on."""

    file: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Region:
    """One array: row-major, in one piece or, where several ranks wrote it, in several, one behind the other.

    fp32 values may lie as 8-bit codes of the kind `codec`, with one fp32 scale for each `BLOCK` elements. With a
    `stride` there is something else between rows (entries of the first dimension), which begin so many bytes apart.
    """

    stored: torch.dtype
    """Of what lies in the files."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    codec: str = ""
    scales: Region | None = None
    stride: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.codec else self.stored

    @classmethod
    def at(cls, file: str, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Region:
        """The whole array in one piece."""
        return cls(dtype, shape, (Piece(file, offset, prod(shape)),))

    @property
    def row(self) -> int:
        """Elements that lie together."""
        return max(prod(self.shape[1:]), 1) if self.stride else 1

    def extent(self, numel: int) -> int:
        """Bytes from the first to the last of so many elements from the beginning of a row on."""
        size = self.row * self.stored.itemsize
        return (-(-numel // self.row) - 1) * (self.stride or size) + size

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.stored.itemsize

    def within(self, start: int, end: int) -> Iterator[tuple[Piece, int, int]]:
        """The pieces that have the elements [start, end), in order, each from the beginning of a row on: with how many
        of its elements come before them, and its first wanted one counted from `start`."""
        first = 0
        for piece in self.pieces:
            low, high = max(start - first, 0), min(end - first, piece.numel)
            if low < high:
                row = low // self.row
                offset = piece.offset + row * (self.stride or self.stored.itemsize)
                yield Piece(piece.file, offset, high - row * self.row), low - row * self.row, first + low - start
            first += piece.numel

    def leaves(self) -> Iterator[Region]:
        yield self
        if self.scales is not None:
            yield self.scales

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"dtype": DTYPE_NAMES[self.stored], "shape": list(self.shape)}
        if len(self.pieces) == 1:
            found = {"file": self.pieces[0].file, "offset": self.pieces[0].offset, **found}
        else:
            found = {"pieces": [[piece.file, piece.offset, piece.numel] for piece in self.pieces], **found}
        found |= {"stride": self.stride} if self.stride else {}
        return found if self.scales is None else {"codec": self.codec, "codes": found, "scales": self.scales.to_json()}

    @classmethod
    def from_json(cls, value: Any) -> Region:
        dtype, shape = DTYPES[value["dtype"]], shape_from(value["shape"])
        one = "pieces" not in value
        each = [(value["file"], value["offset"], prod(shape))] if one else value["pieces"]
        pieces = tuple(Piece(str(file), natural(at), natural(numel)) for file, at, numel in each)
        if sum(piece.numel for piece in pieces) != prod(shape):
            raise ValueError("the pieces of an array are not as many elements as its shape")
        found = cls(dtype, shape, pieces, stride=natural(value.get("stride", 0)))
        if found.stride and (found.stride < found.row * dtype.itemsize or any(p.numel % found.row for p in pieces)):
            raise ValueError("the rows of an array overlap, or its pieces are no whole rows")
        return found


@dataclass(frozen=True)
class Joined:
    """Arrays joined along a dimension, or `count` entries of it from `first` on. See Note [Arrays in parts]."""

    dim: int
    parts: tuple[AnyRegion, ...]
    first: int = 0
    count: int | None = None
    """None: all of them. Only such an array is stored."""

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        count = sum(part.shape[self.dim] for part in self.parts) if self.count is None else self.count
        return _with(self.parts[0].shape, self.dim, count)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def leaves(self) -> Iterator[Region]:
        for part in self.parts:
            yield from part.leaves()

    def to_json(self) -> dict[str, Any]:
        assert self.count is None
        what = {"dtype": DTYPE_NAMES[self.dtype], "shape": list(self.shape)}
        return {"dim": self.dim, "parts": [part.to_json() for part in self.parts], **what}

    @classmethod
    def from_json(cls, value: Any) -> Joined:
        found = cls(natural(value["dim"]), tuple(_part(each) for each in value["parts"]))
        if not found.parts or found.dim >= len(found.parts[0].shape):
            raise ValueError("an array is joined along a dimension that it has not got")
        if len({(part.dtype, _with(part.shape, found.dim, 0)) for part in found.parts}) > 1:
            raise ValueError("the parts of an array do not fit together")
        if (DTYPE_NAMES[found.dtype], list(found.shape)) != (value["dtype"], value["shape"]):
            raise ValueError("the parts of an array do not make up its shape")
        return found

    def runs(self, start: int, end: int) -> Iterator[tuple[AnyRegion, int, int]]:
        """What makes up the elements [start, end) of the flattened array, in order: (part, first element, end)."""
        inner = prod(self.shape[self.dim + 1 :])
        width = self.shape[self.dim] * inner  # elements of a row: of what comes before the next entry of earlier dims
        while start < end:
            row, done = divmod(start, width)
            into = self.first * inner + done  # the row of all parts
            for part in self.parts:
                run = part.shape[self.dim] * inner
                if into < run:
                    break
                into -= run
            count = min(run - into, width - done, end - start)
            yield part, row * run + into, row * run + into + count
            start += count


AnyRegion = Region | Joined


def narrow(region: AnyRegion, dim: int, first: int, count: int) -> AnyRegion:
    """`count` entries from `first` on of the dimension: the very part where the array has it."""
    assert isinstance(region, Region) or region.count is None
    parts = region.parts if isinstance(region, Joined) and region.dim == dim else (region,)
    at = 0
    for part in parts:
        if (at, part.shape[dim]) == (first, count):
            return part
        at += part.shape[dim]
    return Joined(dim, parts, first, count)


def region_from(value: Any) -> AnyRegion:
    return Joined.from_json(value) if "parts" in value else _part(value)


def _part(value: Any) -> Region:
    if "codec" not in value:
        return Region.from_json(value)
    codes, scales = Region.from_json(value["codes"]), Region.from_json(value["scales"])
    if value["codec"] not in CODE_DTYPES or codes.stored is not CODE_DTYPES[value["codec"]]:
        raise ValueError(f"unknown code {value['codec']!r} in {codes.stored}")
    if scales.stored is not torch.float32 or scales.shape != (blocks_of(codes.numel),):
        raise ValueError("the scales do not fit the codes")
    return replace(codes, codec=value["codec"], scales=scales)


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def shape_from(value: Any) -> tuple[int, ...]:
    """Raises `ValueError` for what no tensor has: of a million dimensions the product alone takes hours."""
    if len(value) > MAX_DIMS:
        raise ValueError(f"{len(value)} dimensions are more than the {MAX_DIMS} that a tensor may have")
    return tuple(natural(each) for each in value)


def natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a size")
    return value
