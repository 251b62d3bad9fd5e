"""A backward through the model: its gradients as they arrive, and its end."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch.autograd import Variable

from outsize.run.activations import in_backward
from outsize.run.owner import BACKWARD, Owner
from outsize.run.parameters import Parameters
from outsize.run.reduction import Reduction
from outsize.run.stepping import Stepper
from outsize.run.streamer import Streamer
from outsize.run.unit import Unit
from outsize.run.unit_gradients import UnitGradients


@final
@dataclass(eq=False, repr=False)
class Backward:
    """What arrives in a backward goes on to the unit's gradients, the ranks, and the update."""

    _parameters: Parameters
    _gradients: Sequence[UnitGradients]
    _streamer: Streamer
    _owner: Owner
    _reduction: Reduction | None  # None with one rank
    _stepper: Stepper | None  # of a model that is updated in the backward
    _task: int = -1
    _over: weakref.finalize[..., object] | None = None  # alive until the backward is over

    def watch(self) -> None:
        """See the end of this backward, whatever it uses of the model. A reentrant checkpoint runs one inside it."""
        task = torch._C._current_graph_task_id()
        inside = self._over is not None and self._over.alive and not self._owner.is_other
        if task not in (-1, self._task) and not inside:
            self._owner.take(BACKWARD)
            self._task = task

            def over() -> None:
                self._end(complete=True)
                give()

            # Autograd drops `over` after an error, too, but on an accelerator only when `backward` has returned.
            give = self._over = weakref.finalize(over, self._owner.give)
            give.atexit = False
            Variable._execution_engine.queue_callback(over)

    def gradient_arrived(self, param: torch.Tensor) -> None:
        """Autograd has just left a gradient in `param.grad`."""
        self.watch()
        unit, slot = self._parameters.unit_of(param)
        gradients = self._gradients[unit.index]
        if not gradients.arrives(slot):
            return
        if self._stepper is None or not self._streamer.room.holds_beside_gradients(unit):  # else the update needs both
            self._streamer.finished(unit)  # before the gradients are copied: the weights may make room for them
        if not gradients.defer():
            self._complete(unit, True)
            if self._reduction is not None:
                self._reduction.unit_complete(unit.index)

    def _complete(self, unit: Unit, complete: bool) -> None:
        """The unit's gradients are `complete`, or as many as an interrupted backward has left."""
        gradients = self._gradients[unit.index]
        try:
            at_rest = gradients.end_of_backward(complete)
        finally:
            if self._stepper is not None:
                self._streamer.finished(unit)
        if at_rest:
            if complete and self._stepper is not None and self._stepper.update_now(unit):
                gradients.given_to_update()
            gradients.finish()

    def end_interrupted(self) -> None:
        """Bring to an end what a backward that raised has left."""
        if self._task != -1 and not in_backward():
            self._end(complete=False)

    def _end(self, complete: bool) -> None:
        self._task = -1
        for unit, gradients in zip(self._parameters.units, self._gradients, strict=True):
            if gradients.collecting or gradients.deferred:
                self._complete(unit, complete)
            else:
                gradients.finish()  # a hook of the user's may have added to a gradient that was complete
        if self._reduction is not None:
            with self._reduction.ending(interrupted=not complete):
                self._streamer.end_pass("backward")
