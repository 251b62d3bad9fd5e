"""The oracle is the sequence itself: after a pass was seen, the future is known by list arithmetic."""

import gc
import itertools
import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.plan import schedule as schedule_module
from outsize.plan.schedule import NEVER, Schedule

FORWARD = list(range(10))
TRAIN = FORWARD + FORWARD[::-1]

units = st.integers(0, 9)
passes = st.lists(units, min_size=1, max_size=30)
calls = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(["train", "eval"])),
    st.tuples(st.just("step"), st.none()),
    st.tuples(st.just("use"), units),
)


def collapsed(uses: Iterable[int]) -> list[int]:
    return [unit for unit, _ in itertools.groupby(uses)]


def run_pass(schedule: Schedule, uses: Sequence[int], kind: str = "train") -> int:
    """Run one pass; return how many uses were not predicted."""
    schedule.begin(kind)
    return sum(not schedule.use(unit) for unit in uses)


def play(schedule: Schedule, history: Iterable[tuple[str, object]]) -> None:
    for name, argument in history:
        if name == "begin":
            schedule.begin(str(argument))
        elif name == "step":
            schedule.step()
        elif isinstance(argument, int):
            schedule.use(argument)


# Any sequence of calls


@given(st.lists(calls, max_size=200), st.integers(1, 4), st.integers(-1, 15))
def test_any_interleaving_is_accepted_and_upcoming_never_names_the_current_unit_or_one_twice(
    history: list[tuple[str, object]], remembered: int, k: int
) -> None:
    schedule = Schedule(remembered)
    current = None
    for call in history:
        play(schedule, [call])
        current = call[1] if call[0] == "use" else None
        upcoming = schedule.upcoming(k)
        assert len(upcoming) == len(set(upcoming)) <= max(k, 0)
        assert current not in upcoming


@given(st.lists(calls, max_size=200))
def test_upcoming_is_ordered_by_next_use_and_all_that_is_foreseen(history: list[tuple[str, object]]) -> None:
    schedule = Schedule()
    play(schedule, history)
    current = [history[-1][1]] if history and history[-1][0] == "use" else []
    foreseen = [unit for unit in range(10) if schedule.next_use(unit) < NEVER and unit not in current]
    assert schedule.upcoming(10) == sorted(foreseen, key=schedule.next_use)
    for k in range(10):
        assert schedule.upcoming(k) == schedule.upcoming(10)[:k]


@given(st.lists(calls, max_size=200), units)
def test_use_is_predicted_exactly_when_it_is_the_first_upcoming(history: list[tuple[str, object]], unit: int) -> None:
    schedule = Schedule()
    play(schedule, history)
    if history and history[-1] == ("use", unit):
        return  # A repeat.
    expected, right, wrong = schedule.upcoming(1), schedule.right, schedule.wrong
    assert schedule.use(unit) == (expected == [unit])
    assert schedule.right - right == (expected == [unit])
    assert schedule.wrong - wrong == (expected not in ([], [unit]))


@given(st.lists(calls, max_size=100), passes)
def test_predictions_do_not_change_when_they_are_asked_for(history: list[tuple[str, object]], uses: list[int]) -> None:
    asked, silent = Schedule(), Schedule()
    for call in history:
        play(asked, [call])
        play(silent, [call])
        asked.upcoming(5)
        asked.next_use(3)
    assert run_pass(asked, uses) == run_pass(silent, uses)


# A pass that was seen


@given(passes)
def test_second_identical_pass_is_predicted_perfectly(uses: list[int]) -> None:
    schedule = Schedule()
    assert run_pass(schedule, uses) == len(collapsed(uses))
    assert run_pass(schedule, uses) == 0
    assert (schedule.right, schedule.wrong) == (len(collapsed(uses)), 0)


@given(st.lists(calls, max_size=150), passes)
def test_third_identical_pass_is_predicted_perfectly_after_any_history(
    history: list[tuple[str, object]], uses: list[int]
) -> None:
    schedule = Schedule()
    play(schedule, history)
    for _ in range(2):
        run_pass(schedule, uses)
    assert run_pass(schedule, uses) == 0


@given(passes, st.integers(1, 12))
def test_next_use_and_upcoming_are_those_of_the_repeated_sequence(uses: list[int], k: int) -> None:
    schedule = Schedule()
    run_pass(schedule, uses)
    order = collapsed(uses)
    schedule.begin("train")
    for position in range(len(order)):
        future = order[position:] + order
        for unit in range(10):
            assert schedule.next_use(unit) == (future.index(unit) + 1 if unit in future else NEVER)
        current = order[position - 1] if position else None
        distinct = [unit for unit in dict.fromkeys(future) if unit != current]
        assert schedule.upcoming(k) == distinct[:k]
        schedule.use(order[position])


