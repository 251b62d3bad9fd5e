"""What a layer was at the start of its forward, for the forward that runs again in the backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any, final

import torch
from torch import nn

SMALL_BUFFER_BYTES = 64 * 1024
"""Up to here a buffer is copied before each forward; it holds the statistics of 16,384 channels."""

LARGEST_ELEMENT = 16
"""Bytes; what begins at multiples of it is aligned for every dtype."""

# Note [Layers that change]
# A forward that changes buffers, a running mean say, and is run again must find in them what it found first, and leave
# nothing behind. So it remembers each module's table of buffers, and copies of their values. Small ones are always
# copied; of large ones (quantized weights, masks) only the forwards that change them keep a copy, and after a forward
# that left them all as they were none is made. The recomputation runs with these in the tables, then the present ones
# return. Buffers that share memory, a view of another say, share it there too.
# The same goes for what the user's loop changes between forward and backward, and for what the forward counts: train
# and eval, attributes, hooks, what is frozen, which tensors are the weights (`torch.func.functional_call`). An
# attribute that is a dict or a list at the start is such a table, too; one that the forward has only bound may be
# anybody's, and is left alone. All others are remembered as they are, not copied: what is changed inside of another
# object, or of a dict in a dict, is out of sight.

_FORGOTTEN = object()
_VALUES = {bool, int, float, str, type(None)}
_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = sorted(
    name for name in _OF_TORCH if "hook" in name and "state_dict" not in name and name != "_is_full_backward_hook"
)
_TABLES = ("_parameters", "_buffers", *_HOOKS)

Contents = dict[int, tuple[Any, dict[Any, Any]]]
"""By its id each table of some modules that is not empty, and what is in it; in a list, by place. Handles of hooks know
their tables by identity, so these are filled anew and never replaced."""


@final
class LayerState:
    """A layer at the start of one forward; as a context, the layer is so again. See Note [Layers that change]."""

    def __init__(self, modules: Sequence[nn.Module], layer: str, copies_large: bool) -> None:
        """`modules`: the layer, then all modules inside; `layer`: its name, for errors."""
        self._modules = modules
        self._layer = layer
        self._earlier = _contents(modules)
        attributes = {id(module.__dict__): self._earlier[id(module.__dict__)] for module in modules}
        self._held = _held(attributes)
        self._earlier |= self._held
        self._attributes = {
            key: each
            for key, each in (attributes | self._held).items()
            if not {*map(type, each[1].values())} <= _VALUES  # which hold no graphs
        }
        for _, of_table in self._attributes.values():
            of_table.update({name: _without_graph(value) for name, value in of_table.items()})
        self._trained = _trained(modules[0].parameters())
        self._buffers: dict[int, _Buffer] = {}  # by id: modules may share one
        for module in modules:
            for name, tensor in module._buffers.items():
                if tensor is not None and id(tensor) not in self._buffers:
                    self._buffers[id(tensor)] = _Buffer(tensor, name, copies_large)
        self._sharing = _sharing({key: buffer.tensor for key, buffer in self._buffers.items()})
        self._present: tuple[Contents, dict[nn.Parameter, bool]] | None = None

    def settle(self) -> bool:
        """The forward is over: drop the large copies that it made needless, and objects that it has replaced, which may
        hold graphs of forwards before it. Whether a copy of a large buffer was needed."""
        for table, attributes in self._attributes.values():
            now = _inside(table)[1] if type(table) is list else table
            for name, value in attributes.items():
                if type(value) not in (torch.Tensor, *_VALUES) and now.get(name) is not value:
                    attributes[name] = _FORGOTTEN
        return sum(buffer.settle() for buffer in self._buffers.values() if buffer.large) > 0

    def __enter__(self) -> None:
        present = self._contents_now(), _trained(self._trained)
        wanted = self._as_before(present[0])
        self._present = present
        try:
            _put(wanted, present[0])
            _train(self._trained)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._present is not None:
            contents, trained = self._present
            self._present = None
            _put(contents, self._contents_now())
            _train(trained)

    def _contents_now(self) -> Contents:
        return _contents(self._modules) | {key: _inside(table) for key, (table, _) in self._held.items()}

    def _as_before(self, present: Contents) -> Contents:
        """What is in the tables for another forward, which may change it if the first one did."""
        wanted, values = dict(self._earlier), self._buffer_values()
        for key, (table, attributes) in self._attributes.items():
            now = present[key][1]
            known = {name: now.get(name) if value is _FORGOTTEN else value for name, value in attributes.items()}
            wanted[key] = table, known
        for module in self._modules:
            table, buffers = wanted.get(id(module._buffers), (module._buffers, {}))
            wanted[id(table)] = table, {name: values.get(id(tensor)) for name, tensor in buffers.items()}
        return wanted

    def _buffer_values(self) -> dict[int, torch.Tensor]:
        values: dict[int, torch.Tensor] = {}
        for key, buffer in self._buffers.items():
            value = buffer.earlier()
            if value is None:
                raise RuntimeError(
                    f"buffer {buffer.name!r} of layer {self._layer} was written to since the forward that this "
                    f"backward runs again, and no copy of so large a buffer was kept, as the forward before had left "
                    f'it alone: pass activations="keep"'
                )
            values[key] = value
        for keys in self._sharing:
            tensors = {key: self._buffers[key].tensor for key in keys}
            if any(values[key] is not tensor for key, tensor in tensors.items()):
                _share(tensors, values)
        return values


def _contents(modules: Iterable[nn.Module]) -> Contents:
    """Of attributes those that torch does not keep in every module."""
    found: Contents = {}
    for module in modules:
        of_module = module.__dict__
        found[id(of_module)] = of_module, {name: value for name, value in of_module.items() if name not in _OF_TORCH}
        for table in map(of_module.__getitem__, _TABLES):
            if table:
                found[id(table)] = table, dict(table)
    return found


def _held(attributes: Contents) -> Contents:
    """The dicts and lists among attributes."""
    tables = [value for _, values in attributes.values() for value in values.values() if type(value) in (dict, list)]
    return {id(table): _inside(table) for table in tables}


def _inside(table: Any) -> tuple[Any, dict[Any, Any]]:
    return table, dict(enumerate(table) if type(table) is list else table)


def _put(wanted: Contents, present: Contents) -> None:
    """Give the tables what is `wanted` in place of what is `present`; touch no more than that takes."""
    for key, (table, _) in {**present, **wanted}.items():
        old, new = present.get(key, (table, {}))[1], wanted.get(key, (table, {}))[1]
        alike = list(old) == list(new)  # hooks run in the order of their table
        if alike and all(map(is_, old.values(), new.values())):
            continue
        if type(table) is list:
            table[:] = new.values()
            continue
        if not alike:
            for name in old:
                del table[name]
            old = {}
        for name, value in new.items():
            if name not in old or old[name] is not value:
                table[name] = value


def _without_graph(value: Any) -> Any:
    """The value; what an earlier forward gave without the graph behind it, which would hold that forward's state."""
    if type(value) is torch.Tensor and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _trained(params: Iterable[nn.Parameter]) -> dict[nn.Parameter, bool]:
    with torch._C.DisableTorchFunctionSubclass():
        return {param: param.requires_grad for param in params}


