"""Random programs in one process: the same as in plain torch, and the same bits wherever state rests."""

import pytest

from tests.programs.checking import check
from tests.programs.programs import program_of

GROUPS, EACH = 4, 5


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_programs_do_what_they_do_in_torch(group: int) -> None:
    for seed in range(group * EACH, (group + 1) * EACH):
        program = program_of(seed)
        failure = check(program)
        assert failure is None, f"{failure}\n{program}"
