"""`outsize train` from the first line to the export, on disk. A run that never stopped is the oracle of resuming."""

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

from outsize.checkpoint.folder import locked  # noqa: E402
from outsize.cli import corpus, main, models, reporting, watch  # noqa: E402
from outsize.integrations.transformers import Trainer  # noqa: E402
from tests.cli.conftest import write_model, write_text  # noqa: E402
from tests.ranks.launching import ends_on_ranks, run_on_ranks  # noqa: E402

Capture = pytest.CaptureFixture[str]
FEW = ["--batch", "2", "--seq-len", "16", "--warmup", "2", "--eval-every", "2", "--lr", "0.01", "--steps", "6"]


@pytest.fixture
def words(text: Path, tiny_model: Path, tmp_path: Path) -> list[str]:
    """A short run of a tiny model, in `tmp_path / "run"`."""
    return command(text, tiny_model, tmp_path / "run")


def command(text: Path, model: Path, run: Path) -> list[str]:
    return ["train", "--text", str(text), "--model", str(model), "--run", str(run), *FEW]


@pytest.fixture(autouse=True, scope="module")
def without_a_process_for_the_text() -> Iterator[None]:
    """tests/cli/test_corpus.py has it: a process takes longer to start than these runs take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
        yield


@dataclass(frozen=True)
class Whole:
    """A run that never stopped: its folder, what it said, and its losses."""

    run: Path
    said: str
    losses: list[float]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, without_a_process_for_the_text: None) -> Whole:
    """The run of `words` with its checkpoints of steps 4 and 6; its text is gone."""
    folder, said = tmp_path_factory.mktemp("whole"), io.StringIO()
    text = write_text(folder / "text")
    with contextlib.redirect_stdout(said):
        assert main([*command(text, write_model(folder / "tiny"), folder / "run"), "--save-every", "2"]) == 0
    shutil.rmtree(text)
    return Whole(folder / "run", said.getvalue(), history(folder / "run"))


@pytest.fixture(autouse=True)
def without_a_drawing(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole run has it: to draw the charts takes as long as such a run."""
    monkeypatch.setattr(reporting, "_draw", lambda path, records, history: path.write_text(str(history)))


def history(run: Path, name: str = "loss") -> list[float]:
    """What the Trainer has logged of the whole run, in its last checkpoint."""
    newest = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    log = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in log if name in entry]


def test_run_shows_and_leaves_everything(whole: Whole, tmp_path: Path, capsys: Capture) -> None:
    said, run = whole.said, whole.run
    for part in ("loading ...\nunit ", "step 1/6 | loss", "step 2/6 | held-out", "step 6/6 | loss", "after 6 steps"):
        assert part in said
    assert "peak memory: " in said and "a sample:\ndef" not in said and "tier/kind" in said
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    assert whole.losses[-1] < whole.losses[0] and len(whole.losses) == 6
    assert sum(history(run, "bytes_written")) > 0 and len(history(run, "eval_loss")) >= 3
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("every checksum is right") == 2
    assert main(["checkpoint", "export", str(run / "checkpoint-6"), str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "model.safetensors").exists()
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (run / "report.html").read_text()
    assert "6 of 6" in page and "<h2>Samples</h2>" in page and "peak memory" in page
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    tokens = tokenizer("def function", return_tensors="pt").input_ids
    assert torch.isfinite(model(input_ids=tokens).logits).all() and model.config.use_cache
    assert tokenizer.decode(tokens[0]) == "def function"


def goes_on_to_the_same(run: Path) -> None:
    """Take the last checkpoint and the export away: the run makes the same again."""
    losses, held_out, weights = (
        history(run),
        history(run, "eval_loss"),
        (run / "model" / "model.safetensors").read_bytes(),
    )
    shutil.rmtree(run / "checkpoint-6")
    shutil.rmtree(run / "model")
    assert main(["train", "--resume", str(run)]) == 0
    assert history(run) == losses and history(run, "eval_loss") == held_out  # the first is of before any step
    assert (run / "model" / "model.safetensors").read_bytes() == weights


def test_resumed_run_is_bit_for_bit_the_same_and_needs_no_option_and_no_text(
    whole: Whole, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole.run, run)
    goes_on_to_the_same(run)
    assert main(["train", "--resume", str(run)]) == 0
    assert "checkpoint-6 is at step 6 of 6: there is nothing to do; give more --steps, or" in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "--steps", "7"]) == 0
    assert len(history(run)) == 7
    assert main(["train", "--resume", str(run), "--seed", "5"]) == 2
    assert "was made with --seed 0, not 5; give the same or leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--lr 0.02", "--weight-decay 0.9", "--save-every 1 --eval-every 1"])
