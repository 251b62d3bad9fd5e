"""Stages of torch's pipelines, each a prepared model, under every schedule of torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import outsize
from tests.conftest import train
from tests.ranks import training
from tests.ranks.launching import in_turn, run_on_ranks
from tests.ranks.training import HIDDEN, WIDTH, assert_near, same_bits
from tests.small_models import Block, linears

BLOCKS, MICRO_BATCHES, STEPS, CLIP = 8, 4, 2, 0.05
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
SEVERAL = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # the first rank has the first stage and the last
SCHEDULES = [name for name in (*SINGLE, *SEVERAL, *V_SHAPED) if hasattr(schedules, name)]

Trained = tuple[list[float], dict[str, Tensor]]


def stages_of(name: str, rank: int, ranks: int) -> list[int]:
    """The numbers of the stages of a rank."""
    if name in SINGLE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if name in V_SHAPED else [rank, rank + ranks]


def whole(tied: bool = False) -> nn.ModuleDict:
    """`tied`: the first block and the last share a weight."""
    torch.manual_seed(0)
    blocks = nn.ModuleDict({str(number): Block(WIDTH, HIDDEN) for number in range(BLOCKS)})
    if tied:
        blocks[str(BLOCKS - 1)].up.weight = blocks["0"].up.weight
    return blocks


def part(blocks: nn.ModuleDict, stage: int, stages: int) -> nn.Module:
    """A stage, with the names that its blocks have in the whole model."""
    own = range(stage * BLOCKS // stages, (stage + 1) * BLOCKS // stages)
    return nn.Sequential(*[blocks[str(number)] for number in own])


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(16, WIDTH, generator=made), torch.randn(16, WIDTH, generator=made)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(tied: bool = False) -> Trained:
    blocks = whole(tied)
    trace = train(part(blocks, 0, 1), optimizer_of(blocks), map(batch, range(STEPS)), clip=CLIP)
    return trace.losses, {name: each.detach() for name, each in blocks.named_parameters()}


@dataclass(frozen=True)
class Place:
    """Where a stage rests, and what becomes of its activations."""

    tier: str
    activations: str = "keep"
    data: int = 1
    tensor: int = 1
    """Ranks that share each stage."""


DEVICE, HOST, DISK = Place("device"), Place("host"), Place("disk")
RECOMPUTED, OFFLOADED = Place("disk", "recompute"), Place("disk", "offload")


MORE = {SINGLE[0]: (HOST, OFFLOADED), SINGLE[1]: (RECOMPUTED,), SEVERAL[0]: (OFFLOADED,), SEVERAL[-1]: (RECOMPUTED,)}
"""Beside the device and the disk, without --every-tier."""


def train_stages(name: str, place: Place, disk: str, tied: bool = False) -> Trained:
    """The losses, where this rank has the last stage, and the weights of this rank's stages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = ranks // place.data // place.tensor, place.data, place.tensor
    dims = 3 if place.tensor > 1 else 2
    mesh = init_device_mesh("cpu", shape[:dims], mesh_dim_names=("pp", "dp", "tp")[:dims])
    rank, ranks = mesh["pp"].get_local_rank(), shape[0]
    numbers, blocks = stages_of(name, rank, ranks), whole(tied)
    for block in blocks.values() if place.tensor > 1 else ():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    count = ranks * len(numbers)
    parts = [part(blocks, number, count) for number in numbers]
    model = nn.ModuleList(parts)
    optimizer = optimizer_of(model)
    places = dict.fromkeys(("params", "grads", "states"), place.tier)
    memory = "384KiB" if place.tier == "disk" else "64MiB"  # of a rank's blocks some stay
    fields = {**places, "activations": place.activations}
    outsize.prepare(model, optimizer, host_memory=memory, disk=disk, mesh=mesh, **fields)
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(each, number, count, torch.device("cpu"), group=group)
        for each, number in zip(parts, numbers, strict=True)
    ]
    parts_of_batch = max(MICRO_BATCHES, count if name in V_SHAPED else 0)  # these need one for each stage
    # torch would scale a gradient that two stages share twice
    scaled: dict[str, Any] = {"scale_grads": False} if tied else {}
    schedule = getattr(schedules, name)(
        stages[0] if name in SINGLE else stages,
        n_microbatches=parts_of_batch,
        loss_fn=partial(loss_of, parts_of_batch if tied else 1),
        **scaled,
    )
    losses: list[float] = []
    for step in range(STEPS):
        x, y = (each.chunk(place.data)[mesh["dp"].get_local_rank()] for each in batch(step))
        of_parts: list[Tensor] = []
        last = {"target": y, "losses": of_parts} if count - 1 in numbers else {}
        schedule.step(*([x] if 0 in numbers else []), **last)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=place.tier == "device" or None)
        optimizer.step()
        optimizer.zero_grad()
        losses += [torch.stack(of_parts).mean().item() * (parts_of_batch if tied else 1)] if of_parts else []
    names = {id(param): each for each, param in blocks.named_parameters()}
    with outsize.gathered(model):
        return losses, {names[id(param)]: training.whole(param.detach()).clone() for param in model.parameters()}


