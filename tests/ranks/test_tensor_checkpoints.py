"""Checkpoints and exports of tensor-parallel ranks, loaded by others; oracles: the run itself, and one rank alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import outsize
from tests.comparing import assert_same
from tests.ranks.launching import in_turn, run_on_ranks
from tests.ranks.test_tensor_parallel import Way, llama, optimizer_of, prepared, sequence_parallel, tokens, train
from tests.ranks.training import named_weights

TIED = Way(tier="disk", steps=1, tied=True)
WAYS = [
    TIED,
    Way(sequence_parallel, tier="host", steps=1, dtype=torch.bfloat16),
    Way(stage=2, tier="disk", steps=1, fields_more=(("state_format", "compact"),)),
    Way(stage=0, tier="device", steps=1),
]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, way: Way, first: int) -> None:
    group = dist.get_rank() // way.shape[-1] if dist.is_initialized() else 0
    train(model, optimizer, way, lambda step: tokens(first + step, group))


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
        outsize.save(Path(disk) / f"{index}" / "saved", model, optimizer, {"step": 1}).wait()
        backward(model, way)
        outsize.save(Path(disk) / f"{index}" / "middle", model, optimizer).wait()
        steps(model, optimizer, way, 1)
        outsize.export(Path(disk) / f"{index}" / "weights", model)
        found.append(named_weights(model))
        del model, optimizer, mesh
    return found


def load_and_go_on(ways: list[Way], disk: str) -> list[dict[str, Tensor]]:
    found = []
    for index, way in enumerate(ways):
        model, optimizer, mesh = prepared(way, disk)
        steps(model, optimizer, way, 7)  # another place
        outsize.load(Path(disk) / f"{index}" / "middle", model, optimizer)
        steps(model, optimizer, way, 1)
        found.append(named_weights(model))
        del model, optimizer, mesh
    return found


def load(path: str, way: Way, disk: str) -> dict[str, Tensor]:
    model, optimizer, _ = prepared(way, disk)
    assert outsize.load(path, model, optimizer) == {"step": 1}
    return named_weights(model)


@dataclass(frozen=True)
class Saved:
    folder: Path
    before: list[list[dict[str, Tensor]]]
    """What each rank had when it had saved and gone on, by way."""
    after: list[list[dict[str, Tensor]]]
    """The same from the checkpoint."""
    on_one_by_four: list[dict[str, Tensor]]
    """What ranks of another mesh have loaded of the first way."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    calls = (
        (save_and_go_on, WAYS, str(folder)),
        (load_and_go_on, WAYS, str(folder)),
        (load, str(folder / "0" / "saved"), replace(TIED, shape=(1, 4)), str(folder)),
    )
    return Saved(folder, *zip(*run_on_ranks(4, in_turn, *calls, limit=120), strict=True))


def alone(way: Way, path: Path, disk: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = llama(way.dtype, way.tied, way.layers)
    optimizer = optimizer_of(model, way)
    outsize.prepare(model, optimizer, host_memory="64MiB", disk=disk, **dict(way.fields_more))
    assert outsize.load(path, model, optimizer) == {"step": 1}
    return model, optimizer


def test_going_on_is_exact(saved: Saved) -> None:
    for found, wanted in zip(saved.after, saved.before, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)


def test_other_ranks_load_the_same_bits(saved: Saved, tmp_path: Path) -> None:
    """2 x 2 ranks, then one, 1 x 4, 2 x 1, 1 x 2 with other modules split."""
    tied, split = (saved.folder / f"{index}" / "saved" for index in (0, 3))
    (one, _), (other, _) = alone(TIED, tied, tmp_path), alone(WAYS[3], split, tmp_path)
    as_tied, as_split = named_weights(one), named_weights(other)
    for found in saved.on_one_by_four:
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
    outsize.save(Path(disk) / "again", model, optimizer, {"step": 1}).wait()


def test_optimizer_state_comes_back_through_other_ranks(saved: Saved, tmp_path: Path) -> None:
    """One rank, then 2 x 2, then one again: every array of every parameter, with split norms, in bf16 with masters."""
    way = WAYS[1]
    model, optimizer = alone(way, saved.folder / "1" / "saved", tmp_path)
    first, states = named_weights(model), [dict(optimizer.state[param]) for param in model.parameters()]
    outsize.save(tmp_path / "one", model, optimizer, {"step": 1}).wait()
    place = tmp_path / "disk"
    place.mkdir()
    run_on_ranks(4, save_again, str(tmp_path / "one"), way, str(place))
    model, optimizer = alone(way, place / "again", tmp_path)
    assert_same(named_weights(model), first)
    for param, state in zip(model.parameters(), states, strict=True):
        now = optimizer.state[param]
        assert now.keys() == state.keys()
        assert len(state) == 3
        assert all(torch.equal(torch.as_tensor(now[key]), torch.as_tensor(value)) for key, value in state.items())


@pytest.mark.parametrize("index", [0, 1, 2])
def test_numpy_reads_it(index: int, saved: Saved, tmp_path: Path) -> None:
    numpy_reader = pytest.importorskip("tests.api.numpy_reader")
    folder = saved.folder / f"{index}" / "saved"
    model, optimizer = alone(replace(WAYS[index], dtype=torch.float32, fields_more=()), folder, tmp_path)
    weights = named_weights(model)
    for name, record in json.loads((folder / "manifest.json").read_text())["parameters"].items():
        assert torch.equal(torch.from_numpy(numpy_reader.weight(folder, record)), weights[name]), name
        state = optimizer.state[model.get_parameter(name)]
        for key, region in record["state"].items():
            assert torch.equal(torch.from_numpy(numpy_reader.array(folder, region)), state[key]), key


def test_an_export_opens_in_transformers(saved: Saved) -> None:
    from transformers import LlamaForCausalLM

    for index in (0, 1):
        model = LlamaForCausalLM.from_pretrained(saved.folder / f"{index}" / "weights", dtype=WAYS[index].dtype)
        for name, param in model.named_parameters():
            assert torch.equal(param, saved.before[0][index][name]), name