def test_repeats_in_a_row_are_one_use() -> None:
    schedule = Schedule()
    run_pass(schedule, [0, 0, 1, 1, 1, 0])
    assert run_pass(schedule, [0, 1, 1, 0, 0]) == 0
    assert (schedule.right, schedule.wrong) == (3, 0)


def test_nothing_is_foreseen_in_the_first_pass() -> None:
    schedule = Schedule()
    assert schedule.upcoming(3) == []
    assert run_pass(schedule, TRAIN) == len(collapsed(TRAIN))
    assert schedule.upcoming(3) == []
    assert schedule.next_use(0) == NEVER
    assert schedule.wrong == 0


def test_unit_that_turns_the_pass_around_is_the_last_to_be_needed_again() -> None:
    schedule = Schedule()
    run_pass(schedule, TRAIN)
    schedule.begin("train")
    for unit in range(6):
        schedule.use(unit)
    assert max(range(6), key=schedule.next_use) == 0
    assert schedule.upcoming(6) == [6, 7, 8, 9, 4, 3]


# The end of a pass


def test_step_expects_the_next_pass_from_its_beginning() -> None:
    schedule = Schedule()
    run_pass(schedule, TRAIN)
    schedule.step()
    assert schedule.upcoming(3) == [0, 1, 2]
    assert schedule.next_use(0) == 1
    assert run_pass(schedule, TRAIN) == 0


def test_step_in_mid_pass_expects_nothing_more_of_it() -> None:
    schedule = Schedule()
    run_pass(schedule, TRAIN)
    run_pass(schedule, TRAIN[:-2])
    schedule.step()
    assert schedule.upcoming(2) == [0, 1]


def test_uses_between_two_passes_do_not_count_as_a_pass() -> None:
    schedule = Schedule()
    run_pass(schedule, TRAIN)
    schedule.step()
    schedule.use(7)
    schedule.use(3)
    assert run_pass(schedule, TRAIN) == 0


def test_end_of_a_pass_runs_on_into_the_next() -> None:
    schedule = Schedule()
    run_pass(schedule, TRAIN)
    run_pass(schedule, TRAIN[:-2])
    assert schedule.upcoming(4) == [1, 0, 3, 4]
    assert schedule.next_use(9) == 12


def test_loop_that_only_steps_is_learnt_too() -> None:
    schedule = Schedule()
    for expected in (len(FORWARD), 0, 0):
        assert sum(not schedule.use(unit) for unit in FORWARD) == expected
        schedule.step()


def test_order_that_follows_is_learnt_when_it_has_followed_twice() -> None:
    schedule = Schedule()
    for _ in range(3):
        run_pass(schedule, [0, 1, 2], "train")
        run_pass(schedule, [5, 6], "eval")
    run_pass(schedule, [0, 1, 2], "train")
    assert schedule.upcoming(5) == [5, 6, 0, 1]
    schedule.step()
    assert schedule.upcoming(2) == [5, 6]


def test_one_evaluation_does_not_change_what_follows_training() -> None:
    schedule = Schedule()
    for kind, uses in [("train", [0, 1, 2])] * 3 + [("eval", [5, 6]), ("train", [0, 1, 2])]:
        run_pass(schedule, uses, kind)
    assert schedule.upcoming(2) == [0, 1]


# Several orders


def test_alternating_train_and_eval_are_both_predicted() -> None:
    schedule = Schedule()
    evaluate = [0, 1, 2, 3, 11, 12]
    run_pass(schedule, TRAIN, "train")
    run_pass(schedule, evaluate, "eval")
    for _ in range(5):
        assert run_pass(schedule, TRAIN, "train") == 0
        assert run_pass(schedule, evaluate, "eval") == 0


def test_first_evaluation_is_predicted_by_the_training_forward() -> None:
    schedule = Schedule()
    run_pass(schedule, TRAIN, "train")
    assert run_pass(schedule, FORWARD, "eval") == 0


def test_generation_of_many_short_passes_is_predicted() -> None:
    schedule = Schedule()
    run_pass(schedule, TRAIN, "train")
    run_pass(schedule, FORWARD, "eval")
    assert sum(run_pass(schedule, FORWARD, "eval") for _ in range(100)) == 0
    assert run_pass(schedule, TRAIN, "train") == 0


