"""Tables whose rows lie beside their state on disk: what else reads and writes them sees arrays in one piece."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import outsize
from outsize.checkpoint.files import DataReader, file_record
from outsize.checkpoint.manifest import Manifest
from outsize.checkpoint.regions import Piece, Region
from outsize.move.rows import Reading, arrive
from outsize.move.transfer import Transfer
from tests.api.checkpoint_runs import edit
from tests.conftest import Pair, Workshop, prepared, take_step

ROWS = 700


def lazy(model: nn.Module) -> torch.optim.Optimizer:
    return outsize.optim.LazyAdamW(model.parameters(), lr=0.01)


def table() -> nn.Module:
    return nn.Embedding(ROWS, 10, sparse=True)  # 120 bytes a record


def train(pair: Pair, steps: int) -> None:
    for at in range(steps):
        ids = torch.arange(at, ROWS, 7 + at)
        for model, optimizer in pair.both:
            take_step(torch.tanh(model(ids)).sum(), optimizer)


def test_numpy_reads_the_records_of_a_checkpoint(workshop: Workshop, tmp_path: Path) -> None:
    numpy_reader = pytest.importorskip("tests.api.numpy_reader")
    pair = workshop.pair(table, lazy)
    train(pair, 3)
    outsize.save(tmp_path / "saved", pair.model, pair.optimizer).wait()
    (record,) = json.loads((tmp_path / "saved" / "manifest.json").read_text())["parameters"].values()
    assert record["weight"]["stride"] == 120
    theirs = pair.plain_optimizer.state[pair.plain.weight]
    for region, value in [(record["weight"], pair.plain.weight)] + [
        (record["state"][key], theirs[key]) for key in ("exp_avg", "exp_avg_sq")
    ]:
        assert torch.equal(torch.from_numpy(numpy_reader.array(tmp_path / "saved", region)), value.detach())


@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 3)), between=st.integers(0, 9), data=st.data()
)
def test_any_range_of_rows_that_lie_apart_is_read(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], between: int, data: st.DataObject
) -> None:
    folder, values = tmp_path_factory.mktemp("apart"), torch.randn(shape)
    pieces, stride, at = [], values[:1].numel() * 4 + between if shape[0] else 48, data.draw(st.integers(0, 5))
    for number, part in enumerate(values.tensor_split(data.draw(st.integers(1, 3)))):
        rows = part.reshape(len(part), shape[1] * shape[2]).contiguous().view(torch.uint8)
        content = torch.full((len(part), stride), 255, dtype=torch.uint8)
        content[:, : rows.shape[1]] = rows
        last = content.reshape(-1)[: (len(part) - 1) * stride + rows.shape[1]] if len(part) else content.reshape(-1)
        (folder / f"{number}.bin").write_bytes(bytes(at) + last.numpy().tobytes())
        pieces.append(Piece(f"{number}.bin", at, part.numel()))
    region = Region(torch.float32, shape, tuple(pieces), stride=stride)
    assert Region.from_json(json.loads(json.dumps(region.to_json()))) == region
    records = {file.name: file_record(file) for file in folder.iterdir()}
    manifest = Manifest(records, {}, {}, None, [])
    manifest.check(region)
    reader = DataReader(folder, manifest, os.open(folder, os.O_RDONLY))
    reader.verify([region])
    low = data.draw(st.integers(0, region.numel))
    high = data.draw(st.integers(low, region.numel))
    assert torch.equal(reader.read(region, low, high), values.reshape(-1)[low:high])
    reader.close()


@pytest.mark.parametrize("stride", [39, 1 << 40, -1, "120"])
def test_rows_that_overlap_or_leave_their_file_are_damage(workshop: Workshop, tmp_path: Path, stride: Any) -> None:
    pair = workshop.pair(table, lazy)
    train(pair, 1)
    outsize.save(tmp_path / "saved", pair.model, pair.optimizer).wait()
    edit(tmp_path / "saved", lambda content: content["parameters"]["weight"]["weight"].update(stride=stride))
    with pytest.raises(ValueError, match="damaged"):
        outsize.load(tmp_path / "saved", pair.model, pair.optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 10])
def test_prepare_and_load_write_each_record_once_and_read_only_where_their_windows_meet(
    tmp_path: Path, width: int, dtype: torch.dtype
) -> None:
    rows = (12 << 20) // (12 * width)
    model = nn.Embedding(rows, width, sparse=True).to(dtype)
    optimizer = lazy(model)
    model(torch.arange(0, rows, 9)).sum().backward()
    optimizer.step()  # so that there is a state to place
    optimizer.zero_grad()
    expected = [
        model.weight.detach().clone(),
        *(optimizer.state[model.weight][key] for key in ("exp_avg", "exp_avg_sq")),
    ]
    outsize.prepare(model, optimizer, host_memory="1MiB", disk=tmp_path, device="cpu", params="disk", states="disk")

    def check(before: tuple[int, int]) -> None:
        now = outsize.memory(model)
        assert now.bytes_read - before[0] < 0.01 * 12 * width * rows
        assert 0.99 < (now.bytes_written - before[1]) / (12 * width * rows) < 1.01
        state = optimizer.state[model.weight]
        with outsize.gathered(model):
            found = [model.weight.detach(), state["exp_avg"], state["exp_avg_sq"]]
            assert all(torch.equal(one.to(other.dtype), other) for one, other in zip(found, expected, strict=True))

    check((0, 0))
    outsize.save(tmp_path / "saved", model, optimizer).wait()
    model(torch.arange(500)).sum().backward()
    optimizer.step()  # leaves the checkpoint's file
    optimizer.zero_grad()
    with outsize.gathered(model):
        assert not torch.equal(model.weight, expected[0])
    now = outsize.memory(model)
    outsize.load(tmp_path / "saved", model, optimizer)
    check((now.bytes_read, now.bytes_written))


def test_a_checkpoint_of_version_4_goes_on_as_records(workshop: Workshop, tmp_path: Path) -> None:
    pair, other = workshop.pair(table, lazy, "host"), workshop.pair(table, lazy)
    train(pair, 2)
    outsize.save(tmp_path / "saved", pair.model, pair.optimizer).wait()
    content = edit(tmp_path / "saved", lambda content: content.update(version=4))
    assert "stride" not in json.dumps(content["parameters"])
    outsize.load(tmp_path / "saved", other.model, other.optimizer)
    train(Pair(pair.plain, pair.plain_optimizer, other.model, other.optimizer), 2)
    with outsize.gathered(other.model):
        assert torch.equal(other.model.weight, pair.plain.weight)


def test_a_frozen_table_that_is_trained_later_has_records_of_its_state(workshop: Workshop, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(table().requires_grad_(False), nn.Linear(10, 3))

    pair = workshop.pair(build, lazy, host_memory="1MiB")
    for model, _ in pair.both:
        model[0].requires_grad_(True)
    for at in range(5):
        ids = torch.arange(at, ROWS, 3)
        for model, optimizer in pair.both:
            take_step(torch.tanh(model[0](ids)).sum(), optimizer)
        outsize.save(tmp_path / "saved", pair.model, pair.optimizer).wait()
        outsize.load(tmp_path / "saved", pair.model, pair.optimizer)
    with outsize.gathered(pair.model):
        assert torch.equal(pair.model[0].weight, pair.plain[0].weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_records_of_odd_bytes_have_the_bits_of_rows_in_memory(workshop: Workshop, dtype: torch.dtype) -> None:
    found = []
    for tier, budget in (("host", "64MiB"), ("disk", "1MiB")):
        torch.manual_seed(0)
        model = nn.Embedding(ROWS, 5, sparse=True)  # 60 or 70 bytes a record
        optimizer = lazy(model)
        workshop.prepare(model, optimizer, tier, host_memory=budget, compute_dtype=dtype)
        for ids in ([3], [3, 699], [58], list(range(700)), [58]):
            take_step(torch.tanh(model(torch.tensor(ids))).sum(), optimizer)
        with outsize.gathered(model):
            found.append((model.weight.detach().clone(), optimizer.state_dict()["state"][0]))
    (ours, state), (expected, other) = found
    assert torch.equal(ours, expected)
    assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)) for key, value in other.items())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_drive_that_fails_ends_the_step_and_nothing_is_left_behind(tmp_path: Path, kind: str, ahead: bool) -> None:
    model = nn.Embedding(20_000, 64, sparse=True)
    optimizer = lazy(model)
    outsize.prepare(model, optimizer, host_memory="2MiB", disk=tmp_path, device="cpu", params="disk", states="disk")
    data = [torch.randint(0, 20_000, (1000,)) for _ in range(9)]

    def step(ids: torch.Tensor) -> None:
        take_step(model(ids).sum(), optimizer)

    for ids in data[:5]:
        step(ids)
    resources = prepared(model).resources
    (file,) = {row.store.file.now.file for row in prepared(model).engine.tables[id(model.weight)].rows.arrays.values()}
    wrong, kept = os.open(file.path, os.O_RDONLY if kind == "write" else os.O_WRONLY), file._files
    file._files = [wrong]
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        for ids in outsize.lookahead(data[5:], model) if ahead else data[5:]:
            step(ids)
    assert caught.value.filename == file.path
    with pytest.raises(RuntimeError, match="training stopped after an error"):
        outsize.save(tmp_path / "saved", model, optimizer)
    file._files = kept
    os.close(wrong)
    resources.close()
    assert not list(tmp_path.iterdir())


def test_where_one_file_cannot_be_read_nothing_of_another_is_on_its_way_any_more() -> None:
    """A table has two files when its state was added later. The memory that is read into goes with the error."""

    class Read(Transfer):
        def __init__(self, error: OSError | None) -> None:
            self.error, self.waited = error, False

        def wait(self) -> None:
            self.waited = True
            if self.error is not None:
                raise self.error

        def done(self) -> bool:
            return self.waited

    nothing = torch.empty(0)
    reads = [Read(OSError("of the first")), Read(OSError("of the second")), Read(None)]
    with pytest.raises(OSError, match="of the first"):
        arrive([Reading(Mock(), nothing, nothing, nothing, read) for read in reads])
    assert all(read.waited for read in reads)
