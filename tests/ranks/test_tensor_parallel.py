"""torch's tensor and sequence parallelism under outsize: a Llama, and what its layers keep; oracle: plain torch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import outsize
from tests.comparing import assert_same
from tests.conftest import take_step
from tests.ranks.launching import in_turn, run_on_ranks
from tests.ranks.training import named_weights, whole
from tests.small_models import Built, llama_config

LENGTH, VOCABULARY = 16, 128
NAMES = ("data", "tp")


def llama(dtype: torch.dtype = torch.float32, tied: bool = False, layers: int = 1) -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = llama_config(
        64,
        128,
        layers,
        4,
        VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(dtype)


WITHIN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
}


def tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Attention heads and the MLPs split over the ranks, norms and embeddings whole on each."""
    rows = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, WITHIN | rows)


def sequence_parallel(model: Any, mesh: DeviceMesh) -> None:
    """The same, and between them each rank has a part of the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    between = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, WITHIN | between)


@dataclass(frozen=True)
class Way:
    """One way to train."""

    parallelize: Callable[[Any, DeviceMesh], None] = tensor_parallel
    stage: int = 3
    tier: str = "host"
    dtype: torch.dtype = torch.float32
    activations: str = "keep"
    accumulate: int = 1
    clip: float = 0.5
    steps: int = 2
    layers: int = 1
    tied: bool = False
    shape: tuple[int, ...] = (2, 2)
    optimizer: str = "AdamW"
    fields_more: tuple[tuple[str, Any], ...] = ()
    no_sync: bool = False

    def fields(self, disk: str) -> dict[str, Any]:
        kinds = ("params", "grads", "states") if self.stage == 3 else ("grads", "states")
        places = dict.fromkeys(kinds, self.tier)
        return {**places, "host_memory": "64MiB", "disk": disk, "stage": self.stage, **dict(self.fields_more)}


def tokens(step: int, part: int) -> Tensor:
    made = torch.Generator().manual_seed(1000 * step + part)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=made)


def optimizer_of(model: nn.Module, way: Way) -> torch.optim.Optimizer:
    if way.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


Curve = list[tuple[float, float]]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, way: Way, batch: Callable[[int], Tensor]) -> Curve:
    found = []
    positions = torch.arange(LENGTH)[None]
    for step in range(way.steps):
        total = 0.0
        for micro in range(way.accumulate):
            ids = batch(step * way.accumulate + micro)
            logits = model(input_ids=ids, position_ids=positions.expand(len(ids), -1)).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            last = micro == way.accumulate - 1
            with outsize.no_sync(model) if way.no_sync and not last and dist.is_initialized() else nullcontext():
                (loss / way.accumulate).backward()
            total += loss.item() / way.accumulate
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), way.clip) if way.clip else 0.0
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, float(norm)))
    return found


def plain(way: Way, parts: int) -> tuple[Curve, dict[str, Tensor]]:
    """Plain torch on the batches of all data-parallel ranks together."""
    torch.set_num_threads(1)
    model = llama(way.dtype, way.tied, way.layers)
    curve = train(
        model, optimizer_of(model, way), way, lambda step: torch.cat([tokens(step, part) for part in range(parts)])
    )
    return curve, named_weights(model)


def prepared(way: Way, disk: str) -> tuple[nn.Module, torch.optim.Optimizer, DeviceMesh]:
    names = {1: None, 2: NAMES, 3: ("copies", *NAMES)}[len(way.shape)]
    mesh = init_device_mesh("cpu", way.shape, mesh_dim_names=names)
    model = llama(way.dtype, way.tied, way.layers)
    way.parallelize(model, mesh["tp"] if names else mesh)
    optimizer = optimizer_of(model, way)
    if not names:
        assert "1 data x 2 tensor" in str(outsize.plan(model, optimizer, mesh=mesh, **way.fields(disk)))
    outsize.prepare(model, optimizer, mesh=mesh, activations=way.activations, **way.fields(disk))
    return model, optimizer, mesh


def train_parallel(ways: list[Way], disk: str) -> list[tuple[Curve, dict[str, Tensor]]]:
    found = []
    for way in ways:
        model, optimizer, mesh = prepared(way, disk)
        group = dist.get_rank() // way.shape[-1]
        curve = train(model, optimizer, way, lambda step, group=group: tokens(step, group))  # type: ignore[misc]
        losses = torch.tensor([loss for loss, _ in curve], dtype=torch.float64)
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
        curve = [(float(loss), norm) for loss, (_, norm) in zip(losses, curve, strict=True)]
        found.append((curve, named_weights(model)))
        del model, optimizer, mesh
    return found


WAYS = [
    Way(accumulate=2, no_sync=True),
    Way(clip=0.0, tier="disk", fields_more=(("update", "backward"),)),
    Way(optimizer="SGD", clip=1e9, stage=2, tier="disk"),
    Way(sequence_parallel, stage=0, tier="device"),
    Way(sequence_parallel, activations="recompute", tier="disk", accumulate=2),
    Way(shape=(2, 1, 2)),  # two copies of two tensor-parallel ranks
]
ALONE = Way(shape=(1, 2))
WAYS_ALONE = [
    ALONE,
    replace(ALONE, activations="recompute", tier="disk", tied=True, layers=2),
    replace(ALONE, shape=(2,)),  # the only dimension has no name, as in torch's own examples
]
"""Without data parallelism."""

OF_ONE_DTYPE = (
    [ALONE, replace(ALONE, tier="device")],
    [replace(ALONE, tier=tier, dtype=torch.bfloat16) for tier in ("device", "disk")],
)


def assert_as_plain(found: tuple[Curve, dict[str, Tensor]], expected: tuple[Curve, dict[str, Tensor]]) -> None:
    for (loss, norm), (plain_loss, plain_norm) in zip(found[0], expected[0], strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-6, abs=1e-6)
        assert norm == pytest.approx(plain_norm, rel=1e-5)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


Found = dict[Any, list[Any]]


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of four ranks found, by function."""
    disk = str(tmp_path_factory.mktemp("four"))
    calls = {
        train_parallel: (train_parallel, WAYS, disk),
        **{function: (function, disk) for function in (read_at_rest, told, build_in_bounded_memory)},
    }
    return dict(zip(calls, zip(*run_on_ranks(4, in_turn, *calls.values(), limit=120), strict=True), strict=True))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two ranks found, by function; of `train_local`, by tier; of ways of one dtype, by dtype."""
    disk = str(tmp_path_factory.mktemp("two"))
    calls = {
        train_parallel: (train_parallel, WAYS_ALONE, disk),
        **{ways[0].dtype: (train_parallel, ways, disk) for ways in OF_ONE_DTYPE},
        **{tier: (train_local, tier, disk) for tier in ("host", "disk")},
        **{function: (function, disk) for function in (refused, empty_part, least_budgets)},
    }
    return dict(zip(calls, zip(*run_on_ranks(2, in_turn, *calls.values()), strict=True), strict=True))


def test_a_llama_on_two_by_two_ranks_trains_as_plain_torch_does(of_four: Found) -> None:
    for way, *found in zip(WAYS, *of_four[train_parallel], strict=True):
        expected = plain(way, 2)
        for each in found:
            assert_as_plain(each, expected)


def test_every_tier_gives_the_same_bits(of_two: Found) -> None:
    for ways in OF_ONE_DTYPE:
        for (curve, weights), *others in of_two[ways[0].dtype]:
            for other_curve, other_weights in others:
                assert curve == other_curve
                assert_same(weights, other_weights)


def test_tensor_parallel_ranks_alone(of_two: Found) -> None:
    for way, *found in zip(WAYS_ALONE, *of_two[train_parallel], strict=True):
        expected = plain(way, 1)
        for each in found:
            assert_as_plain(each, expected)


def least_budgets(disk: str) -> list[int]:
    """What `plan` and `prepare` need for the same model."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=NAMES)
    model = llama()
    tensor_parallel(model, mesh["tp"])
    found = []
    for call in (outsize.plan, outsize.prepare):
        with pytest.raises(outsize.BudgetError) as raised:
            call(model, optimizer_of(model, ALONE), mesh=mesh, host_memory="4KiB", disk=disk, tiles=False)
        found.append(raised.value.needed)
    return found


