"""What a layer was at the start of its forward, for the forward that runs again in the backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, final

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
# and eval, attributes, hooks, what is frozen, which tensors are the weights (`torch.func.functional_call`). Attributes
# are remembered as they are, not copied: what is changed inside a list or another object is out of sight.

_FORGOTTEN = object()
_PLAIN = (torch.Tensor, bool, int, float, str, type(None))
_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = sorted(
    name for name in _OF_TORCH if "hook" in name and "state_dict" not in name and name != "_is_full_backward_hook"
)


@final
class LayerState:
    """A layer at the start of one forward; as a context, the layer is so again. See Note [Layers that change]."""

    def __init__(self, modules: Sequence[nn.Module], layer: str, copies_large: bool) -> None:
        """`modules`: the layer, then all modules inside; `layer`: its name, for errors."""
        self._buffers = _Buffers(modules, layer, copies_large)
        self._attributes = _Attributes(modules)

    def settle(self) -> bool:
        """The forward is over: drop what is not needed for another. Whether a copy of a large buffer was."""
        self._attributes.settle()
        return self._buffers.settle()

    def __enter__(self) -> None:
        try:
            self._buffers.put_back()
            self._attributes.put_back()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._attributes.put_away()
        finally:
            self._buffers.put_away()


@final
class _Attributes:
    """The attributes of modules, their hooks and which parameters are trained, at the start of one forward."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._attributes = [
            {name: _without_graph(value) for name, value in _own_attributes(module).items()} for module in modules
        ]
        self._weights = [dict(module._parameters) for module in modules]
        self._hooks = _hooks(modules)
        self._trained = _trained(modules[0].parameters())
        self._present: list[dict[str, Any]] = []
        self._present_weights: list[dict[str, Any]] = []
        self._present_hooks: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._present_trained: dict[nn.Parameter, bool] = {}

    def settle(self) -> None:
        """Forget the objects that the forward has replaced: they may hold graphs of forwards before it."""
        for module, earlier in zip(self._modules, self._attributes, strict=True):
            for name, value in earlier.items():
                if type(value) not in _PLAIN and module.__dict__.get(name) is not value:
                    earlier[name] = _FORGOTTEN

    def put_back(self) -> None:
        present = [_own_attributes(module) for module in self._modules]
        self._present_weights = [dict(module._parameters) for module in self._modules]
        self._present_hooks = _hooks(self._modules)
        self._present_trained = _trained(self._trained)
        self._present = present
        for module, now, earlier in zip(self._modules, present, self._attributes, strict=True):
            known = {name: now.get(name) if value is _FORGOTTEN else value for name, value in earlier.items()}
            _change(module.__dict__, now, known)
        self._put_weights(self._weights)
        _put_hooks(self._hooks, self._present_hooks)
        _train(self._trained, self._present_trained)

    def put_away(self) -> None:
        if not self._present:
            return
        for module, present in zip(self._modules, self._present, strict=True):
            _change(module.__dict__, _own_attributes(module), present)
        self._put_weights(self._present_weights)
        _put_hooks(self._present_hooks, _hooks(self._modules))
        _train(self._present_trained, _trained(self._trained))
        self._present, self._present_weights = [], []

    def _put_weights(self, wanted: Sequence[Mapping[str, Any]]) -> None:
        for module, table in zip(self._modules, wanted, strict=True):
            _change(module._parameters, dict(module._parameters), table)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module has beside what torch keeps in every one."""
    return {name: value for name, value in module.__dict__.items() if name not in _OF_TORCH}


def _without_graph(value: Any) -> Any:
    """The value; what an earlier forward gave without the graph behind it, which would hold that forward's state."""
    if type(value) is torch.Tensor and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _hooks(modules: Sequence[nn.Module]) -> dict[int, tuple[Any, dict[Any, Any]]]:
    """(table, what is in it) of the tables of hooks that are not empty, by their ids."""
    tables = (module.__dict__.get(name) for module in modules for name in _HOOKS)
    return {id(table): (table, dict(table)) for table in tables if table}


