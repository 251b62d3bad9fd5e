"""Weights in the Hugging Face layout: safetensors files and their index, streamed through a fixed arena of slabs."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Final, final

import torch

from outsize.checkpoint.files import naming
from outsize.checkpoint.folder import sync, write_text
from outsize.checkpoint.joint import Cut
from outsize.checkpoint.reader import Masters
from outsize.move.disk import Engine, StripedFile, open_engine
from outsize.move.memory import COPIED_NUMEL, PAGE_BYTES, HostBuffer, copy
from outsize.move.shard import DTYPES, MASTER, MASTER_BYTES, OWN_BYTES, StateArray, UnitShard
from outsize.move.transfer import Transfer
from outsize.plan.layout import PAGE_ELEMENTS, Slot, round_up

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

SLAB_BYTES = 4 << 20
READ_SLABS = 4
WRITE_SLABS = 4
ARENA_BYTES = (READ_SLABS + WRITE_SLABS) * SLAB_BYTES
"""All the memory of an export, whatever the size of its files and tensors."""

JOINED_NUMEL = 1 << 19
"""Elements of a piece that ranks put together: with its master and page ends it fits a slab."""

LENGTH_BYTES = 8
"""Of the header's length, which begins the file (little-endian)."""

DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""What safetensors calls the dtypes that it stores."""

# Note [One stream]
# A file is its header, padded with spaces to a whole page, and then the tensors' bytes without gaps. The bytes are read
# from the stores piece by piece, several reads at a time, and packed into slabs, each of which is written while the
# next ones are filled. So every write is whole pages from page-aligned memory, as direct I/O needs; the last one is
# padded and the file is cut to its length afterwards. Tensors of wider elements come first: then each begins at a
# multiple of its element size without gaps, whatever the lengths are.


class Piece(ABC):
    """Consecutive elements of one tensor on their way to a file."""

    @abstractmethod
    def begin(self, slab: torch.Tensor) -> None:
        """Start to read into `slab` (uint8 [SLAB_BYTES]), which is the piece's until its values have been used."""

    @abstractmethod
    def values(self) -> Iterator[torch.Tensor]:
        """The elements, 1-D, once they have arrived, in runs that are valid until the next one is asked for."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until nothing touches the slab any more; raises nothing."""


TypedPiece = tuple[Piece, torch.dtype]
"""A piece and the dtype to store it as."""


@dataclass(frozen=True)
class NamedWeight:
    """One tensor of the export; `pieces` gives its elements in order, to be stored as `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterator[Piece]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def parameter_pieces(shard: UnitShard, slot: Slot, dtype: torch.dtype, masters: Masters) -> Iterator[Piece]:
    """A parameter at rest; for another dtype than its own the values are those of its fp32 master, where it has one."""
    if not slot.numel:  # it may lie behind the last segment
        return
    master = shard.arrays.get(MASTER) if slot.dtype in MASTER_BYTES and dtype is not DTYPES[slot.dtype] else None
    element_bytes = OWN_BYTES[slot.dtype] + (MASTER_BYTES[slot.dtype] if master is not None else 0)
    numel = SLAB_BYTES // element_bytes // PAGE_ELEMENTS * PAGE_ELEMENTS
    for start in range(slot.offset // numel * numel, slot.end, numel):
        low, high = max(start, slot.offset), min(start + numel, slot.end)
        yield _ParameterPiece(shard, slot, low, high, master, masters)


@final
class _ParameterPiece(Piece):
    """The elements [low, high) of a unit's element space, which belong to `slot`."""

    def __init__(
        self, shard: UnitShard, slot: Slot, low: int, high: int, master: StateArray | None, masters: Masters
    ) -> None:
        self._shard, self._slot, self._low, self._high = shard, slot, low, high
        self._master, self._masters = master, masters
        self._transfers: list[Transfer] = []
        self._parts: list[torch.Tensor] = []  # the weight and, where there is one, what completes its master

    def begin(self, slab: torch.Tensor) -> None:
        shard = self._shard
        first_page, end_page = shard.pages(self._low, self._high)
        first, nbytes = shard.param_layout.span(first_page, end_page)
        read = shard.buffer.fetch if shard.params is None else shard.params.read
        at = shard.buffer_span(first_page, end_page)[0] if shard.params is None else first
        self._start(read, at, slab[:nbytes], DTYPES[self._slot.dtype], first_page)
        if self._master is not None:
            first, more = self._master.layout.span(first_page, end_page)
            rest = slab[nbytes : nbytes + more]
            self._start(self._master.store.read, first, rest, self._master.dtype(self._slot.dtype), first_page)

    def _start(
        self,
        read: Callable[[int, torch.Tensor], Transfer],
        first: int,
        out: torch.Tensor,
        dtype: torch.dtype,
        first_page: int,
    ) -> None:
        self._transfers.append(read(first, out))
        self._parts.append(out.view(dtype)[self._low - first_page : self._high - first_page])

    def values(self) -> Iterator[torch.Tensor]:
        for transfer in self._transfers:
            transfer.wait()
        if self._master is None:
            yield self._parts[0]
            return
        weight, rest = self._parts
        for own, more in zip(weight.split(COPIED_NUMEL), rest.split(COPIED_NUMEL), strict=True):
            yield self._masters.join(own, more)  # small enough for memory that is at hand

    def drain(self) -> None:
        _drain(self._transfers)


