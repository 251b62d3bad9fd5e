"""Text, split, tokens and data order are functions of their arguments."""

from array import array
from pathlib import Path

import pytest
import torch

from outsize.cli import corpus
from outsize.cli.corpus import Document, Tokens


def documents(count: int) -> list[Document]:
    return [Document(f"file_{i}", Path("nowhere"), 0, 100) for i in range(count)]


def tokens(path: Path, count: int, length: int) -> Tokens:
    with path.open("wb") as file:
        array("i", range(count)).tofile(file)
    return Tokens.open(path, length)


def test_standard_library_is_bounded_ordered_and_free_of_tests() -> None:
    found = corpus.standard_library(limit_bytes=2_000_000)
    names = [document.name for document in found]
    assert names == sorted(names)
    assert 1_000_000 < sum(document.stop for document in found) <= 2_000_000
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)


def test_split_holds_out_whole_documents_whatever_their_order() -> None:
    parts = corpus.split(documents(100))
    again = corpus.split(documents(100)[::-1])
    held_out = {document.name for document in parts.held_out}
    assert len(held_out) == 5
    assert held_out == {document.name for document in again.held_out}
    assert not held_out & {document.name for document in parts.train}
    assert len(parts.train) == 95


def test_split_of_one_document_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 documents"):
        corpus.split(documents(1))


def test_single_file_is_cut_into_spans_that_cover_it(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("".join(chr(97 + i % 26) for i in range(1003)))
    spans = corpus.text_files([file])
    assert len(spans) == 20
    assert "".join(span.read() for span in spans) == file.read_text()


def test_text_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
        corpus.text_files([tmp_path / "nothing.txt"])
    with pytest.raises(ValueError, match=r"empty\.txt"):
        corpus.text_files([tmp_path / "empty.txt"])


def test_data_order_is_a_function_of_seed_and_step(tmp_path: Path) -> None:
    data = tokens(tmp_path / "t", 1000, 10)
    again = Tokens.open(tmp_path / "t", 10)
    assert torch.equal(data.batch(1, 57, 4), again.batch(1, 57, 4))
    assert not torch.equal(data.batch(1, 57, 4), data.batch(2, 57, 4))
    assert not torch.equal(data.batch(1, 57, 4), data.batch(1, 58, 4))


def test_one_pass_uses_every_window_once(tmp_path: Path) -> None:
    data = tokens(tmp_path / "t", 1009, 10)
    seen = torch.cat([data.batch(0, step, 4) for step in range(25)])
    assert seen.dtype == torch.int64
    assert sorted(seen[:, 0].tolist()) == list(range(0, 1000, 10))
    later = torch.cat([data.batch(0, step, 4) for step in range(25, 50)])
    assert later[:, 0].tolist() != seen[:, 0].tolist()


def test_held_out_windows_are_spread_over_the_file(tmp_path: Path) -> None:
    data = tokens(tmp_path / "t", 1000, 10)
    assert data.spread(4)[:, 0].tolist() == [0, 250, 500, 750]
    assert len(data.spread(500)) == 100


def test_too_little_text_for_one_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds 5 tokens but --seq-len is 10"):
        tokens(tmp_path / "t", 5, 10)


@pytest.mark.slow
def test_tokens_decode_to_the_text_and_are_made_once(text: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    parts = corpus.split(corpus.text_files([text]))
    files = corpus.prepare_tokens(parts, tmp_path / "corpus", vocabulary=400)
    tokenizer = Tokenizer.from_file(str(files.tokenizer))
    values = array("i", files.held_out.read_bytes())
    assert tokenizer.get_vocab_size() == 400
    assert tokenizer.decode(list(values)) == "".join(document.read() for document in parts.held_out)
    written = files.train.stat().st_mtime_ns
    corpus.prepare_tokens(parts, tmp_path / "corpus", vocabulary=400)
    assert files.train.stat().st_mtime_ns == written


@pytest.mark.slow
def test_model_with_too_small_a_vocabulary_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary is 100"):
        corpus.prepare_tokens(corpus.split(corpus.text_files([text])), tmp_path / "corpus", vocabulary=100)
