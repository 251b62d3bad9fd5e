"""Exported weights: opened by transformers they give the logits of the prepared model; oracle: safetensors itself."""

from __future__ import annotations

import builtins
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.api.exporting import export

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")


def small(kind: str) -> Any:
    base = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    layers = {**base, "intermediate_size": 48, "num_key_value_heads": 2}
    return {
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2
        ),
        "llama": lambda: transformers.LlamaConfig(**layers),
        "llama-tied": lambda: transformers.LlamaConfig(**layers, tie_word_embeddings=True),
        "mixtral": lambda: transformers.MixtralConfig(**layers, num_local_experts=4),
        "bert": lambda: transformers.BertConfig(**base, intermediate_size=48, is_decoder=True),
    }[kind]()


def prepared(model: nn.Module, tmp: Path, tier: str = "disk", **fields: Any) -> Any:
    (tmp / "disk").mkdir(exist_ok=True)
    tiers = {"params": tier, "grads": tier, "states": tier, "disk": tmp / "disk"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outsize.prepare(model, optimizer, device="cpu", host_memory="64MiB", **tiers, **fields)
    return optimizer


def opened(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in safetensors.load_file(file).items()
    }


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama-tied", "mixtral", "bert"])
def test_transformers_opens_an_export_and_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small(kind))
    optimizer = prepared(model, tmp_path)
    tokens = torch.randint(0, 96, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()  # owed: the export runs it first
    export(tmp_path / "weights", model, max_shard_size=8000)
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    assert len(list((tmp_path / "weights").glob("model-*.safetensors"))) > 1
    other, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert json.loads((tmp_path / "weights" / "config.json").read_text())["architectures"] == [type(model).__name__]
    with torch.no_grad():
        assert torch.equal(other.eval()(input_ids=tokens).logits, expected)


def test_bf16_weights_stay_bf16_and_masters_are_exported_as_fp32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small("llama"))
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    prepared(model, tmp_path, compute_dtype=torch.bfloat16)
    export(tmp_path / "own", model)
    export(tmp_path / "wide", model, dtype=torch.float32)
    assert json.loads((tmp_path / "own" / "config.json").read_text())["dtype"] == "bfloat16"
    wide = opened(tmp_path / "wide")
    for name, value in masters.items():
        assert torch.equal(wide[name], value), name
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    tokens = torch.randint(0, 96, (2, 8))
    assert other.dtype is torch.bfloat16
    other.to(torch.bfloat16)  # the rotary buffers, which prepare casts
    with torch.no_grad():
        assert torch.equal(other(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(8)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_plain_module_is_exported_under_its_own_names(tier: str, tmp_path: Path) -> None:
    model = Plain()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    prepared(model, tmp_path, tier)
    export(tmp_path / "weights", model)
    found = opened(tmp_path / "weights")
    assert sorted(each.name for each in (tmp_path / "weights").iterdir()) == ["model.safetensors"]
    assert set(found) == set(expected) - {"head.weight"}
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_shards_stay_below_their_size_and_the_index_finds_every_weight(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(10)], nn.Linear(32, 200))
    prepared(model, tmp_path)
    export(tmp_path / "weights", model, max_shard_size="10KiB")
    index = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.numel() * 4 for each in model.parameters())
    for name, file in index["weight_map"].items():
        assert name in safetensors.load_file(tmp_path / "weights" / file)
    for file in (tmp_path / "weights").glob("*.safetensors"):
        tensors = safetensors.load_file(file)
        assert len(tensors) == 1 or sum(each.numel() * 4 for each in tensors.values()) <= 10 << 10


def test_an_export_into_a_folder_replaces_weights_and_keeps_the_rest(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    prepared(model, tmp_path)
    export(tmp_path / "weights", model, max_shard_size="1KiB")
    (tmp_path / "weights" / "tokenizer.json").write_text("{}")
    export(tmp_path / "weights", model)
    assert sorted(each.name for each in (tmp_path / "weights").iterdir()) == ["model.safetensors", "tokenizer.json"]
    export(tmp_path / "weights", model, max_shard_size="100KiB")
    assert len(opened(tmp_path / "weights")) == 4


def test_a_full_disk_leaves_the_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    prepared(model, tmp_path)
    export(tmp_path / "weights", model)
    before = (tmp_path / "weights" / "model.safetensors").read_bytes()
    with outsize.gathered(model[0].weight, modify=True):
        nn.init.zeros_(model[0].weight)

    def full(*args: Any, **kwargs: Any) -> None:
        raise safetensors_error("I/O error: No space left on device (os error 28)")

    from safetensors import SafetensorError as safetensors_error

    monkeypatch.setattr(safetensors, "save_file", full)
    with pytest.raises(OSError, match=r"No space left on device.*model\.safetensors") as raised:
        export(tmp_path / "weights", model)
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path / "weights") == ["model.safetensors"]
    assert (tmp_path / "weights" / "model.safetensors").read_bytes() == before


def test_what_cannot_be_exported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    prepared(model, tmp_path)
    with pytest.raises(ValueError, match=r"dtype is torch\.int8"):
        export(tmp_path / "weights", model, dtype=torch.int8)
    with pytest.raises(ValueError, match="max_shard_size"):
        export(tmp_path / "weights", model, max_shard_size="many")
    (tmp_path / "file").write_text("precious")
    with pytest.raises(NotADirectoryError, match="a file is in the way"):
        export(tmp_path / "file", model)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install outsize\[export\]"):
        export(tmp_path / "weights", model)
