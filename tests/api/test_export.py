"""Exported weights: opened by transformers they give the logits of the prepared model; oracle: safetensors itself."""

from __future__ import annotations

import builtins
import errno
import gc
import json
import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.api import exporting
from outsize.api.assemble import prepared_of
from outsize.api.exporting import export
from outsize.checkpoint.folder import locked
from outsize.formats import weights
from outsize.formats.pieces import EXPORT_NUMEL
from outsize.move.memory import PAGE_BYTES
from tests.api.checkpoint_runs import Small, opened, peak_of, prepare
from tests.comparing import assert_same
from tests.conftest import no_file_above

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepare(model, optimizer, tier, tmp, **fields)
    return optimizer


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
    assert_same(wide, masters)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    tokens = torch.randint(0, 96, (2, 8))
    assert other.dtype is torch.bfloat16
    other.to(torch.bfloat16)  # the rotary buffers, which prepare casts
    other.to(torch.get_default_device())
    with torch.no_grad():
        assert torch.equal(other(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_plain_module_is_exported_under_its_own_names(tier: str, tmp_path: Path) -> None:
    model = Small(seed=1)
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


@pytest.mark.parametrize("failing", [1, 3])
def test_a_full_disk_leaves_the_earlier_export(failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(1024, 1200), nn.Linear(1200, 1024))
    prepared(model, tmp_path)
    export(tmp_path / "weights", model)
    before = (tmp_path / "weights" / "model.safetensors").read_bytes()
    with outsize.gathered(model[0].weight, modify=True):
        nn.init.zeros_(model[0].weight)

    written, real = count(1), os.pwrite

    def full(*arguments: Any) -> int:
        if next(written) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left on device.*model\.safetensors") as raised:
        export(tmp_path / "weights", model)
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path / "weights") == ["model.safetensors"]
    assert (tmp_path / "weights" / "model.safetensors").read_bytes() == before


def test_a_write_that_fails_is_told_whatever_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slabs = weights.WRITERS + 1
    model = nn.Linear((slabs * weights.PIECE_BYTES - PAGE_BYTES) // 4, 1, bias=False)  # the last slab is full
    prepared(model, tmp_path)
    real = os.pwrite

    def failing(fd: int, content: Any, at: int) -> int:
        if at == 0:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, content, at)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match=r"Input/output error.*model\.safetensors"):
        export(tmp_path / "weights", model)
    assert not (tmp_path / "weights").exists()


def test_a_file_that_just_fits_the_limit_on_file_size_is_written(tmp_path: Path) -> None:
    model = nn.Linear(255, 1, bias=False)
    prepared(model, tmp_path)
    with no_file_above(PAGE_BYTES + 4 * 255):
        export(tmp_path / "weights", model)
    found = safetensors.load_file(tmp_path / "weights" / "model.safetensors")
    with outsize.gathered(model):
        assert torch.equal(found["weight"], model.weight)


@pytest.mark.parametrize("limit", [64 << 10, (64 << 10) + 512])
def test_a_limit_on_file_size_is_an_error_that_names_the_file(limit: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    prepared(model, tmp_path)
    with no_file_above(limit), pytest.raises(OSError, match=r"File too large.*model\.safetensors"):
        export(tmp_path / "weights", model)
    assert not (tmp_path / "weights").exists()


def test_a_read_that_fails_stops_the_export_and_leaves_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1024, 3000))
    prepared(model, tmp_path)
    resting = prepared_of(model[0].weight)
    assert resting is not None and resting.resources.disk is not None
    resting.resources.disk.inject("read", 2, error=errno.EIO)
    with pytest.raises(OSError, match=r"Input/output error.*unit-00000"):
        export(tmp_path / "weights", model)
    assert sorted(os.listdir(tmp_path)) == ["disk"]


def test_short_writes_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(1024, 3000))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    prepared(model, tmp_path)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, content, at: real(fd, content[:81920], at))
    export(tmp_path / "weights", model)
    assert_same(opened(tmp_path / "weights"), expected)


class Killed(BaseException):
    """As if the process had ended: nothing that it would still do is done."""


