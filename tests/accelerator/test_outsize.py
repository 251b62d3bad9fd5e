"""outsize on the simulated accelerator: every mixture of tiers trains like torch, whenever the copies run."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import outsize
from outsize.move.conveyor import Job, Step
from outsize.move.device import Lanes
from outsize.move.memory import HostBuffer
from tests.accelerator import sim as simulator
from tests.comparing import assert_same, assert_same_runs, weights
from tests.conftest import KINDS, Trace, Workshop, adamw, batches, prepared, squared_error, squeeze, train
from tests.small_models import Built, Stack

KIB = 1 << 10
POLICIES = ("now", "hold", "random")
TIERS = ("device", "host", "disk")
MIXTURES = list(itertools.product(TIERS, repeat=3))
STEPS = 3
anytime = pytest.mark.parametrize("sim", POLICIES, indirect=True)


def on_sim(data: list[tuple[Tensor, Tensor]], device: str = "sim") -> list[tuple[Tensor, Tensor]]:
    return [(x.to(device), y.to(device)) for x, y in data]


def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in weights(model).items()}


def places(workshop: Workshop, tiers: tuple[str, str, str]) -> dict[str, Any]:
    return {**dict(zip(KINDS, tiers, strict=True)), "disk": workshop.disk}


def prepared_stack(
    workshop: Workshop, tier: str = "host", units: int = 2, make: Any = adamw, **fields: Any
) -> tuple[nn.Module, Any]:
    """A model with room for so many units only."""
    model, optimizer = workshop.made(stack, make, tier, **{"device": "sim", **fields})
    squeeze(model, units)
    return model, optimizer


Trained = tuple[Trace, dict[str, Tensor]]
"""What a run shows, and the weights that it ends with."""


def trained(workshop: Workshop, tiers: tuple[str, str, str], device: str = "sim", **fields: Any) -> Trained:
    model, optimizer = prepared_stack(workshop, device=device, **places(workshop, tiers), **fields)
    trace = train(model, optimizer, on_sim(batches(STEPS), device), clip=0.5)
    return trace, values(model)


@pytest.fixture(scope="module")
def in_torch() -> Trained:
    plain = stack()
    return train(plain, adamw(plain), batches(STEPS), clip=0.5), values(plain)


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of ours whose bits all others give, when its copies are held back."""
    with simulator.switched_on("hold"):
        found = trained(Workshop(tmp_path_factory.mktemp("host"), "sim"), ("host", "host", "host"))
        gc.collect()
    return found


def square(shift: int) -> list[tuple[str, ...]]:
    """Mixtures in which each two kinds meet on each two tiers once."""
    return [mixture for mixture in MIXTURES if sum(map(TIERS.index, mixture)) % 3 == shift]


@pytest.mark.parametrize(
    ("tiers", "sim"),
    [
        pytest.param(tiers, policy, id="-".join((*tiers, policy)))
        for policy, mixtures in (("hold", MIXTURES), ("random", square(0)), ("now", square(1)))
        for tiers in mixtures
    ],
    indirect=["sim"],
)
def test_every_mixture_of_tiers_trains_like_torch_and_to_the_same_bits(
    sim: Any, workshop: Workshop, tiers: tuple[str, str, str], in_torch: Trained, on_the_host: Trained
) -> None:
    trace, mine = trained(workshop, tiers)
    trace.close_to(in_torch[0])
    torch.testing.assert_close(mine, in_torch[1], rtol=0, atol=1e-5)
    if set(tiers) != {"device"}:  # which steps by torch's formulas
        assert trace == on_the_host[0]
        assert_same(mine, on_the_host[1])


# -- the second of two devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tier", "activations"), [("device", "auto"), ("host", "offload"), ("disk", "recompute")])
def test_another_device_than_the_current_one_trains_to_the_same_bits_and_leaves_that_the_current_one(
    tmp_path: Path, tier: str, activations: str, in_torch: Trained, on_the_host: Trained
) -> None:
    with simulator.switched_on("hold", devices=2) as sim:
        trace, mine = trained(Workshop(tmp_path, "sim:1"), (tier,) * 3, "sim:1", activations=activations)
        assert sim.current_device() == 0
        gc.collect()
    trace.close_to(in_torch[0])
    torch.testing.assert_close(mine, in_torch[1], rtol=0, atol=1e-5)
    if tier != "device":
        assert_same(mine, on_the_host[1])


