"""The text a run learns from: files, the split into training and held-out text, tokenizer, token files, data order.

Everything here is a pure function of its arguments, so a run that is resumed sees exactly the data it would have seen.
"""

import hashlib
import json
import multiprocessing
import os
import sysconfig
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 8192
END_OF_TEXT = "<|endoftext|>"
DEFAULT_TEXT_BYTES = 10_000_000
TOKEN_BYTES = 4  # token files hold int32
_ENCODE_BYTES = 1 << 20  # text encoded at once: bounds the memory of the encoder on large files
_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}  # tests and tables
_TEXT_SUFFIXES = {".txt", ".md", ".py", ".rst", ".text"}


@dataclass(frozen=True)
class Document:
    """A span of a text file, in bytes; `name` decides on which side of the split it falls."""

    name: str
    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def read(self) -> str:
        """Text of the span; bytes that are not UTF-8 become the replacement character."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.stop - self.start).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Corpus:
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def train_bytes(self) -> int:
        return sum(document.size for document in self.train)


@dataclass(frozen=True)
class TokenFiles:
    """What `prepare_tokens` leaves in the directory of a run."""

    tokenizer: Path
    train: Path
    held_out: Path
    stamp: Path
    """Of what the others were made from; written last, so where it is they are whole."""

    @staticmethod
    def within(directory: Path) -> "TokenFiles":
        names = ("tokenizer.json", "train.tokens", "held_out.tokens", "corpus.json")
        return TokenFiles(*(directory / name for name in names))


def standard_library(root: Path | None = None, limit_bytes: int = DEFAULT_TEXT_BYTES) -> list[Document]:
    """Source files of the Python standard library that runs this, in the order of their names, up to `limit_bytes`."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents, total = [], 0
    for name, path in sorted(_sources(root)):
        size = path.stat().st_size
        if total + size > limit_bytes:
            break
        if size:
            documents.append(Document(name, path, 0, size))
        total += size
    if not documents:
        raise ValueError(f"no Python source under {root}; give text files with --text")
    return documents


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py":
                yield path.relative_to(root).as_posix(), path


