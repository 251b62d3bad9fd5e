"""`outsize train` on several ranks: the run of one, shared by two."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from outsize.cli import main
from outsize.cli.team import Team
from tests.ranks.launching import run_on_ranks


def train(arguments: list[str]) -> str:
    """What the rank says."""
    said = io.StringIO()
    with redirect_stdout(said):
        assert main(["train", *arguments]) == 0
    return said.getvalue()


def run(ranks: int, out: Path, text: Path, model: Path, *more: str) -> list[str]:
    options = ["--text", str(text), "--model", str(model), "--seq-len", "32", "--minutes", "0", "--eval-every", "0"]
    arguments = [*options, "--host-memory", "16MiB", "--out", str(out), "--name", "run", *more]
    return run_on_ranks(ranks, train, arguments) if ranks > 1 else [train(arguments)]


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_train_and_resume_what_one_trains(text: Path, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    one, two = tmp_path / "one", tmp_path / "two"
    recipe = ("--steps", "4", "--warmup", "0", "--save-every", "2")
    run(1, one, text, tiny_model, *recipe)
    shutil.copytree(one / "run" / "corpus", two / "run" / "corpus")  # a rank of a test may not start the tokenizer
    first, second = run(2, two, text, tiny_model, *recipe)
    assert "held-out loss before" in first and "report:" in first and second == ""
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert (two / "run" / "model" / "model.safetensors").exists() and (two / "run" / "report.png").exists()
    before = losses(two)
    run(2, two, text, tiny_model, *recipe, "--resume", str(two / "run" / "checkpoints" / "step-2"))
    assert losses(two) == before


def test_a_batch_that_cannot_be_shared_is_refused(
    text: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Team, "open", lambda: Team(0, 2))
    options = ["--text", str(text), "--model", str(tiny_model), "--batch", "3", "--out", str(tmp_path)]
    assert main(["train", *options]) == 2
    assert "--batch 3 cannot be shared by 2 ranks; give a multiple of 2" in capsys.readouterr().err