@pytest.mark.parametrize("tier", TIERS)
def test_no_thread_wakes_another_device_than_the_chosen_one(tmp_path: Path, tier: str) -> None:
    with simulator.switched_on("hold", devices=2) as sim, sim.device(1):
        offload = {"activations": "offload", "activations_tier": "disk"}
        trained(Workshop(tmp_path, "sim:1"), (tier,) * 3, "sim", **offload)
        gc.collect()
        assert not sim.is_awake(0)


def test_two_devices_train_at_once_in_one_process(tmp_path: Path, on_the_host: Trained) -> None:
    with simulator.switched_on("random", devices=2):
        pairs = {}
        for device in ("sim:0", "sim:1"):
            model = stack()
            pairs[device] = model, adamw(model)
            outsize.prepare(*pairs[device], device=device, disk=tmp_path, host_memory="64MiB", params="disk")
        for data in batches(STEPS):
            for device, (model, optimizer) in pairs.items():
                train(model, optimizer, on_sim([data], device), clip=0.5)
        found = [values(model) for model, _ in pairs.values()]
        del pairs, model, optimizer
        gc.collect()
    assert_same(found[0], found[1])


def test_a_model_on_another_device_than_the_chosen_one_is_refused_by_name() -> None:
    with simulator.switched_on(devices=2):
        model = stack().to("sim:1")
        with pytest.raises(ValueError, match=r"is on sim:1 but device is sim:0; .* or pass device='sim:1'"):
            outsize.prepare(model, adamw(model))


def test_a_launcher_s_rank_takes_its_own_device_wherever_the_model_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_the_host: Trained
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with simulator.switched_on("hold", devices=2) as sim:
        model = stack().to("sim")  # the first one
        optimizer = adamw(model)
        outsize.prepare(model, optimizer, disk=tmp_path, host_memory="64MiB", params="disk")
        assert sim.current_device() == 1
        train(model, optimizer, on_sim(batches(STEPS)), clip=0.5)
        mine = values(model)
        del model, optimizer
        gc.collect()
        sim.set_device(0)
    assert_same(mine, on_the_host[1])


# -- manners ---------------------------------------------------------------------------------------------------------

MANNERS: dict[str, dict[str, Any]] = {
    "bf16": {"compute_dtype": torch.bfloat16},
    "fp16": {"compute_dtype": torch.float16},
    "autocast": {},
    "accumulated": {},
    "recomputed": {"activations": "recompute"},
    "inputs on the host": {"activations": "offload", "activations_tier": "host"},
    "inputs on disk": {"activations": "offload", "activations_tier": "disk", "micro_batches": 2},
    "selective": {"activations": "selective"},
    "kept": {"activations": "keep"},
    "delayed": {"delayed_update": 2},
    "in the backward": {"update": "backward"},
    "compact": {"state_format": "compact"},
    "SGD": {},
    "RMSprop": {},
}


def in_a_manner(workshop: Workshop, manner: str, tiers: tuple[str, str, str]) -> tuple[list[float], dict[str, Tensor]]:
    fields = MANNERS[manner]
    kind: Any = {"SGD": torch.optim.SGD, "RMSprop": torch.optim.RMSprop}.get(manner, torch.optim.AdamW)
    make = lambda model: kind(model.parameters(), lr=1e-2)  # noqa: E731
    model, optimizer = prepared_stack(workshop, make=make, **places(workshop, tiers), **fields)
    scaler = torch.amp.GradScaler("sim", init_scale=64.0, enabled=manner == "fp16")
    losses = []
    for x, y in on_sim(batches(4 if manner == "delayed" else 2)):
        for _ in range(2 if manner == "accumulated" else 1):
            with torch.autocast("sim", torch.bfloat16, enabled=manner == "autocast"):
                loss = (model(x.to(fields.get("compute_dtype"))).float() - y).square().mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if manner != "in the backward":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(model)


@pytest.mark.slow
@pytest.mark.parametrize("manner", MANNERS)
def test_when_copies_run_changes_nothing(workshop: Workshop, manner: str) -> None:
    """Nor where state rests, off the device."""
    found = []
    rests = {"now": ("host",), "hold": ("host", "disk", "mixed"), "random": ("disk", "mixed")}
    for policy in POLICIES:
        with simulator.switched_on(policy, seed=3):
            for place in rests[policy]:
                tiers = ("device", "host", "disk") if place == "mixed" else (place,) * 3
                found.append(in_a_manner(workshop, manner, tiers))
            gc.collect()
    assert_same_runs(found)