def text_files(paths: Sequence[Path]) -> list[Document]:
    """The files named, and those with a text suffix in the folders named, in the order of their names.

    A single file has no whole files to hold out: it is cut into twenty spans.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in _TEXT_SUFFIXES)
        elif path.is_file():
            files.append(path)
        else:
            raise FileNotFoundError(f"--text {path}: no such file or folder")
    documents = [Document(file.as_posix(), file, 0, file.stat().st_size) for file in files if file.stat().st_size]
    if not documents:
        raise ValueError(f"--text: no text in {', '.join(str(path) for path in paths)}")
    return _spans(documents[0], 20) if len(documents) == 1 else documents


def _spans(document: Document, count: int) -> list[Document]:
    edges = [document.stop * i // count for i in range(count + 1)]
    return [
        Document(f"{document.name}#{i}", document.path, edges[i], edges[i + 1])
        for i in range(count)
        if edges[i + 1] > edges[i]
    ]


def split(documents: Sequence[Document], held_out_fraction: float = 0.05) -> Corpus:
    """Hold out whole documents, up to a part of all bytes: those whose names hash lowest, the same on every machine."""
    if len(documents) < 2:
        raise ValueError(f"a held-out split needs at least 2 documents, but there is {len(documents)}; give more text")
    left = held_out_fraction * sum(document.size for document in documents)
    ranked = sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())
    chosen: set[str] = set()
    for document in ranked:
        if document.size <= left:
            chosen.add(document.name)
            left -= document.size
    if not chosen:
        chosen.add(min(ranked, key=lambda document: document.size).name)
    return Corpus(
        tuple(document for document in documents if document.name not in chosen),
        tuple(document for document in documents if document.name in chosen),
    )


def prepare_tokens(
    corpus: Corpus, directory: Path, tokenizer: Path | None = None, vocabulary: int = VOCABULARY, keep: bool = False
) -> TokenFiles:
    """Train the tokenizer (unless one is given) and encode the corpus, once for each run; later calls find the files.

    `vocabulary` is what the model knows; a tokenizer with more tokens is refused. With `keep`, files that were made
    from anything else are refused too, and stay as they are.
    Works in a child process: the memory of training a tokenizer is not the run's.
    """
    files, stamp = TokenFiles.within(directory), _stamp(corpus, tokenizer, vocabulary)
    if files.stamp.is_file():
        if json.loads(files.stamp.read_text()) == stamp:
            return files
        if keep:
            raise ValueError(
                f"{directory} was made from other text, or with another tokenizer, or the text has changed since; give "
                f"the --text and --model that the run was made with"
            )
    directory.mkdir(parents=True, exist_ok=True)
    files.stamp.unlink(missing_ok=True)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(_build_tokens, corpus, files, tokenizer, vocabulary).result()
    files.stamp.write_text(json.dumps(stamp))
    return files


def _stamp(corpus: Corpus, tokenizer: Path | None, vocabulary: int) -> dict[str, str]:
    digest = hashlib.sha256()
    for side in (corpus.train, corpus.held_out):
        for document in side:
            modified = document.path.stat().st_mtime_ns
            digest.update(f"{document.name}\0{document.start}\0{document.stop}\0{modified}\n".encode())
    return {"documents": digest.hexdigest(), "tokenizer": str(tokenizer or f"trained, {min(VOCABULARY, vocabulary)}")}


def _build_tokens(corpus: Corpus, files: TokenFiles, given: Path | None, vocabulary: int) -> None:
    from tokenizers import Tokenizer

    tokenizer = (
        Tokenizer.from_file(str(given)) if given else _train_tokenizer(corpus.train, min(VOCABULARY, vocabulary))
    )
    if (size := tokenizer.get_vocab_size()) > vocabulary:
        raise ValueError(
            f"the tokenizer has {size} tokens but the model's vocabulary is {vocabulary}; raise vocab_size"
        )
    tokenizer.save(str(files.tokenizer))
    for documents, path in ((corpus.train, files.train), (corpus.held_out, files.held_out)):
        with path.open("wb") as out:
            for tokens in _encode(tokenizer, documents):
                array("i", tokens).tofile(out)


def _train_tokenizer(documents: Iterable[Document], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.read() for document in documents), trainer)
    return tokenizer


def _encode(tokenizer: Any, documents: Iterable[Document]) -> Iterator[list[int]]:
    end = tokenizer.token_to_id(END_OF_TEXT)
    for document in documents:
        for start in range(document.start, document.stop, _ENCODE_BYTES):
            piece = Document(document.name, document.path, start, min(start + _ENCODE_BYTES, document.stop))
            yield tokenizer.encode(piece.read(), add_special_tokens=False).ids
        if end is not None:
            yield [end]


@dataclass(frozen=True)
class Tokens:
    """A token file, mapped into memory; batches are windows of `length` tokens."""

    values: torch.Tensor  # [count] int32, mapped
    length: int

    @staticmethod
    def open(path: Path, length: int) -> "Tokens":
        count = path.stat().st_size // TOKEN_BYTES
        if count < length:
            raise ValueError(f"{path.name} holds {count} tokens but --seq-len is {length}; give more text")
        values = torch.from_file(str(path), shared=False, size=count, dtype=torch.int32)
        return Tokens(values, length)

    @property
    def windows(self) -> int:
        return self.values.numel() // self.length

    def batch(self, seed: int, step: int, rows: int) -> torch.Tensor:
        """[rows, length] int64: the windows of this step; a pure function of (seed, step, rows).

        Every window is used once before any is used again; each pass has its own order.
        """
        picked = []
        for position in range(step * rows, (step + 1) * rows):
            lap, index = divmod(position, self.windows)
            picked.append(int(_order(seed, lap, self.windows)[index]))
        return torch.stack([self.window(index) for index in picked])

    def window(self, index: int) -> torch.Tensor:
        return self.values[index * self.length : (index + 1) * self.length].long()

    def spread(self, rows: int) -> torch.Tensor:
        """[<= rows, length] int64: windows spread evenly over the file; what held-out loss is measured on."""
        rows = min(rows, self.windows)
        return torch.stack([self.window(index * self.windows // rows) for index in range(rows)])


def _order(seed: int, lap: int, windows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + lap) % (1 << 63))
    return torch.randperm(windows, generator=generator)
