"""The command line takes what its help says and answers a mistake in one line."""

import argparse
import builtins
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
from outsize.api import probing
from outsize.cli import build_parser, main, options, probe, reporting
from outsize.cli.options import config_fields, find_run


def parse(*words: str) -> argparse.Namespace:
    args = build_parser().parse_args(["train", *words])
    args.words = list(words)
    return args


def made(run: Path, *words: str, steps: tuple[int, ...] = (3,)) -> Path:
    """A run as it is after it was saved at these steps."""
    for step in steps:
        (run / f"checkpoint-{step}" / "outsize").mkdir(parents=True)
        (run / f"checkpoint-{step}" / "outsize" / "manifest.json").touch()
        (run / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    options.options_file(run).write_text(json.dumps(vars(parse(*words))))
    return run


def test_main_job_rests_on_disk_within_256_mib() -> None:
    fields = config_fields(parse())
    assert fields["host_memory"] == "256MiB"
    assert {fields[kind] for kind in ("params", "grads", "states")} == {"disk"}
    assert fields["compute_dtype"] is torch.float32
    assert (parse().steps, parse().minutes) == (150, 8.0)


def test_resumed_run_has_its_own_options_but_those_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "run", "--text", "a b", "c", "--steps", "9", "--lr", "0.01", "--dtype", "bf16", "--batch", "2")
    args = parse("--resume", "run", "--lr", "0.001", "--steps", "150", "--text", "a b", str(tmp_path / "c"))
    found, run, checkpoint = find_run(args)
    assert (run, checkpoint) == (tmp_path / "run", str(tmp_path / "run" / "checkpoint-3"))
    assert found.text == [str(tmp_path / "a b"), str(tmp_path / "c")]
    assert (found.dtype, found.batch, found.minutes, found.lr, found.steps) == ("bf16", 2, 8.0, 0.001, 150)


@pytest.mark.parametrize("words", ["--batch 4", "--text b", "--model m", "--seq-len 64", "--seed 1"])
def test_resumed_run_keeps_what_it_learns(words: str, tmp_path: Path) -> None:
    run = made(tmp_path / "run", "--text", "/a", "--batch", "2")
    with pytest.raises(ValueError, match=f"was made with {words.split()[0]} .*give the same or leave it out"):
        find_run(parse("--resume", str(run), *words.split()))


def test_run_that_saved_last_is_resumed_from_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, (name, steps) in enumerate([("b", (7, 100)), ("c", (3,)), ("a", (900,))]):
        run = made(tmp_path / "runs" / name, steps=steps)
        for file in run.glob("*/trainer_state.json"):
            os.utime(file, (1000 - age, 1000 - age))
    assert find_run(parse("--resume"))[2] == str(tmp_path / "runs" / "b" / "checkpoint-100")
    assert find_run(parse("--resume", "runs/c"))[2] == str(tmp_path / "runs" / "c" / "checkpoint-3")
    assert find_run(parse("--resume", "runs/b/checkpoint-7"))[1:] == (
        tmp_path / "runs" / "b",
        str(tmp_path / "runs" / "b" / "checkpoint-7"),
    )
    (tmp_path / "runs" / "b" / "checkpoint-7" / "trainer_state.json").write_text("")  # a loss of power
    with pytest.raises(FileNotFoundError, match="no complete checkpoint in .*checkpoint-7"):
        find_run(parse("--resume", "runs/b/checkpoint-7"))
    made(tmp_path / "runs" / "default")
    made(tmp_path / "runs" / "default-2")
    assert find_run(parse())[1] == tmp_path / "runs" / "default-3"