def test_options_of_a_resumed_run_win_over_those_of_its_checkpoint(
    words: str, whole: Whole, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole.run, run)
    assert main(["train", "--resume", str(run / "checkpoint-4"), *words.split()]) == 0
    assert f"goes on from {run / 'checkpoint-6'}, not from what this run saves" in capsys.readouterr().out
    rates, before = history(run, "learning_rate")[4:], history(whole.run, "learning_rate")[4:]
    assert rates == ([2 * rate for rate in before] if "--lr" in words else before)
    assert (history(run)[:5] == whole.losses[:5]) and ((history(run)[5] == whole.losses[5]) == ("--save" in words))
    log = json.loads((run / "history.json").read_text())
    assert [entry["step"] for entry in log if "saved" in entry] == ([2, 5, 6] if "--save" in words else [2, 6])
    assert len(history(run, "eval_loss")) == (5 if "--eval" in words else 4)


def test_resumed_run_in_bf16_with_compact_state_and_a_delayed_update_is_bit_for_bit_the_same(
    words: list[str], text: Path, tmp_path: Path
) -> None:
    more = ["--dtype", "bf16", "--state-format", "compact", "--delayed-update", "2", "--save-every", "3"]
    assert main([*words, *more]) == 0
    shutil.rmtree(text)
    goes_on_to_the_same(tmp_path / "run")


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
    whole: Whole,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, run = signal.getsignal(number), tmp_path / "run"
    with monkeypatch.context() as patch:
        signals(patch, 2, number)
        assert main(words) == code
    assert signal.getsignal(number) is before
    assert capsys.readouterr().out.endswith(f"go on with:\n  outsize train --resume {run}\n")
    assert (run / "report.png").exists()
    if number is signal.SIGINT:
        assert main(["train", "--resume", str(run)]) == 0
        assert history(run) == whole.losses


@pytest.mark.parametrize("during", ["evaluate", "_save_checkpoint"])
def test_an_interruption_of_a_save_or_of_a_look_at_held_out_text_runs_no_further_step(
    during: str, words: list[str], whole: Whole, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = tmp_path / "run", getattr(Trainer, during)

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            signal.raise_signal(signal.SIGINT)
        return before(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, during, interrupted)
        assert main([*words, "--save-every", "2"]) == 130
    said = capsys.readouterr().out
    assert f"interrupted after step 2; the newest checkpoint is {run / 'checkpoint-2'}; go on with:" in said
    saved = [entry["step"] for entry in json.loads((run / "history.json").read_text()) if "saved" in entry]
    assert saved == [2]
    assert main(["train", "--resume", str(run)]) == 0
    assert history(run) == whole.losses


def closes_its_terminal(words: list[str]) -> int:
    """After the second step."""
    ours, theirs = os.openpty()
    show = watch.Watch._show

    def show_and_close(self: Any, record: Any, steps: int) -> None:
        show(self, record, steps)
        if record["step"] == 2 and "loss" in record:
            os.close(ours)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)

    watch.Watch._show = show_and_close  # type: ignore[method-assign]
    for number in (1, 2):
        os.dup2(theirs, number)
    os.close(theirs)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have begun the tests
    return main(words)


def test_a_terminal_that_closes_ends_the_run_with_a_checkpoint(words: list[str], whole: Whole, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole.run / "corpus", run / "corpus")
    assert run_on_ranks(1, closes_its_terminal, words) == [129]
    assert [*run.glob("checkpoint-*/outsize")] and (run / "report.png").exists()
    assert main(["train", "--resume", str(run)]) == 0
    assert history(run) == whole.losses