def _put_hooks(
    wanted: Mapping[int, tuple[Any, dict[Any, Any]]], found: Mapping[int, tuple[Any, dict[Any, Any]]]
) -> None:
    """Fill the tables anew that are not as wanted; their identity is what the handles of hooks know them by."""
    for key, (table, content) in {**found, **wanted}.items():
        content = content if key in wanted else {}
        if key not in found or found[key][1] != content:
            table.clear()
            table.update(content)


def _trained(params: Iterable[nn.Parameter]) -> dict[nn.Parameter, bool]:
    with torch._C.DisableTorchFunctionSubclass():
        return {param: param.requires_grad for param in params}


def _train(wanted: Mapping[nn.Parameter, bool], found: Mapping[nn.Parameter, bool]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for param, trained in wanted.items():
            if found[param] != trained:
                param.requires_grad_(trained)


@final
class _Buffers:
    """The buffers of a layer at the start of one forward."""

    def __init__(self, modules: Sequence[nn.Module], layer: str, copies_large: bool) -> None:
        self._modules = modules
        self._layer = layer
        self._tables = [dict(module._buffers) for module in modules]
        self._buffers: dict[int, _Buffer] = {}  # by id: modules may share one
        self._present: list[dict[str, torch.Tensor | None]] = []
        for table in self._tables:
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in self._buffers:
                    self._buffers[id(tensor)] = _Buffer(tensor, name, copies_large)
        self._sharing = _sharing({key: buffer.tensor for key, buffer in self._buffers.items()})

    def settle(self) -> bool:
        """The forward is over: drop the large copies that it made needless. Whether one was needed."""
        large = [buffer for buffer in self._buffers.values() if buffer.large]
        return sum(buffer.settle() for buffer in large) > 0

    def put_back(self) -> None:
        earlier: dict[int, torch.Tensor | None] = {key: each.earlier() for key, each in self._buffers.items()}
        lost = [self._buffers[key].name for key, value in earlier.items() if value is None]
        if lost:
            self._refuse_lost(lost[0])
        for keys in self._sharing:
            if any(earlier[key] is not self._buffers[key].tensor for key in keys):
                _share({key: self._buffers[key].tensor for key in keys}, earlier)
        self._present = [dict(module._buffers) for module in self._modules]
        for module, table in zip(self._modules, self._tables, strict=True):
            wanted = {name: earlier.get(id(tensor)) for name, tensor in table.items()}
            _change(module._buffers, dict(module._buffers), wanted)

    def put_away(self) -> None:
        for module, table in zip(self._modules, self._present, strict=False):  # none, if none was put back
            _change(module._buffers, dict(module._buffers), table)
        self._present = []

    def _refuse_lost(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"buffer {name!r} of layer {self._layer} was written to since the forward that this backward runs again, "
            f"and no copy of so large a buffer was kept, as the forward before had left it alone: pass "
            f'activations="keep"'
        )


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


def _share(tensors: Mapping[int, torch.Tensor], values: dict[int, torch.Tensor | None]) -> None:
    """Make the values of these keys lie in new memory as the tensors do in theirs."""
    starts = {key: tensor.storage_offset() * tensor.element_size() for key, tensor in tensors.items()}
    base = min(starts.values()) // LARGEST_ELEMENT * LARGEST_ELEMENT
    memory = torch.empty(0, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    for key, tensor in tensors.items():
        value = values[key]
        assert value is not None
        first = (starts[key] - base) // tensor.element_size()
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(memory.untyped_storage(), first, tensor.size(), tensor.stride())  # grows it as needed
        values[key] = view.copy_(value)


def _change(table: dict[str, Any], present: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Give a table, of which `present` is a part, the entries `wanted` in its place; touch no more than that takes."""
    for name in present.keys() - wanted.keys():
        del table[name]
    for name, value in wanted.items():
        if name not in present or present[name] is not value:
            table[name] = value


def version_of(tensor: torch.Tensor) -> int:
    """Counts the writes to a tensor, where torch does."""
    return 0 if tensor.is_inference() else tensor._version


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except NotImplementedError:  # sparse, or 4 bits: taken for changed, so that the recomputation gets the copy
        return False
