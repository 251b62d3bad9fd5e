"""Keys and values at rest, on the host or on disk: appended token by token, read a layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import final

import torch

from outsize.move.conveyor import Conveyor, Job, Step
from outsize.move.device import EventTransfer, Lanes
from outsize.move.generations import Generations
from outsize.move.memory import PAGE_BYTES, HostBuffer
from outsize.move.transfer import ARRIVED, Transfer
from outsize.planning.layout import round_up

SLABS = 4
SLAB_BYTES = 2 << 20
"""What is read at once, unless a single token has more."""

# Note [Tokens at rest]
# A layer's bytes lie token by token: [tokens][keys, then values][batch][heads][width]. So new tokens are one range, at
# the end. Attention wants [batch][heads][tokens][width]: a read passes through slabs, and each slab is permuted into
# its place while the next one is read.
#
# On disk whole pages are written, each once. The bytes after the last whole page wait in memory for the next token
# (`_tails`), and a read takes them from there.
#
# A beam search takes other rows of the batch to go on with. Nothing moves for that: `origins` says for each token in
# which row of the batch its bytes were written, and a read follows it.


def form_of(kept: Sequence[torch.Tensor]) -> tuple[torch.device, torch.dtype, list[tuple[int, int, int]]]:
    """Device, dtype, and (batch, heads, width) of each."""
    return kept[0].device, kept[0].dtype, [(each.shape[0], each.shape[1], each.shape[3]) for each in kept]


def row_bytes(kept: Sequence[torch.Tensor]) -> int:
    """What one token of the whole batch takes."""
    return sum(each[:, :, 0].numel() * each.itemsize for each in kept)


def slab_tokens(row: int, tokens: int) -> int:
    """Of `tokens` tokens of `row` bytes each, those that are read at once. All slabs together hold a layer at most."""
    return max(1, min(tokens // SLABS, SLAB_BYTES // row))


def slab_bytes(row: int, tokens: int) -> int:
    """For these tokens, which begin and end within pages."""
    return round_up(row * slab_tokens(row, tokens), PAGE_BYTES) + 2 * PAGE_BYTES


@final
class TokenStore:
    """`tokens` tokens at most in each of so many layers. See Note [Tokens at rest]."""

    def __init__(
        self,
        layers: int,
        tokens: int,
        kept: Sequence[torch.Tensor],
        conveyor: Conveyor,
        lanes: Lanes | None,
        file: Generations | None,
    ) -> None:
        """`kept`: keys and values as they come, [batch, heads, any, width]. Without a `file` they rest on the host."""
        self.form = form_of(kept)
        self._device, self._dtype, self._shapes = self.form
        self._row_bytes = row_bytes(kept)
        self._slab_tokens = slab_tokens(self._row_bytes, tokens)
        self._layer_bytes = round_up(self._row_bytes * tokens, PAGE_BYTES)
        self._conveyor, self._lanes, self._file = conveyor, lanes, file
        self.counts = [0] * layers  # tokens
        self._written: list[list[Job]] = [[] for _ in range(layers)]  # the last job of each
        self._leaving: Job | None = None
        if file is None:
            self._memory = HostBuffer(layers * self._layer_bytes, pinned=True)
        else:
            file.preallocate(0, layers * self._layer_bytes)
            self._tails = torch.empty(layers, PAGE_BYTES, dtype=torch.uint8, device="cpu")

    def close(self) -> None:
        """Unpin the memory, once the conveyor is closed."""
        if self._file is None:
            self._memory.close()

    def append(self, layer: int, kept: Sequence[torch.Tensor]) -> None:
        """Start to store further keys and values, [batch, heads, tokens, width], once those before are on their way."""
        if self._leaving is not None:
            self._leaving.wait()  # a long prompt is computed faster than it is written
        rows = torch.cat([each.permute(2, 0, 1, 3).flatten(1) for each in kept], 1)
        content = rows.view(torch.uint8).view(-1)
        start = self.counts[layer] * self._row_bytes
        self.counts[layer] += rows.shape[0]
        if self._lanes is not None:
            self._lanes.follow(self._lanes.outgoing)
        most = content.numel() if self._file is None else self._conveyor.slab_bytes - PAGE_BYTES
        steps = [self._away(layer, start + at, content[at : at + most]) for at in range(0, content.numel(), most)]
        self._leaving = self._conveyor.submit(Job(steps))
        self._written[layer] = [self._leaving]

    def read(self, layer: int, out: Sequence[torch.Tensor], origins: torch.Tensor | None) -> Job:
        """Start to read the layer's tokens into the first of `out`, [batch, heads, tokens, width]; `arrive` ends it.

        `origins`: [tokens, batch], on the computing device.
        """
        if self._lanes is not None:
            self._lanes.follow(self._lanes.incoming)
        count = self.counts[layer]
        most = self._slab_tokens
        steps = (self._back(layer, at, min(at + most, count), count, out, origins) for at in range(0, count, most))
        return self._conveyor.submit(Job(steps, after=self._written[layer]))

    def arrive(self, reading: Job) -> None:
        """Wait for what was read; the current stream may use it then."""
        reading.wait()
        if self._lanes is not None:
            self._lanes.wait_for(self._lanes.incoming.record_event())

    def _away(self, layer: int, start: int, part: torch.Tensor) -> Step:
        """Bytes of a layer, from its byte `start`, on their way to rest."""
        before = start % PAGE_BYTES  # bytes of the page that wait in memory
        end = before + part.numel()
        whole = end // PAGE_BYTES * PAGE_BYTES
        base = layer * self._layer_bytes
        slab: list[torch.Tensor] = []

        def stage(slabs: list[torch.Tensor]) -> Sequence[Transfer]:
            slab.extend(slabs)
            return [self._home(part, slab[0][before:end])]

        def write() -> Sequence[Transfer]:
            assert self._file is not None
            tail = self._tails[layer]
            slab[0][:before] = tail[:before]
            tail[: end - whole] = slab[0][whole:end]
            return [self._file.write(base + start - before, slab[0][:whole])]

        if self._file is None:
            first = base + start
            return Step(lambda _: [self._home(part, self._memory.bytes[first : first + part.numel()])])
        return Step(stage, write, 1)

    def _home(self, part: torch.Tensor, memory: torch.Tensor) -> Transfer:
        if self._lanes is not None:
            return self._lanes.bring_home(part, memory)
        memory.copy_(part)
        return ARRIVED

    def _back(
        self, layer: int, first: int, last: int, count: int, out: Sequence[torch.Tensor], origins: torch.Tensor | None
    ) -> Step:
        """Some tokens of the `count` of a layer on their way to `out`."""
        base = layer * self._layer_bytes
        start, end = first * self._row_bytes, last * self._row_bytes
        low = start // PAGE_BYTES * PAGE_BYTES
        on_disk = min(round_up(end, PAGE_BYTES), count * self._row_bytes // PAGE_BYTES * PAGE_BYTES)
        slab: list[torch.Tensor] = []

        def read(slabs: list[torch.Tensor]) -> Sequence[Transfer]:
            assert self._file is not None
            slab.extend(slabs)
            return [self._file.read(base + low, slab[0][: on_disk - low])]

        def deliver() -> Sequence[Transfer]:
            if on_disk < end:
                slab[0][on_disk - low : end - low] = self._tails[layer, : end - on_disk]
            return self._place(slab[0][start - low : end - low], first, last, out, origins)

        if self._file is None:
            content = self._memory.bytes[base + start : base + end]
            return Step(finish=lambda: self._place(content, first, last, out, origins))
        return Step(read, deliver, 1)

    def _place(
        self,
        content: torch.Tensor,
        first: int,
        last: int,
        out: Sequence[torch.Tensor],
        origins: torch.Tensor | None,
    ) -> Sequence[Transfer]:
        with nullcontext() if self._lanes is None else self._lanes.on(self._lanes.incoming):
            rows = content.to(self._device, non_blocking=True).view(self._dtype).view(last - first, -1)
            parts = rows.split([prod(shape) for shape in self._shapes], 1)
            for part, shape, whole in zip(parts, self._shapes, out, strict=True):
                tokens = part.unflatten(1, shape)  # [tokens, batch, heads, width]
                if origins is not None:
                    tokens = tokens[torch.arange(last - first, device=self._device)[:, None], origins[first:last]]
                whole[:, :, first:last].copy_(tokens.permute(1, 2, 0, 3))
        return [] if self._lanes is None else [EventTransfer(self._lanes.incoming.record_event())]
