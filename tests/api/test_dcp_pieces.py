"""Tensors of a folder of torch.distributed.checkpoint, read piece by piece; the oracle is torch's own loader."""

from __future__ import annotations

import gc
import io
import itertools
import os
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import outsize
from outsize.checkpoint import files
from outsize.checkpoint.arrays import SLAB_BYTES
from outsize.formats.dcp_folder import DcpFolder
from tests.api.checkpoint_runs import everything, peak_of
from tests.api.dcp_runs import Chunk, other_run, plain_load, plain_run, prepare, replaced, write_chunks
from tests.comparing import assert_same

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)


def cut_anyhow(data: st.DataObject, value: Tensor) -> list[Chunk]:
    """A grid of boxes that make up the tensor, of any widths."""
    boxes: list[Chunk] = [((0,) * value.ndim, value)]
    for dim in range(value.ndim if value.numel() else 0):
        cuts = sorted({0, *data.draw(st.lists(st.integers(0, value.shape[dim] - 1), max_size=3)), value.shape[dim]})
        boxes = [
            ((*offsets[:dim], low, *offsets[dim + 1 :]), part.narrow(dim, low, high - low))
            for offsets, part in boxes
            for low, high in itertools.pairwise(cuts)
        ]
    return boxes


def stored(value: Tensor, order: Sequence[int], before: int = 0, after: int = 0) -> Tensor:
    """The same values with the dimensions in this order in memory, in the middle of a larger storage."""
    turned = value.permute(tuple(order))
    storage = torch.ones(before + value.numel() + after).to(value.dtype)
    middle = storage[before : before + value.numel()].view(turned.shape)
    return middle.copy_(turned).permute([order.index(dim) for dim in range(value.ndim)])


def stored_anyhow(data: st.DataObject, value: Tensor) -> Tensor:
    order = data.draw(st.permutations(range(value.ndim)))
    before, after = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    return stored(value, order, before, after)


@given(st.data())
def test_any_piece_of_a_tensor_that_was_cut_anyhow_is_as_torch_loads_it(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4))
    dtype = data.draw(st.sampled_from(DTYPES))
    value = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).mul(9).to(dtype)
    chunks = [(offsets, stored_anyhow(data, part)) for offsets, part in cut_anyhow(data, value)]
    expected = {"x": torch.empty(shape, dtype=dtype)}
    with TemporaryDirectory() as root:
        write_chunks(Path(root) / "folder", {"x": (shape, chunks)})
        plain_load(expected, Path(root) / "folder")
        folder = DcpFolder(Path(root) / "folder")
        folder.check(["x"])
        assert torch.equal(folder.readable("x").whole(), expected["x"])
        for _ in range(4):
            start = data.draw(st.integers(0, value.numel()))
            end = data.draw(st.integers(start, value.numel()))
            assert torch.equal(folder.piece("x", start, end), expected["x"].view(-1)[start:end])
        folder.close()


def whole(value: Tensor) -> list[Chunk]:
    return [((0,) * value.ndim, value)]


