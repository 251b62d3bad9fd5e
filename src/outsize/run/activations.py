"""Activation checkpointing of a unit (Chen et al. 2016): keep its inputs, recompute the rest in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import checkpoint

_top_hooks: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


SMALL_BUFFER_BYTES = 64 * 1024
"""Up to here a buffer is copied before each forward; it holds the statistics of 16,384 channels."""

LARGEST_ELEMENT = 16
"""Bytes; what begins at multiples of it is aligned for every dtype."""

# Note [Layers that change]
# A forward that changes buffers, a running mean say, and is run again must find in them what it found first, and leave
# nothing behind. So it remembers each module's table of buffers, and copies of their values. Small ones are always
# copied; of large ones (quantized weights, masks) only the forwards that change them keep a copy, and after a forward
# that left them all as they were none is made. The recomputation runs with these in the tables, then the present ones
# return. Buffers that share memory, a view of another say, share it there too. An input that the layer changes is the
# caller's and cannot be put back, so that is refused. What a layer keeps elsewhere, in attributes of Python, is out of
# sight.


def recomputed(module: nn.Module, name: str) -> Callable[..., Any]:
    """`module.forward`, run under non-reentrant checkpointing whenever gradients are recorded.

    The random state is kept, so dropout repeats, and so are the buffers. Inside a region that the user already
    checkpoints, and while such a region is recomputed, the forward runs as it is: once is enough. `RuntimeError` where
    the layer changes its input in place. See Note [Layers that change].
    """
    forward = module.forward
    layer = _Layer(module, name, forward)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or in_backward() or _inside_checkpoint():
            return forward(*args, **kwargs)
        if any(_filled_cache(value) for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)  # earlier tokens are in it: recomputing would append them twice
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
        return layer.checkpointed(args, kwargs)

    return run


@final
class _Layer:
    """What is recomputed as a whole, and what its last forward told about its buffers."""

    def __init__(self, module: nn.Module, name: str, forward: Callable[..., Any]) -> None:
        self._modules = list(module.modules())
        self._name = f"{name!r} ({type(module).__name__})"
        self._forward = forward
        self._copies_large = True

    def checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = _tensors((*args, *kwargs.values()))
        versions = [_version(each) for each in inputs]
        buffers = _Buffers(self._modules, self._name, self._copies_large)
        contexts = (nullcontext(), buffers)
        forward = partial(self._forward, **kwargs)
        result = checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts)
        if versions != [_version(each) for each in inputs] and self._has_backward(inputs):
            raise RuntimeError(
                f"layer {self._name} changes its input in place, so it cannot be recomputed, which "
                f'activations="recompute" asks for and "auto", the default, chooses for such layers: pass '
                f'activations="keep", or make the operation not in-place'
            )
        self._copies_large = buffers.settle()
        return result

    def _has_backward(self, inputs: list[torch.Tensor]) -> bool:
        return any(each.requires_grad for each in (*inputs, *self._modules[0].parameters()))


@final
class _Buffers:
    """The buffers of a layer at the start of one forward; as a context, they take the place of the present ones."""

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

    def __enter__(self) -> None:
        earlier: dict[int, torch.Tensor | None] = {key: each.earlier() for key, each in self._buffers.items()}
        lost = [self._buffers[key].name for key, value in earlier.items() if value is None]
        if lost:
            self._refuse_lost(lost[0])
        for keys in self._sharing:
            if any(earlier[key] is not self._buffers[key].tensor for key in keys):
                _share({key: self._buffers[key].tensor for key in keys}, earlier)
        self._present = [dict(module._buffers) for module in self._modules]
        for module, table in zip(self._modules, self._tables, strict=True):
            _put(module._buffers, {name: earlier.get(id(tensor)) for name, tensor in table.items()})

    def __exit__(self, *_: object) -> None:
        for module, table in zip(self._modules, self._present, strict=True):
            _put(module._buffers, table)
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
        self._version = _version(tensor)
        self._copy = tensor.clone() if copies_large or not self.large else None

    def settle(self) -> bool:
        """Whether it has been written to since, also through `.data` if there is a copy; if not, the copy goes."""
        changed = _version(self.tensor) != self._version
        changed = changed or (self._copy is not None and not _equal(self.tensor, self._copy))
        if not changed:
            self._copy = None
        return changed

    def earlier(self) -> torch.Tensor | None:
        """What a recomputation finds, and may change if the forward did; None: the values are lost."""
        if self._copy is not None:
            return self._copy.clone()
        return self.tensor if _version(self.tensor) == self._version else None


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


def _put(table: dict[str, torch.Tensor | None], values: Mapping[str, torch.Tensor | None]) -> None:
    """Make a module's table of buffers hold these, and touch no more of it than that takes."""
    for name in set(table.keys()) - set(values):
        del table[name]
    for name, value in values.items():
        if name not in table or table[name] is not value:
            table[name] = value


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except NotImplementedError:  # sparse, or 4 bits: taken for changed, so that the recomputation gets the copy
        return False


def _tensors(values: Iterable[Any], nested: bool = True) -> list[torch.Tensor]:
    """The tensors among the arguments of a forward, and in the lists, tuples and mappings among them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif nested and isinstance(value, (list, tuple, Mapping)):
            found += _tensors(value.values() if isinstance(value, Mapping) else value, nested=False)
    return found


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def _inside_checkpoint() -> bool:
    hooks = _top_hooks(True) if _top_hooks is not None else None
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _is_cache(value: object) -> bool:
    """A key-value cache of transformers, recognised by what it offers."""
    return not isinstance(value, (torch.Tensor, nn.Module)) and callable(getattr(value, "get_seq_length", None))


def _filled_cache(value: Any) -> bool:
    return _is_cache(value) and int(value.get_seq_length()) > 0


def can_recompute(module: nn.Module) -> bool:
    """Whether a second forward changes nothing: no running statistics, no power iteration, anywhere in the module."""
    return not any(_changes_itself(each) for each in module.modules())


def _changes_itself(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._NormBase):  # batch and instance norms
        return module.track_running_stats
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)
