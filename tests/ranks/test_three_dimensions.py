"""Data, tensor and pipeline parallelism in one job: one norm, one step, one checkpoint. Oracle: plain torch, alone."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import outsize
from tests.comparing import weights
from tests.conftest import adamw, train
from tests.ranks.launching import Ended, ends_on_ranks, in_turn, run_on_ranks
from tests.ranks.training import HIDDEN, WIDTH, named_weights
from tests.small_models import Block

LAYERS, MICRO_BATCHES = 4, 2
NAMES = ("dp", "tp", "pp")
Shape = tuple[int, int, int]


class Net(nn.Module):
    """Or a stage of it, which lacks some of its layers; the others keep their names."""

    embed: nn.Module | None
    head: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block(WIDTH, HIDDEN) for number in range(LAYERS)})
        self.head = nn.Linear(WIDTH, 8)
        self.register_buffer("scale", torch.ones(()))
        self.layers["3"].register_buffer("last", torch.full((2,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.embed, *self.layers.values(), self.head):
            x = x if layer is None else layer(x)
        return x * self.scale


def net(stage: int = 0, stages: int = 1) -> Net:
    torch.manual_seed(0)
    made = Net()
    for number in range(LAYERS):
        if number * stages // LAYERS != stage:
            del made.layers[str(number)]
    made.embed, made.head = (made.embed if not stage else None), (made.head if stage == stages - 1 else None)
    return made


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    plain = [param for name, param in model.named_parameters() if "norm" in name]
    decayed = [param for name, param in model.named_parameters() if "norm" not in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(16, WIDTH, generator=made), torch.randn(16, 8, generator=made)


@dataclass
class Run:
    """A stage of the model, prepared, and how its ranks take a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    schedule: Any
    clip: float = 0.5
    order: float = 2.0

    def backward(self, step: int) -> float | None:
        """The loss, on ranks that have the last stage."""
        pipe, place = self.mesh["pp"].get_local_rank(), self.mesh["dp"].get_local_rank()
        x, y = (each.chunk(self.mesh["dp"].size())[place] for each in batch(step))
        losses: list[Tensor] = []
        last = pipe == self.mesh["pp"].size() - 1
        self.schedule.step(*([] if pipe else [x]), **({"target": y, "losses": losses} if last else {}))
        return torch.stack(losses).mean().item() if last else None

    def step(self, step: int) -> tuple[float | None, float]:
        loss = self.backward(step)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, self.order)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, float(norm)


def run(shape: Shape, disk: str, name: str = "Schedule1F1B", split: bool = False, **fields: Any) -> Run:
    """`split`: by tensor parallelism, though of one rank."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    stage, stages = mesh["pp"].get_local_rank(), shape[2]
    model = net(stage, stages)
    if split or shape[1] > 1:
        for layer in model.layers.values():
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = optimizer_of(model)
    fields = {"params": "disk", "grads": "disk", "states": "disk", "host_memory": "512KiB", **fields}
    outsize.prepare(model, optimizer, disk=disk, mesh=mesh, **fields)
    pipe = PipelineStage(model, stage, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    parts = max(MICRO_BATCHES, stages)
    schedule = getattr(schedules, name)(pipe, n_microbatches=parts, loss_fn=nn.functional.mse_loss)
    return Run(model, optimizer, mesh, schedule)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights by name, as far as this stage has them, and on one rank alone the optimizer state too."""
    found = named_weights(model)
    alone = not dist.is_initialized()
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items() if alone else ():
            found[f"{key} of {name}"] = torch.as_tensor(value).clone()
    return found


def plain(steps: int, order: float = 2.0) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    model = net()
    trace = train(model, optimizer_of(model), map(batch, range(steps)), clip=0.5, norm_type=order)
    return list(zip(trace.losses, trace.norms, strict=True)), weights(model)


SHAPES: list[Shape] = [(2, 2, 1), (1, 2, 2), (2, 1, 2)]


def train_and_save(shapes: list[Shape], disk: str) -> list[Any]:
    found = []
    for number, shape in enumerate(shapes):
        here = run(shape, disk)
        curve = [here.step(0), here.step(1)]
        outsize.save(Path(disk) / f"{number}" / "step-2", here.model, here.optimizer, {"step": 2}).wait()
        trained = values(here.model, here.optimizer)
        outsize.export(Path(disk) / f"{number}" / "weights", here.model)
        here.step(2)
        found.append((curve, trained, values(here.model, here.optimizer)))
        outsize.release(here.model)
    return found


