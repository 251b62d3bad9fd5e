"""A drive that holds the state of a model, and little more."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import outsize

SPARE = 256 << 10
"""For the heads of files, and what an estimate rounds."""
FIELDS: Any = {"host_memory": "2MiB", "params": "disk", "grads": "disk", "states": "disk"}


class Drive:
    """`nbytes` of space, of which what lies in `folder` is taken."""

    def __init__(self, folder: Path, nbytes: int, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.nbytes, self.reserve, self.left = folder, nbytes, os.posix_fallocate, -1
        patch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=max(self.free, 0) // 512, f_frsize=512))
        patch.setattr(os, "posix_fallocate", self.take)

    @property
    def free(self) -> int:
        files = [each for each in self.folder.rglob("*") if each.is_file()]
        return self.nbytes - sum(each.stat().st_blocks * 512 for each in files)

    def take(self, file: int, offset: int, nbytes: int) -> None:
        """Ends at a full drive, and where `left` calls were."""
        self.reserve(file, offset, nbytes)
        self.left -= 1
        if self.free < 0 or not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")


def deep() -> nn.Module:
    return nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])


@pytest.mark.parametrize("lacking", [0, 1 << 20])
def test_a_model_of_init_may_fill_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, lacking: int
) -> None:
    """What `init` keeps on disk is given back as the run's files take its place."""
    torch.manual_seed(0)
    plain = deep().to(device)
    needed = sum(16 * param.numel() for param in plain.parameters())  # the weight, the gradient and two moments
    Drive(tmp_path, int((needed + SPARE - lacking) / 0.95), monkeypatch)
    torch.manual_seed(0)
    with outsize.init(host_memory="1MiB", disk=tmp_path, device="cpu"):
        model = deep()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    if lacking:
        with pytest.raises(outsize.BudgetError, match="do not fit the disk"):
            outsize.prepare(model, optimizer, disk=tmp_path, device=device, **FIELDS)
        return
    outsize.prepare(model, optimizer, disk=tmp_path, device=device, **FIELDS)
    x = torch.randn(4, 256, device=device)
    for each, stepped in ((model, optimizer), (plain, torch.optim.AdamW(plain.parameters(), weight_decay=0.1))):
        each(x).square().mean().backward()
        stepped.step()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("calls", "moved"), [(5, False), (28, True)])
def test_a_prepare_that_fails_leaves_the_values_or_refuses_their_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, calls: int, moved: bool
) -> None:
    """Another program may fill the drive while values move there."""
    model, x = deep().to(device), torch.randn(4, 256, device=device)
    optimizer, expected = torch.optim.AdamW(model.parameters()), model(x)
    drive = Drive(tmp_path, 1 << 40, monkeypatch)
    drive.left = calls
    with pytest.raises(OSError, match="No space left on device"):
        outsize.prepare(model, optimizer, disk=tmp_path, device=device, **FIELDS)
    if not moved:
        assert torch.equal(model(x), expected)
        outsize.prepare(model, optimizer, disk=tmp_path, device=device, **FIELDS)
        assert torch.equal(model(x), expected)
        return
    for use in (
        lambda: model(x),
        lambda: model[0].weight.norm(),
        lambda: outsize.prepare(model, optimizer, disk=tmp_path, device=device, **FIELDS),
    ):
        with pytest.raises(RuntimeError, match=r"prepare has failed.* are gone: make the model again"):
            use()
    assert "Linear" in repr(model) and "shape" in repr(model[0].weight)
