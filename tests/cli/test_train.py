"""`outsize train` from the first line to the export: once on a plain-torch engine, once on the real one."""

import errno
import os
import resource
import shlex
import shutil
import signal
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outsize
from outsize.cli import main, metrics, train
from outsize.move.transfer import Promise

FEW = ["--batch", "2", "--seq-len", "16", "--minutes", "0", "--warmup", "2", "--eval-every", "2", "--lr", "0.01"]


def arguments(text: Path, model: Path, out: Path, *more: str) -> list[str]:
    return ["train", "--text", str(text), "--model", str(model), "--out", str(out), *FEW, *more]


def losses(run: Path) -> list[float]:
    return [record.loss for record in metrics.read(run / "metrics.jsonl")]


def check_files(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    tokens = tokenizer("def function", return_tensors="pt").input_ids
    assert torch.isfinite(model(input_ids=tokens).logits).all()
    assert tokenizer.decode(tokens[0]) == "def function"
    assert model.config.use_cache


def resume_is_exact(text: Path, model: Path, out: Path, *more: str) -> None:
    """Steps 4 and 5, taken again from the checkpoint of step 3, see the same losses bit for bit."""
    words = arguments(text, model, out, "--name", "run", "--steps", "5", "--save-every", "3", *more)
    assert main(words) == 0
    whole = losses(out / "run")
    assert main([*words, "--resume", str(out / "run" / "checkpoints" / "step-3")]) == 0
    assert losses(out / "run") == whole
    assert len(whole) == 5


@pytest.mark.slow
def test_run_shows_and_leaves_everything(
    fake_engine: Any, text: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "default"
    assert main(arguments(text, tiny_model, tmp_path / "runs", "--steps", "6", "--save-every", "2")) == 0
    out = capsys.readouterr().out
    assert out.startswith("loading ...\na plan\n")
    for part in (
        "held-out loss before:",
        " held-out ",
        "after 6 steps",
        "a sample:",
        "peak RSS:",
        "a table of memory",
    ):
        assert part in out
    records = metrics.read(run / "metrics.jsonl")
    assert [record.step for record in records] == list(range(1, 7))
    assert [record.held_out_loss is not None for record in records] == [False, True, False, True, False, False]
    assert records[-1].bytes_read == 3_000_000
    assert records[-1].total_read == 18_000_000
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-4", "step-6"]
    check_files(run)


@pytest.mark.slow
def test_resume_is_exact_on_plain_torch(fake_engine: Any, text: Path, tiny_model: Path, tmp_path: Path) -> None:
    resume_is_exact(text, tiny_model, tmp_path / "runs")


@pytest.mark.slow
def test_interruption_saves_and_says_how_to_go_on(
    fake_engine: Any,
    text: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append = metrics.append

    def append_and_interrupt(path: Path, record: metrics.Record) -> None:
        append(path, record)
        if record.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    words = arguments(text, tiny_model, tmp_path / "runs", "--steps", "4")
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(metrics, "append", append_and_interrupt)
    assert main(words) == 130
    monkeypatch.setattr(metrics, "append", append)
    assert signal.getsignal(signal.SIGINT) is before
    command = last_command(capsys)
    assert main(command) == 0
    assert [record.step for record in metrics.read(tmp_path / "runs" / "default" / "metrics.jsonl")] == [1, 2, 3, 4]


def signals_after(monkeypatch: pytest.MonkeyPatch, step: int, *signals: signal.Signals) -> None:
    append = metrics.append

    def append_and_signal(path: Path, record: metrics.Record) -> None:
        append(path, record)
        for number in signals if record.step == step else ():
            os.kill(os.getpid(), number)

    monkeypatch.setattr(metrics, "append", append_and_signal)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_termination_exits_as_of_its_signal(
    times: int, fake_engine: Any, text: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals_after(monkeypatch, 2, *[signal.SIGTERM] * times)
    assert main(arguments(text, tiny_model, tmp_path / "runs", "--steps", "4")) == 143


@pytest.mark.slow
def test_second_interruption_says_whether_and_how_to_go_on(
    fake_engine: Any,
    text: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = tmp_path / "runs"
    signals_after(monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    assert main(arguments(text, tiny_model, runs, "--steps", "4")) == 130
    assert capsys.readouterr().err == "outsize: interrupted; there is no checkpoint to go on from\n"
    assert main(arguments(text, tiny_model, runs, "--steps", "4", "--save-every", "2", "--name", "other")) == 130
    checkpoint, command = runs / "other/checkpoints/step-2", f"outsize train --out {runs} --name other --resume"
    said = f"outsize: interrupted; the newest checkpoint is {checkpoint}; go on with: {command}\n"
    assert capsys.readouterr().err == said


def lose_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """As where the disk is found to be full behind the training."""
    save = outsize.save

    def save_behind(path: str, *args: Any, **fields: Any) -> Any:
        save(path, *args, **fields)
        saving = Promise()
        if path.endswith(f"step-{step}"):
            shutil.rmtree(path)
            saving.break_(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path))
        else:
            saving.keep()
        return saving

    monkeypatch.setattr(outsize, "save", save_behind)


@pytest.mark.slow
def test_a_last_checkpoint_that_is_lost_behind_the_training_fails_the_run(
    fake_engine: Any,
    text: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = tmp_path / "runs"
    lose_the_last_checkpoint(monkeypatch, 3)
    assert main(arguments(text, tiny_model, runs, "--steps", "3", "--save-every", "2", "--name", "run")) == 1
    said = capsys.readouterr()
    lost = f"[Errno 28] No space left on device: '{runs}/run/checkpoints/step-3'"
    way_on = f"the newest checkpoint is {runs}/run/checkpoints/step-2; go on with: outsize train"
    assert f"outsize: the checkpoint of step 3 could not be completed ({lost}); {way_on}" in said.err
    assert "checkpoint:" not in said.out
    assert "model:      " in said.out and (runs / "run/report.png").exists()  # all else is there


@pytest.mark.slow
def test_an_interrupted_run_promises_no_checkpoint_that_was_lost(
    fake_engine: Any,
    text: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose_the_last_checkpoint(monkeypatch, 2)
    signals_after(monkeypatch, 2, signal.SIGINT)
    assert main(arguments(text, tiny_model, tmp_path / "runs", "--steps", "4")) == 1
    said = capsys.readouterr()
    assert "the checkpoint of step 2 could not be completed" in said.err
    assert "there is no checkpoint to go on from" in said.err
    assert "interrupted after" not in said.out


@pytest.mark.slow
@pytest.mark.parametrize("extra", [None, {"step": 1}])
def test_a_checkpoint_of_another_script_is_refused_with_the_remedy(
    extra: Any,
    fake_engine: Any,
    text: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = tmp_path / "mine" / "step-1"
    checkpoint.mkdir(parents=True)
    monkeypatch.setattr(outsize, "load", lambda *_: extra)
    words = arguments(text, tiny_model, tmp_path / "runs", "--name", "b", "--resume", str(checkpoint))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"outsize: {checkpoint} is not of a run of `outsize train`; go on in the script that saved it" in error
    assert not (tmp_path / "runs").exists()


def test_records_outlive_a_disk_that_is_full_as_they_are_cut(tmp_path: Path) -> None:
    measures = [field.name for field in fields(metrics.Record) if field.default is MISSING]
    file = tmp_path / "metrics.jsonl"
    for step in range(1, 21):
        metrics.append(file, metrics.Record(**{**dict.fromkeys(measures, 0), "step": step}))
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            metrics.keep_until(file, 12)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before and os.listdir(tmp_path) == ["metrics.jsonl"]
    metrics.keep_until(file, 12)
    assert [record.step for record in metrics.read(file)] == list(range(1, 13))


@pytest.mark.slow
def test_run_that_stops_by_time_says_so_and_how_to_go_on(
    fake_engine: Any,
    text: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    append = metrics.append

    def append_and_wait(path: Path, record: metrics.Record) -> None:
        append(path, record)
        clock[0] += 60

    monkeypatch.setattr(metrics, "append", append_and_wait)
    assert main([*arguments(text, tiny_model, tmp_path / "runs", "--steps", "5000"), "--minutes", "2"]) == 0
    out = capsys.readouterr().out
    assert "step 2/5000" in out
    assert "\nstopped: 2 minutes are over (step 2 of 5000); go on with:\n" in out
    assert main(shlex.split(out.splitlines()[-1])[1:]) == 0
    assert "stopped: 4 minutes are over (step 4 of 5000)" in capsys.readouterr().out


@pytest.mark.slow
def test_resumed_run_needs_no_option_and_no_text(
    fake_engine: Any,
    text: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments(text, Path("tiny"), Path("runs"), "--steps", "3", "--save-every", "2")) == 0
    whole = losses(Path("runs/default"))
    shutil.rmtree(text)
    capsys.readouterr()
    assert main(["train", "--resume"]) == 0
    out = capsys.readouterr().out
    assert "loading, to go on with runs/default ..." in out
    assert "going on after step 3 of 3" in out
    assert main(["train", "--resume", "runs/default/checkpoints/step-2"]) == 0
    assert main(["train", "--resume", "runs/default", "--steps", "3"]) == 0
    Path("corpus").mkdir()
    Path("corpus/mine.txt").write_text("mine")
    Path("elsewhere").mkdir()
    assert main(["train", "--resume", "elsewhere"]) == 2
    assert os.listdir("corpus") == ["mine.txt"] and not Path("disk").exists()
    assert losses(Path("runs/default")) == whole
    assert main(["train", "--resume", "--steps", "4"]) == 0
    assert main(["train", "--resume"]) == 0
    assert len(losses(Path("runs/default"))) == 4
    assert main(["train", "--resume", "runs/default/checkpoints/step-3", "--name", "branch"]) == 0
    assert main(["train", "--resume", "--name", "branch"]) == 0
    assert losses(Path("runs/branch")) == losses(Path("runs/default"))[3:]
    assert main(["train", "--resume", "runs/default/checkpoints/step-3", "--name", "branch"]) == 2
    assert "runs/branch holds another run than" in capsys.readouterr().err


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_resume_that_is_refused_changes_no_file(
    known: bool, fake_engine: Any, text: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(text, tiny_model, tmp_path / "runs", "--name", "run", "--steps", "2")
    assert main(words) == 0
    if not known:  # as of a run that was made before its options were written
        (tmp_path / "runs" / "run" / "options.json").unlink()
    other = tmp_path / "other.txt"
    other.write_text("other words " * 3000)
    before = files_of(tmp_path / "runs")
    assert main([*words, "--resume", "--text", str(other)]) == 2
    assert ("was made with --text" if known else "was made from other text") in capsys.readouterr().err
    assert files_of(tmp_path / "runs") == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [["--host-memory", "1 apple"], ["--seq-len", "100000"], ["--minutes", "0.0001"], ["--activations", "x"]]
)
def test_run_that_is_refused_leaves_nothing(
    wrong: list[str], text: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(text, tiny_model, tmp_path / "runs", *wrong)) == 2
    assert wrong[0] in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_text_is_looked_for_before_all_else(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path / "none", tiny_model, tmp_path / "runs")) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "none: no such file or folder" in said.err


def last_command(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return shlex.split(capsys.readouterr().out.strip().splitlines()[-1])[1:]


@pytest.mark.slow
def test_time_that_is_over_before_the_first_step_is_refused(
    fake_engine: Any, text: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(text, tiny_model, tmp_path / "runs"), "--minutes", "0.0001"]) == 2
    assert "--minutes 0.0001 were over before the first step" in capsys.readouterr().err


@pytest.mark.slow
def test_resume_with_other_data_is_refused(
    fake_engine: Any, text: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(text, tiny_model, tmp_path / "runs", "--name", "run", "--steps", "2")
    assert main(words) == 0
    assert main([*words, "--seed", "5", "--resume"]) == 2
    assert "run run was made with --seed 0, not with 5; give the same or leave it out" in capsys.readouterr().err
    (tmp_path / "runs" / "run" / "options.json").unlink()
    assert main([*words, "--seed", "5", "--resume"]) == 2
    assert "give the same text, --batch, --seq-len and --seed" in capsys.readouterr().err


@pytest.mark.slow
def test_run_on_disk_is_exactly_resumed_and_opens_in_transformers(text: Path, tiny_model: Path, tmp_path: Path) -> None:
    resume_is_exact(text, tiny_model, tmp_path / "runs")
    check_files(tmp_path / "runs" / "run")
    first, *_, last = losses(tmp_path / "runs" / "run")
    assert last < first


@pytest.mark.slow
def test_plan_of_70_b_allocates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = metrics.process_memory("VmHWM")
    assert main(["plan", "--shape", "70b", "--device", "cpu", "--host-memory", "2TiB"]) == 0
    assert "68,976.6 M parameters" in capsys.readouterr().out
    assert metrics.process_memory("VmHWM") - before < 500e6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_run_with_compact_state_and_delayed_updates_is_exactly_resumed(
    text: Path, tiny_model: Path, tmp_path: Path, dtype: str
) -> None:
    options = ["--dtype", dtype, "--state-format", "compact", "--delayed-update", "2"]
    resume_is_exact(text, tiny_model, tmp_path / "runs", *options)
    check_files(tmp_path / "runs" / "run")