def test_a_run_whose_streams_are_closed_goes_on(
    words: list[str], whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("stdin", "stdout", "stderr")
    for name in names:
        monkeypatch.setattr(sys, name, None)
    assert main(words) == 0
    for name in names:
        assert getattr(sys, name).errors == "backslashreplace"  # no word fails, whatever the locale
        getattr(sys, name).close()
    assert history(tmp_path / "run") == whole.losses


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_termination_before_the_first_step_leaves_nothing(
    number: signal.Signals,
    code: int,
    words: list[str],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # nohup may have begun the tests
    monkeypatch.setattr(models, "build", lambda *_: signal.raise_signal(number))
    try:
        assert main(words) == code
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err.endswith("outsize: interrupted\n")
    assert not (tmp_path / "run").exists()


def test_a_termination_after_the_last_step_is_told_by_its_number(
    words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "save_model", lambda *_, **inside: inside or signal.raise_signal(signal.SIGTERM))
    assert main(words) == 143
    said = capsys.readouterr().out
    assert "checkpoint-6 has the weights of the last step, and from_pretrained opens it" in said
    assert "--resume" not in said, "nothing is left to do"


def test_second_interruption_ends_the_run_at_once(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals(monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    assert main(words) == 130
    assert capsys.readouterr().out.endswith("interrupted; there is no checkpoint to go on from\n")


def killed_in_its_third_save(words: list[str]) -> None:
    """When the state is there, and what the Trainer adds is not."""
    save = Trainer._save_optimizer_and_scheduler

    def save_and_be_killed(self: Any, output_dir: str) -> None:
        save(self, output_dir)
        if self.state.global_step == 3:
            self._saving.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer._save_optimizer_and_scheduler = save_and_be_killed  # type: ignore[method-assign]
    main(words)


def test_killed_run_goes_on_from_its_newest_complete_checkpoint(
    words: list[str], whole: Whole, tmp_path: Path, capsys: Capture
) -> None:
    killed = tmp_path / "run"
    shutil.copytree(whole.run / "corpus", killed / "corpus")  # a rank of a test may not start the process of the text
    (end,) = ends_on_ranks(1, killed_in_its_third_save, [*words, "--save-every", "1"])
    assert end.killed
    assert (killed / "checkpoint-3" / "outsize").is_dir()
    capsys.readouterr()
    assert main(["train", "--resume", str(killed)]) == 0
    assert f"loading {killed / 'checkpoint-2'} ..." in capsys.readouterr().out
    assert history(killed) == whole.losses and history(killed, "eval_loss") == history(whole.run, "eval_loss")


def test_run_that_stops_by_time_says_so_and_how_to_go_on(
    words: list[str], whole: Whole, tmp_path: Path, capsys: Capture
) -> None:
    assert main([*words, "--minutes", "0.0001"]) == 0
    assert "stopped: 0.0001 minutes are over (step 1 of 6); the newest checkpoint is" in capsys.readouterr().out
    assert main(["train", "--resume", str(tmp_path / "run"), "--minutes", "0"]) == 0
    assert history(tmp_path / "run") == whole.losses


def test_a_full_disk_is_told_with_the_way_on_though_the_report_fails_too(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "the drive")

    monkeypatch.setattr(Trainer, "train", full)
    monkeypatch.setattr(reporting, "write_report", full)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "the report could not be written" in said and "'the drive'; there is no checkpoint to go on from" in said


def test_a_full_disk_that_torch_hides_is_told_with_the_way_on(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 8384 vs 8278")
    monkeypatch.setattr(Trainer, "_save_rng_state", Mock(side_effect=hidden))
    assert main([*words, "--save-every", "2"]) == 2
    found = capsys.readouterr().err.strip().splitlines()[-1]
    assert found.startswith("outsize: [Errno 5] torch.save could not write a file of the checkpoint; "), found
    assert "there is no checkpoint to go on from" in found and str(tmp_path / "run") in found


def test_run_that_diverges_ends_in_one_line_with_the_way_on(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert main([*words, "--lr", "1e30", "--clip", "0", "--save-every", "1", "--warmup", "0"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "the training diverged at step" in error
    assert "Nothing was updated. Lower the learning rate (--lr);" in error and "zero_grad" not in error
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


def test_a_run_whose_tokenizer_is_damaged_says_which(whole: Whole, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(whole.run, tmp_path / "run")
    (tmp_path / "run" / "corpus" / "tokenizer.json").write_text("{")
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "7"]) == 2
    assert f"the tokenizer in {tmp_path / 'run' / 'corpus'} cannot be read" in capsys.readouterr().err


def test_a_run_whose_tokens_are_cut_short_says_which(whole: Whole, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(whole.run, tmp_path / "run")
    tokens = tmp_path / "run" / "corpus" / "train.tokens"
    os.truncate(tokens, 8)
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "7"]) == 2
    assert f"{tokens} is cut short: remove {tokens.parent}, and the run makes it again" in capsys.readouterr().err


def test_a_folder_whose_name_is_not_utf_8_is_named(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert main([*words, "--run", os.fsdecode(os.fsencode(tmp_path) + b"/\xff")]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path) in said and "is not UTF-8" in said and said.count("\n") == 1


def test_new_run_takes_no_folder_that_holds_one(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "options.json").write_text("{}")
    assert main(words) == 2
    assert "run holds a run that has saved no checkpoint; remove the folder if" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run")]) == 2
    assert "no complete checkpoint in" in capsys.readouterr().err
    checkpoint = tmp_path / "run" / "checkpoint-1"
    (checkpoint / "outsize").mkdir(parents=True)
    (checkpoint / "outsize" / "manifest.json").touch()
    (checkpoint / "trainer_state.json").write_text('{"global_step": 1}')
    assert main(words) == 2
    assert "run holds a run already; go on with it by --resume" in capsys.readouterr().err


def test_two_commands_never_train_in_one_folder(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run").mkdir()
    other = locked(tmp_path / "run")
    assert main(words) == 2
    assert "another `outsize train` is at work in" in capsys.readouterr().err
    assert (tmp_path / "run").exists()
    os.close(other)


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


def test_two_ranks_train_and_resume_what_one_trains(words: list[str], whole: Whole, tmp_path: Path) -> None:
    two = tmp_path / "two"
    shutil.copytree(whole.run / "corpus", two / "corpus")  # a rank of a test may not start the process of the tokenizer
    again = [*words, "--run", str(two), "--save-every", "3"]
    resumed = ["train", "--resume", str(two / "checkpoint-3")]
    wrong = [*words, "--run", str(tmp_path / "three"), "--batch", "3"]
    (tmp_path / "taken").mkdir()
    other = locked(tmp_path / "taken")
    taken = [*words, "--run", str(tmp_path / "taken")]
    without = [*words, "--run", str(tmp_path / "four"), "--text", str(tmp_path / "none")]
    (first, *others), same = run_on_ranks(2, on_two_ranks, two, again, resumed, wrong, taken, without)
    os.close(other)
    assert [first, *others] == same and first[0] == 0 and others == [first, *[(2, first[1])] * 3]
    assert first[1] == pytest.approx(whole.losses, rel=1e-4)
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
    "left_seconds": 3725.0,
}


def test_figures_of_a_step_are_the_same_in_a_line_and_in_the_panel() -> None:
    from rich.console import Console

    tiers = {"memory": (200 << 20, 256 << 20), "disk": (1 << 30, 4 << 30)}
    rows = watch.figures({**RECORD, "skipped_steps": 2}, {"eval_loss": 7.5, "step": 2}, tiers)
    assert rows["loss"] == "7.000, held-out 7.500 at step 2, gradient norm 1.00, lr 1.0e-03, 2 steps skipped"
    assert rows["step"] == "4.00 s: compute 3.00, wait for disk 1.00, update 2.00 behind; 128 tokens/s"
    assert rows["disk"] == "3.0 GiB read, 2.0 GiB written a step, 1.2 GiB/s"
    assert rows["tiers"] == "memory 200.0 MiB of 256.0 MiB; disk 1.0 GiB of 4.0 GiB"
    assert rows["left"] == "1:02:05"
    assert rows["memory"] == "400.0 MiB over the imports for 2.0 GiB of state"
    for width in (110, 80):
        console = Console(width=width)
        with console.capture() as shown:
            console.print(watch._panel(RECORD, rows, 150))
        assert "step 3 of 150" in shown.get() and "1:02:05" in shown.get()
        assert all(text.split(",")[0].split(";")[0] in shown.get() for text in rows.values())
        assert {len(line) for line in shown.get().splitlines()} == {width}


def test_report_is_written_where_there_was_a_step(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text(
        '{"steps": 9, "model": null, "text": ["<here>"], "batch": 1, "seq_len": 2, "seed": 0}'
    )
    assert not reporting.write_report(tmp_path, [{"step": 0, "eval_loss": 9.0}])
    assert [path.name for path in tmp_path.iterdir()] == ["options.json"]
    log = [RECORD, {"step": 3, "eval_loss": 9.0}, {"step": 3, "saved": True}, {"step": 3, "sample": "x < y"}]
    assert reporting.write_report(tmp_path, [*log, {"step": 3, "peak_bytes": 500 << 20}])
    page = (tmp_path / "report.html").read_text()
    for words in ("3 of 9", "x &lt; y", "&lt;here&gt;", "500.0 MiB", "saved at step", 'src="report.png"'):
        assert words in page


def test_report_of_a_run_is_written_again(whole: Whole, tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole.run, run)
    before = (run / "report.html").read_text()
    for path in run.glob("report.*"):
        path.unlink()
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_text() == before and (run / "report.png").exists()
    (run / "history.json").write_text("[")  # as where the run was killed
    assert main(["report", str(run)]) == 0
    assert "6 of 6" in (run / "report.html").read_text()
    assert capsys.readouterr().out.count(f"report: {run / 'report.html'}\n") == 2
    for path in run.glob("checkpoint-*"):
        shutil.rmtree(path)
    assert main(["report", str(run)]) == 2
    assert "has no step yet" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "it has no options.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("configuration", "told"),
    [
        ({"model_type": "t5"}, "a model of type 't5' does not continue text"),
        ({"model_type": "bert"}, "'bert' sees the token that it is to predict; set is_decoder to true"),
        ({"model_type": "gpt2", "n_positions": 8}, "--seq-len is 16 but max_position_embeddings of the model is 8"),
    ],
)
def test_a_model_that_cannot_learn_to_continue_text_is_refused(
    configuration: dict[str, Any], told: str, words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(configuration))
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["bart", "gpt2", "llama", "mpt", "xlnet"])
def test_models_that_continue_text_are_taken(name: str) -> None:
    models.check_language_model(transformers.AutoConfig.for_model(name), 16)
