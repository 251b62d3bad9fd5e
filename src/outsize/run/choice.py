"""`activations="auto"`: which calls of layers keep what they save for the backward, and which compute it again.

An exact choice over layers by measured bytes and seconds, under the bytes that the budget has spare. The problem is
that of Checkmate (Jain et al. 2020), with a layer's call as the thing that is chosen.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import final

import torch

from outsize.move.activations import ActivationStore
from outsize.move.comm import Ranks
from outsize.move.memory import Ledger
from outsize.move.storages import Storages
from outsize.planning.choice import Chosen, cheapest, segment_length
from outsize.run.costs import MOST_FORMS, Cost, Figures, Key, Lease, Shapes
from outsize.run.segments import Segments

# Note [Measured, then chosen]
# A call of which nothing is known computes everything again, and counts what it would have kept. If the calls of all
# layers fit, all are kept from the next pass on. If not, the next pass also counts and times what "selective" would
# keep. Where all that a layer saves would have left before the forward of the next one is over, one more pass moves it
# out, and measures what of that the computation has not hidden. Then those modes are chosen that cost the fewest
# seconds. What was measured holds for calls alike: the same things are trained, and no input is larger in any
# dimension. Whatever was chosen, a call keeps nothing where the bytes that are held leave no room for it: two graphs
# may be alive at once.

# Note [Ranks choose alike]
# Ranks tell each other in the exchange of a step whether any has measured something new. If so, they exchange all that
# they have measured of the last pass, and choose by the most bytes and seconds of any rank. So all choose the same.
# Where they ran other layers, or one still has a graph, all compute again until the next step. A call with inputs that
# are larger than known computes again on its own rank alone. Nothing of ours meets other ranks there: whatever is kept
# is spare only where all units fit, so a backward gathers the same either way. A layer that speaks to other ranks
# itself always computes again.

ACCOUNT = "device/activations"

MOVING = 2
"""Calls whose saved tensors are on their way at once, out or back, beside those of the one that runs."""


@final
class Choice:
    """Chooses for each call of a layer; what the calls keep stays within `spare` bytes."""

    def __init__(
        self,
        spare: int,
        ledger: Ledger,
        device: torch.device,
        store: ActivationStore | None = None,
        in_turn: bool = True,
        recomputes: bool = False,
        most_open: int = 1,
    ) -> None:
        """`store`: where "offload" moves all that a layer saves. `in_turn`: it chooses between passes; several ranks
        choose in a step, by `choose_alike`. `recomputes`: all layers do; only the length of segments is chosen.
        `most_open`: layers whose parameters may be there at once."""
        self.spare = spare
        self.store = store
        self.segments = Segments()
        self._recomputes, self._most_open = recomputes, most_open
        self._inputs = Storages()  # of the calls since no graph was alive
        self._moving = 0  # bytes that are on their way to the store at once, or back
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
                self._choose(self._measured(self._pass))
            elif self.outdated and len(self._passes) < MOST_FORMS:
                self._passes[tuple(self._pass)] = None
            self._pass.clear()
            self._inputs = Storages()
        cost = self._cost(known, layer, form, tuple(tuple(each.shape) for each in inputs))
        before = self._inputs.nbytes
        for each in inputs:
            self._inputs.add(each)
        if self._inputs.nbytes - before > cost.inputs:
            cost.inputs, self.outdated = self._inputs.nbytes - before, True
        moving = max(self._moving, MOVING * cost.moved if cost.mode == "offload" else 0)
        fits = self._held + cost.bytes_of(cost.mode) + moving <= self.spare and not self._apart
        if cost.mode == "offload" and self.store is not None:
            fits = fits and self.store.has_room(MOVING * cost.moved)
            self._moving = moving if fits else self._moving
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
        costs = self._measured(chain(*self._passes))
        passes = dict.fromkeys(
            tuple(dict.fromkeys(cost.key for cost in each if cost in costs)) for each in self._passes
        )
        self._passes.clear()
        told = None if self._alive else (list(passes), _compiles(), _most((cost.key, cost.figures) for cost in costs))
        for group in groups:
            told = _of_all(group.collect(told, "activations"))
        self._apart = self.outdated = told is None
        if told is None:
            self.segments.length = 1
            return
        most = {key: Cost(key[0], None, ()) for key in told[2]}
        for key, cost in most.items():
            cost.learn(told[2][key])
        for each in told[0]:
            self._choose([most[key] for key in each])
        for cost in costs:
            cost.mode, cost.counts_products = most[cost.key].mode, most[cost.key].counts_products

    def now(self) -> float:
        """Seconds, when the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def _is_short(self, costs: Iterable[Cost]) -> bool:
        return sum(cost.options().get("keep", (0, 0))[0] for cost in costs) > self.spare > 0

    def _measured(self, calls: Iterable[Cost]) -> list[Cost]:
        """What is known of these calls, each once; of a transfer that was not tried, whether it would be hidden."""
        costs = [cost for cost in dict.fromkeys(calls) if cost.kept >= 0]
        _take_least(costs)
        if self.store is not None and (not self._in_turn or self._is_short(costs)):  # on another rank, maybe
            for cost in costs:
                if cost.untried and MOVING * cost.moved <= self.spare:
                    hidden = cost.moved * self.store.seconds_a_byte <= cost.again
                    cost.moving = 0.0 if hidden else math.inf
        return costs

    def _choose(self, costs: Sequence[Cost]) -> None:
        """For the calls of a pass."""
        self.outdated = False
        inputs = sum(cost.most_alive * cost.inputs for cost in costs)
        kept = max((cost.kept for cost in costs), default=0)
        calls = sum(cost.most_alive for cost in costs)
        self.segments.length = segment_length(calls, inputs, kept, self.spare, self._most_open) if calls else 1
        if self._recomputes:
            self.chosen = Chosen(
                dict.fromkeys((cost.layer for cost in costs), "recompute"), segment=self.segments.length
            )
            return
        free = self.spare if self.segments.length == 1 else 0  # the inputs take it
        is_short = self._is_short(costs)
        if is_short and not _compiles():
            for cost in costs:
                cost.counts_products = cost.products < 0 and not cost.speaks
        options = [cost.options() for cost in costs]
        seconds, chosen = _chosen(options, free, moves=False)
        self._moving = 0
        moving = MOVING * max(
            (cost.moved for cost, each in zip(costs, options, strict=True) if "offload" in each), default=0
        )
        if 0 < moving <= free:
            less, moved = _chosen(options, free - moving, moves=True)
            chosen, self._moving = (moved, moving) if less < seconds else (chosen, 0)
        for cost, each, index in zip(costs, options, chosen, strict=True):
            cost.mode = "recompute" if cost.counts_products else list(each)[index]
        if is_short and free and not any(cost.counts_products for cost in costs):
            for cost in costs:
                if cost.untried and cost.moving == 0.0 and MOVING * cost.moved <= self.spare and not cost.speaks:
                    cost.mode, self._moving = "offload", max(self._moving, MOVING * cost.moved)
        taken = [each.get(cost.mode, (0, 0.0)) for cost, each in zip(costs, options, strict=True)]
        known = set.intersection(*(set(each) for each in options)) if options else set()
        self.chosen = Chosen(
            {cost.layer: cost.mode for cost in costs},
            sum(nbytes for nbytes, _ in taken),
            sum(seconds for _, seconds in taken),
            self.spare,
            {mode: sum(each[mode][0] for each in options) for mode in sorted(known)},
            self.segments.length,
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


def _chosen(options: Sequence[Mapping[str, tuple[int, float]]], spare: int, moves: bool) -> tuple[float, list[int]]:
    """The fewest seconds, and of each call the number of its option; without "offload" unless it `moves`."""
    left_out = spare + 1, 0.0
    lists = [[left_out if name == "offload" and not moves else of for name, of in each.items()] for each in options]
    chosen = cheapest(lists, spare)
    return sum(each[index][1] for each, index in zip(lists, chosen, strict=True)), chosen


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
        tried = [cost for cost in group if not cost.untried]
        mean = sum(cost.moving for cost in tried) / max(len(tried), 1)  # one waits for what another one moves
        for cost in tried:
            cost.moving = mean


def _compiles() -> bool:
    """Whether something was compiled in this process: inside "selective" it would run uncompiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0
