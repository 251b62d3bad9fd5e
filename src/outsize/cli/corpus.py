"""The text a run learns from: files, the split into training and held-out text, the tokenizer, files of tokens."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
import sysconfig
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outsize.cli.models import VOCABULARY

END_OF_TEXT = "<|endoftext|>"
DEFAULT_BYTES = 10_000_000
PIECE_BYTES = 1 << 20
TOKEN_BYTES = 4  # token files hold int32
TRAIN, HELD_OUT = "train.tokens", "held_out.tokens"
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
_SUFFIXES = {".txt", ".md", ".py", ".rst", ".text"}


class Piece(NamedTuple):
    """A part of a file that is encoded at once: all of it, unless the file is large or the only one."""

    path: str
    start: int
    size: int

    def read(self) -> str:
        """Bytes that are not UTF-8 become the replacement character."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return file.read(self.size).decode("utf-8", errors="replace")


def standard_library(limit_bytes: int = DEFAULT_BYTES) -> list[Path]:
    """Source files of the Python standard library that runs this, in the order of their names, up to `limit_bytes`."""
    root, found, total = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED & set(path.relative_to(root).parts):
            total += path.stat().st_size
            if total > limit_bytes:
                break
            found.append(path)
    if not found:
        raise ValueError(f"no Python source under {root}; give text files with --text")
    return found


def text_files(paths: Sequence[str]) -> list[Path]:
    """The files named, and those with a text suffix in the folders named, in the order of their names; each once."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"--text {path}: no such file or folder")
        files = path.rglob("*") if path.is_dir() else [path]
        chosen = sorted(file for file in files if file.is_file() and (file == path or file.suffix in _SUFFIXES))
        if not chosen:
            raise ValueError(f"--text {path}: no file there ends in {', '.join(sorted(_SUFFIXES))}; name files instead")
        found += chosen
    return list(dict.fromkeys(found))


def split(files: Sequence[Path], held_out_part: float = 0.05) -> tuple[list[Piece], list[Piece]]:
    """Training and held-out pieces. Those whose names hash lowest are held out, so it is the same in every run."""
    pieces = []
    for file in files:
        size = file.stat().st_size
        step = PIECE_BYTES if len(files) > 1 else min(PIECE_BYTES, -(-size // 20) or 1)
        pieces += [Piece(str(file), start, min(step, size - start)) for start in range(0, size, step)]
    if len(pieces) < 2:
        raise ValueError("--text: there is too little text to hold some of it out; give more")
    ranked = sorted(
        pieces, key=lambda piece: hashlib.sha256(f"{Path(piece.path).name}#{piece.start}".encode()).digest()
    )
    held_out = set(ranked[: max(1, round(held_out_part * len(pieces)))])
    return [piece for piece in pieces if piece not in held_out], [piece for piece in pieces if piece in held_out]


def is_there(folder: Path) -> bool:
    return (folder / HELD_OUT).exists()  # written last


def prepare(folder: Path, text: Sequence[str], tokenizer: str | None, vocabulary: int) -> None:
    """Leave the tokenizer and the tokens in the folder, unless they are there.

    A tokenizer is trained unless one is given. One with more tokens than the model's `vocabulary` is refused. A process
    of its own does the work, so that its memory is not the run's.
    """
    if is_there(folder):
        return
    parts = split(text_files(text) if text else standard_library())
    folder.mkdir(parents=True, exist_ok=True)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})  # its processes inherit it
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool, _children_end():
            built = pool.submit(_build, folder, parts, tokenizer, vocabulary)
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
            while not built.done():  # another thread may have taken the signal, which wakes nobody
                wait([built], timeout=0.2)
            built.result()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


@contextmanager
def _children_end() -> Iterator[None]:
    """At Ctrl-C at once: they may have minutes of work left."""
    try:
        yield
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.kill()
        raise


def _build(folder: Path, parts: tuple[list[Piece], list[Piece]], given: str | None, vocabulary: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given) if given else _trained(parts[0], min(VOCABULARY, vocabulary))
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens but the model's vocabulary is {vocabulary}; raise vocab_size"
        )
    tokenizer.save_pretrained(folder)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for pieces, name in zip(parts, (TRAIN, HELD_OUT), strict=True):
        with (folder / "unfinished").open("wb") as out:
            for piece in pieces:
                array("i", tokenizer.backend_tokenizer.encode(piece.read(), add_special_tokens=False).ids + end).tofile(
                    out
                )
        (folder / "unfinished").replace(folder / name)


def _trained(pieces: Iterable[Piece], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece.read() for piece in pieces), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A file of tokens, mapped into memory, in windows of `length` tokens: all, or `most` spread evenly over it."""

    def __init__(self, path: Path, length: int, most: int | None = None) -> None:
        count = path.stat().st_size // TOKEN_BYTES
        if count < length:
            raise ValueError(
                f"{path.name} holds {count} tokens but --seq-len is {length}; give more --text, or a --seq-len of at "
                f"most {count}"
            )
        self.tokens = torch.from_file(str(path), shared=False, size=count, dtype=torch.int32)
        self.length, self.windows = length, count // length
        self.count = min(most or self.windows, self.windows)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self.windows // self.count * self.length
        window = self.tokens[start : start + self.length].long()
        return {"input_ids": window, "labels": window}