def _train(wanted: Mapping[nn.Parameter, bool]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for param, trained in wanted.items():
            if param.requires_grad != trained:
                param.requires_grad_(trained)


@final
class _Buffer:
    """One buffer at the start of a forward."""

    def __init__(self, tensor: torch.Tensor, name: str, copies_large: bool) -> None:
        self.name = name
        self.large = tensor.numel() * tensor.element_size() > SMALL_BUFFER_BYTES
        self.tensor = tensor
        self._version = version_of(tensor)
        self._copy = tensor.clone() if copies_large or not self.large else None

    def settle(self) -> bool:
        """Whether it has been written to since, also through `.data` if there is a copy; if not, the copy goes."""
        changed = version_of(self.tensor) != self._version
        changed = changed or (self._copy is not None and not _equal(self.tensor, self._copy))
        if not changed:
            self._copy = None
        return changed

    def earlier(self) -> torch.Tensor | None:
        """What a recomputation finds, and may change if the forward did; None: the values are lost."""
        if self._copy is not None:
            return self._copy.clone()
        return self.tensor if version_of(self.tensor) == self._version else None


def _sharing(tensors: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """The keys of tensors that lie in one memory."""
    found: dict[int, list[int]] = {}
    for key, tensor in tensors.items():
        if tensor.layout is torch.strided and type(tensor) is torch.Tensor and tensor.numel():
            found.setdefault(tensor.untyped_storage()._cdata, []).append(key)
    return [keys for keys in found.values() if len(keys) > 1]


def _share(tensors: Mapping[int, torch.Tensor], values: dict[int, torch.Tensor]) -> None:
    """Make the values of these keys lie in new memory as the tensors do in theirs."""
    starts = {key: tensor.storage_offset() * tensor.element_size() for key, tensor in tensors.items()}
    base = min(starts.values()) // LARGEST_ELEMENT * LARGEST_ELEMENT
    memory = torch.empty(0, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    for key, tensor in tensors.items():
        first = (starts[key] - base) // tensor.element_size()
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(memory.untyped_storage(), first, tensor.size(), tensor.stride())  # grows it as needed
        values[key] = view.copy_(values[key])


def version_of(tensor: torch.Tensor) -> int:
    """Counts the writes to a tensor, where torch does."""
    return 0 if tensor.is_inference() else tensor._version


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except NotImplementedError:  # sparse, or 4 bits: taken for changed, so that the recomputation gets the copy
        return False