Join = Callable[[torch.Tensor], torch.Tensor]
"""Adds up bytes (uint8) over ranks, in place; every rank calls it for the same piece."""


def joined_pieces(shard: UnitShard, name: str, dtype: torch.dtype, masters: Masters, join: Join) -> Iterator[Piece]:
    """As `parameter_pieces`, of a parameter that is split over ranks: every rank gets all elements."""
    slot, whole = shard.slots[name], shard.whole_slots[name]
    master = shard.arrays.get(MASTER) if slot.dtype in MASTER_BYTES and dtype is not DTYPES[slot.dtype] else None
    for start in range(0, whole.numel, JOINED_NUMEL):
        yield _JoinedPiece(shard, slot, start, min(start + JOINED_NUMEL, whole.numel), master, masters, join)


@final
class _JoinedPiece(Piece):
    """The elements [start, end) of a parameter, of which each rank has some or none."""

    def __init__(
        self,
        shard: UnitShard,
        slot: Slot,
        start: int,
        end: int,
        master: StateArray | None,
        masters: Masters,
        join: Join,
    ) -> None:
        self._start, self._numel, self._join = start, end - start, join
        self._dtype = DTYPES[slot.dtype] if master is None else torch.float32
        low, high = max(start, slot.first), min(end, slot.first + slot.numel)
        self._low = low
        shift = slot.offset - slot.first
        self._own = _ParameterPiece(shard, slot, shift + low, shift + high, master, masters) if low < high else None

    def begin(self, slab: torch.Tensor) -> None:
        if self._own is not None:
            self._own.begin(slab)

    def values(self) -> Iterator[torch.Tensor]:
        values = torch.zeros(self._numel, dtype=self._dtype)
        if self._own is not None:
            _fill(values, self._low - self._start, self._own.values())
        yield self._join(values.view(torch.uint8)).view(self._dtype)

    def drain(self) -> None:
        if self._own is not None:
            self._own.drain()


def _fill(out: torch.Tensor, at: int, runs: Iterator[torch.Tensor]) -> int:
    """Copy the runs behind each other into `out` (1-D) from element `at` on; returns where they end."""
    for run in runs:
        out[at : at + run.numel()] = run
        at += run.numel()
    return at


def tensor_pieces(
    pieces: Callable[[], Iterator[Piece]],
    local: tuple[int, ...],
    whole: tuple[int, ...],
    cut: Cut,
    dtype: torch.dtype,
    join: Join,
) -> Iterator[Piece]:
    """A parameter that tensor parallelism has split, in one piece. `pieces` are those of this rank's part, [local]."""
    yield _TensorPiece(pieces, local, whole, cut, dtype, join)


@final
class _TensorPiece(Piece):
    """Memory: the whole parameter, and this rank's part of it."""

    def __init__(
        self,
        pieces: Callable[[], Iterator[Piece]],
        local: tuple[int, ...],
        whole: tuple[int, ...],
        cut: Cut,
        dtype: torch.dtype,
        join: Join,
    ) -> None:
        self._pieces, self._local, self._whole, self._cut = pieces, local, whole, cut
        self._dtype, self._join = dtype, join

    def begin(self, slab: torch.Tensor) -> None:
        self._slab = slab

    def values(self) -> Iterator[torch.Tensor]:
        own, at = torch.empty(prod(self._local), dtype=self._dtype), 0
        for piece in self._pieces():
            piece.begin(self._slab)
            try:
                at = _fill(own, at, piece.values())
            finally:
                piece.drain()
        whole = torch.zeros(self._whole, dtype=self._dtype)
        whole.narrow(self._cut.dim, self._cut.first, self._cut.count).copy_(own.view(self._local))
        yield self._join(whole.view(-1).view(torch.uint8)).view(self._dtype)

    def drain(self) -> None:
        return


