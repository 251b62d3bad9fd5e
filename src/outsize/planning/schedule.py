"""The order in which units are used: learnt from the uses themselves, never configured.

    schedule = Schedule()
    for batch in loader:
        schedule.begin("train")           # a top-level forward starts
        for unit in (0, 1, 2, 1, 0):      # forward, then backward
            schedule.use(unit)            # True from the second time on
            schedule.upcoming(2)          # what to fetch meanwhile
        schedule.step()                   # the order is complete

An order is what training used from one step of the optimizer to the next, or what one evaluation used. The last order
of the same kind predicts the next. A prediction is advice: any sequence of calls is accepted, and a wrong prediction
costs a wait and nothing else. After a surprise the schedule goes on from the nearest place where the order has the
unit, or from the place that it left, if that comes next.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

NEVER: Final = 1 << 62
"""The distance to a use that is not foreseen: further than any that is."""

MAX_USES: Final = 1 << 16
"""Uses recorded as one order. A longer pass is cut here, so memory stays bounded when a pass never ends."""


@dataclass(eq=False)
class _Kind:
    """Passes of one kind: the order that is expected, where in it the next use is, and what was used so far."""

    order: list[int] = field(default_factory=list)  # no unit twice in a row
    places: dict[int, list[int]] = field(default_factory=dict)  # unit -> ascending positions in `order`
    ahead: int = 0
    recorded: list[int] = field(default_factory=list)
    left: int | None = None
    """What was expected when the last use that was expected was over."""

    def expect(self, order: list[int]) -> None:
        self.order, self.places = order, {}
        for position, unit in enumerate(order):
            self.places.setdefault(unit, []).append(position)

    def begin_anew(self) -> None:
        """What was recorded is expected again, from its first use on."""
        if self.recorded:
            self.expect(self.recorded)
            self.recorded = []
        self.ahead, self.left = 0, None

    def after_surprise(self, unit: int, expected: int) -> int:
        """Where to go on when `unit` came in place of what was expected."""
        if self.left is not None and self.order[self.left] == unit:  # what came between was inserted
            return self.left + 1
        self.left = expected if self.left is None else self.left
        places = self.places.get(unit, [])
        index = bisect_left(places, expected)
        around = places[max(index - 1, 0) : index + 1]
        nearest = min(around, key=lambda place: (abs(place - expected), -place), default=expected - 1)
        return nearest + 1


class Schedule:
    """Learns the orders in which units are used and predicts the next uses.

    `right` and `wrong` count the uses that were predicted and those that came instead of another one; a use for which
    nothing was predicted is in neither.

    Time: O(log MAX_USES) for `use`, O(order) once an order. Memory: O(MAX_USES) for each kind of pass.
    """

    def __init__(self) -> None:
        self.right = 0
        self.wrong = 0
        self._kinds: dict[str, _Kind] = {}
        self._now = self._kinds[""] = _Kind()  # uses outside a pass are a kind of their own
        self._current: int | None = None

    def begin(self, kind: str) -> None:
        """A top-level forward starts. `kind` is "train" or "eval"; an order of "eval" is over with the next `begin`."""
        evaluation = self._kinds.get("eval")
        if evaluation is not None:
            evaluation.begin_anew()
        known = [each.order for each in self._kinds.values() if each.order]
        self._now = self._kinds.setdefault(kind, _Kind())
        if not self._now.order:  # a first accumulation predicts the second, a training pass the first evaluation
            self._now.expect([*self._now.recorded] or next(iter(known), []))
            self._now.ahead = 0
        self._current = None

    def step(self) -> None:
        """The optimizer stepped: all uses since the last step are one order, expected from its first use on."""
        for each in self._kinds.values():
            each.begin_anew()
        self._now = self._kinds.get("train", self._kinds[""])
        self._current = None

    def use(self, unit: int) -> bool:
        """Record that `unit` is used now; return whether it had been predicted as the next one.

        Repeats in a row are one use and never a surprise.
        """
        if unit == self._current:
            return True
        now, expected = self._now, self._expected()
        now.recorded.append(unit)
        self._current = unit
        was_expected = False
        if expected is not None:
            was_expected = now.order[expected] == unit
            self.right += was_expected
            self.wrong += not was_expected
            now.ahead = expected + 1 if was_expected else now.after_surprise(unit, expected)
            if was_expected:
                now.left = None
        if len(now.recorded) >= MAX_USES:
            now.begin_anew()
        return was_expected

    def upcoming(self, k: int) -> list[int]:
        """The next `k` distinct units expected after the current one, soonest first; fewer if no more are foreseen."""
        order, position, current = self._now.order, self._now.ahead, self._current
        units: dict[int, None] = {}
        for _ in order:
            if len(units) >= k:
                break
            unit = order[position] if position < len(order) else order[position - len(order)]
            if unit != current:
                units[unit] = None
            position += 1
        return list(units)

    def next_use(self, unit: int) -> int:
        """Uses until `unit` is expected again: 1 if it is next, `NEVER` if it is not foreseen."""
        places = self._now.places.get(unit)
        if not places:
            return NEVER
        position = self._now.ahead
        index = bisect_left(places, position)
        ahead = places[index] if index < len(places) else len(self._now.order) + places[0]  # over the end of the pass
        return ahead - position + 1

    def _expected(self) -> int | None:
        """The place in the order that comes next; that of the current unit is no use."""
        order = self._now.order
        for distance in range(len(order)):
            position = (self._now.ahead + distance) % len(order)
            if order[position] != self._current:
                return position
        return None
