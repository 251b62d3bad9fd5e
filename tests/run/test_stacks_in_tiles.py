"""A stack of experts that is too large to be gathered is used some matrices at a time, however a model uses it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import outsize
from tests.comparing import assert_same_gradients, gradients, weights
from tests.conftest import Pair, Workshop, prepared, sgd, take_step
from tests.small_models import Product

EXPERTS, WIDTH, HIDDEN, ROWS = 24, 32, 256, 6
SMALL = 640 << 10
GROUPED = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

Use = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_bmm(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = torch.tanh(torch.bmm(x.expand(EXPERTS, *x.shape), up.transpose(1, 2)))
    return torch.bmm(hidden, down.mT).mean(0)


def by_einsum(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = torch.tanh(torch.einsum("eth,edh->etd", x.expand(EXPERTS, *x.shape), up))
    return torch.einsum("ehd, etd -> teh", down, hidden).mean(1)


def by_matmul(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = torch.tanh(x.expand(2, EXPERTS, *x.shape) @ up.mT)
    return torch.matmul(hidden, down.transpose(-1, -2)).mean((0, 1))


def one_by_one(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Some experts are not hit: their gradient is zero."""
    found = torch.zeros_like(x)
    for expert in (0, -2, 17):
        some = torch.arange(expert % 3, len(x), 2, device=x.device)
        hidden = torch.tanh(F.linear(input=x[some], weight=up[expert]))
        found = found.index_add(0, some, F.linear(hidden, down[torch.tensor(expert)]).to(x.dtype))
    return found


def in_turn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    for one, other in zip(up, down.unbind(), strict=True):
        found = found + torch.tanh(x @ one.t()) @ other.T
    return found / EXPERTS


