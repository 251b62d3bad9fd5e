"""The error of a budget that is too small."""

from __future__ import annotations

from typing import final


class BudgetError(ValueError):
    """A budget is too small. The message names the unit and the remedy; the attributes have the numbers.

    field: the budget: `"host_memory"`, `"device_memory"` or `"disk_space"`.
    needed: a budget that `plan` and `prepare` accept, where they raise it; elsewhere the bytes that must fit.
    available: the budget that was given, or the bytes that it has left. Raise it by `needed - available` at least.

    >>> try:
    ...     outsize.plan(model, host_memory="32KiB", device="cpu")
    ... except outsize.BudgetError as error:
    ...     print(error.field, error.needed > error.available)
    host_memory True
    """

    field: str
    needed: int
    available: int

    def __init__(self, message: str, field: str = "", needed: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.field, self.needed, self.available = field, needed, available


@final
class RoomError(OSError, BudgetError):
    """The same for what a run moves out while it trains; with an errno, and the path of the file if it is one."""

    def __init__(
        self, code: int, message: str, path: str | None = None, field: str = "", needed: int = 0, available: int = 0
    ) -> None:
        OSError.__init__(self, code, message, *(() if path is None else (path,)))
        self.field, self.needed, self.available = field, needed, available
