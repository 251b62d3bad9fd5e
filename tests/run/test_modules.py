"""Models of every build: whatever a module does with its parameters, it trains as in plain torch."""

import copy
import gc
import os
import types
import warnings
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import outsize
from tests.comparing import assert_same, gradients, weights
from tests.conftest import AT_REST_TIERS, Pair, Workshop, adamw, batches, squared_error, take_step
from tests.small_models import Block, Built, Stack

Point = namedtuple("Point", ["out", "hidden"])


@dataclass
class Output:
    """As transformers return theirs, but plain."""

    out: Tensor
    hidden: Tensor | None = None


class Base(Built, blocks=lambda: nn.ModuleList([Block(16, 40) for _ in range(3)]), head=(16, 4)):
    """Three blocks and a head, for subclasses that use them in their own way."""


class Repeats(Base):
    """One block several times in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 2, 1, 0):
            x = self.blocks[index](x)
        return self.head(x)


class CustomMethods(Base):
    """Parameters are used by methods other than `forward`."""

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[1].up(self.blocks[0].norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1].down(torch.tanh(self.encode(x))))


class Functional(Base):
    """The weights of other modules are used directly."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.blocks[0].up.weight.T) @ self.blocks[1].down.weight.t()
        x = F.linear(x, self.blocks[2].up.weight[:16], self.blocks[2].down.bias)
        return x @ self.head.weight.transpose(0, 1) + self.head.bias.view(1, 4)


class TwoUnitsInOneOperation(Base):
    """One operation saves the weights of two units for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        for left, right in ((0, 1), (1, 2), (2, 0)):
            x = x + torch.tanh(x @ (self.blocks[left].up.weight.T @ self.blocks[right].down.weight.T))
        return self.head(x)


class Tied(nn.Module):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.blocks = nn.ModuleList([Block(16, 40) for _ in range(2)])
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedBlocks(Base):
    """Two blocks share one matrix, a third module is a block under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.again = self.blocks[1]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.again(x))


class UnusedParts(Base):
    """A block that no forward uses and an output that no loss uses."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.blocks[0](x)
        return self.head(hidden), self.blocks[2](hidden)


class InPlace(Base):
    """In-place operations on outputs and on views of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x.mul_(1.5)
        x[:, :4].add_(1.0)
        x = self.blocks[1](x).view(-1, 2, 8)
        x[:, 0].mul_(0.5)
        x = self.blocks[2](x.view(-1, 16))
        left, _right = x.chunk(2, dim=1)
        left.relu_() if not torch.is_grad_enabled() else x[:, :8].clone().relu_()
        return self.head(x)


class Branches(Base):
    """The data choose the blocks and their order."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.argsort(x[0, :3].detach()).tolist()
        for index in order[: 1 + int(x[0, 3] > 0) + int(x[0, 4] > 0)]:
            x = self.blocks[index](x)
        return self.head(x)


class Experts(Base):
    """Rows go to the expert that the data choose (a mixture of experts)."""

    def forward(self, x: Tensor) -> Tensor:
        choice = x[:, :3].argmax(1)
        out = torch.zeros_like(x)
        for index, block in enumerate(self.blocks):
            rows = torch.where(choice == index)[0]
            if rows.numel():
                out = out.index_add(0, rows, block(x[rows]))
        return self.head(out)


class Bag(
    Built,
    scale=lambda: nn.Parameter(torch.tensor(1.5)),
    nothing=lambda: nn.Parameter(torch.empty(0, 3)),
    listed=lambda: nn.ParameterList([torch.randn(16, 16) / 4 for _ in range(3)]),
    named=lambda: nn.ParameterDict({"shift": torch.randn(16), "out": torch.randn(16, 4) / 4}),
):
    """Parameters in lists and dictionaries, a scalar, an empty one, and parameters of the root itself."""

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.listed:
            x = torch.tanh(x @ matrix) * self.scale
        return (x + self.named["shift"]) @ self.named["out"] + self.nothing.sum()


class Mixed(
    Built,
    wide=lambda: nn.Parameter(torch.randn(16, 16, dtype=torch.float64) / 4),
    plain=(16, 16),
    also_wide=lambda: nn.Linear(16, 4, dtype=torch.float64),
):
    """Parameters of several dtypes in one module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.also_wide(torch.tanh(self.plain(x).double() @ self.wide)).float()