def test_the_plan_needs_what_prepare_needs(of_two: Found) -> None:
    for planned, prepared in of_two[least_budgets]:
        assert planned == prepared


def read_at_rest(disk: str) -> list[str]:
    model, _, _ = prepared(Way(tier="disk"), disk)
    weight: Any = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    found = []
    with torch.no_grad():
        assert torch.zeros_like(weight).shape == weight.new_zeros(64, 64).shape == (64, 64)
    for read in (
        weight.to_local,
        weight.full_tensor,
        lambda: weight + 1,
        lambda: weight.redistribute(placements=[Replicate()]),
    ):
        try:
            read()
        except RuntimeError as error:
            found.append(str(error))
    with outsize.gathered(weight, modify=True):
        view = weight.T
        assert weight.full_tensor().shape == (64, 64) and weight.to_local().shape == (32, 64)
        with torch.no_grad():
            weight.zero_()
    try:
        view.to_local()
    except RuntimeError as error:
        found.append(str(error))
    with outsize.gathered(weight):
        assert not weight.full_tensor().any()
    return found


def test_what_is_at_rest_cannot_be_read_past_the_gate(of_four: Found) -> None:
    for found in of_four[read_at_rest]:
        assert len(found) == 5
        assert all("q_proj.weight' is at rest (disk)" in message for message in found[:4]), found
        assert "is at rest (disk)" in found[4]


