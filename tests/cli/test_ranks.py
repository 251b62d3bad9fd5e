"""`outsize train` under torchrun: the run of one rank, shared by two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

OUTSIZE = [str(Path(sys.executable).with_name("outsize")), "train"]


def run(ranks: int, out: Path, text: Path, model: Path, *more: str) -> subprocess.CompletedProcess[str]:
    options = ["--text", str(text), "--model", str(model), "--seq-len", "32", "--minutes", "0", "--eval-every", "0"]
    command = [*OUTSIZE, *options, "--host-memory", "16MiB", "--out", str(out), "--name", "run", *more]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launcher, "--no-python", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_train_and_resume_what_one_trains(text: Path, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    one, two = tmp_path / "one", tmp_path / "two"
    alone = run(1, one, text, tiny_model, "--steps", "4")
    assert alone.returncode == 0, alone.stderr
    shared = run(2, two, text, tiny_model, "--steps", "3", "--save-every", "2")
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout.count("held-out loss before") == 1
    checkpoint = str(two / "run" / "checkpoints" / "step-2")
    resumed = run(2, two, text, tiny_model, "--steps", "4", "--resume", checkpoint)
    assert resumed.returncode == 0, resumed.stderr
    assert losses(two) == pytest.approx(losses(one), rel=1e-3)
    assert (two / "run" / "model" / "model.safetensors").exists() and (two / "run" / "report.png").exists()
    refused = run(2, two, text, tiny_model, "--batch", "3", "--steps", "4")
    assert "--batch 3 cannot be shared by 2 ranks" in refused.stderr
