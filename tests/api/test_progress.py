"""Calls that take long say how far they are, and only these."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

import outsize
from outsize.move import progress
from tests.conftest import Workshop, batches, train
from tests.small_models import Stack

BAR = r"\[[= ]{24}\] +\d+% of [\d.]+ KiB, [\d.]+ [KMG]?i?B/s"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each call took long."""
    for name in ("QUIET_SECONDS", "BAR_SECONDS", "LOG_SECONDS"):
        monkeypatch.setattr(progress, name, 0.0)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    with Terminal() as shown:
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=shown))
        yield shown


def use(workshop: Workshop, folder: Path, **fields: object) -> None:
    """Every call that may take long."""
    model, optimizer = workshop.made(**fields)
    train(model, optimizer, batches(1))
    outsize.save(folder / "saved", model, optimizer).wait()
    outsize.load(folder / "saved", model, optimizer)
    outsize.export(folder / "exported", model)


CALLS = ("outsize.prepare", "outsize: updates", "outsize.load", "outsize.export")


def test_a_terminal_shows_a_bar_that_goes(
    workshop: Workshop, tmp_path: Path, slow: None, terminal: Terminal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outsize")
    use(workshop, tmp_path)
    shown = terminal.getvalue()
    for call in CALLS:
        assert re.search(rf"\r{call}: {BAR}", shown), call
    assert shown.endswith("\r") and not shown.split("\r")[-2].strip()  # nothing stays on the line
    assert "\n" not in shown and not [each for each in caplog.messages if "% of" in each]


def test_elsewhere_the_log_has_lines(
    workshop: Workshop, tmp_path: Path, slow: None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "outsize")
    use(workshop, tmp_path)
    for call in CALLS:
        assert any(re.match(rf"{call}: +\d+% of", each) for each in caplog.messages), call
    assert capsys.readouterr().err == ""


def test_init_tells_what_it_has_made(tmp_path: Path, slow: None, terminal: Terminal) -> None:
    with outsize.init(host_memory="64MiB"):
        Stack()
    assert re.search(r"\routsize.init: [\d.]+ KiB, ", terminal.getvalue())


def test_one_argument_switches_it_off(
    workshop: Workshop, tmp_path: Path, slow: None, terminal: Terminal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outsize")
    with pytest.raises(TypeError, match="progress is 'no'; it must be True or False"):
        outsize.Config(progress="no")  # type: ignore[arg-type]
    use(workshop, tmp_path, progress=False)
    assert terminal.getvalue() == "" and not [each for each in caplog.messages if "% of" in each]


def test_what_is_quick_says_nothing(workshop: Workshop, tmp_path: Path, terminal: Terminal) -> None:
    use(workshop, tmp_path)
    assert terminal.getvalue() == ""


def test_of_several_ranks_the_first_one_shows_it(
    workshop: Workshop, tmp_path: Path, slow: None, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    use(workshop, tmp_path)
    assert terminal.getvalue() == ""


def test_an_error_leaves_no_bar(slow: None, terminal: Terminal) -> None:
    with pytest.raises(ZeroDivisionError), closing(progress.Progress("outsize.load", 10)) as shown:
        shown.add(5)
        raise ZeroDivisionError
    assert terminal.getvalue().endswith("\r")
