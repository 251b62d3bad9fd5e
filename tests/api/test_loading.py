"""What `load` finds, refuses and passes over; oracles: the values that were saved, and the live ones on an error."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import outsize
from outsize.checkpoint import directory, files, reader
from outsize.checkpoint.files import DataReader, file_record, open_manifest
from outsize.checkpoint.folder import NewFolder
from outsize.checkpoint.manifest import Manifest, sealed
from outsize.checkpoint.regions import Joined, Piece, Region, narrow
from tests.api.checkpoint_runs import edit, prepare
from tests.comparing import assert_same, weights
from tests.conftest import take_step

TIERS = ("device", "host", "disk")


class Net(nn.Module):
    def __init__(self, depth: int = 2, extra: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(48, 48) for _ in range(depth)])
        self.register_buffer("seen", torch.zeros(1))
        if extra:
            self.gate = nn.Linear(48, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.gate(x) if hasattr(self, "gate") else x


class Run:
    def __init__(self, tmp: Path, tier: str = "host", seed: int = 0, net: Any = None, **fields: Any) -> None:
        torch.manual_seed(seed)
        self.model = net or Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        prepare(self.model, self.optimizer, tier, tmp, **fields)

    def train(self, steps: int = 1) -> Run:
        for _ in range(steps):
            dtype = next(self.model.parameters()).dtype
            take_step(self.model(torch.randn(4, 48).to(dtype)).square().mean(), self.optimizer)
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return weights(self.model)

    def state(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}/{key}": torch.as_tensor(value).clone()
            for name, param in self.model.named_parameters()
            for key, value in self.optimizer.state.get(param, {}).items()
        }

    def save(self, path: Path, **options: Any) -> Run:
        outsize.save(path, self.model, self.optimizer, path.name, **options).wait()
        return self


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    for step in (1, 2, 10):
        run.train().save(tmp_path / "ckpts" / f"step-{step}")
    return run


@pytest.mark.parametrize("name", ["ckpts", "ckpts/latest"])
def test_a_directory_gives_its_newest_complete_checkpoint(name: str, run: Run, tmp_path: Path) -> None:
    saved = run.weights()
    run.train()
    assert outsize.load(tmp_path / name, run.model, run.optimizer) == "step-10"
    assert_same(saved, run.weights())


def test_incomplete_and_damaged_checkpoints_are_passed_over_and_named(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpts = tmp_path / "ckpts"
    (ckpts / "step-10" / "manifest.json").unlink()
    file = next((ckpts / "step-2").glob("unit-*.bin"))
    os.truncate(file, 100)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert outsize.load(ckpts, run.model, run.optimizer) == "step-1"
    assert "step-10" in caplog.text
    assert "never completed" in caplog.text
    assert f"{file.name} has 100 bytes" in caplog.text
    (ckpts / "step-1" / "manifest.json").write_text("{")
    with pytest.raises(FileNotFoundError, match="no checkpoint in it is complete") as raised:
        outsize.load(ckpts, run.model, run.optimizer)
    for why in ("step-1: its manifest is damaged", f"{file.name} has 100 bytes", "step-10: it has no manifest"):
        assert why in str(raised.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds none"):
        outsize.load(tmp_path / "empty", run.model, run.optimizer)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        outsize.load(tmp_path / "nowhere", run.model, run.optimizer)


def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_opened_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "ckpts" / "step-10", DataReader.__init__

    def replaced(*args: Any) -> None:
        monkeypatch.undo()
        copy = shutil.copytree(path, tmp_path / "copy")
        shutil.rmtree(path)
        copy.rename(path)
        opened(*args)

    monkeypatch.setattr(DataReader, "__init__", replaced)
    assert outsize.load(path, run.model, run.optimizer) == "step-10"


@pytest.mark.parametrize("text", ["", "{"])
def test_a_damaged_manifest_is_passed_over_and_named(
    text: str, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ckpts" / "step-10" / "manifest.json").write_text(text)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert outsize.load(tmp_path / "ckpts", run.model, run.optimizer) == "step-2"
    assert f"passed over {tmp_path / 'ckpts' / 'step-10'}: its manifest is damaged" in caplog.text


@pytest.mark.parametrize("closed", ["step-10", "step-10/manifest.json"])
def test_what_may_not_be_read_is_passed_over_and_named(
    closed: str, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the refusals are made here."""
    plain, refused = files.os.open, tmp_path / "ckpts" / closed

    def opening(path: Any, *arguments: Any, **named: Any) -> int:
        if Path(path).is_relative_to(refused):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path, *arguments, **named)

    monkeypatch.setattr(files.os, "open", opening)
    monkeypatch.setattr(directory.os, "access", lambda path, _: Path(path) != refused)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert outsize.load(tmp_path / "ckpts", run.model, run.optimizer) == "step-2"
    assert f"passed over {tmp_path / 'ckpts' / 'step-10'}: there is no permission to read it" in caplog.text


