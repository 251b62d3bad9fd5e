"""Text, split and tokens are functions of their arguments."""

import multiprocessing
import os
import signal
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outsize.cli import corpus
from outsize.cli.corpus import HELD_OUT, TRAIN, Windows


def test_standard_library_is_bounded_ordered_and_free_of_tests() -> None:
    found = corpus.standard_library(limit_bytes=2_000_000)
    assert found == sorted(found)
    assert 1_000_000 < sum(path.stat().st_size for path in found) <= 2_000_000
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in found)


def test_split_holds_out_whole_files_whatever_their_order(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.txt" for i in range(100)]
    for file in files:
        file.write_text("x" * 100)
    train, held_out = corpus.split(files)
    assert set(corpus.split(files[::-1])[1]) == set(held_out)
    assert (len(train), len(held_out)) == (95, 5)
    assert sorted({piece.path for piece in (*train, *held_out)}) == sorted(map(str, files))


def test_single_file_is_cut_into_pieces_that_cover_it(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("".join(chr(97 + i % 26) for i in range(1003)))
    train, held_out = corpus.split([file])
    assert "".join(piece.read() for piece in sorted([*train, *held_out])) == file.read_text()
    assert len(held_out) == 1


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("x" * 1000)
    assert corpus.text_files([str(file), str(tmp_path), str(file)]) == [file]


def test_text_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
        corpus.text_files([str(tmp_path / "nothing.txt")])
    with pytest.raises(ValueError, match="too little text"):
        corpus.split(corpus.text_files([str(tmp_path)]))
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "data.json").touch()
    with pytest.raises(ValueError, match=r"others: no file there ends in \.md, \.py"):
        corpus.text_files([str(tmp_path), str(tmp_path / "others")])


def test_windows_cover_the_file_or_are_spread_over_it(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_bytes(array("i", range(1009)).tobytes())
    every, four = Windows(file, 10), Windows(file, 10, most=4)
    assert [int(every[i]["input_ids"][0]) for i in range(len(every))] == list(range(0, 1000, 10))
    assert [int(four[i]["labels"][0]) for i in range(len(four))] == [0, 250, 500, 750]
    assert len(Windows(file, 10, most=500)) == 100
    with pytest.raises(ValueError, match="2000; give more --text, or a --seq-len of at most 1009"):
        Windows(file, 2000)


@pytest.mark.slow
def test_tokens_decode_to_the_text_and_are_made_once(text: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "corpus"
    corpus.prepare(folder, [str(text)], None, 400)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train, held_out = corpus.split(corpus.text_files([str(text)]))
    assert len(tokenizer) == 400
    for name, pieces in ((TRAIN, train), (HELD_OUT, held_out)):
        expected = corpus.END_OF_TEXT.join(piece.read() for piece in pieces) + corpus.END_OF_TEXT
        assert tokenizer.decode(list(array("i", (folder / name).read_bytes()))) == expected
    corpus.prepare(folder, ["nowhere"], None, 400)  # nothing is read again


def test_model_with_too_small_a_vocabulary_is_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))  # starts at once
    with pytest.raises(ValueError, match="vocabulary is 100"):
        corpus.prepare(tmp_path / "corpus", [str(text)], None, 100)


def hangs(*_: object) -> None:
    time.sleep(600)


@pytest.mark.slow
def test_an_interruption_ends_the_process_that_makes_the_tokens(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_build", hangs)

    def interrupt() -> None:
        while not multiprocessing.active_children():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                corpus.prepare(tmp_path / "corpus", [str(text)], None, 512)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not multiprocessing.active_children()