# -- streams ---------------------------------------------------------------------------------------------------------


@anytime
@pytest.mark.parametrize(("units", "tier"), [(2, "host"), (3, "disk"), (5, "host"), (5, "disk")])
def test_evaluation_on_a_second_stream_sees_the_weights(sim: Any, workshop: Workshop, tier: str, units: int) -> None:
    """The stream waits for the step, as in torch; weights that still arrive, and those to come, are ours to order."""
    model, optimizer = prepared_stack(workshop, tier, units)
    plain = stack().to("sim")
    plain_optimizer = adamw(plain)
    beside = torch.Stream("sim")
    for x, y in on_sim(batches(4)):
        shown = []
        for each, stepped in ((model, optimizer), (plain, plain_optimizer)):
            train(each, stepped, [(x, y)])
            beside.wait_stream(torch.accelerator.current_stream())
            with beside, torch.no_grad():
                shown.append(each(x))
                again = each(x)
            with torch.no_grad():
                each(x)  # on the first stream, which takes units from the second
            torch.accelerator.current_stream().wait_stream(beside)
            assert torch.equal(again, shown[-1])
        torch.testing.assert_close(shown[0].cpu(), shown[1].cpu(), rtol=0, atol=1e-5)


@anytime
@pytest.mark.parametrize("loaded", [False, True])
def test_a_loop_on_a_stream_of_its_own_trains_alike(
    sim: Any, workshop: Workshop, on_the_host: Trained, tmp_path: Path, loaded: bool
) -> None:
    data, own = on_sim(batches(STEPS)), torch.Stream("sim")
    own.wait_stream(torch.accelerator.current_stream())
    model, optimizer = prepared_stack(workshop, activations="keep")  # which measures nothing, and so never waits
    expected = on_the_host[0]
    if loaded:
        squared_error(model, data[0]).backward()
        outsize.save(tmp_path / "saved", model, optimizer)
        outsize.load(tmp_path / "saved", model, optimizer)
    with own:  # nothing orders it behind what was prepared and loaded
        optimizer.zero_grad()
        assert train(model, optimizer, data[:2], clip=0.5).losses == expected.losses[:2]
    torch.accelerator.current_stream().wait_stream(own)
    assert train(model, optimizer, data[2:], clip=0.5).losses == expected.losses[2:]


# -- programs --------------------------------------------------------------------------------------------------------


@anytime
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_two_models_train_in_turn(sim: Any, workshop: Workshop, tier: str, on_the_host: Trained) -> None:
    pairs = [prepared_stack(workshop, tier) for _ in range(2)]
    losses: list[list[float]] = [[], []]
    for batch in on_sim(batches(STEPS)):
        for each, (model, optimizer) in zip(losses, pairs, strict=True):
            each += train(model, optimizer, [batch], clip=0.5).losses
    assert losses == [on_the_host[0].losses] * 2
    for model, _ in pairs:
        assert_same(values(model), on_the_host[1])


@anytime
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_generation_between_steps_reads_the_newest_weights(sim: Any, workshop: Workshop, tier: str) -> None:
    model, optimizer = prepared_stack(workshop, tier)
    plain = stack().to("sim")
    shown = []
    for each, stepped in ((model, optimizer), (plain, adamw(plain))):
        found = []
        for x, y in on_sim(batches(3)):
            train(each, stepped, [(x, y)])
            with torch.no_grad():
                for _ in range(4):  # each pass takes what the one before gave
                    x = x + each(x).mean()
            found.append(x.cpu())
        shown.append(found)
    torch.testing.assert_close(shown[0], shown[1], rtol=1e-4, atol=1e-5)


@anytime
@pytest.mark.parametrize("tiers", [("host",) * 3, ("disk",) * 3, ("device",) * 3], ids="-".join)
def test_a_checkpoint_is_of_its_instant_whatever_follows(
    sim: Any, workshop: Workshop, tiers: tuple[str, str, str]
) -> None:
    model, optimizer = prepared_stack(workshop, **places(workshop, tiers))
    data = on_sim(batches(6))
    train(model, optimizer, data[:2])
    then = values(model)
    saving = outsize.save(workshop.disk.parent / "ckpt", model, optimizer)
    expected = train(model, optimizer, data[2:]).losses
    saving.wait()
    outsize.load(workshop.disk.parent / "ckpt", model, optimizer)
    assert_same(values(model), then)
    assert train(model, optimizer, data[2:]).losses == expected


