"""A small text and a tiny model for the tests of the command line."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of twelve small text files."""
    return write_text(tmp_path / "text")


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A folder with the configuration of a Llama of 50 thousand parameters."""
    return write_model(tmp_path / "tiny")


def write_text(folder: Path) -> Path:
    folder.mkdir()
    for number in range(12):
        lines = [f"def function_{i}_{number}(value): return value + {i * number}" for i in range(60)]
        (folder / f"part_{number:02d}.txt").write_text("\n".join(lines))
    return folder


def write_model(folder: Path) -> Path:
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
