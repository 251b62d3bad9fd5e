"""Going on after a load is, bit for bit, never having stopped; the oracle is the run that went on."""

from __future__ import annotations

import errno
import json
import os
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
from outsize.checkpoint import files, folder, writer
from outsize.checkpoint.manifest import sealed
from outsize.checkpoint.values import decode, encode, from_inline, inline
from outsize.run.streamer import Streamer

KINDS = ("device", "host", "disk")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Tied embedding and head, dropout, buffers of both sorts, an empty and a frozen parameter, two blocks."""

    def __init__(self, width: int = 40, vocabulary: int = 130) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.randn(70), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.scratch += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * (1 + self.frozen.mean())


def tiers(params: str, grads: str, states: str, tmp: Path) -> dict[str, Any]:
    disk = tmp / "disk"
    disk.mkdir(exist_ok=True)
    return {"params": params, "grads": grads, "states": states, "disk": disk, "host_memory": "64MiB", "device": "cpu"}


class Run:
    """A training run: model, optimizer, scheduler."""

    def __init__(self, tmp: Path, kinds: tuple[str, str, str], optimizer: Any = None, seed: int = 0, **fields: Any):
        torch.manual_seed(seed)
        self.model = Net()
        make = optimizer or (lambda groups: torch.optim.AdamW(groups, lr=1e-2))
        decayed = [param for param in self.model.parameters() if param.ndim > 1]
        others = [param for param in self.model.parameters() if param.ndim <= 1]
        self.optimizer = make([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
        outsize.prepare(self.model, self.optimizer, **{**tiers(*kinds, tmp), **fields})
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.losses: list[float] = []

    def backward(self) -> None:
        tokens = torch.randint(0, 130, (9,))
        loss = nn.functional.cross_entropy(self.model(tokens).float(), tokens.roll(1))
        loss.backward()
        self.losses.append(loss.item())

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    def save(self, path: Path) -> None:
        save(path, self.model, self.optimizer, {"scheduler": self.scheduler.state_dict(), "losses": self.losses})

    def load(self, path: Path) -> None:
        extra = load(path, self.model, self.optimizer)
        self.scheduler.load_state_dict(extra["scheduler"])
        self.losses = extra["losses"]

    def result(self) -> dict[str, torch.Tensor]:
        """Everything that a later step depends on."""
        found: dict[str, torch.Tensor] = {"losses": torch.tensor(self.losses), "rng": torch.get_rng_state()}
        with outsize.gathered(self.model):
            found |= {name: value.detach().clone() for name, value in self.model.named_parameters()}
        found |= {name: value.clone() for name, value in self.model.named_buffers()}
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state[param].items():
                found[f"{name}/{key}"] = torch.as_tensor(value).clone()
        return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the state is taken: written at once, or linked and copied as a large one is."""
    if request.param == "large":
        monkeypatch.setattr(writer, "AT_ONCE_BYTES", -1)
    return str(request.param)


def resumed(tmp: Path, old: tuple[str, str, str], new: tuple[str, str, str], **kinds: Any) -> None:
    """Train 3, save, train 3; against a load of the save into a fresh run that trains 3."""
    first = Run(tmp, old, **kinds)
    first.train(3)
    first.save(tmp / "checkpoint")
    first.train(3)
    second = Run(tmp, new, seed=1, **kinds)
    second.train(1)
    second.load(tmp / "checkpoint")
    second.train(3)
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


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1),
    "tensor_lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("size")
def test_a_resumed_run_keeps_the_state_of_any_optimizer(name: str, tmp_path: Path) -> None:
    resumed(tmp_path, ("disk", "disk", "disk"), ("host", "device", "disk"), optimizer=OPTIMIZERS[name])


