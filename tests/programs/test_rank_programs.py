"""Random programs on two ranks: as plain torch on the batches of both, and the same bits wherever state rests."""

import pytest

from tests.programs.programs import program_of
from tests.programs.ranks import first_failure

GROUPS, EACH = 2, 5


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_programs_on_two_ranks_do_what_they_do_in_torch(group: int) -> None:
    found = first_failure([program_of(seed, ranks=2) for seed in range(group * EACH, (group + 1) * EACH)])
    if found is not None:
        program, failure = found
        pytest.fail(f"{failure}\n{program}")
