"""Loading a folder of `torch.distributed.checkpoint` into a live layout: by name, in full precision, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from outsize.checkpoint.arrays import SLAB_BYTES, States, copy_in, place_weights
from outsize.checkpoint.differences import Live
from outsize.formats.dcp_folder import DcpFolder
from outsize.formats.dcp_names import StoredModel, StoredOptimizer, find_model, find_optimizer
from outsize.move.memory import HostBuffer
from outsize.move.shard import SlotState, UnitShard
from outsize.plan.layout import Slot


def open_dcp(
    folder: Path, live: Live, label: str, aliases: Mapping[str, str] | None = None, strict: bool = True
) -> DcpCheckpoint:
    """Open a folder for the live model, and its optimizer if `live` has one; every check is made here.

    Args:
        live: where its `buffers` are None, the optimizer alone is loaded.
        aliases: the further names of tied parameters, each with the first.
        strict: with False, what only one side has is passed over.

    Raises `FileNotFoundError` where there is no complete checkpoint, `ValueError` for a damaged one and for one that
    does not match, with what is missing, unexpected and different.
    """
    stored = DcpFolder(folder)
    try:
        model, optimizer = StoredModel(), None
        if live.buffers is not None:
            model = find_model(stored, live, aliases or {}, label, strict)
        if live.optimizer is not None:
            optimizer = find_optimizer(stored, live, model, aliases or {}, label, strict)
        states = optimizer.array_keys() if optimizer is not None else []
        stored.check([*model.parameters.values(), *model.buffers.values(), *states])
    except BaseException:
        stored.close()
        raise
    return DcpCheckpoint(stored, model, optimizer)


@final
class DcpCheckpoint:
    """A folder whose names, shapes and files were checked. Close it after use.

    Memory: three slabs at most, and the buffer at hand.

    `hyper` has the options of each parameter group that the folder tells, `steps` the largest count of steps,
    `passed_over` what only one side has: "missing parameters" and the like, with the names.
    """

    def __init__(self, folder: DcpFolder, model: StoredModel, optimizer: StoredOptimizer | None) -> None:
        self._folder = folder
        self._model = model
        self._optimizer = optimizer
        self.hyper: list[dict[str, Any]] = [dict(each) for each in optimizer.hyper] if optimizer is not None else []
        self.steps = optimizer.steps() if optimizer is not None else 0
        self.passed_over = model.passed_over

    def close(self) -> None:
        self._folder.close()

    def buffer(self, name: str) -> torch.Tensor | None:
        """The values of one of the live model's persistent buffers in the folder's dtype; None if it has none."""
        key = self._model.buffers.get(name)
        return None if key is None else self._folder.tensor(key)

    def load_weights(self, shard: UnitShard) -> None:
        """Place the unit's parameters, and the rest of their masters; one that was passed over keeps its values."""
        keys = self._model.parameters
        place_weights(shard, keys, lambda name, *of: self._folder.piece(keys[name], *of))

    def stated(self, shard: UnitShard) -> set[str]:
        """Those of the unit's parameters that have optimizer state here."""
        assert self._optimizer is not None, "opened without an optimizer"
        return {name for name in shard.slots if name in self._optimizer.states}

    def load_state(self, shard: UnitShard) -> None:
        """Place the unit's optimizer arrays and scalars.

        There is room for those that have any. A parameter that had none has none again; one that was passed over keeps
        what it has.
        """
        assert self._optimizer is not None, "opened without an optimizer"
        slab = HostBuffer(SLAB_BYTES)
        states = self._optimizer.states
        filled = self.stated(shard)
        missing = set(self._model.passed_over.get("missing parameters", ())) - filled
        known = set(shard.slots) - missing
        stale = {name for name in known if name in shard.slot_states and shard.slot_states[name].initialised}
        for array in shard.arrays.values():
            if array.public:

                def source(slot: Slot, start: int, end: int, name: str = array.name) -> torch.Tensor:
                    key = states[slot.name].arrays.get(name) if slot.name in filled else None
                    if key is None:
                        return torch.zeros(end - start, device="cpu")
                    return self._folder.piece(key, start, end)

                wanted = dict.fromkeys(filled | stale)
                copy_in(States(shard, array), wanted, slab, source, keep=len(known) < len(shard.slots))
        for name in known:
            shard.slot_states.pop(name, None)
        for name in filled:
            shard.slot_states[name] = SlotState(dict(states[name].scalars), initialised=True)