@pytest.mark.usefixtures("size")
def test_units_may_be_cut_otherwise_and_disks_be_several(tmp_path: Path) -> None:
    first = Run(tmp_path, ("disk", "disk", "disk"), units=[Block])
    first.train(2)
    first.save(tmp_path / "checkpoint")
    first.train(2)
    disks = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    for disk in disks:
        disk.mkdir()
    second = Run(tmp_path, ("disk", "disk", "disk"), seed=1, units=[nn.Linear, nn.Embedding], disk=disks)
    second.load(tmp_path / "checkpoint")
    second.train(2)
    assert_same(first.result(), second.result())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
        second = Run(tmp_path, kinds, seed=1)
        second.load(tmp_path / "checkpoint")
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
    assert any(unit.pending for unit in first.model.embed.weight.prepared.engine.units)
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
    first = Run(tmp_path, ("disk", "host", "disk"))
    first.train(2)
    first.backward()
    first.save(tmp_path / "one")
    second = Run(tmp_path, ("disk", "host", "disk"), seed=1)
    second.load(tmp_path / "one")
    second.save(tmp_path / "two")
    names = sorted(entry.name for entry in (tmp_path / "one").iterdir())
    assert names == sorted(entry.name for entry in (tmp_path / "two").iterdir())
    for name in names:
        one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
        if name == "manifest.json":
            one, two = (re.sub(rb'"(saved_at|crc32c)": "[^"]*"', b"", each) for each in (one, two))
        assert one == two, name


