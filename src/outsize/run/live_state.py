"""Whether the state in memory is whole: an error that leaves a part of it changed stops the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from outsize.move.tracing import turned
from outsize.move.transfer import again


@final
class LiveState:
    """Stops at the first error that leaves the state in parts, and counts how long the loop waits for it."""

    def __init__(self) -> None:
        self.wait_seconds = 0.0
        self._stopped: BaseException | None = None

    def stop(self, error: BaseException) -> None:
        """The live state is no longer whole: refuse every further use of it."""
        if isinstance(error, Exception):
            self._stopped = self._stopped or again(error)

    def check(self) -> None:
        """Raise `RuntimeError` if the run was stopped."""
        if self._stopped is not None:
            cause = str(self._stopped) or type(self._stopped).__name__
            raise RuntimeError(
                f"training stopped after an error ({cause}); the state in memory is no longer whole: restart "
                f"and load the last checkpoint with outsize.load"
            ) from self._stopped

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait of the loop for bytes on their way. What went wrong with them stops the run."""
        began, before = time.perf_counter(), turned("wait")
        try:
            yield
        except BaseException as error:
            self.stop(error)
            raise
        finally:
            self.wait_seconds += time.perf_counter() - began
            turned(before)

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """State of which a part is changed is of no use: an error in the block, or an interrupt, stops the run."""
        try:
            yield
        except BaseException as error:
            self.stop(error if isinstance(error, Exception) else RuntimeError(f"{what} was interrupted"))
            raise