class LocalExperts(Built, first=(8, 8), weight=lambda: nn.Parameter(torch.randn(16, 8) * 0.1), last=(8, 8)):
    """Reads the local part of its weight, as grouped experts do."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        return self.last(torch.tanh(self.first(x)) + (x @ own.T).square() @ own)


def train_local(tier: str, disk: str) -> list[Tensor]:
    """Each rank uses its own half of the rows; plain torch has the same with plain parameters."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=NAMES)
    rank = dist.get_rank()
    torch.manual_seed(0)
    ours = LocalExperts()
    torch.manual_seed(0)
    theirs = LocalExperts()
    theirs.weight = nn.Parameter(theirs.weight.detach()[rank * 8 : rank * 8 + 8].clone())
    split = DTensor.from_local(theirs.weight.detach().clone(), mesh["tp"], [Shard(0)])
    ours.weight = nn.Parameter(split)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (ours, theirs)]
    places = dict.fromkeys(("params", "grads", "states"), tier)
    outsize.prepare(ours, optimizers[0], mesh=mesh, host_memory="4MiB", disk=disk, units=["Linear"], **places)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            take_step(model(x).square().mean(), optimizer)
    with outsize.gathered(ours):
        weight: Any = ours.weight
        return [weight.to_local().detach().clone(), theirs.weight.detach()]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_model_may_use_the_local_part_of_its_parameters(tier: str, of_two: Found) -> None:
    for own, plainly in of_two[tier]:
        torch.testing.assert_close(own, plainly, rtol=1e-6, atol=1e-6)


