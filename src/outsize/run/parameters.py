"""Which parameter a tensor is, or a view of which parameter: by object, by name, and by storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch

from outsize.move.buffer import alone
from outsize.planning.layout import Slot, extent
from outsize.run.buffers import unused
from outsize.run.local import bind, is_distributed, local, shared_as
from outsize.run.unit import Unit

_plain: Any = torch.Tensor
grad_of: Callable[[torch.Tensor], torch.Tensor | None] = _plain.grad.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _plain.grad.__set__
requires_grad: Callable[[torch.Tensor], bool] = _plain.requires_grad.__get__
"""`param.grad` and its like, past the parameter's class: quick inside `DisableTorchFunctionSubclass`."""

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
        self._places = {
            id(param): (unit, unit.shard.slots[name]) for unit in units for name, param in unit.parameters.items()
        }
        self._by_key: dict[int, tuple[Unit, str | None]] = {unit.shard.buffer.key: (unit, None) for unit in units}
        """The unit of each storage, and the parameter where the storage is that of one alone."""
        self._alone: dict[str, torch.Tensor] = {}  # by parameter. See Note [Storages of their own]
        self._in_parts = any(is_distributed(param) for unit in units for param in unit.parameters.values())

    def owns(self, param: torch.Tensor) -> bool:
        return id(param) in self._places

    def unit_of(self, param: torch.Tensor) -> tuple[Unit, Slot]:
        return self._places[id(param)]

    @property
    def released(self) -> bool:
        """Whether the parameters are plain ones by now."""
        return not self._places

    def forget(self) -> None:
        """The parameters are plain ones from now on."""
        self._places.clear()

    def key_of(self, tensor: torch.Tensor) -> int | None:
        """The key of the unit whose buffer the tensor views; None for any other tensor."""
        try:
            key = int((local(tensor) if self._in_parts else tensor).untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, fake, functional
            return None
        return key if key in self._by_key else None

    def unit_with(self, key: int | None) -> Unit:
        assert key is not None
        return self._by_key[key][0]

    def name_of(self, tensor: torch.Tensor) -> str:
        """The parameter's name; for a view of a gathered buffer the names of the parameters that it overlaps."""
        if self.owns(tensor):
            return self.unit_of(tensor)[1].name
        key = self.key_of(tensor)
        if key is None:
            return "?"
        unit, shown = self._by_key[key]
        if shown is not None:
            return shown
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
        known = self._by_key.get(key)
        if known is None:
            return None
        unit, shown = known
        byte = int(view.storage_offset()) * view.itemsize
        first, name = unit.part_at(byte) if shown is None else (0, shown)
        version = self._version(unit, name)
        spec = tensor._spec if self._in_parts and is_distributed(tensor) else None  # type: ignore[attr-defined]
        return Reference(unit, name, view.dtype, view.size(), view.stride(), byte - first, unit.updates, version, spec)

    def check(self, reference: Reference) -> None:
        """Raise `RuntimeError` if the unit was updated, or the parameter written to, since the reference was made."""
        unit, name = reference.unit, reference.name
        if unit.updates == reference.updates and self._version(unit, name) == reference.version and not self.released:
            return
        if self.released:
            raise RuntimeError(
                "outsize.release was called between the forward and this backward; call backward() before, or run the "
                "forward again"
            )
        if unit.updates != reference.updates:
            update = "optimizer.step(), or the backward before with update='backward',"
            what = f"{update} has updated {name!r}, or outsize.load has replaced it,"
        else:
            what = f"{name!r} was written to inside outsize.gathered(..., modify=True)"
        raise RuntimeError(
            f"one of the variables needed for gradient computation was modified: {what} between the forward and this "
            f"backward; call backward() before, or run the forward again"
        )

    def _version(self, unit: Unit, name: str) -> int:
        param = unit.parameters[name]
        return (local(param) if self._in_parts else param)._version

    def view(self, reference: Reference) -> torch.Tensor:
        """The view of the gathered parameter that the reference was made of."""
        part = reference.unit.parts[reference.name]
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
                self._by_key[_key(own)] = unit, name
            bind(param, own)

    def show_together(self, unit: Unit) -> None:
        """Make each parameter of the unit a view of its gathered buffer again."""
        for name, param in unit.parameters.items():
            bind(param, unit.shard.param(name))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes [start, end) of its storage that a strided tensor reaches."""
    with torch._C.DisableTorchFunctionSubclass():
        start = int(tensor.storage_offset())
        end = start + extent(tensor.shape, tensor.stride())
        return start * tensor.element_size(), end * tensor.element_size()