def buffer_pieces(value: torch.Tensor) -> Iterator[Piece]:
    """A tensor in memory. One that is not contiguous is copied once."""
    flat = value.detach().contiguous().view(-1)
    numel = SLAB_BYTES // flat.itemsize
    for start in range(0, flat.numel(), numel):
        yield _BufferPiece(flat[start : start + numel])


@final
class _BufferPiece(Piece):
    def __init__(self, content: torch.Tensor) -> None:
        self._content = content

    def begin(self, slab: torch.Tensor) -> None:
        return

    def values(self) -> Iterator[torch.Tensor]:
        yield self._content.cpu()

    def drain(self) -> None:
        return


def _drain(transfers: Iterable[Transfer]) -> None:
    for transfer in transfers:
        with suppress(OSError):
            transfer.wait()


def write_shards(folder: Path, weights: Sequence[NamedWeight], max_shard_bytes: int) -> None:
    """Write the files and the index. Memory: `ARENA_BYTES`. Raises `OSError` with path and errno."""
    shards = _cut(weights, max_shard_bytes)
    names = [f"model-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE_NAME]
    arena = HostBuffer(ARENA_BYTES)
    slabs = arena.bytes.split(SLAB_BYTES)
    with closing(open_engine()) as engine:
        for name, shard in zip(names, shards, strict=True):
            _write_file(folder / name, shard, engine, slabs)
    if len(shards) > 1:
        home = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        total = sum(weight.nbytes for weight in weights)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(home.items()))}
        write_text(folder / INDEX_NAME, json.dumps(index, indent=2) + "\n")


@final
class Asked:
    """The weights as the writing rank asks the others for them. When the writing fails it takes the rest all the same,
    so that all ranks are at one again."""

    def __init__(self, weights: Sequence[NamedWeight], max_shard_bytes: int) -> None:
        self._inner = weights
        self._max_shard_bytes = max_shard_bytes
        self._taken = 0
        self._going: Iterator[torch.Tensor] = iter(())
        self.weights = [replace(weight, pieces=partial(self._follow, weight)) for weight in weights]

    def take_rest(self) -> None:
        for _ in self._going:
            continue
        pass_on_shards(self._inner, self._max_shard_bytes, self._taken)

    def _follow(self, weight: NamedWeight) -> Iterator[Piece]:
        for piece in weight.pieces():
            yield _AskedPiece(piece, self)

    def values_of(self, piece: Piece) -> Iterator[torch.Tensor]:
        self._taken += 1
        self._going = piece.values()
        return self._going


@final
class _AskedPiece(Piece):
    def __init__(self, piece: Piece, asked: Asked) -> None:
        self._piece, self._asked = piece, asked

    def begin(self, slab: torch.Tensor) -> None:
        self._piece.begin(slab)

    def values(self) -> Iterator[torch.Tensor]:
        return self._asked.values_of(self._piece)

    def drain(self) -> None:
        self._piece.drain()


def pass_on_shards(weights: Sequence[NamedWeight], max_shard_bytes: int, taken: int = 0) -> None:
    """Give what this rank has of the weights to the rank that calls `write_shards`, in the order in which it asks; all
    but the first `taken` pieces."""
    arena = HostBuffer(READ_SLABS * SLAB_BYTES)
    for shard in _cut(weights, max_shard_bytes):
        ordered = sorted(shard, key=lambda weight: -weight.dtype.itemsize)
        pieces = _pieces_of(ordered)
        while taken and next(pieces, None) is not None:
            taken -= 1
        with closing(_read_ahead(pieces, arena.bytes.split(SLAB_BYTES))) as arriving:
            for piece, _ in arriving:
                for _ in piece.values():
                    continue


def _cut(weights: Iterable[NamedWeight], max_shard_bytes: int) -> list[list[NamedWeight]]:
    """The files, as transformers cuts them: a larger tensor is a file of its own, others go on filling the last one."""
    shards: list[list[NamedWeight]] = []
    shard: list[NamedWeight] = []
    nbytes = 0
    for weight in weights:
        if weight.nbytes > max_shard_bytes:
            shards.append([weight])
            continue
        if shard and nbytes + weight.nbytes > max_shard_bytes:
            shards.append(shard)
            shard, nbytes = [], 0
        shard.append(weight)
        nbytes += weight.nbytes
    return [*shards, shard] if shard or not shards else shards