def grid(value: Tensor, parts: int = 3) -> list[Chunk]:
    """Cut along every dimension, each part stored with its dimensions in the opposite order."""
    along = [range(0, length, max(-(-length // parts), 1)) for length in value.shape]
    chunks = []
    for offsets in itertools.product(*along):
        sizes = [range(at, min(at + steps.step, steps.stop)) for at, steps in zip(offsets, along, strict=True)]
        part = value[tuple(slice(each.start, each.stop) for each in sizes)]
        chunks.append((offsets, stored(part, range(value.ndim)[::-1])))
    return chunks or whole(value)


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a_run_whose_tensors_are_grids_goes_on_as_it_was(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_OPEN", 2)
    plain, plain_optimizer = plain_run()
    weights, states = get_state_dict(plain, plain_optimizer)
    flat = {f"model.{name}": value for name, value in weights.items()}
    for name, state in states["state"].items():
        flat |= {f"optim.state.{name}.{key}": value for key, value in state.items()}  # type: ignore[attr-defined]
    write_chunks(tmp_path / "folder", {key: (value.shape, grid(value)) for key, value in flat.items()})
    model, optimizer = other_run(tier, tmp_path)
    outsize.load(tmp_path / "folder", model, optimizer)
    opened = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    assert not [each for each in opened if each.is_relative_to(tmp_path / "folder")]
    assert_same(everything(model, optimizer), everything(plain, plain_optimizer))


def columns(value: Tensor) -> list[Chunk]:
    """As tensor parallelism cuts the weights of a layer."""
    if value.ndim < 2:
        return whole(value)
    half = value.shape[1] // 2
    return [((0, 0), value[:, :half].clone()), ((0, half), value[:, half:].clone())]


def state_of(width: int) -> dict[str, Tensor]:
    """Weights and moments of one linear layer."""
    shapes = {"weight": (width, width), "bias": (width,)}
    state = {f"model.{name}": torch.rand(shape) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        state |= {f"optim.state.{name}.{key}": torch.rand(shape) for key in ("exp_avg", "exp_avg_sq")}
        state[f"optim.state.{name}.step"] = torch.tensor(1.0)
    return state


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "dtype"), [(whole, torch.float32), (columns, torch.float32), (grid, torch.bfloat16)])
def test_memory_of_a_load_is_slabs_however_large_a_tensor_is(
    cut: Callable[[Tensor], list[Chunk]], dtype: torch.dtype, tmp_path: Path
) -> None:
    runs = {}
    for name, width in (("warm", 64), ("large", 3584)):  # 49 MiB a tensor
        write_chunks(tmp_path / name, {key: (value.shape, cut(value)) for key, value in state_of(width).items()})
        model = nn.Linear(width, width)
        optimizer = torch.optim.AdamW(model.parameters())
        prepare(model, optimizer, "disk", tmp_path, host_memory="512MiB", compute_dtype=dtype)
        runs[name] = model, optimizer
    outsize.load(tmp_path / "warm", *runs["warm"])
    gc.collect()
    slack = 8 << 20
    assert peak_of(lambda: outsize.load(tmp_path / "large", *runs["large"])) <= 3 * SLAB_BYTES + slack


def archive_of(value: object, **others: bytes) -> bytes:
    """What `torch.save` writes, with other contents of some records."""
    plain, changed = io.BytesIO(), io.BytesIO()
    torch.save(value, plain)
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(changed, "w") as out:
        for record in archive.infolist():
            name = record.filename.partition("/")[2]
            out.writestr(record.filename, others.pop(name, archive.read(record)))
        for name, content in others.items():
            out.writestr(f"archive/{name}", content)
    return changed.getvalue()


OTHER = {"little": b"big", "big": b"little"}[sys.byteorder]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (archive_of(torch.zeros(6, 4), byteorder=OTHER), "another byte order; load the folder with torch"),
        (archive_of(torch.zeros(48).as_strided((6, 4), (8, 2))), "do not lie side by side; save tensor.contiguous"),
        (archive_of(torch.zeros(24).as_strided((6, 4), (1, 1))), "do not lie side by side; save tensor.contiguous"),
        (archive_of(torch.zeros(48)[12:36].view(6, 4), **{"data/0": bytes(100)}), "it ends before its tensor does"),
        (archive_of(torch.zeros(6, 4), **{"data/0": bytes(95)}), "no tensor of its shape and dtype"),
        (archive_of(torch.zeros(6, 4), **{"data/1": bytes(96)}), "no tensor of its shape and dtype"),
        (archive_of(torch.zeros(6, 4, device="meta")), "no tensor of its shape and dtype"),
        (archive_of(torch.zeros(6, 4).to_sparse()), "no tensor of its shape and dtype"),
        (archive_of([torch.zeros(6, 4)]), "no tensor of its shape and dtype"),
        (archive_of(torch.zeros(4, 6)), "no tensor of its shape and dtype"),
        (b"nothing", "it ends too soon"),
    ],
    ids=["byte order", "gaps", "shared", "end", "short", "two", "meta", "sparse", "list", "shape", "bytes"],
)
def test_what_is_no_plain_tensor_is_refused_with_the_reason_and_no_file_stays_open(
    content: bytes, match: str, tmp_path: Path
) -> None:
    write_chunks(
        tmp_path / "folder", {"weight": ((6, 4), whole(torch.zeros(6, 4))), "bias": ((6,), whole(torch.zeros(6)))}
    )
    replaced(tmp_path / "folder", "weight", content)
    model = nn.Linear(4, 6)
    before = model.weight.detach().clone()
    prepare(model, None, "host", tmp_path)
    gc.collect()  # files of what ran before
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=f"folder is damaged: 'weight' at .*{match}"):
        outsize.load(tmp_path / "folder", model)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with outsize.gathered(model):
        assert torch.equal(model.weight, before)


def test_a_file_that_is_cut_after_it_was_checked_is_named(tmp_path: Path) -> None:
    write_chunks(tmp_path / "folder", {"x": ((6, 4), whole(torch.zeros(6, 4)))})
    folder = DcpFolder(tmp_path / "folder")
    folder.check(["x"])
    os.truncate(tmp_path / "folder" / "__0_0.distcp", 100)
    with pytest.raises(ValueError, match="__0_0.distcp ends at .*; it was changed while it was being read"):
        folder.readable("x").whole()
    folder.close()
