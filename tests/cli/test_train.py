"""`outsize train` from the first line to the export, on disk. A run that never stopped is the oracle of resuming."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from outsize.cli import corpus, main, watch  # noqa: E402
from tests.ranks.launching import run_on_ranks  # noqa: E402

Capture = pytest.CaptureFixture[str]
FEW = ["--batch", "2", "--seq-len", "16", "--warmup", "2", "--eval-every", "2", "--lr", "0.01", "--steps", "5"]


@pytest.fixture
def words(text: Path, tiny_model: Path, tmp_path: Path) -> list[str]:
    """A short run of a tiny model, in `tmp_path / "run"`."""
    return ["train", "--text", str(text), "--model", str(tiny_model), "--run", str(tmp_path / "run"), *FEW]


@pytest.fixture(autouse=True)
def without_a_process_for_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/cli/test_corpus.py has it: a process takes longer to start than these runs take."""
    monkeypatch.setattr(corpus, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))


def history(run: Path, name: str = "loss") -> list[float]:
    """What the Trainer has logged of the whole run, in its last checkpoint."""
    newest = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    log = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in log if name in entry]


def test_run_shows_and_leaves_everything(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert main([*words, "--save-every", "2"]) == 0
    said, run = capsys.readouterr().out, tmp_path / "run"
    for part in ("loading ...\nunit ", "step 1/5 | loss", "step 2/5 | held-out", "step 5/5 | loss", "after 5 steps"):
        assert part in said
    assert "peak memory: " in said and "a sample:\ndef" not in said and "tier/kind" in said
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
    losses = history(run)
    assert losses[-1] < losses[0] and len(losses) == 5
    assert sum(history(run, "bytes_written")) > 0 and len(history(run, "eval_loss")) >= 3
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("every checksum is right") == 2
    assert main(["checkpoint", "export", str(run / "checkpoint-5"), str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "model.safetensors").exists()
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    tokens = tokenizer("def function", return_tensors="pt").input_ids
    assert torch.isfinite(model(input_ids=tokens).logits).all() and model.config.use_cache
    assert tokenizer.decode(tokens[0]) == "def function"


@pytest.mark.parametrize(
    "more", [[], ["--dtype", "bf16", "--state-format", "compact", "--delayed-update", "2"]], ids=["exact", "compact"]
)
def test_resumed_run_is_bit_for_bit_the_same_and_needs_no_option_and_no_text(
    more: list[str], words: list[str], text: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main([*words, "--save-every", "3", *more]) == 0
    run = tmp_path / "run"
    whole, weights = history(run), (run / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(text)
    shutil.rmtree(run / "checkpoint-5")
    assert main(["train", "--resume", str(run)]) == 0
    assert history(run) == whole
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    assert main(["train", "--resume", str(run)]) == 0
    assert "checkpoint-5 is at step 5 of 5: there is nothing to do; give more --steps" in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "--steps", "6"]) == 0
    assert len(history(run)) == 6
    assert main(["train", "--resume", str(run), "--seed", "5"]) == 2
    assert "was made with --seed 0, not 5; give the same or leave it out" in capsys.readouterr().err


def signals(monkeypatch: pytest.MonkeyPatch, step: int, *numbers: signal.Signals) -> None:
    """Send them to this process when it shows the step."""
    show = watch.Watch._show

    def show_and_send(self: Any, record: Any, steps: int) -> None:
        show(self, record, steps)
        for number in numbers if record["step"] == step and "loss" in record else ():
            os.kill(os.getpid(), number)

    monkeypatch.setattr(watch.Watch, "_show", show_and_send)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruption_saves_and_says_how_to_go_on(
    number: signal.Signals,
    code: int,
    words: list[str],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, run = signal.getsignal(number), tmp_path / "run"
    signals(monkeypatch, 2, number)
    assert main(words) == code
    monkeypatch.undo()
    assert signal.getsignal(number) is before
    assert capsys.readouterr().out.endswith(f"go on with:\n  outsize train --resume {run}\n")
    assert (run / "report.png").exists()
    if number is signal.SIGINT:
        assert main(["train", "--resume", str(run)]) == 0
        assert main([*words, "--run", str(tmp_path / "whole")]) == 0
        assert history(run) == history(tmp_path / "whole")


def test_second_interruption_ends_the_run_at_once(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals(monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    assert main(words) == 130
    assert capsys.readouterr().out.endswith("interrupted; there is no checkpoint to go on from\n")


def test_killed_run_goes_on_from_its_newest_complete_checkpoint(words: list[str], tmp_path: Path) -> None:
    assert main([*words, "--save-every", "1", "--steps", "8"]) == 0
    whole = history(tmp_path / "run")
    killed = tmp_path / "killed"
    again = [*words[: -len(FEW)], "--run", str(killed), *FEW, "--save-every", "1", "--steps", "8"]
    process = subprocess.Popen([str(Path(sys.executable).with_name("outsize")), *again], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (killed / "checkpoint-2").exists() and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (killed / "checkpoint-8").exists()
    assert main(["train", "--resume", str(killed)]) == 0
    assert history(killed) == whole


def test_run_that_stops_by_time_says_so_and_how_to_go_on(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert main([*words, "--minutes", "0.0001"]) == 0
    assert "stopped: 0.0001 minutes are over (step 1 of 5); the newest checkpoint is" in capsys.readouterr().out
    assert main(["train", "--resume", str(tmp_path / "run"), "--minutes", "0"]) == 0
    assert len(history(tmp_path / "run")) == 5


def test_run_that_diverges_ends_in_one_line_with_the_way_on(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert main([*words, "--lr", "1e30", "--clip", "0", "--save-every", "1", "--warmup", "0"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "the training diverged at step" in error
    assert f"the newest checkpoint is {tmp_path / 'run'}/checkpoint-" in error
    assert (tmp_path / "run" / "report.png").exists()


@pytest.mark.parametrize(
    "wrong", [["--host-memory", "1 apple"], ["--seq-len", "100000"], ["--activations", "x"], ["--text", "none"]]
)
def test_run_that_is_refused_leaves_nothing(
    wrong: list[str], words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    assert main([*words, "--run", str(tmp_path / "runs" / "new"), *wrong]) == 2
    error = capsys.readouterr().err
    assert wrong[0] in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_new_run_takes_no_folder_that_holds_one(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "options.json").write_text("{}")
    assert main(words) == 2
    assert "run holds a run already; go on with it by --resume" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run")]) == 2
    assert "no complete checkpoint in" in capsys.readouterr().err


def on_two_ranks(run: Path, *commands: list[str]) -> list[tuple[int, list[float]]]:
    """What each command ends with, and what the run's last checkpoint has of its losses then."""
    rank = torch.distributed.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    ended = []
    for words in commands:
        code = main(words)
        torch.distributed.barrier()
        ended.append((code, history(run)))
    return ended


def test_two_ranks_train_and_resume_what_one_trains(words: list[str], tmp_path: Path) -> None:
    one, two = tmp_path / "run", tmp_path / "two"
    assert main([*words, "--save-every", "3"]) == 0
    shutil.copytree(one / "corpus", two / "corpus")  # a rank of a test may not start the process of the tokenizer
    again = [*words, "--run", str(two), "--save-every", "3"]
    resumed = ["train", "--resume", str(two / "checkpoint-3")]
    wrong = [*words, "--run", str(tmp_path / "three"), "--batch", "3"]
    (first, *others), same = run_on_ranks(2, on_two_ranks, two, again, resumed, wrong)
    assert [first, *others] == same and first[0] == 0 and others == [first, (2, first[1])]
    whole = first[1]
    assert whole == pytest.approx(history(one), rel=1e-4)
    assert (two / "model" / "model.safetensors").exists() and (two / "report.png").exists()


RECORD = {
    "step": 3,
    "loss": 7.0,
    "grad_norm": 1.0,
    "learning_rate": 1e-3,
    "seconds": 4.0,
    "tokens_per_second": 128.0,
    "wait_seconds": 1.0,
    "update_seconds": 2.0,
    "bytes_read": 3 << 30,
    "bytes_written": 2 << 30,
    "process_bytes": 400 << 20,
    "state_bytes": 2 << 30,
    "skipped_steps": 0,
}


def test_figures_of_a_step_are_the_same_in_a_line_and_in_the_panel() -> None:
    from rich.console import Console

    rows = watch.figures({**RECORD, "skipped_steps": 2}, {"eval_loss": 7.5, "step": 2})
    assert rows["loss"] == "7.000, held-out 7.500 at step 2, gradient norm 1.00, lr 1.0e-03, 2 steps skipped"
    assert rows["step"] == "4.00 s: compute 3.00, wait for disk 1.00, update 2.00 behind; 128 tokens/s"
    assert rows["disk"] == "3.0 GiB read, 2.0 GiB written a step"
    assert rows["memory"] == "400.0 MiB over the imports for 2.0 GiB of state"
    console = Console(width=110)
    with console.capture() as shown:
        console.print(watch._panel(RECORD, rows, 150))
    assert "step 3 of 150" in shown.get() and all(text.split(";")[0] in shown.get() for text in rows.values())


def test_report_is_drawn_where_there_was_a_step(tmp_path: Path) -> None:
    watch.write_report(tmp_path / "none.png", [{"step": 0, "eval_loss": 9.0}], 0)
    assert not any(tmp_path.iterdir())
    watch.write_report(tmp_path / "report.png", [RECORD, {"step": 3, "eval_loss": 9.0}], 0)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
