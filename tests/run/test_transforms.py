"""Transforms of torch around a prepared model: torch.func, forward AD, parametrizations, torch.compile, caches."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import CheckpointError

import outsize
from tests.comparing import assert_same_gradients
from tests.conftest import Workshop, adamw, batches, squared_error, take_step
from tests.small_models import Built, Stack

Net = nn.Module


def inputs(rows: int = 3) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))


def dual(net: Net, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(x, x)))[1].clone()


def weight_gradient(net: Net, x: Tensor) -> Tensor:
    params = {name: param.detach() for name, param in net.named_parameters()}
    return grad(lambda given: functional_call(net, given, (x,)).sum())(params)["head.weight"]


TRANSFORMS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "jacrev": lambda net, x: jacrev(net)(x),
    "jacfwd": lambda net, x: jacfwd(net)(x),
    "vmap of jacrev": lambda net, x: vmap(jacrev(net))(x),
    "jvp": lambda net, x: jvp(net, (x,), (x,))[1],
    "vjp": lambda net, x: vjp(net, x)[1](net(x))[0],
    "hessian": lambda net, x: hessian(lambda row: net(row).sum())(x[0]),
    "grad": lambda net, x: grad(lambda rows: net(rows).sum())(x),
    "grad by weights": weight_gradient,
    "forward AD": dual,
}


@pytest.fixture(params=["keep", "recompute"])
def activations(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_give_inside_gathered_what_torch_gives(workshop: Workshop, transform: str, activations: str) -> None:
    pair = workshop.pair(activations=activations)
    of = TRANSFORMS[transform]
    with outsize.gathered(pair.model):
        torch.testing.assert_close(of(pair.model, inputs()), of(pair.plain, inputs()))


def test_trains_on_a_loss_made_of_jacobians(workshop: Workshop, tier: str, activations: str) -> None:
    """The backward comes after the parameters went back to rest, as those of whole loops do."""
    pair = workshop.pair(tier=tier, activations=activations)
    for step in range(3):
        for model, optimizer in pair.both:
            with outsize.gathered(pair.model):
                loss = jacrev(model)(inputs(2 + step)).square().sum()
            take_step(loss, optimizer)
        pair.check()
    pair.train(batches(3))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_write_inside_a_transform_is_refused(workshop: Workshop, recorded: bool) -> None:
    pair = workshop.pair()
    bias: Any = pair.model.head.bias  # type: ignore[union-attr]

    def writes(x: Tensor) -> Tensor:
        with torch.set_grad_enabled(recorded):
            bias.mul_(2)
        return pair.model(x).sum()

    with outsize.gathered(pair.model, modify=True), pytest.raises(RuntimeError, match=r"in.place"):
        grad(writes)(inputs())
    pair.check()


@pytest.mark.parametrize("place", ["host", "disk"])
def test_other_weights_given_to_a_forward_are_recomputed_with(workshop: Workshop, place: str) -> None:
    pair = workshop.pair(tier=place)
    random = torch.Generator().manual_seed(2)
    noise = {name: torch.randn(param.shape, generator=random) for name, param in pair.plain.named_parameters()}
    found = []
    for model in (pair.plain, pair.model):
        with outsize.gathered(pair.model):
            given = {name: (param.detach() + noise[name]).requires_grad_() for name, param in model.named_parameters()}
        x = inputs().requires_grad_()
        functional_call(model, given, (x,)).square().mean().backward()
        found.append([x.grad, *(param.grad for param in given.values())])
    torch.testing.assert_close(*found)
    pair.train(batches(2))


@pytest.mark.parametrize("place", ["host", "disk"])
def test_weights_after_an_inner_step_train_the_model(workshop: Workshop, place: str) -> None:
    """As in meta-learning (Finn et al. 2017): the outer loss is that of weights after a step of gradient descent."""
    pair = workshop.pair(tier=place)
    for model, _ in pair.both:
        names, params = zip(*model.named_parameters(), strict=True)
        moves = torch.autograd.grad(squared_error(model, batches(2)[0]), params, create_graph=True)
        with outsize.gathered(pair.model):
            moved = {name: param - 0.1 * move for name, param, move in zip(names, params, moves, strict=True)}
        given, target = batches(2)[1]
        (functional_call(model, moved, (given,)) - target).square().mean().backward()
    assert_same_gradients(pair.model, pair.plain)


def normed() -> nn.Module:
    net = Stack()
    for block in net.blocks:
        parametrizations.weight_norm(block.up)  # type: ignore[arg-type]
    return net


def test_weights_that_parametrizations_cache_train_as_in_torch(workshop: Workshop) -> None:
    pair = workshop.pair(normed)

    def twice(model: nn.Module, batch: Any) -> Tensor:
        with parametrize.cached():
            return squared_error(model, batch) + squared_error(model, batch)

    pair.train(batches(3), loss_of=twice)


class Repeats(Built, times=lambda: ([2],), lin=(16, 16)):
    """Runs its layer as often as a list in a tuple says, into which nobody looks."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times[0][0]):
            x = torch.tanh(self.lin(x))
        return x


