"""The largest model of a family that fits, for several budgets side by side."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import outsize
from outsize.api.stages import shape_of
from outsize.planning.errors import BudgetError
from outsize.planning.sizes import format_bytes
from outsize.planning.tables import Plan
from outsize.planning.text import text_table

STEP = 128
"""By which widths grow: elements of a head."""
WIDEST = 1 << 18
STEPS = 32
"""Between a width and twice as much."""
VOCABULARY, KEY_VALUE_HEADS = 32000, 8
LLAMAS = ((768, 12), (2048, 16), (3072, 28), (4096, 32), (5120, 40), (6656, 60), (8192, 80), (16384, 126))
"""(width, layers) of published models."""
GPTS = (
    *((768, 12), (1536, 24), (2560, 32), (4096, 32), (5120, 40), (10240, 80), (12288, 96)),
    *((20480, 100), (25600, 128), (65536, 195), (163840, 315)),
)
"""GPT-3 (Brown et al. 2020, table 2.1) and ZeRO-Infinity (Rajbhandari et al. 2021, figure 2a)."""


def _module(**children: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def _llama(width: int) -> nn.Module:
    few = min(KEY_VALUE_HEADS * STEP, width)
    inner = -(-width * 7 // 2 // STEP) * STEP
    shapes = {"q": (width, width), "k": (width, few), "v": (width, few), "o": (width, width)}
    shapes |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    linears = {name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()}
    return _module(before=nn.RMSNorm(width), **linears, after=nn.RMSNorm(width))


def _gpt(width: int) -> nn.Module:
    shapes = {"qkv": (width, 3 * width), "o": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    linears = {name: nn.Linear(*shape) for name, shape in shapes.items()}
    return _module(before=nn.LayerNorm(width), **linears, after=nn.LayerNorm(width))


FAMILIES: dict[str, tuple[Sequence[tuple[int, int]], Callable[[int], nn.Module]]] = {
    "llama": (LLAMAS, _llama),
    "gpt": (GPTS, _gpt),
}


@dataclass(frozen=True)
class Largest:
    """The largest member, its plan, and the error of the next one."""

    parameters: int
    layers: int
    width: int
    plan: Plan
    next_error: BudgetError | None


def largest(family: str, **fields: Any) -> Largest:
    """The largest member of a family that `outsize.plan(model, **fields)` places; by bisection of the width, with as
    many layers as published models of that width, and one at least for each stage of `mesh`. Raises the `BudgetError`
    of the smallest one where it does not fit.
    """
    stages = shape_of(fields["mesh"]).stages if fields.get("mesh") else 1
    least = next((width for width in range(STEP, WIDEST + 1, STEP) if layers_of(family, width) >= stages), None)
    if least is None:
        raise ValueError(
            f"mesh has {stages} stages, and the widest {family} that is searched has {layers_of(family, WIDEST)} "
            f"layers: a stage needs a layer"
        )
    plans: dict[int, Plan] = {}
    error: BudgetError | None = None

    def fits(width: int) -> bool:
        nonlocal error
        try:
            plans[width] = outsize.plan(member(family, width), **fields)
        except BudgetError as refused:
            error = refused
        return width in plans

    low, high = 0, least
    while low < WIDEST and fits(high):
        low, high = high, min(2 * high, WIDEST)
    if error is not None and not low:
        raise error
    step = max(low // STEPS // STEP, 1) * STEP
    while high - low > step:
        middle = (low + high) // 2 // STEP * STEP
        low, high = (middle, high) if fits(middle) else (low, middle)
    numel = sum(param.numel() for param in member(family, low).parameters())
    return Largest(numel, layers_of(family, low), low, plans[low], error)


def layers_of(family: str, width: int) -> int:
    """As published models have: between two of them in proportion, beyond the last with the square root of the width,
    as theirs have grown."""
    points = FAMILIES[family][0]
    (first, least), (last, most) = points[0], points[-1]
    if width >= last:
        return round(most * math.sqrt(width / last))
    if width <= first:
        return max(round(least * width / first), 1)
    at = bisect_left(points, (width,))
    (low, few), (high, many) = points[at - 1], points[at]
    return round(few + (many - few) * (width - low) / (high - low))


def member(family: str, width: int, layers: int | None = None) -> nn.Module:
    """The parameters of a model, on the meta device; it cannot run."""
    with torch.device("meta"):
        body = nn.ModuleList(FAMILIES[family][1](width) for _ in range(layers or layers_of(family, width)))
        embedding, head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        if family == "gpt":
            head.weight = embedding.weight
        return _module(embedding=embedding, layers=body, head=head)


def table(family: str, found: Sequence[tuple[str, Largest]]) -> list[str]:
    """One row for each of several budgets, by their names."""
    tiers = sorted(
        {tier for _, each in found for tier in each.plan.by_tier}, key=("memory", "device", "host", "disk").index
    )
    rows: list[tuple[str, ...]] = [
        ("budgets", f"largest {family}", "layers x width", "states", *tiers, "next needs more")
    ]
    for name, each in found:
        used = (each.plan.by_tier.get(tier) for tier in tiers)
        rows.append(
            (
                name,
                f"{each.parameters / 1e9:,.4g} B",
                f"{each.layers} x {each.width}",
                format_bytes(each.plan.state_bytes),
                *("" if pair is None else " of ".join(map(format_bytes, pair)) for pair in used),
                "(wider ones are not searched)" if each.next_error is None else each.next_error.field,
            )
        )
    return text_table(rows, "<>>>" + ">" * len(tiers) + "<")
