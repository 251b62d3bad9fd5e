"""Folders of torch.distributed.checkpoint that are damaged, hostile or of other things: refused, nothing changes."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict

from outsize.formats.dcp_folder import DcpFolder, grid_cuts
from tests.api.checkpoint_runs import everything
from tests.api.dcp_runs import adamw, changed, load, other_run, plain_run, plain_save, replaced, saved_run
from tests.comparing import assert_same


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
    target.refuses(tmp_path / "folder", "is damaged: 'optim.param_groups.0.lr'")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="more than tensors and plain values") as raised:
        load(tmp_path / "folder", target.model, target.optimizer)
    assert "weights_only" not in str(raised.value), "no advice to load with less care"


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(Metadata({}))[:-5]])
def test_damaged_metadata_is_refused(content: bytes, target: Target, tmp_path: Path) -> None:
    saved_run(tmp_path / "folder")
    (tmp_path / "folder" / ".metadata").write_bytes(content)
    target.refuses(tmp_path / "folder", r"\.metadata is")


METADATA = b"ctorch.distributed.checkpoint.metadata\n"


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
    target.refuses(tmp_path / "folder", "not a complete checkpoint", FileNotFoundError)


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
    target.refuses(tmp_path / "folder", "is damaged: .*" + "no grid .* save it again" * (change is double_chunk))


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
    ("key", "content", "match"),
    [
        ("model.frozen", deflated(torch.zeros(70)), "compressed"),
        ("model.frozen", written(torch.zeros(71)), "no tensor of its shape and dtype"),
        ("model.frozen", written(torch.zeros(70, dtype=torch.float64)), "no tensor of its shape and dtype"),
        ("model.frozen", written([1.0] * 70), "no tensor of its shape and dtype"),
        ("model.frozen", written(torch.zeros(70))[:-9], "BadZipFile"),
        ("model.frozen", b"\x80\x02K\1.", "it ends too soon"),
        ("optim.param_groups.0.lr", deflated([0.0] * 100_000), "compressed"),
    ],
    ids=["deflated", "shape", "dtype", "list", "cut", "pickle", "inflates"],
)
def test_a_piece_that_is_no_archive_of_its_tensor_or_value_is_refused(
    key: str, content: bytes, match: str, target: Target, tmp_path: Path
) -> None:
    saved_run(tmp_path / "folder")
    replaced(tmp_path / "folder", key, content)
    target.refuses(tmp_path / "folder", f"is damaged: .*{key!r}.*{match}")


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


@given(st.data())
def test_pieces_of_a_grid_make_up_the_tensor_and_others_do_not(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    cuts = [sorted({0, *data.draw(st.lists(st.integers(0, size - 1), max_size=3))}) for size in shape]
    spans = [list(itertools.pairwise([*along, size])) for along, size in zip(cuts, shape, strict=True)]
    boxes = [
        (tuple(low for low, _ in each), tuple(high - low for low, high in each)) for each in itertools.product(*spans)
    ]
    boxes = data.draw(st.permutations(boxes))
    assert grid_cuts(shape, boxes) == cuts
    assert grid_cuts(shape, boxes[1:]) is None
    assert grid_cuts(shape, [*boxes, boxes[0]]) is None
    if shape:
        (low, size), *others = boxes
        assert grid_cuts(shape, [((low[0] + 1, *low[1:]), size), *others]) is None
        assert grid_cuts(shape, [(low, (size[0] + 1, *size[1:])), *others]) is None


@pytest.mark.parametrize("depth", [2, 300_000])
@pytest.mark.parametrize(
    "pickled",
    [b"}%sNs.", b"}(%sNu.", b"(%sNd.", b"\x8f(%s\x90.", b"(%s\x91.", b"cbuiltins\nset\n(%sl\x85R."],
    ids=["SETITEM", "SETITEMS", "DICT", "ADDITEMS", "FROZENSET", "set"],
)
def test_a_key_that_is_not_plain_is_refused_before_its_hash_is_taken(
    pickled: bytes, depth: int, tmp_path: Path
) -> None:
    nested = b")" + b"\x85" * depth
    refused(tmp_path / "folder", b"\x80\x05" + pickled.replace(b"%s", nested), "(is damaged|asks for builtins)")