@dataclass(frozen=True)
class Saved:
    folder: Path
    before: tuple[Any, ...]
    """What each rank found when it trained, by shape."""
    after: tuple[Any, ...]
    """Its values when it had gone on from the checkpoint, by shape."""
    by_others: tuple[Any, ...]
    """What ranks of other shapes have loaded."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What saves and what loads runs in the same processes, as to start them takes long."""
    folder = tmp_path_factory.mktemp("saved")
    calls = ((train_and_save, SHAPES, str(folder)), (load_and_go_on, str(folder)), (load_and_save, str(folder)))
    return Saved(folder, *zip(*run_on_ranks(4, in_turn, *calls, limit=120), strict=True))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_three_dimensions_train_as_torch_does_with_one_norm(number: int, saved: Saved) -> None:
    expected, weights = plain(2)
    seen = set()
    for curve, trained, _ in (every[number] for every in saved.before):
        for (loss, norm), (plain_loss, plain_norm) in zip(curve, expected, strict=True):
            assert loss is None or SHAPES[number][0] > 1 or loss == pytest.approx(plain_loss, rel=1e-6)
            assert norm == pytest.approx(plain_norm, rel=1e-5)
        for name, value in trained.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-5)
        seen |= trained.keys()
    assert seen == weights.keys()


