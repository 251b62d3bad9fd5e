"""Folders of torch.distributed.checkpoint that are damaged, hostile or of other things: refused, nothing changes."""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict

from outsize.checkpoint import files
from outsize.formats import dcp_archive
from outsize.formats.dcp_boxes import fills
from outsize.formats.dcp_folder import DcpFolder
from tests.api.dcp_runs import (
    adamw,
    assert_same,
    changed,
    everything,
    load,
    other_run,
    plain_run,
    plain_save,
    replaced,
    saved_run,
)


class Target:
    """A live run into which nothing that is refused gets."""

    def __init__(self, tmp: Path) -> None:
        self.model, self.optimizer = other_run("host", tmp)
        self.before = everything(self.model, self.optimizer)

    def refuses(self, folder: Path, match: str, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=match):
            load(folder, self.model, self.optimizer)
        assert_same(everything(self.model, self.optimizer), self.before)


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target(tmp_path)


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("where", ["state_dict_metadata", "planner_data", "storage_meta"])
def test_metadata_that_would_run_code_is_refused_and_does_not_run(where: str, target: Target, tmp_path: Path) -> None:
    saved_run(tmp_path / "folder")
    file = tmp_path / "folder" / ".metadata"
    found: Metadata = pickle.loads(file.read_bytes())
    setattr(found, where, {"x": Evil(tmp_path / "ran")})
    file.write_bytes(pickle.dumps(found))
    target.refuses(tmp_path / "folder", r"\.metadata asks for (posix|os)\.system")
    assert not (tmp_path / "ran").exists()


def test_a_value_that_would_run_code_is_refused_and_does_not_run(target: Target, tmp_path: Path) -> None:
    plain, plain_optimizer = plain_run()
    weights, states = get_state_dict(plain, plain_optimizer)
    states["param_groups"][0]["lr"] = Evil(tmp_path / "ran")  # type: ignore[assignment]
    plain_save({"model": weights, "optim": states}, tmp_path / "folder")
    target.refuses(tmp_path / "folder", r"damaged at optim.param_groups.0.lr")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(Metadata({}))[:-5]])
def test_damaged_metadata_is_refused(content: bytes, target: Target, tmp_path: Path) -> None:
    saved_run(tmp_path / "folder")
    (tmp_path / "folder" / ".metadata").write_bytes(content)
    target.refuses(tmp_path / "folder", r"\.metadata is")


METADATA = b"ctorch.distributed.checkpoint.metadata\n"


SMALL_BUFFER = 1 << 20


