"""Loads of damaged checkpoints: the right bits, or an error that names the file, and the run as it was."""

from __future__ import annotations

import gc
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import outsize
from benchmarks.checkpoint_faults import Hung, patience
from benchmarks.checkpoint_mutations import damage, odd_json
from benchmarks.checkpoint_runs import IN_MEMORY, MIXED, ON_DISK, Places, TinyRun
from benchmarks.common import PeakRss, rss_bytes
from outsize.checkpoint.manifest import MANIFEST_NAME, Manifest, sealed

MAX_EXTRA_BYTES = 64 << 20
PATIENCE_SECONDS = 10


@dataclass(frozen=True)
class Kind:
    """One sort of checkpoint and of the run that it is loaded into."""

    places: Places
    fields: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "linked fp32 state with gradients": Kind(ON_DISK),
    "copied bf16 state, compact, with tensors in extra": Kind(
        MIXED, {"compute_dtype": torch.bfloat16, "state_format": "compact"}, {"tensor": torch.arange(5000.0)}
    ),
}


@dataclass
class Tally:
    """What all inputs came to."""

    refused: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)


class Specimen:
    """A checkpoint in memory, to be damaged on disk again and again, and the run that loads it."""

    def __init__(self, root: Path, kind: Kind) -> None:
        self.shelf = root / "shelf"
        self.folder = self.shelf / "step-2"
        self._live = root / "live"
        disk = root / "disk"
        disk.mkdir(parents=True)
        first = TinyRun(disk, kind.places, **kind.fields)
        first.step()
        first.save(self.shelf / "step-1", **kind.extra).wait()
        first.step()
        first.backward()
        first.save(self.folder, **kind.extra).wait()
        first.close()
        self.files = {entry.name: entry.read_bytes() for entry in sorted(self.folder.iterdir())}
        self._make = lambda: TinyRun(disk, IN_MEMORY, seed=1, **kind.fields)
        self.run = self._make()
        self.run.step()
        self.run.save(self._live).wait()
        self._before = self.run.digest()
        self._older, self._right = (self._digest_of(self.shelf / name) for name in ("step-1", "step-2"))
        self.run.load(self._live)
        self._used = _used_bytes(Manifest.from_text(self.files[MANIFEST_NAME].decode()))
        gc.collect()
        gc.freeze()

    def _digest_of(self, path: Path) -> str:
        self.run.load(path)
        return self.run.digest()

    def renew(self) -> None:
        """A fresh run in the state that every load begins from, after one that a load has spoilt."""
        self.run.close()
        self.lay_out()
        self.run = self._make()
        self.run.load(self._live)

    def lay_out(self) -> None:
        """Put the whole checkpoint back in its place."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)

    def matters(self, name: str, at: int) -> bool:
        """Whether the byte is part of anything that `load` reads."""
        return any(low <= at < high for low, high in self._used.get(name, ()))

    def check(self, said: str, path: Path, tally: Tally, exact: bool = True, must_fail: bool = False) -> None:
        """One input: note how it ended."""
        try:
            refused = self._load(path, exact, must_fail)
        except (Exception, Hung) as error:
            tally.wrong.append(f"{said}: {type(error).__name__}: {error}")
            self.renew()
        else:
            tally.refused += refused
            tally.right += not refused

    def _load(self, path: Path, exact: bool, must_fail: bool = False) -> bool:
        """Load the damaged folder, or the newest of its shelf; whether that was refused.

        Raises `AssertionError` for any other end. What is loaded of a manifest that is not `exact` may be anything.
        """
        with PeakRss() as memory, patience(PATIENCE_SECONDS):
            before = rss_bytes()
            problem = self._attempt(path)
        assert memory.peak - before <= MAX_EXTRA_BYTES, f"the load took {(memory.peak - before) >> 20} MiB"
        if problem is not None:
            assert self.run.digest() == self._before, f"a refused load changed the run: {problem!r}"
            return True
        assert not must_fail, "damage was not found"
        if not exact:
            self.renew()
            return False
        found = self.run.digest()
        assert found == self._right or (path == self.shelf and found == self._older), "other bits, and no error"
        self.run.load(self._live)
        return False

    def _attempt(self, path: Path) -> Exception | None:
        problem: Exception | None = None
        try:
            outsize.load(path, self.run.model, self.run.optimizer)
        except (OSError, ValueError, TypeError) as error:
            problem = error
        if problem is not None:
            assert isinstance(problem, OSError) or type(problem) in (ValueError, TypeError), f"not ours: {problem!r}"
            assert str(path) in str(problem), f"an error without a path: {problem!r}"
        return problem


def _used_bytes(manifest: Manifest) -> dict[str, list[tuple[int, int]]]:
    """(first, end) of the bytes of each file that mean something."""
    regions = list(manifest.buffers.values())
    for record in manifest.parameters.values():
        regions += record.leaves()
    found: dict[str, list[tuple[int, int]]] = {}
    for region in regions:
        for piece in region.pieces:
            end = piece.offset + piece.numel * region.stored.itemsize
            found.setdefault(piece.file, []).append((piece.offset, end))
    return found


def fuzz(specimen: Specimen, draw: random.Random, inputs: int, tally: Tally) -> None:
    """Damaged data files, damaged manifests, and manifests that a careful hand has changed and sealed again."""
    data = [name for name in specimen.files if name != MANIFEST_NAME]
    for _ in range(inputs):
        specimen.lay_out()
        kind = draw.choice(("data", "manifest", "manifest", "sealed"))
        path = draw.choice((specimen.folder, specimen.folder, specimen.shelf))
        manifest = specimen.folder / MANIFEST_NAME
        if kind == "sealed":
            text, said = odd_json(manifest.read_text(), draw)
            manifest.write_text(sealed(text))
        else:
            said = damage(manifest if kind == "manifest" else specimen.folder / draw.choice(data), draw)
        specimen.check(f"{kind}: {said}, {path.name}", path, tally, exact=kind != "sealed")


def flip_everywhere(specimen: Specimen, draw: random.Random, flips: int, tally: Tally) -> None:
    """Single bits of the data files: one in a byte that matters is always found."""
    for _ in range(flips):
        specimen.lay_out()
        name = draw.choice([name for name in specimen.files if name != MANIFEST_NAME])
        content = bytearray(specimen.files[name])
        at = draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
        (specimen.folder / name).write_bytes(content)
        must_fail = specimen.matters(name, at)
        specimen.check(f"{name}: flip at {at}", specimen.folder, tally, must_fail=must_fail)
