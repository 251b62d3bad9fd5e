"""Collectives on the simulated accelerator, and ranks that train on it."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from outsize import _native
from tests.accelerator import sim as simulator
from tests.ranks.training import Result, Setting, train


class Work:
    """A collective on its way."""

    def __init__(self, over: torch.Event, *kept: torch.Tensor) -> None:
        self._over = over
        self._kept = kept  # the source of a copy that may be held back

    def is_completed(self) -> bool:
        return self._over.query()

    def wait(self, timeout: timedelta | None = None) -> None:
        """The current stream waits, not the host."""
        torch.accelerator.current_stream().wait_event(self._over)


class Collectives:
    """As NCCL's: each runs on a stream of its own, behind what is in the current one. Below is gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rank = rank
        self._stream = torch.Stream("sim")

    def _allgather_base(self, whole: torch.Tensor, own: torch.Tensor) -> Work:
        found = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True, device="cpu")
        home = self._bring(own)
        self._gloo._allgather_base(found, home).wait()
        return self._put(found, whole)

    def _reduce_scatter_base(self, own: torch.Tensor, whole: torch.Tensor) -> Work:
        home = self._summed(whole, dist.AllreduceOptions())
        return self._put(home[self._rank * own.numel() :][: own.numel()].pin_memory(), own)

    def allreduce(self, values: list[torch.Tensor], options: Any) -> Work:
        return self._put(self._summed(values[0], options).pin_memory(), values[0])

    def alltoall_base(self, came: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]) -> Work:
        found = torch.empty(came.shape, dtype=came.dtype, pin_memory=True, device="cpu")
        self._gloo.alltoall_base(found, self._bring(rows), received, sent).wait()
        return self._put(found, came)

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            return tensor.cpu()

    def _summed(self, tensor: torch.Tensor, options: Any) -> torch.Tensor:
        home = self._bring(tensor)
        self._gloo.allreduce([home], options).wait()
        return home

    def _put(self, source: torch.Tensor, target: torch.Tensor) -> Work:
        with self._stream:
            target.copy_(source, non_blocking=True)
            target.record_stream(self._stream)
            return Work(self._stream.record_event(), source)


def on_sim(policy: str) -> AbstractContextManager[Any]:
    """This rank has a simulated accelerator in the block, and races are looked for."""
    simulator.load()
    if "SIMULATED" not in dist.Backend._plugins:
        dist.Backend.register_backend("simulated", Collectives, devices=["sim"])
    return simulator.switched_on(policy, seed=dist.get_rank())


def train_all_on_sim(settings: list[Setting], disk: str, policy: str) -> list[Result]:
    found = []
    for setting in settings:
        with on_sim(policy), pytest.MonkeyPatch.context() as patch:
            if setting.tiers == "device":  # where the device steps
                patch.setattr(_native, "adam", None)
            found.append(train(setting, disk))
            gc.collect()
    return found
