"""The choice among modes: trying all combinations is the oracle."""

from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from outsize.planning import choice
from outsize.planning.choice import Chosen, cheapest

Items = list[list[tuple[int, float]]]

options = st.tuples(st.integers(0, 30), st.integers(0, 20).map(float))
items = st.lists(st.lists(options, min_size=0, max_size=2), max_size=5).map(
    lambda drawn: [[(0, 9.0), *each] for each in drawn]
)


def total(chosen: list[int], of: Items) -> tuple[float, int]:
    """(seconds, bytes)"""
    taken = [item[index] for item, index in zip(of, chosen, strict=True)]
    return sum(seconds for _, seconds in taken), sum(nbytes for nbytes, _ in taken)


@given(items, st.integers(0, 100))
def test_no_other_choice_is_better(of: Items, most: int) -> None:
    best = min(
        found
        for each in itertools.product(*(range(len(item)) for item in of))
        if (found := total(list(each), of))[1] <= most
    )
    assert total(cheapest(of, most), of) == best


@given(items, st.integers(0, 100), st.integers(0, 100))
def test_fewer_bytes_never_take_more(of: Items, one: int, other: int) -> None:
    few, many = sorted((one, other))
    assert total(cheapest(of, few), of)[1] <= total(cheapest(of, many), of)[1]


def test_many_different_layers_take_no_time() -> None:
    """Of the states of the choice only so many are followed: what is chosen fits, and is near the best."""
    of = [[(0, 1 + at / 7), (1000 + 37 * at * at, 0.0), (500 + 11 * at * at, 0.1 + at / 90)] for at in range(60)]
    most = sum(max(each)[0] for each in of) // 3
    began = time.perf_counter()
    seconds, nbytes = total(cheapest(of, most), of)
    assert time.perf_counter() - began < 30, "seconds where all combinations would take years"
    assert nbytes <= most
    by_worth = sorted(range(60), key=lambda at: of[at][0][1] / of[at][1][0], reverse=True)
    left, greedy = most, sum(item[0][1] for item in of)
    for at in by_worth:
        if of[at][1][0] <= left:
            left -= of[at][1][0]
            greedy -= of[at][0][1]
    assert seconds <= greedy
    assert choice.MOST_STATES >= 1000


def test_what_all_fits_is_chosen_without_a_search() -> None:
    """Of 20,000 layers each state of the search would be looked at."""
    seen = 0

    class Counted(float):
        def __add__(self, other: float) -> float:
            nonlocal seen
            seen += 1
            return float(self) + other

        __radd__ = __add__

    of = [[(8, Counted(0.0)), (0, Counted(1.0)), (4, Counted(0.0))] for _ in range(200)]
    assert cheapest(of, 4 * 200) == [2] * 200  # of equals the fewest bytes
    assert seen <= 200


def test_what_was_chosen_in_words() -> None:
    text = str(Chosen({"a": "keep", "b": "recompute", "c": "keep"}, 3 << 20, 0.25, 4 << 20))
    assert text.startswith("activations: 3.0 MiB kept of 4.0 MiB spare; of 3 layers 2 keep what they save, 1 compute")
    assert text.endswith("(0.25 s a step)")
    assert "chosen when they have run" in str(Chosen(spare=1 << 20))
