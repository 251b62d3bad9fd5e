"""What is in use at once above the user's budget, and the warning about it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from outsize.move.memory import Ledger, bytes_on
from outsize.planning.placement import Budgets, format_at_least
from outsize.planning.sizes import format_bytes

NAMED_UNITS = 4
"""How many units a warning names; it counts the others."""

logger = logging.getLogger("outsize")


@final
class OverBudget:
    """Logs when the budget is exceeded for the first time, and once more with the most that was needed."""

    def __init__(self, budgets: Budgets, ledger: Ledger) -> None:
        self.logged = False
        self.most_needed = 0
        self._budgets = budgets
        self._ledger = ledger
        self._what: str | None = None  # what was in use at the most that was needed, if that is not logged yet

    def note(self, nbytes: int, wanted: str | None, in_use: Callable[[], Sequence[str]]) -> None:
        """What is in use exceeds the capacity by `nbytes` for the unit `wanted`, or for gradients if that is None.

        Nothing, if it is within the user's budget or has been more already. `in_use` gives the names of other units.
        """
        on_cpu = self._budgets.device is None
        needed = nbytes + bytes_on(self._budgets.sharing("device"), self._ledger.now)
        if needed <= max(self._budgets.host if on_cpu else self._budgets.computing[1], self.most_needed):
            return
        what = "gradients" if wanted is None else f"unit {wanted!r}"
        others = in_use()
        before = (
            f"{_listed(others)} in use at once, with {format_bytes(nbytes)} more" if others else format_bytes(nbytes)
        )
        self._what = f"{before} for {what}"
        self.most_needed = needed
        if not self.logged:
            self.log()

    @contextmanager
    def untold(self) -> Iterator[None]:
        """Nothing is logged in the block: it takes what it needs, and no training goes on in it."""
        before = self.most_needed, self._what
        self.most_needed, self._what = sys.maxsize, None
        try:
            yield
        finally:
            self.most_needed, self._what = before

    def log(self) -> None:
        """Log the most that was needed, and the budget that would hold it, unless that was logged before."""
        if self._what is None:
            return
        self.logged = True
        on_cpu = self._budgets.device is None
        field, budget = ("host_memory", self._budgets.host) if on_cpu else self._budgets.computing
        staging = self._ledger.now.get("host/staging", 0) if on_cpu else 0
        logger.warning(
            "%s: that takes %s of %s=%s; going on, above the budget. Raise %s to at least %s, or use fewer of them in "
            "one forward or one outsize.gathered",
            self._what,
            format_bytes(self.most_needed),
            field,
            format_bytes(budget),
            field,
            format_at_least(self._budgets.least_beside_free_staging(self.most_needed - staging)),
        )
        self._what = None


def _listed(names: Sequence[str]) -> str:
    """One unit or more, up to four of them by name."""
    quoted = [repr(name) for name in names]
    if len(quoted) == 1:
        return f"unit {quoted[0]} is"
    if len(quoted) > NAMED_UNITS:
        quoted = [*quoted[:NAMED_UNITS], f"{len(quoted) - NAMED_UNITS} more"]
    return f"units {', '.join(quoted)} are"
