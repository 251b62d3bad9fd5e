"""Checkpoints of several ranks: going on is exact, and any number of ranks loads what any other has saved."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import outsize
from outsize.checkpoint import writer
from outsize.checkpoint.files import PlannedFile
from outsize.checkpoint.manifest import sealed
from outsize.move.lanes import RanksError
from tests.comparing import assert_same
from tests.conftest import take_step
from tests.ranks.launching import Ended, ends_on_ranks, in_turn, run_on_ranks
from tests.ranks.training import Setting, batch, fields_of, made, make, named_weights, same_bits

BF16 = torch.bfloat16
AT_ONCE_BYTES = writer.AT_ONCE_BYTES


class Run:
    """A training that can be saved and loaded. Alone where no ranks were started."""

    def __init__(self, setting: Setting, disk: str, seed: int = 0, large: bool = False) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.model, self.optimizer = made(setting, disk, seed, depth=1)
        self.setting = setting
        self.steps = 0
        writer.AT_ONCE_BYTES = -1 if large else AT_ONCE_BYTES  # as if there was too much to write it at once

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            x, y = batch(self.steps, self.rank)
            loss = nn.functional.mse_loss(self.model(x.to(self.setting.dtype)).float(), y) + torch.rand(()) * 0.1
            take_step(loss, self.optimizer, clip=(self.model.parameters(), 0.1))
            self.steps += 1
        return self

    def save(self, path: Path) -> Run:
        outsize.save(path, self.model, self.optimizer, {"step": self.steps, "rank": self.rank, "at": torch.ones(3)})
        return self

    def load(self, path: Path) -> Any:
        extra = outsize.load(path, self.model, self.optimizer)
        self.steps = extra["step"]
        return extra

    def weights(self) -> dict[str, Tensor]:
        return named_weights(self.model)


def go_on(settings: list[Setting], large: bool, folder: str, load: bool) -> list[dict[str, Tensor]]:
    return (load_and_go_on if load else save_and_go_on)(settings, folder, large)


def save_and_go_on(settings: list[Setting], folder: str, large: bool) -> list[dict[str, Tensor]]:
    found = []
    for index, setting in enumerate(settings):
        torch.manual_seed(5)
        run = Run(setting, folder, large=large)
        torch.manual_seed(10 + run.rank)
        run.train(setting.steps)
        run.save(Path(folder) / f"ckpt-{index}")
        run.train(1)
        found.append({**run.weights(), "random": torch.rand(3)})
        run.optimizer.zero_grad()
    return found


def load_and_go_on(settings: list[Setting], folder: str, large: bool) -> list[dict[str, Tensor]]:
    found = []
    for index, setting in enumerate(settings):
        run = Run(setting, folder, seed=1, large=large)
        extra = run.load(Path(folder) / f"ckpt-{index}")
        assert extra["rank"] == run.rank and torch.equal(extra["at"], torch.ones(3))
        run.train(1)
        found.append({**run.weights(), "random": torch.rand(3)})
    return found


HOST = Setting(3, "host", steps=1)
SETTINGS = [
    Setting(3, "device", dtype=BF16, steps=1),
    Setting(3, "disk", dtype=BF16, fields={"state_format": "compact"}, steps=1),
    Setting(2, "host", dtype=BF16, steps=1),
    Setting(1, "disk", steps=1),
    Setting(0, "host", steps=1),
]
"""Every stage and tier, both dtypes, and states that are compact."""

OWED = Setting(3, "disk", fields={"delayed_update": 1}, steps=2)
"""With an update that is owed."""

SMALL = [HOST, SETTINGS[0], *SETTINGS[3:], OWED]
LARGE = [HOST, *SETTINGS[1:3], OWED]
"""Every tier that can rest there, split and whole parameters, masters, and an update that is owed."""


class Runs(nn.Module):
    """Its buffers follow what its rank has seen: one that persists, one that does not, and the same mask on all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(48)
        self.lin = nn.Linear(48, 8)
        self.register_buffer("seen", torch.zeros(48), persistent=False)
        self.register_buffer("mask", torch.ones(48))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin((self.norm(x) - self.seen.clone()) * self.mask)
        if self.training:
            self.seen.lerp_(x.detach().mean(0), 0.2)
        return out


