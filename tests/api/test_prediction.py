"""A step that is simulated: held against arithmetic, on machines that are fast in all but one thing."""

from __future__ import annotations

import gc
import itertools
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outsize
from benchmarks.common import PeakRss, rss_bytes
from outsize.api.counter import Counter
from outsize.api.simulated import PARAMETER_SECONDS
from outsize.planning.machine import Machine, typical_machine
from tests.comparing import assert_same
from tests.conftest import KINDS, Workshop, squared_error, train
from tests.small_models import Built, linears

FAST = 1e18
RATE = 1e9
IDEAL = Machine(
    cores=2,
    products={"float32": ((1.0, 1 / RATE),)},
    memory=FAST,
    host_memory=FAST,
    new_memory=FAST,
    checksums=FAST,
    operation_seconds=1e-12,
    updates={"": (FAST, FAST)},
    disk_read=FAST,
    disk_write=FAST,
    disk_mixed=2 * FAST,
    disk_seconds=1e-12,
)
"""It does products at `RATE` FLOP/s, and all else at once."""
QUICK = replace(IDEAL, products={"float32": ((1.0, 1 / FAST),)})
"""It does products at once, too."""
WIDTH, BATCH, LAYERS = 256, 512, 6
PYTHON = 0.03
"""Of a step, for what the simulation gives each unit on the side."""
BATCHES = (torch.zeros(BATCH, WIDTH),)


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def stack(layers: int = LAYERS, width: int = WIDTH) -> nn.Sequential:
    return linears(width, layers)


def predicted(model: nn.Module, machine: Machine = IDEAL, example: Any = BATCHES, **fields: Any) -> Any:
    return outsize.plan(model, example=example, machine=machine, device="cpu", **fields)


def on_a_drive(machine: Machine, disk: Path, **fields: Any) -> Any:
    """Of a step with everything at rest on disk."""
    return predicted(stack(), machine, host_memory="64MiB", disk=disk, **dict.fromkeys(KINDS, "disk"), **fields)


def test_with_all_in_memory_a_step_takes_as_long_as_its_products_and_its_update() -> None:
    flops = 2 * BATCH * WIDTH**2 * (3 * LAYERS - 1)  # the first layer's input has no gradient
    plan = predicted(stack(), host_memory="1GiB")
    assert plan.step_seconds == pytest.approx(flops / RATE + 2 * LAYERS * PARAMETER_SECONDS, rel=1e-6)
    elements = LAYERS * (WIDTH**2 + WIDTH)
    slow = replace(IDEAL, updates={"": (1e5, 1e6)})
    assert predicted(stack(), slow, host_memory="1GiB").step_seconds == pytest.approx(
        flops / RATE + elements / 1e6, rel=0.1
    )


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_drive_that_is_slow_bounds_a_step_by_its_bytes(kind: str, tmp_path: Path) -> None:
    rate = 1e6
    machine = replace(QUICK, **{f"disk_{kind}": rate})
    plan = on_a_drive(machine, tmp_path)
    moved = plan.read_bytes if kind == "read" else plan.written_bytes
    assert plan.step_seconds == pytest.approx(moved / rate, rel=PYTHON)
    assert plan.prediction.bound == f"disk {kind}s"


def test_a_drive_reads_and_writes_at_once_as_much_as_it_does_of_both(tmp_path: Path) -> None:
    rate = 1e6
    machine = replace(QUICK, disk_read=rate, disk_write=rate, disk_mixed=rate)
    plan = on_a_drive(machine, tmp_path)
    moved = plan.read_bytes + plan.written_bytes
    assert plan.step_seconds == pytest.approx(moved / rate, rel=PYTHON)
    wide = replace(machine, disk_mixed=2 * rate)  # neither slows the other down
    assert on_a_drive(wide, tmp_path).step_seconds < 0.7 * moved / rate


def test_a_request_that_waits_for_no_other_takes_its_latency(tmp_path: Path) -> None:
    seconds = 0.1
    plan = on_a_drive(replace(QUICK, disk_seconds=seconds), tmp_path, update="backward")
    assert 2 * seconds <= plan.step_seconds <= 2 * LAYERS * seconds  # most requests follow upon others


