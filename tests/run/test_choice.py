"""`activations="auto"` keeps what the budget has room for, computes the rest again, and changes no bit."""

import gc
import itertools
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.move.activations import ActivationStore
from outsize.run import choice
from tests.comparing import assert_same, assert_same_gradients, assert_same_runs, weights
from tests.conftest import AT_REST_TIERS, Trace, Workshop, adamw, batches, take_step, train
from tests.small_models import Built, InTurn

HELD = "device/activations"
DEPTH, WIDTH, ROWS = 6, 32, 64
ON_HOST = {"params": "host", "grads": "host", "states": "host"}


class Residual(nn.Module):
    """A layer that counts its forwards."""

    ran: ClassVar[Counter[int]] = Counter()

    def __init__(self, number: int, p: float) -> None:
        super().__init__()
        self.number = number
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Residual.ran[self.number] += 1
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Deep(InTurn):
    def __init__(self, p: float = 0.1) -> None:
        numbers = itertools.count()
        super().__init__(lambda: Residual(next(numbers), p), DEPTH, (WIDTH, 4))


def data(count: int, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    return batches(count, WIDTH, 4, rows)


def normal(*shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def forwards(model: nn.Module, optimizer: Any, batches: Any) -> list[int]:
    """Of each layer, how often it runs in each of the steps."""
    counts = []
    for batch in batches:
        Residual.ran.clear()
        train(model, optimizer, [batch])
        counts.append([Residual.ran[number] for number in range(DEPTH)])
    return counts


def held(model: nn.Module) -> tuple[int, int]:
    """Bytes that layers keep by choice: now, and at most so far."""
    report = outsize.memory(model)
    return report.now.get(HELD, 0), report.peak.get(HELD, 0)


def prepared(workshop: Workshop, budget: int, build: Any = Deep, **fields: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = build()
    optimizer = adamw(model)
    name = "host_memory" if workshop.device == "cpu" else "device_memory"
    workshop.prepare(
        model,
        optimizer,
        **{**ON_HOST, "host_memory": "1GiB", name: budget, "disk": workshop.disk, "tiles": False, **fields},
    )
    torch.manual_seed(1)
    return model, optimizer


def chosen(model: nn.Module) -> Any:
    found = outsize.plan(model).activations
    assert found is not None
    return found


AMPLE = 64 << 20


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier tests of this process have compiled does not count."""
    monkeypatch.setattr(choice, "_compiles", bool)


def spare_of(workshop: Workshop, budget: int, build: Any = Deep, **fields: Any) -> int:
    """Bytes that the layers of a model may keep under the budget; 0 too where it does not hold the model."""
    try:
        model, _ = prepared(workshop, budget, build, **fields)
    except ValueError:
        return 0
    found = outsize.plan(model).activations
    return 0 if found is None else found.spare


def budget_for(workshop: Workshop, spare: int, build: Any = Deep, enough: int = AMPLE, **fields: Any) -> int:
    """The smallest budget that leaves layers so many bytes, to some KiB. A byte more of it is about one to spare."""
    too_small, found = 0, spare_of(workshop, enough, build, **fields)
    while found - spare > enough // 1024 and enough - too_small > enough // 1024:
        less = max(enough - (found - spare), too_small + (enough - too_small) // 8)
        at = spare_of(workshop, less, build, **fields)
        if at >= spare:
            enough, found = less, at
        else:
            too_small = less
    return enough


SHARES: dict[tuple[str, float, Any], int] = {}


def share_of(workshop: Workshop, share: float, build: Any = Deep) -> int:
    """The smallest budget under which this share may be kept of all that the layers save."""
    key = workshop.device, share, build
    if key not in SHARES:
        model, optimizer = prepared(workshop, AMPLE, build)
        forwards(model, optimizer, data(2))
        SHARES[key] = budget_for(workshop, int(chosen(model).nbytes * share), build)
    return SHARES[key]


def a_third(workshop: Workshop) -> int:
    return share_of(workshop, 0.34)


def test_what_fits_is_kept_after_the_first_step(workshop: Workshop) -> None:
    model, optimizer = prepared(workshop, AMPLE)
    assert "chosen when they have run" in str(outsize.plan(model))
    assert forwards(model, optimizer, data(4)) == [[2] * DEPTH, *[[1] * DEPTH] * 3]
    found = chosen(model)
    assert set(found.modes) == {f"layers.{number}" for number in range(DEPTH)}
    assert set(found.modes.values()) == {"keep"}
    now, peak = held(model)
    assert now == 0
    assert 0 < peak == found.nbytes <= found.spare
    assert f"of {DEPTH} layers {DEPTH} keep what they save" in str(outsize.plan(model))
    assert HELD in str(outsize.memory(model))


def test_what_a_layer_is_said_to_keep_is_what_it_keeps(workshop: Workshop) -> None:
    """The input of the next layer is among it: the tensor that the last operation made. Dropout keeps a mask."""
    model, optimizer = prepared(workshop, AMPLE, lambda: Deep(p=0.5))
    forwards(model, optimizer, data(2))
    rows = ROWS * 4
    norm = rows * WIDTH + 2 * rows  # its result, means and deviations
    inside = 2 * rows * 4 * WIDTH  # before and behind the activation
    mask = rows * WIDTH
    low, high = norm + inside + mask // 4, norm + inside + 2 * mask
    assert DEPTH * low <= chosen(model).nbytes <= DEPTH * high


def test_under_a_budget_some_layers_compute_again(workshop: Workshop) -> None:
    model, optimizer = prepared(workshop, a_third(workshop))
    counts = forwards(model, optimizer, data(5))
    assert counts[0] == [2] * DEPTH
    assert all(sum(count) > DEPTH for count in counts[2:])
    found = chosen(model)
    assert 0 < found.nbytes == held(model)[1] <= found.spare
    assert found.nbytes < found.bytes_if_all["keep"]
    assert set(found.modes.values()) - {"recompute"}


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_the_bits_are_those_of_keep(workshop: Workshop, tier: str) -> None:
    """With dropout, whatever was chosen, in the steps before and after it."""

    def trained(**fields: Any) -> tuple[Trace, dict[str, Tensor]]:
        model, optimizer = workshop.made(Deep, tier=tier, **fields)
        torch.manual_seed(1)
        return train(model, optimizer, data(4), clip=1.0), weights(model)

    budget = {"host_memory" if workshop.device == "cpu" else "device_memory": a_third(workshop)}
    if tier == "squeezed":
        budget = {}
    assert_same_runs(trained(**fields) for fields in ({"activations": "keep"}, {}, budget))


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is timed takes one second."""
    monkeypatch.setattr(choice, "time", SimpleNamespace(perf_counter=itertools.count().__next__))


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else the machine does takes no time."""
    monkeypatch.setattr(choice, "time", SimpleNamespace(perf_counter=time.thread_time))


def test_a_tighter_budget_never_takes_more(workshop: Workshop, alike: None) -> None:
    peaks, budgets = [], [share_of(workshop, share) for share in (0.01, 0.34, 1.1)]
    for budget in budgets:
        model, optimizer = prepared(workshop, budget)
        forwards(model, optimizer, data(3))
        peaks.append(held(model)[1])
        assert peaks[-1] <= chosen(model).spare
    assert peaks == sorted(peaks)
    assert peaks[0] == 0
    assert peaks[-1] == chosen(model).nbytes
    assert set(chosen(model).modes.values()) == {"keep"}


def test_longer_inputs_are_measured_before_they_are_kept(workshop: Workshop) -> None:
    model, optimizer = prepared(workshop, AMPLE)
    assert forwards(model, optimizer, data(2)) == [[2] * DEPTH, [1] * DEPTH]
    before = chosen(model).nbytes
    assert forwards(model, optimizer, data(3, rows=2 * ROWS)) == [[2] * DEPTH, [1] * DEPTH, [1] * DEPTH]
    assert chosen(model).nbytes == 2 * before
    assert forwards(model, optimizer, data(2)) == [[1] * DEPTH] * 2, "shorter ones are known to fit"


def test_sizes_inside_other_things_and_numbers_count_too(workshop: Workshop) -> None:
    class Repeats(Residual):
        def forward(self, inputs: dict[str, dict[str, Tensor]], times: int) -> Tensor:  # type: ignore[override]
            x = inputs["of"]["it"]
            for _ in range(times):
                x = super().forward(x)
            return x

    class Model(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Repeats(number, 0.0) for number in range(DEPTH)])

        def forward(self, x: Tensor, times: int = 1) -> Tensor:
            for layer in self.layers:
                x = layer({"of": {"it": x}}, times)
            return self.head(x)

    model, optimizer = prepared(workshop, AMPLE, Model)
    forwards(model, optimizer, data(2))
    before = chosen(model).nbytes
    for rows, times in ((4 * ROWS, 1), (ROWS, 3)):
        for _ in range(2):
            model(data(1, rows)[0][0], times).sum().backward()
            optimizer.zero_grad()
        output = model(data(1, rows)[0][0], times)
        assert held(model)[0] == chosen(model).nbytes >= 2.5 * before
        del output


def test_nested_tensors_are_computed_again(workshop: Workshop) -> None:
    if workshop.device != "cpu":
        pytest.skip("the simulated accelerator has no nested tensors")

    class Simple(Built, inner=lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH)])):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner[0](x))

    pair = workshop.pair(lambda: InTurn(Simple, head=None), sgd, **ON_HOST)
    for lengths in ((3, 5), (2, 7), (4, 4)):
        rows = [torch.randn(length, WIDTH) for length in lengths]
        losses = []
        for model, optimizer in pair.both:
            losses.append(
                take_step(
                    model(torch.nested.nested_tensor(rows, layout=torch.jagged)).values().square().mean(), optimizer
                ).item()
            )
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_several_graphs_at_once_stay_within_the_bytes(workshop: Workshop) -> None:
    model, optimizer = prepared(workshop, a_third(workshop))
    forwards(model, optimizer, data(4))
    spare = chosen(model).spare
    losses = []
    for x, y in data(6):
        losses.append((model(x) - y).square().mean())
        assert held(model)[0] <= spare
    sum(losses).backward()
    del losses
    optimizer.step()
    optimizer.zero_grad()
    assert held(model) == (0, held(model)[1])
    assert held(model)[1] <= spare


def test_a_layer_that_is_called_twice_counts_twice(workshop: Workshop) -> None:
    class Twice(Deep):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.layers[0](x))

    model, optimizer = prepared(workshop, AMPLE, Twice)
    assert forwards(model, optimizer, data(3))[2] == [2] + [1] * (DEPTH - 1)
    once, optimizer = prepared(workshop, AMPLE)
    forwards(once, optimizer, data(3))
    assert chosen(model).nbytes * DEPTH == chosen(once).nbytes * (DEPTH + 1)
    assert held(model)[1] == chosen(model).nbytes


def test_what_is_trained_changes_what_is_kept(workshop: Workshop) -> None:
    """Layers below the first trained one keep nothing, and are measured again when they are trained."""
    model, optimizer = prepared(workshop, AMPLE)
    for layer in model.layers[: DEPTH - 1]:
        layer.requires_grad_(False)
    forwards(model, optimizer, data(3))
    one = held(model)[1]
    for layer in model.layers:
        layer.requires_grad_(True)
    forwards(model, optimizer, data(3))
    assert one > 0
    assert held(model)[1] == DEPTH * one == chosen(model).nbytes


def test_an_error_or_a_dropped_graph_gives_the_bytes_back(workshop: Workshop) -> None:
    model, optimizer = prepared(workshop, AMPLE)
    forwards(model, optimizer, data(2))
    output = model(data(1)[0][0])
    assert held(model)[0] == chosen(model).nbytes
    del output
    gc.collect()
    assert held(model)[0] == 0

    def fail(*_: object) -> None:
        raise KeyError("stop")

    handle = model.layers[4].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="stop"):
        model(data(1)[0][0])
    handle.remove()
    gc.collect()
    assert held(model)[0] == 0
    assert forwards(model, optimizer, data(2)) == [[1] * DEPTH] * 2


def test_without_gradients_nothing_is_held(workshop: Workshop) -> None:
    model, optimizer = prepared(workshop, AMPLE)
    forwards(model, optimizer, data(2))
    peak = held(model)[1]
    with torch.no_grad():
        model(torch.cat([x for x, _ in data(8)]))
    assert held(model) == (0, peak)


def test_a_graph_is_used_twice(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Deep(p=0.0), sgd, **ON_HOST)
    pair.train(data(2))
    for model in (pair.plain, pair.model):
        x, y = data(1)[0]
        loss = (model(x) - y).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert held(pair.model)[0] == 0
    assert_same_gradients(pair.model, pair.plain)


def test_in_parts(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Deep(p=0.0), sgd, micro_batches=3, **ON_HOST)
    pair.train(data(4))
    assert set(chosen(pair.model).modes.values()) == {"keep"}


def test_where_something_is_compiled_products_are_no_choice(
    workshop: Workshop, alike: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_compiles", lambda: True)
    model, optimizer = prepared(workshop, a_third(workshop))
    counts = forwards(model, optimizer, data(3))
    assert counts[0] == [2] * DEPTH
    assert counts[1] == counts[2] != [2] * DEPTH
    assert set(chosen(model).modes.values()) == {"keep", "recompute"}
    assert "selective" not in chosen(model).bytes_if_all


def test_layers_that_rest_on_the_device_are_left_alone(workshop: Workshop) -> None:
    model, optimizer = workshop.made(Deep, tier="device")
    assert forwards(model, optimizer, data(2)) == [[1] * DEPTH] * 2
    assert outsize.plan(model).activations is None


def test_products_are_kept_where_only_they_fit(workshop: Workshop, undisturbed: None) -> None:
    """Layers whose cheap operations save most of the bytes, and take little time: their products alone are kept."""

    class Cheap(Built, one=(1024, 1024), two=(1024, 1024)):
        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            for _ in range(4):
                y = torch.relu(y)
            return x + self.two(y)

    x = normal(256, 1024)
    products, build = 3 * 2 * 4 * x.numel(), partial(InTurn, Cheap, head=None)
    model, optimizer = prepared(workshop, budget_for(workshop, products, build, 256 << 20), build)
    for _ in range(3):
        take_step(model(x).square().mean(), optimizer)
    found = chosen(model)
    assert found.nbytes <= found.spare
    assert "selective" in found.modes.values()
    assert held(model)[1] == found.nbytes


class Masks(Built, inner=lambda: nn.ModuleList([nn.Linear(256, 256) for _ in range(2)])):
    """A layer that saves little but masks."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.inner
        y = first(x)
        for _ in range(6):
            y = torch.where(y.detach().sin().cos().exp() > 1.5, y, 2 * y)
        return x + 1e-2 * second(y)


def test_masks_are_packed_where_that_makes_them_fit(workshop: Workshop, undisturbed: None) -> None:
    x, build = normal(512, 256), partial(InTurn, Masks, head=None)
    whole, packed = 3 * (4 + 6) * x.numel(), 3 * (4 + 6 // 8 + 1) * x.numel()

    def trained(**fields: Any) -> tuple[nn.Module, list[float]]:
        model, optimizer = prepared(workshop, 64 << 20, build, **fields)
        losses = []
        for _ in range(3):
            losses.append(take_step(model(x).square().mean(), optimizer).item())
        return model, losses

    name = "host_memory" if workshop.device == "cpu" else "device_memory"
    model, losses = trained(**{name: budget_for(workshop, packed, build, 64 << 20)})
    found = chosen(model)
    assert set(found.modes.values()) == {"pack"}
    assert held(model)[1] == found.nbytes <= packed < whole == found.bytes_if_all["keep"]
    assert "3 keep it packed" in str(found)
    kept, expected = trained(activations="keep")
    assert losses == expected
    assert_same(weights(kept), weights(model))


class Two(Built, one=(WIDTH, WIDTH), two=(WIDTH, WIDTH)):
    """Saves two tensors: its input, and what `tanh` gives, which two operations save."""

    def forward(self, x: Tensor) -> Tensor:
        Residual.ran[0] += 1
        return self.two(torch.tanh(self.one(x)))


def six() -> nn.Module:
    return InTurn(Two, DEPTH, (WIDTH, 4))


ON_DISK = {"params": "disk", "grads": "disk", "states": "disk"}
SAVED = 2 * 1024 * WIDTH * 4
"""Bytes that one layer saves of so many rows."""

BUDGETS: dict[str, int] = {}
"""By device: it takes a while to find."""


class Clock:
    """Forwards take a second each, all else nothing."""

    def perf_counter(self) -> float:
        return float(sum(Residual.ran.values()))


def trained_on_disk(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, seconds: float, clock: Any = None, **fields: Any
) -> tuple[nn.Module, list[int], tuple[list[float], dict[str, Tensor]]]:
    """Six layers, of whose saved tensors those of four are spare; `seconds`: of the transfer of a byte."""
    monkeypatch.setattr(ActivationStore, "seconds_a_byte", seconds)
    monkeypatch.setattr(choice, "time", clock or Clock())
    monkeypatch.setattr(choice, "_compiles", lambda: True)  # products are no choice
    if workshop.device not in BUDGETS:
        BUDGETS[workshop.device] = budget_for(workshop, SAVED * 9 // 4, six, **ON_DISK)
    model, optimizer = prepared(workshop, BUDGETS[workshop.device], six, **ON_DISK, **fields)
    counts: list[int] = []
    losses: list[float] = []
    for batch in data(5, rows=1024):
        Residual.ran.clear()
        losses += train(model, optimizer, [batch]).losses
        counts.append(Residual.ran[0])
    loss = model(data(1, rows=1024)[0][0]).square().mean()
    loss.backward(retain_graph=True)  # whose graph is used twice
    loss.backward()
    losses.append(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item())
    del loss
    return model, counts, (losses, weights(model))


@pytest.mark.parametrize("tier", ["auto", "disk"])
def test_all_that_layers_save_moves_out_where_that_is_hidden(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """The first step computes again, the second one tries. What two operations save moves once; parameters never do."""
    model, counts, found = trained_on_disk(workshop, monkeypatch, 0.0, activations_tier=tier)
    assert counts == [2 * DEPTH, *[DEPTH] * 4]
    assert set(chosen(model).modes.values()) == {"offload"}
    assert f"{DEPTH} move it out" in str(outsize.plan(model))
    report = outsize.memory(model)
    there = "disk" if workshop.device == "cpu" or tier == "disk" else "host"
    assert report.peak[f"{there}/activations"] == (DEPTH - 1) * SAVED, "the last one stays"
    assert not report.now.get("disk/activations")
    _, _, kept = trained_on_disk(workshop, monkeypatch, 0.0, activations="keep")
    assert_same_runs((found, kept))


def test_nothing_moves_where_that_takes_longer_than_the_forward(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counts, _ = trained_on_disk(workshop, monkeypatch, 1.01 / SAVED)
    assert counts == [2 * DEPTH, *[DEPTH + 2] * 4]
    assert set(chosen(model).modes.values()) == {"keep", "recompute"}
    assert not outsize.memory(model).peak.get("disk/activations")


class Slow(Clock):
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def perf_counter(self) -> float:
        return super().perf_counter() + next(self._looks)


def test_what_has_not_been_hidden_when_it_was_tried_is_computed_again(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counts, found = trained_on_disk(workshop, monkeypatch, 0.0, Slow())
    assert counts == [2 * DEPTH, DEPTH, *[DEPTH + 2] * 3]
    assert set(chosen(model).modes.values()) == {"keep", "recompute"}
    _, _, kept = trained_on_disk(workshop, monkeypatch, 0.0, activations="keep")
    assert_same_runs((found, kept))
