"""The oracle is the sequence itself: after a pass was seen, the future is known by list arithmetic."""

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.planning import schedule as schedule_module
from outsize.planning.schedule import NEVER, Schedule

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
    """Run one pass, and a step after training; return how many uses were not predicted."""
    schedule.begin(kind)
    misses = sum(not schedule.use(unit) for unit in uses)
    if kind == "train":
        schedule.step()
    return misses


def learnt(uses: Sequence[int]) -> Schedule:
    schedule = Schedule()
    run_pass(schedule, uses)
    return schedule


def play(schedule: Schedule, history: Iterable[tuple[str, object]]) -> None:
    for name, argument in history:
        if name == "begin":
            schedule.begin(str(argument))
        elif name == "step":
            schedule.step()
        elif isinstance(argument, int):
            schedule.use(argument)


# Any sequence of calls


@given(st.lists(calls, max_size=200), st.integers(-1, 15))
def test_any_interleaving_is_accepted_and_upcoming_never_names_the_current_unit_or_one_twice(
    history: list[tuple[str, object]], k: int
) -> None:
    schedule = Schedule()
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


@pytest.mark.parametrize("kind", ["train", "eval"])
@given(uses=passes)
def test_second_identical_pass_is_predicted_perfectly(kind: str, uses: list[int]) -> None:
    schedule = Schedule()
    assert run_pass(schedule, uses, kind) == len(collapsed(uses))
    assert run_pass(schedule, uses, kind) == 0
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
    schedule = learnt(uses)
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
    schedule = learnt([0, 0, 1, 1, 1, 0])
    assert run_pass(schedule, [0, 1, 1, 0, 0]) == 0
    assert (schedule.right, schedule.wrong) == (3, 0)


def test_nothing_is_foreseen_in_the_first_pass() -> None:
    schedule = Schedule()
    assert schedule.upcoming(3) == []
    schedule.begin("train")
    assert not any(schedule.use(unit) for unit in collapsed(TRAIN))
    assert schedule.upcoming(3) == []
    assert schedule.next_use(0) == NEVER
    assert schedule.wrong == 0


def test_unit_that_turns_the_pass_around_is_the_last_to_be_needed_again() -> None:
    schedule = learnt(TRAIN)
    schedule.begin("train")
    for unit in range(6):
        schedule.use(unit)
    assert max(range(6), key=schedule.next_use) == 0
    assert schedule.upcoming(6) == [6, 7, 8, 9, 4, 3]


# What one order is


def test_step_expects_the_next_pass_from_its_beginning() -> None:
    schedule = learnt(TRAIN)
    assert schedule.upcoming(3) == [0, 1, 2]
    assert schedule.next_use(0) == 1
    assert run_pass(schedule, TRAIN) == 0


def test_uses_between_two_passes_do_not_count_as_training() -> None:
    schedule = Schedule()
    schedule.use(7)
    run_pass(schedule, TRAIN)
    schedule.begin("eval")
    schedule.use(3)
    assert run_pass(schedule, TRAIN) == 0


def test_loop_that_only_steps_is_learnt_too() -> None:
    schedule = Schedule()
    for expected in (len(FORWARD), 0, 0):
        assert sum(not schedule.use(unit) for unit in FORWARD) == expected
        schedule.step()


def test_loop_without_steps_is_predicted_by_its_first_pass() -> None:
    schedule = Schedule()
    for expected in (len(collapsed(TRAIN)), 0, 0, 0):
        schedule.begin("train")
        assert sum(not schedule.use(unit) for unit in TRAIN) == expected


def accumulated(schedule: Schedule, *passes: Sequence[int]) -> int:
    misses = 0
    for uses in passes:
        schedule.begin("train")
        misses += sum(not schedule.use(unit) for unit in uses)
    schedule.step()
    return misses


def test_two_forwards_before_one_backward_are_predicted() -> None:
    schedule = Schedule()
    accumulated(schedule, FORWARD, TRAIN + TRAIN[10:])
    for _ in range(3):
        assert accumulated(schedule, FORWARD, TRAIN + TRAIN[10:]) == 0


def test_passes_of_different_order_in_one_step_are_predicted() -> None:
    schedule = Schedule()
    branches = [[0, 1, 2, 3, 2, 1, 0], [0, 1, 7, 8, 7, 1, 0]]
    accumulated(schedule, *branches)
    assert accumulated(schedule, *branches) == 0


