"""Units come and go within their budget, whatever the disk does, and a run leaves nothing behind."""

import copy
import errno
import gc
import logging
import os
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import outsize
from outsize.move.memory import Ledger
from outsize.planning.sizes import format_bytes, parse_bytes
from tests.comparing import weights
from tests.conftest import Workshop, adamw, batches, forget_last_graph, prepared, squared_error, take_step, train
from tests.scripts import Script
from tests.small_models import Built, Stack, linears

PAGE = 4096


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, batches(1), clip=0.5)


@pytest.mark.parametrize(("update", "budget"), [("fetch", "352KiB"), ("backward", "352KiB"), ("backward", "288KiB")])
def test_gathered_units_and_gradients_share_the_room_that_the_budget_leaves(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, update: str, budget: str
) -> None:
    """At any time: gathered units + gradients on their way <= the room for them < all units."""
    pair = workshop.pair(lambda: Stack(depth=8), tier="disk", host_memory=budget, update=update)
    streamer, ledger = prepared(pair.model).engine.streamer, prepared(pair.model).resources.ledger
    streamer.drop_idle()
    used: list[int] = []
    add = ledger.add

    def watched(account: str, nbytes: int) -> None:
        add(account, nbytes)
        used.append(sum(ledger.now.get(name, 0) for name in ("device/resident", "host/grads in flight")))

    monkeypatch.setattr(ledger, "add", watched)
    for model, optimizer in pair.both:
        train(model, optimizer, batches(4), clip=0.5 if update == "fetch" else None)
    assert (
        max(used)
        <= streamer.room.planned_capacity
        < sum(unit.nbytes for unit in prepared(pair.model).engine.parameters.units)
    )
    assert not streamer.room.excess.logged
    pair.check()


ON_DISK = {"params": "disk", "grads": "disk", "states": "disk"}
BUDGET_IN_TEXT = re.compile(r"[Rr]aise host_memory to at least ([0-9.]+ \w+)")


class Stacked(Built, entries=lambda: nn.ParameterList([torch.randn(128, 128) * 0.05 for _ in range(8)])):
    """All entries of a list in one operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bd,edf->bf", x, torch.stack(list(self.entries)))


class Alone(nn.Module):
    """Large parameters without a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (nn.Parameter(torch.randn(256, 512) * 0.05) for _ in range(2))
        self.down = nn.Parameter(torch.randn(512, 256) * 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.gate) * (x @ self.up) @ self.down


