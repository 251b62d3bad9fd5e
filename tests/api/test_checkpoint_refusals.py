"""What is wrong with a checkpoint, or with the place of one, is said before anything changes."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
from outsize import load, save
from outsize.api.exporting import export
from outsize.checkpoint import files, folder, manifest
from tests.api.checkpoint_runs import OPTIMIZERS, Net, Run, edit
from tests.comparing import assert_same


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    run = Run(tmp_path, ("disk", "host", "disk")).train(1).save(tmp_path / "checkpoint")
    return run, tmp_path / "checkpoint"


def refused(run: Run, path: Path, error: type[Exception], match: str) -> None:
    before = run.result()
    with pytest.raises(error, match=match):
        run.load(path)
    assert_same(before, run.result())
    run.train(1)


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


def coded(region: dict[str, Any]) -> dict[str, Any]:
    """8-bit codes of an array, and their scales, that lie within its file."""
    place = {"file": region["file"], "offset": region["offset"]}
    scales = {**place, "dtype": "float32", "shape": [-(-math.prod(region["shape"]) // 64)]}
    return {"codec": "signed", "codes": {**place, "dtype": "int8", "shape": region["shape"]}, "scales": scales}


def joined(region: dict[str, Any]) -> dict[str, Any]:
    """The same array as tensor-parallel ranks write it, in one part."""
    array = region.get("codes", region)
    dtype = "float32" if "codec" in region else array["dtype"]
    return {"dim": 0, "parts": [region], "dtype": dtype, "shape": array["shape"]}


def kept_of(record: dict[str, Any]) -> dict[str, Any]:
    """What a gradient has beside its array."""
    return {name: record[name] for name in ("ops", "norms") if name in record}


Change = Callable[[Any], object]


def of_embed(key: str, form: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """An array of `embed.weight` in another form; "held", which the checkpoint lacks, is made of its "grad"."""

    def change(content: Any) -> None:
        record = content["parameters"]["embed.weight"]
        found = record["grad" if key == "held" else key]
        record[key] = {**form(found), **kept_of(found)}

    return change


def in_parts(array: dict[str, Any]) -> Change:
    """The only array of a parameter, joined of parts."""
    return lambda content: content["parameters"]["frozen"].update(weight={"dtype": "float32", "shape": [3, 5], **array})


def norms(norm: float) -> Change:
    return lambda content: content["parameters"]["embed.weight"]["grad"].update(norms=[[2.0, norm]])


def options(hyper: Any) -> Change:
    return lambda content: content["optimizer"]["groups"][0].update(hyper=hyper)


def ranks(world: int, tensor: int) -> Change:
    own = [{"rng": {}, "extra": None}] * world
    return lambda content: content.update(world_size=world, tensor_ranks=tensor, ranks=own)


LEAF = {"file": "unit-00000.bin", "offset": 0, "dtype": "float32", "shape": [3, 5]}
UNFIT: dict[str, dict[str, Any]] = {
    "no part": {"dim": 0, "parts": []},
    "parts of other dimensions": {"dim": 0, "parts": [LEAF, {**LEAF, "shape": [3]}]},
    "a dimension of one part": {"dim": 1, "parts": [LEAF, {**LEAF, "shape": [3]}]},
    "a dimension of no part": {"dim": 2, "parts": [LEAF]},
    "a negative dimension": {"dim": -1, "parts": [LEAF]},
    "another width": {"dim": 0, "parts": [LEAF, {**LEAF, "shape": [3, 4]}]},
    "another dtype": {"dim": 0, "parts": [LEAF, {**LEAF, "dtype": "float16"}]},
    "parts of parts": {"dim": 0, "parts": [{"dim": 0, "parts": [LEAF]}]},
    "no list": {"dim": 0, "parts": LEAF},
    "another shape": {"dim": 0, "parts": [LEAF], "shape": [6, 5]},
    "another folder": {"dim": 0, "parts": [{**LEAF, "file": "../unit-00000.bin"}]},
    "outside of the file": {"dim": 0, "parts": [{**LEAF, "offset": 1 << 61}]},
}
CODES = "damaged.*8-bit codes"
DAMAGE: dict[str, tuple[Change, str]] = {
    "a file outside of the folder": (
        lambda content: content["files"].update({"../secret": {"bytes": 1, "crc32c": ["0"]}}),
        "not a file name",
    ),
    "an array outside of its file": (
        of_embed("weight", lambda region: {**region, "offset": 1 << 40}),
        "lies outside of",
    ),
    # Found before its elements are counted.
    "65 dimensions": (
        of_embed("weight", lambda region: {**region, "shape": [(1 << 62) - 1] * 65}),
        "65 dimensions are more than the 64",
    ),
    **{f"the norm {norm}": (norms(norm), "damaged.*are not norms of a gradient") for norm in (1e308, -1.0)},
    **{f"codes of {key}": (of_embed(key, coded), CODES) for key in ("weight", "master", "grad", "held")},
    **{
        f"joined codes of {key}": (of_embed(key, lambda region: joined(coded(region))), CODES)
        for key in ("weight", "master", "grad", "held")
    },
    **{
        f"{key} of {dtype}": (
            of_embed(key, lambda region, dtype=dtype: {**region, "dtype": dtype, "shape": [1]}),  # type: ignore[misc]
            "damaged.*a gradient of torch",
        )
        for key in ("grad", "held")
        for dtype in ("float8_e5m2", "int32", "complex64")
    },
    **{
        f"options {hyper}": (options(hyper), "the options of a parameter group")
        for hyper in ({"params": []}, {"$items": [["param_names", []]]}, {"$tuple": []})
    },
    **{
        f"{world} ranks, {tensor} side by side": (ranks(world, tensor), "damaged: .*ranks")
        for world, tensor in ((0, 1), (1, 0), (2, 3), (3, 2), (1, 2))
    },
    **{f"an array in parts: {what}": (in_parts(array), "is damaged") for what, array in UNFIT.items()},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run, and its checkpoint with every kind of array."""
    tmp = tmp_path_factory.mktemp("whole")
    run = Run(tmp, ("disk", "host", "disk"), compute_dtype=torch.float16).train(1)
    run.backward()
    run.save(tmp / "checkpoint")
    assert (tmp / "checkpoint" / LEAF["file"]).stat().st_size > 60
    return run, tmp / "checkpoint"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_manifest_of_what_cannot_be_is_damage(damage: str, whole: tuple[Run, Path]) -> None:
    run, path = whole
    change, match = DAMAGE[damage]
    text = (path / "manifest.json").read_text()
    edit(path, change)
    try:
        refused(run, path, ValueError, match)
    finally:
        (path / "manifest.json").write_text(text)