class Interrupted:
    """Lets the steps that change the names of a folder fail, from the `first` on: all, or that one alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int, error: BaseException) -> None:
        self.first, self.error, self.count = first, error, 0
        for name in ("rename", "replace", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))
        monkeypatch.setattr(weights, "sync", self._failing(weights.sync))

    def _failing(self, call: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.first or (self.count > self.first and isinstance(self.error, Killed)):
                raise self.error
            return call(*args, **kwargs)

        return step


class Replaced:
    """A folder with one model, into which an export of another is interrupted at each step in turn."""

    def __init__(self, tmp: Path, sizes: tuple[str, str]) -> None:
        self.folder, self.sizes = tmp / "weights", sizes
        self.models = [self._model(tmp, fill) for fill in (1.0, 2.0)]
        self.reader = self._model(tmp, 0.0)

    def _model(self, tmp: Path, fill: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
        for param in model.parameters():
            nn.init.constant_(param, fill)
        prepared(model, tmp, "host")
        return model

    def interruptions(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Iterator[list[str]]:
        """What the folder held before each one."""
        for first in count(1):
            shutil.rmtree(self.folder, ignore_errors=True)
            export(self.folder, self.models[0], max_shard_size=self.sizes[0])
            (self.folder / "tokenizer.json").write_text("{}")
            before = sorted(os.listdir(self.folder))
            gc.disable()  # the ends of earlier tests' models remove files, too
            try:
                with monkeypatch.context() as patch:
                    Interrupted(patch, first, error)
                    export(self.folder, self.models[1], max_shard_size=self.sizes[1])
            except type(error):
                gc.enable()
                yield before
            else:
                assert first > 5
                return
            finally:
                gc.enable()

    def loaded(self) -> set[float]:
        """The values of the model that the folder holds."""
        outsize.load(self.folder, self.reader)
        with outsize.gathered(self.reader):
            return {value for param in self.reader.parameters() for value in param.unique().tolist()}


SIZES = [(old, new) for old in ("1KiB", "1MiB") for new in ("1KiB", "1MiB")]


@pytest.mark.parametrize("sizes", SIZES, ids="-".join)
def test_a_folder_never_holds_a_mixture_whenever_an_export_is_killed(
    sizes: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Replaced(tmp_path, sizes)
    for _ in run.interruptions(monkeypatch, Killed()):
        found = {name for name in os.listdir(run.folder) if name in (weights.SINGLE_NAME, weights.INDEX_NAME)}
        assert len(found) <= 1
        if found:
            assert run.loaded() in ({1.0}, {2.0})
        else:
            with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
                run.loaded()
        assert (run.folder / "tokenizer.json").read_text() == "{}"
    assert run.loaded() == {2.0}
    assert not [name for name in os.listdir(run.folder) if name.startswith(".")]


@pytest.mark.parametrize("there", [False, True])
def test_an_export_removes_what_a_killed_one_has_left(there: bool, tmp_path: Path) -> None:
    model, folder = nn.Linear(4, 4), tmp_path / "out"
    prepared(model, tmp_path)
    if there:
        export(folder, model)
    killed, alive = ((folder if there else tmp_path) / f".out.export-{digit * 12}" for digit in "ab")
    for each in (killed, alive):
        each.mkdir()
        (each / "model.safetensors").touch()
    lock = locked(alive)
    export(folder, model)
    os.close(lock)
    assert alive.exists() and not killed.exists()
    assert sorted(opened(folder)) == ["bias", "weight"]


@pytest.mark.parametrize("sizes", SIZES, ids="-".join)
def test_an_export_that_fails_leaves_the_earlier_one_or_is_complete(
    sizes: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Replaced(tmp_path, sizes)
    for before in run.interruptions(monkeypatch, OSError(errno.EIO, "Input/output error")):
        whole = run.loaded()
        assert whole in ({1.0}, {2.0})
        found = sorted(name for name in os.listdir(run.folder) if not name.startswith("."))
        assert whole == {2.0} or found == before


def test_an_interrupt_while_earlier_files_go_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Replaced(tmp_path, ("1KiB", "1KiB"))
    export(run.folder, run.models[0])
    first, real = count(1), shutil.rmtree

    def remove(path: Path, ignore_errors: bool = False) -> None:
        if next(first) == 1:
            raise KeyboardInterrupt
        real(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(KeyboardInterrupt):
        export(run.folder, run.models[1])
    assert run.loaded() == {2.0}
    assert not [name for name in os.listdir(run.folder) if name.startswith(".")]


def test_the_index_is_away_on_the_disk_too_while_shards_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Replaced(tmp_path, ("1KiB", "1KiB"))
    export(run.folder, run.models[0], max_shard_size="1KiB")
    steps: list[str] = []
    real, real_sync = os.rename, weights.sync

    def rename(source: Path, place: Path) -> None:
        steps.append("index" if source.name == weights.INDEX_NAME else "shard")
        real(source, place)

    def sync(path: Path) -> None:
        steps.extend(["sync"] if path == run.folder else [])
        real_sync(path)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(weights, "sync", sync)
    export(run.folder, run.models[1], max_shard_size="1KiB")
    files = len(list(run.folder.glob("*.safetensors")))
    assert files > 1
    assert steps == ["index", "sync", *["shard"] * 2 * files, "sync", "index", "sync"]


def test_a_folder_in_the_way_is_named_before_anything_is_replaced(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    prepared(model, tmp_path)
    export(tmp_path / "weights", model)
    (tmp_path / "weights" / "model-00002-of-00002.safetensors").mkdir()
    (tmp_path / "weights" / "model-00002-of-00002.safetensors" / "notes.txt").write_text("precious")
    with pytest.raises(IsADirectoryError, match=r"in the way of the export.*model-00002-of-00002"):
        export(tmp_path / "weights", model, max_shard_size="1100")
    assert len(safetensors.load_file(tmp_path / "weights" / "model.safetensors")) == 4
    assert (tmp_path / "weights" / "model-00002-of-00002.safetensors" / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_a_tensor_of_many_runs_are_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 7), nn.Linear(2101, 2003))
    masters = {name: value.clone() for name, value in model.state_dict().items()}
    prepared(model, tmp_path, compute_dtype=dtype)
    export(tmp_path / "wide", model, dtype=torch.float32)
    export(tmp_path / "own", model)
    assert max(value.numel() for value in masters.values()) > EXPORT_NUMEL
    assert_same(opened(tmp_path / "wide"), masters)
    with outsize.gathered(model):
        own = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert_same(opened(tmp_path / "own"), own)


class Many(nn.Module):
    """A buffer of every dtype that safetensors stores, all of odd lengths, the narrow ones first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 3))
        for dtype in sorted(weights.DTYPE_NAMES, key=lambda dtype: dtype.itemsize):
            value = torch.randint(0, 2, (3, 5)).to(dtype)
            self.register_buffer(f"of_{dtype}".replace(".", "_"), value.t())
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("expanded", torch.ones(1).expand(8))
        self.register_buffer("conjugate", torch.polar(torch.ones(6), torch.arange(6.0)).conj())
        self.register_buffer("negative", self.conjugate.imag)