class Convolutions(nn.Module):
    """Convolutions, batch normalisation with running statistics, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GELU(), nn.ConvTranspose2d(8, 4, 2),
        )  # fmt: skip
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(-1, 1, 8, 8)).mean((2, 3)))


class Recurrent(
    Built,
    lstm=lambda: nn.LSTM(4, 8, num_layers=2, batch_first=True, bidirectional=True),
    gru=lambda: nn.GRU(16, 8, batch_first=True),
    cell=lambda: nn.GRUCell(8, 8),
    head=(8, 4),
):
    """An LSTM, a GRU and a cell."""

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(self.lstm(x.view(-1, 4, 4))[0])
        return self.head(self.cell(out[:, 0], out[:, -1]))


class Transformer(nn.Module):
    """torch's own encoder and decoder layers and attention."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 8)
        x = self.decoder(self.encoder(x), x)
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x[:, 0])


class Normalized(
    Built,
    first=lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
    second=lambda: torch.nn.utils.parametrizations.orthogonal(nn.Linear(16, 16)),
    head=(16, 4),
):
    """Weights under torch's parametrizations and spectral or weight normalisation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Borrowed(nn.Module):
    """The weights get a parametrization for each forward, as PEFT gives one to those of experts."""

    class Block(Built, first=(16, 16), second=(16, 16)):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.first, self.second):
                parametrize.register_parametrization(layer, "weight", nn.Tanh(), unsafe=True)
                x = layer(x)
                parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x[:, :4]


class Bilinear(
    Built,
    pair=lambda: nn.Bilinear(16, 16, 8),
    first=(8, 8),
    second=(8, 4),
    prelu=lambda: nn.PReLU(8),
    group=lambda: nn.GroupNorm(2, 8),
):
    """Operations that take several parameters at once."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(self.prelu(self.pair(x, x)))
        stacked = torch.cat([self.first.weight, self.second.weight])
        together = F.linear(x, stacked, torch.cat([self.first.bias, self.second.bias]))
        return together[:, :4] + together[:, 8:] + torch.einsum("bi,oi->bo", x, self.second.weight)


