"""One option for each of many items: the fewest seconds in all within so many bytes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from outsize.planning.sizes import format_bytes

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
    were measured. `segment`: of so many layers only the first keeps its input."""

    modes: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0
    spare: int = 0
    bytes_if_all: Mapping[str, int] = field(default_factory=dict)
    segment: int = 1

    def __str__(self) -> str:
        counts = Counter(self.modes.values())
        layers = ", ".join(f"{counts[mode]} {words}" for mode, words in WORDS.items() if counts[mode])
        if self.segment > 1:
            return (
                f"activations: of {len(self.modes)} layers every {self.segment} that follow each other keep one input"
            )
        kept = f"{format_bytes(self.nbytes)} kept of {format_bytes(self.spare)} spare"
        if not layers:
            return f"activations: {format_bytes(self.spare)} spare; what layers keep is chosen when they have run"
        return f"activations: {kept}; of {sum(counts.values())} layers {layers} ({self.seconds:.3g} s a step)"


_State = tuple[int, float, tuple[object, int] | None]
"""Bytes, seconds, (the link of the state before, the option that led here)."""


PAYS = 0.75
"""Of the bytes without segments, what segments must leave at most where nothing fits."""


def segment_length(layers: int, inputs: int, kept: int, spare: int, most: int) -> int:
    """Layers of a segment, of which only the first keeps its input: the fewest with which all fits into `spare` bytes.
    Where nothing fits, those that take the fewest bytes (Chen et al. 2016, section 4.1), if they pay.

    `inputs`: bytes of the inputs of all `layers`. `kept`: bytes that one layer saves for its backward. All layers of a
    segment do while its backward runs, and have their inputs. `most`: layers that a segment may have.
    """

    def taken(length: int) -> float:
        return inputs / layers * (-(-layers // length) + length - 1) + length * kept

    lengths = range(1, max(min(most, layers), 1) + 1)
    fits = next((each for each in lengths if taken(each) <= spare), None)
    if fits is not None:
        return fits
    least = min(lengths, key=taken)
    return least if taken(least) <= PAYS * taken(1) else 1


def cheapest(options: Sequence[Sequence[tuple[int, float]]], most_bytes: int) -> list[int]:
    """For each item the index of one of its options, (bytes, seconds): the fewest seconds in all with no more than
    `most_bytes`, and of equals the fewest bytes. Each item has an option of 0 bytes.

    Of the sums of the first items those are kept that no other one beats in both.
    """
    fastest = [min(range(len(item)), key=lambda index: item[index][::-1]) for item in options]
    if sum(item[index][0] for item, index in zip(options, fastest, strict=True)) <= most_bytes:
        return fastest
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
