"""Where a program runs: plain torch, or outsize with everything in a place of its own."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, final
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR

import outsize
from outsize.api.assemble import require
from outsize.checkpoint import writer
from outsize.move.memory import Ledger
from tests.conftest import forget_last_graph, random_state
from tests.programs.models import Net, batch
from tests.programs.spec import Spec

Shown = dict[str, Tensor | None]
"""What an operation let the user see."""

Need = Literal["nothing", "gradients", "checkpoint", "late parameters"]


class World(ABC):
    """A model, its optimizer and its scheduler, on some parts of each batch.

    Plain torch stands for all ranks and has all parts, one after the other; outsize has the part of its own rank.
    """

    def __init__(self, spec: Spec, folder: Path, own: int, parts: Sequence[int]) -> None:
        self.spec = spec
        self.folder = folder
        self.own = own
        self.parts = parts
        self.extended = False  # whether the late parameters have joined the optimizer
        self.saves = 0
        self._saved_extended = False
        self.renew(spec.seed, spec.frozen)

    def renew(self, seed: int, frozen: Collection[int]) -> None:
        """Another model with other values, in the place of the one that was."""
        torch.manual_seed(seed)
        self.model = Net(self.spec.net)
        for index, param in enumerate(self.model.parameters()):
            param.requires_grad_(index not in frozen)
        late = {id(param) for param in self.model.side.parameters()} if self.spec.late else set()
        self.optimizer = self.spec.optimizer_of([param for param in self.model.parameters() if id(param) not in late])
        if self.extended:
            self.extend()
        self.scheduler = ExponentialLR(self.optimizer, 0.9) if self.spec.scheduler == "before" else None
        self.settle_in()
        self.scheduler = ExponentialLR(self.optimizer, 0.9) if self.spec.scheduler == "after" else self.scheduler
        own = {name: value.clone() for name, value in self.model.named_buffers()}
        self._buffers = {part: copy.deepcopy(own) for part in self.parts}

    def has(self, need: Need) -> bool:
        if need == "gradients":
            return any(param.grad is not None for group in self.optimizer.param_groups for param in group["params"])
        if need == "checkpoint":
            return self.saves > 0 and self._saved_extended == self.extended
        return need == "nothing" or (self.spec.late and not self.extended)

    def on_parts(self, seed: int, work: Callable[[int], Tensor]) -> Shown:
        """`work` on each part with the random numbers and running statistics of its rank; what the own part showed."""
        shown: Shown = {}
        for part in self.parts:
            self._exchange_buffers(None, part)
            torch.manual_seed(seed + part)
            value = work(part)
            if part == self.own:
                shown = {"value": value, "random numbers": random_state()}
            self._exchange_buffers(part, self.own)
        return shown

    def _exchange_buffers(self, leaving: int | None, entering: int) -> None:
        if len(self.parts) > 1:
            for name, value in self.model.named_buffers():
                if leaving is not None:
                    self._buffers[leaving][name].copy_(value)
                value.copy_(self._buffers[entering][name])

    def loss(self, seed: int, part: int, skipped: int = -1, by_side: bool = False) -> Tensor:
        """Of one part of a batch; where ranks may use different layers, each skips another."""
        tokens, targets = batch(seed, part, 3 + 2 * part if self.spec.uneven else 4)
        if skipped >= 0 and "unused" in self.spec.fields:
            skipped = (skipped + part) % len(self.model.layers)
        scores = self.model(tokens, skipped, by_side)
        return functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())

    def share_of(self, loss: Tensor) -> Tensor:
        """What the loss of a part counts in the mean over the ranks; where there are others, outsize takes the mean."""
        return loss / len(self.parts)

    def extend(self) -> None:
        self.optimizer.add_param_group({"params": list(self.model.side.parameters()), "lr": 0.004})
        self.extended = True

    def save(self, wait: bool) -> None:
        self.saves += 1
        self._saved_extended = self.extended
        self.write(wait)

    def load_elsewhere(self) -> Shown:
        """A fresh model, in the next place, that takes up the checkpoint."""
        frozen = [index for index, param in enumerate(self.model.parameters()) if not param.requires_grad]
        self.renew(self.spec.seed + 1, frozen)
        return self.load()

    @abstractmethod
    def settle_in(self) -> None:
        """Put the model where this world has it."""

    @abstractmethod
    def step(self) -> None: ...

    @abstractmethod
    def gathered(self, target: Any, **how: bool) -> AbstractContextManager[None]: ...

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def write(self, wait: bool) -> None: ...

    @abstractmethod
    def load(self) -> Shown: ...

    @abstractmethod
    def exported(self) -> Shown: ...

    @abstractmethod
    def excess_bytes(self, excused: bool) -> int:
        """By how much the memory in use was above the budget since the last question; `excused`: it may have been."""


@final
class PlainWorld(World):
    """What torch does alone; a delayed update is made of its steps, as ZeRO-Offload was published."""

    def settle_in(self) -> None:
        self._steps = 0
        self._held: list[Tensor | None] = []

    def step(self) -> None:
        exact = self.spec.fields.get("delayed_update")
        self._steps += 1
        if exact is None or self._steps <= exact:
            self.optimizer.step()
            return
        trained = {param for group in self.optimizer.param_groups for param in group["params"]}
        params = list(self.model.parameters())
        grads, ready = [param.grad for param in params], self._held
        self._held = [copy.deepcopy(param.grad) if param in trained else None for param in params]
        if ready:
            _give(params, ready)
            self.optimizer.step()
            _give(params, grads)

    def gathered(self, target: Any, **how: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def write(self, wait: bool) -> None:
        grads = [param.grad for param in self.model.parameters()]
        states = self.model.state_dict(), self.optimizer.state_dict()
        self._kept = copy.deepcopy((*states, grads, self._buffers, self._held, self._steps))

    def load(self) -> Shown:
        weights, state, grads, self._buffers, self._held, self._steps = copy.deepcopy(self._kept)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        _give(self.model.parameters(), grads)
        return {"extra": torch.tensor(self.saves)}

    def exported(self) -> Shown:
        return copies(self.model.named_parameters())

    def excess_bytes(self, excused: bool) -> int:
        return 0


PADDING = 256 << 10
"""Bytes of arrays, gradients and masters in whole pages, for the frozen parameters of one unit."""


@contextlib.contextmanager
def _unfrozen(model: nn.Module) -> Iterator[None]:
    frozen = [param for param in model.parameters() if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def _give(params: Iterable[nn.Parameter], grads: Iterable[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


@final
class PreparedWorld(World):
    """What outsize makes of the same program."""

    def __init__(
        self, spec: Spec, folder: Path, own: int, places: Sequence[Mapping[str, Any]], room: float | None = None
    ) -> None:
        """`places`: fields of `prepare`, of which each new model takes the next."""
        self._places, self._room = cycle(places), room
        self._disk = folder / f"disk-{own}"
        self._disk.mkdir(parents=True)
        super().__init__(spec, folder, own, [own])

    def settle_in(self) -> None:
        device = torch.get_default_device()
        on_cpu = device.type == "cpu"  # where one budget bounds both memories
        self._bounded, self._tiers = ("host_memory", ("device", "host")) if on_cpu else ("device_memory", ("device",))
        fields = {"device": device, "host_memory": 64 << 20, "disk": self._disk, **next(self._places)}
        self._budget = 64 << 20 if self._room is None else self._tight_budget(self._room, fields)
        outsize.prepare(self.model, self.optimizer, **{**fields, self._bounded: self._budget})
        ledger, units = require(self.model).resources.ledger, outsize.plan(self.model).units
        self._budget += sum(ledger.now.get(f"{tier}/states", 0) for tier in self._tiers)
        self._budget -= sum(unit.size.states for unit in units if unit.tiers.states in self._tiers)  # whole pages
        self._memory = MemoryWatch(ledger, self._tiers)

    def _tight_budget(self, room: float, fields: Mapping[str, Any]) -> int:
        """`room` times the smallest budget that the plan accepts, to 4 KiB; more where that is cut into larger units,
        which do not fit."""

        frozen = any(not param.requires_grad for param in self.model.parameters())

        def accepts(pages: int) -> bool:
            all_fields = {"ranks": self.spec.ranks, **fields, self._bounded: pages << 12}
            try:
                outsize.plan(self.model, self.optimizer, **all_fields)
                if frozen:
                    with _unfrozen(self.model):  # what the program may unfreeze has room
                        outsize.plan(self.model, self.optimizer, **all_fields)
            except ValueError:
                return False
            return True

        least = bisect_left(range(4096), True, lo=1, key=accepts)
        found = next(pages for pages in range(int(least * room), 4096) if accepts(pages)) << 12
        units = outsize.plan(self.model, self.optimizer, **{**fields, self._bounded: found}).units
        return found + frozen * len(units) * PADDING  # arrays for what is unfrozen take whole pages

    def step(self) -> None:
        self.optimizer.step()

    def gathered(self, target: Any, **how: bool) -> AbstractContextManager[None]:
        return outsize.gathered(target, **how)

    def no_sync(self) -> AbstractContextManager[None]:
        return outsize.no_sync(self.model) if self.spec.pauses else contextlib.nullcontext()

    def _checkpoint(self) -> Path:
        return self.folder / "checkpoints" / f"step-{self.saves}"

    def write(self, wait: bool) -> None:
        with patch.object(writer, "AT_ONCE_BYTES", -1 if self.spec.large else writer.AT_ONCE_BYTES):
            self._saving = outsize.save(self._checkpoint(), self.model, self.optimizer, {"saves": self.saves}, keep=2)
        if wait:
            self._saving.wait()

    def load(self) -> Shown:
        extra = outsize.load(self._checkpoint(), self.model, self.optimizer)
        return {"extra": torch.tensor(extra["saves"])}

    def exported(self) -> Shown:
        outsize.export(self.folder / "export", self.model, dtype=torch.float32)
        found: dict[str, Tensor] = {}
        for file in sorted((self.folder / "export").glob("*.safetensors")):
            found |= load_file(file)
        return copies((name, found[name]) for name, _ in self.model.named_parameters())

    def excess_bytes(self, excused: bool) -> int:
        streamer = require(self.model).engine.streamer
        moves = (
            streamer.room.planned_capacity < self._budget
        )  # else nothing does, and what ranks collect is not bounded
        excused = excused or streamer.room.excess.logged or not (moves and self.spec.is_planned_exactly)
        # The log says so when units in use at once take more.
        streamer.room.excess.logged, streamer.room.excess.most_needed = False, 0
        peak = self._memory.take_peak()
        return 0 if excused else max(peak - self._budget, 0)

    def leave(self) -> list[str]:
        """End the model; the files that it leaves behind."""
        if self.saves:
            self._saving.wait()  # which holds the files
        del self.model, self.optimizer, self.scheduler
        forget_last_graph()
        gc.collect()
        return os.listdir(self._disk)


@final
class MemoryWatch:
    """The most bytes that were in use on these tiers together."""

    def __init__(self, ledger: Ledger, tiers: tuple[str, ...]) -> None:
        self._ledger = ledger
        self._tiers = tiers
        self._peak = 0
        self._add = ledger.add
        ledger.add = self._watched  # type: ignore[method-assign]

    def _watched(self, account: str, nbytes: int) -> None:
        self._add(account, nbytes)
        in_use = [value for key, value in list(self._ledger.now.items()) if key.startswith(self._tiers)]
        self._peak = max(self._peak, sum(in_use))

    def take_peak(self) -> int:
        """Since the last question."""
        peak, self._peak = self._peak, 0
        return peak


def copies(values: Iterable[tuple[str, Tensor | None]]) -> Shown:
    """What is seen now, in fp32, whatever becomes of it."""
    return {name: None if value is None else value.detach().clone().float().cpu() for name, value in values}
