"""Layers that change themselves or their input are recomputed as plain torch would have kept them, or refused."""

import itertools
import random
import sys
import weakref
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.run import layer_state
from outsize.run.layer_state import SMALL_BUFFER_BYTES
from tests.comparing import assert_same_gradients
from tests.conftest import TIERS, Pair, Workshop, batches, squared_error, take_step
from tests.small_models import Built, InTurn

REFUSED = r"layer 'layers\.0' .* changes its input in place, so it cannot be recomputed.*: pass activations=\"keep\""
LARGE = SMALL_BUFFER_BYTES // 4 // 16 + 1  # rows of 16 fp32 values


@pytest.fixture(params=["auto", "recompute"])
def activations(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Centre(nn.Module):
    """Subtracts a running mean that its forward moves."""

    def __init__(self, rows: int = 1) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(rows, 16))

    def move(self, mean: Tensor) -> None:
        self.mean.mul_(0.9).add_(0.1 * mean)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.move(x.detach().mean(0))
        return torch.tanh(self.lin(x - self.mean[:1])) * (1 + self.mean[:1]) + x


class Replaces(Centre):
    def move(self, mean: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * mean


class ThroughData(Centre):
    def move(self, mean: Tensor) -> None:
        self.mean.data.mul_(0.9).add_(0.1 * mean)


class Late(Centre):
    """Its buffer is born in the first forward, with the values of that forward."""

    def __init__(self) -> None:
        super().__init__()
        del self.mean

    def move(self, mean: Tensor) -> None:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", mean[None].clone())
        else:
            super().move(mean)


class Seldom(Centre):
    """Changes only in every third forward, which a second buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def move(self, mean: Tensor) -> None:
        self.count += 1
        if self.count % 3 == 0:
            super().move(mean)


class Large(Centre):
    def __init__(self) -> None:
        super().__init__(rows=LARGE)


class LargeThroughData(ThroughData):
    def __init__(self) -> None:
        super().__init__(rows=LARGE)


class Aliased(Centre):
    """Its mean is one row of its statistics, which are what it writes to; another view of them is of another dtype."""

    def __init__(self, rows: int = 3) -> None:
        super().__init__()
        self.register_buffer("stats", torch.zeros(rows, 16))
        self.register_buffer("mean", self.stats[1:2])
        self.register_buffer("bits", self.stats.view(torch.int32)[1:, ::2])

    def move(self, mean: Tensor) -> None:
        self.stats.mul_(0.9).add_(0.1 * mean)
        assert torch.equal(self.mean[0], self.stats[1])
        assert torch.equal(self.bits, self.stats.view(torch.int32)[1:, ::2])


class LargeAliased(Aliased):
    def __init__(self) -> None:
        super().__init__(rows=LARGE)


class ByKeyword(InTurn):
    """Passes the layers' input by name."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(input=x)
        return self.head(x)


LAYERS = [Centre, Replaces, ThroughData, Late, Seldom, Large, LargeThroughData, Aliased, LargeAliased]


def check(pair: Pair) -> None:
    """Weights and buffers, the latter in the same order."""
    pair.check(atol=1e-6)
    ours, theirs = dict(pair.model.named_buffers()), dict(pair.plain.named_buffers())
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("layer", "place", "activations"),
    [
        (layer, place, ("auto", "recompute")[(row + column) % 2])
        for row, layer in enumerate(LAYERS)
        for column, place in enumerate(("host", "disk"))
    ],
)
def test_layers_that_change_their_buffers_train_as_in_torch(
    workshop: Workshop, layer: type[nn.Module], place: str, activations: str
) -> None:
    pair = workshop.pair(lambda: InTurn(layer), tier=place, activations=activations)
    pair.train(batches(5))
    check(pair)