SHAPES: dict[type[nn.Module], int] = {Convolutions: 64}
MODELS = [
    Repeats, CustomMethods, Functional, TwoUnitsInOneOperation, TiedBlocks, InPlace, Branches, Experts, Bag, Mixed,
    Convolutions, Recurrent, Transformer, Normalized, Bilinear,
]  # fmt: skip


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("tier", ["device", "disk", "squeezed"])
def test_it_trains_as_in_torch(workshop: Workshop, tier: str, build: type[nn.Module]) -> None:
    pair = workshop.pair(build, lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-4), tier)
    pair.train(batches(3, SHAPES.get(build, 16)), rel=2e-6, clip=1.0)
    for mine, theirs in zip(pair.model.buffers(), pair.plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_weights_may_get_a_parametrization_for_a_forward(workshop: Workshop) -> None:
    pair = workshop.pair(Borrowed, tier="squeezed")
    pair.train(batches(3), rel=2e-6)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_recomputed_it_trains_as_in_torch(workshop: Workshop, build: type[nn.Module]) -> None:
    pair = workshop.pair(
        build, lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-4), "squeezed", activations="recompute"
    )
    pair.train(batches(3, SHAPES.get(build, 16)), rel=2e-6, clip=1.0)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_evaluation_between_steps_sees_the_weights_after_the_last_step(
    workshop: Workshop, build: type[nn.Module]
) -> None:
    pair = workshop.pair(build, lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-4), "squeezed")
    width = SHAPES.get(build, 16)
    for index, batch in enumerate(batches(2, width)):
        outs = []
        for model, optimizer in pair.both:
            squared_error(model, batch).backward()
            with torch.no_grad():  # between backward and step
                model.eval()
                before = model(batch[0])
                model.train()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                outs.append((before, model(batches(9, width)[index][0])))
            with torch.inference_mode():
                model(batch[0])
            model.train()
            optimizer.zero_grad()
        for mine, theirs in zip(outs[1], outs[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    pair.check()


def test_tied_weights_train_as_one(workshop: Workshop, tier: str) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    generator = torch.Generator().manual_seed(0)
    data = [tuple(torch.randint(0, 30, (2, 4, 5), generator=generator)) for _ in range(4)]
    pair = workshop.pair(Tied, tier=tier)
    pair.train(data, loss_of=loss_of, clip=1.0)
    assert pair.model.head.weight is pair.model.embed.weight
    assert len(list(pair.model.parameters())) == len(list(pair.plain.parameters()))


def test_unused_modules_and_outputs_stay_as_they_are(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(UnusedParts, tier=tier)
    before = weights(pair.model)
    pair.train(batches(3), loss_of=lambda model, batch: (model(batch[0])[0] - batch[1]).square().mean(), clip=1.0)
    after = weights(pair.model)
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith(("blocks.1", "blocks.2"))
    assert pair.model.blocks[2].up.weight.grad is None


RETURNS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda out, hidden: (out, (hidden, None, "text")), lambda result: (result[0], result[1][0])),
    "dict": (lambda out, hidden: {"out": out, "more": [hidden]}, lambda result: (result["out"], result["more"][0])),
    "namedtuple": (Point, lambda result: (result.out, result.hidden)),
    "dataclass": (Output, lambda result: (result.out, result.hidden)),
}
"""What a module returns of two tensors, and how they are read."""


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("kind", RETURNS)
def test_outputs_of_any_type_pass_unchanged(workshop: Workshop, kind: str, activations: str) -> None:
    returns, read = RETURNS[kind]

    class Part(Built, block=lambda: Block(16, 40)):
        def forward(self, x: Tensor) -> Any:
            return returns(self.block(x), x * 2)

    class Whole(Built, parts=lambda: nn.ModuleList([Part(), Part()]), head=(16, 4)):
        def forward(self, x: Tensor) -> Any:
            for part in self.parts:
                result = part(x)
                out, hidden = read(result)
                x = out + hidden
            return type(result), returns(self.head(x), x)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        inside, result = model(batch[0])
        assert type(result) is inside
        out, hidden = read(result)
        return (out - batch[1]).square().mean() + hidden.mean()

    workshop.pair(Whole, tier="squeezed", activations=activations).train(batches(3), loss_of=loss_of)


def test_two_forwards_before_one_backward(workshop: Workshop, tier: str) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - model(batch[0].flip(0))).square().mean() + squared_error(model, batch)

    workshop.pair(tier=tier).train(batches(3), loss_of=loss_of, clip=1.0)


def test_two_losses_of_two_forwards_backward_in_either_order(pair: Pair) -> None:
    first, second = batches(2)
    for model, optimizer in pair.both:
        a, b = squared_error(model, first), squared_error(model, second)
        a.backward()
        take_step(b, optimizer)
    pair.check()


def test_a_module_of_the_model_may_be_called_by_itself(workshop: Workshop, tier: str) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        hidden = model.blocks[2](model.blocks[0](batch[0]))
        return (model.head(hidden) - batch[1]).square().mean()

    workshop.pair(tier=tier).train(batches(3), loss_of=loss_of)


def test_a_forward_that_was_never_used_leaves_no_trace(pair: Pair) -> None:
    for model, optimizer in pair.both:
        for batch in batches(3):
            loss = squared_error(model, batch)
            squared_error(model, batch)  # its graph is dropped
            take_step(loss, optimizer)
    pair.check()