def test_joined_arrays_are_loaded_and_so_are_codes_of_optimizer_state(tmp_path: Path) -> None:
    run = Run(tmp_path, ("disk", "host", "disk"), compute_dtype=torch.float16, state_format="compact").train(1)
    run.backward()
    run.save(tmp_path / "checkpoint")
    expected = run.result()

    def change(content: Any) -> None:
        record = content["parameters"]["embed.weight"]
        for key in ("weight", "master", "grad"):
            record[key] = {**joined(record[key]), **kept_of(record[key])}
        assert all("codec" in region for region in record["state"].values())
        record["state"] = {name: joined(region) for name, region in record["state"].items()}

    edit(tmp_path / "checkpoint", change)
    run.train(1)
    run.load(tmp_path / "checkpoint")
    assert_same(expected, run.result())


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
    refused(run, path, FileNotFoundError, f"is missing; load an earlier one.*{file.name}")


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
    refused(run, path, ValueError, "frozen is torch.int32 there and torch.float32 here")


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
        with pytest.raises(OSError, match=r"No space left on device: free space there \(writing .*\.bin") as raised:
            run.save(path)
        assert raised.value.errno == errno.ENOSPC
    assert sorted(each.name for each in path.parent.iterdir()) == ["checkpoint", "disk"]
    newer = run.result()
    run.load(path)
    assert_same(expected | {"losses": newer["losses"][:1]}, run.result())
    run.train(2).save(path)
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
    preadv, calls, most = os.preadv, [], sys.maxsize

    def failing(fd: int, data: Any, at: int) -> int:
        calls.append(at)
        if len(calls) > most:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, data, at)

    monkeypatch.setattr(files.os, "preadv", failing)
    run.load(path)
    most = 2 * len(calls) - 1
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


def test_an_extra_that_no_manifest_has_room_for_is_refused(
    saved: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = saved
    nbytes = (path / "manifest.json").stat().st_size
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 8 * nbytes)
    with pytest.raises(ValueError, match="would take .* and has at most .* into tensors"):
        save(path.parent / "step-2", run.model, run.optimizer, {"order": list(range(4 * nbytes))}, keep=1).wait()
    assert not list(path.parent.glob("*step-2*"))
    save(path.parent / "step-2", run.model, run.optimizer, {"order": "7" * nbytes}, keep=1).wait()
    assert len(load(path.parent / "step-2", run.model, run.optimizer)["order"]) == nbytes


def test_a_manifest_that_nobody_could_read_is_not_published(
    saved: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = saved
    before = run.result()
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(ValueError, match="the manifest of this checkpoint would take"):
        save(path, run.model, run.optimizer).wait()
    monkeypatch.undo()
    assert not list(path.parent.glob(".*"))
    run.load(path)
    assert_same(before, run.result())


def test_a_path_that_a_shell_would_expand_is_refused(saved: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = saved
    monkeypatch.chdir(path.parent)
    names = set(os.listdir())
    for call in (
        lambda: save("~/step-1", run.model, run.optimizer),
        lambda: export("~user", run.model),
        lambda: export("~/dcp", run.model, format="dcp"),
    ):
        with pytest.raises(ValueError, match=r"os.path.expanduser\('~"):
            call()
    assert set(os.listdir()) == names
    save("./~step-1", run.model, run.optimizer).wait()
    assert Path("~step-1/manifest.json").is_file()


def test_the_current_directory_is_not_replaced(saved: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = saved
    (path.parent / "empty").mkdir()
    for folder_ in (path, path.parent / "empty"):
        monkeypatch.chdir(folder_)
        names = set(os.listdir())
        with pytest.raises(ValueError, match="is the current directory"):
            save(".", run.model, run.optimizer)
        assert set(os.listdir()) == names
    with pytest.raises(ValueError, match="is the current directory"):
        export("", run.model, format="dcp")
    export(".", run.model)  # its files come into the directory, which stays
    assert Path("model.safetensors").is_file()


def test_a_numpy_generator_of_another_kind_is_refused_with_its_name(saved: tuple[Run, Path]) -> None:
    numpy: Any = pytest.importorskip("numpy")
    run, path = saved
    usual = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(1))
        with pytest.raises(TypeError, match="numpy.random draws from PCG64.*MT19937"):
            save(path.parent / "other", run.model, run.optimizer)
        assert not (path.parent / "other").exists()
        expected = copy.deepcopy(numpy.random.get_bit_generator()).random_raw()
        run.load(path)  # it has a state of MT19937, which this process does not draw from
        assert numpy.random.get_bit_generator().random_raw() == expected
    finally:
        numpy.random.set_bit_generator(usual)
