"""The command line takes what its help says and answers a mistake in one line."""

import builtins
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outsize.cli import build_parser, main
from outsize.cli.job import Job, RunFolder


def parse(*words: str) -> Job:
    return Job.parse(build_parser().parse_args(["train", *words]))


def one_line_error(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_no_arguments_give_the_main_job() -> None:
    assert parse() == Job()


def test_main_job_rests_on_disk_within_256_mib() -> None:
    fields = Job().config_fields(RunFolder(Path("runs/default")))
    assert fields["host_memory"] == "256MiB"
    assert {fields[kind] for kind in ("params", "grads", "states")} == {"disk"}
    assert fields["disk"] == ["runs/default/disk"]
    assert fields["compute_dtype"] is torch.float32


def test_every_option_reaches_the_job() -> None:
    job = parse("--text", "a", "b", "--disk", "d", "--dtype", "bf16", "--steps", "7", "--minutes", "0", "--clip", "0")
    assert job.text == (Path("a"), Path("b"))
    assert job.disk == (Path("d"),)
    assert (job.dtype, job.steps, job.seconds, job.clip) == ("bf16", 7, None, 0.0)


def test_resume_command_parses_back_to_the_same_job() -> None:
    job = parse("--text", "a b", "c", "--steps", "9", "--lr", "0.01", "--out", "elsewhere", "--model", "m")
    words = Job.command(job, Path("elsewhere/default"), Path("elsewhere/default/checkpoints/step-3"))
    again = parse(*shlex.split(words)[2:])
    assert again.resume == "elsewhere/default/checkpoints/step-3"
    assert (again.text, again.steps, again.lr, again.model, again.out) == (
        job.text,
        9,
        0.01,
        Path("m"),
        Path("elsewhere"),
    )
    assert again.name == "default"


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
