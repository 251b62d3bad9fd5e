"""A parameter that is too large to be gathered is used in tiles: the model trains as in torch, within its budget."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import outsize
from outsize.planning.layout import PAGE_ELEMENTS, tile_rows
from tests.comparing import assert_same, assert_same_gradients, gradients, weights
from tests.conftest import Pair, Workshop, prepared, take_step

WIDTH, HIDDEN, WORDS = 64, 4608, 4400
SMALL = "1MiB"
Fields = dict[str, Any]


class Wide(nn.Module):
    """One weight is larger than the budget, or several are."""

    def __init__(self, tied: bool = False, again: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.again = again
        if tied:
            self.head = nn.Linear(WIDTH, WORDS)
            self.head.weight = self.words.weight
        else:
            self.head = nn.Conv1d(WIDTH, HIDDEN // 3, 3, padding=1)

    def block(self, x: Tensor) -> Tensor:
        hidden = F.linear(input=x, weight=self.up.weight, bias=self.up.bias)
        return x + self.down(torch.tanh(hidden))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        if isinstance(self.head, nn.Conv1d):
            return self.head(x.transpose(1, 2))
        return self.head(x)


def tied() -> nn.Module:
    return Wide(tied=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def ids(count: int, rows: int = 3) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(count)
    batches = [torch.randint(0, WORDS, (rows, 7), generator=generator, device="cpu") for _ in range(count)]
    return [batch.to(torch.get_default_device()) for batch in batches]


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def small(workshop: Workshop, **fields: Any) -> Fields:
    """A budget below each of the large weights, with everything at rest elsewhere."""
    if workshop.device == "cpu":
        return {
            "host_memory": SMALL,
            "disk": workshop.disk,
            "params": "auto",
            "grads": "auto",
            "states": "auto",
            **fields,
        }
    return {"device_memory": SMALL, "host_memory": "256MiB", "grads": "auto", "states": "auto", **fields}


def pair_of(workshop: Workshop, build: Any = Wide, optimizer: Any = sgd, **fields: Any) -> Pair:
    return workshop.pair(build, optimizer, "disk", **small(workshop, **fields))


def in_tiles(model: nn.Module) -> set[str]:
    """The parameters that are used in tiles."""
    engine = prepared(model).engine
    return {tiles.name for tiles in engine.tiles.values()}


@pytest.mark.parametrize(
    ("build", "fields"),
    [
        (Wide, {}),
        (tied, {}),
        (Wide, {"params": "host"}),
        (tied, {"update": "backward"}),
        (Wide, {"activations": "recompute"}),
        (Wide, {"micro_batches": 3}),
    ],
    ids=["plain", "tied", "host", "in the backward", "recompute", "micro-batches"],
)
def test_weights_in_tiles_train_as_in_torch(workshop: Workshop, build: Any, fields: Fields) -> None:
    if fields.get("params") == "host" and workshop.device == "cpu":
        fields = {"host_memory": "1500KiB", "grads": "disk", "states": "disk", "params": "auto"}
    pair = pair_of(workshop, build, **fields)
    assert {"words.weight", "up.weight", "down.weight"} <= in_tiles(pair.model)
    clip = None if fields.get("update") == "backward" else 0.5
    pair.train(ids(2), rel=2e-5, loss_of=mean_square, clip=clip)


def test_a_single_row_has_the_gradients_of_torch(workshop: Workshop) -> None:
    pair = pair_of(workshop, lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)))
    assert in_tiles(pair.model) == {"0.weight", "2.weight"}
    pair.train([torch.randn(WIDTH) for _ in range(2)], rel=2e-5, loss_of=mean_square, clip=0.5)


def test_gradients_of_several_backwards_add_up(workshop: Workshop) -> None:
    pair = pair_of(workshop, tied)
    for _ in range(2):
        for model, _ in pair.both:
            for batch in ids(2):
                mean_square(model, batch).backward()
        assert_same_gradients(pair.model, pair.plain, atol=1e-6, rtol=1e-4)
        for _, optimizer in pair.both:
            for group in optimizer.param_groups:
                torch.nn.utils.clip_grad_value_(group["params"], 1e-4)
            optimizer.step()
            optimizer.zero_grad()
    pair.check(1e-6)


@pytest.mark.parametrize(
    ("dtype", "more"),
    [(torch.bfloat16, {}), (torch.float16, {}), (torch.float32, {"delayed_update": True})],
    ids=["bf16", "fp16", "delayed"],
)
def test_others_train_as_without_tiles(workshop: Workshop, dtype: torch.dtype, more: Fields) -> None:
    torch.manual_seed(0)
    model = Wide().to(dtype)
    whole = copy.deepcopy(model)
    losses = []
    for each, fields in ((model, small(workshop, **more)), (whole, {"grads": "disk", **more})):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-4)
        workshop.prepare(each, optimizer, "disk", **fields)
        assert bool(in_tiles(each)) == (each is model)
        for batch in ids(2):
            losses.append(take_step(mean_square(each, batch), optimizer).item())
    assert losses[:2] == pytest.approx(losses[2:], rel=2e-3)


def test_autocast_computes_as_in_torch(workshop: Workshop, device: str) -> None:
    pair = pair_of(workshop)
    with torch.autocast(device, torch.bfloat16):
        outputs = [model(ids(1)[0]) for model, _ in pair.both]
        assert outputs[0].dtype is outputs[1].dtype
        torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-2, atol=2e-2)
    for output in outputs:
        output.float().square().mean().backward()
    assert_same_gradients(pair.model, pair.plain, atol=1e-4, rtol=5e-2)


def test_a_gradient_that_tiles_sum_up_in_16_bits_is_as_close_as_torchs(workshop: Workshop) -> None:
    pair = pair_of(workshop, lambda: nn.Sequential(nn.Linear(WIDTH, 40 * HIDDEN, bias=False, dtype=torch.bfloat16)))
    (tiles,) = prepared(pair.model).engine.tiles.values()
    assert len(tiles.all) > 20
    x, found = torch.randn(8, WIDTH, dtype=torch.bfloat16), []
    toward = torch.randn(8, 40 * HIDDEN, dtype=torch.bfloat16)
    for model in (pair.model, pair.plain):
        leaf = x.clone().requires_grad_()
        model(leaf).backward(toward)
        assert leaf.grad is not None
        found.append(leaf.grad.double().cpu())
    exact = toward.double().cpu() @ next(pair.plain.parameters()).detach().double().cpu()
    errors = [(each - exact).square().mean().sqrt().item() for each in found]
    assert errors[0] <= 1.5 * errors[1]


def test_parts_may_be_frozen(workshop: Workshop) -> None:
    def frozen() -> nn.Module:
        model = Wide()
        model.up.requires_grad_(False)
        model.words.requires_grad_(False)
        return model

    def of_the_others(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05, momentum=0.9)

    pair = pair_of(workshop, frozen, of_the_others)
    before = weights(pair.model)["up.weight"]
    pair.train(ids(2), rel=2e-5, loss_of=mean_square)
    assert torch.equal(weights(pair.model)["up.weight"], before)
    assert "up.weight" in in_tiles(pair.model)


def test_the_weights_stay_within_the_budget(workshop: Workshop) -> None:
    pair = pair_of(workshop)
    ledger = prepared(pair.model).resources.ledger
    ledger.peak = dict(ledger.now)  # `prepare` has had a whole weight on the device
    for batch in ids(2):
        take_step(mean_square(pair.model, batch), pair.optimizer)
    peak = outsize.memory(pair.model).peak
    budget = 1 << 20
    assert max(param.nbytes for name, param in pair.plain.named_parameters() if name in in_tiles(pair.model)) > budget
    computing = ("device/",) if workshop.device != "cpu" else ("device/", "host/")
    assert sum(size for name, size in peak.items() if name.startswith(computing)) <= budget


def test_evaluation_reads_each_weight_once(workshop: Workshop) -> None:
    pair = pair_of(workshop)
    if workshop.device != "cpu":
        pytest.skip("the weights are in host memory")
    batch = ids(1)[0]
    with torch.no_grad():
        torch.testing.assert_close(pair.model(batch), pair.plain(batch), rtol=1e-5, atol=1e-6)
        before = outsize.memory(pair.model).bytes_read
        pair.model(batch)
    read = outsize.memory(pair.model).bytes_read - before
    assert read <= sum(param.nbytes for param in pair.plain.parameters()) * 1.05


class Penalised(Wide):
    """A penalty on a weight needs all of it."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1e-4 * self.up.weight.square().sum()