def dropping() -> nn.Module:
    model = stack()
    for block in model.blocks:
        block.up = nn.Sequential(block.up, nn.Dropout(0.3))
    return model


class Scaled:
    """A run with dropout on the device under autocast in fp16, with loss scaling; it saves its scaler, too."""

    def __init__(self, workshop: Workshop, tier: str, seed: int) -> None:
        self.model = dropping()
        self.optimizer = adamw(self.model)
        workshop.prepare(self.model, self.optimizer, tier, device="sim")
        squeeze(self.model)
        self.scaler = torch.amp.GradScaler("sim", init_scale=2.0**18, growth_interval=2)
        torch.manual_seed(seed)

    def train(self, data: list[tuple[Tensor, Tensor]]) -> list[float]:
        losses = []
        for x, y in on_sim(data):
            with torch.autocast("sim", torch.float16):
                loss = (self.model(x).float() - y).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return [*losses, self.scaler.get_scale()]


@anytime
@pytest.mark.parametrize("tier", TIERS)
def test_a_resumed_run_draws_the_random_numbers_of_the_device_again(sim: Any, workshop: Workshop, tier: str) -> None:
    folder = workshop.disk.parent / "ckpt"
    first, second = Scaled(workshop, tier, seed=1), Scaled(workshop, tier, seed=2)
    first.train(batches(6)[:3])
    outsize.save(folder, first.model, first.optimizer, {"scaler": first.scaler.state_dict()}).wait()
    expected = first.train(batches(6)[3:])
    second.train(batches(6)[:1])
    second.scaler.load_state_dict(outsize.load(folder, second.model, second.optimizer)["scaler"])
    assert second.train(batches(6)[3:]) == expected
    assert_same(values(second.model), values(first.model))


class Tally(Built, total=lambda: torch.zeros(())):
    """As a metric of torchmetrics: what it keeps is no buffer, and moves by an `_apply` of its own."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.total = fn(self.total)
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().mean()
        return x


def test_what_a_module_keeps_beside_buffers_moves_to_the_device(sim: Any, workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(lambda: nn.Sequential(Stack(), Tally()), tier=tier, device="sim")
    train(pair.model, pair.optimizer, on_sim(batches(2)))
    train(pair.plain, pair.plain_optimizer, batches(2))
    torch.testing.assert_close(pair.model[1].total.cpu(), pair.plain[1].total)


@anytime
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_written_inside_gathered_is_trained_on(sim: Any, workshop: Workshop, tier: str) -> None:
    model, optimizer = prepared_stack(workshop, tier)
    plain = stack().to("sim")
    for each, stepped in ((model, optimizer), (plain, adamw(plain))):
        for batch in on_sim(batches(3)):
            train(each, stepped, [batch])
            with outsize.gathered(each, modify=True) if each is model else nullcontext(), torch.no_grad():
                for param in each.parameters():
                    param.mul_(0.9)
    mine, theirs = values(model), values(plain)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_weights_that_rest_on_the_device_are_read_after_a_backward(sim: Any, workshop: Workshop) -> None:
    """Autograd's thread may forget the backward later than `backward()` returns."""
    model, _ = prepared_stack(workshop, params="device", grads="host", states="host")
    for batch in on_sim(batches(20)):
        squared_error(model, batch).backward()
        assert model.head.weight.detach().isfinite().all()


# -- memory, and what rests where -------------------------------------------------------------------------------------


