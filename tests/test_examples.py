"""The examples do what they say."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.ranks.launching import run_on_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_a_run_that_is_stopped_and_started_again_is_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    resume = example("resume")
    expected = resume.main(tmp_path / "one", 90)
    for steps in (25, 64, 90):  # in an epoch, at its end, in the next
        loss = resume.main(tmp_path / "two", steps)
    assert loss == expected
    assert sorted(each.name for each in (tmp_path / "two" / "ckpts").iterdir()) == ["step-80", "step-90"]


def run_as_a_command(directory: Path, steps: int, kill_at: int) -> str:
    """What the example of several ranks says at its end."""
    os.environ["KILL_AT"], sys.argv = str(kill_at), ["ranks.py", str(directory), str(steps)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(EXAMPLES / "ranks.py"), run_name="__main__")
    return said.getvalue()


def train_on_ranks(ranks: int, directory: Path, steps: int, kill_at: int) -> str:
    """As torchrun does it, which starts all workers again where one is lost; forked ones, which have torch already."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=1,
        start_method="forkserver",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="job",
        monitor_interval=0.1,
    )
    said: str = elastic_launch(config, run_as_a_command)(directory, steps, kill_at)[0]
    return said


def test_the_example_of_several_ranks_runs_on_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = example("ranks")
    whole = ranks.main(tmp_path / "one", 15)
    ranks.main(tmp_path / "two", 10)
    assert ranks.main(tmp_path / "two", 15) == whole
    assert capsys.readouterr().out.splitlines()[-1].startswith("after 15 steps on 1 ranks: loss ")


def on_a_rank(directory: Path, steps: int) -> float:
    loss: float = example("ranks").main(directory, steps)
    return loss


@pytest.mark.slow
def test_a_job_that_loses_a_rank_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    whole = run_on_ranks(2, on_a_rank, tmp_path / "whole", 25)[0]
    said = train_on_ranks(2, tmp_path / "broken", 25, kill_at=15)
    assert said == f"after 25 steps on 2 ranks: loss {whole!r}\n"
    assert (tmp_path / "broken" / "died").exists()
    assert sorted(each.name for each in (tmp_path / "broken" / "ckpts").iterdir()) == ["step-20", "step-25"]
    assert 0 < run_on_ranks(3, on_a_rank, tmp_path / "broken", 27)[0] < 1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_learn_on_a_base_that_is_read_where_it_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    pytest.importorskip("peft")
    lora = example("lora")
    monkeypatch.setattr(lora, "LAYERS", 4)
    monkeypatch.setattr(lora, "quick_dtype", lambda: dtype)
    loss = lora.main(tmp_path, 1e6, "12MiB", 3)
    lines = capsys.readouterr().out.splitlines()
    assert float(lines[0].split()[3].rstrip(",")) > loss
    assert all(line.endswith(" 0 bytes written") for line in lines)
    assert json.loads((tmp_path / "base" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()


def test_accelerates_loop_that_is_started_again_is_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    loop = example("with_accelerate")
    expected = loop.main(tmp_path / "one", 25)
    for steps in (13, 25):  # from the tenth
        loss = loop.main(tmp_path / "two", steps)
    assert loss == expected


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_the_trainers_example_that_is_started_again_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    script = example("with_trainer")
    monkeypatch.setattr(script, "SAVE_EVERY", 2)
    for name in ("one", "two", "whole"):
        (tmp_path / name).mkdir()
    expected = script.main(tmp_path / "one", 4)
    for steps in (3, 4):
        loss = script.main(tmp_path / "two", steps)
    assert loss == expected
    assert (tmp_path / "two" / "adapters" / "adapter_model.safetensors").exists()
    assert script.main(tmp_path / "whole", 4, whole=True) < expected
    assert (tmp_path / "whole" / "model" / "model.safetensors").exists()


def test_the_recommender_trains_a_table_above_its_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = example("recommender").main(tmp_path, 50_000, "4MiB", 12, batch=64)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert 0.3 < loss < 0.8
    assert len(lines) == 2
    assert all("rows/s; hit rate " in line and line.endswith("MB a step") for line in lines)


def on_a_stage(directory: Path, stages: int, steps: int) -> float | None:
    loss: float | None = example("pipeline").main(directory, stages, steps, 4)
    return loss


def test_the_example_of_a_pipeline_goes_on_in_another_shape(tmp_path: Path) -> None:
    run_on_ranks(2, on_a_stage, tmp_path / "broken", 2, 2)
    loss = run_on_ranks(1, on_a_stage, tmp_path / "broken", 1, 3)[0]
    assert run_on_ranks(1, on_a_stage, tmp_path / "whole", 1, 3)[0] == pytest.approx(loss, rel=1e-5)
