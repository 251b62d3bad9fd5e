"""What the ranks tell each other before a collective, so that all are about to do the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Note [Wanted units]
# Where ranks use different units by design, one that needs a unit wants it, on the lane that everything on the user's
# thread is agreed on. Whatever the others are about to do there, they first give what is wanted: all gather the unit,
# and agree anew. Where several are wanted, what the rank furthest behind wants comes first. So a rank must come by: at
# the end of a forward and of a backward all meet. Each says what it expects to want next; what all expect is gathered
# ahead. And each says which gradients it has complete, and comes by (an offer) when a unit's are; what all have
# complete is reduced then and there, so that whole gradients do not pile up.

WANT, WANT_BACK, OFFER = "want", "want back", "offer"
WANTS = (WANT, WANT_BACK)
"""In a forward, and in a backward."""

KINDS = (
    *("gather", "reduce", "norms", "finite", "step", "save", "load", "export", "gradients", "prepare"),
    *(*WANTS, OFFER, "forward", "backward", "gathered"),
)
AHEAD = 4
WORD_BITS = 62


@dataclass(frozen=True)
class Purpose:
    """What a collective is for, the same on every rank: `kind` of `unit` in `step`, over `numel` elements."""

    kind: str
    unit: int = -1
    step: int = 0
    numel: int = 0
    ahead: tuple[int, ...] = ()
    """Units that the rank expects to want next, at most `AHEAD`."""

    def words(self, names: Sequence[str]) -> str:
        unit = f" of unit {names[self.unit]!r}" if 0 <= self.unit < len(names) else ""
        return f"{self.kind}{unit} in step {self.step} ({self.numel} elements)"


@dataclass(frozen=True)
class Turn:
    """What all ranks gather next: a unit that is wanted, then those that all of them expect to want."""

    unit: int
    ahead: tuple[int, ...] = ()


def turn_of(purposes: Sequence[Purpose]) -> Turn | None:
    """What comes first, of what the ranks are about to do; None where nobody wants a unit."""
    units = [each.unit for each in purposes if each.kind in WANTS]
    if not units:
        return None
    wanted = max(units) if any(each.kind == WANT_BACK for each in purposes) else min(units)
    common = set.intersection(*({*each.ahead, each.unit} for each in purposes)) - {wanted}
    return Turn(wanted, tuple(each for each in (purposes[0].unit, *purposes[0].ahead) if each in common))


def encode(purpose: Purpose, ready: Collection[int], words: int) -> list[int]:
    """A row of numbers; `ready` are the units whose gradients are complete here, in `words` numbers."""
    ahead = (*purpose.ahead, *[-1] * (AHEAD - len(purpose.ahead)))
    bits = [0] * words
    for unit in ready:
        bits[unit // WORD_BITS] |= 1 << unit % WORD_BITS
    return [KINDS.index(purpose.kind), purpose.unit, purpose.step, purpose.numel, *ahead, *bits]


def decode(rows: Sequence[Sequence[int]]) -> tuple[list[Purpose], list[int]]:
    """(the purposes of all ranks, the units that are ready on all of them)."""
    purposes = []
    common = list(rows[0][4 + AHEAD :])
    for kind, unit, step, numel, *rest in rows:
        purposes.append(Purpose(KINDS[kind], unit, step, numel, tuple(each for each in rest[:AHEAD] if each >= 0)))
        common = [one & other for one, other in zip(common, rest[AHEAD:], strict=True)]
    ready = [at * WORD_BITS + bit for at, word in enumerate(common) for bit in range(WORD_BITS) if word >> bit & 1]
    return purposes, ready


def words_for(units: int) -> int:
    return -(-units // WORD_BITS)
