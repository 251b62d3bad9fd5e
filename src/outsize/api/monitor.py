"""`Monitor`: what each step takes, as one flat dict, and files of it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch import nn

from outsize.api.report import memory
from outsize.move.disk import naming

Place = str | os.PathLike[str]
SUMS = ("wait_seconds", "update_seconds", "bytes_read", "bytes_written")


@final
class Monitor:
    """What each step of a prepared model takes, as one flat dict: for W&B, MLflow and the like as it is.

    Args:
        model: the prepared model.
        jsonl: a file that gets one line of JSON a step, after those that it has.
        tensorboard: a folder for TensorBoard, which must be installed.

    With several ranks each has its own figures, and rank 0 writes the files. Raises `ValueError` for a model that is
    not prepared, `ImportError` where TensorBoard is missing.

    >>> monitor = outsize.Monitor(model, jsonl="steps.jsonl")
    >>> for batch in loader:
    ...     loss = model(batch).mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     record = monitor.step(loss=loss.item())
    >>> sorted(record)  # doctest: +NORMALIZE_WHITESPACE
    ['bytes_read', 'bytes_written', 'device_bytes', 'disk_bytes', 'host_bytes', 'loss', 'seconds', 'skipped_steps',
     'state_bytes', 'step', 'update_seconds', 'wait_seconds']
    """

    def __init__(self, model: nn.Module, *, jsonl: Place | None = None, tensorboard: Place | None = None) -> None:
        self._model = model
        self._step = 0
        writes = not dist.is_initialized() or dist.get_rank() == 0
        self._jsonl = Path(jsonl) if jsonl is not None and writes else None
        self._board = _open_board(tensorboard) if tensorboard is not None and writes else None
        self.begin()

    def begin(self) -> None:
        """The step begins here. Needed where something else, such as an evaluation, came after the last one."""
        self._before, self._began = memory(self._model), time.perf_counter()

    def step(self, **more: Any) -> dict[str, Any]:
        """What was used since the last `step` or `begin`, and what is in use now; with the figures in `more`.

        `step`: counted from 1, or as given. `seconds`: of the whole step. `wait_seconds`: the loop waited for a fetch.
        `update_seconds`: of updates, over all threads; they run at the next fetch, so they are those of the step
        before. `bytes_read` and `bytes_written`: on disk. `device_bytes`, `host_bytes`, `disk_bytes`: in use now.
        `state_bytes`: of parameters, gradients and states. `skipped_steps`: so far, for a gradient that is not finite.
        """
        now, before, began = memory(self._model), self._before, self._began
        self._before, self._began = now, time.perf_counter()
        self._step = int(more.get("step", self._step + 1))
        record = {
            "step": self._step,
            "seconds": self._began - began,
            **{name: getattr(now, name) - getattr(before, name) for name in SUMS},
            **{f"{tier}_bytes": now.bytes_on(tier) for tier in ("device", "host", "disk")},
            "state_bytes": now.state_bytes,
            "skipped_steps": now.skipped_steps,
            **more,
        }
        if self._jsonl is not None:
            with naming(self._jsonl, "writing"), self._jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, default=float) + "\n")
        if self._board is not None:
            for name, value in record.items():
                self._board.add_scalar(name, value, self._step)
            self._board.flush()
        return record


def _open_board(folder: Place) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"TensorBoard cannot be imported ({error}): pip install tensorboard") from error
    return SummaryWriter(os.fspath(folder))
