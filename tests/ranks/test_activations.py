"""The activations of a layer against Korthikanti et al. 2022."""

from __future__ import annotations

import pytest

from tests.ranks.activations import formula, kept_bytes
from tests.ranks.launching import run_on_ranks


def kept_by_all(kinds: list[str]) -> list[float]:
    return [kept_bytes(kind) for kind in kinds]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_layer_keeps_what_the_formula_says(ranks: int) -> None:
    kinds = ["none"] if ranks == 1 else ["tensor", "sequence"]
    found = run_on_ranks(ranks, kept_by_all, kinds) if ranks > 1 else [kept_by_all(kinds)]
    for each in found:
        assert each == pytest.approx([formula(kind, ranks) for kind in kinds], rel=0.02)