def test_buffers_keep_their_dtypes_and_bits(tmp_path: Path) -> None:
    model = Many()
    assert model.conjugate.is_conj() and model.negative.is_neg()
    expected = {name: value.clone().resolve_conj().resolve_neg() for name, value in model.state_dict().items()}
    prepared(model, tmp_path)
    export(tmp_path / "weights", model)
    found = opened(tmp_path / "weights")
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype is value.dtype
        assert found[name].shape == value.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def test_a_buffer_that_safetensors_cannot_store_is_named_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
    prepared(model, tmp_path)
    with pytest.raises(TypeError, match=r"'phases' is of torch\.complex128, which safetensors cannot store"):
        export(tmp_path / "weights", model)
    assert os.listdir(tmp_path) == ["disk"]


@pytest.mark.parametrize("size", ["1KB", "7KB", "20KB", "1MB"])
def test_weights_are_cut_into_files_as_by_the_hugging_face_libraries(size: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, 32) for width in (32, 50, 8, 120, 64, 32, 32, 3, 90)])
    hub = pytest.importorskip("huggingface_hub")
    split = hub.split_torch_state_dict_into_shards(model.state_dict(), max_shard_size=size)
    prepared(model, tmp_path)
    export(tmp_path / "weights", model, max_shard_size=size)
    files = {file.name: set(safetensors.load_file(file)) for file in (tmp_path / "weights").glob("*.safetensors")}
    assert files == {name: set(names) for name, names in split.filename_to_tensors.items()}


def test_files_hold_five_gigabytes_unless_asked_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    prepared(model, tmp_path)
    asked: list[int] = []
    monkeypatch.setattr(exporting, "files_of", lambda found, nbytes: asked.append(nbytes) or [{}])
    export(tmp_path / "weights", model)
    assert asked == [5_000_000_000]


def test_data_begins_on_a_page_and_fills_the_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(31, 17))
    prepared(model, tmp_path)
    export(tmp_path / "weights", model)
    content = (tmp_path / "weights" / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    assert begin % 4096 == 0
    assert len(content) == begin + (31 * 17 + 17) * 4
    assert json.loads(content[8:begin])["__metadata__"] == {"format": "pt"}


@pytest.mark.slow
def test_memory_is_64_mib_however_large_a_tensor_is(tmp_path: Path) -> None:
    small, large = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(5000, 5000))  # 100 MB in one tensor
    prepared(small, tmp_path)
    prepared(large, tmp_path, host_memory="256MiB")
    export(tmp_path / "warm", small)
    slack = 8 << 20
    assert peak_of(lambda: export(tmp_path / "weights", large)) <= (64 << 20) + slack


def test_the_safetensors_library_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    prepared(model, tmp_path)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    export(tmp_path / "weights", model)
    monkeypatch.undo()
    assert set(opened(tmp_path / "weights")) == {"0.weight", "0.bias"}


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
