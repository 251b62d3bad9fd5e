"""Weights in the Hugging Face layout: safetensors files and their index, written run by run."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

import torch

from outsize.checkpoint.arrays import Readable
from outsize.checkpoint.directory import is_checkpoint
from outsize.checkpoint.files import DataWriter
from outsize.checkpoint.folder import make_locked, make_parents, sync, write_text
from outsize.move.memory import PAGE_BYTES, HostBuffer, copy
from outsize.move.transfer import submitted
from outsize.planning.layout import round_up

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_READ_FIRST = (SINGLE_NAME, INDEX_NAME)
"""A folder with neither holds no model."""

_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

WRITERS = 2
"""Threads, each of which writes a slab. One more is being filled."""

PIECE_BYTES = 4 << 20

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
# A file is its header, padded with spaces to a whole page, and then the bytes of the tensors without gaps, run by run.
# Tensors of wider elements come first: then each begins at a multiple of its element size, whatever the lengths are.


def files_of(weights: Mapping[str, Readable], max_shard_bytes: int) -> list[dict[str, Readable]]:
    """The weights of each file, in the order in which they lie there. Raises `TypeError` for an unknown dtype.

    Cut as transformers does: a larger tensor is a file of its own, others go on filling the last one.
    """
    files: list[dict[str, Readable]] = []
    last: dict[str, Readable] = {}
    nbytes = 0
    for name, weight in weights.items():
        if weight.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name!r} is of {weight.dtype}, which safetensors cannot store")
        if weight.nbytes > max_shard_bytes:
            files.append({name: weight})
            continue
        if last and nbytes + weight.nbytes > max_shard_bytes:
            files.append(last)
            last, nbytes = {}, 0
        last[name] = weight
        nbytes += weight.nbytes
    if last or not files:
        files.append(last)
    return [dict(sorted(file.items(), key=lambda item: -item[1].dtype.itemsize)) for file in files]


def runs_of(files: Sequence[Mapping[str, Readable]]) -> Iterator[torch.Tensor]:
    """The values of all files in their order, 1-D; each run is valid until the next one is asked for.

    Where several ranks have parts of the weights, each takes all runs and one of them writes.
    """
    for file in files:
        for weight in file.values():
            yield from weight.runs()


def write_shards(folder: Path, files: Sequence[Mapping[str, Readable]], runs: Iterator[torch.Tensor]) -> None:
    """Write the files and the index. Memory: a run and the slabs. Raises `OSError` with path and errno."""
    names = [f"model-{at:05d}-of-{len(files):05d}.safetensors" for at in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [SINGLE_NAME]
    for name, weights in zip(names, files, strict=True):
        _write_file(folder / name, weights, runs)
    if len(files) > 1:
        home = {name: file for file, weights in zip(names, files, strict=True) for name in weights}
        total = sum(weight.nbytes for weights in files for weight in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(home.items()))}
        write_text(folder / INDEX_NAME, json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, weights: Mapping[str, Readable], runs: Iterator[torch.Tensor]) -> None:
    """See Note [One stream]."""
    header = _header(weights)
    left = sum(weight.nbytes for weight in weights.values())
    with DataWriter(path, len(header) + left, direct=True) as file, _Stream(file) as stream:
        stream.add(torch.frombuffer(header, dtype=torch.uint8))
        while left:
            values = next(runs)  # read while those before are written
            stream.add(values.view(torch.uint8))
            left -= values.nbytes
            del values  # before the next one takes memory


@final
class _Stream:
    """Bytes for a file in their order, in whole pages past the page cache. Memory: its slabs."""

    def __init__(self, file: DataWriter) -> None:
        self._file = file
        self._slabs = deque((HostBuffer(PIECE_BYTES).bytes, _nothing()) for _ in range(WRITERS + 1))
        self._sent = self._filled = 0  # bytes of the file; of the first slab
        self._pool = ThreadPoolExecutor(WRITERS, "outsize-export")

    def add(self, content: torch.Tensor) -> None:
        """`content` (uint8, 1-D) may change when this returns. Raises what a write before it raised."""
        while content.numel():
            slab, going = self._slabs[0]
            going.result()
            part, content = content[: PIECE_BYTES - self._filled], content[PIECE_BYTES - self._filled :]
            copy(slab[self._filled : self._filled + part.numel()], part)
            self._filled += part.numel()
            if self._filled == PIECE_BYTES:
                self._send()

    def _send(self) -> None:
        slab, going = self._slabs.popleft()
        going.result()  # of the last write from this slab, where nothing was added since
        content = slab[: round_up(self._filled, PAGE_BYTES)]
        self._slabs.append((slab, submitted(self._pool, self._file.write, self._sent, content)))
        self._sent, self._filled = self._sent + self._filled, 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._pool:
            if error is None:
                self._send()
                for _, going in self._slabs:
                    going.result()


def _nothing() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _header(weights: Mapping[str, Readable]) -> bytearray:
    """The length and the JSON of a file, padded so that the data begins on a page."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, weight in weights.items():
        end = position + weight.nbytes
        dtype = DTYPE_NAMES[weight.dtype]
        entries[name] = {"dtype": dtype, "shape": list(weight.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = round_up(LENGTH_BYTES + len(text), PAGE_BYTES) - LENGTH_BYTES
    return bytearray(length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length))


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
    make_parents(target.parent)
    # Inside an existing folder, since that may be a file system of its own.
    fresh, lock = make_locked(target if exists else target.parent, f".{target.name}.export")
    try:
        yield fresh
        sync(fresh)
        if exists:
            _merge(fresh, target)
        else:
            os.rename(fresh, target)
        sync(target.parent)
    finally:
        _remove(fresh)
        os.close(lock)


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
        for moves in phases:
            for source, place in moves:
                os.rename(source, place)
            sync(target)
    except BaseException:
        _take_back(phases, target)
        aside.rmdir()
        raise
    _remove(aside)


def _remove(folder: Path) -> None:
    """As far as it can be; all of it also where an interrupt comes meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _take_back(phases: Sequence[Moves], folder: Path) -> None:
    """Undo what was done of the moves, in reverse."""
    for moves in reversed(phases):
        for source, place in reversed(moves):
            if not os.path.lexists(source):
                os.rename(place, source)
        with suppress(OSError):  # as a rule it is what has failed, and the names matter more
            sync(folder)