class Around(nn.Module):
    """Holds a parameter of its own while it calls a module that does so, too."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(128, 128) * 0.05)
        self.inside = Around(depth - 1) if depth else nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inside(torch.tanh(x @ self.own))) @ self.own


def least_budget(model: nn.Module, disk: Path, **fields: Any) -> str:
    """What the refusal of a budget says to raise it to."""
    with pytest.raises(ValueError, match="raise host_memory") as refused:
        outsize.plan(model, adamw(model), host_memory="64KiB", disk=disk, device="cpu", **ON_DISK, **fields)
    found = BUDGET_IN_TEXT.search(str(refused.value))
    assert found is not None
    return found[1]


def peak_of_training(
    monkeypatch: pytest.MonkeyPatch,
    disk: Path,
    model: nn.Module,
    data: torch.Tensor,
    budget: str,
    parts: int = 1,
    **fields: Any,
) -> int:
    """The most that outsize kept in memory at any time of two steps, each of so many backwards, and an evaluation."""
    most: dict[int, int] = {}  # by the ledger's id: others may be alive
    add = Ledger.add

    def watched(self: Ledger, account: str, nbytes: int) -> None:
        add(self, account, nbytes)
        total = sum(kept for name, kept in list(self.now.items()) if not name.startswith("disk/"))
        most[id(self)] = max(most.get(id(self), 0), total)

    optimizer = adamw(model)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "add", watched)
        outsize.prepare(model, optimizer, host_memory=budget, disk=disk, device="cpu", **ON_DISK, **fields)
        for training in (True, True, False):
            for _ in range(parts - 1 if training else 0):
                model(data).square().mean().backward()
            out = model(data)
            if training:
                take_step((out[0] if isinstance(out, tuple) else out).square().mean(), optimizer)
    return most[id(prepared(model).resources.ledger)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(128, 128, 2, bidirectional=True),
        lambda: nn.GRU(128, 128, 3),
        lambda: nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128)),
        lambda: nn.TransformerEncoderLayer(128, 4, 256),
        lambda: nn.Sequential(nn.Linear(128, 256), Alone()),
        Around,
    ],
    ids=["lstm", "gru", "linear", "attention", "alone", "around"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_budget_that_a_refusal_names_holds_what_training_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Any, dtype: torch.dtype
) -> None:
    """Gathered units + gradients on their way + staging <= host_memory, however finely a module is cut; no alarm."""
    model = make().to(dtype)
    data = torch.randn(3, 5, 128, dtype=dtype)
    budget = least_budget(model, tmp_path)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert peak_of_training(monkeypatch, tmp_path, model, data, budget) <= parse_bytes(budget, "")
    assert "above the budget" not in caplog.text


def test_the_least_budget_holds_sums_of_gradients_of_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = linears(256, 4).bfloat16()
    budget = least_budget(model, tmp_path, tiles=False)
    data = torch.randn(3, 5, 256, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, "outsize"):
        taken = peak_of_training(monkeypatch, tmp_path, model, data, budget, parts=2, tiles=False)
    assert taken <= parse_bytes(budget, "") and "above the budget" not in caplog.text


@pytest.mark.parametrize("mode", ["recompute", "selective", "offload"])
def test_the_least_budget_holds_a_layer_that_runs_again_with_all_of_its_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """Where its weights may be used in tiles, the largest of them are, and less is enough."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0) for _ in range(2)))
    data = torch.randn(3, 5, 128)
    whole: dict[str, Any] = {"activations": mode, "tiles": False}
    kept, budget = least_budget(model, tmp_path, tiles=False), least_budget(model, tmp_path, **whole)
    layer = sum(param.numel() * param.element_size() for param in model[0].parameters())
    assert parse_bytes(kept, "") < layer < parse_bytes(budget, "")
    plan = outsize.plan(model, adamw(model), host_memory=budget, disk=tmp_path, device="cpu", tiles=False, **ON_DISK)
    assert max(unit.size.params for unit in plan.units) < layer
    with pytest.raises(outsize.BudgetError, match=r"layer '[01]' needs .* runs again in the backward.*activations='au"):
        outsize.plan(model, adamw(model), host_memory=layer, disk=tmp_path, device="cpu", **whole, **ON_DISK)
    in_tiles = least_budget(model, tmp_path, activations=mode)
    assert parse_bytes(in_tiles, "") < layer
    for least, how in ((budget, whole), (in_tiles, {"activations": mode})):
        with caplog.at_level(logging.WARNING, "outsize"):
            taken = peak_of_training(monkeypatch, tmp_path, copy.deepcopy(model), data, least, **how)
        assert taken <= parse_bytes(least, "") and "above the budget" not in caplog.text


