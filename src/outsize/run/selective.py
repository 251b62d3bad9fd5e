"""`activations="selective"`: results of products are kept, cheap operations run again.

Korthikanti et al. 2022, section 5.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from outsize.run.costs import Measurement
from outsize.run.layer_state import version_of
from outsize.run.parts import Random

_KEPT_OPERATIONS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "_scaled_mm"),
        *("convolution", "_convolution", "convolution_overrideable"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward"),
        "_efficient_attention_forward",
    )
    if hasattr(torch.ops.aten, name)
)
"""What "selective" keeps: products of matrices, convolutions and attention, which take the time of a layer."""


def _packet(func: Any) -> Any:
    """The operation with all of its overloads; of one that takes functions, nothing."""
    return getattr(func, "overloadpacket", None)


def _random_of(values: Any) -> Random:
    """The random numbers there. Other modes do not see it."""
    with _disable_current_modes():
        return Random(values)


_UNTRACKED = frozenset(
    getattr(torch.ops.aten, name) for name in ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")
)
"""Their results share memory with what they view, but count the writes to it for themselves."""


@final
class _Result:
    """What an operation gave, and whether it is that still."""

    def __init__(self, value: Any, random: Random | None) -> None:
        """`random`: the random numbers after an operation that drew some."""
        self._random = random
        leaves, self._spec = tree_flatten(value)
        self._leaves = [_alias(each) if isinstance(each, torch.Tensor) else each for each in leaves]
        self._watched: list[tuple[torch.Tensor, int]] = []
        self.watch(self._leaves)

    def watch(self, values: Iterable[Any]) -> None:
        """Whoever writes to these writes to the result."""
        self._watched += [(_alias(each), version_of(each)) for each in values if isinstance(each, torch.Tensor)]

    @property
    def storages(self) -> list[int]:
        return [each.untyped_storage()._cdata for each in self._leaves if isinstance(each, torch.Tensor)]

    @property
    def changed(self) -> bool:
        return any(version_of(each) != version for each, version in self._watched)

    def value(self) -> Any:
        if self._random is not None:  # what draws next draws what it drew
            self._random.restore()
        return tree_unflatten(
            [_alias(each) if isinstance(each, torch.Tensor) else each for each in self._leaves], self._spec
        )


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a graph. It counts writes with the tensor, which it would not by itself in here."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


Kept = dict[Any, list[_Result]]
"""By operation, in order."""


class _Keeping(TorchDispatchMode):
    """The first forward: it keeps some results."""

    supports_higher_order_operators = True

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept
        self._by_storage: dict[int, _Result] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._current_graph_task_id() != -1:  # of a backward inside, or of the layer that runs again in it
            return func(*args, **(kwargs or {}))
        is_kept = _packet(func) in _KEPT_OPERATIONS
        before = _random_of(args) if is_kept and torch.Tag.nondeterministic_seeded in func.tags else None
        value = func(*args, **(kwargs or {}))
        if is_kept:
            with _disable_current_modes():
                is_drawn = before is not None and before.is_drawn()
            result = _Result(value, _random_of(args) if is_drawn else None)
            self._kept.setdefault(func, []).append(result)
            self._by_storage |= dict.fromkeys(result.storages, result)
        elif _packet(func) in _UNTRACKED:
            viewed = self._by_storage.get(args[0].untyped_storage()._cdata)
            if viewed is not None:
                viewed.watch(tree_flatten(value)[0])
        return value


class Counting(TorchDispatchMode):
    """What "selective" would keep: its bytes, and the seconds that it takes."""

    supports_higher_order_operators = True

    def __init__(self, measurement: Measurement) -> None:
        super().__init__()
        self._measurement = measurement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = partial(func, *args, **(kwargs or {}))
        return self._measurement.operation(run, _packet(func) in _KEPT_OPERATIONS)


class _Using(TorchDispatchMode):
    """A later forward: it takes what the first one kept. What was written to in place since is computed again."""

    supports_higher_order_operators = True

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept

    def __enter__(self) -> Any:
        self._used: dict[Any, int] = {}
        self._backward = torch._C._current_graph_task_id()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = self._used.get(func, 0)
        own = torch._C._current_graph_task_id() == self._backward  # and not of a backward inside
        if own and _packet(func) in _KEPT_OPERATIONS and number < len(self._kept.get(func, ())):
            self._used[func] = number + 1
            result = self._kept[func][number]
            if not result.changed:
                return result.value()
        return func(*args, **(kwargs or {}))


Selection = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def selection(mode: str) -> Selection:
    """For the first forward of a checkpoint and for later ones: what the first keeps, these use."""
    if mode != "selective":
        return nullcontext(), nullcontext()
    kept: Kept = {}
    return _Keeping(kept), _Using(kept)