@pytest.mark.parametrize("layer", [Centre, Replaces, Late, Large], ids=lambda layer: layer.__name__)
def test_each_of_several_forwards_is_recomputed_from_its_own_buffers(
    workshop: Workshop, layer: type[nn.Module], activations: str
) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        first = squared_error(model, batch)
        return first + squared_error(model, (batch[0] * 2, batch[1]))

    pair = workshop.pair(lambda: InTurn(layer), tier="host", activations=activations)
    pair.train(batches(4), loss_of=loss_of)
    check(pair)


def test_a_graph_can_be_recomputed_twice(workshop: Workshop, activations: str) -> None:
    pair = workshop.pair(lambda: InTurn(Centre), tier="host", activations=activations)
    for model, _ in pair.both:
        loss = squared_error(model, batches(1)[0])
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(pair.model, pair.plain)
    check(pair)


def test_a_buffer_that_two_modules_share_stays_shared(workshop: Workshop, activations: str) -> None:
    class Shares(Centre):
        def __init__(self) -> None:
            super().__init__()
            self.mover = nn.Module()
            self.mover.register_buffer("mean", self.mean)

        def move(self, mean: Tensor) -> None:
            self.mover.mean.mul_(0.9).add_(0.1 * mean)

    pair = workshop.pair(lambda: InTurn(Shares), tier="host", activations=activations)
    pair.train(batches(4))
    check(pair)
    assert all(layer.mean is layer.mover.mean for layer in pair.model.layers)  # type: ignore[union-attr]


def test_a_large_buffer_is_not_copied_again_after_a_forward_without_change(
    workshop: Workshop, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = workshop.pair(lambda: InTurn(lambda: Centre(rows=LARGE)), tier="host", activations=activations)
    large = {id(buffer) for buffer in pair.model.buffers()}
    clone, copied = Tensor.clone, []

    def counting(tensor: Tensor, **how: Any) -> Tensor:
        copied.append(id(tensor))
        return clone(tensor, **how)

    monkeypatch.setattr(Tensor, "clone", counting)
    pair.model.eval()
    for batch in batches(3):
        squared_error(pair.model, batch).backward()
    assert sorted(set(copied) & large) == sorted(each for each in copied if each in large)  # once each
    assert set(copied) >= large


def test_a_large_buffer_whose_values_are_lost_is_an_error(workshop: Workshop, activations: str) -> None:
    pair = workshop.pair(lambda: InTurn(Large), tier="host", activations=activations)
    pair.model.eval()
    squared_error(pair.model, batches(1)[0]).backward()
    pair.model.train()
    loss = squared_error(pair.model, batches(1)[0])
    with pytest.raises(RuntimeError, match=r"buffer 'mean' of layer 'layers\.2' .*activations=\"keep\""):
        loss.backward()
    pair.optimizer.zero_grad()
    squared_error(pair.model, batches(1)[0]).backward()  # from now on there are copies


def in_place() -> nn.Module:
    return nn.Sequential(nn.LeakyReLU(inplace=True), nn.Linear(16, 16))


@pytest.mark.parametrize(
    ("kind", "activations"), [(InTurn, "recompute"), (ByKeyword, "offload"), (InTurn, "selective"), (ByKeyword, "auto")]
)
def test_a_layer_that_changes_its_input_is_refused_in_the_forward(
    workshop: Workshop, kind: type[InTurn], activations: str
) -> None:
    fields = {"activations": activations, "disk": workshop.disk}
    pair = workshop.pair(lambda: kind(in_place), tier="host", **fields)
    with pytest.raises(RuntimeError, match=REFUSED) as raised:
        pair.model(batches(1)[0][0].clone())
    assert f', as activations="{activations}"' in str(raised.value)
    with torch.no_grad():
        pair.model(batches(1)[0][0].clone())


@pytest.mark.parametrize("wrap", [list, tuple, lambda xs: dict(enumerate(xs))])
def test_a_changed_input_inside_a_list_or_mapping_is_refused(workshop: Workshop, wrap: Any, activations: str) -> None:
    class Inside(Centre):
        def forward(self, xs: Any) -> Tensor:
            return self.lin(xs[0].add_(1))

    class Whole(InTurn):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](wrap([x]))

    pair = workshop.pair(lambda: Whole(lambda: nn.Sequential(Inside())), tier="host", activations=activations)
    with pytest.raises(RuntimeError, match=REFUSED):
        pair.model(batches(1)[0][0].clone())


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_results_put_into_a_mapping_that_was_given_are_not_there_when_a_layer_runs_again(
    workshop: Workshop, kind: Any, activations: str
) -> None:
    class Puts(Built, lin=(16, 16)):
        def forward(self, found: Any) -> Any:
            found["x"] = torch.tanh(self.lin(found["x"]))
            return found

    class Whole(InTurn):
        def forward(self, x: Tensor) -> Tensor:
            found = kind({"x": x})
            for layer in self.layers:
                found = layer(found)
            return self.head(found["x"])

    workshop.pair(lambda: Whole(Puts), tier="host", activations=activations).train(batches(3))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_an_error_of_a_layer_that_runs_again_says_so(workshop: Workshop) -> None:
    class Narrows(Built, lin=(16, 8)):
        def forward(self, found: Any) -> Any:
            found.x = torch.tanh(self.lin(found.x))
            return found

    pair = workshop.pair(lambda: nn.Sequential(Narrows()), tier="host", activations="recompute")
    found = SimpleNamespace(x=torch.randn(4, 16))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        pair.model(found).x.sum().backward()
    notes = str(raised.value.__notes__)
    del raised, found.x  # the graph holds the arguments, and these the graph
    assert 'pass activations="keep"' in notes