def loss_of(parts: int, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(x, y) / parts


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in SCHEDULES), *((name, 4) for name in SCHEDULES)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stages_at_rest_train_as_torch_does_under_every_schedule(
    name: str, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Other ways of activations give the same bits, too."""
    if request.config.getoption("--every-tier"):
        places = [DEVICE, DISK, HOST, OFFLOADED, RECOMPUTED]
    elif ranks == 2:
        places = [DEVICE, DISK, *MORE.get(name, ())]
    elif name not in (SINGLE[1], SEVERAL[0], SEVERAL[-1]):
        pytest.skip("with --every-tier")
    else:
        places = [DEVICE, DISK] if name == SEVERAL[0] else [DISK]
    calls = [(train_stages, name, place, str(tmp_path)) for place in places]
    assert_as_plain(run_on_ranks(ranks, in_turn, *calls))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gradients_that_a_schedule_sets_are_averaged(tmp_path: Path) -> None:
    """Zero-bubble schedules do, with two ranks a stage. What is set is reduced with what the next backward of its unit
    leaves, so where units are cut otherwise sums are rounded otherwise."""
    calls = [(train_stages, SEVERAL[-1], Place(tier, data=2), str(tmp_path)) for tier in ("device", "disk")]
    calls.append((train_stages, V_SHAPED[0], Place("disk", data=2), str(tmp_path)))
    _, expected = plain()
    for of_rank in run_on_ranks(4, in_turn, *calls):
        for _, found in of_rank:
            assert_near(found.values(), [expected[each] for each in found])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensor_parallel_stages_train_as_torch_does_where_schedules_set_gradients(tmp_path: Path) -> None:
    _, expected = plain()
    calls = [(train_stages, name, Place("disk", tensor=2), str(tmp_path)) for name in (SEVERAL[-1], V_SHAPED[0])]
    for of_rank in run_on_ranks(4, in_turn, *calls):
        for _, found in of_rank:
            assert_near(found.values(), [expected[each] for each in found])


@pytest.mark.skipif(V_SHAPED[-1] not in SCHEDULES, reason="torch has no DualPipeV")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_rank_with_both_ends_has_tied_weights_once(tmp_path: Path) -> None:
    calls = [(train_stages, V_SHAPED[-1], place, str(tmp_path), True) for place in (DEVICE, DISK)]
    assert_as_plain(run_on_ranks(2, in_turn, *calls), tied=True)


def assert_as_plain(every: list[list[Trained]], tied: bool = False) -> None:
    expected_losses, expected = plain(tied)
    first, *others = zip(*every, strict=True)
    for of_tier in (first, *others):
        losses = next(found for found, _ in of_tier if found)
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        weights = {each: value for _, found in of_tier for each, value in found.items()}
        assert weights.keys() == expected.keys()
        assert_near([weights[each] for each in expected], expected.values())
    for other in others:
        for (_, one), (_, two) in zip(first, other, strict=True):
            assert same_bits(one.values(), two.values())


UNITS, HELD, LAYER = 8, 4, 4 * 256 * 256
SMALL = 5 * LAYER


def in_a_step(layers: int, memory: int, fields: dict[str, Any], parts: int, disk: str) -> tuple[float, int]:
    """What a stage of so many layers reads in a step, in sizes of the stage, and its peak in bytes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pp", "dp"))
    model = linears(256, layers, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outsize.prepare(model, optimizer, host_memory=memory, disk=disk, mesh=mesh, params="disk", **fields)
    pipe = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = schedules.Schedule1F1B(pipe, n_microbatches=parts, loss_fn=nn.functional.mse_loss)
    read = 0
    for _ in range(3):
        before = outsize.memory(model).bytes_read
        x = torch.randn(16, 256)
        last: dict[str, Any] = {"target": torch.randn(16, 256), "losses": []} if dist.get_rank() else {}
        schedule.step(*([] if dist.get_rank() else [x]), **last)
        read = outsize.memory(model).bytes_read - before
        optimizer.step()
        optimizer.zero_grad()
    peak = outsize.memory(model).peak
    return read / (layers * LAYER), sum(nbytes for name, nbytes in peak.items() if not name.startswith("disk"))


def staged(nbytes: int) -> int:
    """A budget that leaves so many bytes beside staging, which has a quarter."""
    return max(-(-nbytes * 4 // 3), nbytes + (1 << 20))


def reads(disk: str) -> list[tuple[float, int]]:
    resting = {"grads": "device", "states": "device"}
    less, more = (staged((UNITS + held + 1) * LAYER) for held in (HELD, UNITS - 1))  # a gradient is being made
    cases: list[tuple[int, int, dict[str, Any], int]] = [
        (UNITS, less, resting, 8),
        (UNITS, more, resting, 8),
        (UNITS, less, {"micro_batches": 4, **resting}, 2),
        (4, SMALL, {"grads": "disk", "states": "disk"}, 4),
        (24, SMALL, {"grads": "disk", "states": "disk"}, 4),
    ]
    return [in_a_step(*case, disk) for case in cases]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_stage_reads_its_weights_as_often_as_the_memory_says(tmp_path: Path) -> None:
    """1F1B turns round 16 times with 8 micro-batches, and finds at each turn the layers that stay."""
    first, last = run_on_ranks(2, reads, str(tmp_path))
    held = [HELD, UNITS - 1, HELD]
    for passes, units, (read, _) in zip((16, 16, 4), held, last[:3], strict=True):
        formula = passes * (1 - units / UNITS)
        assert formula - 0.01 <= read <= formula + 2 / UNITS  # what is fetched ahead depends on what has arrived
    assert first[1][0] <= 3.0
    for (_, shallow), (_, deep) in (first[3:], last[3:]):
        # When reads end decides how many layers are fetched ahead: runs have one bound, and peaks of their own.
        assert max(shallow, deep) <= SMALL + LAYER, "memory is independent of the stage's size"