def test_checksums_bound_a_step_where_they_are_slow(tmp_path: Path) -> None:
    rate = 1e6
    machine = replace(QUICK, checksums=rate)
    plan = on_a_drive(machine, tmp_path)
    summed = 1.5 * (plan.read_bytes + plan.written_bytes) / rate  # on one of two cores, which compute too
    assert plan.step_seconds == pytest.approx(summed, rel=0.2)
    unchecked = on_a_drive(machine, tmp_path, verify=False)
    assert unchecked.step_seconds < PYTHON * plan.step_seconds


def test_memory_that_comes_from_the_system_takes_its_time() -> None:
    rate = 1e6
    tiers = dict.fromkeys(("params", "grads", "states"), "host")
    plan = predicted(stack(), replace(QUICK, new_memory=rate), host_memory="1GiB", **tiers)
    grads = sum(unit.size.grads for unit in plan.units)
    assert plan.step_seconds == pytest.approx(grads / rate, rel=0.1)  # all weights stay gathered
    small = predicted(stack(), replace(QUICK, new_memory=rate), host_memory="8.5MiB", **tiers)
    assert small.step_seconds > 1.5 * plan.step_seconds


def test_a_slow_update_on_the_host_bounds_a_step(tmp_path: Path) -> None:
    machine = replace(QUICK, updates={"": (1e5, 1e5)})
    plan = predicted(stack(), machine, host_memory="1GiB", params="host", grads="host", states="host")
    assert plan.step_seconds == pytest.approx(LAYERS * (WIDTH**2 + WIDTH) / 1e5, rel=0.1)


def test_more_memory_never_makes_a_step_longer(tmp_path: Path) -> None:
    machine = replace(QUICK, disk_read=1e7, disk_write=1e7, disk_mixed=1.2e7)
    seconds = [
        predicted(stack(), machine, host_memory=f"{mebibytes}MiB", disk=tmp_path).step_seconds
        for mebibytes in (3, 4, 5, 6, 8, 12)
    ]
    assert all(later <= before * 1.001 for before, later in itertools.pairwise(seconds)), seconds
    assert seconds[-1] < seconds[0] / 2


def test_peaks_are_those_of_what_rests_and_what_is_at_work(tmp_path: Path) -> None:
    model = stack()
    state = sum(param.numel() for param in model.parameters()) * 4
    inputs = BATCH * WIDTH * 4
    peaks = predicted(model, host_memory="1GiB").peak_bytes
    least = 4 * state + inputs * (LAYERS - 1)
    assert least <= peaks["device"] + peaks["host"] <= least + 4 * inputs + (12 << 20) and peaks["disk"] == 0
    on_disk = predicted(
        model, host_memory="64MiB", disk=tmp_path, params="disk", grads="disk", states="disk"
    ).peak_bytes
    assert on_disk["disk"] == pytest.approx(4 * state, rel=0.1)  # units are whole pages


