"""Which parameter a tensor is, or a view of which parameter: by object, by name, and by storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch

from outsize.move.buffer import alone
from outsize.plan.layout import Slot
from outsize.run.buffers import unused
from outsize.run.local import bind, is_distributed, local, shared_as
from outsize.run.unit import Unit

_NAMED = 3
"""How many parameters the message about one view names."""


@final
class Reference(NamedTuple):
    """A view of a gathered parameter, as it was when it was saved for the backward."""

    unit: Unit
    name: str
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    first: int
    """In bytes, from the parameter's first."""
    updates: int
    version: int
    spec: Any
    """How ranks share the view, where it is a DTensor."""


@final
class Parameters:
    """The prepared parameters of a model, and the units that they lie in."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.home = {name: unit for unit in units for name in unit.parameters}
        self._names = {id(param): name for unit in units for name, param in unit.parameters.items()}
        self._by_key = {unit.shard.buffer.key: unit for unit in units}
        self._alone: dict[str, torch.Tensor] = {}  # by parameter. See Note [Storages of their own]
        self._in_parts = any(is_distributed(param) for unit in units for param in unit.parameters.values())

    def owns(self, param: torch.Tensor) -> bool:
        return id(param) in self._names

    def unit_of(self, param: torch.Tensor) -> tuple[Unit, Slot]:
        name = self._names[id(param)]
        unit = self.home[name]
        return unit, unit.shard.slots[name]

    @property
    def released(self) -> bool:
        """Whether the parameters are plain ones by now."""
        return not self._names

    def forget(self) -> None:
        """The parameters are plain ones from now on."""
        self._names.clear()

    def key_of(self, tensor: torch.Tensor) -> int | None:
        """The key of the unit whose buffer the tensor views; None for any other tensor."""
        try:
            key = int((local(tensor) if self._in_parts else tensor).untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, fake, functional
            return None
        return key if key in self._by_key else None

    def unit_with(self, key: int | None) -> Unit:
        assert key is not None
        return self._by_key[key]

    def name_of(self, tensor: torch.Tensor) -> str:
        """The parameter's name; for a view of a gathered buffer the names of the parameters that it overlaps."""
        name = self._names.get(id(tensor))
        key = self.key_of(tensor) if name is None else None
        if key is None:
            return name or "?"
        unit = self._by_key[key]
        if key != unit.shard.buffer.key:
            return self._shown(key)
        start, end = _span(local(tensor))
        spans = {name: _span(local(param)) for name, param in unit.parameters.items()}
        names = [name for name, (first, last) in spans.items() if first < end and start < last]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + more if names else f"a view of unit {unit.name}"

    def reference(self, tensor: torch.Tensor) -> Reference | None:
        """What says which part of a gathered buffer the tensor views, without keeping it; None for any other tensor."""
        view = local(tensor) if self._in_parts else tensor
        try:
            key = view.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):  # as in `key_of`
            return None
        unit = self._by_key.get(key)
        if unit is None:
            return None
        byte = int(view.storage_offset()) * view.itemsize
        first, name = unit.part_at(byte) if key == unit.shard.buffer.key else (0, self._shown(key))
        version = local(unit.parameters[name])._version
        spec = tensor._spec if self._in_parts and is_distributed(tensor) else None  # type: ignore[attr-defined]
        return Reference(unit, name, view.dtype, view.size(), view.stride(), byte - first, unit.updates, version, spec)

    def check(self, reference: Reference) -> None:
        """Raise `RuntimeError` if the unit was updated, or the parameter written to, since the reference was made."""
        if self.released:
            raise RuntimeError(
                "outsize.release was called between the forward and this backward; call backward() before, or run the "
                "forward again"
            )
        name, version = reference.name, local(reference.unit.parameters[reference.name])._version
        if reference.unit.updates != reference.updates:
            what = f"optimizer.step() has updated, or outsize.load replaced, {name!r}"
        elif version != reference.version:
            what = f"{name!r} was written to inside outsize.gathered(..., modify=True)"
        else:
            return
        raise RuntimeError(
            f"one of the variables needed for gradient computation was modified: {what} between the forward and this "
            f"backward; call backward() before, or run the forward again"
        )

    def view(self, reference: Reference) -> torch.Tensor:
        """The view of the gathered parameter that the reference was made of."""
        part = reference.unit.part(reference.name)
        if part.dtype != reference.dtype:
            part = part.view(-1).view(reference.dtype)
        first = part.storage_offset() + reference.first // part.itemsize
        return shared_as(reference.spec, part.as_strided(reference.size, reference.stride, first))

    # Note [Storages of their own]
    # Who writes or compares whole models tells tensors apart by their storages, and takes all views of one storage for
    # tied. So in a `gathered` block each parameter has a storage of exactly its own bytes, over the same memory. What
    # views it is known by that storage, in the block and after it.

    def show_alone(self, unit: Unit) -> None:
        """Give each parameter of the unit a storage of its own."""
        for name, param in unit.parameters.items():
            value = unit.shard.param(name)
            own = self._alone.get(name)
            if own is None or own.data_ptr() != value.data_ptr():
                if own is not None and unused(own):
                    self._by_key.pop(_key(own))
                own = self._alone[name] = alone(value, unit.shard.buffer.flat)
                self._by_key[_key(own)] = unit
            bind(param, own)

    def show_together(self, unit: Unit) -> None:
        """Make each parameter of the unit a view of its gathered buffer again."""
        for name, param in unit.parameters.items():
            bind(param, unit.shard.param(name))

    def _shown(self, key: int) -> str:
        return next(name for name, own in self._alone.items() if _key(own) == key)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes [start, end) of its storage that a strided tensor reaches."""
    with torch._C.DisableTorchFunctionSubclass():
        start = int(tensor.storage_offset())
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + int(reach) + 1 if tensor.numel() else start
        return start * tensor.element_size(), end * tensor.element_size()
