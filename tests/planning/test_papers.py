"""`docs/papers.md` says what the planner says, in the cheap parts. Its figures are within their reasons."""

from __future__ import annotations

from benchmarks import papers


def test_the_page_has_the_tables_that_the_planner_makes() -> None:
    page = papers.PAGE.read_text()
    for part in (papers.zero, papers.activation_bytes, papers.infinity_states):
        assert part() in page, f"{part.__name__} has changed: run python -m benchmarks.papers"


def test_a_simulated_step_overlaps_what_the_formula_adds_up() -> None:
    for rate in (1e9, 70e9):
        found = papers.simulated(1, rate)
        bound = min(1.5 * 1024 * rate / papers.PEAK, 1.0)  # weights come twice for three products of each
        assert papers.formula(1024, rate) < found < 2 * papers.formula(1024, rate)
        assert 0.7 * bound < found < 1.3 * bound
