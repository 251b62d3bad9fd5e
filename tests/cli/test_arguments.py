"""The command line takes what its help says and answers a mistake in one line."""

import builtins
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from outsize.cli import build_parser, main, writing
from outsize.cli.folder import RunFolder
from outsize.cli.job import Job


def parse(*words: str) -> Job:
    return Job.parse(build_parser().parse_args(["train", *words]))


def one_line_error(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_no_arguments_give_the_main_job() -> None:
    assert parse() == Job()


def test_main_job_rests_on_disk_within_256_mib() -> None:
    fields = Job().config_fields(RunFolder(Path("runs/default")).disk)
    assert fields["host_memory"] == "256MiB"
    assert {fields[kind] for kind in ("params", "grads", "states")} == {"disk"}
    assert fields["disk"] == ["runs/default/disk"]
    assert fields["compute_dtype"] is torch.float32


def test_every_option_reaches_the_job() -> None:
    job = parse("--text", "a", "b", "--disk", "d", "--dtype", "bf16", "--steps", "7", "--minutes", "0", "--clip", "0")
    assert job.text == (Path("a"), Path("b"))
    assert job.disk == (Path("d"),)
    assert (job.dtype, job.steps, job.seconds, job.clip) == ("bf16", 7, None, 0.0)


def test_resume_command_names_the_run_whatever_its_name_and_place(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "some where" / "mine")
    again = parse(*shlex.split(folder.command("--minutes", "4"))[2:])
    assert (again.out, again.name, again.resume, again.minutes) == (tmp_path / "some where", "mine", "latest", 4.0)


def test_resumed_run_has_its_own_options_but_those_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = parse(
        "--text", "a b", "c", "--steps", "9", "--lr", "0.01", "--model", "m", "--dtype", "bf16", "--batch", "2"
    )
    RunFolder(tmp_path).write_options(made)
    stored = RunFolder(tmp_path).read_options()
    words = ["--resume", "--lr", "0.001", "--steps", "150", "--text", "a b", str(tmp_path / "c")]
    job = parse(*words).resumed(words, stored, "run")
    assert [path.absolute() for path in job.text] == [tmp_path / "a b", tmp_path / "c"]
    assert (job.model, job.dtype, job.batch, job.minutes) == (tmp_path / "m", "bf16", 2, 8.0)
    assert (job.lr, job.steps) == (0.001, 150)  # also where the option is given as its default is


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "4"], "run r was made with --batch 2, not with 4; give the same or leave it out"),
        (["--text", "b"], "run r was made with --text /a, not with .*/b; give the same"),
        (["--model", "m"], "run r was made without --model, not with .*/m; give the same or leave it out"),
        (["--seq-len", "64"], "run r was made with --seq-len 128"),
        (["--seed", "1"], "run r was made with --seed 0"),
    ],
)
def test_resumed_run_keeps_what_it_learns(words: list[str], message: str) -> None:
    stored = parse("--text", "/a", "--batch", "2").options()
    with pytest.raises(ValueError, match=message):
        parse(*words).resumed(words, stored, "r")