def test_a_manifest_wins_over_weights_beside_it(run: Run, tmp_path: Path) -> None:
    outsize.export(tmp_path / "weights", run.model)
    outsize.export(tmp_path / "dcp", run.model, format="dcp")
    for folder in ("weights", "dcp"):
        shutil.copytree(tmp_path / folder, tmp_path / "ckpts" / "step-2", dirs_exist_ok=True)
    assert outsize.load(tmp_path / "ckpts" / "step-2", run.model, run.optimizer) == "step-2"
    for format in ("safetensors", "dcp"):
        with pytest.raises(FileExistsError, match="holds a checkpoint|an empty folder"):
            outsize.export(tmp_path / "ckpts" / "step-1", run.model, format=format)


def test_files_that_were_verified_are_read_though_the_checkpoint_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for at in range(40):
        (folder / f"{at}.bin").write_bytes(bytes([at]) * 100)
    records = {file.name: file_record(file) for file in folder.iterdir()}
    reader = DataReader(folder, Manifest(records, {}, {}, None, []), os.open(folder, os.O_RDONLY))
    reader.verify(files=records)
    shutil.rmtree(folder)
    for at in range(40):
        assert reader.read(Region.at(f"{at}.bin", 0, torch.uint8, (100,))).unique().tolist() == [at]
    reader.close()


def test_damage_that_stands_in_the_way_of_decoding_is_named_by_its_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "with-tensors"
    outsize.save(path, run.model, run.optimizer, {"x": torch.ones(5)}).wait()
    content = (path / "model.bin").read_bytes()
    (path / "model.bin").write_bytes(bytes(len(content)))
    with pytest.raises(ValueError, match=rf"{path}/model.bin is damaged: chunk 0"):
        outsize.load(path, run.model, run.optimizer)


