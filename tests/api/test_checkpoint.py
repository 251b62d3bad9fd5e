"""Going on after a load is, bit for bit, never having stopped; the oracle is the run that went on."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize import load, save
from outsize.api.exporting import export
from outsize.checkpoint import writer
from outsize.checkpoint.values import decode, encode, from_inline, inline
from outsize.run.streamer import Streamer
from tests.api.checkpoint_runs import KINDS, OPTIMIZERS, Block, Run, peak_of, prepare
from tests.comparing import assert_same, exact_masters, weights
from tests.conftest import Workshop, batches, take_step
from tests.small_models import linears


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the state is taken: written at once, or linked and copied as a large one is."""
    if request.param == "large":
        monkeypatch.setattr(writer, "AT_ONCE_BYTES", -1)
    return str(request.param)


def resumed(tmp: Path, old: tuple[str, str, str], new: tuple[str, str, str], **kinds: Any) -> None:
    """Train 3, save, train 2; against a load of the save into a fresh run that trains 2."""
    first = Run(tmp, old, **kinds).train(3).save(tmp / "checkpoint").train(2)
    second = Run(tmp, new, seed=1, **kinds).train(1).load(tmp / "checkpoint").train(2)
    assert_same(first.result(), second.result())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.usefixtures("size")
def test_a_resumed_run_continues_bit_for_bit_on_any_tier(kind: str, other: str, tmp_path: Path) -> None:
    resumed(tmp_path, (kind, kind, kind), (other, other, other))


