"""A plain-torch engine behind the public names, a small text and a tiny model, for the tests of the command line."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize


@dataclass
class FakeMemory:
    """What the command line reads of `outsize.memory(model)`."""

    now: dict[str, int] = field(default_factory=lambda: {"disk/states": 8_000_000, "host/staging": 1_000_000})
    peak: dict[str, int] = field(default_factory=dict)
    wait_seconds: float = 0.0
    update_seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    state_bytes: int = 16_000_000
    skipped_steps: int = 0

    def __str__(self) -> str:
        return "a table of memory"


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    """Plain torch behind the public names; every step of the run adds to the counters of the memory it returns."""
    memory = FakeMemory()

    def prepare(model: Any, optimizer: Any, **fields: Any) -> Any:
        def count(*_: Any) -> None:
            memory.wait_seconds += 0.001
            memory.update_seconds += 0.002
            memory.bytes_read += 3_000_000
            memory.bytes_written += 2_000_000

        optimizer.register_step_post_hook(count)
        return model, optimizer

    def steps(folder: Path) -> list[Path]:
        return sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))

    def save(path: str, model: Any, optimizer: Any, extra: Any, keep: int) -> None:
        json.dumps(extra)  # values that JSON can hold
        shutil.rmtree(path, ignore_errors=True)  # of a run that went further before it was resumed
        Path(path).mkdir(parents=True)
        for outdated in steps(Path(path).parent)[:-keep]:
            shutil.rmtree(outdated)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}, f"{path}/all.pt")

    def load(path: str, model: Any, optimizer: Any) -> Any:
        newest = Path(path) if (Path(path) / "all.pt").exists() else steps(Path(path))[-1]
        found = torch.load(newest / "all.pt")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        return found["extra"]

    fakes: dict[str, Callable[..., Any]] = {
        "init": lambda **fields: nullcontext(),
        "prepare": prepare,
        "plan": lambda model, optimizer, **fields: "a plan",
        "memory": lambda model: memory,
        "save": save,
        "load": load,
        "export": lambda path, model: model.save_pretrained(path),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(outsize, name, fake, raising=False)
    return memory


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of twelve small text files."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        lines = [f"def function_{i}_{number}(value): return value + {i * number}" for i in range(60)]
        (folder / f"part_{number:02d}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A folder with the configuration of a Llama of 50 thousand parameters."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes})
    )
    return folder
