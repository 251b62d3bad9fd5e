"""Reading a checkpoint: everything is checked first, then arrays go by parameter name into any live layout."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.arrays import SLAB_BYTES, States, Weights, copy_in
from outsize.checkpoint.files import DataReader, naming
from outsize.checkpoint.folder import locate
from outsize.checkpoint.library import require_safetensors
from outsize.checkpoint.manifest import MANIFEST_NAME, Manifest, ParameterRecord, Region
from outsize.checkpoint.rng import check_rng
from outsize.checkpoint.values import decode, from_inline
from outsize.checkpoint.writer import EXTRA_FILE
from outsize.move.memory import HostBuffer
from outsize.move.shard import DTYPES, MASTER, MASTER_BYTES, MASTER_DTYPE, SlotState, UnitShard
from outsize.plan.layout import Slot


@dataclass(frozen=True)
class Masters:
    """The two directions between an fp32 master and a 16-bit weight with what completes it; both are exact."""

    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    split: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@final
class Checkpoint:
    """A checkpoint opened for reading, its values decoded. Close it after use.

    Raises `FileNotFoundError` where there is none, `ValueError` that names the file for a damaged one.
    """

    def __init__(self, path: Path) -> None:
        folder = locate(path)
        if not folder.exists():
            raise FileNotFoundError(errno.ENOENT, "there is no checkpoint", str(path))
        file = folder / MANIFEST_NAME
        if not file.is_file():
            raise FileNotFoundError(
                errno.ENOENT,
                "not a complete checkpoint: the manifest is written last and is missing; load another one",
                str(file),
            )
        try:
            with naming(file, "reading"):
                self.manifest = Manifest.from_text(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is damaged: {error}") from error
        except ValueError as error:
            raise ValueError(f"{file} {error}") from error
        self.data = DataReader(folder, self.manifest)
        try:
            self._decode(folder)
        except BaseException as error:
            self.data.close()
            if not isinstance(error, Exception) or isinstance(error, (OSError, ImportError)):
                raise
            raise ValueError(f"{folder} is damaged: {type(error).__name__}: {error}") from error

    def _decode(self, folder: Path) -> None:
        manifest = self.manifest
        tensors: dict[str, torch.Tensor] = {}
        if EXTRA_FILE in manifest.files:
            tensors = require_safetensors("outsize.load of an extra with tensors").load_file(folder / EXTRA_FILE)
        self.extra = decode(manifest.extra, tensors.__getitem__)
        self.rng: dict[str, Any] = decode(manifest.rng, self._tensor)
        check_rng(self.rng)
        groups = manifest.optimizer.groups if manifest.optimizer is not None else ()
        self.hyper: list[dict[str, Any]] = [decode(group.hyper, from_inline) for group in groups]
        self.scalars: dict[str, dict[str, Any]] = {
            name: dict(decode(record.scalars, from_inline))
            for name, record in manifest.parameters.items()
            if record.scalars is not None
        }

    def _tensor(self, value: Any) -> torch.Tensor:
        region = Region.from_json(value)
        self.manifest.check(region)
        return self.data.read(region)

    def close(self) -> None:
        self.data.close()

    def load_weights(self, shard: UnitShard, masters: Masters) -> None:
        """Place the unit's parameters, and the rest of their masters; memory: one slab and one piece."""
        slab = HostBuffer(SLAB_BYTES)
        master = shard.arrays.get(MASTER)
        weights = _Weights(self.data, self.manifest.parameters, masters, master is not None)
        copy_in(Weights(shard), shard.slots, slab, weights.weight)
        if master is not None:
            halves = {name: slot for name, slot in shard.slots.items() if slot.dtype in MASTER_BYTES}
            copy_in(States(shard, master), halves, slab, weights.master)

    def load_state(self, shard: UnitShard) -> None:
        """Place the unit's optimizer arrays and scalars; a parameter that had none has none again."""
        slab = HostBuffer(SLAB_BYTES)
        records = self.manifest.parameters
        filled = {name for name in shard.slots if name in self.scalars}
        stale = {name for name, state in shard.slot_states.items() if state.initialised}
        for array in shard.arrays.values():
            if array.public:
                wanted = dict.fromkeys(filled | stale)

                def source(slot: Slot, start: int, end: int, key: str = array.name) -> torch.Tensor:
                    if slot.name not in filled:
                        return torch.zeros(end - start)
                    return self.data.read(records[slot.name].state[key], start, end)

                copy_in(States(shard, array), wanted, slab, source)
        shard.slot_states.clear()
        for name in filled:
            shard.slot_states[name] = SlotState(self.scalars[name], initialised=True)


class _Weights:
    """Pieces of parameters and of what completes their masters in the live dtype, whatever the checkpoint has."""

    def __init__(self, data: DataReader, records: Mapping[str, ParameterRecord], masters: Masters, exact: bool) -> None:
        self._data = data
        self._records = records
        self._masters = masters
        self._exact = exact  # whether a 16-bit weight has a master here

    def weight(self, slot: Slot, start: int, end: int) -> torch.Tensor:
        record, live = self._records[slot.name], DTYPES[slot.dtype]
        if record.dtype is live:
            return self._data.read(record.weight, start, end)
        exact = self._exact_values(record, start, end)
        return self._split(exact, slot)[0] if self._exact and slot.dtype in MASTER_BYTES else exact.to(live)

    def master(self, slot: Slot, start: int, end: int) -> torch.Tensor:
        record = self._records[slot.name]
        if record.dtype is DTYPES[slot.dtype] and record.master is not None:
            return self._data.read(record.master, start, end)
        return self._split(self._exact_values(record, start, end), slot)[1]

    def _exact_values(self, record: ParameterRecord, start: int, end: int) -> torch.Tensor:
        """The fp32 master where there is one, else the weight in fp32 or wider."""
        stored = self._data.read(record.weight, start, end)
        if record.master is not None:
            return self._masters.join(stored, self._data.read(record.master, start, end))
        return stored if stored.dtype is torch.float64 else stored.float()

    def _split(self, exact: torch.Tensor, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.empty_like(exact, dtype=DTYPES[slot.dtype])
        rest = torch.empty_like(exact, dtype=MASTER_DTYPE[slot.dtype])
        self._masters.split(exact.float(), weight, rest)
        return weight, rest