class UserCheckpoints(Base):
    """The user checkpoints around units, inside one, and across two."""

    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        def two(y: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](y))

        x = checkpoint(two, x + 0 * x.requires_grad_(), use_reentrant=self.use_reentrant)
        x = checkpoint(self.blocks[2], x, use_reentrant=self.use_reentrant)
        block = self.blocks[0]
        x = x + checkpoint(lambda y: block.down(torch.tanh(block.up(y))), x, use_reentrant=self.use_reentrant)
        return self.head(x)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_the_user_work(workshop: Workshop, tier: str, use_reentrant: bool, activations: str) -> None:
    pair = workshop.pair(lambda: UserCheckpoints(use_reentrant), tier=tier, activations=activations)
    pair.train(batches(3), clip=1.0)


class Scaled(nn.Module):
    """Its method reads parameters of its own, and of another module, and is computed again in the backward."""

    def __init__(self, use_reentrant: bool, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale, self.gain = nn.Parameter(torch.full((16,), 1.1)), nn.Parameter(torch.tensor(0.9))
        self.use_reentrant = use_reentrant
        self.last.weight.requires_grad_(not frozen)

    def part(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x)) * self.scale * self.gain
        return torch.tanh(nn.functional.linear(x, self.last.weight)) @ self.last.weight.T

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.part, self.first(x), use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_method_may_read_parameters_itself(
    workshop: Workshop, tier: str, use_reentrant: bool, frozen: bool
) -> None:
    pair = workshop.pair(lambda: Scaled(use_reentrant, frozen), tier=tier, units=["Linear"])
    pair.train(batches(3, out=16), clip=1.0)


class Between(
    Built, layer=(16, 16), before=lambda: nn.Parameter(torch.ones(16)), after=lambda: nn.Parameter(torch.ones(16))
):
    """Of its own parameters one has its gradient before the checkpoint's backward, the other behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x * self.before, use_reentrant=True) * self.after


def test_the_backward_of_a_reentrant_checkpoint_does_not_end_the_backward(workshop: Workshop, tier: str) -> None:
    workshop.pair(Between, tier=tier, units=["Linear"], update="backward").train(batches(3, out=16))


def with_dropout() -> nn.Module:
    model = Stack(depth=3)
    for block in model.blocks:
        block.up = nn.Sequential(block.up, nn.Dropout(0.3))
    return model


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_dropout_draws_what_plain_torch_draws(workshop: Workshop, tier: str, activations: str) -> None:
    workshop.pair(with_dropout, tier=tier, activations=activations).train(batches(4), clip=1.0)


def test_module_hooks_of_the_user_run(pair: Pair) -> None:
    for model, _ in pair.both:
        model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.blocks[1].register_forward_hook(lambda module, args, out: out + 1)
        model.blocks[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    pair.train(batches(3))


def test_saved_tensor_hooks_of_the_user_see_activations_only(pair: Pair) -> None:
    for model, optimizer in pair.both:
        for batch in batches(2):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                loss = squared_error(model, batch)
            take_step(loss, optimizer)
    pair.check()


def test_functional_call_with_other_weights_works(pair: Pair) -> None:
    other = {name: torch.full(param.shape, 0.01) for name, param in pair.plain.named_parameters()}
    x = batches(1)[0][0]
    outs = [torch.func.functional_call(model, other, (x,)) for model, _ in pair.both]
    torch.testing.assert_close(outs[1], outs[0])


def test_a_torch_transformer_layer_in_eval_is_right_on_its_fast_path(workshop: Workshop, tier: str) -> None:
    def build() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own remark on nested tensors
        pair = workshop.pair(build, tier=tier)
        x = torch.randn(2, 5, 16)
        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        for model, _ in pair.both:
            model.eval()
        with torch.no_grad():
            plain, ours = (model(x, src_key_padding_mask=mask) for model, _ in pair.both)
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                computed = pair.plain(x, src_key_padding_mask=mask)
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(ours[~mask], plain[~mask], rtol=1e-5, atol=1e-5)
    assert not plain[mask].any()
    padded = plain if tier == "device" else computed  # docs/limits.md
    torch.testing.assert_close(ours[mask], padded[mask], rtol=1e-5, atol=1e-5)


def test_weights_are_copies_of_themselves_after_many_kinds_of_forwards(workshop: Workshop) -> None:
    pair = workshop.pair(Repeats, tier="squeezed")
    before = weights(pair.model)
    x = batches(1)[0][0]
    for _ in range(3):
        with torch.no_grad():
            pair.model(x)
        pair.model(x)
        pair.model.blocks[0].up(x)
    after = weights(pair.model)
    assert_same(before, after)
    assert all(grad is None for grad in gradients(pair.model).values())


def test_a_part_that_outlives_the_model_works_on(workshop: Workshop, tier: str) -> None:
    model = Stack()
    expected = copy.deepcopy(model.blocks[0].up)
    workshop.prepare(model, None, tier)
    part = model.blocks[0].up
    del model
    gc.collect()
    with outsize.gathered(part):
        assert torch.equal(part(torch.ones(16)), expected(torch.ones(16)))


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_parameter_that_outlives_model_and_optimizer_says_so(workshop: Workshop, tier: str) -> None:
    model = Stack()
    workshop.prepare(model, adamw(model), tier)
    weight = model.head.weight
    del model
    gc.collect()
    assert weight.shape == (4, 16)
    for use in (weight.sum, lambda: copy.deepcopy(weight), lambda: outsize.gathered(weight).__enter__()):
        with pytest.raises(RuntimeError, match="keep the model for as long as its parameters are used"):
            use()


def test_a_model_that_was_compiled_goes_with_its_engine_and_files(workshop: Workshop) -> None:
    """Dynamo keeps the classes of all parameters that it has seen."""
    pair = workshop.pair(tier="disk", activations="keep")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Dynamo cannot trace
        squared_error(torch.compile(pair.model, backend="eager"), batches(1)[0]).backward()
    del pair
    torch._dynamo.reset()
    gc.collect()
    gc.collect()
    assert os.listdir(workshop.disk) == []


def _with_fused_loss(model: nn.Module) -> None:
    """What a library does that puts a fused loss in place of the last layer: a new `forward` that reads its weight."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.linear(x, self.head.weight * 2, self.head.bias)

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]


