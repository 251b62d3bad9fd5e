"""Modules that compute each position alone run in tiles where one call of them would exceed the whole budget."""

import copy
import random
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from outsize.run import positions
from tests.comparing import assert_same_gradients
from tests.conftest import TIERS, Pair, Workshop, sgd
from tests.small_models import Built, InTurn, Product

WIDTH, HIDDEN, POSITIONS = 16, 64, 2048
"""One MLP of these takes 2.2 MiB at least."""


class Gated(nn.Module):
    """As in Llama."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(functional.silu(self.gate(x)) * self.up(x)))


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)).roll(1, 1)  # so the layer itself has no tiles


def of(kind: Any = Gated) -> nn.Module:
    """Two layers around such a part, and a head."""
    return InTurn(lambda: Layer(kind()), 2, (WIDTH, 4))


def data(rows: int = 1, count: int = POSITIONS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(rows)
    values = torch.randn(rows, count, WIDTH + 4, generator=generator, device="cpu").to(torch.get_default_device())
    return values[..., :WIDTH], values[..., WIDTH:]


def small(workshop: Workshop, tier: str = "host", build: Any = of, **fields: Any) -> Pair:
    """A budget below what one MLP takes."""
    budget = {"host_memory": "1MiB"} if workshop.device == "cpu" else {"device_memory": "1MiB"}
    return workshop.pair(build, sgd, tier, **budget, **fields)


@final
class Memory(TorchDispatchMode):
    """The most bytes that results of operations take at once, and the most elements of one."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and type(result) is Tensor and result.ndim == 3:
            storage = result.untyped_storage()
            self._there[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self._there = {key: each for key, each in self._there.items() if not each[0].expired()}
            self.peak = max(self.peak, sum(nbytes for _, nbytes in self._there.values()))
            self.largest = max(self.largest, result.numel())
        return result


def of_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Memory:
    """Forward and backward."""
    with Memory() as memory:
        (model(batch[0]) - batch[1]).square().mean().backward()
    return memory


def neox() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
    )


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", [Gated, neox])
def test_they_train_what_the_whole_trains_in_less_than_half_the_memory(
    workshop: Workshop, tier: str, kind: Any
) -> None:
    pair = small(workshop, tier, lambda: of(kind), activations="keep")
    pair.train([data(), data(2, POSITIONS // 2), data(1, 3), data()])
    whole, tiles = of_step(pair.plain, data()), of_step(pair.model, data())
    assert whole.largest == POSITIONS * HIDDEN
    assert tiles.largest == POSITIONS * WIDTH
    assert tiles.peak < whole.peak / 2


@pytest.mark.parametrize("activations", ["auto", "recompute", "offload", "selective"])
def test_with_each_way_of_activations(workshop: Workshop, activations: str) -> None:
    pair = small(workshop, "disk", activations=activations)
    pair.train([data(), data(), data(2, POSITIONS)])
    assert of_step(pair.model, data()).largest == POSITIONS * WIDTH


@pytest.mark.parametrize("way", ["a checkpoint", "autocast", "no_grad", "rows", "twice", "again", "micro-batches"])
def test_with_ways_of_the_user(workshop: Workshop, way: str) -> None:
    pair = small(workshop, activations="keep", micro_batches=2 if way == "micro-batches" else 1)
    batch = data(2)

    def loss_of(model: Any, batch: Any) -> Tensor:
        x, y = batch
        if way == "rows":  # [tokens, hidden]
            return model.layers[1](x.flatten(0, 1).unsqueeze(0))[0].square().mean() + model.layers[0].mlp(x[0]).mean()
        if way == "a checkpoint":
            return (checkpoint(model, x, use_reentrant=False) - y).square().mean()
        if way == "again":
            with pytest.raises(ZeroDivisionError):
                model(x)
                raise ZeroDivisionError
        with torch.autocast(x.device.type, torch.bfloat16, enabled=way == "autocast"):
            loss = (model(x).float() - y).square().mean()
        if way == "twice":
            loss.backward(retain_graph=True)
        return loss

    if way == "no_grad":
        with torch.no_grad(), Memory() as memory:
            torch.testing.assert_close(pair.model(batch[0]), pair.plain(batch[0]))
        assert memory.largest == 2 * POSITIONS * WIDTH or memory.largest == 2 * POSITIONS * HIDDEN
        return
    pair.train(
        [batch, batch],
        rel=1e-2 if way == "autocast" else 1e-6,
        atol=1e-3 if way == "autocast" else 1e-5,
        loss_of=loss_of,
    )


def test_dropout_repeats(workshop: Workshop) -> None:
    """The gradient of the input is that of the same zeros as the result."""
    pair = small(workshop, build=lambda: Gated(0.5))
    module: Any = nn.ModuleList([pair.model])
    x = data()[0].requires_grad_()
    result = module[0](x)
    result.sum().backward()
    kept = result != 0
    assert 0.4 < kept.float().mean() < 0.6
    plain = pair.plain
    y = x.detach().requires_grad_()
    plain.eval()
    (plain(y) * kept * 2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


class Mixing(nn.Module):
    """Each position sees others, or leaves what a tile would leave in another way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear, self.calls, self.kept = way, nn.Linear(WIDTH, HIDDEN), 0, []
        self.down, self.last = nn.Linear(HIDDEN, WIDTH), None
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if way == "conv" else None
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True) if way == "attention" else None
        if way == "of each position":
            self.scale = nn.Parameter(torch.rand(POSITIONS, 1))
        if way == "hook":
            self.linear.register_forward_hook(lambda *_: self.kept.append(0))

    def forward(self, x: Tensor) -> Tensor:
        x = getattr(self, "_" + self.way.replace(" ", "_"))(x)
        return self.down(torch.relu(self.linear(x)))

    def _sum(self, x: Tensor) -> Tensor:
        return x + x.sum(1, keepdim=True) / 1000

    def _mean(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=1, keepdim=True)

    def _softmax(self, x: Tensor) -> Tensor:
        return functional.softmax(x, dim=1)

    def _cumsum(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / 100

    def _shape(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.size(-1)).view(x.shape) / x.shape[1]

    def _largest(self, x: Tensor) -> Tensor:
        return x / x.max()

    def _conv(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[misc]

    def _attention(self, x: Tensor) -> Tensor:
        return x + self.attention(x[:, ::64], x[:, ::64], x[:, ::64])[0].sum(1, keepdim=True)  # type: ignore[misc]

    def _rolled(self, x: Tensor) -> Tensor:
        return x.roll(1, 1)

    def _own_function(self, x: Tensor) -> Tensor:
        return x * Product.apply(x.mean(-1, keepdim=True).mT.contiguous()[0], x.mean(-1).detach() / 64).unsqueeze(-1)

    def _unseen(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            scale = 1.0 + (x.sum(1, keepdim=True) > 20)  # of two positions never
        return x * scale

    def _of_each_position(self, x: Tensor) -> Tensor:
        return x * self.scale

    def _noise_of_all(self, x: Tensor) -> Tensor:
        return x * functional.dropout(self.linear.bias[:WIDTH] + 1, 0.5)

    def _draw(self, x: Tensor) -> Tensor:
        return x if random.random() < 2 else -x

    def _branch(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    def _counts(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x

    def _attribute(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return x

    def _list(self, x: Tensor) -> Tensor:
        self.kept[:] = [x * 2]
        return x

    def _hook(self, x: Tensor) -> Tensor:
        return x


MIXING = [name[1:].replace("_", " ") for name, of_mixing in vars(Mixing).items() if name[:2] != "__" and name[0] == "_"]


@pytest.mark.parametrize("way", MIXING)
def test_what_is_not_position_by_position_runs_whole(workshop: Workshop, way: str) -> None:
    pair = small(workshop, build=lambda: of(lambda: Mixing(way)), activations="keep")
    pair.train([data(), data()])
    assert of_step(pair.model, data()).largest >= POSITIONS * HIDDEN


def test_a_module_with_several_arguments_or_results_runs_whole(workshop: Workshop) -> None:
    class Pairs(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x), x  # type: ignore[return-value]

    class Takes(Gated):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return super().forward(x) * (1 if y is None else y)

    class Both(Built, pairs=Pairs, takes=Takes):
        def forward(self, x: Tensor) -> Tensor:
            return self.takes(self.pairs(x)[0], y=x.mean(1, keepdim=True))

    pair = small(workshop, build=lambda: of(Both), activations="keep")
    pair.train([data(), data()])
    assert of_step(pair.model, data()).largest == POSITIONS * HIDDEN


def test_a_budget_that_holds_a_call_cuts_nothing(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of the order of a call: it is watched, and runs whole. A larger one: nobody looks."""
    watched = []
    real = positions._bytes_of_position

    def watch(*args: Any) -> int:
        watched.append(args)
        return real(*args)

    monkeypatch.setattr(positions, "_bytes_of_position", watch)
    for budget, calls in (("6MiB", 4), ("64MiB", 4)):
        field = "host_memory" if workshop.device == "cpu" else "device_memory"
        pair = workshop.pair(of, sgd, "host", activations="keep", **{field: budget})
        pair.train([data(), data()])
        assert len(watched) == calls, "each layer and each MLP, once"
        assert of_step(pair.model, data()).largest == POSITIONS * HIDDEN


class Shifts(Built, up=(WIDTH, HIDDEN), down=(HIDDEN, WIDTH)):
    """Sixteen results, of which autograd saves one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for _ in range(15):
            x = x + 0.5
        return self.down(x)


def test_results_that_nobody_saves_do_not_count(workshop: Workshop) -> None:
    """All results of a call take 8 MiB, those that last 0.7 MiB: under 2 MiB it runs whole."""
    field = "host_memory" if workshop.device == "cpu" else "device_memory"
    pair = workshop.pair(lambda: of(Shifts), sgd, "host", activations="keep", **{field: "2MiB"})
    pair.train([data(), data()])
    assert of_step(pair.model, data()).largest == POSITIONS * HIDDEN


def test_tiles_false_cuts_nothing(workshop: Workshop) -> None:
    pair = small(workshop, activations="keep", tiles=False)
    pair.train([data()])
    assert of_step(pair.model, data()).largest == POSITIONS * HIDDEN


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_layers_stay_one_graph_and_run_whole(workshop: Workshop) -> None:
    pair = small(workshop, activations="keep")
    for layer in pair.model.layers:  # type: ignore[union-attr]
        layer.compile(backend="eager", fullgraph=True)  # type: ignore[operator]
    pair.train([data(), data()])


def test_copies_are_plain(workshop: Workshop) -> None:
    pair = small(workshop, activations="keep")
    import outsize

    with outsize.gathered(pair.model):
        layer = copy.deepcopy(pair.model.layers[0])  # type: ignore[index]
    assert of_step(layer, (data()[0], data()[0])).largest == POSITIONS * HIDDEN


def test_models_of_transformers(workshop: Workshop) -> None:
    transformers = pytest.importorskip("transformers")
    size = {
        "hidden_size": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    for build in (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_key_value_heads=2)),
        lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**size)),
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**size, hidden_dropout_prob=0.0)),
    ):
        pair = small(workshop, build=build)
        generator = torch.Generator("cpu").manual_seed(0)
        tokens = torch.randint(40, (128, 32), generator=generator, device="cpu").to(torch.get_default_device())
        pair.train([tokens, tokens], loss_of=lambda model, ids: model(input_ids=ids, labels=ids).loss)
        model: Any = pair.model
        layers = getattr(getattr(model, model.base_model_prefix), "layers", None)
        mlp = layers[0].mlp if layers is not None else model.bert.encoder.layer[0].intermediate
        assert list(mlp.forward._layers) == [(mlp.forward._tiles(torch.empty(128, 32, 16)), 1)]
        assert_same_gradients(pair.model, pair.plain)


def test_a_proof_tells_the_bytes_of_a_position() -> None:
    """In fp32: the results of each operation. GPT-2's MLP reads its size."""
    transformers = pytest.importorskip("transformers")
    gated = 4 * (4 * HIDDEN + WIDTH)
    for name, kind, nbytes in (
        ("llama", "Llama", gated),
        ("qwen2", "Qwen2", gated),
        ("gemma", "Gemma", gated),
        ("phi3", "Phi3", gated),
        ("gpt_neox", "GPTNeoX", 4 * (2 * HIDDEN + WIDTH)),
        ("gpt2", "GPT2", 0),
    ):
        of_model = getattr(transformers.models, name)
        config = getattr(of_model, f"{kind}Config")(hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=2)
        make: Any = getattr(getattr(of_model, f"modeling_{name}"), f"{kind}MLP")
        mlp = make(HIDDEN, config) if name == "gpt2" else make(config)
        assert positions._bytes_of_position(mlp.forward, list(mlp.modules()), name, data(2)[0]) == nbytes