@pytest.mark.parametrize(
    ("extra", "error", "match"),
    [
        ({"n": 10**5000}, ValueError, r"extra\['n'\] is an integer of 16610 bits"),
        ({"a": {-(10**5000): 1}}, ValueError, r"a key of extra\['a'\] is an integer of 16610 bits"),
    ],
    ids=["integer", "key"],
)
def test_what_extra_cannot_hold_is_refused_at_the_call(
    extra: Any, error: type[Exception], match: str, run: Run, tmp_path: Path
) -> None:
    with pytest.raises(error, match=match):
        outsize.save(tmp_path / "refused", run.model, run.optimizer, extra)
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("tier", TIERS)
def test_every_flipped_byte_that_matters_is_found_before_anything_changes(tier: str, tmp_path: Path) -> None:
    run = Run(tmp_path, tier).train().save(tmp_path / "ckpt")
    before, state = run.weights(), run.state()
    files = sorted((tmp_path / "ckpt").glob("*.bin"))
    assert len(files) >= 2
    for file in files:
        content = bytearray(file.read_bytes())
        for at in (0, len(content) // 2):
            content[at] ^= 0x10
            file.write_bytes(content)
            with pytest.raises(ValueError, match=rf"{file.name}.* chunk 0 .*checksum|is damaged"):
                outsize.load(tmp_path / "ckpt", run.model, run.optimizer)
            content[at] ^= 0x10
        file.write_bytes(content)
    assert_same(before, run.weights())
    assert_same(state, run.state())
    outsize.load(tmp_path / "ckpt", run.model, run.optimizer)
    run.train()


def test_strict_false_passes_over_what_only_one_side_has_and_lists_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Run(tmp_path, "disk", net=Net(2, extra=True)).train().save(tmp_path / "ckpt")
    deep = Run(tmp_path, "disk", seed=1, net=Net(3), units=[Net]).train()
    own = deep.weights()["layers.2.weight"], deep.state()["layers.2.weight/exp_avg"]
    with pytest.raises(ValueError, match=r"missing parameters: layers\.2.*unexpected parameters: gate.*strict=False"):
        outsize.load(tmp_path / "ckpt", deep.model, deep.optimizer)
    with caplog.at_level(logging.WARNING, "outsize"):
        outsize.load(tmp_path / "ckpt", deep.model, deep.optimizer, strict=False)
    assert "2 missing parameters, passed over: layers.2.weight, layers.2.bias" in caplog.text
    assert "2 unexpected parameters, passed over: gate.weight, gate.bias" in caplog.text
    for name in ("layers.0.weight", "layers.1.bias"):
        assert torch.equal(deep.weights()[name], small.weights()[name])
        assert torch.equal(deep.state()[f"{name}/exp_avg_sq"], small.state()[f"{name}/exp_avg_sq"])
    assert torch.equal(deep.weights()["layers.2.weight"], own[0])
    assert torch.equal(deep.state()["layers.2.weight/exp_avg"], own[1])
    edit(tmp_path / "ckpt", lambda content: content["parameters"]["layers.0.bias"].update(state={}, scalars=None))
    edit(tmp_path / "ckpt", lambda content: content["parameters"]["layers.0.bias"]["weight"].update(shape=[6, 8]))
    with pytest.raises(ValueError, match="layers.0.bias is 6x8 there and 48 here"):
        outsize.load(tmp_path / "ckpt", deep.model, deep.optimizer, strict=False)


def test_buffers_that_a_forward_shapes_are_there_before_a_load(tmp_path: Path) -> None:
    """As those of quantization-aware training."""
    observed = Run(tmp_path, net=Net()).train()
    observed.model.register_buffer("seen", torch.ones(3))
    observed.save(tmp_path / "ckpt")
    fresh = Run(tmp_path, net=Net())
    with pytest.raises(ValueError, match=r"seen is 3 there and 1 here\. .*was saved\. Some buffers .*: run one before"):
        outsize.load(tmp_path / "ckpt", fresh.model, fresh.optimizer)
    fresh.model.seen = torch.zeros(3)
    outsize.load(tmp_path / "ckpt", fresh.model, fresh.optimizer)
    assert torch.equal(fresh.model.seen, torch.ones(3))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_buffers_that_a_forward_shapes_are_there_before_a_load_of_what_others_wrote(tmp_path: Path, kind: str) -> None:
    plain = Net()
    plain.seen = torch.ones(3)
    if kind == "dcp":
        dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "folder", no_dist=True)
    else:
        (tmp_path / "folder").mkdir()
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(plain.state_dict(), tmp_path / "folder" / "model.safetensors")
    fresh = Run(tmp_path, net=Net())
    with pytest.raises(
        ValueError, match=r"1 buffers .*: seen is 3 there and 1 here\. .*Some buffers .*: run one before"
    ):
        outsize.load(tmp_path / "folder", fresh.model)
    fresh.model.seen = torch.zeros(3)
    outsize.load(tmp_path / "folder", fresh.model)
    assert torch.equal(fresh.model.seen, torch.ones(3))