def _around_forward(model: nn.Module) -> None:
    """A patch that calls what was there before."""
    for block in model.blocks:
        block.forward = partial(lambda inner, x: inner(x) + block.down.bias.sum(), block.forward)  # noqa: B023


@pytest.mark.parametrize("patch", [_with_fused_loss, _around_forward])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_was_replaced_on_the_instance_trains_like_torch(
    workshop: Workshop, tier: str, patch: Callable[[nn.Module], None], when: str
) -> None:
    pair = workshop.pair(tier=tier) if when == "after" else None
    if pair is None:
        torch.manual_seed(0)
        plain, model = Stack(), Stack()
        model.load_state_dict(plain.state_dict())
        pair = Pair(plain, adamw(plain), model, adamw(model))
    patch(pair.plain)
    patch(pair.model)
    if when == "before":
        workshop.prepare(pair.model, pair.optimizer, tier)
    pair.train(batches(3), clip=0.5)


def test_a_forward_called_directly_says_to_call_the_module(workshop: Workshop) -> None:
    pair = workshop.pair()
    assert torch.equal(pair.model.forward(batches(1)[0][0]), pair.plain(batches(1)[0][0]))
    with pytest.raises(RuntimeError, match=r"call the module itself, .* loss inside `with outsize.gathered\(model\):`"):
        pair.model.head.forward(batches(1)[0][0])


def test_what_a_library_computes_past_calls_trains_like_torch_inside_gathered(workshop: Workshop) -> None:
    """As gpytorch and pyro do. The backward comes after the block."""
    pair = workshop.pair()
    for x, y in batches(3):
        losses = []
        for model, optimizer in pair.both:
            with outsize.gathered(model) if model is pair.model else nullcontext():
                prior = sum(param.square().sum() for param in model.parameters())
                loss = (model.head.forward(model.blocks[0].forward(x)) - y).square().mean() + 1e-3 * prior
            take_step(loss, optimizer)
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    pair.check()
