"""The order in which units are used: learnt from the uses themselves, never configured.

    schedule = Schedule()
    for batch in loader:
        schedule.begin("train")           # a top-level forward starts
        for unit in (0, 1, 2, 1, 0):      # forward, then backward
            schedule.use(unit)            # True from the second pass on
            schedule.upcoming(2)          # what to fetch meanwhile
        schedule.step()                   # the pass is over

A prediction is advice. Any sequence of calls is accepted, and a wrong prediction costs its user a wait, nothing else.

Note [Following an order]
    An order is the sequence of uses in one pass. The schedule follows one remembered order and expects its next use.
    When another unit comes instead, the place to go on from is looked for where it is most likely, first:
    1. an order that begins with all of this pass so far (a branch taken before);
    2. a place with the same last three uses (a loop run more or less often, a branch inside a branch);
    3. the place that was left at the last surprise (units were inserted);
    4. a place with the same last two uses;
    5. a little further on in the order being followed (units were skipped).
    If none fits, the surprise is taken for one inserted unit and the same use is expected again. A second surprise in
    a row means that the order is unknown: nothing is expected until one of the first four fits again.

Note [What follows an order]
    An order is followed by itself until another one has come after it twice in a row. One evaluation after a thousand
    training passes does not change what is expected after a training pass; a strict alternation is soon learnt.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

NEVER: Final = 1 << 62
"""The distance to a use that is not foreseen: further than any that is."""

MAX_USES: Final = 1 << 16
"""Uses recorded as one order. A longer pass is cut here, so memory stays bounded when a pass never ends."""

_CONTEXT_USES: Final = 3
_SKIPPED_USES: Final = 4  # More are found again by their context, one use later.
_PLACES_TRIED: Final = 4  # On each side; a unit used thousands of times in one pass must not make a search long.


@dataclass(eq=False, slots=True)
class _Order:
    """The uses of one pass; no unit twice in a row, never empty."""

    kind: str
    uses: list[int]
    places: dict[int, list[int]] = field(default_factory=dict)  # unit -> ascending positions in `uses`
    _after: "_Order | None" = None
    _after_times: int = 0

    def __post_init__(self) -> None:
        for position, unit in enumerate(self.uses):
            self.places.setdefault(unit, []).append(position)

    def expected_after(self) -> "_Order":
        """The order that usually follows. See Note [What follows an order]."""
        return self._after if self._after is not None and self._after_times >= 2 else self

    def was_followed_by(self, order: "_Order") -> None:
        self._after_times = self._after_times + 1 if order is self._after else 1
        self._after = order

    def unlink(self, forgotten: "_Order") -> None:
        if self._after is forgotten or self is forgotten:
            self._after, self._after_times = None, 0

    def next_position(self, unit: int, start: int) -> int | None:
        places = self.places.get(unit, [])
        index = bisect_left(places, start)
        return places[index] if index < len(places) else None

    def positions_near(self, unit: int, position: int) -> list[int]:
        places = self.places.get(unit, [])
        index = bisect_left(places, position)
        return places[max(0, index - _PLACES_TRIED) : index + _PLACES_TRIED]

    def agreement(self, position: int, context: "deque[int]") -> int:
        """How many of the last uses in `context` are those that end at `position`."""
        count = 0
        while count < min(len(context), position + 1) and self.uses[position - count] == context[-1 - count]:
            count += 1
        return count


class _Place(NamedTuple):
    """A use in an order. `position` may be one past the end: then the first use of what follows is meant."""

    order: _Order
    position: int

    @property
    def unit(self) -> int:
        return self.order.uses[self.position]

    def next(self) -> "_Place":
        return _Place(self.order, self.position + 1)


class Schedule:
    """Learns the orders in which units are used and predicts the next uses.

    A pass is one top-level forward and its backward, if there is one. `right` and `wrong` count the uses that were
    predicted and those that came instead of another one; a use for which nothing was predicted is in neither.

    Time: O(1) amortised for `begin`, `use` and `step`, with `remembered` as a constant.
    Memory: O(remembered * MAX_USES).
    """

    def __init__(self, remembered: int = 8) -> None:
        if remembered < 1:
            raise ValueError(f"a schedule must remember at least 1 order, not {remembered}")
        self.right = 0
        self.wrong = 0
        self._remembered = remembered
        self._orders: list[_Order] = []  # Least recently seen first.
        self._last: _Order | None = None  # The order of the pass before this one.
        self._kind = ""  # Uses outside a pass are an order of this kind.
        self._recorded: list[int] = []
        self._cut: _Order | None = None  # This pass's latest piece, once it has outgrown MAX_USES.
        self._context: deque[int] = deque(maxlen=_CONTEXT_USES)  # The last uses; the last one is the current unit.
        self._candidates: list[_Order] = []  # The orders that begin with everything in this pass so far.
        self._ahead: _Place | None = None  # What is expected next, if anything.
        self._left: _Place | None = None  # What was expected at the first surprise since the last right prediction.

    def begin(self, kind: str) -> None:
        """Start a pass. `kind` tells passes apart before their first use, e.g. "train" and "eval"."""
        self._end_pass()
        self._kind = kind
        likely = [] if self._last is None else [self._last.expected_after()]
        recent = self._orders[::-1]
        self._expect_start(next((order for order in likely + recent if order.kind == kind), next(iter(recent), None)))

    def step(self) -> None:
        """End the pass, as the optimizer stepped: the order that usually follows is expected from its first use on."""
        self._end_pass()
        self._kind = ""
        self._expect_start(None if self._last is None else self._last.expected_after())

    def use(self, unit: int) -> bool:
        """Record that `unit` is used now; return whether it had been predicted as the next one.

        Repeats in a row are one use and never a surprise.
        """
        if self._context and unit == self._context[-1]:
            return True
        expected = self._expected()
        self._record(unit)
        if expected is not None and expected.unit == unit:
            self.right += 1
            self._ahead, self._left = expected.next(), None
            return True
        if expected is not None:
            self.wrong += 1
        self._find_place(unit, expected)
        return False

    def upcoming(self, k: int) -> list[int]:
        """The next `k` distinct units expected after the current one, soonest first; fewer if no more are foreseen."""
        units: dict[int, None] = {}
        current = self._context[-1] if self._context else None
        for order, start, _ in self._stretches():
            for position in range(start, len(order.uses)):
                if len(units) >= k:
                    return list(units)
                if order.uses[position] != current:
                    units[order.uses[position]] = None
        return list(units)

    def next_use(self, unit: int) -> int:
        """Uses until `unit` is expected again: 1 if it is next, `NEVER` if it is not foreseen."""
        for order, start, uses_before in self._stretches():
            position = order.next_position(unit, start)
            if position is not None:
                return uses_before + position - start + 1
        return NEVER

    def _stretches(self) -> Iterator[tuple[_Order, int, int]]:
        """What is expected: the rest of this order, then whole ones, each once.

        Yields (order, first position in it, uses expected before that).
        """
        if self._ahead is None:
            return
        order, start = self._ahead
        uses_before = 0
        whole: list[_Order] = []
        while order not in whole:
            yield order, start, uses_before
            if start == 0:
                whole.append(order)
            uses_before += len(order.uses) - start
            order, start = order.expected_after(), 0

    def _expected(self) -> _Place | None:
        current = self._context[-1] if self._context else None
        for order, start, _ in self._stretches():
            # Two are enough: only where one order follows another can the first be the current unit.
            for position in range(start, min(start + 2, len(order.uses))):
                if order.uses[position] != current:
                    return _Place(order, position)
        return None

    def _find_place(self, unit: int, expected: _Place | None) -> None:
        """Go on from where `unit` fits best. See Note [Following an order]."""
        found = (
            self._same_beginning()
            or self._same_context(3)
            or self._back_where_left(unit)
            or self._same_context(2)
            or self._after_a_skip(unit, expected)
        )
        first_surprise = expected is not None and self._left is None
        if found is not None:
            self._ahead = found.next()
        else:
            self._ahead = expected if first_surprise else None
        if first_surprise:
            self._left = expected

    def _same_beginning(self) -> _Place | None:
        # max() takes the first of equals, and the most recent one is to win.
        order = max(reversed(self._candidates), key=lambda order: order.kind == self._kind, default=None)
        return None if order is None else _Place(order, len(self._recorded) - 1)

    def _same_context(self, uses: int) -> _Place | None:
        """The place that ends in the last `uses` uses: nearest to where we are, in the likeliest order."""
        best: tuple[tuple[bool, bool, int], _Place] | None = None
        for order in reversed(self._orders):
            followed = self._ahead is not None and order is self._ahead.order
            here = self._ahead.position if self._ahead is not None and followed else len(self._recorded) - 1
            for position in order.positions_near(self._context[-1], here):
                if order.agreement(position, self._context) >= uses:
                    rank = (followed, order.kind == self._kind, -abs(position - here))
                    if best is None or rank > best[0]:
                        best = rank, _Place(order, position)
        return None if best is None else best[1]

    def _back_where_left(self, unit: int) -> _Place | None:
        return self._left if self._left is not None and self._left.unit == unit else None

    def _after_a_skip(self, unit: int, expected: _Place | None) -> _Place | None:
        if expected is None:
            return None
        position = expected.order.next_position(unit, expected.position)
        if position is None or position - expected.position > _SKIPPED_USES:
            return None
        return _Place(expected.order, position)

    def _expect_start(self, order: _Order | None) -> None:
        self._ahead = None if order is None else _Place(order, 0)
        self._left = None
        self._context.clear()
        self._candidates = list(self._orders)

    def _record(self, unit: int) -> None:
        index = len(self._recorded)
        self._candidates = [o for o in self._candidates if index < len(o.uses) and o.uses[index] == unit]
        self._recorded.append(unit)
        self._context.append(unit)
        if len(self._recorded) >= MAX_USES:
            self._cut_pass()

    def _cut_pass(self) -> None:
        """Remember a piece of a pass that does not end, in place of the one before: no pass crowds out the others."""
        piece_before = self._cut
        self._cut = self._remember()
        if piece_before is not None and piece_before is not self._cut and piece_before in self._orders:
            self._forget(piece_before)

    def _end_pass(self) -> None:
        # What is left of a pass that was cut is a tail; its last whole piece says more.
        if self._recorded and self._cut is None:
            self._remember()
        self._recorded, self._cut = [], None

    def _remember(self) -> _Order:
        """Make what was recorded the most recently seen order, and start recording anew."""
        same = (order for order in self._orders if order.kind == self._kind and order.uses == self._recorded)
        order = next(same, None)
        if order is None:
            order = _Order(self._kind, self._recorded)
        else:
            self._orders.remove(order)
        self._orders.append(order)
        if len(self._orders) > self._remembered:
            self._forget_one()
        if self._last is not None:
            self._last.was_followed_by(order)
        self._last, self._recorded = order, []
        return order

    def _forget_one(self) -> None:
        """Forget the oldest order of the kind that has most.

        Training orders that are new in every pass must not push out the one for evaluation.
        """
        count = Counter(order.kind for order in self._orders)
        most = max(count.values())
        self._forget(next(order for order in self._orders if count[order.kind] == most))

    def _forget(self, forgotten: _Order) -> None:
        for order in self._orders:
            order.unlink(forgotten)
        self._orders.remove(forgotten)
        if self._last is forgotten:
            self._last = None