@pytest.mark.parametrize("content", ["", "[1]", '{"text": []}', "ä"])
def test_options_that_no_run_has_written_are_named(content: str, tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    options.options_file(run).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"options\.json does not hold the options of a run"):
        find_run(parse("--resume", str(run)))
    with pytest.raises(ValueError, match=r"options\.json does not hold the options of a run"):
        reporting.write_report(run, [{"step": 1, "seconds": 1.0}])


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert outsize.__version__ == version("outsize")
    assert capsys.readouterr().out == f"outsize {outsize.__version__}\n"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "--steps", "0"], "--steps: it is 0; it must be 1 or more"),
        (["train", "--seed", str(2**32)], "--seed: it is 4294967296; it must be 4294967295 or less"),
        (["train", "--steps", "x"], "--steps: invalid number value: 'x'"),
        (["train", "--lr", "nan"], "--lr: it is nan"),
        (["train", "--minutes", "-2"], "--minutes: it is -2"),
        (["train", "--stage", "4"], "--stage"),
        (["train", "--model", "no/such/model"], "no/such/model: no configuration there"),
        (["train", "--resume", "a", "--run", "b"], "b names a new run, and --resume"),
        (["train", "--resume"], "--resume: no complete checkpoint in"),
        (["train", "--run", __file__], "test_arguments.py is a file; name a folder"),
        (["train", "--text", "no/such/text"], "no/such/text: no such file or folder"),
        (["plan", "--model", "no/such/model"], "--model no/such/model"),
        (["probe", "--disk", "no/such/folder"], "no/such/folder"),
        (["probe", "--megabytes", "1"], "--megabytes: it is 1"),
    ],
)
def test_mistake_gives_one_line_and_code_2(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert part in error and error.count("\n") == 1
    assert "model states" not in out, "the plan comes after the mistakes"
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
    assert "needs transformers: pip install transformers" in capsys.readouterr().err


@pytest.mark.slow
def test_importing_outsize_imports_nothing_and_asking_for_help_leaves_the_extras_out() -> None:
    rooms = ("transformers", "rich", "matplotlib", "accelerate")
    code = f"""
import sys, outsize
assert "torch" not in sys.modules and "outsize.api" not in sys.modules
import outsize.optim, outsize.planning.layout  # in any order: a name stays what it is
outsize.load = "what somebody has set"
assert callable(outsize.plan) and outsize.optim.Lion and "plan" in dir(outsize) and not hasattr(outsize, "plans")
assert outsize.load == "what somebody has set"
import outsize.cli as c; c.build_parser(); print([name for name in {rooms} if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="module 'outsize' has no attribute 'prepared'"):
        outsize.prepared  # noqa: B018


def test_probe_prints_what_it_measures_and_leaves_nothing_on_the_drive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    less = {"WIDTHS": (64,), "SUSTAINED_SECONDS": 0.0, "COPIED_BYTES": 1 << 16, "UPDATED_NUMEL": 1 << 12}
    for name, value in less.items():
        monkeypatch.setattr(probing, name, value)
    (tmp_path / "drive").mkdir()
    assert main(["probe", "--disk", str(tmp_path / "drive"), "--device", "cpu", "--megabytes", "16"]) == 0
    printed = capsys.readouterr().out
    assert "disk read" in printed and "GFLOP/s" in printed and "typical" not in printed
    assert not any((tmp_path / "drive").iterdir())
    assert probe.STEP_READ_BYTES == 20


def test_the_command_is_the_package_s_script() -> None:
    (script,) = entry_points(group="console_scripts", name="outsize")
    assert script.load() is main


@pytest.mark.parametrize("log", ["null", "[3]", '{"log_history": []}'])
def test_a_log_that_is_none_is_passed_over_by_report(
    log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (made(tmp_path) / "history.json").write_text(log)
    assert main(["report", str(tmp_path)]) == 2
    assert "has no step yet" in capsys.readouterr().err


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "outsize", "--version"]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"outsize {outsize.__version__}\n"
    )


def test_a_command_that_is_interrupted_while_it_is_imported_ends_in_one_line() -> None:
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from outsize.cli import main; "
        "assert 'torch' not in sys.modules; sys.meta_path.insert(0, type('', (), {'find_spec': lambda *_: "
        "signal.raise_signal(signal.SIGINT)})); sys.exit(main(['--version']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "outsize: interrupted\n")