def test_alternating_train_and_eval_are_both_predicted() -> None:
    schedule = Schedule()
    evaluate = [0, 1, 2, 3, 11, 12]
    run_pass(schedule, TRAIN, "train")
    run_pass(schedule, evaluate, "eval")
    for _ in range(5):
        assert run_pass(schedule, TRAIN, "train") == 0
        assert run_pass(schedule, evaluate, "eval") == 0


def test_an_evaluation_between_two_accumulations_disturbs_neither() -> None:
    schedule = Schedule()
    for round in range(3):
        misses = 0
        for kind, uses in (("train", TRAIN), ("eval", [11, 12]), ("train", [*FORWARD, 13])):
            schedule.begin(kind)
            misses += sum(not schedule.use(unit) for unit in uses)
        schedule.step()
        assert not round or not misses


def test_first_evaluation_is_predicted_by_the_training_forward() -> None:
    assert run_pass(learnt(TRAIN), FORWARD, "eval") == 0


def test_generation_of_many_short_passes_is_predicted() -> None:
    schedule = learnt(TRAIN)
    run_pass(schedule, FORWARD, "eval")
    assert sum(run_pass(schedule, FORWARD, "eval") for _ in range(100)) == 0
    assert run_pass(schedule, TRAIN, "train") == 0


# Surprises


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


@given(st.integers(1, 18), st.integers(1, 6))
def test_unknown_stretch_is_left_where_it_was_entered(position: int, length: int) -> None:
    order = collapsed(TRAIN)
    assert run_pass(learnt(TRAIN), order[:position] + list(range(100, 100 + length)) + order[position:]) == length


def test_layers_that_choose_an_expert_cost_two_mispredictions_each_at_most() -> None:
    schedule = Schedule()
    for number in range(20):
        experts = [10 * layer + 1 + (number * layer) % 3 for layer in range(6)]
        forward = [unit for layer in range(6) for unit in (10 * layer, experts[layer])]
        misses = run_pass(schedule, forward + forward[::-1])
        assert not number or misses <= 2 * 2 * 6


def test_loop_of_varying_length_costs_two_mispredictions() -> None:
    def looped(times: int) -> list[int]:
        return [0, *[1, 2] * times, 3, 4, 5]

    schedule = learnt(looped(4))
    for times in (3, 5, 2, 6, 4):
        assert run_pass(schedule, looped(times)) <= 2 * 4


def test_surprise_at_the_end_of_a_pass_does_not_weigh_on_the_next() -> None:
    schedule = learnt(TRAIN)
    run_pass(schedule, [*TRAIN, 98, 97])
    assert run_pass(schedule, [99, *TRAIN]) == 1


def test_interrupted_pass_costs_one_step() -> None:
    schedule = learnt(TRAIN)
    schedule.begin("train")
    for unit in FORWARD[:5]:
        schedule.use(unit)  # an exception ended it
    assert run_pass(schedule, TRAIN) <= 2
    assert run_pass(schedule, TRAIN) <= 2
    assert run_pass(schedule, TRAIN) == 0


# Bounds


def recorded_uses(schedule: Schedule) -> int:
    return sum(len(each.recorded) + len(each.order) for each in schedule._kinds.values())


@pytest.mark.parametrize("period", [5, 7])
def test_pass_that_never_ends_stays_bounded_and_predicted(monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    monkeypatch.setattr(schedule_module, "MAX_USES", 100)
    schedule = learnt(TRAIN)
    schedule.begin("eval")
    for number in range(5_050):
        schedule.use(number % period)
        assert recorded_uses(schedule) <= len(TRAIN) + 2 * 100
    assert schedule.right > 4_500
    assert run_pass(schedule, TRAIN, "train") == 0


def test_pass_of_ever_new_units_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "MAX_USES", 100)
    schedule = Schedule()
    for number in range(5_000):
        schedule.use(number)
    assert recorded_uses(schedule) <= 200


@given(st.lists(calls, max_size=300), st.integers(1, 6))
def test_cut_passes_leave_any_interleaving_accepted(history: list[tuple[str, object]], max_uses: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_module, "MAX_USES", max_uses)
        schedule = Schedule()
        play(schedule, history)
        assert recorded_uses(schedule) <= 3 * 2 * max_uses
        schedule.upcoming(10)