def test_two_forwards_before_one_backward_are_predicted() -> None:
    schedule = Schedule()
    first, second = FORWARD, FORWARD + FORWARD[::-1] + FORWARD[::-1]
    misses = [run_pass(schedule, first) + run_pass(schedule, second) for _ in range(6)]
    assert misses[3:] == [0, 0, 0]
    assert max(misses[1:]) <= 2


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.data())
def test_branch_costs_at_most_one_misprediction_a_pass(choices: list[bool], data: st.DataObject) -> None:
    common = data.draw(st.lists(st.integers(0, 4), max_size=8))
    ends = [data.draw(st.lists(st.integers(5, 9), max_size=8)) for _ in range(2)]
    branches = [collapsed([4 - unit for unit in common] + [10 + branch] + ends[branch]) for branch in range(2)]
    schedule = Schedule()
    for branch in branches:
        run_pass(schedule, branch)
    for choice in choices:
        assert run_pass(schedule, branches[choice]) <= 1


def test_alternating_branches_become_perfect() -> None:
    schedule = Schedule()
    branches = [[0, 1, 2, 3, 2, 1, 0], [0, 1, 7, 8, 7, 1, 0]]
    misses = [run_pass(schedule, branches[number % 2]) for number in range(10)]
    assert max(misses[2:]) <= 1
    assert misses[6:] == [0, 0, 0, 0]


def test_branch_of_every_layer_costs_one_misprediction_each_at_most() -> None:
    layers = 6
    schedule = Schedule(remembered=8)
    choose = random.Random(0)
    for number in range(200):
        experts = [10 * layer + choose.randrange(1, 3) for layer in range(layers)]
        forward = [unit for layer in range(layers) for unit in (10 * layer, experts[layer])]
        misses = run_pass(schedule, forward + forward[::-1])
        assert number < 20 or misses <= 2 * layers


def test_least_recently_used_order_is_forgotten() -> None:
    schedule = Schedule(remembered=2)
    orders = [[number, number + 1, number + 2] for number in (0, 10, 20)]
    for order in orders:
        run_pass(schedule, order)
    assert run_pass(schedule, orders[1]) == 1  # Still known from its first use.
    assert run_pass(schedule, orders[0]) == 3


def test_ever_new_training_orders_do_not_push_out_the_evaluation() -> None:
    schedule = Schedule(remembered=4)
    run_pass(schedule, FORWARD, "eval")
    for number in range(100, 200):
        run_pass(schedule, [number, number + 1], "train")
    assert run_pass(schedule, FORWARD, "eval") == 0


# Surprises inside a pass


def learnt(uses: Sequence[int]) -> Schedule:
    schedule = Schedule()
    run_pass(schedule, uses)
    run_pass(schedule, uses)
    return schedule


@given(st.integers(0, 18))
def test_skipped_unit_costs_one_misprediction(position: int) -> None:
    order = collapsed(TRAIN)
    uses = collapsed(order[:position] + order[position + 1 :])
    assert run_pass(learnt(TRAIN), uses) <= 1


@given(st.integers(0, 18), st.sampled_from([*range(10), 99]))
def test_inserted_unit_costs_at_most_two_mispredictions(position: int, unit: int) -> None:
    order = collapsed(TRAIN)
    uses = collapsed([*order[:position], unit, *order[position:]])
    assert run_pass(learnt(TRAIN), uses) <= 2


def test_new_units_inserted_here_and_there_cost_one_misprediction_each() -> None:
    order = collapsed(TRAIN)
    assert run_pass(learnt(TRAIN), [*order[:3], 98, *order[3:8], 99, *order[8:]]) == 2


def test_surprise_at_the_end_of_a_pass_does_not_weigh_on_the_next() -> None:
    schedule = learnt(TRAIN)
    run_pass(schedule, [*TRAIN, 98, 97])
    assert run_pass(schedule, [99, *TRAIN]) == 1


@pytest.mark.parametrize("beginning", [[0, 1], [20, 21, 0, 1], [20, 21, 22, 0, 1, 2]])
@pytest.mark.parametrize(("kind", "next_unit"), [("train", 4), ("eval", 5)])
def test_order_of_the_same_kind_is_followed_where_both_fit(kind: str, next_unit: int, beginning: list[int]) -> None:
    schedule = Schedule()
    for other_kind, unit in (("train", 4), ("eval", 5)):
        run_pass(schedule, [0, 1, 2, unit], other_kind)
    for other_kind in ("eval", "train"):  # What a pass of either kind is expected to be.
        run_pass(schedule, [30, 31, 32], other_kind)
    run_pass(schedule, beginning, kind)
    schedule.use(2)
    assert schedule.upcoming(1) == [next_unit]


