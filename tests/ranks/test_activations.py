"""The activations of a layer against Korthikanti et al. 2022."""

from __future__ import annotations

import pytest

from tests.ranks.activations import formula, kept_bytes
from tests.ranks.launching import run_on_ranks

MODES = ("keep", "selective", "recompute")


def kept_by_all(kinds: list[str], modes: tuple[str, ...]) -> list[float]:
    return [kept_bytes(kind, mode) for kind in kinds for mode in modes]


@pytest.mark.parametrize(("ranks", "modes"), [(1, MODES), (2, MODES), (4, ("keep",))])
def test_a_layer_keeps_what_the_formula_says(ranks: int, modes: tuple[str, ...]) -> None:
    kinds = ["none"] if ranks == 1 else ["tensor", "sequence"]
    found = run_on_ranks(ranks, kept_by_all, kinds, modes) if ranks > 1 else [kept_by_all(kinds, modes)]
    for each in found:
        assert each == pytest.approx([formula(kind, mode, ranks) for kind in kinds for mode in modes], rel=0.02)


def test_fused_attention_leaves_no_scores_to_keep() -> None:
    assert kept_bytes("none", "selective", fused=True) == pytest.approx(
        formula("none", "selective", fused=True), rel=0.02
    )