def grouped(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    ends = [1, 1, 2, 4] + [5] * (EXPERTS - 5) + [ROWS]
    offs = torch.tensor(ends, dtype=torch.int32, device=x.device)
    assert GROUPED is not None
    return GROUPED(torch.tanh(GROUPED(x, up.transpose(-2, -1), offs=offs)), down.transpose(-2, -1), offs=offs)


def with_others(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An operation that knows nothing of stacks gets the values of one matrix."""
    return F.linear(torch.tanh(x @ (2.0 * up[3]).t()), down[3].square()) + up[3].mean()


def by_own_function(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return Product.apply(torch.tanh(Product.apply(x, up[3])), down.transpose(1, 2)[3].t())


def in_a_reentrant_checkpoint(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, up)), down)

    return checkpoint(block, x, up[3], down[3], use_reentrant=True)


def of_two(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Both are in tiles."""
    return x @ torch.bmm(down, up).mean(0) + x @ torch.einsum("ehw,ehv->ewv", up, up).mean(0) / 9


def several_at_once(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The experts of each row: one of them twice, one from the end."""
    experts = torch.tensor([3, 7, 3, -1, 0, 20], device=x.device)
    hidden = torch.tanh(torch.einsum("td,tkhd->tkh", x, up[torch.stack([experts, experts.flip(0)], 1)]))
    return torch.bmm(hidden.sum(1, keepdim=True), down.index_select(0, experts % EXPERTS).mT)[:, 0]


USES = [
    several_at_once,
    of_two,
    by_own_function,
    in_a_reentrant_checkpoint,
    by_bmm,
    by_einsum,
    by_matmul,
    one_by_one,
    in_turn,
    with_others,
]


class Experts(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 6)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.up, self.down)


class Mixture(nn.Module):
    def __init__(self, use: Use, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(use) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 4)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.again else layer(x))
        return self.head(x)


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(count)
    found = [torch.randn(ROWS, WIDTH, generator=generator, device="cpu") for _ in range(count)]
    return [each.to(torch.get_default_device()) for each in found]


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def pair_of(workshop: Workshop, use: Use, again: bool = False, **fields: Any) -> Pair:
    budget = {"host_memory": SMALL} if workshop.device == "cpu" else {"device_memory": SMALL, "host_memory": "64MiB"}
    auto = dict.fromkeys(("params", "grads", "states"), "auto")
    pair = workshop.pair(lambda: Mixture(use, again), sgd, disk=workshop.disk, **{**auto, **budget, **fields})
    in_tiles = {tiles.name for tiles in prepared(pair.model).engine.tiles.values()}
    assert in_tiles == {f"layers.{layer}.{name}" for layer in range(2) for name in ("up", "down")}
    return pair


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_stacks_in_tiles_train_as_in_torch(workshop: Workshop, use: Use) -> None:
    pair = pair_of(workshop, use)
    ledger = prepared(pair.model).resources.ledger
    ledger.peak = dict(ledger.now)  # `prepare` has had a whole stack on an accelerator
    data = inputs(2)
    for batch in data:
        for model, optimizer in pair.both:
            take_step(mean_square(model, batch), optimizer, clip=(model.parameters(), 0.5))
    computing = ("device/",) if workshop.device != "cpu" else ("device/", "host/")
    peak = outsize.memory(pair.model).peak
    held = sum(size for name, size in peak.items() if name.startswith(computing))
    assert held <= SMALL or use is of_two, "a product of two of them needs them whole"
    assert pair.plain.layers[0].up.nbytes >= SMALL  # type: ignore[index, union-attr]
    pair.check(1e-6)


@pytest.mark.skipif(GROUPED is None, reason="torch has no grouped_mm")
def test_groups_of_rows_train_as_in_torch(workshop: Workshop) -> None:
    if workshop.device != "cpu":
        pytest.skip("the simulated accelerator has no grouped_mm for the plain model")
    pair = pair_of(workshop, grouped)
    pair.train(inputs(2), rel=2e-5, loss_of=mean_square, clip=0.5)


@pytest.mark.parametrize("how", ["checkpoint", "recompute", "in the backward", "bf16"])
def test_with_other_things(workshop: Workshop, how: str) -> None:
    fields: dict[str, Any] = {
        "checkpoint": {"again": True},
        "recompute": {"activations": "recompute"},
        "in the backward": {"update": "backward"},
        "bf16": {},
    }[how]
    pair = pair_of(workshop, one_by_one, **fields)
    if how != "bf16":
        pair.train(inputs(2), rel=2e-5, loss_of=mean_square)
        return
    for model, _ in pair.both:
        with torch.autocast(workshop.device, torch.bfloat16):
            mean_square(model, inputs(1)[0]).backward()
    assert_same_gradients(pair.model, pair.plain, atol=1e-4, rtol=5e-2)


def test_experts_that_are_not_hit_keep_earlier_gradients_and_have_none_of_their_own(workshop: Workshop) -> None:
    """After a step whose gradients lie where these will."""
    pair = pair_of(workshop, in_turn)
    pair.train(inputs(1), rel=2e-5, loss_of=mean_square)
    for uses in ([one_by_one], [in_turn, one_by_one]):
        for model, optimizer in pair.both:
            optimizer.zero_grad()
            for use in uses:
                for layer in model.layers:  # type: ignore[union-attr]
                    layer.use = use
                mean_square(model, inputs(1)[0]).backward()
        assert_same_gradients(pair.model, pair.plain, atol=1e-6, rtol=1e-4)
        found = gradients(pair.model)["layers.0.up"]
        assert found is not None
        assert bool((found[5] == 0).all()) is (uses == [one_by_one])


def test_several_experts_at_once_read_no_others(workshop: Workshop) -> None:
    if workshop.device != "cpu":
        pytest.skip("the weights are in host memory")
    pair = pair_of(workshop, several_at_once)
    with torch.no_grad():
        pair.model(inputs(1)[0])
        before = outsize.memory(pair.model).bytes_read
        pair.model(inputs(1)[0])
    used = 2 * 2 * 5 * WIDTH * HIDDEN * 4  # five of each stack
    head = 16384  # its whole pages
    assert used <= outsize.memory(pair.model).bytes_read - before <= used + head


def test_a_frozen_stack_and_evaluation(workshop: Workshop) -> None:
    pair = pair_of(workshop, one_by_one)
    with torch.no_grad():
        torch.testing.assert_close(pair.model(inputs(1)[0]), pair.plain(inputs(1)[0]), rtol=1e-5, atol=1e-6)
    for model, _ in pair.both:
        model.layers[1].up.requires_grad_(False)  # type: ignore[index, union-attr]
    before = weights(pair.model)["layers.1.up"]
    pair.train(inputs(2), rel=2e-5, loss_of=mean_square)
    assert torch.equal(weights(pair.model)["layers.1.up"], before)


def test_a_budget_that_holds_one_of_two_stacks_is_enough(workshop: Workshop) -> None:
    """A smaller one is, which holds neither: both are in tiles then, here the first one."""
    budget = {"host_memory": "1400KiB"} if workshop.device == "cpu" else {"device_memory": "1144KiB"}
    plain = Mixture(one_by_one)
    for tiles in ({"up", "down"}, {"up"}):
        model = Mixture(one_by_one)
        model.load_state_dict(plain.state_dict())
        auto = dict.fromkeys(("params", "grads", "states"), "auto")
        small = dict.fromkeys(budget, SMALL) if "down" in tiles else budget
        workshop.prepare(model, disk=workshop.disk, **auto, **small)
        assert {each.name for each in prepared(model).engine.tiles.values()} == {
            f"layers.{layer}.{name}" for layer in range(2) for name in tiles
        }
        with torch.no_grad():
            torch.testing.assert_close(model(inputs(1)[0]), plain(inputs(1)[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["method", "function", "item", "out"])
def test_a_write_to_a_part_is_refused(workshop: Workshop, how: str) -> None:
    def write(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        with torch.no_grad():
            if how == "method":
                up[3].mul_(0.5)
            elif how == "function":
                nn.init.zeros_(down.transpose(1, 2)[1])
            elif how == "item":
                up[3][0] = 1.0
            else:
                torch.add(x[0, 0], 1.0, out=up[3])
        return x

    pair = pair_of(workshop, write)
    before = weights(pair.model)
    with pytest.raises(RuntimeError, match=r"writes? to|is written"):
        pair.model(inputs(1)[0])
    assert all(torch.equal(value, before[name]) for name, value in weights(pair.model).items())


def test_parts_look_like_tensors(workshop: Workshop) -> None:
    pair = pair_of(workshop, one_by_one)

    def look(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        one, turned = up[1], down.transpose(1, 2)
        assert one.shape == (HIDDEN, WIDTH)
        assert turned.shape == (EXPERTS, HIDDEN, WIDTH)
        assert one.t().shape == (WIDTH, HIDDEN)
        assert turned[2].T.shape == (WIDTH, HIDDEN)
        assert one.dtype is torch.float32
        assert one.device.type == x.device.type
        assert one.requires_grad
        assert one.numel() == HIDDEN * WIDTH
        with pytest.raises(IndexError, match=f"index {EXPERTS} is out of bounds"):
            up[EXPERTS]
        torch.testing.assert_close(turned[2], down[2].t(), rtol=0, atol=0)
        return x

    for layer in pair.model.layers:  # type: ignore[union-attr]
        layer.use = look
    pair.model(inputs(1)[0])
