"""A drive that holds the state of a model, and little more."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext, suppress
from copy import deepcopy
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from tests.small_models import linears

SPARE = 256 << 10
"""For the heads of files, and what an estimate rounds."""


class Drive:
    """`nbytes` of space, of which what lies in `folder` is taken."""

    def __init__(self, folder: Path, nbytes: int, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.nbytes, self.reserve = folder, nbytes, os.posix_fallocate
        patch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=max(self.free, 0) // 512, f_frsize=512))
        patch.setattr(os, "posix_fallocate", self.take)

    @property
    def free(self) -> int:
        files = [each for each in self.folder.rglob("*") if each.is_file()]
        return self.nbytes - sum(each.stat().st_blocks * 512 for each in files)

    def take(self, file: int, offset: int, nbytes: int) -> None:
        self.reserve(file, offset, nbytes)
        if self.free < 0:
            raise OSError(errno.ENOSPC, "No space left on device")


def deep() -> nn.Module:
    return linears(256, 8, bias=False)


@pytest.mark.parametrize(
    ("lacking", "others", "more", "refused"),
    [
        (0, False, {}, False),
        (1 << 20, False, {}, True),
        (-1 << 20, True, {}, True),  # what another model holds stays
        (1 << 20, False, {"compute_dtype": torch.bfloat16}, True),  # and what is reserved before weights take its place
    ],
)
def test_a_model_of_init_may_fill_the_drive(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    lacking: int,
    others: bool,
    more: dict[str, Any],
    refused: bool,
) -> None:
    """What `init` keeps on disk is given back as the run's files take its place."""
    torch.manual_seed(0)
    plain = deep().to(device)
    needed = sum(16 * param.numel() for param in plain.parameters())  # the weight, the gradient and two moments
    Drive(tmp_path, int((needed + SPARE - lacking) / 0.95), monkeypatch)
    torch.manual_seed(0)
    with outsize.init(host_memory="1MiB", disk=tmp_path, device="cpu"):
        model = deep()
        other = deep() if others else None
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    fields = {"host_memory": "2MiB", "disk": tmp_path, "params": "disk", "grads": "disk", "states": "disk", **more}
    if refused:
        with pytest.raises(outsize.BudgetError, match="do not fit the disk"):
            outsize.prepare(model, optimizer, device=device, **fields)
        del other
        return
    outsize.prepare(model, optimizer, device=device, **fields)
    x = torch.randn(4, 256, device=device)
    for each, stepped in ((model, optimizer), (plain, torch.optim.AdamW(plain.parameters(), weight_decay=0.1))):
        each(x).square().mean().backward()
        stepped.step()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("copies", [2, 3, 4])
@pytest.mark.parametrize("memory", ["3500KiB", "4MiB", "6MiB", "16MiB"])
def test_what_does_not_fit_the_drive_is_a_matter_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int, memory: str
) -> None:
    """Weights that go to memory free what `init` holds of them too late for the others."""
    Drive(tmp_path, int((copies * (2 << 20) + SPARE) / 0.95), monkeypatch)
    with outsize.init(host_memory="1MiB", disk=tmp_path, device="cpu"):
        model = deep()
    with suppress(outsize.BudgetError):
        outsize.prepare(model, torch.optim.AdamW(model.parameters()), host_memory=memory, disk=tmp_path, device="cpu")


def test_units_of_several_parameters_take_the_place_of_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Drive(tmp_path, int(((2 << 20) + SPARE) / 0.95), monkeypatch)
    torch.manual_seed(0)
    with outsize.init(host_memory="1MiB", disk=tmp_path, device="cpu"):
        model = deep()
    halves = nn.Sequential(model[:4], model[4:])
    outsize.prepare(halves, host_memory="4MiB", disk=tmp_path, device="cpu", params="disk", units=["0", "1"])
    torch.manual_seed(0)
    assert torch.equal(halves(torch.ones(1, 256)), deep()(torch.ones(1, 256)))


@pytest.mark.parametrize("of_init", [False, True])
def test_a_drive_that_others_fill_meanwhile_costs_no_values_unsaid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_init: bool
) -> None:
    """Of a plain model all is reserved before anything moves. One of `init` that has lost values refuses to go on."""
    with outsize.init(host_memory="1MiB", disk=tmp_path, device="cpu") if of_init else nullcontext():
        model = deep()
    before = None if of_init else deepcopy(model)
    fields = {"host_memory": "2MiB", "disk": tmp_path, "params": "disk", "grads": "disk", "states": "disk"}
    drive, calls = Drive(tmp_path, 1 << 30, monkeypatch), count()

    def take(*args: int) -> None:
        drive.nbytes = 0 if next(calls) == 26 else 1 << 30  # two states and a gradient a unit, then weights
        drive.take(*args)

    monkeypatch.setattr(os, "posix_fallocate", take)
    with pytest.raises(OSError, match="No space left"):
        outsize.prepare(model, torch.optim.AdamW(model.parameters()), device="cpu", **fields)
    if before is None:
        with pytest.raises(RuntimeError, match="failed while it moved them: build the model again"):
            outsize.prepare(model, torch.optim.AdamW(model.parameters()), device="cpu", **fields)
    else:
        assert all(map(torch.equal, model.parameters(), before.parameters()))
