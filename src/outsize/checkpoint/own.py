"""What each rank has of its own in a checkpoint: buffers, random numbers and `extra`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.files import DataWriter, file_record
from outsize.checkpoint.folder import sync
from outsize.checkpoint.joint import own_name
from outsize.checkpoint.library import require_safetensors, storing
from outsize.checkpoint.manifest import BufferRecord, FilePlan, FileRecord, check_values
from outsize.checkpoint.regions import Region
from outsize.checkpoint.values import DTYPE_NAMES, INLINE_NUMEL, encode, inline

MODEL_FILE = "model.bin"
EXTRA_FILE = "extra.safetensors"
Buffers = Mapping[str, tuple[torch.Tensor, bool]]
"""The values of buffers by name, and whether each is persistent."""


@final
class Extra:
    """The user's `extra` and the modules' extra states, checked and encoded before anything is written."""

    def __init__(self, value: Any, states: Mapping[str, Any] | None = None) -> None:
        """`states`: of the modules, by their names in torch's state dicts."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.encoded = encode(value, "extra", self._keep)
        self.states = {name: encode(state, name, self._keep) for name, state in (states or {}).items()}
        check_values([self.encoded, self.states], "extra")
        if self.tensors:
            require_safetensors("outsize.save with tensors in extra")

    def _keep(self, path: str, tensor: torch.Tensor) -> str:
        if tensor.dtype is torch.complex128:
            raise TypeError(f"{path} is a tensor of {tensor.dtype}, which safetensors cannot store; convert it first")
        self.tensors[path] = tensor
        return path

    def to_send(self) -> Extra:
        """The same for another process."""
        sent = Extra(None)
        sent.encoded, sent.states = self.encoded, self.states
        sent.tensors = {name: each.detach().cpu() for name, each in self.tensors.items()}
        return sent


@dataclass(frozen=True)
class Own:
    """What one rank brings. `buffers`: on a further rank those that differ from the first one's."""

    buffers: Buffers
    rng: Any
    extra: Extra

    def to_send(self) -> Own:
        """The same for another process."""
        buffers = {name: (value.detach().cpu(), persistent) for name, (value, persistent) in self.buffers.items()}
        return Own(buffers, self.rng, self.extra.to_send())


@dataclass(frozen=True)
class Stored:
    """The same in a manifest."""

    buffers: Mapping[str, BufferRecord]
    rng: Any
    extra: Any
    extra_states: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Of a further rank."""
        buffers = {name: record.to_json() for name, record in self.buffers.items()}
        more = {"extra_states": dict(self.extra_states), "buffers": buffers}
        return {"rng": self.rng, "extra": self.extra, **{key: each for key, each in more.items() if each}}


@final
class ModelFile:
    """The file of what is in memory anyway: buffers, the generators' states, and the optimizer's values of a parameter
    that are too large for the manifest (the factored moments of Adafactor)."""

    def __init__(self, name: str) -> None:
        self._plan = FilePlan(name)
        self._contents: list[tuple[Region, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        return self._plan.nbytes

    def keep(self, tensor: torch.Tensor) -> Region:
        """Where the tensor will lie; it must not change before `write`."""
        self._contents.append((self._plan.reserve(tensor.dtype, tuple(tensor.shape)), tensor))
        return self._contents[-1][0]

    def small_or_kept(self, path: str, tensor: torch.Tensor) -> Any:
        """For `encode`: a small tensor in the manifest itself, any other in the file."""
        if tensor.numel() <= INLINE_NUMEL and not tensor.is_complex():
            return inline(path, tensor)
        return self.keep(tensor).to_json()

    def write(self, folder: Path, files: dict[str, FileRecord]) -> None:
        """Write it, add its record to `files`, and let go of the tensors."""
        with DataWriter(folder / self._plan.name, self.nbytes) as file:
            for region, tensor in self._contents:
                file.write(region.pieces[0].offset, tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
        self._contents.clear()
        files[self._plan.name] = file_record(folder / self._plan.name)


def write_own(folder: Path, own: Own, rank: int, file: ModelFile, files: dict[str, FileRecord]) -> Stored:
    """Write what a rank has of its own into the checkpoint's folder, behind what `file` keeps already, and add the
    records of its files to `files`."""
    buffers = {name: BufferRecord(file.keep(value), persistent) for name, (value, persistent) in own.buffers.items()}
    where = "the states of the random number generators"
    rng = encode(own.rng, where, lambda _, tensor: file.keep(tensor).to_json())
    file.write(folder, files)
    _write_extra(folder / own_name(EXTRA_FILE, rank), own.extra, files)
    return Stored(buffers, rng, own.extra.encoded, own.extra.states)


def _write_extra(path: Path, extra: Extra, files: dict[str, FileRecord]) -> None:
    if not extra.tensors:
        return
    # Copies: the library refuses tensors that share memory.
    tensors = {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in extra.tensors.items()
    }
    path.touch(exist_ok=False)
    mode = path.stat().st_mode  # as the umask has it: the library writes a file that only its owner may read
    with storing(path):
        require_safetensors("outsize.save with tensors in extra").save_file(tensors, path)
    path.chmod(mode)
    sync(path)
    files[path.name] = file_record(path)


def check_buffers(buffers: Mapping[str, tuple[torch.Tensor, bool]]) -> None:
    """Raise `TypeError` for a buffer that no checkpoint can hold."""
    for name, (value, _) in buffers.items():
        if value.layout is not torch.strided or value.dtype not in DTYPE_NAMES:
            raise TypeError(f"buffer {name!r} is a {value.layout} tensor of {value.dtype}; it cannot be saved")