class Indexed(Wide):
    """Uses rows by their numbers."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.words.weight[ids - WORDS] + self.words.weight[ids[0, 0]]
        return super().forward(ids).mean() + rows.square().mean() + self.up.weight[ids.flatten()[:0]].sum()


class Meets(Wide):
    """Two weights in tiles meet."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + F.linear(self.down.weight, self.up.weight.t()).mean()


@pytest.mark.parametrize(
    "build",
    [Penalised, Indexed, Meets, lambda: Wide(again=True)],
    ids=["whole", "rows", "two", "a checkpoint of the user's own"],
)
def test_other_uses_of_weights_in_tiles_are_right(workshop: Workshop, build: Any) -> None:
    pair_of(workshop, build).train(ids(2), rel=2e-5, loss_of=mean_square)


def test_state_and_checkpoints_are_as_without_tiles(workshop: Workshop, tmp_path: Any) -> None:
    pair = pair_of(workshop)
    pair.train(ids(2), rel=2e-5, loss_of=mean_square)
    outsize.save(tmp_path / "saved", pair.model, pair.optimizer)
    state = pair.optimizer.state_dict()["state"]
    for index, entry in pair.plain_optimizer.state_dict()["state"].items():
        found, expected = (each["momentum_buffer"].cpu() for each in (state[index], entry))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)
    torch.manual_seed(1)
    other = Wide()
    optimizer = sgd(other)
    workshop.prepare(other, optimizer, "disk")  # whole
    outsize.load(tmp_path / "saved", other, optimizer)
    assert_same(weights(other), weights(pair.model))
    outsize.save(tmp_path / "whole", other, optimizer)
    pair.train(ids(1), rel=2e-5, loss_of=mean_square)
    outsize.load(tmp_path / "whole", pair.model, pair.optimizer)
    assert_same(weights(pair.model), weights(other))


