"""Quantized weights, which wrap several tensors: packed on every tier, with the bits of plain torch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import outsize
from tests.conftest import Pair, Workshop, prepared, squared_error, train
from tests.run.codes import KINDS, Adapted, Codes, CodesAbove, Nested
from tests.small_models import Built

WIDTH, DEPTH = 64, 3
PACKED = DEPTH * 2 * (WIDTH * WIDTH + 4 * WIDTH) + DEPTH * 4 * WIDTH
"""Bytes of all frozen values: codes, scales and a bias."""

of_each_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(Adapted(kind) for _ in range(DEPTH)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Of frozen parameters too, as most scripts have it."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator("cpu").manual_seed(7)
    pairs = torch.randn(count, 2, 4, WIDTH, generator=made, device="cpu").to(torch.get_default_device())
    return [(x, y) for x, y in pairs]


def pair_of(workshop: Workshop, kind: Any, tier: str = "squeezed", **fields: Any) -> Pair:
    return workshop.pair(build(kind), sgd, tier, **{"units": Adapted, **fields})


def check(pair: Pair, count: int = 3) -> None:
    assert train(pair.model, pair.optimizer, data(count)) == train(pair.plain, pair.plain_optimizer, data(count))


def weight(model: nn.Module, at: int = 0) -> Any:
    return model[at].base.weight  # type: ignore[index,union-attr]


@of_each_kind
def test_losses_are_those_of_the_plain_program(workshop: Workshop, tier: str, kind: Any) -> None:
    pair = pair_of(workshop, kind, tier)
    check(pair)
    assert type(weight(pair.model)) is kind


@of_each_kind
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_what_layers_save_keeps_no_weights(workshop: Workshop, kind: Any, activations: str) -> None:
    pair = pair_of(workshop, kind, activations=activations)
    streamer = prepared(pair.model).engine.streamer
    loss = squared_error(pair.model, data(1)[0])
    streamer.drop_idle()
    assert sum(unit.state.value == "resident" for unit in prepared(pair.model).engine.parameters.units) <= 1
    loss.backward()
    pair.optimizer.zero_grad()
    check(pair)


@of_each_kind
def test_the_base_is_read_packed_and_never_written(workshop: Workshop, kind: Any) -> None:
    pair = pair_of(workshop, kind, "host", params="disk", activations="keep")
    engine = prepared(pair.model).engine
    units = {unit: unit.shard.layout.param_bytes for unit in engine.parameters.units}
    base = sum(nbytes for unit, nbytes in units.items() if unit.inside)
    assert PACKED <= base <= PACKED + DEPTH * (1 + 4) * 4096  # a page of codes, a page of fp32 values
    train(pair.model, pair.optimizer, data(1))
    for step in data(3):
        engine.streamer.drop_idle()
        before = outsize.memory(pair.model)
        loss = squared_error(pair.model, step)
        engine.streamer.drop_idle()
        loss.backward()
        after = outsize.memory(pair.model)
        assert 2 * base - max(units.values()) <= after.bytes_read - before.bytes_read <= 2 * sum(units.values())
        assert after.bytes_written == before.bytes_written


def test_the_plan_counts_packed_bytes(workshop: Workshop) -> None:
    plan = outsize.plan(build(Codes)(), host_memory="64MiB", device="cpu", units=Adapted)
    frozen = sum(unit.size.params for unit in plan.units if not unit.size.grads)
    assert PACKED <= frozen <= PACKED + DEPTH * 3 * 4 * 4096
    assert len(plan.units) == 2 * DEPTH


@of_each_kind
def test_a_model_without_an_optimizer_gives_the_same_values(workshop: Workshop, kind: Any) -> None:
    plain = build(kind)()
    model = copy.deepcopy(plain)
    workshop.prepare(model, None, "squeezed", units=Adapted)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(data(1)[0][0]), plain(data(1)[0][0]))


@of_each_kind
def test_values_at_rest_are_no_garbage(workshop: Workshop, kind: Any) -> None:
    pair = pair_of(workshop, kind)
    prepared(pair.model).engine.streamer.drop_idle()
    param, listed = weight(pair.model), pair.model.state_dict()["0.base.weight"]
    uses: list[Callable[[Any], object]] = [
        lambda value: value.dequantize(),
        lambda value: functional.linear(data(1)[0][0], value, None),
        lambda value: value.clone(),
        lambda value: value.codes.sum(),
        copy.deepcopy,
        lambda value: torch.save(value, io.BytesIO()),
    ]
    for use in uses:
        for value in (param, listed):
            with pytest.raises(RuntimeError, match=r"'0\.base\.weight\.(codes|scale.*)' is (at rest|managed)"):
                use(value)
    assert "at rest" not in repr(pair.model)
    with outsize.gathered(pair.model):
        for value in (param, listed):
            assert torch.equal(value.dequantize(), weight(pair.plain).dequantize())


@of_each_kind
def test_gathered_shows_the_values_and_stores_what_is_written(workshop: Workshop, kind: Any, tier: str) -> None:
    pair = pair_of(workshop, kind, tier)
    other = Adapted(kind).base.weight
    with outsize.gathered(pair.model[0]):  # type: ignore[index]
        assert type(weight(pair.model)) is kind
        assert torch.equal(weight(pair.model).dequantize(), weight(pair.plain).dequantize())
        assert torch.equal(copy.deepcopy(weight(pair.model)).dequantize(), weight(pair.plain).dequantize())
        with pytest.raises(RuntimeError, match="modify=True"):
            weight(pair.model).copy_(other)
    for model in (pair.model, pair.plain):
        with outsize.gathered(weight(model), modify=True) if model is pair.model else torch.no_grad():
            weight(model).copy_(other)
    check(pair)


@of_each_kind
def test_a_forward_inside_gathered(workshop: Workshop, kind: Any) -> None:
    pair = pair_of(workshop, kind, activations="keep")
    with outsize.gathered(pair.model):
        loss = squared_error(pair.model, data(1)[0])
    loss.backward()
    squared_error(pair.plain, data(1)[0]).backward()
    for mine, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
    for _, optimizer in pair.both:
        optimizer.step()
        optimizer.zero_grad()
    check(pair)


@of_each_kind
def test_a_layer_uses_the_weight_of_another(workshop: Workshop, kind: Any) -> None:
    class Borrowing(Built, layers=build(kind)):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(self.layers(x), self.layers[1].last.weight, None)  # type: ignore[index,union-attr]

    check(workshop.pair(Borrowing, sgd, "squeezed", units=Adapted))


@of_each_kind
@pytest.mark.parametrize("tier", ["device", "squeezed"])
def test_release_gives_the_parameter_back(workshop: Workshop, kind: Any, tier: str) -> None:
    pair = pair_of(workshop, kind, tier)
    param = weight(pair.model)
    check(pair)
    outsize.release(pair.model)
    assert weight(pair.model) is param
    assert type(param) is kind
    assert type(param.codes) is Tensor
    assert torch.equal(param.dequantize(), weight(pair.plain).dequantize())
    check(pair)
    workshop.prepare(pair.model, pair.optimizer, tier, units=Adapted)
    check(pair)


@of_each_kind
@pytest.mark.parametrize("tier", ["host", "squeezed"])
def test_a_checkpoint_goes_on_with_the_same_bits(workshop: Workshop, kind: Any, tier: str, tmp_path: Path) -> None:
    pair = pair_of(workshop, kind, tier)
    check(pair)
    outsize.save(tmp_path / "saved", pair.model, pair.optimizer).wait()
    torch.manual_seed(1)
    model = build(kind)()
    others = [param for param in model.parameters() if not isinstance(param, Codes)]
    optimizer = torch.optim.SGD(others, lr=0.1)
    workshop.prepare(model, optimizer, units=Adapted)
    outsize.load(tmp_path / "saved", model, optimizer)
    assert train(model, optimizer, data(3)) == train(pair.model, pair.optimizer, data(3))
    with outsize.gathered(model):
        assert torch.equal(weight(model).dequantize(), weight(pair.plain).dequantize())


@of_each_kind
def test_the_state_dict_of_an_optimizer_that_has_frozen_weights(workshop: Workshop, kind: Any) -> None:
    pair = workshop.pair(build(kind), lambda model: torch.optim.AdamW(model.parameters()), "squeezed", units=Adapted)
    train(pair.model, pair.optimizer, data(2))
    state = pair.optimizer.state_dict()
    train(pair.model, pair.optimizer, data(2))
    train(pair.plain, pair.plain_optimizer, data(2))
    assert state["state"].keys() == pair.plain_optimizer.state_dict()["state"].keys()
    pair.optimizer.load_state_dict(state)
    again = pair.optimizer.state_dict()
    for index, entry in state["state"].items():
        assert all(torch.equal(value, again["state"][index][name]) for name, value in entry.items())


def test_a_quantized_embedding_is_no_table(workshop: Workshop) -> None:
    model = nn.Embedding(WIDTH, WIDTH, sparse=True).requires_grad_(False)
    model.weight = nn.Parameter(Codes.of(model.weight.detach()), requires_grad=False)
    plain, ids = copy.deepcopy(model), torch.arange(5)
    workshop.prepare(model, None, "squeezed")
    assert torch.equal(model(ids), plain(ids))


def test_a_wrapper_of_floats_is_known_before_its_first_use(workshop: Workshop, tmp_path: Path) -> None:
    class Floats(Codes):
        @classmethod
        def of(cls, value: Tensor) -> Codes:
            return cls(value * 8, torch.full((len(value), 1), 1 / 8))

    pair = pair_of(workshop, Floats, "device")
    with outsize.gathered(weight(pair.model)):
        assert torch.equal(weight(pair.model).dequantize(), weight(pair.plain).dequantize())
    outsize.save(tmp_path / "saved", pair.model, pair.optimizer).wait()
    check(pair)


def test_a_state_dict_is_loaded_inside_gathered(workshop: Workshop) -> None:
    pair = pair_of(workshop, Codes)
    torch.manual_seed(3)
    state = build(Codes)().state_dict()
    pair.plain.load_state_dict(state)
    with outsize.gathered(pair.model, modify=True):
        pair.model.load_state_dict(state)
    check(pair)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_an_export_is_refused_before_anything_is_written(workshop: Workshop, format: str, tmp_path: Path) -> None:
    pair = pair_of(workshop, Codes)
    with pytest.raises(ValueError, match=r"'0\.base\.weight\.codes' is inside a quantized one"):
        outsize.export(tmp_path / "weights", pair.model, format=format)
    assert not (tmp_path / "weights").exists()


def test_moves_and_casts_are_refused(workshop: Workshop) -> None:
    pair = pair_of(workshop, Codes)
    for move in (pair.model.half, pair.model[0].last.half):  # type: ignore[index,operator,union-attr]
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            move()
    pair.model.float()
    check(pair)


@of_each_kind
def test_what_cannot_rest_is_refused_by_name(workshop: Workshop, kind: Any) -> None:
    def turned(model: nn.Module) -> None:
        weight(model).codes = weight(model).codes.t()

    refused: dict[str, tuple[Callable[[nn.Module], object], dict[str, Any]]] = {
        "does not train it": (lambda model: weight(model).requires_grad_(True), {}),
        "compute_dtype is torch.bfloat16": (lambda model: None, {"compute_dtype": torch.bfloat16}),
        r"'0\.base\.weight\.codes' \(torch.int8, torch.strided, strides \(1, 64\)\) cannot rest": (turned, {}),
    }
    for words, (change, fields) in refused.items():
        model = build(kind)()
        change(model)
        with pytest.raises(ValueError, match=rf"parameter '0\.base\.weight' is a {kind.__name__}.*{words}"):
            outsize.prepare(model, **workshop.fields("disk", **fields))
    assert not list(workshop.disk.glob("**/unit*"))


def test_a_layer_compiles(workshop: Workshop) -> None:
    pair = pair_of(workshop, Codes)
    for model, _ in pair.both:
        model[0].compile(backend="aot_eager")  # type: ignore[index,operator]
    check(pair)


def test_a_model_in_host_memory_goes_to_the_computing_device(workshop: Workshop) -> None:
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = build(Nested)()
        plain = copy.deepcopy(model)
    workshop.prepare(model, None, "squeezed", units=Adapted)
    param = weight(model)
    with torch.no_grad():
        found = model(data(1)[0][0])
        torch.testing.assert_close(found.cpu(), plain(data(1)[0][0].cpu()))
    assert param.device.type == param.scale.device.type == found.device.type
    outsize.release(model)
    assert param.dequantize().device.type == found.device.type


def test_tensors_inside_are_read_in_the_file_that_they_were_loaded_from(workshop: Workshop, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    with torch.device("cpu"):
        model, plain = build(CodesAbove)(), build(CodesAbove)()
        values = {}
        for name, param in plain.named_parameters():
            if not param.requires_grad:
                inner: Any = param
                parts = ["codes", "scale"] if isinstance(param, Codes) else []
                values |= {f"{name}.{part}": getattr(inner, part) for part in parts} or {name: param.detach()}
        files.save_file(values, tmp_path / "base.safetensors")
        loaded = files.load_file(tmp_path / "base.safetensors")
        for layer in (layer for block in model for layer in (block.base, block.last)):  # type: ignore[union-attr]
            name = next(name for name, each in model.named_modules() if each is layer)
            codes = CodesAbove(loaded[f"{name}.weight.codes"], loaded[f"{name}.weight.scale"])
            layer.weight = nn.Parameter(codes, requires_grad=False)
            if layer.bias is not None:
                layer.bias = nn.Parameter(loaded[f"{name}.bias"], requires_grad=False)
        before = (tmp_path / "base.safetensors").read_bytes()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if mine.requires_grad:
            mine.data.copy_(theirs)
    plain, optimizers = plain.to(torch.get_default_device()), [sgd(plain), sgd(model)]
    workshop.prepare(model, optimizers[1], "host", params="disk", units=Adapted)
    assert all(unit.shard.in_place for unit in prepared(model).engine.parameters.units if unit.inside)
    assert train(model, optimizers[1], data(3)) == train(plain, optimizers[0], data(3))
    assert (tmp_path / "base.safetensors").read_bytes() == before
