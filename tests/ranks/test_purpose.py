"""What ranks that use different units tell each other: which unit is next, and which gradients are ready everywhere."""

from hypothesis import given
from hypothesis import strategies as st

from outsize.move.purpose import AHEAD, KINDS, OFFER, WANT, WANT_BACK, Purpose, Turn, decode, encode, turn_of, words_for


def want(unit: int, *ahead: int) -> Purpose:
    return Purpose(WANT, unit, 3, ahead=ahead)


def test_the_unit_of_the_rank_furthest_behind_is_next() -> None:
    assert turn_of([want(7), want(2), Purpose("forward")]) == Turn(2)
    assert turn_of([want(7), want(7)]) == Turn(7)
    assert turn_of([Purpose(WANT_BACK, 7), Purpose(WANT_BACK, 2), Purpose("backward")]) == Turn(7)


def test_nothing_is_next_where_nobody_wants_a_unit() -> None:
    assert turn_of([Purpose("forward"), Purpose(OFFER)]) is None


def test_what_all_expect_is_gathered_behind_it_in_the_order_of_the_first() -> None:
    assert turn_of([want(2, 5, 4, 9), want(2, 4, 5)]) == Turn(2, (5, 4))
    assert turn_of([want(2, 3, 4), want(3, 4)]) == Turn(2, (3, 4)), "what is wanted itself is expected too"
    assert turn_of([want(2, 5), Purpose("backward")]) == Turn(2), "who wants nothing expects nothing"


units = st.integers(0, 150)
purposes = st.builds(
    Purpose,
    st.sampled_from(KINDS),
    st.integers(-1, 150),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.lists(units, max_size=AHEAD).map(tuple),
)


@given(st.lists(st.tuples(purposes, st.sets(units)), min_size=1, max_size=4))
def test_rows_say_what_was_put_in(told: list[tuple[Purpose, set[int]]]) -> None:
    rows = [encode(purpose, ready, words_for(151)) for purpose, ready in told]
    assert all(abs(number) < 1 << 63 for row in rows for number in row)
    found, ready = decode(rows)
    assert found == [purpose for purpose, _ in told]
    assert set(ready) == set.intersection(*(each for _, each in told)) and ready == sorted(ready)
