"""Weights of others: `from_pretrained` under `outsize.init` in bounded memory, and safetensors folders streamed in."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.api.building import init
from outsize.api.exporting import export
from outsize.formats import hugging
from outsize.run import mapped_files
from outsize.run.mapped_files import MappedFiles
from outsize.run.paging import page_in
from tests.api.checkpoint_runs import Small, everything, opened, prepare
from tests.comparing import assert_same
from tests.small_models import llama_config

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

BUDGET = 8 << 20
MAPPED = 2 << 20


# ------------------------------------------------------------------------------------------------- from_pretrained


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 38 MB in several files; its largest parameter has 4 MB."""
    torch.manual_seed(0)
    config = llama_config(512, 1024, 4, 4, 2000, max_position_embeddings=64)
    folder = tmp_path_factory.mktemp("pretrained")
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="10MB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.mark.parametrize("loader", ["AutoModelForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_from_pretrained_gives_the_same_bits_with_few_pages_of_its_files_in_memory(
    loader: str, dtype: torch.dtype | None, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = getattr(transformers, loader)
    resident: list[int] = []
    measure = mapped_files.resident_bytes

    def measured() -> tuple[int, int]:
        resident.append(measure()[1])
        return 0, resident[-1]

    oracle = kind.from_pretrained(pretrained, dtype=dtype)
    before = measure()[1]
    monkeypatch.setattr(mapped_files, "resident_bytes", measured)
    monkeypatch.setattr(mapped_files, "MAPPED_BYTES", MAPPED)
    with torch.device("cpu"), init(host_memory=BUDGET, disk=tmp_path, device="cpu") as context:
        model = kind.from_pretrained(pretrained, dtype=dtype)
    largest = 2000 * 512 * 4
    assert context.peak_bytes <= BUDGET + largest
    assert max(resident) - before <= MAPPED + largest + (1 << 20)  # of 38 MB
    for param in model.parameters():
        page_in(param)
    found, expected = model.state_dict(), oracle.state_dict()
    assert list(found) == list(expected)
    assert all(found[name].dtype is value.dtype and torch.equal(found[name], value) for name, value in expected.items())


def mapped(path: Path, numel: int) -> torch.Tensor:
    """A private mapping of a file of ones, as loaders make it."""
    torch.ones(numel, device="cpu").numpy().tofile(path)
    return (
        torch.empty(0, device="cpu")
        .set_(torch.UntypedStorage.from_file(str(path), False, numel * 4))
        .view(torch.float32)
    )


def test_pages_of_mapped_files_go_unless_they_are_modified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_files, "MAPPED_BYTES", 0)
    numel = 1 << 20
    older, used = mapped(tmp_path / "older", numel), mapped(tmp_path / "used", numel)
    files = MappedFiles()
    assert files.holds(used)
    assert not files.holds(torch.ones(numel, device="cpu"))
    modified, read = mapped(tmp_path / "modified", numel), mapped(tmp_path / "read", numel)
    modified[5] = 3
    total = [float(each.sum()) for each in (older, used, modified, read)]
    before = mapped_files.resident_bytes()[1]
    files.trim()
    slack = 1 << 20
    assert abs(before - mapped_files.resident_bytes()[1] - 2 * numel * 4) < slack  # of `used` and `read`
    assert [float(each.sum()) for each in (older, used, modified, read)] == total


def test_a_system_without_proc_keeps_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(mapped_files.Path, "read_text", missing)
    with torch.device("cpu"), init(host_memory="64MiB", device="cpu"):
        model = nn.Linear(512, 512)
    assert type(model.weight) is nn.Parameter


# ------------------------------------------------------------------------------------------ into a prepared model


def prepared(model: Any, tmp: Path, tier: str = "disk", **fields: Any) -> Any:
    prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), tier, tmp, **fields)
    return model