def go_on_with_buffers(stage: int, mesh: tuple[int, ...], disk: str, load: bool) -> tuple[list[float], list[Tensor]]:
    """(losses of this rank after the checkpoint, its buffers at its time)."""
    torch.manual_seed(3)
    model = Runs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fields = fields_of(Setting(stage, "host"), disk)
    outsize.prepare(model, optimizer, **fields, **({"mesh": init_device_mesh("cpu", mesh)} if mesh else {}))
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses, steps = [], (1,) if load else (0, 1)
    if load:
        outsize.load(f"{disk}/ckpt", model, optimizer)
        buffers = [value.clone() for value in model.buffers()]
    for step in steps:
        if step == 1 and not load:
            outsize.save(f"{disk}/ckpt", model, optimizer)
            buffers = [value.clone() for value in model.buffers()]
        x, y = batch(step, rank)
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        take_step(loss, optimizer)
    return losses[-1:], buffers


class Counting(nn.Linear):
    """It keeps how often it was used beside its parameters."""

    uses = 0.0

    def get_extra_state(self) -> dict[str, Any]:
        return {"uses": self.uses, "twice": torch.tensor(2 * self.uses)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.uses = state["uses"]
        assert state["twice"] == 2 * self.uses


def load_extra_states(mesh: tuple[int, ...], disk: str, load: bool) -> float:
    model = nn.Sequential(Counting(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    fields = fields_of(Setting(3, "host"), disk)
    outsize.prepare(model, optimizer, **fields, **({"mesh": init_device_mesh("cpu", mesh)} if mesh else {}))
    if not load:
        model[0].uses = 1.0 + dist.get_rank()
        outsize.save(f"{disk}/ckpt", model, optimizer).wait()
    outsize.load(f"{disk}/ckpt", model, optimizer)
    return model[0].uses


COPIES = [replace(HOST, mesh=(2, 2)), Setting(3, "disk", dtype=BF16, mesh=(2, 2), steps=1)]


@dataclass(frozen=True)
class Case:
    """So many ranks call `function(*args, folder, load)`: first they save and go on, then others load and go on."""

    ranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    of: str = ""
    """Another case, whose checkpoint these ranks only load."""


CASES = {
    "ranks": Case(2, go_on, (SMALL, False)),
    "ranks, large": Case(2, go_on, (LARGE, True)),
    "copies": Case(4, go_on, (COPIES[:1], False)),
    "copies, large": Case(4, go_on, (COPIES[1:], True)),
    "buffers, stage 0": Case(2, go_on_with_buffers, (0, ())),
    "buffers, stage 3": Case(2, go_on_with_buffers, (3, ())),
    "buffers, (2, 1)": Case(2, go_on_with_buffers, (3, (2, 1))),
    "buffers, (2, 2)": Case(4, go_on_with_buffers, (3, (2, 2))),
    "extra states, (2,)": Case(2, load_extra_states, ((2,),)),
    "extra states, (2, 2)": Case(4, load_extra_states, ((2, 2),)),
    "buffers on three": Case(3, go_on_with_buffers, (3, ()), of="buffers, stage 3"),
    "buffers of four on three": Case(3, go_on_with_buffers, (3, ()), of="buffers, (2, 2)"),
    "buffers of four on (1, 2)": Case(2, go_on_with_buffers, (3, (1, 2)), of="buffers, (2, 2)"),
    "buffers of four on (2, 1)": Case(2, go_on_with_buffers, (3, (2, 1)), of="buffers, (2, 2)"),
    "extra states of four on three": Case(3, load_extra_states, ((),), of="extra states, (2, 2)"),
}


@dataclass(frozen=True)
class Saved:
    folder: Path
    before: dict[str, tuple[Any, ...]]
    """What each rank of a case found when it had saved."""
    after: dict[str, tuple[Any, ...]]
    """What each rank of a case found when it had loaded."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """All cases of as many ranks run in the same processes; those that load run in others than those that save."""
    saved = Saved(tmp_path_factory.mktemp("saved"), {}, {})
    for found, load, ranks in (
        *((saved.before, False, ranks) for ranks in (2, 4)),
        *((saved.after, True, ranks) for ranks in (2, 3, 4)),
    ):
        cases = {name: case for name, case in CASES.items() if case.ranks == ranks and (load or not case.of)}
        calls = []
        for name, case in cases.items():
            folder = saved.folder / (case.of or name)
            folder.mkdir(exist_ok=True)
            calls.append((case.function, *case.args, str(folder), load))
        found.update(zip(cases, zip(*run_on_ranks(ranks, in_turn, *calls, limit=120), strict=True), strict=True))
    return saved


@pytest.mark.parametrize("name", ["ranks", "ranks, large"])
def test_going_on_from_a_checkpoint_is_exact(name: str, saved: Saved) -> None:
    for one, other in zip(saved.before[name], saved.after[name], strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)


@pytest.mark.parametrize("name", ["copies", "copies, large"])
def test_all_copies_of_a_mesh_go_on_exactly(name: str, saved: Saved) -> None:
    """With random numbers and an `extra` (a tensor in it) of each rank's own."""
    for one, other in zip(saved.before[name], saved.after[name], strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    manifest = json.loads((saved.folder / name / "ckpt-0" / "manifest.json").read_text())
    assert (manifest["world_size"], len(manifest["ranks"])) == (2, 4)


@pytest.mark.parametrize("name", ["buffers, stage 0", "buffers, stage 3", "buffers, (2, 1)", "buffers, (2, 2)"])
def test_each_rank_gets_its_own_buffers_back(name: str, saved: Saved) -> None:
    before, after = saved.before[name], saved.after[name]
    assert len({buffers[0].sum().item() for _, buffers in before}) == len(before)
    for (losses, buffers), (again, restored) in zip(before, after, strict=True):
        assert losses == again
        assert same_bits(buffers, restored)
    ranks = json.loads((saved.folder / name / "ckpt" / "manifest.json").read_text())["ranks"]
    assert sorted(ranks[1]["buffers"]) == ["norm.running_mean", "norm.running_var", "seen"]


def test_more_ranks_get_the_buffers_of_the_first(saved: Saved) -> None:
    for _, restored in saved.after["buffers on three"]:
        assert same_bits(saved.before["buffers, stage 3"][0][1], restored)


@pytest.mark.parametrize("place", ["three", "(1, 2)", "(2, 1)"])
def test_other_meshes_get_buffers_of_the_ranks_of_the_first_copy(place: str, saved: Saved) -> None:
    first_copy = saved.before["buffers, (2, 2)"][:2]
    for _, restored in saved.after[f"buffers of four on {place}"]:  # a rank that has no place there takes the first's
        assert any(torch.equal(restored[0], buffers[0]) for _, buffers in first_copy)


@pytest.mark.parametrize("name", ["extra states, (2,)", "extra states, (2, 2)"])
def test_each_rank_gets_the_extra_states_of_its_own_modules_back(name: str, saved: Saved) -> None:
    own = tuple(1.0 + rank for rank in range(CASES[name].ranks))
    assert saved.before[name] == saved.after[name] == own


def test_other_ranks_get_the_extra_states_of_the_first(saved: Saved) -> None:
    assert saved.after["extra states of four on three"] == (1.0, 1.0, 1.0)


def test_buffers_of_another_rank_that_do_not_fit_are_damage(tmp_path: Path) -> None:
    run_on_ranks(2, go_on_with_buffers, 3, (), str(tmp_path), False)
    file = tmp_path / "ckpt" / "manifest.json"
    content = json.loads(file.read_text())
    content["ranks"][1]["buffers"]["seen"]["shape"] = [8]
    content.pop("crc32c")
    file.write_text(sealed(json.dumps(content, indent=2)))
    first, second = ends_on_ranks(2, go_on_with_buffers, 3, (), str(tmp_path), True)
    assert "outsize.load: rank 1 failed" in str(first.error), first.trace
    assert "buffer 'seen' of rank 1 has another shape" in str(second.error), second.trace


def pass_on(settings: list[Setting], folder: str, at: int, first: bool) -> list[dict[str, Tensor]]:
    found = []
    for index, setting in enumerate(settings):
        run = Run(setting, folder, seed=0 if first else 1)
        if first:
            run.train(1)
        else:
            run.load(Path(folder) / f"ckpt-{index}-{at - 1}")
        run.save(Path(folder) / f"ckpt-{index}-{at}")
        states = {
            f"{name}.{key}": value
            for name, param in run.model.named_parameters()
            for key, value in run.optimizer.state[param].items()
            if isinstance(value, Tensor) and not dist.is_initialized()
        }
        found.append({**run.weights(), **states})
    return found


def test_any_number_of_ranks_loads_what_another_has_saved(tmp_path: Path) -> None:
    dist_free = pass_on(SETTINGS, str(tmp_path), 0, True)
    for at, ranks in ((1, 2), (2, 3)):
        for found in run_on_ranks(ranks, pass_on, SETTINGS, str(tmp_path), at, False):
            for mine, theirs in zip(found, dist_free, strict=True):
                assert_same(mine, {name: theirs[name] for name in mine})
    for mine, theirs in zip(pass_on(SETTINGS, str(tmp_path), 3, False), dist_free, strict=True):
        assert_same(mine, theirs)


def save_copies(folder: str) -> dict[str, Tensor]:
    run = Run(Setting(3, "host", mesh=(2, 2)), folder).train(2).save(Path(folder) / "ckpt")
    outsize.export(Path(folder) / "model", run.model)
    dist.barrier()
    before = run.weights()
    again = Run(Setting(3, "disk", mesh=(2, 2)), folder, seed=1)
    again.load(Path(folder) / "ckpt")
    assert_same(again.weights(), before)
    return before


def test_one_copy_of_a_mesh_is_saved_and_exported(tmp_path: Path) -> None:
    found = run_on_ranks(4, save_copies, str(tmp_path))
    alone = Run(Setting(3, "host"), str(tmp_path), seed=1)
    alone.load(tmp_path / "ckpt")
    for weights in (*found, load_file(tmp_path / "model" / "model.safetensors")):
        assert_same(alone.weights(), weights)


def save_astray(folder: str, mesh: tuple[int, int] | None) -> list[str]:
    """Each rank in turn saves to another name than the others."""
    run, said = Run(Setting(3, "host", mesh=mesh), folder), []
    run.train(1).save(Path(folder) / "good")
    for who in range(dist.get_world_size()):
        with pytest.raises(ValueError, match="the ranks save to different places: .*name one shared folder") as raised:
            run.save(Path(folder) / ("astray" if run.rank == who else "together"))
        said.append(str(raised.value))
    run.train(1).save(Path(folder) / "after")
    return said


@pytest.mark.parametrize("mesh", [None, (2, 2)], ids=["one copy", "two copies"])
def test_ranks_that_save_to_different_places_are_refused(tmp_path: Path, mesh: tuple[int, int] | None) -> None:
    for said in run_on_ranks(2 if mesh is None else 4, save_astray, str(tmp_path), mesh):
        assert all(each.count("astray") == 1 for each in said)
    assert sorted(each.name for each in tmp_path.iterdir() if each.name[0] != ".") == ["after", "good"]


def fail_to_save(folder: str, who: int) -> str:
    run = Run(Setting(3, "host"), folder).train(1).save(Path(folder) / "good").train(1)
    if run.rank == who:
        plain = PlannedFile.write

        def full(*args: Any) -> Any:
            raise OSError(28, "No space left on device")

        PlannedFile.write = full  # type: ignore[method-assign]
    try:
        run.save(Path(folder) / "bad")
    except OSError as error:
        said = f"{type(error).__name__} {error}"
    if run.rank == who:
        PlannedFile.write = plain  # type: ignore[method-assign]
    run.train(1).save(Path(folder) / "after")
    return said


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_save_keeps_the_others_from_publishing(who: int, tmp_path: Path) -> None:
    said = run_on_ranks(2, fail_to_save, str(tmp_path), who)
    assert "No space left" in said[who] and f"rank {who} failed" in said[1 - who]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["after", "good"]


def load_damaged(folder: str) -> None:
    run = Run(Setting(3, "host"), folder).train(1)
    before = run.weights()
    try:
        run.load(Path(folder) / "ckpt-0")
    finally:
        assert_same(run.weights(), before)


def test_damage_is_found_on_every_rank_before_anything_changes(tmp_path: Path) -> None:
    run_on_ranks(2, save_and_go_on, [HOST], str(tmp_path), False)
    manifest = json.loads((tmp_path / "ckpt-0" / "manifest.json").read_text())
    weights = [each["weight"] for each in manifest["parameters"].values()]
    pieces = [piece for each in weights for piece in each.get("pieces", [[each.get("file"), each.get("offset"), 0]])]
    name, offset, _ = next(piece for piece in pieces if piece[0].startswith("rank-0001"))
    file = tmp_path / "ckpt-0" / name
    with open(file, "r+b") as content:
        content.seek(offset + 100)
        byte = content.read(1)
        content.seek(offset + 100)
        content.write(bytes([byte[0] ^ 1]))
    for end in ends_on_ranks(2, load_damaged, str(tmp_path)):
        assert isinstance(end, Ended) and end.error is not None
        assert end.kind == "ValueError" and file.name in end.error, end.trace


def killed_in_save(folder: str) -> None:
    run = Run(Setting(3, "host"), folder).train(1).save(Path(folder) / "good").train(1)
    if run.rank == 1:
        PlannedFile.write = lambda *_: os._exit(9)  # type: ignore[method-assign]
    with pytest.raises(RanksError, match="rank 1") as raised:
        run.save(Path(folder) / "bad")
    assert raised.value.__cause__ is not raised.value  # who follows the causes comes to an end


def test_a_rank_that_dies_in_a_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    first, _ = ends_on_ranks(2, killed_in_save, str(tmp_path))
    assert first.error is None, first.trace
    assert not (tmp_path / "bad").exists()
    alone = Run(Setting(3, "host"), str(tmp_path), seed=1)
    assert alone.load(tmp_path / "good")["step"] == 1


def export_on_ranks(folder: str) -> dict[str, Tensor]:
    settings = [Setting(3, "disk", dtype=BF16), Setting(2, "host", dtype=BF16), Setting(0, "host")]
    found = {}
    for index, setting in enumerate(settings):
        run = Run(setting, folder).train(1)
        outsize.export(Path(folder) / f"model-{index}", run.model, max_shard_size="20KiB")
        outsize.export(Path(folder) / f"wide-{index}", run.model, dtype=torch.float32)
        run.save(Path(folder) / f"ckpt-{index}")
        found |= {f"{index} {name}": value for name, value in run.weights().items()}
    return found


def test_export_streams_from_all_ranks(tmp_path: Path) -> None:
    weights, _ = run_on_ranks(2, export_on_ranks, str(tmp_path))
    for index, dtype in enumerate((BF16, BF16, torch.float32)):
        exported: dict[str, Tensor] = {}
        for file in (tmp_path / f"model-{index}").glob("*.safetensors"):
            exported |= load_file(file)
        assert_same(exported, {name[2:]: value for name, value in weights.items() if name.startswith(f"{index} ")})
        alone = Run(Setting(3, "host", dtype=dtype), str(tmp_path), seed=1)
        alone.load(tmp_path / f"ckpt-{index}")
        outsize.export(tmp_path / "alone", alone.model, dtype=torch.float32)
        assert_same(
            load_file(tmp_path / f"wide-{index}" / "model.safetensors"),
            load_file(tmp_path / "alone" / "model.safetensors"),
        )


def export_without_room(folder: str) -> list[str]:
    """The drive is full at the first, the fourth and the last write, and when all are synced; then it has room."""
    run = Run(Setting(3, "disk"), folder).train(1)
    said, plain, sync = [], os.pwrite, os.fsync
    left = 0

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", folder)

    def write(*arguments: Any) -> int:
        nonlocal left
        left -= 1
        return full() if left < 0 else plain(*arguments)

    os.pwrite = write
    left = 1 << 20
    outsize.export(Path(folder) / "counted", run.model, max_shard_size=1)
    writes = (1 << 20) - left
    for allowed in (0, writes // 2, writes - 1):
        left = allowed
        try:
            outsize.export(Path(folder) / "model", run.model, max_shard_size=1)
        except OSError as error:
            said.append(str(error))
        run.train(1)
    os.pwrite, os.fsync = plain, full
    try:
        outsize.export(Path(folder) / "model", run.model)
    except OSError as error:
        said.append(str(error))
    os.fsync = sync
    run.train(1)
    try:
        outsize.export(Path(folder) / "a file" / "model", run.model)
    except OSError as error:
        said.append(str(error))
    outsize.export(Path(folder) / "model", run.model)
    run.save(Path(folder) / "checkpoint")
    return said


def test_an_export_that_fails_leaves_all_ranks_training(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("in the way")
    first, second = run_on_ranks(2, export_without_room, str(tmp_path))
    assert len(first) == len(second) == 5
    assert all("No space left" in said for said in first[:4])
    assert all("rank 0 failed" in said and "outsize.export" in said for said in second)
    alone = Run(Setting(3, "host"), str(tmp_path), seed=1)
    alone.load(tmp_path / "checkpoint")
    assert_same(load_file(tmp_path / "model" / "model.safetensors"), alone.weights())


def load_weights_of_others(folder: str) -> tuple[dict[str, Tensor], int]:
    run = Run(Setting(3, "host"), folder, seed=1)
    read = os.preadv
    counts = []

    def counted(fd: int, into: Any, offset: int) -> int:
        counts.append(read(fd, into, offset))
        return counts[-1]

    os.preadv = counted
    try:
        outsize.load(Path(folder) / "weights", run.model)
    finally:
        os.preadv = read
    return run.weights(), sum(counts)


def test_each_rank_reads_its_slice_of_the_weights_of_others(tmp_path: Path) -> None:
    model, _ = make(Setting(), seed=7, depth=1)
    expected = {name: value.detach() for name, value in model.named_parameters()}
    (tmp_path / "weights").mkdir()
    save_file(expected, tmp_path / "weights" / "model.safetensors")
    size = sum(value.numel() * 4 for value in expected.values())
    found = run_on_ranks(3, load_weights_of_others, str(tmp_path))
    for weights, _ in found:
        assert_same(weights, expected)
    assert sum(read for _, read in found) == size
