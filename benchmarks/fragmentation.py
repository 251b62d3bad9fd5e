"""Whether what layers keep cuts a device's memory into pieces, and what a pool of its own changes (ZeRO's M_D).

    python -m benchmarks.fragmentation

24 layers train on sequences of other lengths in each of 20 steps, and compute again. What they allocate is recorded,
times 256, and given to a simulation of torch's caching allocator for CUDA: sizes of 512 bytes, segments of 2 and 20
MiB, the best fit, blocks that are split and merged, free segments that go back before an allocation fails. The figure
is the smallest memory in which the run does not fail, over the most bytes that are allocated at once. Beside it the
same run

in a pool     each input of a layer is copied into a pool when the layer begins, as outsize does it on accelerators
moved out     inputs leave two layers later and come back one layer before
expandable    the allocator has one segment that grows: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

ZeRO: Rajbhandari et al. 2020, section 5.3.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import outsize
from benchmarks.common import Row, run_rows

MIB = 1 << 20
WIDTH, LAYERS, STEPS, SCALE = 64, 24, 20, 256
FORWARD_OVER = "the forward is over"

Event = tuple[int, int]
"""A number and bytes of an allocation; less than none: it is freed. (0, 0) ends a forward."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 172), nn.SiLU(), nn.Linear(172, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def recorded(directory: str) -> list[Event]:
    """What a run allocates and frees, in order."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    places: dict[str, Any] = dict.fromkeys(("params", "grads", "states"), "host")
    outsize.prepare(model, optimizer, device="cpu", host_memory="1GiB", activations="recompute", **places)
    lengths = random.Random(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(STEPS):
            loss = model(torch.randn(1, lengths.randrange(64, 512), WIDTH)).square().mean()
            with record_function(FORWARD_OVER):
                pass
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    return list(_events(_walk(seen.profiler.kineto_results.experimental_event_tree())))  # type: ignore[union-attr]


def _walk(nodes: Iterable[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        yield from _walk(node.children)


def _events(nodes: Iterable[Any]) -> Iterator[Event]:
    numbers: dict[int, int] = {}
    for count, node in enumerate(sorted(nodes, key=lambda node: node.start_time_ns), 1):
        if node.name == FORWARD_OVER:
            yield 0, 0
        fields = node.extra_fields
        size = getattr(fields, "alloc_size", 0) * SCALE
        if size > 0:
            numbers[fields.ptr] = count
            yield count, size
        elif size < 0 and fields.ptr in numbers:
            yield numbers.pop(fields.ptr), size


@final
class OutOfMemory(Exception):
    """The device has no such block."""


@final
class CachingAllocator:
    """torch's, of one stream of a CUDA device with so many bytes. Two pools: of blocks up to 1 MiB, and of others."""

    def __init__(self, nbytes: int, expandable: bool) -> None:
        self.nbytes, self.reserved, self.allocated = nbytes, 0, 0
        self._expandable = expandable
        self._ends = {True: 0, False: 1 << 50}  # of a pool's addresses
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, start), sorted
        self._blocks: dict[int, tuple[int, bool]] = {}  # by start: size, pool
        self._before: dict[int, int] = {}  # by end: the start
        self._segments: dict[int, int] = {}  # by start: size
        self._used: set[int] = set()

    def allocate(self, nbytes: int) -> int:
        """Where the block starts."""
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        free = self._free[small]
        if not free or free[-1][0] < size:
            self._grow(size, small)
        found, start = free.pop(bisect.bisect_left(free, (size, 0)))
        if found - size >= (512 if small else MIB + 1):
            self._put(start, size, small)
            self._put(start + size, found - size, small)
            bisect.insort(free, (found - size, start + size))
        self._used.add(start)
        self.allocated += self._blocks[start][0]
        return start

    def free(self, start: int) -> None:
        self._used.remove(start)
        self.allocated -= self._blocks[start][0]
        self._merge(start)

    @property
    def largest(self) -> int:
        """Bytes of the largest block that there is, or could be had for free segments."""
        free = [each for blocks in self._free.values() for each in blocks]
        whole = sum(size for size, start in free if self._segments.get(start) == size)
        return max([*(size for size, _ in free), self.nbytes - self.reserved + whole])

    def _put(self, start: int, size: int, small: bool) -> None:
        self._blocks[start], self._before[start + size] = (size, small), start

    def _drop(self, start: int) -> None:
        del self._before[start + self._blocks.pop(start)[0]]

    def _merge(self, start: int) -> None:
        """A free block, with those before and behind it."""
        size, small = self._blocks[start]
        free = self._free[small]
        for other in (self._before.get(start, -1), start + size):
            if other in self._blocks and other not in self._used:
                more = self._blocks[other][0]
                free.pop(bisect.bisect_left(free, (more, other)))
                self._drop(other)
                self._drop(start)
                start, size = min(start, other), size + more
                self._put(start, size, small)
        bisect.insort(free, (size, start))

    def _grow(self, size: int, small: bool) -> None:
        more = self._missing(size, small)
        if self.reserved + more > self.nbytes:
            self.release()
            more = self._missing(size, small)
        if self.reserved + more > self.nbytes:
            raise OutOfMemory
        start = self._ends[small] + (0 if self._expandable else 512)  # segments that do not touch do not merge
        self._ends[small] = start + more
        self.reserved += more
        self._segments[start] = more
        self._put(start, more, small)
        self._merge(start)

    def _missing(self, size: int, small: bool) -> int:
        page = PAGES[small]
        if not self._expandable:
            return page if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        last = self._before.get(self._ends[small], -1)
        there = self._blocks[last][0] if last in self._blocks and last not in self._used else 0
        return -(-(size - there) // page) * page

    def release(self) -> None:
        """Free segments go back; of one that grows, free pages."""
        for small, free in self._free.items():
            base, page = (0 if small else 1 << 50), PAGES[small]
            for size, start in list(free):
                first, last = start, start + size
                if self._expandable:
                    first, last = base - (base - start) // page * page, base + (last - base) // page * page
                elif self._segments.get(start) != size:
                    continue
                if first < last:
                    self.reserved -= last - first
                    free.remove((size, start))
                    self._drop(start)
                    for begin, end in ((start, first), (last, start + size)):
                        if begin < end:
                            self._put(begin, end - begin, small)
                            bisect.insort(free, (end - begin, begin))
                    if last == self._ends[small]:
                        self._ends[small] += page


PAGES = {True: 2 * MIB, False: 20 * MIB}


def long_lived(events: list[Event]) -> list[list[int]]:
    """For each step the large allocations that are there when the forward is over: inputs of layers, in order."""
    alive: dict[int, int] = {}
    steps = []
    for number, size in events:
        if number == 0:
            steps.append([key for key, each in alive.items() if each >= MIB])
        elif size > 0:
            alive[number] = size
        else:
            del alive[number]
    return steps


def pooled(events: list[Event]) -> list[Event]:
    """The run with a copy of each input, numbered below zero, that is kept in place of it from the next layer on."""
    sizes = {number: size for number, size in events if size > 0}
    steps = long_lived(events)
    copied = {number for step in steps for number in step[:-1]}  # the last one is no layer's input
    before = {later: earlier for step in steps for earlier, later in pairwise(step)}
    kept: list[Event] = []
    for number, size in events:
        if number in copied:
            kept += [(number, size), (-number, size)] if size > 0 else [(-number, size)]
        else:
            kept.append((number, size))
        if size > 0 and number in before:
            kept.append((before[number], -sizes[before[number]]))
    return kept


def moved_out(events: list[Event]) -> list[Event]:
    """The run with inputs that leave two layers later, and come back one layer before they are used."""
    sizes = {number: size for number, size in events if size > 0}
    two_before = {number: step[at - 2] for step in long_lived(events) for at, number in enumerate(step) if at >= 2}
    kept: list[Event] = []
    for number, size in events:
        kept.append((number, size))
        other = two_before.get(number)
        if other is not None:  # made: the other leaves; freed: it comes back
            kept.append((other, -sizes[other] if size > 0 else sizes[other]))
    return kept


def runs(events: list[Event], nbytes: int, expandable: bool = False) -> tuple[list[int], int] | None:
    """At the end of each forward bytes of the largest block, and the most bytes allocated at once; None
    where memory fails. Numbers below zero are allocated in a pool of their own, which gives nothing back."""
    memory, pool = CachingAllocator(nbytes, expandable), CachingAllocator(nbytes, expandable)
    starts: dict[int, int] = {}
    largest: list[int] = []
    most = 0
    try:
        for number, size in events:
            memory.nbytes, pool.nbytes = nbytes - pool.reserved, nbytes - memory.reserved
            chosen = pool if number < 0 else memory
            if number == 0:
                largest.append(memory.largest)
            elif size < 0:
                chosen.free(starts.pop(number))
            else:
                try:
                    starts[number] = chosen.allocate(size)
                except OutOfMemory:
                    if chosen is memory:
                        raise
                    memory.release()
                    pool.nbytes = nbytes - memory.reserved
                    starts[number] = pool.allocate(size)
                most = max(most, memory.allocated + pool.allocated)
    except OutOfMemory:
        return None
    return largest, most


def least(events: list[Event], expandable: bool = False) -> int:
    """The smallest memory in which the run does not fail, to 8 MiB."""
    found = runs(events, 1 << 40, expandable)
    assert found is not None
    few, enough = found[1] // (8 * MIB), 2 * found[1] // (8 * MIB)
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if runs(events, middle * 8 * MIB, expandable) else (middle, enough)
    return enough * 8 * MIB


def rows(directory: str) -> list[Row]:
    events = recorded(directory)
    needed = least(events)
    in_pool = pooled(events)
    found, alone = runs(events, needed), runs(in_pool, needed)
    assert found is not None
    assert alone is not None
    most = found[1]
    figures = {
        "what the run needs": needed,
        "the same with inputs in a pool": least(in_pool),
        "with expandable segments": least(events, expandable=True),
        "with both": least(in_pool, expandable=True),
    }
    made = [
        Row(
            f"24 layers compute again: {what}, over the bytes allocated",
            f"{size / most:.2f} x",
            f"{most // MIB} MiB",
            True,
        )
        for what, size in figures.items()
    ]
    for what, blocks in (("", found[0]), (", inputs in a pool", alone[0])):
        told = f"{blocks[0] // MIB}, {blocks[-1] // MIB}; {min(blocks) // MIB} MiB"
        made.append(
            Row(
                f"the largest free block of {needed // MIB} MiB after the first and last forward; the least{what}",
                told,
                "",
                True,
            )
        )
    away = moved_out(events)
    found = runs(away, 1 << 40)
    assert found is not None
    told = f"{least(away) / found[1]:.2f} x"
    made.append(
        Row("inputs moved out: what the run needs, over the bytes allocated", told, f"{found[1] // MIB} MiB", True)
    )
    return made


if __name__ == "__main__":
    raise SystemExit(run_rows(__doc__, {"rows": rows}))
