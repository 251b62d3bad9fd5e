"""`activations="auto"`: which calls of layers keep what they save for the backward, and which compute it again.

An exact choice over layers by measured bytes and seconds, under the bytes that the budget has spare. The problem is
that of Checkmate (Jain et al. 2020), with a layer's call as the thing that is chosen.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final
from zlib import crc32

import torch
from torch.utils._pytree import tree_flatten

from outsize.move.comm import Ranks, collectives
from outsize.move.memory import Ledger
from outsize.plan.choice import Chosen, cheapest
from outsize.run.packing import packed
from outsize.run.storages import Storages

# Note [Measured, then chosen]
# A call of which nothing is known computes everything again, and counts what it would have kept. If the calls of all
# layers fit, all are kept from the next pass on. If not, the next pass also counts and times what "selective" would
# keep, and then those modes are chosen that cost the fewest seconds. What was measured holds for calls alike: the same
# things are trained, and no input is larger in any dimension. Whatever was chosen, a call keeps nothing where the
# bytes that are held leave no room for it: two graphs may be alive at once.

# Note [Ranks choose alike]
# Ranks tell each other in the exchange of a step whether any has measured something new. If so, they exchange all that
# they have measured of the last pass, and choose by the most bytes and seconds of any rank. So all choose the same.
# Where they ran other layers, or one still has a graph, all compute again until the next step. A call with inputs that
# are larger than known computes again on its own rank alone. Nothing of ours meets other ranks there: whatever is kept
# is spare only where all units fit, so a backward gathers the same either way. A layer that speaks to other ranks
# itself always computes again.

ACCOUNT = "device/activations"
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
FIGURES = ("kept", "packed", "products", "packing", "again", "cheap", "speaks", "most_alive")


@final
@dataclass(eq=False)
class Cost:
    """What calls of one form keep, in bytes, and take, in seconds; the bytes are -1 as long as they are unknown."""

    layer: str
    form: object
    shapes: Shapes  # of the inputs: none is larger
    mode: str = "recompute"
    kept: int = -1  # by "keep", beside inputs and parameters
    packed: int = -1  # by "pack": masks and indices in fewer bytes
    products: int = -1  # by "selective"
    packing: float = 0.0  # of "pack": there and back
    again: float = math.inf  # of "recompute": its second forward
    cheap: float = math.inf  # of "selective": what both of its forwards take beside one plain one
    counts_products: bool = False  # in the next call
    speaks: bool = False  # to other ranks
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

    def __init__(self, choice: Choice, lease: Lease, there_anyway: Iterable[torch.Tensor]) -> None:
        self._saved = Storages(there_anyway)
        self._choice, self._lease = choice, lease
        self._packed, self._packing = 0, 0.0
        self._products, self._product_seconds, self._operations = Storages(), 0.0, 0

    @property
    def counts_products(self) -> bool:
        return self._lease.counts_products

    def save(self, tensor: torch.Tensor) -> None:
        """An operation of the first forward saves this."""
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
        began = self._now()
        try:
            return run()
        finally:
            self._lease.cost.again = min(self._lease.cost.again, self._now() - began)

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        began = self._now()
        result = run()
        return result, self._now() - began

    def _now(self) -> float:
        if self._choice.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


@final
class Choice:
    """Chooses for each call of a layer; what the calls keep stays within `spare` bytes."""

    def __init__(self, spare: int, ledger: Ledger, device: torch.device, in_turn: bool = True) -> None:
        """`in_turn`: it chooses between two passes. Several ranks choose in a step instead, by `choose_alike`."""
        self.spare = spare
        self.device = device
        self._in_turn = in_turn
        self._apart = False  # whether the ranks could not choose alike
        self.chosen = Chosen(spare=spare)
        self._ledger = ledger
        self._held = 0
        self._alive = 0
        self._given_back: deque[tuple[Cost, int]] = deque()
        self._pass: dict[Cost, None] = {}  # calls since no graph was alive
        self._passes: dict[tuple[Cost, ...], None] = {}  # for which the ranks have still to choose
        self.outdated = False

    def lease(self, known: list[Cost], layer: str, form: object, inputs: Sequence[torch.Tensor]) -> Lease:
        """How this call of a layer is run. `known`: what its calls cost; the list is kept up to date."""
        self.settle()
        if not self._alive:
            if self.outdated and self._in_turn:
                costs = [cost for cost in self._pass if cost.kept >= 0]
                _take_least(costs)
                self._choose(costs)
            elif self.outdated and len(self._passes) < MOST_FORMS:
                self._passes[tuple(self._pass)] = None
            self._pass.clear()
        cost = self._cost(known, layer, form, tuple(tuple(each.shape) for each in inputs))
        fits = self._held + cost.bytes_of(cost.mode) <= self.spare and not self._apart
        lease = Lease(cost, cost.mode if fits else "recompute", self._given_back)
        self._held += lease.nbytes
        self._alive += 1
        cost.alive += 1
        if cost.alive > cost.most_alive:
            cost.most_alive, self.outdated = cost.alive, True
        self._pass[cost] = None
        if lease.nbytes:
            self._ledger.add(ACCOUNT, lease.nbytes)
        return lease

    def settle(self) -> None:
        """Take note of what was given back."""
        while self._given_back:
            cost, nbytes = self._given_back.popleft()
            self._held -= nbytes
            self._alive -= 1
            cost.alive -= 1
            if nbytes:
                self._ledger.remove(ACCOUNT, nbytes)

    @staticmethod
    def _cost(known: list[Cost], layer: str, form: object, shapes: Shapes) -> Cost:
        found = next((each for each in known if each.covers(form, shapes)), None)
        if found is None:
            found = Cost(layer, form, shapes)
            known[:] = [found, *(each for each in known if not found.covers(each.form, each.shapes))][:MOST_FORMS]
        return found

    def choose_alike(self, groups: Iterable[Ranks]) -> None:
        """Called by all ranks of these groups, in a step. See Note [Ranks choose alike]."""
        self.settle()
        self._passes[tuple(self._pass)] = None
        costs = [cost for cost in dict.fromkeys(chain(*self._passes)) if cost.kept >= 0]
        _take_least(costs)
        passes = dict.fromkeys(
            tuple(dict.fromkeys(cost.key for cost in each if cost in costs)) for each in self._passes
        )
        self._passes.clear()
        told = None if self._alive else (list(passes), _compiles(), _most((cost.key, cost.figures) for cost in costs))
        for group in groups:
            told = _of_all(group.collect(told, "activations"))
        self._apart = self.outdated = told is None
        if told is None:
            return
        most = {key: Cost(key[0], None, ()) for key in told[2]}
        for key, cost in most.items():
            cost.learn(told[2][key])
        for each in told[0]:
            self._choose([most[key] for key in each])
        for cost in costs:
            cost.mode, cost.counts_products = most[cost.key].mode, most[cost.key].counts_products

    def _choose(self, costs: Sequence[Cost]) -> None:
        """For the calls of a pass."""
        self.outdated = False
        if sum(cost.options().get("keep", (0, 0))[0] for cost in costs) > self.spare > 0 and not _compiles():
            for cost in costs:
                cost.counts_products = cost.products < 0 and not cost.speaks
        options = [cost.options() for cost in costs]
        chosen = cheapest([list(each.values()) for each in options], self.spare)
        for cost, each, index in zip(costs, options, chosen, strict=True):
            cost.mode = "recompute" if cost.counts_products else list(each)[index]
        taken = [each[cost.mode] for cost, each in zip(costs, options, strict=True)]
        known = set.intersection(*(set(each) for each in options)) if options else set()
        self.chosen = Chosen(
            {cost.layer: cost.mode for cost in costs},
            sum(nbytes for nbytes, _ in taken),
            sum(seconds for _, seconds in taken),
            self.spare,
            {mode: sum(each[mode][0] for each in options) for mode in sorted(known)},
        )


Told = tuple[list[tuple[Key, ...]], bool, dict[Key, Figures]]
"""The calls of each pass, whether something is compiled, what calls cost."""


def _most(figures: Iterable[tuple[Key, Figures]]) -> dict[Key, Figures]:
    most: dict[Key, Figures] = {}
    for key, each in figures:
        most[key] = tuple(map(max, each, most.get(key, each)))
    return most


def _of_all(told: Sequence[Told | None]) -> Told | None:
    """What holds for all ranks; None where they differ in more than bytes and seconds, or one cannot choose now."""
    first = told[0]
    if first is None or any(each is None or each[:2] != first[:2] for each in told):
        return None
    return *first[:2], _most(chain(*(each[2].items() for each in told if each is not None)))


def _take_least(costs: Iterable[Cost]) -> None:
    """Layers that are alike take the same time; whatever else the machine did only adds to it."""
    alike: dict[object, list[Cost]] = {}
    for cost in costs:
        alike.setdefault((cost.form, cost.shapes), []).append(cost)
    for group in alike.values():
        for name in ("again", "cheap", "packing"):
            least = min(getattr(cost, name) for cost in group)
            for cost in group:
                setattr(cost, name, least)


def _compiles() -> bool:
    """Whether something was compiled in this process: inside "selective" it would run uncompiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0