@pytest.mark.parametrize("kinds", list(product(KINDS, KINDS, KINDS))[1::3])
@pytest.mark.usefixtures("size")
def test_a_resumed_run_continues_bit_for_bit_on_mixed_tiers(kinds: tuple[str, str, str], tmp_path: Path) -> None:
    resumed(tmp_path, kinds, (kinds[2], kinds[0], kinds[1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("size")
def test_a_resumed_run_with_bf16_compute_keeps_its_masters(kind: str, tmp_path: Path) -> None:
    resumed(tmp_path, ("disk", "host", kind), (kind, kind, kind), compute_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("size")
def test_a_resumed_run_keeps_the_state_of_any_optimizer(name: str, tmp_path: Path) -> None:
    resumed(tmp_path, ("disk", "disk", "disk"), ("host", "device", "disk"), optimizer=OPTIMIZERS[name])


@pytest.mark.usefixtures("size")
def test_units_may_be_cut_otherwise_and_disks_be_several(tmp_path: Path) -> None:
    first = Run(tmp_path, ("disk", "disk", "disk"), units=[Block]).train(2).save(tmp_path / "checkpoint").train(2)
    disks = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    for disk in disks:
        disk.mkdir()
    second = Run(tmp_path, ("disk", "disk", "disk"), seed=1, units=[nn.Linear, "Embedding"], disk=disks)
    second.load(tmp_path / "checkpoint")
    second.train(2)
    assert_same(first.result(), second.result())


@pytest.mark.parametrize(
    ("kind", "other", "dtype"),
    [
        (kind, other, (torch.float32, torch.bfloat16)[index % 2])
        for index, (kind, other) in enumerate(product(KINDS, KINDS))
    ],
)
@pytest.mark.usefixtures("size")
def test_a_save_in_mid_accumulation_resumes_exactly(kind: str, other: str, dtype: torch.dtype, tmp_path: Path) -> None:
    first = Run(tmp_path, (kind, kind, kind), compute_dtype=dtype)
    second = Run(tmp_path, ("device", other, other), seed=1, compute_dtype=dtype)
    first.train(1)
    first.backward()
    first.backward()
    torch.nn.utils.clip_grad_norm_(first.model.parameters(), 0.3)
    second.backward()
    first.save(tmp_path / "checkpoint")
    for run in (first, second):
        if run is second:
            run.load(tmp_path / "checkpoint")
        run.backward()
        run.step()
        run.train(1)
    assert_same(first.result(), second.result())


def test_gradients_clipped_by_value_or_zeroed_in_place_resume_exactly(tmp_path: Path) -> None:
    first = Run(tmp_path, ("disk", "disk", "disk"))
    first.backward()
    torch.nn.utils.clip_grad_value_(first.model.parameters(), 0.01)
    first.model.head.bias.grad.zero_()
    first.save(tmp_path / "checkpoint")
    for kinds in (("device", "device", "device"), ("host", "host", "host")):
        second = Run(tmp_path, kinds, seed=1).load(tmp_path / "checkpoint")
        second.step()
        second.train(1)
        if kinds[0] == "device":
            expected = second.result()
    assert_same(expected, second.result())
    first.load(tmp_path / "checkpoint")
    first.step()
    first.train(1)
    assert_same(expected, first.result())


def test_an_owed_update_runs_before_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(tmp_path, ("disk", "disk", "disk"))
    first.backward()
    monkeypatch.setattr(Streamer, "prefetch", lambda self: None)  # which would run it sooner
    first.optimizer.step()
    assert any(unit.pending for unit in first.model.embed.weight.prepared.engine.parameters.units)
    first.scheduler.step()
    first.save(tmp_path / "checkpoint")
    first.optimizer.zero_grad()
    first.train(2)
    second = Run(tmp_path, ("host", "host", "host"), seed=1)
    second.backward()
    second.optimizer.step()  # an update of its own, which the load makes void
    second.load(tmp_path / "checkpoint")
    second.optimizer.zero_grad()
    second.train(2)
    assert_same(first.result(), second.result())


def test_a_save_right_after_a_load_is_the_same_checkpoint(tmp_path: Path) -> None:
    first = Run(tmp_path, ("disk", "host", "disk")).train(2)
    first.backward()
    first.save(tmp_path / "one")
    second = Run(tmp_path, ("disk", "host", "disk"), seed=1).load(tmp_path / "one")
    second.save(tmp_path / "two")
    names = sorted(entry.name for entry in (tmp_path / "one").iterdir())
    assert names == sorted(entry.name for entry in (tmp_path / "two").iterdir())
    for name in names:
        one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
        if name == "manifest.json":
            one, two = (re.sub(rb'"(saved_at|crc32c)": "[^"]*"', b"", each) for each in (one, two))
        assert one == two, name


def test_fp32_and_bf16_runs_exchange_exact_masters(tmp_path: Path) -> None:
    wide = Run(tmp_path, ("disk", "disk", "disk")).train(2).save(tmp_path / "wide")
    narrow = Run(tmp_path, ("host", "disk", "host"), seed=1, compute_dtype=torch.bfloat16).load(tmp_path / "wide")
    frozen = {"frozen": exact_masters(wide.model)["frozen"].bfloat16().float()}  # it has no master
    assert_same({**exact_masters(wide.model), **frozen}, exact_masters(narrow.model))
    narrow.train(1).save(tmp_path / "narrow")
    wide.load(tmp_path / "narrow")
    assert_same(exact_masters(narrow.model), exact_masters(wide.model))


@pytest.mark.parametrize(("momentum", "never"), [(0.0, ["2"]), (0.9, ["2"]), (0.9, [])])
def test_layers_that_train_in_turn_are_saved_without_the_others(
    workshop: Workshop, momentum: float, never: list[str], tmp_path: Path
) -> None:
    def layers() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = linears(16, 3).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        workshop.prepare(model, optimizer, units=[nn.Linear])
        return model, optimizer

    model, optimizer = layers()
    for layer in range(3 - len(never)):
        model.requires_grad_(False)[layer].requires_grad_(True)
        take_step(model(torch.ones(2, 16)).square().sum(), optimizer)
    path = tmp_path / "checkpoint"
    save(path, model, optimizer, frozen=False).wait()
    again = layers()
    load(path, *again)
    assert_same(weights(model), weights(again[0]))
    assert set(json.loads((path / "manifest.json").read_text())["left_out"]) == {
        f"{name}.{kind}" for name in never for kind in ("weight", "bias")
    }
    third = layers()
    load(path, third[0])  # weights alone: all are frozen, and without state
    save(path, third[0], frozen=False).wait()
    again = layers()
    load(path, again[0])
    assert_same(weights(model), weights(again[0]))


def test_weights_alone_leave_the_optimizer_and_the_random_numbers(tmp_path: Path) -> None:
    first = Run(tmp_path, ("disk", "disk", "disk")).train(2)
    save(tmp_path / "weights", first.model)
    second = Run(tmp_path, ("disk", "disk", "disk"), seed=1).train(1)
    before = second.result()
    assert load(tmp_path / "weights", second.model) is None
    after = second.result()
    assert torch.equal(after["embed.weight"], first.result()["embed.weight"])
    assert torch.equal(after["embed.weight/exp_avg"], before["embed.weight/exp_avg"])
    assert torch.equal(after["rng"], before["rng"])
    with pytest.raises(ValueError, match="saved without an optimizer"):
        second.load(tmp_path / "weights")


def test_python_and_numpy_random_numbers_are_restored(tmp_path: Path) -> None:
    import random

    numpy = pytest.importorskip("numpy")
    run = Run(tmp_path, ("device", "device", "device"))
    random.gauss(0, 1)
    numpy.random.standard_normal()
    run.save(tmp_path / "checkpoint")
    drawn = [(random.random(), random.gauss(0, 1), numpy.random.standard_normal(3).tolist()) for _ in range(3)]
    run.load(tmp_path / "checkpoint")
    again = [(random.random(), random.gauss(0, 1), numpy.random.standard_normal(3).tolist()) for _ in range(3)]
    assert drawn == again


EXTRA = {
    "step": 7,
    "tuple": (1, (2.5, None), []),
    3: {"milestones": Counter({10: 2, 20: 1}), "dtype": torch.bfloat16},
    "$odd": {"$tuple": "a plain dict"},
    "floats": [float("inf"), -float("inf"), 0.1, 1e-320, -0.0],
    "flags": [True, False, None],
    "text": "ü\ud800\n",
}


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    run = Run(tmp_path, ("host", "host", "host"))
    shared = torch.arange(6.0)
    others = [torch.tensor(3, dtype=torch.int16), torch.zeros(0, 2).bfloat16(), torch.ones(2, dtype=torch.complex128)]
    tensors = {"a": shared, "b": [shared[2:4], *others]}
    save(tmp_path / "checkpoint", run.model, run.optimizer, {**EXTRA, "tensors": tensors})
    extra = load(tmp_path / "checkpoint", run.model, run.optimizer)
    back = extra.pop("tensors")
    assert repr(extra) == repr(EXTRA)
    for one, other in zip([tensors["a"], *tensors["b"]], [back["a"], *back["b"]], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {"b": {1, 2}}]}, r"extra\['a'\]\[1\]\['b'\] is a builtins.set"),
        ({"f": len}, r"extra\['f'\]"),
        ({"a": {(1, 2): 3}}, r"extra\['a'\] has the key \(1, 2\)"),
        ((1, object()), r"extra\[1\] is a builtins.object"),
    ],
)
def test_extra_that_cannot_be_stored_is_refused_with_its_place(value: Any, place: str, tmp_path: Path) -> None:
    run = Run(tmp_path, ("host", "host", "host"))
    with pytest.raises(TypeError, match=place):
        save(tmp_path / "checkpoint", run.model, run.optimizer, value)
    assert not (tmp_path / "checkpoint").exists()


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="holds itself"):
        encode(loop, "extra", inline)


