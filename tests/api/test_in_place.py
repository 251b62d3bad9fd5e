"""Weights that are read in place, from the folder that the model was loaded from: nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.run import mapped_files
from tests.comparing import weights
from tests.conftest import Workshop, prepared, train

safetensors = pytest.importorskip("safetensors.torch")

WIDTH, DEPTH = 96, 16
BYTES = DEPTH * (WIDTH * WIDTH + WIDTH) * 4
ON_DISK = {"params": "disk", "host_memory": "1MiB"}
NO_DISK: dict[str, Any] = {"host_memory": "512KiB", "disk": None, "params": "auto", "grads": "auto", "states": "auto"}
"""The budget holds two layers beside the staging arena."""


class Layers(nn.Module):
    """Layers of odd sizes; the last one has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, whose tensors begin at no page and at no multiple of 64 bytes."""
    torch.manual_seed(0)
    tensors = {name: param.detach() for name, param in Layers().named_parameters()}
    names = list(tensors)
    folder = tmp_path / "model"
    folder.mkdir()
    for index, part in enumerate((names[:11], names[11:])):
        safetensors.save_file({name: tensors[name] for name in part}, folder / f"{index}.safetensors")
    return folder


def loaded(folder: Path, dtype: torch.dtype | None = None) -> Layers:
    """As loaders do it: the parameters are pieces of mapped files; `dtype` casts."""
    with torch.device("meta"):
        model = Layers()
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_slice(name)[:].to(dtype) for name in opened.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, nn.Parameter(tensor))
    model.head.weight = model.layers[0].weight  # type: ignore[union-attr]
    return model


def x() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))


def units_in_place(model: nn.Module) -> list[bool]:
    return [unit.shard.in_place for unit in prepared(model).engine.parameters.units]


@pytest.mark.parametrize("within_init", [False, True])
def test_a_loaded_model_is_read_in_place_and_nothing_is_written(
    workshop: Workshop, folder: Path, within_init: bool
) -> None:
    plain = loaded(folder)
    if within_init:
        with torch.device("cpu"), outsize.init(host_memory="64KiB", disk=workshop.disk, device="cpu") as context:
            model = loaded(folder)
        assert context.peak_bytes == 0  # the system pages them
        assert not os.listdir(workshop.disk)
    else:
        model = loaded(folder)
    workshop.prepare(model, **NO_DISK)  # no directory of ours is needed
    assert units_in_place(model).count(True) >= DEPTH - 4
    assert outsize.plan(model).bytes_on("disk") == 0
    assert "in place" in str(outsize.plan(model))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x()), plain(x()))
    report = outsize.memory(model)
    assert report.bytes_written == 0
    assert 0 < report.bytes_read <= 3 * BYTES
    assert weights(model).keys() == weights(plain).keys()


@pytest.mark.parametrize("where", ["under init", "a plain model"])
def test_what_was_changed_in_memory_or_cast_is_stored(workshop: Workshop, folder: Path, where: str) -> None:
    def changed() -> Layers:
        model = loaded(folder)
        with torch.no_grad():
            model.layers[1].weight.mul_(2)  # type: ignore[operator]
            model.layers[2].weight.data += 1  # type: ignore[operator]
        model.layers[3].bfloat16().float()
        return model

    plain = changed()
    if where == "under init":
        with torch.device("cpu"), outsize.init(host_memory="256KiB", disk=workshop.disk, device="cpu"):
            model = changed()
    else:
        model = changed()
    workshop.prepare(model, **ON_DISK)
    found = units_in_place(model)
    assert not any(found[1:4])
    assert all(found[5:])  # a neighbour may share a page with what was changed
    with torch.no_grad():
        assert torch.equal(model(x()), plain(x()))


def test_a_model_in_another_dtype_is_converted_and_stored(workshop: Workshop, folder: Path) -> None:
    plain = loaded(folder, torch.bfloat16)
    for model, fields in ((loaded(folder, torch.bfloat16), {}), (loaded(folder), {"compute_dtype": torch.bfloat16})):
        workshop.prepare(model, **ON_DISK, **fields)
        assert not any(units_in_place(model))
        with torch.no_grad():
            assert torch.equal(model(x().bfloat16()), plain(x().bfloat16()))


def test_a_system_that_does_not_tell_of_pages_stores_the_weights(
    workshop: Workshop, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_files, "is_modified", lambda tensor: True)
    model = loaded(folder)
    workshop.prepare(model, **ON_DISK)
    assert not any(units_in_place(model))
    with torch.no_grad():
        assert torch.equal(model(x()), loaded(folder)(x()))


def in_place_and_frozen(folder: Path) -> tuple[Layers, torch.optim.Optimizer]:
    model = loaded(folder).requires_grad_(False)
    model.layers[3].requires_grad_(True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_frozen_layers_are_read_in_place_beside_trained_ones(workshop: Workshop, folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    plain, plain_optimizer = in_place_and_frozen(folder)
    model, optimizer = in_place_and_frozen(folder)
    workshop.prepare(model, optimizer, **NO_DISK | {"host_memory": "640KiB"})
    assert units_in_place(model).count(True) >= 3
    data = [(x(), x() * 2) for _ in range(3)]
    train(model, optimizer, data).close_to(train(plain, plain_optimizer, data))
    assert outsize.memory(model).bytes_written == 0
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def unfrozen(model: Layers, optimizer: Any, folder: Path) -> None:
    for each in (model, plain := in_place_and_frozen(folder)[0]):
        each.layers[1].requires_grad_(True)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    data = [(x(), x() * 2) for _ in range(3)]
    train(model, optimizer, data).close_to(train(plain, plain_optimizer, data))


def modified(model: Layers, optimizer: Any, folder: Path) -> None:
    with outsize.gathered(model.layers[1].weight, modify=True):
        model.layers[1].weight.mul_(2)  # type: ignore[operator]
    plain = loaded(folder)
    with torch.no_grad():
        plain.layers[1].weight.mul_(2)  # type: ignore[operator]
        assert torch.equal(model(x()), plain(x()))


def saved_and_loaded(model: Layers, optimizer: Any, folder: Path) -> None:
    outsize.save(folder.parent / "checkpoint", model, optimizer)
    with outsize.gathered(model, modify=True), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    outsize.load(folder.parent / "checkpoint", model, optimizer)
    with torch.no_grad():
        assert torch.equal(model(x()), loaded(folder)(x()))


CHANGES = [unfrozen, modified, saved_and_loaded]


@pytest.mark.parametrize("change", CHANGES)
def test_a_unit_that_is_written_or_saved_gets_a_file_of_its_own(
    workshop: Workshop, folder: Path, change: Callable[..., None]
) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    model, optimizer = in_place_and_frozen(folder)
    workshop.prepare(model, optimizer, **ON_DISK)
    assert units_in_place(model).count(True) == DEPTH - 1
    change(model, optimizer, folder)
    assert units_in_place(model).count(True) < DEPTH - 1
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("change", CHANGES)
def test_without_a_disk_directory_a_change_is_refused(
    workshop: Workshop, folder: Path, change: Callable[..., None]
) -> None:
    model, optimizer = in_place_and_frozen(folder)
    workshop.prepare(model, optimizer, **NO_DISK | {"host_memory": "640KiB"})
    with pytest.raises(ValueError, match="read in place from the folder.*pass disk="):
        change(model, optimizer, folder)


@pytest.mark.parametrize("how", ["written to", "cut"])
def test_a_file_that_is_changed_while_it_is_read_is_an_error(workshop: Workshop, folder: Path, how: str) -> None:
    model = loaded(folder)
    workshop.prepare(model, **ON_DISK)
    with torch.no_grad():
        model(x())
    file = folder / "0.safetensors"
    if how == "cut":
        os.truncate(file, 8192)
    else:
        os.utime(file, ns=(1, 1))
    prepared(model).engine.streamer.room.last = None
    with pytest.raises(OSError, match="the file was changed") as found, torch.no_grad():
        for _ in range(2):
            prepared(model).engine.streamer.drop_idle()
            model(x())
    assert found.value.filename == str(file)


def test_a_file_that_is_replaced_is_read_on(workshop: Workshop, folder: Path) -> None:
    model, plain = loaded(folder), loaded(folder)
    workshop.prepare(model, **ON_DISK)
    for file in list(folder.iterdir()):
        (folder / "new").write_bytes(b"another")
        os.rename(folder / "new", file)
    with torch.no_grad():
        assert torch.equal(model(x()), plain(x()))


def test_a_model_in_place_is_released_and_exported(workshop: Workshop, folder: Path, tmp_path: Path) -> None:
    model = loaded(folder)
    workshop.prepare(model, **NO_DISK)
    outsize.export(tmp_path / "export", model)
    outsize.release(model)
    with torch.no_grad():
        assert torch.equal(model(x()), loaded(folder)(x()))
    exported = safetensors.load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[name], param) for name, param in loaded(folder).named_parameters())


def test_tiles_are_read_in_place_in_inference_mode(workshop: Workshop, tmp_path: Path) -> None:
    torch.manual_seed(0)
    safetensors.save_file({"weight": torch.randn(4400, 64)}, tmp_path / "table.safetensors")
    values = safetensors.load_file(tmp_path / "table.safetensors")["weight"]
    model, ids = nn.Embedding.from_pretrained(values, freeze=True), torch.arange(0, 4400, 7)
    workshop.prepare(model, **ON_DISK)
    (unit,) = prepared(model).engine.parameters.units
    assert unit.shard.tile_rows
    assert unit.shard.in_place
    with torch.inference_mode():
        assert torch.equal(model(ids), values[ids])


def test_an_accelerator_gets_what_is_read_in_place(sim: Any, workshop: Workshop, folder: Path) -> None:
    with torch.device("cpu"):
        plain, model = loaded(folder), loaded(folder)
    fields = NO_DISK | {"device": "sim", "device_memory": "256KiB", "host_memory": "320KiB"}
    outsize.prepare(model, **fields)
    workshop.watch(model)
    assert any(units_in_place(model))
    with torch.no_grad():
        assert torch.allclose(model(x().to("sim")).cpu(), plain(x()), atol=1e-6)
    assert outsize.memory(model).bytes_written == 0
