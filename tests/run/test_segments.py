"""Many layers in turn keep the input of every k-th only, where their inputs are too many: the same bits."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import outsize
from outsize.planning.choice import segment_length
from tests.comparing import assert_same_gradients
from tests.conftest import TIERS, Workshop, sgd

DEPTH, WIDTH, ROWS = 24, 16, 1024


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x).tanh())


class Deep(nn.Module):
    """`between`: what the loop over the layers does with a layer's result."""

    def __init__(self, dropout: float = 0.0, between: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(dropout) for _ in range(DEPTH)])
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.between is not None:
                x = self.between(number, x)
        return x


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator("cpu").manual_seed(3)
    pairs = [torch.randn(2, ROWS, WIDTH, generator=generator, device="cpu") for _ in range(3)]
    return [(each[0].to(torch.get_default_device()), each[1].to(torch.get_default_device())) for each in pairs]


class Alive(TorchDispatchMode):
    """Results of a layer's size that are there, on the device."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self._there: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.shape == (ROWS, WIDTH) and result.device.type == self._kind:
            self._there[result.untyped_storage()._cdata] = StorageWeakRef(result.untyped_storage())
            self.most = max(self.most, self.count())
        return result

    def count(self) -> int:
        self._there = {key: each for key, each in self._there.items() if not each.expired()}
        return len(self._there)


def of_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """(what is there when the forward is over; the most at once in forward and backward)."""
    with Alive(batch[0].device.type) as alive:
        loss = (model(batch[0]) - batch[1]).square().mean()
        after = alive.count()
        loss.backward()
    model.zero_grad()
    return after, alive.most


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("tier", TIERS)
def test_the_bits_are_those_of_torch(workshop: Workshop, tier: str, dropout: float) -> None:
    pair = workshop.pair(lambda: Deep(dropout), sgd, tier, activations="recompute")
    pair.train(data())


def test_far_fewer_inputs_stay(workshop: Workshop) -> None:
    pair = workshop.pair(Deep, sgd, "host", activations="recompute")
    first = of_step(pair.model, data()[0])
    second = of_step(pair.model, data()[0])
    assert first[0] >= DEPTH
    assert second[0] < DEPTH / 2
    assert second[1] < 0.75 * first[1]


def test_auto_makes_them_where_inputs_do_not_fit(workshop: Workshop) -> None:
    name = "host_memory" if workshop.device == "cpu" else "device_memory"
    pair = workshop.pair(Deep, sgd, "host", **{name: "1792KiB"})
    pair.train(data())
    after, most = of_step(pair.model, data()[0])
    assert after <= DEPTH // 2 + 1
    assert most < DEPTH
    assert f"of {DEPTH} layers every " in str(outsize.plan(pair.model))


@pytest.mark.parametrize(
    "between",
    [
        lambda number, x: x.add_(1.0) if number % 3 == 0 else x,
        lambda number, x: x + 1.0 if number % 4 == 0 else x,
        lambda number, x: x.view(2, -1, WIDTH).flatten(0, 1),
    ],
    ids=["in place", "added", "viewed"],
)
def test_a_loop_that_changes_what_layers_give_gets_the_same_bits(workshop: Workshop, between: Any) -> None:
    pair = workshop.pair(lambda: Deep(0.2, between), sgd, "squeezed", activations="recompute")
    pair.train(data())


def test_a_result_that_two_layers_take(workshop: Workshop) -> None:
    class Twice(Deep):
        def forward(self, x: Tensor) -> Tensor:
            for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
                x = one(x) + other(x)
            return x

    workshop.pair(Twice, sgd, "host", activations="recompute").train(data())


def test_a_second_backward_and_a_graph_that_is_dropped(workshop: Workshop) -> None:
    pair = workshop.pair(Deep, sgd, "host", activations="recompute")
    pair.train(data())
    for model, _ in pair.both:
        loss = model(data()[0][0]).square().mean()
        loss.backward(retain_graph=True)
        model(data()[1][0])
        loss.backward()
    assert_same_gradients(pair.model, pair.plain)


def test_nothing_stays_when_the_step_is_over(workshop: Workshop) -> None:
    pair = workshop.pair(Deep, sgd, "host", activations="recompute")
    pair.train(data())
    gc.disable()
    try:
        with Alive(data()[0][0].device.type) as alive:
            (pair.model(data()[0][0]) - data()[0][1]).square().mean().backward()
            assert alive.count() == 0
    finally:
        gc.enable()


def test_the_length_of_segments_is_arithmetic() -> None:
    assert segment_length(48, 48 * 2, 34, spare=200, most=48) == 1  # all fits
    assert segment_length(64, 64, 1, spare=40, most=48) == 2  # the fewest that fit
    assert segment_length(64, 64, 1, spare=0, most=48) == 5  # nothing fits: 13 inputs, and 9 in the segment
    assert segment_length(64, 64, 1, spare=0, most=2) == 2
    assert segment_length(48, 48 * 2, 34, spare=0, most=48) == 1  # it would save a tenth
