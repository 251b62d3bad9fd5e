"""Logits that are computed late, and for a loss tile by tile, are those of torch."""

import sys
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import outsize
from outsize.run import logits as of_logits
from tests.comparing import assert_same_gradients
from tests.conftest import TIERS, Pair, Workshop, prepared

FEATURES, WIDTH, ROWS = 40, 16, 24


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of five rows, for logits of any size."""
    monkeypatch.setattr(of_logits, "LEAST_BYTES", 1)
    monkeypatch.setattr(of_logits, "TILE_BYTES", 5 * 4 * FEATURES)


class Language(nn.Module):
    """An embedding, a layer and a head."""

    def __init__(self, tied: bool = False, bias: bool = True, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(FEATURES, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(WIDTH, FEATURES, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.head.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(count: int = 3) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(count)
    device = torch.get_default_device()
    return [torch.randint(FEATURES, (2, ROWS // 2), generator=generator, device="cpu").to(device) for _ in range(count)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1, momentum=0.9)


def targets(batch: Tensor) -> Tensor:
    """The next token; two of them do not count."""
    found = batch.roll(-1, 1).clone()
    found[0, :2] = -100
    return found.view(-1)


def weight_of_classes() -> Tensor:
    return torch.linspace(0.5, 1.5, FEATURES)


LOSSES: dict[str, Any] = {
    "mean": lambda out, y: functional.cross_entropy(out.view(-1, FEATURES), y),
    "float": lambda out, y: functional.cross_entropy(out.float().reshape(-1, out.size(-1)), y),
    "sum": lambda out, y: nn.CrossEntropyLoss(reduction="sum")(out.flatten(0, 1), y) / ROWS,
    "each": lambda out, y: functional.cross_entropy(out.view(-1, FEATURES), y, reduction="none").square().mean(),
    "smooth": lambda out, y: functional.cross_entropy(out.view(-1, FEATURES), y, label_smoothing=0.1),
    "weighted": lambda out, y: functional.cross_entropy(out.view(-1, FEATURES), y, weight_of_classes()),
    "smooth and weighted": lambda out, y: nn.CrossEntropyLoss(weight_of_classes(), label_smoothing=0.2)(
        out.view(ROWS, -1), y
    ),
    "shifted": lambda out, y: functional.cross_entropy(
        out[..., :-1, :].contiguous().view(-1, FEATURES), y.view(2, -1)[:, :-1].reshape(-1)
    ),
    "another index": lambda out, y: functional.cross_entropy(
        out.view(-1, FEATURES), y.abs() % FEATURES, ignore_index=3
    ),
    "z-loss": lambda out, y: (
        functional.cross_entropy(out.view(-1, FEATURES), y) + 1e-2 * out.logsumexp(-1).square().mean()
    ),
    "z-loss, kept": lambda out, y: (
        torch.logsumexp(out.float(), dim=2, keepdim=True).square().mean()
        + functional.cross_entropy(out.flatten(0, 1), y)
    ),
    "classes first": lambda out, y: functional.cross_entropy(out.transpose(1, 2), y.view(2, -1)),
    "shares": lambda out, y: functional.cross_entropy(out.view(-1, FEATURES), out.detach().softmax(-1).view(ROWS, -1)),
    "no loss of torch": lambda out, y: out.square().mean() + out[0].mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_that_of_torch(workshop: Workshop, loss: str) -> None:
    pair = workshop.pair(Language, sgd, "disk")
    pair.train(tokens(), loss_of=lambda model, batch: LOSSES[loss](model(batch), targets(batch)))


def in_tiles(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, dtype: Any = torch.float32, **build: Any) -> Pair:
    """A model with a head, and an embedding, whose weights are larger than the budget."""
    monkeypatch.setattr(sys.modules[__name__], "FEATURES", 4400)
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 64)
    monkeypatch.setattr(of_logits, "TILE_BYTES", 4 * 1000)
    budget: Any = {"host_memory": "1MiB", "disk": workshop.disk, "params": "auto"}
    if workshop.device != "cpu":
        budget = {"device_memory": "1MiB", "host_memory": "256MiB"}
    pair = workshop.pair(
        lambda: Language(**build).to(dtype), sgd, "disk", **{**budget, "grads": "auto", "states": "auto"}
    )
    assert id(pair.model.head.weight) in prepared(pair.model).engine.tiles
    return pair


@final
class Largest(TorchDispatchMode):
    """Elements of the largest matrix that an operation makes."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim > 1:  # others are views of gradients at rest
            self.found = max(self.found, result.numel())
        return result