def test_small_tensors_survive_in_the_manifest() -> None:
    for tensor in (torch.tensor(0.1), torch.tensor([1, 2]), torch.tensor([[float("nan")]]).bfloat16(), torch.ones(0)):
        back = decode(json.loads(json.dumps(encode(tensor, "x", inline))), from_inline)
        assert back.dtype == tensor.dtype
        assert torch.equal(back.nan_to_num(7), tensor.cpu().nan_to_num(7))


@pytest.mark.slow
def test_memory_of_save_load_and_export_is_a_slab_whatever_the_model(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = linears(1024, 16)  # 64 MiB of weights, 4 MiB a unit
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(model, optimizer, "disk", tmp_path, host_memory="32MiB")
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    save(tmp_path / "warm", model, optimizer)
    export(tmp_path / "warm-weights", model, max_shard_size="4MiB")
    unit, slab, shard, slack = 4 << 20, 8 << 20, 8 << 20, 8 << 20
    bound = slab + 3 * unit + slack  # of 256 MiB of state and gradients
    assert peak_of(lambda: save(tmp_path / "checkpoint", model, optimizer)) <= bound
    assert peak_of(lambda: load(tmp_path / "checkpoint", model, optimizer)) <= bound
    assert peak_of(lambda: export(tmp_path / "weights", model, max_shard_size=shard)) <= bound + shard


def test_an_optimizer_that_accelerate_has_wrapped_is_saved_and_loaded(workshop: Workshop, tmp_path: Path) -> None:
    from accelerate import Accelerator

    pair = workshop.pair()
    wrapped = Accelerator(cpu=True).prepare_optimizer(pair.optimizer)
    pair.train(batches(2))
    outsize.save(tmp_path / "saved", pair.model, wrapped)
    with torch.no_grad(), outsize.gathered(pair.model, modify=True):
        pair.model.head.weight.zero_()
    outsize.load(tmp_path / "saved", pair.model, wrapped)
    pair.train(batches(2))
