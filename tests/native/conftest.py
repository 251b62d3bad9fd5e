"""Every instruction set that this processor has."""

from collections.abc import Iterator

import pytest

from outsize import _native


@pytest.fixture(params=_native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces one instruction set for the test."""
    before = _native.instruction_set()
    _native.use_instruction_set(request.param)
    yield request.param
    _native.use_instruction_set(before)