LATE = ("mean", "sum", "each", "smooth and weighted", "shifted", "another index", "z-loss, kept")


@pytest.mark.parametrize("loss", [*LATE, "no loss of torch"])
def test_every_loss_is_that_of_torch_with_the_weight_in_tiles(
    workshop: Workshop, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, seen = in_tiles(workshop, monkeypatch, tied=loss in ("mean", "smooth and weighted")), []

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        with Largest() as largest:
            found = LOSSES[loss](model(batch), targets(batch))
            found.backward(retain_graph=True)
        seen.append((model, largest.found))
        model.zero_grad()
        return found  # type: ignore[no-any-return]

    pair.train(tokens(1), rel=2e-5, loss_of=loss_of)
    ours = [found for model, found in seen if model is pair.model]
    whole = FEATURES * (ROWS - 2)
    assert all(found < whole / 1.5 for found in ours) == (loss in LATE)


def test_autocast_and_bf16_compute_as_in_torch_with_the_weight_in_tiles(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = tokens()[0]
    for loss in ("float", "each", "smooth"):
        for dtype in (torch.float32, torch.bfloat16):
            pair, found = in_tiles(workshop, monkeypatch, dtype, tied=loss == "float"), []
            for model, _ in pair.both:
                with torch.autocast(workshop.device, torch.bfloat16, enabled=dtype is torch.float32):
                    found.append(LOSSES[loss](model(batch), targets(batch)))
                found[-1].backward()
            assert found[0].dtype is found[1].dtype
            torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=1e-2)
            assert_same_gradients(pair.model, pair.plain, atol=1e-2, rtol=5e-2)


def test_accuracy_and_wrong_targets_with_the_weight_in_tiles(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = in_tiles(workshop, monkeypatch)
    ours, theirs = (model(tokens()[0]) for model in (pair.model, pair.plain))
    best = ours.argmax(-1, keepdim=True)
    assert torch.equal(best, theirs.argmax(-1, keepdim=True)) and not best.requires_grad
    assert ours.value is None
    with pytest.raises(IndexError, match="Target 4400 is out of bounds: the head has 4400 classes"):
        functional.cross_entropy(ours.flatten(0, 1), torch.full((ROWS,), FEATURES))
    nothing = torch.full((ROWS,), -100)
    found = [functional.cross_entropy(out.flatten(0, 1), nothing, reduction="sum") for out in (ours, theirs)]
    assert found[0].item() == found[1].item() == 0
    with outsize.gathered(pair.model.head):
        found = [functional.cross_entropy(out.flatten(0, 1), targets(tokens()[0])) for out in (ours, theirs)]
    torch.testing.assert_close(*found)


def test_a_loss_reads_the_weight_in_tiles_twice(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    if workshop.device != "cpu":
        pytest.skip("the weights are in host memory")
    pair, batch = in_tiles(workshop, monkeypatch), tokens()[0]
    weight = FEATURES * WIDTH * 4
    for _ in range(2):
        before = outsize.memory(pair.model).bytes_read
        functional.cross_entropy(pair.model(batch).flatten(0, 1), targets(batch)).backward()
        read = outsize.memory(pair.model).bytes_read - before
        pair.model.zero_grad()
    assert 2 * weight <= read <= 3.3 * weight  # and the rows of the embedding


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("build", [{"tied": True, "bias": False}, {"frozen": True}, {"bias": False}])
def test_on_every_tier(workshop: Workshop, tier: str, build: dict[str, bool]) -> None:
    pair = workshop.pair(lambda: Language(**build), sgd, tier, activations="offload", micro_batches=2)
    pair.train(tokens(), loss_of=lambda model, batch: LOSSES["float"](model(batch), targets(batch)))


@pytest.mark.parametrize("loss", ["mean", "each", "no loss of torch"])
def test_under_autocast_and_in_bf16(workshop: Workshop, loss: str) -> None:
    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast(workshop.device, torch.bfloat16):
            logits = model(batch)
            found = LOSSES[loss](logits, targets(batch))
        assert logits.dtype == torch.bfloat16
        return found  # type: ignore[no-any-return]

    workshop.pair(Language, sgd, "host").train(tokens(), rel=1e-2, atol=2e-2, loss_of=loss_of)
    pair = workshop.pair(lambda: Language().bfloat16(), sgd, "host")
    for model, _ in pair.both:
        found = LOSSES[loss](model(tokens()[0]), targets(tokens()[0]))
        found.backward()
        assert found.dtype == torch.bfloat16


def test_the_weights_gradient_of_many_tiles_in_16_bits_is_as_close_as_torchs(workshop: Workshop) -> None:
    pair, found = workshop.pair(lambda: Language(bias=False).bfloat16(), sgd, "host"), []
    generator = torch.Generator("cpu").manual_seed(0)
    batch = torch.randint(FEATURES, (64, ROWS), generator=generator, device="cpu").to(torch.get_default_device())
    for model in (pair.model, deepcopy(pair.plain).double(), pair.plain):
        head = model.get_submodule("head").weight
        LOSSES["float"](model(batch), targets(batch)).backward()
        with outsize.gathered(head, grads=True) if model is pair.model else nullcontext():
            assert isinstance(head, nn.Parameter) and head.grad is not None
            found.append(head.grad.double().cpu())
    ours, exact, torchs = found
    assert (ours - exact).norm() <= 2 * (torchs - exact).norm()


def test_gradients_of_64_bits_are_summed_in_64_bits(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Language().double(), sgd, "host")
    pair.train(
        tokens(), rel=1e-12, atol=1e-13, loss_of=lambda model, batch: LOSSES["mean"](model(batch), targets(batch))
    )


def test_logits_have_a_shape_and_come_when_they_are_used(workshop: Workshop) -> None:
    pair = workshop.pair(Language, sgd, "disk")
    batch = tokens()[0]
    ours, theirs = pair.model(batch), pair.plain(batch)
    assert type(ours) is of_logits.LateLogits
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.requires_grad
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    torch.testing.assert_close(ours + 0, theirs)
    with torch.no_grad():
        late = pair.model(batch)
    assert not (late * 1).requires_grad
    before = pair.model(batch)
    loss = functional.cross_entropy(before.view(-1, FEATURES), targets(batch))
    loss.backward()
    pair.optimizer.step()
    with pytest.raises(RuntimeError, match=r"use logits before optimizer.step\(\), or pass tiles=False"):
        before.sum()


def test_no_whole_logits_for_a_z_loss_and_its_accuracy(workshop: Workshop) -> None:
    pair = workshop.pair(Language, sgd, "disk")
    found = []
    for model, _ in pair.both:
        out, y = model(tokens()[0]), targets(tokens()[0])
        hits = (out.argmax(dim=-1).view(-1) == y).sum()
        (functional.cross_entropy(out.flatten(0, 1), y) + 1e-2 * out.logsumexp(-1).square().mean()).backward()
        found.append(int(hits))
    assert type(out) is of_logits.LateLogits
    assert out.value is None
    assert found[0] == found[1]
    assert_same_gradients(pair.model, pair.plain)


class Squares(torch.autograd.Function):
    """A loss that takes logits past every check."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return grad * 2 * logits / logits.numel()


@pytest.mark.parametrize("build", [{}, {"tied": True, "bias": False}, {"frozen": True}])
@pytest.mark.parametrize("how", ["own function", "cast", "view", "reentrant checkpoint"])
def test_custom_functions_give_logits_a_gradient(workshop: Workshop, build: dict[str, bool], how: str) -> None:
    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch)
        if how == "reentrant checkpoint":
            return checkpoint(lambda each: each.square().mean(), logits, use_reentrant=True)
        seen = {"own function": logits, "cast": logits.float(), "view": logits.flatten(0, 1)}[how]
        return Squares.apply(seen)  # type: ignore[no-any-return]

    pair = workshop.pair(lambda: Language(**build), sgd, "disk")
    pair.train(tokens(), loss_of=loss_of)


def test_custom_functions_give_gradients_to_those_that_are_asked_for(workshop: Workshop) -> None:
    pair, found = workshop.pair(Language, sgd, "disk"), []
    for model, _ in pair.both:
        loss = Squares.apply(model(tokens()[0]))
        loss.backward(retain_graph=True)
        found.append(torch.autograd.grad(loss, [model.layers[0][0].weight, model.head.bias], retain_graph=True))
        loss.backward(inputs=[model.head.weight])
    torch.testing.assert_close(found[1], found[0])
    assert_same_gradients(pair.model, pair.plain)


def test_arguments_by_other_names_give_what_torch_gives(workshop: Workshop) -> None:
    pair = workshop.pair(Language, sgd, "disk")
    ours, theirs = (model(tokens()[0]) for model in (pair.model, pair.plain))
    for call in (
        lambda out: out.argmax(axis=-1),
        lambda out: torch.argmax(input=out, dim=-1, keepdim=True),
        lambda out: torch.logsumexp(input=out, dim=(2,)),
        lambda out: torch.flatten(input=out, start_dim=0),
        lambda out: torch.reshape(input=out, shape=(-1, FEATURES)),
    ):
        torch.testing.assert_close(call(ours) + 0, call(theirs))


def test_the_gradient_of_logits_is_whole(workshop: Workshop) -> None:
    pair = workshop.pair(Language, sgd, "host")
    grads = []
    for model, _ in pair.both:
        logits = model(tokens()[0])
        logits.retain_grad()
        functional.cross_entropy(logits.view(-1, FEATURES), targets(tokens()[0])).backward()
        grads.append(logits.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_a_second_derivative_of_a_loss_in_tiles_is_refused(workshop: Workshop) -> None:
    model = workshop.pair(Language, sgd, "disk").model
    loss = functional.cross_entropy(model(tokens()[0]).view(-1, FEATURES), targets(tokens()[0]))
    (slope,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative: prepare with tiles=False"):
        slope.square().sum().backward()


def test_tiles_false_computes_at_once(workshop: Workshop) -> None:
    pair = workshop.pair(Language, sgd, "disk", tiles=False)
    assert type(pair.model(tokens()[0])) is Tensor


def test_models_of_transformers(workshop: Workshop) -> None:
    """A causal model with tied weights, and a masked one."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    llama = transformers.LlamaConfig(**small, vocab_size=FEATURES, num_key_value_heads=2, tie_word_embeddings=True)
    bert = transformers.BertConfig(
        **small, vocab_size=FEATURES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    built: list[Any] = [lambda: transformers.LlamaForCausalLM(llama), lambda: transformers.BertForMaskedLM(bert)]
    for build in built:
        pair = workshop.pair(build, sgd, "disk")
        seen = []

        def loss_of(model: Any, batch: Tensor, seen: list[Any] = seen) -> Tensor:
            labels = batch.clone()
            labels[0, 0] = -100
            out = model(input_ids=batch, labels=labels)
            seen.append(type(out.logits))
            return out.loss  # type: ignore[no-any-return]

        pair.train(tokens(), loss_of=loss_of)
        assert of_logits.LateLogits in seen
        with outsize.gathered(pair.model):
            pass