def masters(run: Run) -> dict[str, torch.Tensor]:
    save_to = run.model.embed.weight.prepared.engine
    found = {}
    for unit in save_to.units:
        for name, slot in unit.shard.slots.items():
            with outsize.gathered(unit.parameters[name]):
                value = unit.parameters[name].detach().clone().reshape(-1)
            unit.await_written()
            if slot.dtype == "bfloat16":
                rest = unit.shard.read_array(unit.shard.arrays["master"], slot.offset, slot.end)
                value = ((value.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)
            found[name] = value
    return found


def test_fp32_and_bf16_runs_exchange_exact_masters(tmp_path: Path) -> None:
    wide = Run(tmp_path, ("disk", "disk", "disk"))
    wide.train(2)
    wide.save(tmp_path / "wide")
    narrow = Run(tmp_path, ("host", "disk", "host"), seed=1, compute_dtype=torch.bfloat16)
    narrow.load(tmp_path / "wide")
    assert_same(masters(wide), masters(narrow))
    narrow.train(1)
    narrow.save(tmp_path / "narrow")
    wide.load(tmp_path / "narrow")
    assert_same(masters(narrow), masters(wide))


def test_weights_alone_leave_the_optimizer_and_the_random_numbers(tmp_path: Path) -> None:
    first = Run(tmp_path, ("disk", "disk", "disk"))
    first.train(2)
    save(tmp_path / "weights", first.model)
    second = Run(tmp_path, ("disk", "disk", "disk"), seed=1)
    second.train(1)
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
    3: {"milestones": Counter({10: 2, 20: 1})},
    "$odd": {"$tuple": "a plain dict"},
    "floats": [float("inf"), -float("inf"), 0.1, 1e-320, -0.0],
    "flags": [True, False, None],
    "text": "ü\ud800\n",
}


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    run = Run(tmp_path, ("host", "host", "host"))
    shared = torch.arange(6.0)
    tensors = {"a": shared, "b": [shared[2:4], torch.tensor(3, dtype=torch.int16), torch.zeros(0, 2).bfloat16()]}
    save(tmp_path / "checkpoint", run.model, run.optimizer, {**EXTRA, "tensors": tensors})
    extra = load(tmp_path / "checkpoint", run.model, run.optimizer)
    back = extra.pop("tensors")
    assert repr(extra) == repr(EXTRA)
    for one, other in zip([tensors["a"], *tensors["b"]], [back["a"], *back["b"]], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


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
        assert torch.equal(back.nan_to_num(7), tensor.nan_to_num(7))


# -- what is wrong is said before anything changes ---------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    run = Run(tmp_path, ("disk", "host", "disk"))
    run.train(1)
    run.save(tmp_path / "checkpoint")
    return run, tmp_path / "checkpoint"


def refused(run: Run, path: Path, error: type[Exception], match: str) -> None:
    before = run.result()
    with pytest.raises(error, match=match):
        run.load(path)
    assert_same(before, run.result())
    run.train(1)


def edit(path: Path, change: Any) -> None:
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    (path / "manifest.json").write_text(sealed(json.dumps(content)))


def test_a_folder_without_manifest_is_not_loaded(saved: tuple[Run, Path]) -> None:
    run, path = saved
    (path / "manifest.json").unlink()
    refused(run, path, FileNotFoundError, "not a complete checkpoint.*manifest.json")
    refused(run, path / "nowhere", FileNotFoundError, "there is no checkpoint.*nowhere")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', "\x00\x01", '{"format": "outsize checkpoint"}'])
def test_a_damaged_manifest_is_named(saved: tuple[Run, Path], text: str) -> None:
    run, path = saved
    (path / "manifest.json").write_text(text)
    refused(run, path, ValueError, "manifest.json")


def test_a_manifest_that_leads_outside_its_folder_is_damaged(saved: tuple[Run, Path]) -> None:
    run, path = saved
    edit(path, lambda content: content["files"].update({"../secret": {"bytes": 1, "crc32c": ["0"]}}))
    refused(run, path, ValueError, "not a file name")


def test_an_array_outside_its_file_is_damage(saved: tuple[Run, Path]) -> None:
    run, path = saved
    edit(path, lambda content: content["parameters"]["embed.weight"]["weight"].update(offset=1 << 40))
    refused(run, path, ValueError, "lies outside of")


def test_a_newer_version_is_named(saved: tuple[Run, Path]) -> None:
    run, path = saved
    edit(path, lambda content: content.update(version=99))
    refused(run, path, ValueError, "format version 99")


def test_a_truncated_or_missing_data_file_is_named(saved: tuple[Run, Path]) -> None:
    run, path = saved
    file = next(iter(sorted(path.glob("unit-*.bin"))))
    os.truncate(file, file.stat().st_size - 1)
    refused(run, path, ValueError, f"{file.name} has .* bytes and should have")
    file.unlink()
    refused(run, path, FileNotFoundError, file.name)


def test_renamed_and_reshaped_parameters_are_listed(saved: tuple[Run, Path]) -> None:
    run, path = saved

    def rename(content: Any) -> None:
        content["parameters"]["other.weight"] = content["parameters"].pop("embed.weight")
        content["parameters"]["norm.bias"]["weight"]["shape"] = [20]
        for region in content["parameters"]["norm.bias"]["state"].values():
            region["shape"] = [20]

    edit(path, rename)
    refused(
        run, path, ValueError, "missing parameters: embed.weight; .*unexpected parameters: other.weight; .*norm.bias"
    )


def test_another_dtype_is_listed(saved: tuple[Run, Path]) -> None:
    run, path = saved
    edit(path, lambda content: content["parameters"]["frozen"]["weight"].update(dtype="int32"))
    refused(run, path, ValueError, "frozen is int32 there and float32 here")


def test_another_optimizer_is_refused(saved: tuple[Run, Path]) -> None:
    _, path = saved
    other = Run(path.parent, ("host", "host", "host"), optimizer=OPTIMIZERS["momentum"])
    refused(other, path, ValueError, "its optimizer is AdamW, this one is SGD; .*exp_avg.*momentum_buffer")


def test_models_and_optimizers_that_are_not_the_prepared_ones_are_refused(saved: tuple[Run, Path]) -> None:
    run, path = saved
    plain = Net()
    for call in (save, load, export):
        with pytest.raises(ValueError, match="not prepared"):
            call(path, plain)
        with pytest.raises(ValueError, match=r"takes the model that was given to outsize\.prepare"):
            call(path, run.model.blocks[0])
    for call in (save, load):
        with pytest.raises(ValueError, match="not the one that was prepared"):
            call(path, run.model, torch.optim.AdamW(run.model.parameters()))
        with outsize.gathered(run.model.norm, modify=True), pytest.raises(RuntimeError, match="modify=True"):
            call(path, run.model, run.optimizer)


def test_a_directory_that_is_no_checkpoint_is_never_overwritten(saved: tuple[Run, Path]) -> None:
    run, path = saved
    photos = path.parent / "photos"
    photos.mkdir()
    (photos / "one.jpg").write_text("precious")
    with pytest.raises(FileExistsError, match=r"not an outsize checkpoint.*photos"):
        run.save(photos)
    (path / "notes.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"also holds notes\.txt"):
        run.save(path)
    (path.parent / "file").write_text("precious")
    with pytest.raises(FileExistsError, match="a file is in the way"):
        run.save(path.parent / "file")
    assert (photos / "one.jpg").read_text() == (path / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize("exchange", [True, False])
def test_a_checkpoint_is_replaced_only_by_a_complete_one(
    saved: tuple[Run, Path], exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = saved
    expected = run.result()
    if not exchange:
        monkeypatch.setattr(folder, "_exchange", lambda one, other: False)
    run.train(1)
    full = OSError(errno.ENOSPC, "No space left on device")

    def pwrite(*_: Any) -> int:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwrite", pwrite)
        with pytest.raises(OSError, match=r"No space left on device \(writing .*\.bin") as raised:
            run.save(path)
        assert raised.value.errno == errno.ENOSPC
    assert sorted(each.name for each in path.parent.iterdir()) == ["checkpoint", "disk"]
    newer = run.result()
    run.load(path)
    assert_same(expected | {"losses": newer["losses"][:1]}, run.result())
    run.train(2)
    run.save(path)
    newest = run.result()
    assert sorted(each.name for each in path.parent.iterdir()) == ["checkpoint", "disk"]
    run.train(1)
    run.load(path)
    assert_same(newest, run.result())


def test_a_killed_save_is_swept_by_the_next_and_found_between_two_renames(saved: tuple[Run, Path]) -> None:
    run, path = saved
    expected = run.result()
    half = path.parent / f".{path.name}.new-abcabcabcabc"
    half.mkdir()
    (half / "unit-00000.bin").write_bytes(b"half")
    path.rename(path.parent / f".{path.name}.old-abcabcabcabc")  # killed between the two renames
    run.train(1)
    run.load(path)
    assert_same(expected, run.result())
    run.save(path)
    run.save(path)
    assert sorted(each.name for each in path.parent.iterdir()) == ["checkpoint", "disk"]


def test_parents_are_created_and_short_writes_resumed(saved: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = saved
    expected = run.result()
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(files.os, "pwrite", lambda fd, data, at: pwrite(fd, data[:4096], at))
    monkeypatch.setattr(files.os, "preadv", lambda fd, data, at: preadv(fd, [data[0][:4096]], at))
    deep = path.parent / "a" / "b [1]" / "c"
    run.save(deep)
    run.train(1)
    run.load(deep)
    assert_same(expected, run.result())


def test_a_read_that_fails_half_way_stops_the_run(saved: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = saved
    preadv, calls = os.preadv, []

    def failing(fd: int, data: Any, at: int) -> int:
        calls.append(at)
        if len(calls) > 8:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, data, at)

    monkeypatch.setattr(files.os, "preadv", failing)
    with pytest.raises(OSError, match=r"reading .*\.bin"):
        run.load(path)
    with pytest.raises(RuntimeError, match="no longer whole"):
        run.train(1)


def test_another_program_can_read_a_checkpoint_with_json_and_numpy(saved: tuple[Run, Path]) -> None:
    numpy = pytest.importorskip("numpy")
    run, path = saved
    content = json.loads((path / "manifest.json").read_text())
    with outsize.gathered(run.model):
        for name, record in content["parameters"].items():
            where = record["weight"]
            file = numpy.memmap(path / where["file"], numpy.uint8) if numpy.prod(where["shape"]) else b""
            values = (
                numpy.frombuffer(file, where["dtype"], int(numpy.prod(where["shape"])), where["offset"])
                if len(file)
                else numpy.zeros(0, where["dtype"])
            )
            expected = run.model.get_parameter(name).detach()
            assert torch.equal(torch.tensor(values).reshape(where["shape"]), expected), name


def peak_of(call: Any) -> int:
    """Bytes that the process's memory grew at its highest while `call` ran."""
    Path("/proc/self/clear_refs").write_text("5")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    call()
    status = Path("/proc/self/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    return peak - before


@pytest.mark.slow
def test_memory_of_save_load_and_export_is_a_slab_whatever_the_model(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])  # 64 MiB of weights, 4 MiB a unit
    (tmp_path / "disk").mkdir()
    fields = {"params": "disk", "grads": "disk", "states": "disk", "disk": tmp_path / "disk", "host_memory": "32MiB"}
    optimizer = torch.optim.AdamW(model.parameters())
    outsize.prepare(model, optimizer, device="cpu", **fields)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    save(tmp_path / "warm", model, optimizer)
    export(tmp_path / "warm-weights", model, max_shard_size="4MiB")
    unit, slab, shard, slack = 4 << 20, 8 << 20, 8 << 20, 8 << 20
    bound = slab + 3 * unit + slack  # of 256 MiB of state and gradients
    assert peak_of(lambda: save(tmp_path / "checkpoint", model, optimizer)) <= bound
    assert peak_of(lambda: load(tmp_path / "checkpoint", model, optimizer)) <= bound
    assert peak_of(lambda: export(tmp_path / "weights", model, max_shard_size=shard)) <= bound + shard