def test_an_optional_fetch_that_finds_no_memory_is_given_up(sim: Any, workshop: Workshop, on_the_host: Trained) -> None:
    """The budget has room for the next units, and somebody else has taken it for a moment."""
    model, optimizer = prepared_stack(workshop, units=5)
    for batch in on_sim(batches(STEPS)):
        squared_error(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        streamer = prepared(model).engine.streamer
        streamer.drop_idle()
        sim.set_memory_cap(sim.memory_allocated() + KIB)
        streamer.prefetch()
        sim.set_memory_cap(1 << 30)
        optimizer.zero_grad()
    assert sim.memory_stats()["num_ooms"] >= STEPS
    assert_same(values(model), on_the_host[1])


@pytest.mark.parametrize("tier", TIERS)
def test_what_lies_between_parameters_is_zero(sim: Any, workshop: Workshop, tier: str) -> None:
    """It is stored and saved with them: what the device's memory held before must not get into a checkpoint."""
    model, optimizer = prepared_stack(workshop, tier)
    train(model, optimizer, on_sim(batches(2)))
    workshop.settle(model)
    for unit in prepared(model).engine.parameters.units:
        shard = unit.shard
        content = HostBuffer(shard.layout.param_bytes).bytes
        read = shard.buffer.read if shard.params is None else shard.params.read
        for segment in shard.layout.segments:
            end = segment.byte_start + segment.numel * segment.itemsize
            read(segment.byte_start, content[segment.byte_start : end]).wait()
        for slot in shard.layout.slots:
            first, nbytes = shard.param_layout.span(slot.offset, slot.end)
            content[first : first + nbytes] = 0
        assert not content.any()


def test_the_optimizers_state_is_where_torch_has_it(sim: Any, workshop: Workshop) -> None:
    model, optimizer = prepared_stack(workshop)
    plain = stack().to("sim")
    plain_optimizer = adamw(plain)
    for each, stepped in ((model, optimizer), (plain, plain_optimizer)):
        train(each, stepped, on_sim(batches(1)))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        ours, torchs = optimizer.state[mine], plain_optimizer.state[theirs]
        assert {key: value.device for key, value in ours.items()} == {
            key: value.device for key, value in torchs.items()
        }
        torch.testing.assert_close(ours["exp_avg"].cpu(), torchs["exp_avg"].cpu(), rtol=1e-5, atol=1e-7)
    assert all(value.device.type == "cpu" for value in optimizer.state_dict()["state"][0].values())


def test_a_device_that_has_failed_leaves_nothing_on_disk(
    sim: Any, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared_stack(workshop, "disk")
    train(model, optimizer, on_sim(batches(1)))
    workshop.settle(model)

    def fail(lanes: Lanes) -> None:
        raise RuntimeError("device-side assert triggered")

    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "synchronize", fail)
        prepared(model).resources.close()
    assert not any(workshop.disk.iterdir())


@anytime
def test_the_collector_may_close_the_engine_on_the_conveyors_thread(sim: Any, workshop: Workshop) -> None:
    model, optimizer = prepared_stack(workshop, "disk")
    train(model, optimizer, on_sim(batches(2)))
    resources = weakref.ref(prepared(model).resources)
    may = threading.Event()  # then the collector runs on the conveyor's thread

    def collect() -> tuple[()]:
        assert may.wait(60)
        gc.collect()
        return ()

    step = Step(finish=collect)
    job = prepared(model).resources.conveyor.submit(Job([step]))
    prepared(model).engine.streamer.prefetch()
    gc.disable()
    try:
        del model, optimizer
        may.set()
        job.wait()
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "outsize-close":
            thread.join()
    assert resources() is None or not resources().shards  # type: ignore[union-attr]


# -- the step on the device --------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """The names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


FUSED: dict[str, Any] = {
    "_fused_adamw_": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "_fused_adam_": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, weight_decay=0.1),
    "_fused_sgd_": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operation", FUSED)
def test_what_lies_on_the_device_is_stepped_there_by_torchs_fused_kernels(
    sim: Any, workshop: Workshop, operation: str, dtype: torch.dtype
) -> None:
    model = stack()
    optimizer = FUSED[operation](model)
    workshop.prepare(model, optimizer, "device", device="sim", compute_dtype=dtype)
    squared_error(model, [each.to(dtype) for each in on_sim(batches(1))[0]]).backward()
    with Seen() as seen:
        optimizer.step()
    assert operation in seen.names
    assert not {"addcdiv_", "sqrt", "addcmul_"} & seen.names


def test_a_device_has_no_more_than_torch_asks_for(
    sim: Any, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module tells nothing of its memory, keeps no cache, registers no memory of the host."""
    for name in ("mem_get_info", "memory_stats", "empty_cache", "host_register", "MemPool"):
        monkeypatch.delattr(simulator, name)
    plain, model = stack(), stack()
    expected = train(plain, adamw(plain), batches(3)).losses
    with pytest.raises(ValueError, match="give device_memory"):
        outsize.plan(model, adamw(model), host_memory="64MiB", device="sim")
    fields: dict[str, Any] = {"host_memory": "64MiB", "device_memory": "16MiB", "device": "sim"}
    assert outsize.plan(model, adamw(model), example=batches(1)[0][0], **fields).step_seconds
    optimizer = adamw(model)
    outsize.prepare(model, optimizer, **fields)
    assert train(model, optimizer, on_sim(batches(3))).losses == pytest.approx(expected, rel=1e-6)
