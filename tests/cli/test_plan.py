"""`outsize plan` heeds each option or refuses it, and says what it assumed."""

import json
from pathlib import Path

import pytest

from outsize.cli import main, watch


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What it prints; what it says of a mistake when `code` is not 0."""
    assert main(["plan", *words]) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def table(capsys: pytest.CaptureFixture[str], *words: str) -> list[tuple[str, ...]]:
    """The rows of stages, each (stage, ZeRO, outsize)."""
    return [
        tuple(line.split()) for line in plan(capsys, *words).splitlines() if line[:1].isdigit() and " B " not in line
    ]


def test_table_of_stages_is_the_papers_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(capsys, "--parameters", "7.5e9", "--ranks", "64")
    assert [row[1] for row in rows] == ["120.00", "31.41", "16.64", "1.88"]
    assert [row[2] for row in rows] == ["105.00", "16.41", "16.41", "1.64"]


@pytest.mark.parametrize(
    ("words", "bytes_a_parameter"),
    [
        (["--dtype", "bf16"], 14.0),
        (["--dtype", "fp32"], 16.0),
        (["--dtype", "fp16"], 16.0),
        (["--state-format", "compact"], 8.125),
        (["--state-format", "compact", "--dtype", "fp32"], 10.125),
    ],
)
def test_table_of_stages_heeds_dtype_and_state_format(
    words: list[str], bytes_a_parameter: float, capsys: pytest.CaptureFixture[str]
) -> None:
    for _, paper, own in table(capsys, "--parameters", "1e9", *words):
        assert paper == "16.00"
        assert float(own) == pytest.approx(bytes_a_parameter, abs=0.006)


def test_a_mesh_is_given_as_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, "--shape", "70b", "--mesh", "pp=4,dp=8,tp=2", "--host-memory", "1TiB", "--device", "cpu")
    assert "64 ranks: 8 data x 2 tensor x 4 stages" in said
    assert "with 20 layers" in said


@pytest.mark.parametrize("mesh", ["pp", "pp=", "pp=0", "=4", "pp=4;dp=2"])
def test_what_is_no_mesh_is_refused(mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "write the size of each dimension" in plan(capsys, "--shape", "70b", "--mesh", mesh, code=2)


def test_table_of_stages_says_what_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, "--parameters", "1e9", "--dtype", "fp32", "--state-format", "compact")
    assert "parameters, gradients and AdamW states" in said
    assert "fp32 with compact states" in said


@pytest.mark.parametrize(
    "words",
    [["--host-memory", "1GiB"], ["--disk-space", "1TB"], ["--disk", "d"], ["--params", "disk"], ["--stage", "1"]],
)
def test_table_of_stages_refuses_what_needs_layers(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{words[0]} does not apply to --parameters" in plan(capsys, "--parameters", "1e9", *words, code=2)


@pytest.mark.parametrize("count", ["7.5B", "7.5b", "7500M", "7.5e9", "7.5e+9", "7500000K", "0.0075T", "7500000000"])
def test_count_has_a_suffix_or_an_exponent(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, "--parameters", count).startswith("7.5 B parameters, 1 rank:")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--parameters", "many"], "'many' is not a number of parameters; write it as"),
        (["--parameters", "1.2.3B"], "'1.2.3B' is not a number of parameters"),
        (["--parameters", "nan"], "'nan' is not a number of parameters"),
        (["--parameters", "0"], "'0' is not a number of parameters"),
        (["--shape", "7b", "--ranks", "x"], "--ranks: invalid number value: 'x'"),
        (["--shape", "7b", "--ranks", "0"], "--ranks: it is 0; it must be 1 or more"),
    ],
)
def test_count_that_is_none_is_named(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in plan(capsys, *words, code=2)


@pytest.mark.slow
def test_disk_space_alone_plans_for_a_drive_of_that_size(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shape", "7b", "--device", "cpu", "--host-memory", "8GiB", "--disk-space", "1TB"]
    assert "of 931.3 GiB" in plan(capsys, *words, "--params", "disk")


@pytest.mark.slow
def test_disk_without_a_drive_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, "--shape", "7b", "--device", "cpu", "--params", "disk", code=2)
    assert "--params disk needs a directory: pass --disk " in said


@pytest.mark.slow
def test_parameters_that_a_stage_keeps_whole_are_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shape", "7b", "--device", "cpu", "--host-memory", "8GiB", "--disk-space", "200GB"]
    said = plan(capsys, *words, "--ranks", "4", "--stage", "1", code=2)
    assert "use --params auto with --stage 3" in said
    assert "stages 1 and 2 keep whole parameters on the device" in said
    assert "raise --host-memory" in said


@pytest.mark.slow
def test_plan_of_70_b_allocates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = watch.process_memory("VmHWM")
    said = plan(capsys, "--shape", "70b", "--device", "cpu", "--host-memory", "2TiB")
    assert "68,976.6 M parameters" in said
    assert watch.process_memory("VmHWM") - before < 500e6


def test_a_step_is_simulated_and_traced(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trace = tmp_path / "step.json"
    words = ["--model", str(tiny_model), "--device", "cpu", "--host-memory", "1GiB"]
    said = plan(capsys, *words, "--seq-len", "16", "--batch", "2", "--trace", str(trace))
    assert said.startswith("predicted from typical figures")
    assert "tokens a second), bound by " in said and "one more GiB would save of a step: memory" in said
    assert json.loads(trace.read_text())["traceEvents"]