def of_others(tied: str = "head.weight") -> dict[str, torch.Tensor]:
    """What others store of a `Small`: one name alone of the tied weight."""
    return {name: value.clone() for name, value in Small(1).state_dict().items() if name != tied}


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_an_export_comes_back_bit_for_bit(tier: str, tmp_path: Path) -> None:
    source = prepared(Small(1), tmp_path)
    export(tmp_path / "weights", source, max_shard_size="100KB")
    target = prepared(Small(2), tmp_path, tier)
    before = everything(target)
    outsize.load(tmp_path / "weights", target)
    assert_same(everything(target), everything(source) | {"scratch": before["scratch"]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_fp32_weights_become_the_masters_of_16_bit_ones(dtype: torch.dtype, tier: str, tmp_path: Path) -> None:
    expected = of_others()
    safetensors.save_file(expected, tmp_path / "model.safetensors")
    target = prepared(Small(2), tmp_path, tier, compute_dtype=dtype)
    outsize.load(tmp_path, target)
    export(tmp_path / "again", target, dtype=torch.float32)
    found = opened(tmp_path / "again")
    assert all(torch.equal(found[name], expected[name]) for name, _ in target.named_parameters())


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("live", [torch.float32, torch.bfloat16, torch.float16])
def test_floating_point_weights_are_cast(stored: torch.dtype, live: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(9, 70).to(stored)
    safetensors.save_file({"weight": weight}, tmp_path / "model.safetensors")
    model = nn.Linear(70, 9, bias=False).requires_grad_(False)  # no master
    prepare(model, None, "auto", tmp_path, compute_dtype=live)
    outsize.load(tmp_path, model)
    assert torch.equal(everything(model)["weight"], weight.to(live))


def test_weights_that_transformers_saved_give_its_logits(pretrained: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(pretrained)
    with torch.device("cpu"), init(host_memory=BUDGET, disk=tmp_path, device="cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    prepared(model, tmp_path)
    outsize.load(pretrained, model)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(pretrained).eval()
    tokens = torch.randint(0, 2000, (1, 8))
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=tokens).logits, oracle(input_ids=tokens).logits)


def test_a_tied_weight_is_found_under_either_name(tmp_path: Path) -> None:
    tensors = of_others(tied="embed.weight")
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    target = prepared(Small(2), tmp_path)
    outsize.load(tmp_path, target)
    assert torch.equal(everything(target)["embed.weight"], tensors["head.weight"])


def test_a_head_of_its_own_of_another_shape_does_not_fit_a_tied_model(tmp_path: Path) -> None:
    safetensors.save_file({**of_others(), "head.weight": torch.zeros(31, 8)}, tmp_path / "model.safetensors")
    target = prepared(Small(2), tmp_path)
    with pytest.raises(
        ValueError, match="of another model: 1 weights of another shape: head.weight is 31x8 there and 30x8 here"
    ):
        outsize.load(tmp_path, target)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_an_optional_weight_that_is_not_there_keeps_its_value(compute_dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = of_others()
    missing = {name: tensors.pop(name) for name in ("wide.bias", "norm.weight", "norm.running_mean")}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    target = prepared(Small(2), tmp_path, compute_dtype=compute_dtype)
    export(tmp_path / "before", target, dtype=torch.float32)
    target._keys_to_ignore_on_save = tuple(missing)
    outsize.load(tmp_path, target)
    target._keys_to_ignore_on_save = ()
    export(tmp_path / "after", target, dtype=torch.float32)
    before, after = (opened(tmp_path / when) for when in ("before", "after"))
    assert_same(after, {**tensors, **{name: before[name] for name in missing}})


def mixture() -> Any:
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "head_dim": 8}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **counts, num_experts_per_tok=2))


def renamed_head() -> Any:
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16}
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    )


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("build", [mixture, renamed_head])
def test_weights_that_transformers_saved_under_other_names_are_refused_with_the_remedy(
    build: Callable[[], Any], strict: bool, tmp_path: Path
) -> None:
    source = build()
    source.save_pretrained(tmp_path / "saved")
    stored = set(safetensors.load_file(tmp_path / "saved" / "model.safetensors"))
    if stored == set(source.state_dict()):
        pytest.skip("this transformers saves the names of the model")
    target = prepared(build(), tmp_path)
    before = everything(target)
    remedy = r"under other names \(\d+ missing.*outsize\.init\(.*from_pretrained\('.*saved'\).*Nothing was changed"
    with pytest.raises(ValueError, match=remedy):
        outsize.load(tmp_path / "saved", target, strict=strict)
    assert_same(everything(target), before)
    with torch.device("cpu"), init(host_memory=BUDGET, disk=tmp_path / "disk", device="cpu"):
        remedied = type(source).from_pretrained(tmp_path / "saved")
    assert_same(everything(prepared(remedied, tmp_path)), everything(prepared(source, tmp_path)))