@pytest.mark.parametrize("kind", [InTurn, ByKeyword])
def test_with_keep_a_changed_input_trains_as_in_torch(workshop: Workshop, kind: type[InTurn]) -> None:
    pair = workshop.pair(lambda: kind(in_place), tier="host", activations="keep")
    pair.train(batches(3), loss_of=lambda model, batch: (model(batch[0].clone()) - batch[1]).square().mean(), atol=1e-6)


def test_a_frozen_layer_may_change_its_input(workshop: Workshop, activations: str) -> None:
    def build() -> nn.Module:
        model = InTurn(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
        model.layers[0] = in_place().requires_grad_(False)
        return model

    pair = workshop.pair(build, tier="host", activations=activations)
    pair.train(batches(3), loss_of=lambda model, batch: (model(batch[0].clone()) - batch[1]).square().mean())


def test_an_error_in_the_recomputation_leaves_the_buffers(workshop: Workshop, activations: str) -> None:
    class Fails(Centre):
        fail = False

        def move(self, mean: Tensor) -> None:
            super().move(mean)
            if self.fail:
                raise KeyError("in the recomputation")

    pair = workshop.pair(lambda: InTurn(Fails), tier="host", activations=activations)
    loss = squared_error(pair.model, batches(1)[0])
    present = {name: (buffer, buffer.clone()) for name, buffer in pair.model.named_buffers()}
    Fails.fail = True
    with pytest.raises(KeyError, match="in the recomputation"):
        loss.backward()
    for name, buffer in pair.model.named_buffers():
        assert buffer is present[name][0]
        assert torch.equal(buffer, present[name][1]), name


def test_evaluation_between_steps_changes_nothing(workshop: Workshop, activations: str) -> None:
    pair = workshop.pair(lambda: InTurn(Centre), tier="host", activations=activations)
    for index, batch in enumerate(batches(4)):
        outs = []
        for model, optimizer in pair.both:
            take_step(squared_error(model, batch), optimizer)
            model.eval()
            with torch.no_grad() if index % 2 else torch.enable_grad():
                outs.append(model(batch[0]))
            model.train()
            with torch.no_grad():
                outs.append(model(batch[0]))  # moves the buffers, once
        torch.testing.assert_close(outs[2:], outs[:2], rtol=0, atol=1e-5)
    check(pair)


# -- what the loop or the layer changes in Python --------------------------------------------------------------------


class Chooses(nn.Module):
    """Looks at attributes, at `training`, at hooks on its parts and at what is frozen, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mix = (nn.Linear(16, 16) for _ in range(3))
        self.task = "first"
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        branch = self.first if self.task == "first" else self.second
        scale = 1.5 if self.training else 0.5
        self.seen = torch.tanh(branch(x)) * scale * (1 + 0.1 * self.count)
        return torch.tanh(self.mix(self.seen)) + x


def by_task(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.task = "second"


def by_eval(model: nn.Module) -> None:
    model.eval()


def by_new_attribute(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.forward = lambda x: x
        layer.unheard_of = 1


def by_hook(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.mix.register_forward_hook(lambda module, args, out: out * 3)
        layer.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def by_freezing(model: nn.Module) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.second.requires_grad_(False)
        layer.mix.bias.requires_grad_(False)


@pytest.mark.parametrize("change", [by_task, by_eval, by_hook, by_freezing])
def test_what_changes_between_forward_and_backward_is_of_no_concern(
    workshop: Workshop, change: Any, activations: str
) -> None:
    pair = workshop.pair(lambda: InTurn(Chooses), tier="host", activations=activations)
    for model, optimizer in pair.both:
        for batch in batches(2):
            first = squared_error(model, batch)
            change(model)
            second = squared_error(model, (batch[0] * 2, batch[1]))
            take_step(first + second, optimizer)
            model.train()
    check(pair)


def test_a_recomputation_leaves_the_layer_as_the_loop_had_made_it(workshop: Workshop, activations: str) -> None:
    model = InTurn(Chooses)
    workshop.prepare(model, torch.optim.SGD(model.parameters()), "host", activations=activations)
    loss = squared_error(model, batches(1)[0])
    layer: Any = model.layers[0]
    seen, handle = layer.seen, layer.mix.register_forward_hook(lambda *_: None)
    by_new_attribute(model)
    by_eval(model)
    forward = layer.forward
    layer.second.requires_grad_(False)
    loss.backward()
    assert layer.seen is seen
    assert (layer.count, layer.unheard_of, layer.forward, layer.training) == (1, 1, forward, False)
    assert not layer.second.weight.requires_grad
    assert len(layer.mix._forward_hooks) == 1
    handle.remove()
    assert not layer.mix._forward_hooks


class Remembers(nn.Module):
    """Keeps what it is to compute with next in a dict, and in a list: spikingjelly's neurons do so."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.memory: dict[str, Any] = {"seen": 0.0}
        self.all: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        result = torch.tanh(self.mix(x + self.memory["seen"] + sum(self.all)))
        self.memory["seen"] = result
        self.all.append(result * 0.1)
        self.new = {"result": result}
        return result


def test_dicts_and_lists_of_a_layer_are_as_they_were(workshop: Workshop, activations: str) -> None:
    pair = workshop.pair(lambda: InTurn(Remembers), tier="host", activations=activations)
    for model, optimizer in pair.both:
        layers: Any = model.layers
        for batch in batches(2):
            loss = squared_error(model, batch)
            new = layers[0].new
            (loss + squared_error(model, batch)).backward()
            assert (len(layers[0].memory), len(layers[0].all), list(new)) == (1, 2, ["result"])
            for layer in layers:
                layer.memory["seen"] = 0.0
                layer.all.clear()
            optimizer.step()
            optimizer.zero_grad()
    check(pair)


SHARED = {"scale": 2.0}


class Binds(Built, mix=(16, 16)):
    """Has a dict of others from its forward on."""

    def forward(self, x: Tensor) -> Tensor:
        self.options = SHARED
        return torch.tanh(self.mix(x)) * self.options["scale"]


def test_a_dict_of_others_that_a_forward_binds_is_left_alone(workshop: Workshop, activations: str) -> None:
    pair = workshop.pair(lambda: InTurn(Binds), tier="host", activations=activations)
    pair.train(batches(2))
    check(pair)


class Gated(Built, mix=(16, 16), gate=lambda: nn.Parameter(torch.ones(16))):
    """Uses a parameter of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(x) * self.gate) + x


class ByName(InTurn):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return self.head(x)


def test_a_layer_whose_forward_is_called_by_that_name_is_recomputed(workshop: Workshop, activations: str) -> None:
    pair = workshop.pair(lambda: ByName(Gated), tier="host", activations=activations)
    pair.train(batches(2))
    check(pair)


def test_hooks_of_the_forward_that_are_gone_before_the_backward_have_been_part_of_it(
    workshop: Workshop, activations: str
) -> None:
    pair = workshop.pair(lambda: InTurn(Chooses), tier="host", activations=activations)
    for model, optimizer in pair.both:
        hooks = [layer.mix.register_forward_hook(lambda module, args, out: out * 0.5) for layer in model.layers]
        loss = squared_error(model, batches(1)[0])
        for hook in hooks:
            hook.remove()
        loss.backward()
        optimizer.step()
    check(pair)


def test_batch_norms_and_spectral_norms_are_recomputed(workshop: Workshop, activations: str) -> None:
    class Normed(
        Built,
        lin=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16, bias=False)),
        old=lambda: nn.utils.spectral_norm(nn.Linear(16, 16)),
        norm=lambda: nn.BatchNorm1d(16, momentum=None),
        runs=lambda: 0,
    ):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(1)
            return torch.tanh(self.old(torch.tanh(self.norm(self.lin(x))))) + x

    runs: list[int] = []
    pair = workshop.pair(lambda: InTurn(Normed), tier="host", activations=activations)
    pair.train(batches(4))
    check(pair)
    again = 1 if activations == "auto" else 4  # what fits is kept from the second step on
    assert len(runs) == 3 * (4 + 4 + again)


def test_what_parts_of_a_layer_share_stays_shared(workshop: Workshop, activations: str) -> None:
    class Writes(nn.Module):
        def __init__(self, shared: dict[str, Any]) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)
            self.shared = shared
            self.shared["itself"] = shared

        def forward(self, x: Tensor) -> Tensor:
            self.shared["hidden"] = torch.tanh(self.lin(x))
            return x

    class Reads(Writes):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lin(self.shared["hidden"]) + x
            return out

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared: dict[str, Any] = {}
            self.writes, self.reads = Writes(shared), Reads(shared)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.reads(self.writes(x))
            return out

    pair = workshop.pair(lambda: InTurn(Layer), tier="host", activations=activations)
    for model, _ in pair.both:
        squared_error(model, batches(1)[0])  # and no backward
    pair.train(batches(3))
    for model, _ in pair.both:
        for layer in model.layers:  # type: ignore[union-attr]
            layer.writes.shared.clear()


def test_forwards_without_a_backward_keep_no_graphs(workshop: Workshop, activations: str) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)
            self.kept: Any = SimpleNamespace(out=None)
            self.out: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.out = torch.tanh(self.lin(x))
            seen.append(weakref.ref(self.out))
            self.kept = SimpleNamespace(out=self.out)
            return self.out + x  # type: ignore[no-any-return]

    seen: list[Any] = []
    model = InTurn(Keeps)
    workshop.prepare(model, torch.optim.SGD(model.parameters()), "host", activations=activations)
    for batch in batches(5):
        squared_error(model, batch)
    assert sum(each() is not None for each in seen) == 3
    squared_error(model, batch).backward()
    del model


def test_an_interrupted_recomputation_leaves_the_layer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Chooses()
    state = layer_state.LayerState([*layer.modules()], "a layer", True)
    layer(torch.ones(2, 16))
    state.settle()
    layer.task, layer.count = "second", 7
    change = layer_state._train
    interrupted = [KeyboardInterrupt]

    def train(*wanted: Any) -> None:
        if interrupted:
            raise interrupted.pop()
        change(*wanted)

    monkeypatch.setattr(layer_state, "_train", train)
    with pytest.raises(KeyboardInterrupt), state:
        raise AssertionError("it was interrupted before")
    assert (layer.task, layer.count) == ("second", 7)
    with state:
        assert (layer.task, layer.count) == ("first", 0)
    assert (layer.task, layer.count) == ("second", 7)


@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it looks at
@pytest.mark.parametrize(("compiled", "activations"), [("model", "auto"), ("model", "recompute"), ("layers", "auto")])
def test_a_compiled_model_trains_with_recomputation(compiled: str, activations: str, device: str) -> None:
    """Under "auto" the first step computes again."""
    models, losses = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(InTurn(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())))
    for model in models:
        ours = model is models[0]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if ours:
            places = dict.fromkeys(("params", "grads", "states"), "host")
            outsize.prepare(model, optimizer, device=device, host_memory="64MiB", activations=activations, **places)
        for layer in model.layers if compiled == "layers" and ours else ():
            layer.compile(backend="eager")
        runner = torch.compile(model, backend="eager") if compiled == "model" and ours else model
        for batch in batches(3):
            losses.append(squared_error(runner, batch))
            take_step(losses[-1], optimizer)
    torch._dynamo.reset()
    assert [float(loss) for loss in losses[:3]] == pytest.approx([float(loss) for loss in losses[3:]], rel=1e-6)


class WritesToSaved(Built, inner=lambda: nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])):
    """Writes to what an operation of its own saved for the backward, or what its input was made from."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.inner
        hidden = first(x).exp()
        hidden.add_(1)
        return second(hidden)


class WritesToCopy(WritesToSaved):
    """As it has to be: nothing that is saved is written to."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.inner
        hidden = first(x).exp().clone()
        hidden.add_(1)
        return second(hidden)


@pytest.mark.parametrize(
    ("mode", "tier"),
    [*zip(("keep", "recompute", "offload", "selective"), TIERS, strict=True), ("auto", "host"), ("keep", "squeezed")],
)
def test_what_is_saved_and_written_to_is_an_error_as_in_torch(workshop: Workshop, tier: str, mode: str) -> None:
    data = batches(2)
    fields = {"activations": mode, "activations_tier": "disk", "disk": workshop.disk}
    workshop.pair(lambda: InTurn(WritesToCopy), tier=tier, **fields).train(data)
    pair = workshop.pair(lambda: InTurn(WritesToSaved), tier=tier, **fields)
    for model in (pair.plain, pair.model):
        loss = squared_error(model, data[0])
        with pytest.raises(RuntimeError, match=r"needed for gradient computation.* modified by an inplace operation"):
            loss.backward()


def test_what_is_written_to_between_forward_and_backward(workshop: Workshop, tier: str) -> None:
    """The output of the model, which its last operation saved."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4), nn.Sigmoid())
    workshop.prepare(model, tier=tier)
    output = model(batches(1)[0][0])
    output.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class OwnNoise(nn.Module):
    """Draws from a generator that nobody knows of."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.dropout = dropout
        self.numbers = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if self.dropout:
            kept = [self.numbers.random() > self.dropout for _ in range(y.numel())]
            return x + y * torch.tensor(kept, device=y.device).reshape(y.shape)
        return x + y + self.numbers.random()


class Shrinks(OwnNoise):
    """Its results have other shapes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)[: 7 - next(self.calls) % 2]


@pytest.mark.parametrize("mode", ["recompute", "offload", "selective", "auto"])
@pytest.mark.parametrize("build", [OwnNoise, lambda: OwnNoise(0.2), Shrinks], ids=["noise", "dropout", "shapes"])
def test_a_layer_that_gives_other_values_when_it_runs_again_is_named(
    workshop: Workshop, mode: str, build: Callable[[], nn.Module]
) -> None:
    model = nn.Sequential(nn.Sequential(build()), nn.Sequential(build()))
    workshop.prepare(model, tier="host", disk=workshop.disk, activations=mode)
    loss = model(batches(1)[0][0]).square().mean()
    with pytest.raises(
        RuntimeError, match=r"layer '1' .* gave other values when it ran again.*pass activations=\"keep\""
    ):
        loss.backward()
