"""Segments of layers in turn: only the first of k layers keeps its input (Chen et al. 2016, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from outsize.run.saved import Hooks, top_hooks

# Note [A segment is a chain of calls]
# The user's forward calls layers one by one, so no call is a segment. A call inside a segment saves its result like
# anything else that it saves under its checkpoint: nothing is kept, and asking for it runs the call again. The next
# call keeps a link to that result in place of its input. So its backward runs the calls of the segment again, first to
# last, and all that they save stays for their own backward: no layer runs a third time.


@final
@dataclass(frozen=True, eq=False)
class Link:
    """The result of a call, which is there again when the call has run again."""

    position: int  # of the call in its segment
    version: int  # of the result: the writes that it has seen
    unpack: Callable[[Any], torch.Tensor]
    packed: Any

    def hooks(self, result: torch.Tensor) -> Hooks:
        """Saved-tensor hooks that keep the link in place of the result."""
        form = _form(result)
        return lambda each: self if _form(each) == form else each, _unpack


def _unpack(packed: Any) -> torch.Tensor:
    return packed.unpack(packed.packed) if isinstance(packed, Link) else packed


def _form(tensor: Any) -> object:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return None
    where = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *where, tensor.dtype, tensor.shape, tensor.stride()


@final
class Segments:
    """The links of one model. See Note [A segment is a chain of calls]."""

    def __init__(self) -> None:
        self.length = 1  # calls of a segment
        self._links = WeakTensorKeyDictionary()  # by result, as long as somebody has it

    def find(self, inputs: Iterable[torch.Tensor]) -> tuple[tuple[torch.Tensor, Link] | None, int]:
        """(which of the inputs of a call is the result of the call before it in its segment, and its link; the place of
        the call in its segment, -1 where it is the last)."""
        for each in inputs if self.length > 1 else ():
            link = self._links.pop(each, None)
            if link is not None and link.version == each._version and link.position + 1 < self.length:
                position = link.position + 1
                return (each, link), position if position + 1 < self.length else -1
        return None, 0 if self.length > 1 else -1

    def save(self, result: Any, position: int | None) -> None:
        """Under the checkpoint of a call, at the end of its forward. `position` in its segment: in the first one."""
        results = [each for each in tree_flatten(result)[0] if _form(each) is not None and each.requires_grad]
        hooks = top_hooks()
        if not results or hooks is None:
            return
        pack, unpack = hooks
        packed = pack(results[0].detach())
        if position is not None:
            self._links[results[0]] = Link(position, results[0]._version, unpack, packed)
