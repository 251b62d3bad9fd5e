"""Random programs on two ranks: as plain torch on the batches of both, and the same bits wherever state rests."""

import pytest

from tests.programs.programs import program_of
from tests.programs.ranks import first_failure

SEEDS = 5


@pytest.mark.slow
def test_programs_on_two_ranks_do_what_they_do_in_torch() -> None:
    found = first_failure([program_of(seed, ranks=2) for seed in range(SEEDS)])
    if found is not None:
        program, failure = found
        pytest.fail(f"{failure}\n{program}")