class ListsItsOwnWay(nn.Sequential):
    """Its list of modules leaves out those that hold others."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return ((name, each) for name, each in super().named_modules(*args, **kwargs) if not list(each.children()))


def test_a_model_may_list_its_modules_in_a_way_of_its_own(tmp_path: Path) -> None:
    model = ListsItsOwnWay(nn.Sequential(nn.Linear(16, 16)), nn.Linear(16, 16))
    assert outsize.plan(model, adamw(model), host_memory="1MiB", disk=tmp_path, device="cpu", **ON_DISK).units


def test_a_plan_counts_the_units_that_one_module_uses_at_once(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("lstm", nn.LSTM(128, 128, 3))
    weights = sum(param.numel() * 4 for param in model.parameters())
    found = outsize.plan(model, host_memory=least_budget(model, tmp_path), disk=tmp_path, device="cpu", **ON_DISK)
    assert max(unit.size.working for unit in found.units) < weights <= found.memory_bytes <= found.budgets.host
    assert "the units that one module uses at once: 'lstm'" in str(found)


def test_units_in_use_above_the_budget_are_named_with_the_budget_that_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = torch.randn(4, 128)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert peak_of_training(monkeypatch, tmp_path, Stacked(), data, "400KiB") > 400 << 10
    assert "units 'entries.0', 'entries.1'" in caplog.text and "host_memory=400.0 KiB" in caplog.text
    budget = BUDGET_IN_TEXT.findall(caplog.text)[-1]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "outsize"):
        assert peak_of_training(monkeypatch, tmp_path, Stacked(), data, budget) <= parse_bytes(budget, "")
    assert "above the budget" not in caplog.text


def test_everything_on_disk_takes_host_memory_for_staging_only(workshop: Workshop) -> None:
    model = workshop.pair(tier="squeezed").model
    now = outsize.memory(model).now
    assert now["disk/params"] > 0 and now["disk/grads"] > 0 and now["disk/states"] > 0
    assert now.get("host/grads", 0) == now.get("host/params", 0) == now.get("host/states", 0) == 0
    assert now["device/resident"] == 0


def test_memory_is_shown_by_kind_and_by_tier_against_the_budgets(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk", disk_space="1GiB")
    pair.train(batches(1))
    found = outsize.memory(pair.model)
    now = {name.partition("/")[0]: 0 for name in found.now}
    for name, nbytes in found.now.items():
        now[name.partition("/")[0]] += nbytes
    on_cpu = "memory" in found.by_tier
    held = {"memory": now["device"] + now["host"]} if on_cpu else {"device": now["device"], "host": now["host"]}
    assert {tier: used for tier, (used, _) in found.by_tier.items()} == {**held, "disk": now["disk"]}
    assert found.by_tier["memory" if on_cpu else "host"][1] == 64 << 20
    assert f"\ndisk    {format_bytes(now['disk'])} of 1.0 GiB\n" in repr(found)
    assert f">{format_bytes(now['disk'])}</td>" in found._repr_html_() and ">1.0 GiB</td>" in found._repr_html_()


def test_memory_counts_what_moves(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    assert "disk/states" in str(outsize.memory(pair.model))
    prepared(pair.model).resources.ledger.peak.clear()
    before = outsize.memory(pair.model)
    train(pair.model, pair.optimizer, batches(2))
    after = outsize.memory(pair.model)
    assert after.bytes_read > before.bytes_read
    assert after.bytes_written > before.bytes_written
    assert after.update_seconds > 0
    assert after.peak["device/resident"] <= 2 * max(
        unit.nbytes for unit in prepared(pair.model).engine.parameters.units
    )


def test_the_exact_update_moves_twelve_bytes_a_parameter_each_way(workshop: Workshop) -> None:
    """A step writes <= 12 bytes a parameter and the gradients; it reads as much, and what its passes fetch."""
    torch.manual_seed(0)
    model = linears(128, 4, bias=False)  # whole pages
    optimizer = adamw(model)
    workshop.prepare(model, optimizer, "squeezed", activations="keep", units=nn.Linear)
    data = [(torch.randn(4, 128), torch.randn(4, 128)) for _ in range(3)]
    train(model, optimizer, data[:2])
    workshop.settle(model)
    before = outsize.memory(model)
    train(model, optimizer, data[2:])
    workshop.settle(model)
    after = outsize.memory(model)
    count = sum(param.numel() for param in model.parameters())
    gradients = 4 * count
    fetches = 2 * 4 * count  # for the forward and for the backward
    assert after.bytes_written - before.bytes_written <= 12 * count + gradients
    assert after.bytes_read - before.bytes_read <= 12 * count + gradients + fetches


def test_a_unit_is_never_released_while_a_forward_uses_it(workshop: Workshop) -> None:
    class Holds(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.blocks[0].up.weight.view(-1)[:16] * 1.0
            weight = self.blocks[0].up.weight.t()
            for block in self.blocks:
                x = block(x)
            return self.head(x + first + (x @ weight)[:, :16])

    workshop.pair(Holds, tier="squeezed").train(batches(4), clip=0.5)


class SumOfProducts(torch.autograd.Function):
    """Its backward reads three parameters in one operation, which were saved outside of their modules' calls."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b, c)
        return a + b * c

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = torch.addcmul(*ctx.saved_tensors)
        return grad, grad * (result - ctx.saved_tensors[0]) / ctx.saved_tensors[1], grad * ctx.saved_tensors[1]