@pytest.mark.parametrize("what", ["another head", "adapters", "half of the layers"])
def test_a_folder_of_transformers_that_is_meant_to_differ_is_passed_over(what: str, tmp_path: Path) -> None:
    """A new head beside new norms, adapters where there were buffers, and a deeper model."""
    layers = {f"layers.{i}": nn.Linear(8, 8) for i in range(4)}
    old: dict[str, torch.Tensor] = {f"{name}.weight": torch.ones(8, 8) for name in layers}
    old |= {f"{name}.bias": torch.ones(8) for name in layers}
    model = nn.Module()
    model.layers = nn.ModuleList(layers.values())
    if what == "another head":
        model.pooler, model.head = nn.Linear(8, 8), nn.Linear(8, 2)
        old |= {"predictions.weight": torch.ones(31, 8), "predictions.bias": torch.ones(31)}
    elif what == "adapters":
        for layer in model.layers:
            layer.register_parameter("adapter", nn.Parameter(torch.zeros(8, 2)))
        old |= {f"{name}.inv_freq": torch.ones(4) for name in layers}
    else:
        old = {name: value for name, value in old.items() if name < "layers.2"} | {"predictions": torch.ones(31)}
    safetensors.save_file(old, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    target = prepared(model, tmp_path)
    outsize.load(tmp_path, target, strict=False)
    found = everything(target)
    assert all(torch.equal(found[name], value) for name, value in old.items() if name in found)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_without_strict_what_only_one_side_has_is_passed_over_and_listed(
    tier: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = of_others()
    missing = {name: tensors.pop(name) for name in ("norm.running_mean", "wide.bias")}
    safetensors.save_file({**tensors, "gate": torch.ones(3)}, tmp_path / "model.safetensors")
    target = prepared(Small(2), tmp_path, tier)
    before = everything(target)
    with pytest.raises(
        ValueError,
        match=r"1 missing parameters: wide.bias; 1 missing buffers: norm.running_mean; 1 unex.*: gate\..*strict=False",
    ):
        outsize.load(tmp_path, target)
    assert_same(everything(target), before)
    with caplog.at_level(logging.WARNING, "outsize"):
        outsize.load(tmp_path, target, strict=False)
    assert "1 missing parameters, passed over: wide.bias" in caplog.text
    assert "1 missing buffers, passed over: norm.running_mean" in caplog.text
    assert "1 unexpected weights, passed over: gate" in caplog.text
    assert_same(everything(target), {**before, **tensors, **{name: before[name] for name in missing}})
    safetensors.save_file({**tensors, "wide.bias": torch.ones(7)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"wide\.bias is 7 there and"):
        outsize.load(tmp_path, target, strict=False)


# ------------------------------------------------------------------------------------------------ what is refused


def write(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def one(**changes: Any) -> dict[str, Any]:
    return {"weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32], **changes}}


def indexed(files: dict[str, Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        write(folder / "a.safetensors", one(), bytes(32))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    return make


def huge_index(folder: Path) -> None:
    indexed({"weight": "a.safetensors"})(folder)
    os.truncate(folder / "model.safetensors.index.json", (256 << 20) + 1)


def single(header: Any, data: bytes = bytes(32)) -> Callable[[Path], None]:
    return lambda folder: write(folder / "model.safetensors", header, data)


def raw(content: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(content)

    return make


def linked(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / "model.safetensors").symlink_to("../outside.safetensors")


def repeated(folder: Path) -> None:
    indexed({"weight": "a.safetensors", "other": "b.safetensors"})(folder)
    write(
        folder / "b.safetensors", {**one(), "other": {"dtype": "U8", "shape": [0], "data_offsets": [32, 32]}}, bytes(32)
    )


TWICE = (
    b'{"weight":' + json.dumps(one()["weight"]).encode() + b',"weight":' + json.dumps(one()["weight"]).encode() + b"}"
)
WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "another shape": (single(one(shape=[4, 2])), "weight is 4x2 there and 2x4 here"),
    "another kind": (single(one(dtype="I32")), "weight is torch.int32 there and torch.float32 here"),
    "another name": (single({"bias": one()["weight"]}), "1 missing parameters: weight; 1 unexpected weights: bias"),
    "a name twice": (single(TWICE), "stands there twice"),
    "two holders": (repeated, "holds 'weight', which model.safetensors.index.json does not list there"),
    "a file with less": (single(one(), bytes(31)), "should have"),
    "a file with more": (single(one(), bytes(33)), "should have"),
    "a gap": (single(one(data_offsets=[4, 36]), bytes(36)), "begins at 4"),
    "a wrong length": (single(one(data_offsets=[0, 31])), "takes 31 bytes"),
    "a negative place": (single(one(data_offsets=[-32, 0])), "whole numbers"),
    "a size that no tensor has": (single(one(shape=[2, 1 << 62])), "whole numbers that a size can be"),
    "more dimensions than a tensor has": (single(one(shape=[1] * 65)), "'weight' has 65 dimensions, more than the 64"),
    "a fractional shape": (single(one(shape=[2, 4.0])), "whole numbers"),
    "an unknown dtype": (single(one(dtype="F3")), "unknown dtype 'F3'"),
    "no offsets": (single({"weight": {"dtype": "F32", "shape": [2, 4]}}), "damaged: KeyError"),
    **{
        f"the header {header!r}": (single(header), "its header is no JSON object")
        for header in ([1], 5, "abc", None, True)
    },
    "no JSON": (single(b"{", b""), "damaged"),
    "deep JSON": (single(b"[" * 100_000), "damaged: RecursionError"),
    "an empty file": (raw(b""), "no header"),
    "a huge header": (raw(struct.pack("<Q", 1 << 62) + bytes(64)), "no header"),
    "a file above": (indexed({"weight": "../a.safetensors"}), "not a plain file name"),
    "an absolute file": (indexed({"weight": "/etc/passwd"}), "not a plain file name"),
    "the folder itself": (indexed({"weight": ".."}), "not a plain file name|leads out of the folder"),
    "a list of files": (indexed({"weight": ["a.safetensors"]}), "weight_map"),
    "a weight that is nowhere": (indexed({"weight": "a.safetensors", "bias": "a.safetensors"}), "files lack: bias"),
    "an index of any size": (huge_index, "index.json is larger than 256.0 MiB"),
    "a link out": (linked, "leads out of the folder"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_is_refused_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    make, message = WRONG[kind]
    folder = tmp_path / "weights"
    folder.mkdir()
    safetensors.save_file({"weight": torch.randn(2, 4)}, folder / "model.safetensors")
    make(folder)
    model = prepared(nn.Linear(4, 2, bias=False), tmp_path)
    before = everything(model)
    with pytest.raises(ValueError, match=message):
        outsize.load(folder, model)
    assert_same(everything(model), before)


@pytest.mark.parametrize("missing", ["everything", "a file of the index"])
def test_missing_files_are_named(missing: str, tmp_path: Path) -> None:
    model = prepared(nn.Linear(4, 2, bias=False), tmp_path)
    if missing != "everything":
        (tmp_path / "model.safetensors").touch()
        indexed({"weight": "b.safetensors"})(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors|not a complete checkpoint"):
        outsize.load(tmp_path, model)


def test_a_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    safetensors.save_file({"weight": torch.ones(2, 4)}, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    model = prepared(nn.Linear(4, 2, bias=False), tmp_path)
    outsize.load(tmp_path, model)
    assert torch.equal(everything(model)["weight"], torch.ones(2, 4))


@pytest.mark.parametrize("part", ["", "unet"])
def test_a_snapshot_of_the_cache_of_the_hub_is_loaded_and_other_links_out_of_it_are_not(
    tmp_path: Path, part: str
) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1f2e" / part, tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    model = prepared(nn.Linear(4, 2, bias=False), tmp_path)
    safetensors.save_file({"weight": torch.ones(2, 4)}, blobs / "5d41")
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blobs / "5d41", snapshot))
    outsize.load(snapshot, model)
    assert torch.equal(everything(model)["weight"], torch.ones(2, 4))
    shutil.move(blobs / "5d41", blobs.parent / "5d41")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blobs.parent / "5d41", snapshot))
    with pytest.raises(ValueError, match="leads out of the folder"):
        outsize.load(snapshot, model)


def test_short_reads_are_resumed_and_failing_ones_name_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = torch.randn(2, 4)
    safetensors.save_file({"weight": expected}, tmp_path / "model.safetensors")
    model = prepared(nn.Linear(4, 2, bias=False), tmp_path)
    preadv = os.preadv
    monkeypatch.setattr(hugging.os, "preadv", lambda fd, data, at: preadv(fd, [data[0][:5]], at))
    outsize.load(tmp_path, model)
    assert torch.equal(everything(model)["weight"], expected)

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(hugging.os, "preadv", failing)
    with pytest.raises(OSError, match=r"reading weights at \d+.*model\.safetensors"):
        outsize.load(tmp_path, model)


HALVES = ("0.weight", "0.bias"), ("1.weight", "1.bias")


def remove(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def truncate(folder: Path) -> None:
    os.truncate(folder / "model-00002-of-00002.safetensors", 100)


@pytest.mark.parametrize(("damage", "error"), [(remove, FileNotFoundError), (truncate, ValueError)])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_files_that_change_while_they_are_loaded_stop_the_run(
    tier: str, damage: Callable[[Path], None], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    first, second = ({name: source.state_dict()[name] for name in names} for names in HALVES)
    safetensors.save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    safetensors.save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    files = {name: f"model-0000{1 + (name in second)}-of-00002.safetensors" for name in source.state_dict()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    model = prepared(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), tmp_path, tier)
    preadv = os.preadv

    def damaging(fd: int, data: Any, at: int) -> int:
        if (tmp_path / files["1.weight"]).exists():
            damage(tmp_path)
        return preadv(fd, data, at)

    monkeypatch.setattr(hugging.os, "preadv", damaging)
    with pytest.raises(error, match="model-00002"):
        outsize.load(tmp_path, model)
    with pytest.raises(RuntimeError, match="stopped"):
        outsize.save(tmp_path / "after", model)
