"""The activations of a layer against Korthikanti et al. 2022."""

from __future__ import annotations

import pytest

from tests.ranks.activations import formula, kept_bytes
from tests.ranks.launching import run_on_ranks


@pytest.mark.parametrize(("kind", "ranks"), [("none", 1), ("tensor", 2), ("sequence", 2), ("sequence", 4)])
def test_a_layer_keeps_what_the_formula_says(kind: str, ranks: int) -> None:
    found = run_on_ranks(ranks, kept_bytes, kind) if ranks > 1 else [kept_bytes(kind)]
    for each in found:
        assert each == pytest.approx(formula(kind, ranks), rel=0.02)