@pytest.mark.parametrize(("written", "in_flight"), [(FAST, 1), (1e6, 3)], ids=["fast drive", "slow drive"])
def test_gradients_on_their_way_to_disk_take_memory_until_they_are_written(
    written: float, in_flight: int, tmp_path: Path
) -> None:
    with torch.device("meta"):
        model = stack(3, 4096)
    weight, staging = 4 * 4096**2, 64 << 20
    machine = replace(IDEAL, disk_write=written, disk_mixed=2 * written)
    peaks = predicted(
        model, machine, (torch.zeros(64, 4096),), host_memory="6GiB", disk=tmp_path, **dict.fromkeys(KINDS, "disk")
    ).peak_bytes
    least = (3 + in_flight + 1) * weight + staging  # one is still autograd's; blocks as large leave no holes
    assert least <= peaks["device"] + peaks["host"] <= 1.07 * least


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch has no grouped_mm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_experts_count_as_the_rows_that_they_multiply(dtype: torch.dtype) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.empty(4, WIDTH, WIDTH)) for _ in range(2))

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            once = F.grouped_mm(x.to(self.first.dtype), self.first, offs=ends)
            return F.grouped_mm(once, self.second.transpose(-2, -1), offs=ends).square()

    machine = replace(IDEAL, products={str(dtype).removeprefix("torch."): ((1.0, 1 / RATE),)})
    example = (BATCHES[0], torch.arange(1, 5, dtype=torch.int32) * (BATCH // 4))
    plan = predicted(Experts(), machine, example, host_memory="1GiB", compute_dtype=dtype)
    seconds = 2 * BATCH * WIDTH**2 * (3 * 2 - 1) / RATE + 2 * PARAMETER_SECONDS
    assert plan.step_seconds == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize("inputs", [32, 128])
def test_what_a_recurrent_layer_keeps_for_its_backward_counts_in_the_peak(inputs: int) -> None:
    model = nn.LSTM(inputs, 64)
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def saved(length: int) -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = model(torch.randn(length, 16, inputs))  # alive, so that each address is of one storage
        del out
        return sum(kept.values())

    def peak(length: int) -> int:
        plan = predicted(model, example=(torch.zeros(length, 16, inputs),), host_memory="1GiB")
        return sum(plan.peak_bytes[tier] for tier in ("device", "host"))

    more = saved(1024) - saved(128)
    assert more > 8 << 20
    assert more <= peak(1024) - peak(128) <= 2 * more  # its kernels take some more


def test_the_plain_tensors_of_a_convolution_are_there_twice_while_it_runs() -> None:
    convolution, linear = nn.Conv2d(512, 512, 3, bias=False), nn.Linear(512, 9 * 512, bias=False)
    plans = [
        predicted(convolution, example=(torch.zeros(1, 512, 8, 8),), host_memory="1GiB"),
        predicted(linear, example=(torch.zeros(1, 512),), host_memory="1GiB"),
    ]
    twice, once = (sum(plan.peak_bytes[tier] for tier in ("device", "host")) for plan in plans)
    assert twice - once >= convolution.weight.nbytes
    assert twice - once <= 1.2 * convolution.weight.nbytes


def test_a_layer_may_return_a_sparse_tensor() -> None:
    class Sparse(Built, weight=lambda: nn.Parameter(torch.eye(WIDTH))):
        def forward(self) -> torch.Tensor:
            return (self.weight * 1.0).to_sparse()

    class Outer(Built, inner=Sparse):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.inner(), x.T)

    assert predicted(Outer(), host_memory="1GiB").step_seconds > 0


def test_a_step_is_counted_where_torch_looks_for_anomalies() -> None:
    with torch.autograd.set_detect_anomaly(True):
        assert predicted(stack(1)).step_seconds == predicted(stack(1)).step_seconds > 0
        assert torch.is_anomaly_enabled()


def test_an_example_is_a_dict_or_a_tuple_for_the_model() -> None:
    model = stack()
    named = predicted(model, example={"input": BATCHES[0]}, host_memory="1GiB")
    assert named.step_seconds == predicted(model, host_memory="1GiB").step_seconds
    assert named.prediction.items == BATCH and named.prediction.unit == "samples"
    assert all(param.grad is None for param in model.parameters())
    assert model[0](BATCHES[0]).shape == (BATCH, WIDTH)  # it runs as before


@pytest.mark.parametrize(
    ("example", "kind", "message"),
    [
        ({"pixels": BATCHES[0]}, ValueError, "Sequential.forward has no argument 'pixels'; it has input"),
        ((torch.zeros(3, 5),), ValueError, "does not fit the model: Sequential raised RuntimeError in '0'"),
        (7, TypeError, "example is a int; it must be a dict, a tuple or a tensor"),
    ],
)
def test_an_example_that_does_not_fit_is_an_error(example: Any, kind: type[Exception], message: str) -> None:
    model = stack()
    with pytest.raises(kind, match=message):
        predicted(model, example=example, host_memory="1GiB")
    assert "forward" not in vars(model[0]) and not model[0]._forward_hooks


def test_a_step_that_depends_on_values_and_figures_that_are_none_are_errors() -> None:
    class Picks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[x[:, 0] > 0]

    with pytest.raises(ValueError, match="a step of Picks cannot be counted: what it does depends on values"):
        predicted(Picks(4, 4), example=(torch.ones(2, 4),), host_memory="1GiB")

    class Casts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super(Casts, self.to(x.dtype)).forward(x)

    with pytest.raises(ValueError, match=r"trains with this batch, leave example out: .* such as Module.to\(\)"):
        predicted(Casts(4, 4), example=(torch.ones(2, 4),), host_memory="1GiB")
    with pytest.raises(TypeError, match="machine is a int; it must be the figures that outsize.probe returns"):
        outsize.plan(stack(), example=BATCHES, machine=7, host_memory="1GiB")  # type: ignore[arg-type]


def test_the_plan_says_whose_updates_are_counted_as_those_of_adamw() -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        model = stack()
        plan = outsize.plan(model, kind(model.parameters()), example=BATCHES, host_memory="1GiB", device="cpu")
        assert ("updates are counted as those of AdamW: those of SGD take" in str(plan)) == (kind is torch.optim.SGD)


def test_the_plan_says_what_it_does_not_simulate() -> None:
    model = stack()
    optimizer, fields = (
        torch.optim.AdamW(model.parameters()),
        {"example": BATCHES, "host_memory": "1GiB", "device": "cpu"},
    )
    plan = outsize.plan(model, optimizer, activations="selective", micro_batches=2, delayed_update=True, **fields)
    for words in (
        "activations='selective' is counted as 'recompute'",
        "micro_batches=2",
        "those without delayed_update",
    ):
        assert words in str(plan)
    assert "counted as" not in str(outsize.plan(model, optimizer, **fields))


class Slow(Built, linear=(8, 8), norm=lambda: nn.BatchNorm1d(8), dropout=lambda: nn.Dropout(0.5)):
    """Its Python takes long, which no count sees. Draws numbers, and has buffers that a forward changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            began = time.perf_counter()
            random.random() + sum(range(300_000))
            TOOK.append(time.perf_counter() - began)
        return self.dropout(self.norm(self.linear(x)))


TOOK: list[float] = []


def test_a_plan_leaves_no_weights_in_memory() -> None:
    model = nn.Linear(6, 7)
    for _ in range(2):
        outsize.plan(model, example=torch.randn(2, 6), host_memory="1GiB", device="cpu")
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, nn.Parameter) and each.shape == (7, 6)]
    assert len(alive) == 1 and alive[0] is model.weight


def test_a_plan_of_this_machine_times_a_step_and_leaves_no_trace() -> None:
    model, example = Slow(), (torch.randn(4, 8),)
    predicted(model, example=example, host_memory="1GiB")
    assert not TOOK  # another machine
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate()
    plan = outsize.plan(model, example=example, host_memory="1GiB", device="cpu")
    assert plan.step_seconds >= min(TOOK)
    assert torch.equal(drawn[0], torch.get_rng_state()) and drawn[1] == random.getstate()
    assert_same(model.state_dict(), before)
    assert all(param.grad is None for param in model.parameters())
    count = len(TOOK)
    with torch.device("meta"):
        assert outsize.plan(Slow(), example=example, host_memory="1GiB", device="cpu").step_seconds >= min(TOOK)
    assert len(TOOK) > count  # a model without memory is timed, too


def test_what_passes_the_caches_of_an_accelerator_is_over_before_a_layer_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: done.append("waited"))
    passed = Mock(add_=lambda _: done.append("passed"))
    counter = Counter(stack(), typical_machine("cuda", 1), torch.device("meta"), passed)
    counter.watch({}, {}, ())
    counter.stand_in([((2,), torch.float32)])
    assert done == ["passed", "waited"] * 2


def test_a_step_that_cannot_be_timed_goes_by_rates_and_the_plan_says_why(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"disk": tmp_path, "device": "cpu"}
    table, ids = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8)), torch.full((2, 3), 10)
    unknown = outsize.plan(table, example=ids, host_memory="64MiB", **fields)
    large = outsize.plan(stack(), example=BATCHES, host_memory="4MiB", **fields)
    for plan, reason in (
        (unknown, "could not be timed.*out of range"),
        (large, r"take \d+ MiB to time, and 4 MiB are"),
    ):
        assert plan.step_seconds > 0
        assert re.search(f"by rates: .*{reason}", str(plan))


def test_a_step_that_has_no_room_beside_it_is_timed(tmp_path: Path) -> None:
    """What would pass the caches takes 48 MiB more."""
    fields: dict[str, Any] = {"host_memory": "40MiB", "disk": tmp_path, "device": "cpu"}
    plan = outsize.plan(stack(width=1024), example=torch.zeros(4, 1024), **fields)
    assert "by rates" not in str(plan)


def test_a_model_that_rests_on_disk_is_timed(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"disk": tmp_path, "device": "cpu"}
    with outsize.init(host_memory="512KiB", **fields):
        model = Model(64, [""] * 4)
    plan = outsize.plan(model, example=torch.zeros(2, 32, dtype=torch.long), host_memory="64MiB", **fields)
    assert "by rates" not in str(plan)


def test_a_step_of_a_sparse_table_takes_as_long_as_its_rows() -> None:
    ids = (torch.zeros(4, 8, dtype=torch.long),)
    for kind in (nn.Embedding, nn.EmbeddingBag):
        small, large = (
            predicted(kind(rows, 16, sparse=True, device="meta"), example=ids, host_memory="8GiB")
            for rows in (100, 10_000_000)
        )
        assert small.step_seconds == large.step_seconds


def test_a_step_of_a_model_that_is_prepared_or_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave it out where the mesh cuts the model"):
        predicted(stack(), host_memory="1GiB", mesh={"tp": 2})
    model, _ = outsize.prepare(stack(), host_memory="1GiB", device="cpu")
    with pytest.raises(ValueError, match="prepared already"):
        outsize.plan(model, example=BATCHES)
    with pytest.raises(ValueError, match="outsize.plan takes it"):
        outsize.prepare(stack(), host_memory="1GiB", device="meta", device_memory="1GiB")


def test_a_prediction_without_measurements_says_so_in_its_first_line() -> None:
    plan = outsize.plan(stack(), example=BATCHES, host_memory="1GiB", device="cpu")
    assert str(plan).splitlines()[0].startswith("predicted from typical figures")
    assert not str(predicted(stack(), host_memory="1GiB")).startswith("predicted")


class Block(nn.Module):
    """A layer that may say of which kind it is."""

    def __init__(self, width: int, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int, kinds: list[str], vocabulary: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, kind) for kind in kinds)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_layers_that_are_alike_count_as_if_each_was_counted() -> None:
    machine = replace(IDEAL, memory=1e8)
    tokens = (torch.zeros(2, 32, dtype=torch.long),)
    for fields in ({"host_memory": "1GiB"}, {"host_memory": "4MiB", "params": "host", "grads": "host"}):
        alike, apart = (predicted(Model(64, kinds), machine, tokens, **fields) for kinds in ([""] * 5, list("abcde")))
        assert alike.step_seconds == pytest.approx(apart.step_seconds, rel=1e-9)
        assert alike.peak_bytes["device"] == pytest.approx(apart.peak_bytes["device"], rel=0.02)
        assert alike.prediction.unit == "tokens" and alike.prediction.items == 64


class Halves(nn.Module):
    """Halves its image with `stride=2`, and leaves its mean behind."""

    def __init__(self, stride: int, kind: str) -> None:
        super().__init__()
        self.conv, self.kind = nn.Conv2d(4, 4, 3, stride=stride, padding=1), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        self.mean = x.mean()
        return x


def test_layers_that_differ_in_a_stride_or_leave_values_behind_are_not_alike() -> None:
    class Blocks(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum() + sum(each.mean for each in self)

    images = (torch.zeros(2, 4, 16, 16),)
    alike, apart = (
        predicted(Blocks(*map(Halves, (1, 2, 1, 2), kinds)), example=images, host_memory="1GiB")
        for kinds in ("aaaa", "abcd")
    )
    assert alike.step_seconds == apart.step_seconds


def test_what_a_forward_keeps_is_not_kept_of_the_count() -> None:
    class Caches(Halves):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen[x.shape] = self.lazy = x
            return super().forward(x)

    model = Caches(1, "")
    model.seen = {}
    model.register_buffer("lazy", None)
    predicted(model, example=(torch.zeros(2, 4, 16, 16),), host_memory="1GiB")
    assert not hasattr(model, "mean") and not model.seen and model.lazy is None


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_on_8_accelerators_is_simulated_in_seconds_and_without_memory() -> None:
    with torch.device("meta"):
        model = Model(8192, [""] * 128, 32_000).to(torch.bfloat16)
    assert sum(param.numel() for param in model.parameters()) > 69e9
    base = rss_bytes()
    with PeakRss() as memory:
        began = time.process_time()
        plan = outsize.plan(
            model,
            example=(torch.zeros(1, 2048, dtype=torch.long),),
            machine=Machine("cuda", cores=64, memory=1.5e12),
            ranks=8,
            device="meta",
            device_memory="24GiB",
            host_memory="64GiB",
            disk="drive",
            disk_space="2TB",
        )
        seconds = time.process_time() - began
    assert {tier for unit in plan.units for tier in (unit.tiers.params, unit.tiers.states)} >= {"host", "disk"}
    assert memory.peak - base < 200 << 20
    assert seconds < 5
    assert plan.step_seconds > plan.prediction.busy["compute"] > 0


@pytest.mark.parametrize("state_format", ["exact", "compact"])
def test_what_pads_small_layers_counts_in_the_plan_and_against_the_budget(
    workshop: Workshop, state_format: str
) -> None:
    """A unit rests in whole pages of 4,096 elements, its states too, and their scales in pages of 4,096 bytes."""
    model = linears(16, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    memory = dict.fromkeys(KINDS, "auto") | {
        "host_memory": "4MiB",
        "disk": workshop.disk,
        "units": nn.Linear,
        "device": "cpu",
        "state_format": state_format,
    }
    plan = outsize.plan(model, optimizer, **workshop.fields("device", **memory))
    workshop.prepare(model, optimizer, "device", **memory)
    data = [(torch.randn(2, 16), torch.randn(2, 16))]
    for _ in range(3):
        before = outsize.memory(model).bytes_written
        train(model, optimizer, data)
        workshop.settle(model)
    found = outsize.memory(model)
    assert found.bytes_written - before == plan.written_bytes > 0
    resting = [nbytes for name, nbytes in found.now.items() if not name.startswith("disk")]
    assert sum(resting) <= 4 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("update", ["fetch", "backward"])
def test_weights_in_tiles_are_updated_as_a_whole_and_read_once_more(
    workshop: Workshop, update: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Their gradients rest in fp32, go there tile by tile, and are not used in the backward."""
    model = nn.Sequential(nn.Linear(64, 2048, bias=False), nn.Linear(2048, 64, bias=False)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    memory = dict.fromkeys(KINDS, "disk") | {"host_memory": "352KiB", "disk": workshop.disk, "update": update}
    plan = outsize.plan(model, optimizer, device="cpu", **memory, example=(torch.randn(4, 64).to(dtype),))
    assert "above the budget" not in caplog.text
    outsize.prepare(model, optimizer, device="cpu", **memory)
    data = [(torch.randn(4, 64).to(dtype), torch.randn(4, 64).to(dtype))]
    for _ in range(3):
        before = outsize.memory(model)
        train(model, optimizer, data)
        workshop.settle(model)
    found = outsize.memory(model)
    assert found.bytes_written - before.bytes_written == plan.written_bytes > 0
    assert found.bytes_read - before.bytes_read <= plan.read_bytes


def tiles_around_a_norm() -> nn.Module:
    linear = partial(nn.Linear, bias=False)
    return nn.Sequential(linear(64, 1024), nn.RMSNorm(1024), linear(1024, 1024))


def tiles_after_small_layers() -> nn.Module:
    linear = partial(nn.Linear, bias=False)
    return nn.Sequential(linear(48, 4), linear(4, 512), linear(512, 32).requires_grad_(False), nn.LayerNorm(32))


@pytest.mark.parametrize("build", [tiles_around_a_norm, tiles_after_small_layers])
def test_tiles_beside_small_layers_stay_within_the_least_budget_in_the_plan_and_in_a_run(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, build: Callable[[], nn.Module]
) -> None:
    model = build()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    fields: dict[str, Any] = {**dict.fromkeys(KINDS, "disk"), "disk": workshop.disk, "device": "cpu"}
    with pytest.raises(outsize.BudgetError) as refused:
        outsize.plan(model, optimizer, host_memory="64KiB", **fields)
    fields["host_memory"] = refused.value.needed
    x = torch.randn(4, next(model.parameters()).shape[1])
    outsize.plan(model, optimizer, **fields, example=(x,))
    outsize.prepare(model, optimizer, **fields)
    train(model, optimizer, [(x, torch.randn_like(model(x)))] * 2)
    assert "above the budget" not in caplog.text


@pytest.mark.parametrize("fields", [{}, {"activations": "offload"}], ids=str)
def test_a_budget_that_just_holds_all_states_is_kept(workshop: Workshop, fields: dict[str, str]) -> None:
    """Nothing is staged then, but activations on their way to disk, which leave room for fewer states."""
    model = linears(64, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    memory = dict.fromkeys(KINDS, "auto") | {"device": "cpu", "disk": workshop.disk} | fields
    plan = outsize.plan(model, optimizer, **workshop.fields("device", **memory, host_memory="2MiB"))
    least = plan.state_bytes
    workshop.prepare(model, optimizer, "device", **memory, host_memory=least)
    for _ in range(2):
        squared_error(model, (torch.randn(2, 64), torch.randn(2, 64))).backward()
        optimizer.step()
        now = outsize.memory(model).now.items()
        assert sum(nbytes for name, nbytes in now if not name.startswith("disk")) <= least
        optimizer.zero_grad()