class Banked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.ParameterDict({"x": torch.rand(16, 16) + 0.5}) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ SumOfProducts.apply(self.a["x"], self.b["x"], self.c["x"]).tanh()


def test_what_one_operation_of_a_backward_reads_stays_until_it_has_run(workshop: Workshop) -> None:
    layers = [Banked() for _ in range(4)]
    pair = workshop.pair(lambda: nn.Sequential(*layers, nn.Linear(16, 4)), tier="squeezed", units=nn.ParameterDict)
    pair.train(batches(4), clip=0.5)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_was_saved_outside_of_calls_is_refused_after_a_step_as_in_torch(workshop: Workshop, tier: str) -> None:
    model = nn.Sequential(*(Banked() for _ in range(2)))
    optimizer = adamw(model)
    workshop.prepare(model, optimizer, **workshop.fields(tier, units=nn.ParameterDict))
    first, stale = (model(torch.rand(4, 16)).square().mean() for _ in range(2))
    take_step(first, optimizer)
    with pytest.raises(RuntimeError, match="needed for gradient computation"):
        stale.backward()


class Functional(Built, up=(16, 64), down=(64, 16)):
    """Uses the weights of modules that it does not call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(x, self.up.weight, self.up.bias).relu()
        return nn.functional.linear(hidden, self.down.weight, self.down.bias)


def test_weights_that_a_layer_reads_past_the_call_of_their_module_go_when_the_layer_ends(workshop: Workshop) -> None:
    layers = [Functional() for _ in range(8)]
    fields = {"host_memory": "352KiB"} if workshop.device == "cpu" else {"device_memory": "96KiB"}
    pair = workshop.pair(
        lambda: nn.Sequential(*layers, nn.Linear(16, 4)), units=nn.Linear, activations="keep", **fields
    )
    train(pair.model, pair.optimizer, batches(2), clip=0.5)
    room = prepared(pair.model).engine.streamer.room
    assert room.planned_capacity < sum(unit.nbytes for unit in prepared(pair.model).engine.parameters.units)
    assert not room.excess.logged
    train(pair.plain, pair.plain_optimizer, batches(2), clip=0.5)
    pair.check()


def test_the_order_is_learnt(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=6), tier="squeezed")
    pair.train(batches(3))
    before = outsize.memory(pair.model)
    pair.train(batches(5))
    after = outsize.memory(pair.model)
    assert after.mispredicted == before.mispredicted
    assert after.predicted > before.predicted


def test_an_order_that_changes_every_step_is_followed(workshop: Workshop) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0]
        for index in torch.randperm(6)[: int(torch.randint(1, 7, ()))].tolist():
            x = model.blocks[index](x)
        return (model.head(x) - batch[1]).square().mean()

    workshop.pair(lambda: Stack(depth=6), tier="squeezed").train(batches(12), loss_of=loss_of, clip=0.5)


def test_an_update_that_no_forward_fetches_is_not_lost(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    for model, optimizer in pair.both:
        step(model, optimizer)
        for _ in range(3):  # these use one block only
            take_step(model.blocks[0](batches(1)[0][0]).square().mean(), optimizer)
    pair.check()


@pytest.mark.parametrize("stripes", [2, 3])
def test_striped_directories_give_the_same_result(workshop: Workshop, tmp_path: Path, stripes: int) -> None:
    places = [tmp_path / f"drive-{index}" for index in range(stripes)]
    for place in places:
        place.mkdir()
    pair = workshop.pair(tier="squeezed", disk=places)
    pair.train(batches(3), clip=0.5)
    assert all(len(list(place.iterdir())) == 1 for place in places)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs")
def test_a_file_system_without_direct_io_works(workshop: Workshop, tmp_path: Path) -> None:
    place = Path("/dev/shm") / f"outsize-test-{os.getpid()}"
    place.mkdir()
    try:
        pair = workshop.pair(tier="squeezed", disk=place)
        pair.train(batches(3), clip=0.5)
        del pair
        gc.collect()
        assert not list(place.iterdir())
    finally:
        place.rmdir()


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_both_disk_engines_train(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    from outsize import _native

    if engine == "uring" and _native.probe_uring() != 0:
        pytest.skip("io_uring is refused here")
    monkeypatch.setenv("OUTSIZE_DISK_ENGINE", engine)
    workshop.pair(tier="squeezed").train(batches(3), clip=0.5)


# -- faults ----------------------------------------------------------------------------------------------------------


class Counted:
    """Stands before the disk engine and counts the requests."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.counts = {"read": 0, "write": 0}

    def __getattr__(self, name: str) -> Any:
        if name in self.counts:
            self.counts[name] += 1
        return getattr(self._engine, name)


