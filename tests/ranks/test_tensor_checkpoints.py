"""Checkpoints and exports of tensor-parallel ranks, loaded by others; oracles: the run itself, and one rank alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import outsize
from tests.ranks.launching import in_turn, run_on_ranks
from tests.ranks.test_tensor_parallel import Way, llama, optimizer_of, prepared, sequence_parallel, tokens, train, whole

TIED = Way(tier="disk", steps=2, tied=True)
WAYS = [
    TIED,
    Way(sequence_parallel, tier="host", steps=2, dtype=torch.bfloat16),
    Way(stage=2, tier="disk", steps=2, fields_more=(("state_format", "compact"),)),
    Way(stage=0, tier="device", steps=2),
]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, way: Way, first: int) -> None:
    group = dist.get_rank() // way.shape[-1] if dist.is_initialized() else 0
    train(model, optimizer, way, lambda step: tokens(first + step, group))


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    with outsize.gathered(model):
        return {name: whole(param.detach()).clone() for name, param in model.named_parameters()}


def backward(model: nn.Module, way: Way) -> None:
    ids = tokens(99, dist.get_rank() // way.shape[-1])
    positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    model(input_ids=ids, position_ids=positions).logits.float().square().mean().backward()


def save_and_go_on(ways: list[Way], disk: str) -> list[dict[str, Tensor]]:
    """In the middle of an accumulation."""
    found = []
    for index, way in enumerate(ways):
        model, optimizer, mesh = prepared(way, disk)
        steps(model, optimizer, way, 0)
        outsize.save(Path(disk) / f"{index}" / "step-2", model, optimizer, {"step": 2}).wait()
        backward(model, way)
        outsize.save(Path(disk) / f"{index}" / "middle", model, optimizer).wait()
        steps(model, optimizer, replace(way, steps=1), 2)
        outsize.export(Path(disk) / f"{index}" / "weights", model)
        found.append(values(model, optimizer))
        del model, optimizer, mesh
    return found


def load_and_go_on(ways: list[Way], disk: str) -> list[dict[str, Tensor]]:
    found = []
    for index, way in enumerate(ways):
        model, optimizer, mesh = prepared(way, disk)
        steps(model, optimizer, replace(way, steps=1), 7)  # another place
        outsize.load(Path(disk) / f"{index}" / "middle", model, optimizer)
        steps(model, optimizer, replace(way, steps=1), 2)
        found.append(values(model, optimizer))
        del model, optimizer, mesh
    return found


def load(path: str, way: Way, disk: str) -> dict[str, Tensor]:
    model, optimizer, _ = prepared(way, disk)
    assert outsize.load(path, model, optimizer) == {"step": 2}
    return values(model, optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Tensor]]]]:
    disk = tmp_path_factory.mktemp("saved")
    return disk, run_on_ranks(4, save_and_go_on, WAYS, str(disk))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def alone(way: Way, path: Path, disk: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = llama(way.dtype, way.tied, way.layers)
    optimizer = optimizer_of(model, way)
    outsize.prepare(model, optimizer, host_memory="64MiB", disk=disk, **dict(way.fields_more))
    assert outsize.load(path, model, optimizer) == {"step": 2}
    return model, optimizer


def test_going_on_is_exact(saved: Any) -> None:
    disk, expected = saved
    for found, wanted in zip(run_on_ranks(4, load_and_go_on, WAYS, str(disk)), expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)


def test_other_ranks_load_the_same_bits(saved: Any, tmp_path: Path) -> None:
    """2 x 2 ranks, then one, 1 x 4, 2 x 1, 1 x 2 with other modules split."""
    tied, split = (saved[0] / f"{index}" / "step-2" for index in (0, 3))
    as_tied, as_split = values(*alone(TIED, tied, tmp_path)), values(*alone(WAYS[3], split, tmp_path))
    for found in run_on_ranks(4, load, str(tied), replace(TIED, shape=(1, 4)), str(tmp_path)):
        assert_same(found, as_tied)
    otherwise = replace(WAYS[3], stage=3, tier="host", parallelize=sequence_parallel, shape=(1, 2))
    calls = [
        (load, str(tied), replace(TIED, shape=(2, 1)), str(tmp_path)),
        (load, str(split), otherwise, str(tmp_path)),
    ]
    for of_tied, of_split in run_on_ranks(2, in_turn, *calls):
        assert_same(of_tied, as_tied)
        assert_same(of_split, as_split)


def save_again(path: str, way: Way, disk: str) -> None:
    model, optimizer, _ = prepared(way, disk)
    outsize.load(path, model, optimizer)
    outsize.save(Path(disk) / "again", model, optimizer, {"step": 2}).wait()


def test_optimizer_state_comes_back_through_other_ranks(saved: Any, tmp_path: Path) -> None:
    """One rank, then 2 x 2, then one again: every array of every parameter, with split norms, in bf16 with masters."""
    way = WAYS[1]
    model, optimizer = alone(way, saved[0] / "1" / "step-2", tmp_path)
    first, states = values(model, optimizer), [dict(optimizer.state[param]) for param in model.parameters()]
    outsize.save(tmp_path / "one", model, optimizer, {"step": 2}).wait()
    place = tmp_path / "disk"
    place.mkdir()
    run_on_ranks(4, save_again, str(tmp_path / "one"), way, str(place))
    model, optimizer = alone(way, place / "again", tmp_path)
    assert_same(values(model, optimizer), first)
    for param, state in zip(model.parameters(), states, strict=True):
        now = optimizer.state[param]
        assert now.keys() == state.keys()
        assert len(state) == 3
        assert all(torch.equal(torch.as_tensor(now[key]), torch.as_tensor(value)) for key, value in state.items())


@pytest.mark.parametrize("index", [0, 1, 2])
def test_numpy_reads_it(index: int, saved: Any, tmp_path: Path) -> None:
    numpy_reader = pytest.importorskip("tests.api.numpy_reader")
    folder = saved[0] / f"{index}" / "step-2"
    model, optimizer = alone(replace(WAYS[index], dtype=torch.float32, fields_more=()), folder, tmp_path)
    weights = values(model, optimizer)
    for name, record in json.loads((folder / "manifest.json").read_text())["parameters"].items():
        assert torch.equal(torch.from_numpy(numpy_reader.weight(folder, record)), weights[name]), name
        state = optimizer.state[model.get_parameter(name)]
        for key, region in record["state"].items():
            assert torch.equal(torch.from_numpy(numpy_reader.array(folder, region)), state[key]), key


def test_an_export_opens_in_transformers(saved: Any) -> None:
    from transformers import LlamaForCausalLM

    disk, expected = saved
    for index in (0, 1):
        model = LlamaForCausalLM.from_pretrained(disk / f"{index}" / "weights", dtype=WAYS[index].dtype)
        for name, param in model.named_parameters():
            assert torch.equal(param, expected[0][index][name]), name
