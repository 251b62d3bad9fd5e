"""`outsize plan` heeds each option or refuses it, and says what it assumed."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import outsize
from outsize.cli import main, watch
from outsize.cli.largest import WIDEST, largest, layers_of, member
from outsize.planning.cluster import cluster_of
from outsize.planning.machine import seconds_on


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


@pytest.mark.parametrize("mesh", ["pp", "pp=", "pp=0", "=4", "pp=4;dp=2", "pp=4,pp=2"])
def test_what_is_no_mesh_is_refused(mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "write the size of each dimension" in plan(capsys, "--shape", "70b", "--mesh", mesh, code=2)


def test_an_unknown_dimension_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It would be taken for a data-parallel one."""
    said = plan(capsys, "--shape", "70b", "--mesh", "ppp=2,dp=2", code=2)
    assert "'ppp' is no dimension of a mesh; they are pp (stages), dp and copies (data), and tp (tensors)" in said


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


CLUSTER = {
    "nodes": 2,
    "accelerators": 4,
    "accelerator_memory": "10GB",
    "accelerator_bandwidth": "1TB",
    "accelerator_flops": 1e14,
    "accelerator_link": "100GB",
    "host_memory": "80GB",
    "host_bandwidth": "200GB",
    "host_link": "10GB",
    "cores": 64,
    "network": "50GB",
    "drives": 2,
    "drive_space": "2TB",
    "drive_read": "4GB",
    "drive_write": "2GB",
}


def test_a_cluster_gives_each_rank_its_share(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps(CLUSTER))
    quoted = (f"{name} = {json.dumps(value)}" for name, value in CLUSTER.items())
    (tmp_path / "own.toml").write_text("\n".join(quoted))
    cluster = cluster_of(str(tmp_path / "own.json"))
    if sys.version_info >= (3, 11):
        assert replace(cluster_of(str(tmp_path / "own.toml")), name=cluster.name) == cluster
    assert cluster.share(8) == (10e9, 20e9, 1e12)
    assert cluster.share(1) == (10e9, 80e9, 4e12)
    machine = cluster.machine(8)
    assert (machine.disk_read, machine.disk_write, machine.to_device) == (2e9, 1e9, 10e9)
    assert machine.seconds_of("bfloat16", 1e14, 0) == pytest.approx(1, rel=1e-4)
    assert not machine.measured
    near, far = (seconds_on(cluster.machine(ranks).collectives, 1e10) for ranks in (4, 8))
    assert near == pytest.approx(0.75 * 1e10 / 100e9, rel=1e-3)
    assert far == pytest.approx(0.5 * 1e10 / 50e9, rel=1e-3)
    with pytest.raises(ValueError, match=r"9 ranks need as many accelerators.*8 in all"):
        cluster.share(9)
    assert [cluster_of(name).ranks for name in ("dgx-2", "32xDGX-2", "laptop")] == [16, 512, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host_link": None}, "host_link is missing"),
        ({"host_link": 0}, "host_link is 0, which is not a size"),
        ({"drive_read": "0GB"}, "drive_read is '0GB', which is not a size"),
        ({"accelerators": 0}, "accelerators is 0; it must be an integer of at least 1"),
        ({"drives": 1.5}, "drives is 1.5; it must be an integer of at least 0"),
        ({"speed": 3}, "speed is unknown"),
        ({"accelerator_flops": 10**400}, "it must be at most 1e+18"),
    ],
)
def test_a_cluster_with_a_wrong_field_is_refused(
    change: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {name: value for name, value in {**CLUSTER, **change}.items() if value is not None}
    path = tmp_path / "own.json"
    path.write_text(json.dumps(found))
    said = plan(capsys, "--largest", "llama", "--cluster", str(path), code=2)
    assert words in said and str(path) in said


@pytest.mark.parametrize(
    ("wrong", "words"), [({"hidden_size": 0}, "ZeroDivisionError"), ({"num_attention_heads": 7}, "not a multiple")]
)
def test_a_configuration_that_makes_no_model_is_refused(
    wrong: dict[str, int], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, **wrong}))
    assert words in plan(capsys, "--model", str(tmp_path), code=2)