def test_an_interrupted_backward_leaves_no_half_gradient(workshop: Workshop) -> None:
    pair = pair_of(workshop, tied)
    batch = ids(1)[0]
    mean_square(pair.model, batch).backward()

    def fail(*_: Any) -> None:
        raise KeyError("in the middle")

    hook = pair.model.down.register_full_backward_hook(fail)
    with pytest.raises(KeyError):
        mean_square(pair.model, batch).backward()
    hook.remove()
    with pytest.raises(RuntimeError, match="a backward that did not end has changed a part of the gradient"):
        torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0)
    pair.optimizer.zero_grad()
    mean_square(pair.plain, batch).backward()
    mean_square(pair.model, batch).backward()
    assert_same_gradients(pair.model, pair.plain, atol=1e-6, rtol=1e-4)


def test_a_graph_of_before_a_step_is_refused(workshop: Workshop) -> None:
    pair = pair_of(workshop)
    loss = mean_square(pair.model, ids(1)[0])
    mean_square(pair.model, ids(1)[0]).backward()
    pair.optimizer.step()
    with pytest.raises(RuntimeError, match="modified: optimizer.step"):
        loss.backward()


def test_what_tiles_cannot_do_is_said(workshop: Workshop) -> None:
    pair = pair_of(workshop)
    with pytest.raises(IndexError, match="out of range"):
        pair.model(torch.full((1, 7), WORDS))
    with pytest.raises(RuntimeError, match="up.weight"):
        F.linear(torch.ones(1, WIDTH), pair.model.up.weight)
    loss = mean_square(pair.model, ids(1)[0])
    (first,) = torch.autograd.grad(loss, [pair.model.head.bias], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of 'up.weight', which does not fit"):
        torch.autograd.grad(mean_square(pair.model, ids(1)[0]), [pair.model.up.weight], allow_unused=True)


def test_a_second_derivative_of_a_plain_sum_is_refused(workshop: Workshop) -> None:
    pair = pair_of(workshop)
    (slope,) = torch.autograd.grad(pair.model(ids(1)[0]).sum(), [pair.model.up.bias], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        slope.square().sum().backward()


def test_a_backward_that_names_parameters_reaches_them(workshop: Workshop) -> None:
    pair = pair_of(workshop)
    for model, _ in pair.both:
        mean_square(model, ids(1)[0]).backward(inputs=[model.words.weight, model.down.weight, model.up.bias])
    assert_same_gradients(pair.model, pair.plain, atol=1e-6, rtol=1e-4)


def test_the_gradient_of_something_else_leaves_those_that_are_there(workshop: Workshop) -> None:
    pair = pair_of(workshop)
    for model, _ in pair.both:
        loss = mean_square(model, ids(1)[0])
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, [model.up.bias])
        mean_square(model, ids(2)[1]).backward()
    assert_same_gradients(pair.model, pair.plain, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("change", [{"tiles": False}, {"params": "device"}])
def test_without_tiles_the_budget_is_refused(workshop: Workshop, change: Fields) -> None:
    with pytest.raises(ValueError, match=r"needs .* but (host|device)_memory is|do not fit"):
        pair_of(workshop, **change)


def test_an_optimizer_that_needs_whole_parameters_is_refused(workshop: Workshop) -> None:
    with pytest.raises(ValueError, match="needs"):
        pair_of(workshop, optimizer=lambda model: torch.optim.Adafactor(model.parameters()))


def test_gathered_shows_all_of_it(workshop: Workshop) -> None:
    pair = pair_of(workshop)
    with outsize.gathered(pair.model.up, modify=True), torch.no_grad():
        pair.model.up.weight.mul_(2)
    with torch.no_grad():
        pair.plain.up.weight.mul_(2)
    pair.train(ids(2), rel=2e-5, loss_of=mean_square)
    assert gradients(pair.model)["up.weight"] is None


@pytest.mark.parametrize("shape", [(9000, 3), (5000, 64), (7, 4096), (9000, 5, 3, 3)])
def test_tiles_begin_at_whole_pages(shape: tuple[int, ...]) -> None:
    row = torch.Size(shape[1:]).numel()
    for nbytes in (1, 40_000, 1 << 20):
        rows = tile_rows(shape, 4, nbytes)
        assert rows == shape[0] or rows * row % PAGE_ELEMENTS == 0
        assert rows * row * 4 <= max(nbytes, PAGE_ELEMENTS * row * 4)
