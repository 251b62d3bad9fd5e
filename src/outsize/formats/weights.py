"""Weights in the Hugging Face layout: safetensors files and their index, streamed through a fixed arena of slabs."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Final, final

import torch

from outsize.checkpoint.files import naming
from outsize.checkpoint.folder import sync, write_text
from outsize.checkpoint.shelf import is_checkpoint
from outsize.formats.pieces import SLAB_BYTES, NamedWeight, Piece, TypedPiece, drain_all
from outsize.move.disk import Engine, StripedFile, open_engine
from outsize.move.memory import PAGE_BYTES, HostBuffer, copy
from outsize.move.transfer import Transfer
from outsize.plan.layout import round_up

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_READ_FIRST = (SINGLE_NAME, INDEX_NAME)
"""A folder with neither holds no model."""

_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

READ_SLABS = 4
WRITE_SLABS = 4
ARENA_BYTES = (READ_SLABS + WRITE_SLABS) * SLAB_BYTES
"""All the memory of an export, whatever the size of its files and tensors."""

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

Moves = Sequence[tuple[Path, Path]]
"""Files: from where, to where."""

# Note [One stream]
# A file is its header, padded with spaces to a whole page, and then the tensors' bytes without gaps. The bytes are read
# from the stores piece by piece, several reads at a time, and packed into slabs, each of which is written while the
# next ones are filled. So every write is whole pages from page-aligned memory, as direct I/O needs; the last one is
# padded and the file is cut to its length afterwards. Tensors of wider elements come first: then each begins at a
# multiple of its element size without gaps, whatever the lengths are.


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
        drain_all(self._going)

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

    A new folder appears at once. In an existing one files of the same names and the weights of an earlier export make
    way, and everything else stays. An exception before all are in place leaves what was there before. See Note [Never a
    mixture].
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of the export; choose another path", str(target))
    if is_checkpoint(target):
        raise FileExistsError(errno.EEXIST, "the folder holds a checkpoint; export into another one", str(target))
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


# Note [Never a mixture]
# Shards of an earlier export may have the names and shapes of the new ones: any mixture of them under either index
# would load. So what a reader opens first, the index or the single file, goes first and comes last, and is away on the
# disk too while other files change. Killed in between, the folder holds no model, which is refused, and the earlier
# files lie in a hidden folder inside it, `.NAME.replaced-...`, for its owner to put back or remove. After an exception
# all names are as they were; should even that fail, it is as after a kill.


def _merge(fresh: Path, target: Path) -> None:
    """Replace what makes way. Raises `IsADirectoryError` before any change where a folder is in the way."""
    new = {entry.name for entry in fresh.iterdir()}
    old = {entry.name for entry in target.iterdir() if entry.name in new or _WEIGHT_FILE.fullmatch(entry.name)}
    for path in (target / name for name in sorted(old)):
        if path.is_dir() and not path.is_symlink():
            raise IsADirectoryError(errno.EISDIR, "a folder is in the way of the export; move it away", str(path))
    aside = target / f".{target.name}.replaced-{secrets.token_hex(6)}"
    aside.mkdir()
    leaving = [(target / name, aside / name) for name in sorted(old)]
    coming = [(fresh / name, target / name) for name in sorted(new)]
    phases = [
        [move for move in leaving if move[0].name in _READ_FIRST],
        [move for move in (*leaving, *coming) if move[0].name not in _READ_FIRST],
        [move for move in coming if move[0].name in _READ_FIRST],
    ]
    try:
        _carry_out(phases, target)
    except BaseException:
        _take_back(phases, target)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _carry_out(phases: Sequence[Moves], folder: Path) -> None:
    for moves in phases:
        for source, place in moves:
            os.rename(source, place)
        sync(folder)


def _take_back(phases: Sequence[Moves], folder: Path) -> None:
    """Undo what was done of the moves, in reverse."""
    for moves in reversed(phases):
        for source, place in reversed(moves):
            if not os.path.lexists(source):
                os.rename(place, source)
        with suppress(OSError):  # as a rule it is what has failed, and the names matter more
            sync(folder)