@contextmanager
def peak_at_most(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The buffer for the file, of `SMALL_BUFFER` here instead of the most that one may have, counts too."""
    monkeypatch.setattr(files, "MAX_MANIFEST_BYTES", SMALL_BUFFER)
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= nbytes


def refused(folder: Path, pickled: bytes, match: str) -> None:
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickled)
    with pytest.raises(ValueError, match=rf"{folder}/\.metadata {match}"):
        DcpFolder(folder)


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_of_every_protocol_of_python_3_is_read(protocol: int, tmp_path: Path) -> None:
    saved_run(tmp_path / "folder")
    expected: Metadata = pickle.loads((tmp_path / "folder" / ".metadata").read_bytes())
    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(expected, protocol))
    found = DcpFolder(tmp_path / "folder")
    records = expected.state_dict_metadata
    tensors = {key: record for key, record in records.items() if isinstance(record, TensorStorageMetadata)}
    assert found.tensors == {key: (record.size, record.properties.dtype) for key, record in tensors.items()}
    assert found.values == records.keys() - tensors.keys()
    assert all(found.level(key) == expected.planner_data[key][:-1] for key in records)
    found.check(records)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x05" + pickle.BYTEARRAY8 + struct.pack("<Q", 2 << 30) + b".",
        b"\x80\x05N" + pickle.READONLY_BUFFER + b".",
        b"\x80\x05" + pickle.NEXT_BUFFER + b".",
        b"\x80\x05NQ.",
        b"Px\n.",
        b"\x82\x01.",
        b"(" + b"itorch.distributed.checkpoint.metadata\nMetadataIndex\n.",
        b"(" + METADATA + b"MetadataIndex\nX\x01\0\0\0xo.",
    ],
    ids=["BYTEARRAY8", "READONLY_BUFFER", "NEXT_BUFFER", "BINPERSID", "PERSID", "EXT1", "INST", "OBJ"],
)
def test_what_metadata_never_holds_is_refused_before_it_takes_memory(
    pickled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peak_at_most(SMALL_BUFFER + (1 << 20), monkeypatch):
        refused(tmp_path / "folder", pickled, "is damaged: .*holds what no metadata does")


NUMBERS = b"(" + b"".join(b"M" + struct.pack("<H", at) for at in range(10_000)) + b"t"
FIELDS = b"(" + b"".join(b"X\x04\0\0\0%04dN" % at for at in range(10_000)) + b"d"


@pytest.mark.parametrize(
    ("start", "again"),
    [
        (b"ctorch\nSize\nq\0" + NUMBERS + b"\x85q\1", b"h\0h\1R"),
        (b"cbuiltins\nset\nq\0" + NUMBERS + b"\x85q\1", b"h\0h\1R"),
        (b"cbuiltins\nfrozenset\nq\0" + NUMBERS + b"\x85q\1", b"h\0h\1R"),
        (METADATA + b"MetadataIndex\nq\0X\x01\0\0\0x" + NUMBERS + b"\x86q\1", b"h\0h\1R"),
        (METADATA + b"Metadata\nq\0" + FIELDS + b"q\1", b"h\0)\x81h\1b"),
    ],
    ids=["Size", "set", "frozenset", "MetadataIndex", "fields"],
)
def test_elements_that_are_named_again_and_again_are_not_copied(
    start: bytes, again: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = b"\x80\x04" + start + 300 * again + b"."
    with peak_at_most(SMALL_BUFFER + 160 * len(pickled), monkeypatch):
        refused(tmp_path / "folder", pickled, "(is damaged|asks for builtins)")


@pytest.mark.parametrize("state", [b"}X\x08\0\0\0poisonedNs", b"N}X\x08\0\0\0poisonedNs\x86"], ids=["dict", "slots"])
@pytest.mark.parametrize(
    "target",
    [
        b"cpathlib\nPosixPath\n",
        b"cpathlib\nPath\n(X\x01\0\0\0xtR",
        b"ctorch\nSize\n",
        METADATA + b"Metadata\n",
        METADATA + b"_MEM_FORMAT_ENCODING\n",
        METADATA + b"_MEM_FORMAT_ENCODING\nK\0\x85R",
    ],
    ids=["path class", "path", "size", "record class", "enum class", "enum member"],
)
def test_metadata_changes_no_class(target: bytes, state: bytes, tmp_path: Path) -> None:
    refused(tmp_path / "folder", b"\x80\x04" + target + state + b"b.", "is damaged")
    assert not hasattr(PurePosixPath, "poisoned")
    assert not hasattr(Metadata, "poisoned")
    assert Path("x").name == "x"


def test_an_error_does_not_print_what_is_long_only_in_print(tmp_path: Path) -> None:
    nested = b"](K\0K\0eq\x000" + 18 * b"](h\0h\0eq\x000"
    for name, call in ((b"_MEM_FORMAT_ENCODING", b"h\0\x85R."), (b"TensorProperties", b")\x81(NNNh\0Ntb.")):
        pickled = b"\x80\x04" + nested + METADATA + name + b"\n" + call
        refused(tmp_path / name.decode(), pickled, r"(is damaged|asks for)[^\[]{0,200}$")


def test_a_file_outside_of_the_folder_is_never_read(target: Target, tmp_path: Path) -> None:
    saved_run(tmp_path / "folder")
    data = tmp_path / "folder" / "__0_0.distcp"
    (tmp_path / "outside.distcp").write_bytes(data.read_bytes())
    for name in ("../outside.distcp", str(tmp_path / "outside.distcp"), "", "."):

        def point(found: Metadata, name: str = name) -> None:
            for info in found.storage_data.values():
                info.relative_path = name

        changed(tmp_path / "folder", point)
        target.refuses(tmp_path / "folder", "is damaged: .*(outside of the folder|not a regular file)")


def test_a_link_out_of_the_folder_is_not_followed(target: Target, tmp_path: Path) -> None:
    saved_run(tmp_path / "folder")
    data = tmp_path / "folder" / "__0_0.distcp"
    data.rename(tmp_path / "outside.distcp")
    data.symlink_to(tmp_path / "outside.distcp")
    target.refuses(tmp_path / "folder", "'__0_0.distcp', which lies outside of the folder")


def test_a_cut_or_missing_file_is_refused(target: Target, tmp_path: Path) -> None:
    saved_run(tmp_path / "folder")
    data = tmp_path / "folder" / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 100)
    target.refuses(tmp_path / "folder", "__0_0.distcp' has .* bytes and .*: the file was cut")
    data.unlink()
    target.refuses(tmp_path / "folder", "__0_0.distcp", FileNotFoundError)
    os.mkfifo(data)
    target.refuses(tmp_path / "folder", "not a regular file")
    (tmp_path / "folder" / ".metadata").unlink()
    target.refuses(tmp_path / "folder", "metadata is written last", FileNotFoundError)


def cut_chunk(found: Metadata) -> None:
    chunk = found.state_dict_metadata["model.head.weight"].chunks[0]  # type: ignore[union-attr]
    chunk.sizes = torch.Size([chunk.sizes[0] - 1, chunk.sizes[1]])


def double_chunk(found: Metadata) -> None:
    record = found.state_dict_metadata["model.head.weight"]
    rows, columns = record.size  # type: ignore[union-attr]
    half = type(record.chunks[0])(torch.Size([0, 0]), torch.Size([rows // 2, columns]))  # type: ignore[union-attr]
    record.chunks[:] = [half, half]  # type: ignore[union-attr]


def no_storage(found: Metadata) -> None:
    found.storage_data = {key: info for key, info in found.storage_data.items() if key.fqn != "model.head.weight"}


def negative(found: Metadata) -> None:
    for info in found.storage_data.values():
        info.offset = -1


def packed(found: Metadata) -> None:
    for info in found.storage_data.values():
        info.transform_descriptors = ["zstd"]


@pytest.mark.parametrize("change", [cut_chunk, double_chunk, no_storage, negative, packed])
def test_pieces_that_do_not_make_up_a_tensor_are_refused(
    change: Callable[[Metadata], None], target: Target, tmp_path: Path
) -> None:
    saved_run(tmp_path / "folder")
    changed(tmp_path / "folder", change)
    target.refuses(tmp_path / "folder", "is damaged: ")


def test_other_models_are_refused_with_what_is_different(target: Target, tmp_path: Path) -> None:
    plain, _ = plain_run(steps=1)
    state = plain.state_dict()
    less = {name: value for name, value in state.items() if not name.startswith("blocks.1.up")}
    plain_save({"model": less}, tmp_path / "less")
    target.refuses(tmp_path / "less", "2 missing parameters: blocks.1.up.weight, blocks.1.up.bias")
    more = {**state, **{f"blocks.{at}.up.weight": torch.ones(2) for at in range(2, 14)}}
    plain_save({"model": more}, tmp_path / "more")
    target.refuses(tmp_path / "more", r"12 unexpected weights: blocks\.2\.up\.weight, .*\.up\.weight and 2 more;?")
    plain_save({"model": {**state, "head.bias": torch.ones(51)}}, tmp_path / "shape")
    target.refuses(tmp_path / "shape", "head.bias is 51 there and 50 here")
    plain_save({"model": {**state, "head.bias": torch.ones(50, dtype=torch.float64)}}, tmp_path / "dtype")
    target.refuses(tmp_path / "dtype", "head.bias is torch.float64 there and torch.float32 here")
    plain_save({"model": {name: value for name, value in state.items() if "running" not in name}}, tmp_path / "buffer")
    target.refuses(tmp_path / "buffer", "2 missing buffers: norm.running_mean, norm.running_var")
    plain_save({"something": torch.ones(3)}, tmp_path / "nothing")
    target.refuses(tmp_path / "nothing", "16 missing parameters")


def test_other_optimizers_are_refused_with_what_is_different(target: Target, tmp_path: Path) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1, momentum=0.9)

    def one_group(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)

    def swapped(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([dict(group) for group in reversed(adamw(model).param_groups)])

    saved_run(tmp_path / "sgd", make=sgd)
    target.refuses(tmp_path / "sgd", "its optimizer keeps momentum_buffer, this one exp_avg, exp_avg_sq")
    saved_run(tmp_path / "groups", make=one_group)
    target.refuses(tmp_path / "groups", "its optimizer has 1 parameter groups, this one 2")
    saved_run(tmp_path / "swapped", make=swapped)
    target.refuses(tmp_path / "swapped", "14 parameters in other parameter groups: ")
    plain, plain_optimizer = plain_run()
    weights, states = get_state_dict(plain, plain_optimizer)
    plain_save({"model": weights}, tmp_path / "none")
    target.refuses(tmp_path / "none", "saved without an optimizer")
    states["state"]["head.bias"]["step"] = "late"  # type: ignore[call-overload, index]
    plain_save({"model": weights, "optim": states}, tmp_path / "late")
    target.refuses(tmp_path / "late", "step of head.bias is 'late', which it cannot be")
    del states["state"]["head.bias"]["exp_avg"]  # type: ignore[call-overload, union-attr]
    plain_save({"model": weights, "optim": states}, tmp_path / "part")
    target.refuses(tmp_path / "part", "1 parameters with incomplete optimizer arrays: head.bias")


def _nested(depth: int) -> bytes:
    """A tuple in a tuple in a tuple."""
    return b")" + b"\x85" * depth


@pytest.mark.parametrize("depth", [2, 300_000])
@pytest.mark.parametrize(
    "pickled",
    [
        b"}%sNs.",
        b"}(%sNu.",
        b"(%sNd.",
        b"\x8f(%s\x90.",
        b"(%s\x91.",
        b"cbuiltins\nset\n(%sl\x85R.",
        b"}" + METADATA + b"MetadataIndex\n)\x81}(X\x03\0\0\0fqnX\x01\0\0\0wX\x06\0\0\0offset%subNs.",
    ],
    ids=["SETITEM", "SETITEMS", "DICT", "ADDITEMS", "FROZENSET", "set", "MetadataIndex"],
)
def test_a_key_that_is_not_plain_is_refused_before_its_hash_is_taken(
    pickled: bytes, depth: int, tmp_path: Path
) -> None:
    refused(tmp_path / "folder", b"\x80\x05" + pickled.replace(b"%s", _nested(depth)), "(is damaged|asks for builtins)")


def test_a_long_tuple_is_not_hashed_again_and_again(tmp_path: Path) -> None:
    many = b"(" + b"K\x01" * 1000 + b"t\x94"
    pickled = b"\x80\x05}(" + many + b"N" + b"h\0N" * 10_000 + b"u."
    refused(tmp_path / "folder", pickled, "is damaged: .*a key is a tuple")


def test_an_entry_without_a_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Metadata({1: 2}, storage_data={})))  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="an entry has no name"):
        DcpFolder(tmp_path / "folder")


def written(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def deflated(value: Any) -> bytes:
    """The same archive with its records compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(written(value))) as archive, zipfile.ZipFile(file, "w") as packed:
        for record in archive.infolist():
            packed.writestr(record.filename, archive.read(record), zipfile.ZIP_DEFLATED)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (deflated(torch.zeros(70)), "compressed"),
        (written(torch.zeros(300_000)[:70]), "bytes, too many for"),
        (written(torch.zeros(71)), "no tensor of its shape and dtype"),
        (written(torch.zeros(70, dtype=torch.float64)), "no tensor of its shape and dtype"),
        (written([1.0] * 70), "no tensor of its shape and dtype"),
        (written(torch.zeros(70))[:-9], "BadZipFile"),
        (b"\x80\x02K\1.", "it ends too soon"),
    ],
    ids=["deflated", "view", "shape", "dtype", "list", "cut", "pickle"],
)
def test_a_piece_that_is_no_archive_of_its_tensor_is_refused(
    content: bytes, match: str, target: Target, tmp_path: Path
) -> None:
    saved_run(tmp_path / "folder")
    replaced(tmp_path / "folder", "model.frozen", content)
    target.refuses(tmp_path / "folder", f"is damaged: .*'model.frozen'.*{match}")