def test_a_layer_that_does_something_else_in_the_backward_is_named_with_the_remedy(workshop: Workshop) -> None:
    layer = Repeats()
    model = nn.Sequential(nn.Linear(16, 16), layer, nn.Linear(16, 16))
    workshop.prepare(model, torch.optim.AdamW(model.parameters()))
    loss = model(inputs()).sum()
    layer.times[0][0] = 1
    with pytest.raises(CheckpointError, match=r"layer '1' \(Repeats\) did other .* activations=\"keep\""):
        loss.backward()


@pytest.fixture
def compilable(device: str) -> Iterator[list[nn.Module]]:
    """A model whose activations are kept, and its plain twin; the compiler keeps them as long as its code."""
    places = dict.fromkeys(("params", "grads", "states"), "host")
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Stack(depth=2)
    model = copy.deepcopy(plain)
    outsize.prepare(model, adamw(model), device=device, host_memory="64MiB", activations="keep", **places)
    yield [model, plain]
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it looks at
def test_a_compiled_model_that_keeps_activations_has_the_gradients_of_torch(compilable: list[nn.Module]) -> None:
    for model in compilable:
        runner = torch.compile(model, backend="aot_eager")
        for given, target in batches(2):
            (runner(given) - target).square().mean().backward()
    assert_same_gradients(*compilable)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_write_before_the_backward_of_a_compiled_model_is_found(compilable: list[nn.Module]) -> None:
    model: Any = compilable[0]
    norm = model.blocks[0].norm
    loss = torch.compile(model, backend="aot_eager")(inputs()).sum()
    with outsize.gathered(norm.weight, modify=True), torch.no_grad():
        norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="was modified"):
        loss.backward()


class Cache:
    """Keys of earlier tokens; offers what a cache of transformers does."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}

    def get_seq_length(self, layer: int = 0) -> int:
        return len(self.keys[layer]) if layer in self.keys else 0

    def get_mask_sizes(self, length: int, layer: int) -> tuple[int, int]:
        return self.get_seq_length(layer) + length, 0

    def update(self, keys: Tensor, layer: int) -> Tensor:
        self.keys[layer] = torch.cat([self.keys[layer], keys]) if layer in self.keys else keys
        return self.keys[layer]


class TwoCaches(Cache):
    def __init__(self) -> None:
        super().__init__()
        self.cross = Cache()


class Attends(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.key = nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        keys = self.key(x)
        if cache is not None:
            keys = cache.update(keys, self.index)
        return x + torch.softmax(x @ keys.T, -1) @ keys


class Decoder(Built, layers=lambda: nn.ModuleList([Attends(index) for index in range(3)])):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        x = x + cache.get_seq_length()
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x


def in_two_pieces(model: nn.Module, x: Tensor, recorded: bool = True, kind: type[Cache] = Cache) -> Tensor:
    cache = kind()
    with torch.set_grad_enabled(recorded):
        model(x[:4], cache)
    return model(x[4:], copy.deepcopy(cache) if not recorded else cache).square().mean()


def test_kept_layers_fill_a_cache_that_gradients_flow_through(workshop: Workshop) -> None:
    pair = workshop.pair(Decoder, activations="keep")
    pair.train([inputs(7)] * 3, loss_of=in_two_pieces)


def test_recomputed_layers_read_the_cache_of_a_forward_without_gradients(workshop: Workshop) -> None:
    pair = workshop.pair(Decoder)
    pair.train([inputs(7)] * 3, loss_of=lambda model, x: in_two_pieces(model, x, recorded=False))


@pytest.mark.parametrize("read", [lambda cache: cache, copy.deepcopy, copy.copy], ids=["it", "deep copy", "copy"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_the_cache_that_recomputed_layers_left_empty_cannot_be_read(
    workshop: Workshop, place: str, read: Callable[[Cache], Cache]
) -> None:
    pair = workshop.pair(Decoder, tier=place)
    pair.train([inputs(7)] * 2, loss_of=lambda model, x: model(x, Cache()).mean())
    cache = Cache()
    pair.model(inputs(4), cache)
    empty = r"layer 'layers\.0' is recomputed .* pass activations=\"keep\""
    with pytest.raises(RuntimeError, match=empty):
        pair.model(inputs(3), read(cache))
    with torch.no_grad(), pytest.raises(RuntimeError, match=empty):
        pair.model(inputs(3), read(cache))
    with pytest.raises(RuntimeError, match=empty):
        read(cache).get_mask_sizes(3, 0)


def test_a_cache_within_the_cache_cannot_be_read_either(workshop: Workshop) -> None:
    pair = workshop.pair(Decoder)
    cache = TwoCaches()
    pair.model(inputs(4), cache)
    with pytest.raises(RuntimeError, match="is empty"):
        cache.cross.get_seq_length()


def test_vmap_over_a_weight_at_rest_is_refused_under_a_default_device_too(workshop: Workshop) -> None:
    model = workshop.pair().model
    with torch.device("cpu"), pytest.raises(RuntimeError, match=r"torch.vmap takes 'head.weight' apart"):
        torch.vmap(torch.sum)(model.head.weight)