def requests_of_a_step(workshop: Workshop) -> dict[str, int]:
    """How many requests of each kind one step makes."""
    pair = workshop.pair(lambda: Stack(depth=2), tier="squeezed")
    resources = prepared(pair.model).resources
    for _ in range(2):
        step(pair.model, pair.optimizer)
    workshop.settle(pair.model)
    counted = Counted(resources.disk)
    files = [file.now.file for file in resources._files]
    for file in files:
        file._engine = counted
    step(pair.model, pair.optimizer)
    workshop.settle(pair.model)
    for file in files:
        file._engine = resources.disk
    return counted.counts


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_short_transfer_at_any_request_changes_nothing(workshop: Workshop, operation: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), tier="squeezed")
    count = requests_of_a_step(workshop)[operation]
    assert count > 5
    disk = prepared(pair.model).resources.disk
    assert disk is not None
    for nth in range(1, count + 1):
        disk.inject(operation, nth, 0, PAGE)
        step(pair.model, pair.optimizer)
        step(pair.plain, pair.plain_optimizer)
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "codes"), [("read", [errno.EIO]), ("write", [errno.EIO, errno.ENOSPC])])
def test_an_error_at_any_request_stops_the_run_and_names_file_and_errno(
    workshop: Workshop, operation: str, codes: list[int]
) -> None:
    count = requests_of_a_step(workshop)[operation]
    for nth in range(1, count + 1):
        code = codes[(nth + nth // 2) % len(codes)]  # so that those that alternate get both
        pair = workshop.pair(lambda: Stack(depth=2), tier="squeezed")
        disk = prepared(pair.model).resources.disk
        assert disk is not None
        disk.inject(operation, nth, code, -1)
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            for _ in range(4):
                step(pair.model, pair.optimizer)
            weights(pair.model)
        assert caught.value.errno == code
        assert str(workshop.disk) in str(caught.value), "the error names the file"
        with pytest.raises((OSError, RuntimeError), match=os.strerror(code)):  # and it does not go on
            step(pair.model, pair.optimizer)
        del caught, disk, pair


# -- nothing grows ---------------------------------------------------------------------------------------------------


def names_of_threads() -> list[str]:
    """Of the process, as the system has them."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found.append((task / "comm").read_text())
    return found


@pytest.mark.slow
def test_a_hundred_steps_grow_nothing(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), tier="squeezed")
    process = psutil.Process()
    data = batches(1)

    def count() -> dict[str, int]:
        gc.collect()
        return {
            "files open": process.num_fds(),
            "threads": threading.active_count(),
            "system threads": len([name for name in names_of_threads() if not name.startswith("iou-")]),  # the kernel's
            "files": sum(len(files) for _, _, files in os.walk(workshop.disk)),
            "disk": sum(p.stat().st_blocks for p in workshop.disk.rglob("*")),
        }

    def steps(number: int) -> None:
        for _ in range(number):
            train(pair.model, pair.optimizer, data, clip=0.5)
            with torch.no_grad():
                pair.model(data[0][0])

    steps(20)
    before, objects, resident = count(), len(gc.get_objects()), process.memory_info().rss
    steps(100)
    after = count()
    assert all(after[name] <= before[name] for name in before), (before, after, names_of_threads())
    assert len(gc.get_objects()) - objects < 100  # what is on its way at the moment makes up to 50
    assert process.memory_info().rss - resident <= 2 << 20  # 10 KB a step; the kernel may lay a huge page meanwhile


def test_hooks_on_a_parameter_do_not_pile_up(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    seen: list[int] = []
    pair.model.head.weight.register_post_accumulate_grad_hook(lambda param: seen.append(1))
    loss = squared_error(pair.model, batches(1)[0])
    for _ in range(5):
        loss.backward(retain_graph=True)
        pair.model(batches(1)[0][0])
    node = pair.model.head.bias
    assert len(seen) == 5
    assert node.grad is not None
    pair.optimizer.step()


def test_dropping_the_model_closes_its_engine_at_any_point(workshop: Workshop) -> None:
    """After prepare, a forward, a backward, a step: the thread ends and the files go."""
    for done in range(5):
        pair = workshop.pair(tier="disk")
        loss = squared_error(pair.model, batches(1)[0]) if done > 0 else None
        if loss is not None and done > 1:
            loss.backward()
        if done > 2:
            pair.optimizer.step()
        if done > 3:
            squared_error(pair.model, batches(1)[0])
        assert len(os.listdir(workshop.disk)) == 1
        del pair, loss
        forget_last_graph()
        gc.collect()
        assert os.listdir(workshop.disk) == [], done


def test_a_model_that_keeps_its_output_is_closed_too(workshop: Workshop) -> None:
    class Keeps(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(x)
            return self.kept

    pair = workshop.pair(Keeps, tier="disk")
    squared_error(pair.model, batches(1)[0]).backward()
    del pair
    forget_last_graph()
    gc.collect()
    gc.collect()
    assert os.listdir(workshop.disk) == []


SCRIPT = """
import os, signal, sys, torch, outsize
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from outsize.planning.sizes import format_bytes, parse_bytes
from tests.conftest import adamw, batches, train
from tests.small_models import Stack
model = Stack()
optimizer = adamw(model)
outsize.prepare(model, optimizer, params="disk", grads="disk", states="disk", host_memory="64MiB", disk=sys.argv[1])
train(model, optimizer, batches(2))
print(len(os.listdir(sys.argv[1])), flush=True)
while sys.argv[2] == "interrupt":
    train(model, optimizer, batches(2))
raise SystemExit(3)
"""


@pytest.mark.slow
def test_a_process_that_ends_leaves_nothing_behind(workshop: Workshop) -> None:
    """By an error, and by an interruption."""
    for end, status in (("error", 3), ("interrupt", 130)):
        script = Script(SCRIPT, workshop.disk, end)
        assert script.stdout.readline() == "1\n"
        if end == "interrupt":
            os.kill(script.pid, signal.SIGINT)
        found, said, errors = script.end()
        assert (found, said) == (status, ""), errors
        assert os.listdir(workshop.disk) == [], end


def test_without_a_disk_there_is_next_to_no_staging(workshop: Workshop) -> None:
    pair = workshop.pair(tier="host", host_memory="1GiB")
    pair.train(batches(2))
    assert outsize.memory(pair.model).peak["host/staging"] < 1 << 20