def test_a_value_that_inflates_is_refused(target: Target, tmp_path: Path) -> None:
    saved_run(tmp_path / "folder")
    replaced(tmp_path / "folder", "optim.param_groups.0.lr", deflated([0.0] * 100_000))
    target.refuses(tmp_path / "folder", "is damaged: .*'optim.param_groups.0.lr'.*compressed")


def test_an_archive_of_endlessly_many_records_is_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path / "folder")
    monkeypatch.setattr(dcp_archive, "LARGEST_DIRECTORY", 100)
    target.refuses(tmp_path / "folder", "is damaged: .*more than 100 bytes of names")


def test_values_that_share_their_bytes_are_refused(target: Target, tmp_path: Path) -> None:
    saved_run(tmp_path / "folder")
    content = written("x" * 900_000)
    (tmp_path / "folder" / "value").write_bytes(content)

    def share(found: Metadata) -> None:
        for index, info in found.storage_data.items():
            if index.fqn.startswith("optim.param_groups."):
                info.relative_path, info.offset, info.length = "value", 0, len(content)

    changed(tmp_path / "folder", share)
    target.refuses(tmp_path / "folder", "more bytes than the files")


def test_a_flipped_byte_is_found_before_anything_changes(target: Target, tmp_path: Path) -> None:
    saved_run(tmp_path / "folder")
    data = tmp_path / "folder" / "__0_0.distcp"
    infos = pickle.loads((tmp_path / "folder" / ".metadata").read_bytes()).storage_data
    plain = data.read_bytes()
    for key in ("model.head.weight", "optim.state.head.weight.exp_avg"):
        info = next(info for index, info in infos.items() if index.fqn == key)
        content = bytearray(plain)
        content[info.offset + info.length // 2] ^= 1
        data.write_bytes(content)
        target.refuses(tmp_path / "folder", f"is damaged: .*{key!r}.*")


def test_a_folder_without_checksums_loads(target: Target, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        plain, plain_optimizer = saved_run(tmp_path / "folder")
    finally:
        torch.serialization.set_crc32_options(True)
    load(tmp_path / "folder", target.model, target.optimizer)
    assert_same(everything(target.model, target.optimizer), everything(plain, plain_optimizer))


def test_no_message_advises_to_load_without_care(target: Target, tmp_path: Path) -> None:
    plain, plain_optimizer = plain_run()
    weights, states = get_state_dict(plain, plain_optimizer)
    states["param_groups"][0]["lr"] = Evil(tmp_path / "ran")  # type: ignore[assignment]
    plain_save({"model": weights, "optim": states}, tmp_path / "folder")
    with pytest.raises(ValueError, match="more than tensors and plain values") as raised:
        load(tmp_path / "folder", target.model, target.optimizer)
    assert "weights_only" not in str(raised.value)


@pytest.mark.parametrize("shape", [(1, 20_000), (20_000, 1), (140, 140), (27, 27, 27)], ids=str)
def test_the_pieces_of_a_grid_are_told_apart_at_once(shape: tuple[int, ...]) -> None:
    boxes = [(at, (1,) * len(shape)) for at in itertools.product(*map(range, shape))]
    start = time.process_time()
    assert fills(shape, boxes)
    assert not fills(shape, [*boxes[1:], boxes[-1]])
    assert time.process_time() - start < 5


@given(st.data())
def test_pieces_that_were_cut_anyhow_make_up_the_tensor(data: st.DataObject) -> None:
    boxes = [((0, 0, 0), (6, 5, 4))]
    for _ in range(data.draw(st.integers(0, 12))):
        low, size = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, 2))
        cut = data.draw(st.integers(0, size[dim]))
        boxes.append((low, (*size[:dim], cut, *size[dim + 1 :])))
        further = (*low[:dim], low[dim] + cut, *low[dim + 1 :])
        boxes.append((further, (*size[:dim], size[dim] - cut, *size[dim + 1 :])))
    assert fills((6, 5, 4), boxes)
    at, (low, size) = data.draw(st.sampled_from(list(enumerate(boxes))))
    moved = (low[0] + data.draw(st.sampled_from([-1, 1])), *low[1:])
    others = [*boxes[:at], *boxes[at + 1 :]]
    assert not fills((6, 5, 4), [*others, (moved, size)]) or not math.prod(size)


def test_pieces_that_interlock_without_end_are_refused() -> None:
    ring = [((0, 0), (1, 9)), ((0, 9), (9, 1)), ((9, 1), (1, 9)), ((1, 0), (9, 1))]
    assert fills((10, 10), [*ring, ((1, 1), (8, 8))])
    assert not fills((10, 10), [*ring, ((1, 1), (8, 7)), ((4, 4), (1, 8))])
    slanted = [((at, at), (3_000, 1)) for at in range(3_000)]
    with pytest.raises(ValueError, match="too many to be told apart"):
        fills((6_000, 3_000), [*slanted, ((0, 0), (3_000, 3_000))])
