"""One option for each of many items: the fewest seconds in all within so many bytes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from outsize.plan.sizes import format_bytes

MOST_STATES = 1 << 12
"""Sums of the first items that are followed. Layers that are alike have far fewer; of more, only every so many are."""

WORDS = {
    "keep": "keep what they save",
    "pack": "keep it packed",
    "selective": "keep results of products",
    "offload": "move it out",
    "recompute": "compute it again",
}


@dataclass(frozen=True)
class Chosen:
    """What `activations="auto"` has chosen: for each layer its mode, the bytes that are kept of those that may be, the
    seconds that a step takes more than if all were kept, and the bytes if all layers were in one mode, as far as they
    were measured."""

    modes: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0
    spare: int = 0
    bytes_if_all: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = Counter(self.modes.values())
        layers = ", ".join(f"{counts[mode]} {words}" for mode, words in WORDS.items() if counts[mode])
        kept = f"{format_bytes(self.nbytes)} kept of {format_bytes(self.spare)} spare"
        if not layers:
            return f"activations: {format_bytes(self.spare)} spare; what layers keep is chosen when they have run"
        return f"activations: {kept}; of {sum(counts.values())} layers {layers} ({self.seconds:.3g} s a step)"


_State = tuple[int, float, tuple[object, int] | None]
"""Bytes, seconds, (the link of the state before, the option that led here)."""


def cheapest(options: Sequence[Sequence[tuple[int, float]]], most_bytes: int) -> list[int]:
    """For each item the index of one of its options, (bytes, seconds): the fewest seconds in all with no more than
    `most_bytes`, and of equals the fewest bytes. Each item has an option of 0 bytes.

    Of the sums of the first items those are kept that no other one beats in both.
    """
    states: list[_State] = [(0, 0.0, None)]
    for item in options:
        grown = [
            [
                (nbytes + more, seconds + longer, (link, index))
                for nbytes, seconds, link in states
                if nbytes + more <= most_bytes
            ]
            for index, (more, longer) in enumerate(item)
        ]
        best: list[_State] = []
        for state in heapq.merge(*grown, key=itemgetter(0, 1)):
            if not best or state[1] < best[-1][1]:
                best.append(state)
        states = _thinned(best)
    link = states[-1][2]
    chosen: list[int] = []
    while link is not None:
        link, index = link  # type: ignore[assignment]
        chosen.append(index)
    return chosen[::-1]


def _thinned(states: list[_State]) -> list[_State]:
    """Every so many of them, with the first and the last."""
    if len(states) <= MOST_STATES:
        return states
    step = -(-len(states) // MOST_STATES)
    return [*states[:-1:step], states[-1]]
