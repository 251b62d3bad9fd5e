"""What one call of a layer keeps and takes, by each way to run it: bytes and seconds, measured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final
from zlib import crc32

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from outsize.move.comm import collectives
from outsize.move.storages import Storages
from outsize.run.packing import packed
from outsize.run.saved import Hooks, refusing_writes

if TYPE_CHECKING:
    from outsize.run.choice import Choice

DISPATCH_SECONDS = 5e-6
"""What "selective" takes for each operation of the first forward, which it sees one by one."""

PAYS = 0.95
"""Of what is kept, what packing must leave at most."""

MOST_FORMS = 8
"""Of one layer's calls, which are remembered."""

Shapes = tuple[tuple[int, ...], ...]
Key = tuple[str, int]
"""Of a layer's calls of one form, the same on every rank."""
Figures = tuple[float, ...]
FIGURES = (
    "kept",
    "moved",
    "packed",
    "products",
    "packing",
    "again",
    "cheap",
    "moving",
    "untried",
    "speaks",
    "inputs",
    "most_alive",
)


@final
@dataclass(eq=False)
class Cost:
    """What calls of one form keep, in bytes, and take, in seconds; the bytes are -1 as long as they are unknown."""

    layer: str
    form: object
    shapes: Shapes  # of the inputs: none is larger
    mode: str = "recompute"
    kept: int = -1  # by "keep", beside inputs and parameters
    moved: int = 0  # that, and the inputs
    packed: int = -1  # by "pack": masks and indices in fewer bytes
    products: int = -1  # by "selective"
    packing: float = 0.0  # of "pack": there and back
    again: float = math.inf  # of "recompute": its second forward
    cheap: float = math.inf  # of "selective": what both of its forwards take beside one plain one
    moving: float = math.inf  # of "offload": what of it computation does not hide; before a try, 0 where all is hidden
    untried: bool = True
    counts_products: bool = False  # in the next call
    speaks: bool = False  # to other ranks
    inputs: int = 0  # bytes of inputs that no call before it has
    alive: int = 0  # calls whose graph is there
    most_alive: int = 0

    @property
    def key(self) -> Key:
        return self.layer, crc32(repr(self.form).encode())

    @property
    def figures(self) -> Figures:
        """For other ranks: the more, the worse."""
        return tuple(math.inf if getattr(self, name) == -1 else getattr(self, name) for name in FIGURES)

    def learn(self, figures: Figures) -> None:
        for name, value in zip(FIGURES, figures, strict=True):
            setattr(self, name, -1 if name == "products" and value == math.inf else value)

    def covers(self, form: object, shapes: Shapes) -> bool:
        """Whether a call takes no more than these."""
        return self.form == form and len(shapes) == len(self.shapes) and all(map(_is_within, shapes, self.shapes))

    def bytes_of(self, mode: str) -> int:
        return max({"keep": self.kept, "pack": self.packed, "selective": self.products}.get(mode, 0), 0)

    def options(self) -> dict[str, tuple[int, float]]:
        """(bytes, seconds) of each mode, for all of its calls that are alive at once."""
        seconds = {"recompute": self.again} if self.speaks else {"keep": 0.0, "recompute": self.again}
        if "keep" in seconds and self.packed < PAYS * self.kept:
            seconds["pack"] = self.packing
        if "keep" in seconds and self.products >= 0:
            seconds["selective"] = self.cheap
        if "keep" in seconds and not self.untried:
            seconds["offload"] = self.moving
        return {mode: (self.most_alive * self.bytes_of(mode), self.most_alive * each) for mode, each in seconds.items()}


def _is_within(shape: tuple[int, ...], most: tuple[int, ...]) -> bool:
    return len(shape) == len(most) and all(one <= other for one, other in zip(shape, most, strict=True))


@final
class Lease:
    """What one call may keep. Whatever it saves holds the lease, and the bytes are free again when that is gone."""

    def __init__(self, cost: Cost, mode: str, given_back: deque[tuple[Cost, int]]) -> None:
        self.cost, self.mode = cost, mode
        self.nbytes = cost.bytes_of(mode)
        self.counts_saved = cost.kept < 0
        self.counts_products = cost.counts_products
        self._given_back = given_back

    def __del__(self) -> None:
        self._given_back.append((self.cost, self.nbytes))  # the collector may run inside of anything: no locks here

    @property
    def measures(self) -> bool:
        return self.counts_saved or self.counts_products