def _write_file(path: Path, weights: Iterable[NamedWeight], engine: Engine, slabs: Sequence[torch.Tensor]) -> None:
    """See Note [One stream]."""
    weights = sorted(weights, key=lambda weight: -weight.dtype.itemsize)
    header = _header(weights)
    nbytes = len(header) + sum(weight.nbytes for weight in weights)
    with naming(path, "writing weights"), closing(StripedFile(engine, [path.parent], path.name, nbytes)) as file:
        file.preallocate(0, file.nbytes)
        out = _Packer(file, slabs[READ_SLABS:])
        try:
            out.put(torch.frombuffer(header, dtype=torch.uint8), torch.uint8)
            with closing(_read_ahead(_pieces_of(weights), slabs[:READ_SLABS])) as arriving:
                for piece, dtype in arriving:
                    for values in piece.values():
                        out.put(values, dtype)
            out.finish()
        finally:
            out.drain()
        os.truncate(path, nbytes)
    sync(path)


def _header(weights: Iterable[NamedWeight]) -> bytearray:
    """The length and the JSON of a file, padded so that the data begins on a page."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for weight in weights:
        end = position + weight.nbytes
        dtype = DTYPE_NAMES[weight.dtype]
        entries[weight.name] = {"dtype": dtype, "shape": list(weight.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = round_up(LENGTH_BYTES + len(text), PAGE_BYTES) - LENGTH_BYTES
    return bytearray(length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length))


def _pieces_of(weights: Iterable[NamedWeight]) -> Iterator[TypedPiece]:
    for weight in weights:
        for piece in weight.pieces():
            yield piece, weight.dtype


def _read_ahead(pieces: Iterable[TypedPiece], slabs: Sequence[torch.Tensor]) -> Generator[TypedPiece]:
    """The pieces in order; a piece's slab is used again when the one after is asked for."""
    going: deque[TypedPiece] = deque()
    free = cycle(slabs)
    try:
        for piece, dtype in pieces:
            if len(going) == len(slabs):
                yield going[0]
                going.popleft()
            going.append((piece, dtype))
            piece.begin(next(free))
        while going:
            yield going[0]
            going.popleft()
    finally:
        for piece, _ in going:
            piece.drain()


@final
class _Packer:
    """Appends to a file through slabs; one is filled while the others are written."""

    def __init__(self, file: StripedFile, slabs: Sequence[torch.Tensor]) -> None:
        self._file = file
        self._count = len(slabs)
        self._slabs = cycle(slabs)
        self._slab, self._used = next(self._slabs), 0
        self._position = 0  # of the slab in the file
        self._going: deque[Transfer] = deque()

    def put(self, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Append 1-D values, cast to `dtype`."""
        while values.numel():
            numel = min(values.numel(), (SLAB_BYTES - self._used) // dtype.itemsize)
            end = self._used + numel * dtype.itemsize
            copy(self._slab[self._used : end].view(dtype), values[:numel])
            values, self._used = values[numel:], end
            if end == SLAB_BYTES:
                self._send()

    def finish(self) -> None:
        """Write what is left, padded to a whole page, and wait for all."""
        end = round_up(self._used, PAGE_BYTES)
        self._slab[self._used : end].zero_()
        self._used = end
        self._send()
        while self._going:
            self._await_oldest()

    def drain(self) -> None:
        """Wait until nothing touches the slabs any more; raises nothing."""
        _drain(self._going)

    def _send(self) -> None:
        self._going.append(self._file.write(self._position, self._slab[: self._used]))
        self._position += self._used
        if len(self._going) == self._count:
            self._await_oldest()
        self._slab, self._used = next(self._slabs), 0

    def _await_oldest(self) -> None:
        self._going[0].wait()
        self._going.popleft()


@contextmanager
def merged_folder(target: Path) -> Iterator[Path]:
    """A folder for the block to fill, whose files then go to `target`, beside what it holds already.

    A new folder appears at once. In an existing one the files are replaced one by one, the weights of an earlier export
    that were not replaced are removed, and everything else stays.
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of the export; choose another path", str(target))
    exists = target.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Inside an existing folder, since that may be a file system of its own.
    fresh = (target if exists else target.parent) / f".{target.name}.export-{secrets.token_hex(6)}"
    fresh.mkdir()
    try:
        yield fresh
        sync(fresh)
        if exists:
            _merge(fresh, target)
        else:
            os.rename(fresh, target)
        sync(target.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _merge(fresh: Path, target: Path) -> None:
    new = {entry.name for entry in fresh.iterdir()}
    for name in sorted(new):
        os.replace(fresh / name, target / name)
    for entry in target.iterdir():
        if _WEIGHT_FILE.fullmatch(entry.name) and entry.name not in new:
            entry.unlink()
    sync(target)