@pytest.mark.parametrize(
    ("field", "words"),
    [("host_memory", "a node has 4 B of host memory"), ("accelerator_memory", "accelerators of 4 B")],
)
def test_a_cluster_with_next_to_no_memory_is_too_small(
    field: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.json").write_text(json.dumps({**CLUSTER, field: 4}))
    said = plan(capsys, "--shape", "7b", "--cluster", str(tmp_path / "own.json"), "--ranks", "8", code=2)
    assert words in said and "is 0" not in said


def test_what_is_no_cluster_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, "--shape", "7b", "--cluster", "DGX-3", code=2)
    assert "'DGX-3' is no file, and no preset: these are DGX-2, DGX-A100, DGX-H100, gaming-PC, laptop" in said
    (tmp_path / "own.toml").write_text("[")
    assert "is neither JSON nor TOML" in plan(capsys, "--shape", "7b", "--cluster", f"{tmp_path}/own.toml", code=2)
    (tmp_path / "own.json").write_text("[1]")
    said = plan(capsys, "--shape", "7b", "--cluster", f"{tmp_path}/own.json", code=2)
    assert "own.json' holds a list; it must be a table of fields" in said
    said = plan(capsys, "--largest", "gpt", "--cluster", "laptop", "--seq-len", "128", code=2)
    assert "--seq-len does not apply to --largest" in said
    said = plan(capsys, "--parameters", "7B", "--cluster", "laptop", code=2)
    assert "--cluster does not apply to --parameters" in said
    said = plan(capsys, "--largest", "gpt", "--cluster", "laptop", "--mesh", "pp=2,dp=2", code=2)
    assert "4 ranks need as many accelerators" in said
    assert "(1 in all)" in said
    said = plan(capsys, "--largest", "gpt", "--cluster", "laptop", "--device", "cpu", code=2)
    assert "leave out --device cpu" in said
    unused = {name: value for name, value in CLUSTER.items() if name != "network"} | {"nodes": 1}
    (tmp_path / "own.json").write_text(json.dumps(unused))
    assert cluster_of(f"{tmp_path}/own.json").ranks == 4, "one node needs no network"


def test_a_prediction_says_that_it_was_not_measured_and_where_the_machine_has_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.json").write_text(json.dumps({**CLUSTER, "accelerator_memory": "100MB"}))
    said = plan(capsys, "--cluster", f"{tmp_path}/own.json", "--ranks", "1", "--seq-len", "128", "--batch", "64")
    assert said.startswith("predicted from the figures of cluster ")
    assert said.splitlines()[0].endswith(", which were not measured")
    assert "of 66.8 MiB" in said
    assert "the device has 95.4 MiB, less than this peak" in said
    assert "the host has" not in said
    budgets = ["--host-memory", "2GiB", "--disk", str(tmp_path)]
    assert "the memory has " in plan(capsys, *budgets, "--seq-len", "99999999")
    assert "the memory has " not in plan(capsys, *budgets, "--seq-len", "128")
    small = ["--device-memory", "64MiB", "--host-memory", "64MiB", "--disk-space", "1MiB"]
    said = plan(capsys, "--cluster", "laptop", *small, code=2)
    assert (
        "do not fit the disk: 1.0 MiB may be used there" in said
        and "(cluster laptop has 1 x 1 accelerators of 7.5 GiB" in said
    )


def test_the_largest_of_a_family_fits_and_the_next_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"device": "cpu", "compute_dtype": torch.bfloat16, "host_memory": "1GiB"}
    found = largest("llama", **fields)
    outsize.plan(member("llama", found.width), **fields)
    with pytest.raises(outsize.BudgetError):
        outsize.plan(member("llama", found.width + 128), **fields)
    assert found.parameters == pytest.approx((1 << 30) / 14, rel=0.6)
    said = plan(capsys, "--largest", "llama", "--device", "cpu", "--host-memory", "256MiB,1GiB")
    first, second = said.splitlines()[-2:]
    assert first.startswith("256MiB ") and second.startswith("1GiB ")
    assert f"{found.parameters / 1e9:.4g} B" in second and second.endswith("host_memory")
    monkeypatch.setattr("outsize.cli.largest.WIDEST", 256)
    said = plan(capsys, "--largest", "llama", "--device", "cpu", "--host-memory", "4GiB")
    assert said.splitlines()[-1].endswith("(wider ones are not searched)")
    said = plan(capsys, "--largest", "llama", "--device", "cpu", "--host-memory", "64KiB", code=2)
    assert "raise --host-memory to at least" in said


def test_the_largest_of_a_family_has_a_layer_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"host_memory": "4GiB", "device": "cpu", "mesh": {"pp": 9}}
    found = largest("gpt", **fields)
    outsize.plan(member("gpt", found.width), **fields)
    assert found.layers >= 9
    with pytest.raises(outsize.BudgetError):
        outsize.plan(member("gpt", found.width + 128), **fields)
    assert largest("gpt", **fields | {"host_memory": "9PiB"}).width == WIDEST
    said = plan(capsys, "--largest", "gpt", "--mesh", "pp=9999", "--host-memory", "4GiB", code=2)
    assert "mesh has 9999 stages, and the widest gpt that is searched has" in said


def test_families_grow_as_published_models_do() -> None:
    assert [layers_of("llama", width) for width in (4096, 8192, 16384)] == [32, 80, 126]
    published = sum(param.numel() for param in member("gpt", 12288).parameters())
    assert published == pytest.approx(175e9, rel=0.01)  # Brown et al. 2020