def test_order_being_followed_is_kept_where_another_fits_too() -> None:
    schedule = Schedule()
    run_pass(schedule, [20, 21, 6, 7, 11])
    run_pass(schedule, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    schedule.begin("train")
    for unit in (0, 6, 7):  # Too many were skipped to be sure at the 6.
        schedule.use(unit)
    assert schedule.upcoming(1) == [8]


@given(st.integers(1, 18), st.integers(1, 6))
def test_unknown_stretch_is_left_where_it_was_entered(position: int, length: int) -> None:
    order = collapsed(TRAIN)
    schedule = learnt(TRAIN)
    wrong = schedule.wrong
    misses = run_pass(schedule, order[:position] + list(range(100, 100 + length)) + order[position:])
    assert misses <= length + 1
    assert schedule.wrong - wrong <= 2


def test_unknown_order_is_not_predicted_until_it_is_known_again() -> None:
    schedule = learnt(TRAIN)
    schedule.begin("train")
    for unit in (0, 1, 100, 101):
        schedule.use(unit)
    assert schedule.upcoming(3) == []
    assert schedule.next_use(5) == NEVER
    schedule.use(6)
    schedule.use(7)  # The only place with 6, 7.
    assert schedule.upcoming(3) == [8, 9, 6]


def test_loop_of_varying_length_costs_one_misprediction() -> None:
    def looped(times: int) -> list[int]:
        return [0, *[1, 2] * times, 3, 4, 5]

    schedule = learnt(looped(4))
    for times in (3, 5, 2, 6, 4):
        assert run_pass(schedule, looped(times)) <= 2


def test_interrupted_pass_costs_one_misprediction_afterwards() -> None:
    schedule = learnt(TRAIN)
    run_pass(schedule, FORWARD[:5])  # An exception ended it.
    assert run_pass(schedule, TRAIN) <= 1
    assert run_pass(schedule, TRAIN) == 0


# Bounds


def recorded_uses(schedule: Schedule) -> int:
    return sum(len(order.uses) for order in schedule._orders) + len(schedule._recorded)


@pytest.mark.parametrize("period", [5, 7])
def test_pass_that_never_ends_stays_bounded_and_predicted(monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    monkeypatch.setattr(schedule_module, "MAX_USES", 100)
    schedule = Schedule()
    run_pass(schedule, TRAIN, "train")
    schedule.begin("eval")
    for number in range(5_050):
        schedule.use(number % period)
        assert recorded_uses(schedule) <= len(TRAIN) + 2 * 100
    assert schedule.right > 4_500
    schedule.begin("train")
    assert recorded_uses(schedule) == len(collapsed(TRAIN)) + 100  # No tail.
    assert run_pass(schedule, TRAIN, "train") == 0


def test_pass_of_ever_new_units_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "MAX_USES", 100)
    schedule = Schedule()
    for number in range(5_000):
        schedule.use(number)
    assert recorded_uses(schedule) <= 200


@given(st.lists(calls, max_size=300), st.integers(1, 3), st.integers(1, 6))
def test_cut_passes_leave_any_interleaving_accepted(
    history: list[tuple[str, object]], remembered: int, max_uses: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_module, "MAX_USES", max_uses)
        schedule = Schedule(remembered)
        play(schedule, history)
        assert len(schedule._orders) <= remembered
        assert recorded_uses(schedule) <= (remembered + 1) * max_uses
        schedule.upcoming(10)


def test_forgotten_orders_are_released() -> None:
    def alive() -> int:
        return sum(type(thing) is schedule_module._Order for thing in gc.get_objects())

    gc.collect()
    before = alive()
    schedule = Schedule(remembered=2)
    run_pass(schedule, FORWARD, "eval")
    for number in range(200):
        for _ in range(1 + number % 3):
            run_pass(schedule, [number, number + 1, number % 3], "train")
    assert alive() - before <= 2 + 2  # Remembered, and referred to by the last prediction.


@pytest.mark.parametrize("remembered", [0, -1])
def test_remembering_nothing_is_refused(remembered: int) -> None:
    with pytest.raises(ValueError, match="at least 1 order"):
        Schedule(remembered)