def told(disk: str) -> dict[str, str]:
    """What `prepare` says to meshes that do not fit."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    meshes = {
        "none": None,
        "other names": init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "data")),
        "pipeline": init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pp")),
        "another part": init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "data")),
        "fully_shard": mesh,
    }
    found = {}
    for kind, given in meshes.items():
        model = llama()
        if kind == "fully_shard":
            fully_shard(model, mesh=mesh["data"])
        else:
            tensor_parallel(model, mesh["tp"])
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError) as raised:  # noqa: PT011  (what it says is looked at by the test)
            outsize.prepare(model, optimizer, mesh=given, host_memory="64MiB", disk=disk)
        found[kind] = str(raised.value)
    return found


REFUSALS = {
    "none": "pass mesh=",
    "other names": "split over the mesh dimension 'tp', which mesh does not name",
    "pipeline": "split over the mesh dimension 'tp', which mesh does not name",
    "another part": "lies on the ranks",
    "fully_shard": "do not wrap",
}


def test_a_mesh_that_does_not_fit_is_refused_with_the_reason(of_four: Found) -> None:
    for found in of_four[told]:
        for kind, words in REFUSALS.items():
            assert words in found[kind], found[kind]


def build_in_bounded_memory(disk: str) -> Curve:
    """Built under `init`, split then; the optimizer's state goes out and in again as torch's."""
    way = Way(tier="disk", stage=0, steps=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    with outsize.init(host_memory="64MiB", disk=disk):
        model = llama()
    tensor_parallel(model, mesh["tp"])
    optimizer = optimizer_of(model, way)
    outsize.prepare(model, optimizer, mesh=mesh, host_memory="64MiB", disk=disk, stage=0, states="host")
    group = dist.get_rank() // 2
    curve = train(model, optimizer, way, lambda step: tokens(step, group))
    state = copy.deepcopy(optimizer.state_dict())
    torch.save(state, io.BytesIO())
    weight: Any = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert optimizer.state[weight]["exp_avg"].shape == (64, 64)
    expected = whole(optimizer.state[weight]["exp_avg"]).clone()
    train(model, optimizer, replace(way, steps=1), lambda step: tokens(step + 2, group))
    assert not torch.equal(whole(optimizer.state[weight]["exp_avg"]), expected)
    optimizer.load_state_dict(state)
    assert torch.equal(whole(optimizer.state[weight]["exp_avg"]), expected)
    return curve


def test_a_model_built_under_init_and_state_dicts(of_four: Found) -> None:
    expected = plain(Way(steps=2), 2)[0]
    found = of_four[build_in_bounded_memory]
    for step, (loss, norm) in enumerate(expected):
        assert sum(each[step][0] for each in found) / 4 == pytest.approx(loss, rel=1e-6)
        assert found[0][step][1] == pytest.approx(norm, rel=1e-5)


def refused(disk: str) -> dict[str, str]:
    """What `prepare` says to what cannot be trained in parts."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=NAMES)
    found = {}
    for kind in ("whole", "dtype", "seed"):
        model = llama()
        if kind == "seed":
            torch.manual_seed(dist.get_rank())
            nn.init.normal_(model.get_parameter("model.norm.weight"))
        tensor_parallel(model, mesh["tp"])
        optimizer = (torch.optim.Adafactor if kind == "whole" else torch.optim.AdamW)(model.parameters())
        fields = {"compute_dtype": torch.bfloat16} if kind == "dtype" else {}
        with pytest.raises(ValueError) as raised:  # noqa: PT011  (what it says is looked at by the test)
            outsize.prepare(model, optimizer, mesh=mesh, stage=0, host_memory="64MiB", disk=disk, **fields)
        found[kind] = str(raised.value)
    return found


def test_what_cannot_be_trained_in_parts_is_refused(of_two: Found) -> None:
    for found in of_two[refused]:
        assert "needs whole parameters, which tensor parallelism has split" in found["whole"]
        assert "cast the model before parallelize_module" in found["dtype"]
        assert "'model.norm.weight' is" in found["seed"] and "rank 1" in found["seed"]


def one_place(disk: str) -> list[tuple[Curve, dict[str, Tensor]]]:
    """Tensor parallelism of degree one, as a configuration may have it."""
    way = Way(shape=(1, 1), stage=0, tier="device")
    found = train_parallel([way, Way(shape=(1, 1), tier="disk")], disk)
    model, optimizer, _ = prepared(way, disk)
    outsize.save(Path(disk) / "saved", model, optimizer)
    outsize.export(Path(disk) / "exported", model)
    outsize.load(Path(disk) / "exported", model)
    return found


def test_one_tensor_parallel_rank_is_like_none(tmp_path: Path) -> None:
    expected = plain(Way(), 1)
    for found in run_on_ranks(1, one_place, str(tmp_path))[0]:
        assert_as_plain(found, expected)


def empty_part(disk: str) -> list[Tensor]:
    """One output over two ranks: the second has nothing of the last layer."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=NAMES)
    found = []
    for attempt in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(output_layouts=Replicate())})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        places = {"params": "disk", "grads": "host", "states": "host"}
        outsize.prepare(model, optimizer, mesh=mesh, host_memory="4MiB", disk=disk, units=["Linear"], **places)
        if attempt:
            outsize.load(Path(disk) / "saved", model, optimizer)
        for _ in range(2):
            take_step(model(torch.ones(2, 8)).square().mean(), optimizer)
        if not attempt:
            outsize.save(Path(disk) / "saved", model, optimizer).wait()
            take_step(model(torch.ones(2, 8)).square().mean(), optimizer)
            take_step(model(torch.ones(2, 8)).square().mean(), optimizer)
        with outsize.gathered(model):
            found.append(torch.cat([whole(param.detach()).flatten() for param in model.parameters()]))
    return found


def test_a_rank_may_have_no_part_of_a_parameter(of_two: Found) -> None:
    for first, second in of_two[empty_part]:
        assert torch.equal(first, second)