@pytest.mark.parametrize(
    ("content", "why"),
    [("", "Expecting value"), ("[1]", "no JSON object"), ('{"text": []}', "it lacks model, batch"), ("ä", "decode")],
)
def test_options_that_no_run_has_written_are_named_with_the_remedy(
    content: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.checkpoint(1).mkdir(parents=True)
    folder.options.write_text(content, encoding="latin-1")
    assert main(["train", "--resume", "--out", str(tmp_path), "--name", "run"]) == 2
    error = one_line_error(capsys)
    assert f"{folder.options} does not hold the options of a run" in error and why in error
    assert "remove it, and give the options that the run was made with" in error


def test_options_are_written_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = RunFolder(tmp_path / "run"), tmp_path / "elsewhere"
    folder.path.mkdir()
    elsewhere.write_text("precious")
    monkeypatch.setattr(writing.secrets, "token_hex", lambda count: "0" * 2 * count)
    for name in ("options.new", ".options.json.new-" + 12 * "0", "options.json"):
        (folder.path / name).symlink_to(elsewhere)
    with pytest.raises(FileExistsError):  # not even by the name that is guessed right
        folder.write_options(Job())
    monkeypatch.undo()
    folder.write_options(Job())
    assert elsewhere.read_text() == "precious"
    assert not folder.options.is_symlink() and folder.read_options() == Job().options()


def test_newest_run_is_the_one_that_saved_last(tmp_path: Path) -> None:
    for age, (name, step) in enumerate([("b", 7), ("c", 3), ("a", 900)]):
        checkpoint = RunFolder(tmp_path / name).checkpoint(step)
        checkpoint.mkdir(parents=True)
        os.utime(checkpoint, (1000 - age, 1000 - age))
    (tmp_path / "without").mkdir()
    assert RunFolder.choose(Job(out=tmp_path, resume="latest")) == RunFolder(tmp_path / "b")
    assert RunFolder.choose(Job(out=tmp_path, resume="latest", name="c")) == RunFolder(tmp_path / "c")


def test_checkpoint_or_folder_of_them_names_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.checkpoint(3).mkdir(parents=True)
    monkeypatch.chdir(folder.checkpoint(3).parent)
    for given in ("step-3", str(folder.checkpoint(3)), str(folder.checkpoint(3).parent)):
        assert RunFolder.choose(Job(resume=given)) == folder


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"outsize {version('outsize')}\n"


def test_run_without_a_step_leaves_nothing_that_was_not_there(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "here" / "run")
    with pytest.raises(ValueError, match="refused"), folder.removed_if_untrained():
        folder.corpus.mkdir(parents=True)
        raise ValueError("refused")
    assert not any(tmp_path.iterdir())
    folder.corpus.mkdir(parents=True)
    with pytest.raises(ValueError, match="refused"), folder.removed_if_untrained():
        raise ValueError("refused")
    assert folder.corpus.exists()
    saved = RunFolder(tmp_path / "saved")
    with saved.removed_if_untrained():
        saved.checkpoint(0).mkdir(parents=True)  # interrupted before the first step
    assert saved.checkpoint(0).exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "--steps", "0"], "--steps is 0"),
        (["train", "--lr", "-1"], "--lr is -1"),
        (["train", "--lr", "nan"], "--lr is nan"),
        (["train", "--minutes", "-2"], "--minutes is -2"),
        (["train", "--name", "../up"], "--name is '../up'"),
        (["train", "--model", "no/such/model"], "--model no/such/model"),
        (["train", "--resume", "no/such/step"], "--resume no/such/step"),
        (["train", "--resume", "--name", "never"], "no checkpoint"),
        (["train", "--resume"], "--resume: no run in runs has a checkpoint"),
        (["train", "--text", "no/such/text"], "--text no/such/text"),
        (["plan", "--model", "no/such/model"], "--model no/such/model"),
        (["probe", "--disk", "no/such/folder"], "no/such/folder"),
        (["probe", "--megabytes", "1"], "--megabytes is 1"),
    ],
)
def test_mistake_gives_one_line_and_code_2(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert part in one_line_error(capsys)
    assert not any(tmp_path.iterdir())


def test_missing_extra_names_the_pip_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_transformers(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_transformers)
    assert main(["plan", "--shape", "7b"]) == 2
    assert "needs transformers: pip install transformers" in one_line_error(capsys)


@pytest.mark.slow
def test_importing_outsize_leaves_the_command_line_out() -> None:
    rooms = ("outsize.cli", "transformers", "rich", "matplotlib")
    code = f"import sys, outsize; print([name for name in {rooms} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_new_run_takes_no_folder_that_holds_one(tmp_path: Path) -> None:
    for name in ("default", "default-2", "mine"):
        (tmp_path / name).mkdir()
        RunFolder(tmp_path / name).metrics.touch()
    assert RunFolder.choose(Job(out=tmp_path)).name == "default-3"
    with pytest.raises(ValueError, match="holds a run already"):
        RunFolder.choose(Job(out=tmp_path, name="mine"))


def test_latest_checkpoint_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (5, 100, 20):
        folder.checkpoint(step).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-900.partial").mkdir()
    assert folder.to_resume("latest") == folder.checkpoint(100).parent