@final
class Measurement:
    """Of the forward of one call, and of what "selective" would keep of it where that is asked for."""

    def __init__(
        self, choice: Choice, lease: Lease, inputs: Sequence[torch.Tensor], there_anyway: Iterable[torch.Tensor]
    ) -> None:
        self._saved = Storages([*inputs, *there_anyway])
        self._inputs = sum(each.nbytes for each in inputs)
        self._choice, self._lease = choice, lease
        self._packed, self._packing = 0, 0.0
        self._products, self._product_seconds, self._operations = Storages(), 0.0, 0

    @property
    def counts_products(self) -> bool:
        return self._lease.counts_products

    def save(self, tensor: torch.Tensor) -> None:
        """An operation of the first forward saves this."""
        if isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter):
            return
        before = self._saved.nbytes
        if self._saved.add(tensor) and self._lease.counts_saved:
            small, seconds = self._timed(lambda: packed(tensor))
            if small is None:
                self._packed += self._saved.nbytes - before
            else:
                self._packed += small.values.untyped_storage().nbytes()
                self._packing += seconds + self._timed(lambda: small.tensor)[1]

    def forward(self, run: Callable[[], Any]) -> Any:
        cost, before = self._lease.cost, collectives()
        result, seconds = self._timed(run)
        cost.speaks = cost.speaks or collectives() != before
        if self._lease.counts_saved:
            cost.kept, cost.packed = self._saved.nbytes, self._packed
            cost.moved = cost.kept + self._inputs
            cost.again, cost.packing = max(seconds - self._packing, 0.0), self._packing
        if self.counts_products:
            cost.products = self._products.nbytes
            cost.cheap = max(seconds - self._product_seconds, 0.0) + self._operations * DISPATCH_SECONDS
            cost.counts_products = False
        self._choice.outdated = True
        return result

    def operation(self, run: Callable[[], Any], is_product: bool) -> Any:
        """`is_product`: "selective" keeps the result."""
        self._operations += 1
        if not is_product:
            return run()
        result, seconds = self._timed(run)
        self._product_seconds += seconds
        for each in tree_flatten(result)[0]:
            if isinstance(each, torch.Tensor):
                self._products.add(each)
        return result

    def again(self, run: Callable[[], Any]) -> Any:
        """The second forward. It may end by an exception: all that the backward needs is there."""
        began = self._choice.now()
        try:
            return run()
        finally:
            self._lease.cost.again = min(self._lease.cost.again, self._choice.now() - began)

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        began = self._choice.now()
        result = run()
        return result, self._choice.now() - began


@final
class Moving:
    """Saved-tensor hooks of one call, all of whose saved tensors lie elsewhere until the backward: nothing runs again.

    vDNN: Rhu et al. 2016, section 3.2. What is there anyway stays. The first such call measures what it takes.
    """

    def __init__(self, choice: Choice, lease: Lease, there_anyway: Iterable[torch.Tensor]) -> None:
        assert choice.store is not None
        self._choice, self._cost, self._tries = choice, lease.cost, lease.cost.untried
        self._there = Storages(there_anyway)
        self._began = choice.now() if self._tries else 0.0
        self._call = choice.store.call()

    @property
    def hooks(self) -> Hooks:
        return refusing_writes((self._pack, self._unpack))

    def ends(self) -> None:
        """The forward is over."""
        if self._tries:
            self._cost.moving = max(self._choice.now() - self._began - self._cost.again, 0.0)
            self._cost.untried, self._choice.outdated = False, True

    def _pack(self, tensor: torch.Tensor) -> Any:
        stays = type(tensor) is not torch.Tensor or tensor in self._there
        return tensor if stays else self._call.pack(tensor)

    def _unpack(self, content: Any) -> torch.Tensor:
        if isinstance(content, torch.Tensor) or not self._tries:
            return self._call.unpack(content)
        began = self._choice.now()
        found = self._call.unpack(content)
        self._cost.moving += self._choice.now() - began
        return found