@pytest.mark.parametrize("tier", TIERS)
def test_the_optimizer_alone_is_restored_without_the_model(tier: str, run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path, tier, seed=1).train(2)
    weights, seen, rng = other.weights(), other.model.seen.clone(), torch.get_rng_state()
    outsize.load(tmp_path / "ckpts", optimizer=other.optimizer)
    assert_same(other.state(), run.state())
    assert_same(weights, other.weights())
    assert torch.equal(seen, other.model.seen)
    assert torch.equal(rng, torch.get_rng_state())


def test_an_optimizer_that_is_not_prepared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not prepared"):
        outsize.load(tmp_path, optimizer=torch.optim.AdamW(Net().parameters()))
    with pytest.raises(TypeError, match="needs a prepared model"):
        outsize.load(tmp_path)


def cut(source: Path, target: Path, ranks: int) -> None:
    """Rewrite a checkpoint as `ranks` ranks would save it: each array in slices, a file for each rank."""
    manifest, data = open_manifest(source)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("unit-*"))
    content = json.loads((target / "manifest.json").read_text())
    ends = [0] * ranks
    files = [open(target / f"unit-rank-{rank}.bin", "wb") for rank in range(ranks)]  # noqa: SIM115

    def slices(region: Region) -> dict[str, Any]:
        values, pieces = data.read(replace(region, codec="", scales=None)).reshape(-1), []
        for rank, part in enumerate(values.tensor_split(ranks)):
            if not part.numel():
                continue
            ends[rank] = -(-ends[rank] // 64) * 64
            pieces.append(Piece(f"unit-rank-{rank}.bin", ends[rank], part.numel()))
            files[rank].seek(ends[rank])
            files[rank].write(part.contiguous().view(torch.uint8).numpy().tobytes())
            ends[rank] = files[rank].tell()
        return Region(region.stored, region.shape, tuple(pieces)).to_json()

    for name, record in manifest.parameters.items():
        entry = content["parameters"][name]
        entry["weight"] = slices(record.weight)
        entry["master"] = record.master and slices(record.master)
        for key, region in record.state.items():
            entry["state"][key] = (
                {"codec": region.codec, "codes": slices(region), "scales": slices(region.scales)}
                if region.codec
                else slices(region)
            )
    content["world_size"], content["ranks"] = ranks, content["ranks"][:1] * ranks
    content["files"] = {name: each for name, each in content["files"].items() if not name.startswith("unit-")}
    for rank, file in enumerate(files):
        file.close()
        content["files"][f"unit-rank-{rank}.bin"] = file_record(target / f"unit-rank-{rank}.bin").to_json()
    (target / "manifest.json").write_text(sealed(json.dumps(content)))
    data.close()


@pytest.mark.parametrize(
    "fields", [{}, {"compute_dtype": torch.bfloat16}, {"compute_dtype": torch.bfloat16, "state_format": "compact"}]
)
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_slices_of_any_number_of_ranks_load_bit_for_bit(
    tier: str, fields: dict[str, Any], tmp_path: Path, device: str
) -> None:
    one = Run(tmp_path, tier, **fields).train(2).save(tmp_path / "1")
    cut(tmp_path / "1", tmp_path / "2", 2)
    cut(tmp_path / "2", tmp_path / "4", 4)
    other = Run(tmp_path, tier, seed=1, **fields)
    outsize.load(tmp_path / "4", other.model, other.optimizer)
    other.save(tmp_path / "back")
    last = Run(tmp_path, "host" if device == "cpu" else tier, seed=2, **fields)
    outsize.load(tmp_path / "back", last.model, last.optimizer)
    for run in (other, last):
        assert_same(one.weights(), run.weights())
        assert_same(one.state(), run.state())
    for run in (one, other, last):
        torch.manual_seed(5)
        run.train(2)
    assert_same(one.weights(), other.weights())
    assert_same(one.weights(), last.weights())


def test_fifty_lines_of_numpy_read_a_checkpoint(tmp_path: Path) -> None:
    numpy_reader = pytest.importorskip("tests.api.numpy_reader")
    for fields in ({}, {"compute_dtype": torch.bfloat16}, {"compute_dtype": torch.float16, "state_format": "compact"}):
        Run(tmp_path, "disk", **fields).train(2).save(tmp_path / "ckpt")
        cut(tmp_path / "ckpt", tmp_path / "cut", 3)
        wide = Run(tmp_path, "host", seed=1)
        outsize.load(tmp_path / "ckpt", wide.model, wide.optimizer)
        for folder in (tmp_path / "ckpt", tmp_path / "cut"):
            manifest = json.loads((folder / "manifest.json").read_text())
            for name, record in manifest["parameters"].items():
                assert torch.equal(torch.from_numpy(numpy_reader.weight(folder, record)), wide.weights()[name].cpu()), (
                    name
                )
                for key, region in record["state"].items():
                    assert torch.equal(
                        torch.from_numpy(numpy_reader.array(folder, region)), wide.state()[f"{name}/{key}"].cpu()
                    ), key
        shutil.rmtree(tmp_path / "cut")


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_joined_and_narrowed_arrays_read_as_torch_does(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    parts = [torch.randn(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
    expected = torch.cat(parts, dim)
    files = {f"{at}.bin": part.reshape(-1) for at, part in enumerate(parts)}

    def read(region: Any, start: int, end: int) -> torch.Tensor:
        if not isinstance(region, Region):
            return torch.cat([torch.empty(0), *(read(*run) for run in region.runs(start, end))])
        return files[region.pieces[0].file][start:end]

    regions = [Region.at(name, 0, torch.float32, tuple(part.shape)) for name, part in zip(files, parts, strict=True)]
    array: Any = Joined(dim, tuple(regions))
    cut = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(0, expected.shape[cut]))
    count = data.draw(st.integers(0, expected.shape[cut] - first))
    for found, wanted in ((array, expected), (narrow(array, cut, first, count), expected.narrow(cut, first, count))):
        assert found.shape == wanted.shape
        low = data.draw(st.integers(0, wanted.numel()))
        high = data.draw(st.integers(low, wanted.numel()))
        assert torch.equal(read(found, low, high), wanted.reshape(-1)[low:high])


def written_by(format: str, path: Path, run: Run) -> None:
    if format == "outsize":
        outsize.save(path, run.model).wait()
    else:
        pytest.importorskip("safetensors")
        outsize.export(path, run.model, format=format)


class Expanded(Net):
    """Expanded views among its buffers, one of them before what it views."""

    def __init__(self, value: float, replaced: bool = False) -> None:
        super().__init__()
        base = torch.full((1,), float(value))
        self.register_buffer("early", base.expand(8))
        self.register_buffer("base", base)
        self.register_buffer("late", torch.full((1, 3), -0.0 if replaced else 0.0).expand(2, 3))
        if replaced:  # as a moving average that is assigned anew
            self.early = torch.arange(8.0)


@pytest.mark.parametrize("format", ["outsize", "safetensors", "dcp"])
def test_an_expanded_buffer_still_views_what_it_viewed_where_that_has_the_stored_values(
    format: str, tmp_path: Path
) -> None:
    written_by(format, tmp_path / "saved", Run(tmp_path, net=Expanded(1)))
    run = Run(tmp_path, seed=1, net=Expanded(2))
    outsize.load(tmp_path / "saved", run.model)
    assert torch.equal(run.model.early, torch.ones(8))
    run.model.base += 1
    assert torch.equal(run.model.early, torch.full((8,), 2.0))
    run.train()


@pytest.mark.parametrize("format", ["outsize", "safetensors", "dcp"])
def test_an_expanded_buffer_takes_stored_values_that_differ_bit_for_bit(format: str, tmp_path: Path) -> None:
    saved = Run(tmp_path, net=Expanded(1, replaced=True))
    written_by(format, tmp_path / "saved", saved)
    run = Run(tmp_path, seed=1, net=Expanded(2))
    outsize.load(tmp_path / "saved", run.model)
    for name in ("early", "base", "late"):
        found, expected = (getattr(each.model, name).clone().view(torch.int32) for each in (run, saved))
        assert torch.equal(found, expected), name
    run.model.early += 1
    assert torch.equal(run.model.base, torch.ones(1))
    run.train()


def test_conjugate_and_negative_views_come_back_as_they_were(tmp_path: Path) -> None:
    def turned(numel: int, angle: float) -> torch.Tensor:
        return torch.polar(torch.ones(numel), torch.arange(numel) + angle).conj()

    def net(angle: float) -> Net:
        made = Net()
        made.register_buffer("turned", turned(6, angle))
        made.register_buffer("negated", turned(1, angle).imag)
        made.register_buffer("wide", turned(1, angle).expand(5))
        return made

    saved = Run(tmp_path, net=net(0.5)).save(tmp_path / "saved")
    run = Run(tmp_path, net=net(0.0))
    outsize.load(tmp_path / "saved", run.model, run.optimizer)
    expected = dict(saved.model.named_buffers())
    assert expected["turned"].is_conj() and expected["negated"].is_neg()
    assert_same(dict(run.model.named_buffers()), expected)


def test_a_sparse_buffer_is_left_out_where_the_state_dict_leaves_it_out(tmp_path: Path) -> None:
    net = Net()
    net.register_buffer("mask", torch.eye(3).bool().to_sparse(), persistent=False)
    run = Run(tmp_path, net=net).save(tmp_path / "saved")
    outsize.load(tmp_path / "saved", run.model, run.optimizer)
    run.train()
    net.register_buffer("mask", net.mask)
    with pytest.raises(TypeError, match="buffer 'mask' is a .* cannot be saved. Register it with persistent=False"):
        run.save(tmp_path / "again")


class Selects(Net):
    """As the losses of torchrl do, with the arguments that these had in torch 1."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
        return super().named_parameters(prefix, recurse)


def test_a_model_may_name_its_parameters_by_a_method_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path, net=Selects()).save(tmp_path / "saved")
    outsize.load(tmp_path / "saved", run.model, run.optimizer)
    outsize.export(tmp_path / "weights", run.model)
    with outsize.gathered(run.model):
        state = copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(state)
    run.train()


def test_a_huge_manifest_of_a_neighbour_is_not_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(FileExistsError, match="not an outsize checkpoint and is not overwritten"):
        run.save(tmp_path / "ckpts" / "step-2")


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_weights_beside_checkpoints_are_not_taken_for_them(format: str, run: Run, tmp_path: Path) -> None:
    outsize.export(tmp_path / "weights", run.model, format=format)
    for entry in (tmp_path / "weights").iterdir():
        entry.rename(tmp_path / "ckpts" / entry.name)
    saved = run.weights()
    run.train()
    trained = run.weights()
    with pytest.raises(ValueError, match="both weights .* and checkpoints .*'step-10'.*step-10, .*latest"):
        outsize.load(tmp_path / "ckpts", run.model)
    assert_same(trained, run.weights())
    assert outsize.load(tmp_path / "ckpts" / "latest", run.model, run.optimizer) == "step-10"
    assert_same(saved, run.weights())


class Pruned:
    """A directory where a run saves with `keep=1`, each time at the worst instant for whoever reads it."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = folder, times

    def go_on(self) -> None:
        """The next checkpoint comes, and the last one goes."""
        newest = max(self.folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), default=None)
        if newest is None or not self.times:
            return
        self.times -= 1
        number = int(newest.name.removeprefix("step-"))
        shutil.copytree(newest, self.folder / f"step-{number + 1}")
        for entry in self.folder.glob("step-*"):
            if entry.name != f"step-{number + 1}":
                entry.rename(self.folder / f".{entry.name}.gone-0123456789ab")
                shutil.rmtree(self.folder / f".{entry.name}.gone-0123456789ab")


@pytest.mark.parametrize("instant", ["listed", "opened", "verified"])
def test_a_directory_is_looked_through_again_when_its_newest_checkpoint_goes(
    instant: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pruned = Pruned(tmp_path / "ckpts", times=2 if instant == "verified" else 3)
    room, name = {
        "listed": (reader, "checkpoints_in"),
        "opened": (reader, "open_manifest"),
        "verified": (DataReader, "verify"),
    }[instant]
    plain = getattr(room, name)

    def first(*given: Any, **fields: Any) -> Any:
        if instant == "listed":
            found = plain(*given, **fields)
            pruned.go_on()
            return found
        pruned.go_on()
        return plain(*given, **fields)

    monkeypatch.setattr(room, name, first)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert outsize.load(tmp_path / "ckpts", run.model, run.optimizer) == "step-10"
    assert not pruned.times
    assert not caplog.text


def test_a_checkpoint_that_is_being_saved_is_no_incomplete_one(tmp_path: Path) -> None:
    saving = NewFolder(tmp_path / "step-1")
    (saving.path / "unit-00000.bin").touch()
    assert directory.lookalikes_in(tmp_path) == {}
    os.close(saving._lock)  # as a kill does
    assert list(directory.lookalikes_in(tmp_path)) == [saving.path]


@pytest.mark.parametrize("seen", [False, True])
def test_what_is_renamed_while_it_is_listed_is_neither_incomplete_nor_damaged(
    seen: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ckpts = os.path.lexists, tmp_path / "ckpts"
    for entry in ckpts.iterdir():
        (entry / "manifest.json").write_text("")

    def lexists(path: Any) -> bool:
        if Path(path).parent.name.startswith("step-") and Path(path).parent.exists():
            shutil.rmtree(Path(path).parent)
            return seen
        return plain(path)

    monkeypatch.setattr(directory.os.path, "lexists", lexists)
    assert directory.lookalikes_in(ckpts) == {}
    assert list(ckpts.iterdir()) == []


def test_tensors_of_an_extra_are_memory_of_the_process(run: Run, tmp_path: Path) -> None:
    outsize.save(tmp_path / "ckpt", run.model, run.optimizer, {"ema": torch.ones(1 << 16)}).wait()
    extra = outsize.load(tmp_path / "ckpt", run.model, run.optimizer)
    os.truncate(tmp_path / "ckpt" / "model.bin", 10)
    assert extra["ema"].sum() == 1 << 16


def test_states_of_generators_are_bounded_together_and_unknown_ones_are_left_out(run: Run, tmp_path: Path) -> None:
    newest = tmp_path / "ckpts" / "step-10"
    region = {"file": "model.bin", "offset": 0, "dtype": "uint8", "shape": [4096]}

    def change(content: Any) -> None:
        content["ranks"][0]["rng"]["more"] = [{"$tensor": region}] * 1000

    edit(newest, change)
    outsize.load(newest, run.model, run.optimizer)

    def change_known(content: Any) -> None:
        content["ranks"][0]["rng"]["cuda"] = content["ranks"][0]["rng"].pop("more")

    edit(newest, change_known)
    with pytest.raises(ValueError, match="more bytes than the files"):
        outsize.load(newest, run.model, run.optimizer)


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_loaded_in_inference_mode_can_be_trained(tier: str, tmp_path: Path) -> None:
    run, other = Run(tmp_path, tier), Run(tmp_path, tier, seed=1)
    torch.manual_seed(7)
    run.train()
    run.model(torch.randn(4, 48)).square().mean().backward()
    run.save(tmp_path / "ckpt")
    with torch.inference_mode():
        outsize.load(tmp_path / "ckpt", other.model, other.optimizer)
    torch.manual_seed(8)
    for each in (run, other):
        torch.manual_seed(8)
        take_step(each.model(torch.randn(4, 48)).square().mean(), each.optimizer, clip=(each.model.parameters(), 0.1))
        each.train()
    assert_same(run.weights(), other.weights())