def alone(path: Path, disk: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = optimizer_of(model)
    outsize.prepare(model, optimizer, host_memory="64MiB", disk=disk)
    assert outsize.load(path, model, optimizer) == {"step": 2}
    return model, optimizer


OTHERS: list[tuple[int, Shape]] = [(0, (1, 1, 4)), (2, (1, 1, 4)), (1, (4, 1, 1)), (2, (1, 2, 2))]
"""The number of a shape that saves, and one that loads."""


def load_and_save(folder: str) -> list[dict[str, Tensor]]:
    found = []
    for at, (number, shape) in enumerate(OTHERS):
        here = run(shape, folder)
        path = Path(folder) / f"{number}" / "step-2"
        assert outsize.load(path, here.model, here.optimizer) == {"step": 2}
        outsize.save(Path(folder) / f"again-{at}", here.model, here.optimizer, {"step": 2}).wait()
        found.append(values(here.model, here.optimizer))
        outsize.release(here.model)
    return found


@pytest.mark.parametrize("at", range(len(OTHERS)))
def test_other_shapes_load_the_same_bits(at: int, saved: Saved, tmp_path: Path) -> None:
    """Then one rank loads what those have saved: weights, optimizer state, buffers."""
    number, _ = OTHERS[at]
    model, optimizer = alone(saved.folder / f"{number}" / "step-2", tmp_path)
    expected = values(model, optimizer)
    for every, found in zip(saved.before, saved.by_others, strict=True):
        assert_same(every[number][1], expected)
        assert_same(found[at], expected)
    with torch.no_grad():
        model.scale.zero_(), model.layers["3"].last.zero_()
    outsize.load(saved.folder / f"again-{at}", model, optimizer)
    assert_same(values(model, optimizer), expected)
    assert model.scale.item() == 1.0 and model.layers["3"].last.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_an_export_holds_all_stages(number: int, saved: Saved) -> None:
    found = load_file(saved.folder / f"{number}" / "weights" / "model.safetensors")
    for _, trained, _ in (every[number] for every in saved.before):
        assert_same(trained, found)
    assert found.keys() == net().state_dict().keys()


def load_and_go_on(disk: str) -> list[dict[str, Tensor]]:
    found = []
    for number, shape in enumerate(SHAPES):
        here = run(shape, disk)
        if not number:
            here.step(7)  # another place
        outsize.load(Path(disk) / f"{number}" / "step-2", here.model, here.optimizer)
        here.step(2)
        found.append(values(here.model, here.optimizer))
        outsize.release(here.model)
    return found


def test_going_on_is_exact(saved: Saved) -> None:
    for found, before in zip(saved.after, saved.before, strict=True):
        for one, (_, _, expected) in zip(found, before, strict=True):
            assert_same(one, expected)


def norms(orders: list[float], disk: str) -> list[list[float]]:
    found = []
    for tier, split in (("device", False), ("disk", False), ("device", True)):
        here = run((1, 1, 2), disk, split=split, params=tier, grads=tier, states=tier, host_memory="768KiB")
        here.backward(0)
        grads = [param.grad for param in here.model.parameters()]
        found.append([float(torch.nn.utils.get_total_norm(grads, order)) for order in orders])
        own = [grad.norm() for grad in grads]
        of_stage = torch.linalg.vector_norm(torch.stack(own[1:]))  # not of all: not of all stages
        assert float(of_stage) == pytest.approx(sum(float(each) ** 2 for each in own[1:]) ** 0.5)
        outsize.release(here.model)
    return found


def test_norms_of_all_orders_are_over_all_stages(tmp_path: Path) -> None:
    orders = [2.0, 1.0, float("inf"), 3.0]
    expected = [plain(1, order)[0][0][1] for order in orders]
    for found in run_on_ranks(2, norms, orders, str(tmp_path)):
        for of_tier in found:
            assert of_tier == pytest.approx(expected, rel=1e-5)


def scaled(disk: str) -> list[tuple[float, int]]:
    """A stage alone overflows in the second step: no stage takes it, and all lower the scale."""
    here = run((1, 1, 2), disk)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    scaler.scale(torch.ones(()))  # as the loss function does
    found = []
    for step in range(3):
        here.backward(step)
        if step == 1 and dist.get_rank():
            here.model.head.weight.grad.mul_(float("inf"))
        scaler.step(here.optimizer)
        scaler.update()
        here.optimizer.zero_grad()
        found.append((scaler.get_scale(), outsize.memory(here.model).skipped_steps))
    return found


def test_an_overflow_in_one_stage_skips_the_step_of_all(tmp_path: Path) -> None:
    for found in run_on_ranks(2, scaled, str(tmp_path)):
        assert found == [(4.0, 0), (2.0, 1), (2.0, 1)]


def diverged(here: Run) -> None:
    here.backward(0)
    if here.mesh["pp"].get_local_rank():
        here.model.head.weight.grad.mul_(float("nan"))
    here.optimizer.step()


def killed(here: Run) -> None:
    here.step(0)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    here.step(1)


def astray(wrong: Callable[[Run], None], disk: str) -> None:
    wrong(run((2, 1, 2), disk))


class Words(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def last_words(disk: str) -> list[str]:
    """What an interpreter says that ends by the death of another."""
    logging.getLogger("outsize").addHandler(words := Words())
    try:
        astray(killed, disk)
    except RuntimeError:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    return words.said


def ends(wrong: Callable[..., None], *args: Any) -> list[Ended]:
    found = ends_on_ranks(4, wrong, *args)
    assert all(end.seconds < 10 for end in found)
    return found


def test_divergence_in_one_stage_is_named_in_all(tmp_path: Path) -> None:
    for end in ends(astray, diverged, str(tmp_path)):
        assert end.kind == "FloatingPointError" and "'head.weight'" in str(end.error), end.trace
        assert "Nothing was updated" in str(end.error)


def test_a_rank_that_is_killed_ends_all_stages(tmp_path: Path) -> None:
    *others, last = ends(last_words, str(tmp_path))
    assert last.killed
    for end in others:
        assert end.value == ["rank 3 of 4 is gone (killed, ended or unreachable)"], end


def two_stages(
    first: Callable[[], nn.Module], second: Callable[[], nn.Module], disk: str, lr: float = 0.1, **fields: Any
) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    model = (second if dist.get_rank() else first)()
    optimizer = torch.optim.SGD(list(model.parameters()) or [torch.zeros(1)], lr=lr)
    outsize.prepare(model, optimizer, host_memory="64MiB", disk=disk, mesh=mesh, **fields)
    return model


def with_head() -> Net:
    """A first stage that has the head too, as a copy."""
    made = net(0, 2)
    made.head = nn.Linear(WIDTH, 8)
    return made


def frozen() -> nn.Module:
    return net(0, 2).requires_grad_(requires_grad=False)


def other_buffer(stage: int) -> nn.Module:
    made = net(stage, 2)
    made.register_buffer("mask", torch.ones(3 + stage))
    return made


def set_by_the_script(disk: str) -> list[float]:
    found = []
    for tier in ("device", "disk"):
        here = run((1, 1, 2), disk, params=tier, grads=tier, states=tier)
        for param in here.model.parameters():
            param.grad = torch.ones(param.shape)
        found.append(float(torch.nn.utils.clip_grad_norm_(here.model.parameters(), 1.0, foreach=tier == "device")))
        here.optimizer.step()
        here.optimizer.zero_grad()
        here.backward(0)
        with outsize.gathered(here.model, grads=True, modify=True):
            found.append(float(torch.nn.utils.clip_grad_norm_(here.model.parameters(), 1e9)))
        found.append(float(torch.nn.utils.clip_grad_norm_(here.model.parameters(), 1.0)))
        outsize.release(here.model)
    return found


def test_gradients_that_a_script_sets_or_sees_have_one_norm(tmp_path: Path) -> None:
    expected = sum(param.numel() for param in net().parameters()) ** 0.5
    first, second = run_on_ranks(2, set_by_the_script, str(tmp_path))
    for found in (first, second):
        assert found[::3] == pytest.approx([expected] * 2)
        assert found[1::3] == pytest.approx(found[2::3], rel=1e-5)
        assert found[1::3] == pytest.approx(first[1::3])


def bad_stages(disk: str) -> dict[str, str]:
    """What is said to each kind."""
    said = {}
    for kind in BAD:
        try:
            prepare_bad_stages(kind, disk)
        except ValueError as error:
            said[kind] = str(error)
    return said


def prepare_bad_stages(kind: str, disk: str) -> None:
    if kind == "shared":
        two_stages(with_head, lambda: net(1, 2), disk)
    elif kind == "empty":
        two_stages(lambda: net(0, 2), nn.Tanh, disk)
    elif kind == "frozen":
        two_stages(frozen, lambda: net(1, 2), disk)
    elif kind == "options":
        two_stages(lambda: net(0, 2), lambda: net(1, 2), disk, lr=0.1 + dist.get_rank())
    elif kind == "update":
        two_stages(lambda: net(0, 2), lambda: net(1, 2), disk, update="backward")
    elif kind == "buffer":
        outsize.save(Path(disk) / "saved", two_stages(lambda: other_buffer(0), lambda: other_buffer(1), disk))
    elif kind == "budget":
        two_stages(lambda: net(0, 2), lambda: nn.Linear(4096, 4096), disk, params="device")
    else:
        model = two_stages(
            lambda: nn.Sequential(Block(WIDTH, HIDDEN)), lambda: nn.Sequential(Block(WIDTH, HIDDEN)), disk
        )
        outsize.save(Path(disk) / "saved", model)


BAD = {
    "shared": "ranks 0 and 1 both have the parameter 'head.weight'",
    "empty": "has no parameters",
    "frozen": "stage of rank 0 has no trainable parameter",
    "options": "lr of group 0 is 0.1 on rank 0 and 1.1 on rank 1",
    "update": "a step of a pipeline has several",
    "buffer": "another shape or dtype, 'mask'",
    "budget": "host_memory",
    "by place": "several have a parameter '0.norm.weight'",
}


def test_stages_that_cannot_be_are_refused_on_every_rank(tmp_path: Path) -> None:
    for said in run_on_ranks(2, bad_stages, str(tmp_path)):
        for kind, words in BAD.items():
            assert words in said[kind], kind


def refusals(disk: str) -> list[tuple[str, int, int]]:
    """What is too small for one rank alone: the second stage of a pipeline, the first part of an uneven split. What it
    needs is accepted then."""
    found = []
    for name in ("pp", "tp"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
        if name == "pp":
            model = nn.Sequential(nn.Linear(16384, 1 + dist.get_rank(), bias=False))
        else:
            model = parallelize_module(
                nn.Sequential(nn.Linear(16384, 3, bias=False)), mesh, {"0": ColwiseParallel(use_local_output=False)}
            )
        fields = {**dict.fromkeys(("params", "grads", "states"), "disk"), "mesh": mesh, "tiles": False}
        with pytest.raises(outsize.BudgetError, match="unit '0'|the model") as refused:
            outsize.prepare(model, adamw(model), host_memory="450KiB", disk=disk, **fields)
        found.append((refused.value.field, refused.value.needed, refused.value.available))
        outsize.prepare(model, adamw(model), host_memory=refused.value.needed, disk=disk, **fields)
    return found


def test_a_budget_that_is_too_small_for_one_rank_is_refused_alike_on_all(tmp_path: Path) -> None:
    expected = [("host_memory", needed << 10, 450 << 10) for needed in (512, 640)]
    assert run_on_ranks(2, refusals, str(tmp_path)) == [expected] * 2
