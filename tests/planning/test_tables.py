"""What a plan costs: the oracle is the table of the ZeRO paper, and the engine's own promises."""

import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from outsize.planning.placement import Budgets, UnitBytes, UnitTiers
from outsize.planning.sizes import format_bytes
from outsize.planning.tables import EXACT_BYTES, Plan, planned, zero_bytes_per_device, zero_rows, zero_table


def test_one_rank_has_everything_at_any_stage() -> None:
    assert {zero_bytes_per_device(1000, 1, stage) for stage in range(4)} == {16_000}


def test_exact_state_is_twelve_bytes_and_fourteen_in_fp16() -> None:
    assert {dtype: sum(parts) for dtype, parts in EXACT_BYTES.items()} == {"fp32": 12, "bf16": 12, "fp16": 14}


@pytest.mark.parametrize(
    ("on_disk", "read_bytes", "written_bytes"),
    [
        ("", 0, 0),
        ("params", 4, 2),
        ("grads", 2, 2),
        ("states", 10, 10),
        ("params grads", 6, 4),
        ("params states", 14, 12),  # the update's own: 12 bytes each way
        ("grads states", 12, 12),
        ("params grads states", 16, 14),
    ],
)
def test_disk_traffic_of_a_parameter_in_bf16(on_disk: str, read_bytes: int, written_bytes: int) -> None:
    tiers = ["disk" if kind in on_disk else "device" for kind in ("params", "grads", "states")]
    unit = planned(UnitBytes("unit", 2, 2, 10), UnitTiers(*tiers, ""))
    assert (unit.read_bytes, unit.written_bytes) == (read_bytes, written_bytes)


def test_gradients_that_are_used_where_they_arise_are_not_moved() -> None:
    unit = planned(UnitBytes("unit", 2, 2, 10), UnitTiers("device", "disk", "disk", ""), "backward")
    assert (unit.read_bytes, unit.written_bytes) == (10, 10)


@pytest.mark.parametrize(("tiles", "read"), [(0, 12), (1, 18)])
def test_weights_that_stay_gathered_are_never_read(tiles: int, read: int) -> None:
    on_disk = UnitTiers("disk", "disk", "disk", "")
    unit = planned(UnitBytes("unit", 2, 2, 10, tiles=tiles), on_disk, stays=True)
    assert (unit.read_bytes, unit.written_bytes) == (read, 14)  # tiles never stay
    assert planned(UnitBytes("unit", 2, 0, 0), on_disk, stays=True).read_bytes == 0


def test_weights_of_an_optimizer_without_state_are_written_as_others() -> None:
    unit = planned(UnitBytes("unit", 4, 4, 0), UnitTiers("disk", "disk", "disk", ""))
    assert (unit.read_bytes, unit.written_bytes) == (12, 8)


def test_frozen_weights_are_read_twice_and_never_written() -> None:
    unit = planned(UnitBytes("unit", 2, 0, 0), UnitTiers("disk", "disk", "disk", ""))
    assert (unit.read_bytes, unit.written_bytes) == (4, 0)


ZERO_TABLE = {
    7.5e9: {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
            256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)},
    128e9: {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 256: (518, 263, 8),
            1024: (513, 257, 2)},
    1e12: {1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
           256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)},
}  # fmt: skip
"""GB on a device with stage 1, 2 and 3 (Rajbhandari et al. 2020, table 1)."""


@pytest.mark.parametrize("parameters", ZERO_TABLE)
def test_the_table_of_the_zero_paper(parameters: float) -> None:
    for ranks, published in ZERO_TABLE[parameters].items():
        rows = zero_rows(parameters, ranks)
        for (_, paper, own), value in zip(rows[1:], published, strict=True):
            assert paper / 1e9 == pytest.approx(value, rel=0.006, abs=0.006)
            assert own < paper
        text = zero_table(parameters, ranks)
        assert all(f"{paper / 1e9:,.2f}" in text for _, paper, _ in rows)


ON_DISK = UnitTiers("disk", "disk", "disk", "memory is full")


def plan_of(units: int, size_of: Callable[[int], int] = lambda index: 1 << 20, device: int | None = None) -> Plan:
    """A plan on disk, each unit of which is `size_of` its number in weights and gradients and twice that in states."""
    sizes = [UnitBytes(f"layers.{at}.<mlp>", size_of(at), size_of(at), 2 * size_of(at)) for at in range(units)]
    return Plan(tuple(planned(size, ON_DISK) for size in sizes), units << 18, Budgets(1 << 26, device, 1 << 40), 0, 0)


def cells(html: str) -> list[list[str]]:
    """The text of each row of each table."""
    return [["".join(cell.itertext()) for cell in row] for row in ElementTree.fromstring(f"<x>{html}</x>").iter("tr")]


def test_plan_is_shown_as_a_table_of_units_and_of_tiers() -> None:
    plan = plan_of(2, lambda at: (1 + at) << 20)
    lines = [re.split("  +", line) for line in str(plan).splitlines()]
    assert lines[2] == ["layers.0.<mlp>", "1.0 MiB", "1.0 MiB", "2.0 MiB", "disk", "memory is full"]
    assert lines[3] == ["layers.1.<mlp>", "2.0 MiB", "2.0 MiB", "4.0 MiB", "disk", "memory is full"]
    assert "\ndisk    12.0 MiB of 1.0 TiB\n" in str(plan)
    assert f"\nmemory  {format_bytes(plan.memory_bytes)} of 64.0 MiB " in str(plan)
    assert repr(plan) == str(plan)


def test_notebooks_show_the_same_table() -> None:
    assert cells(plan_of(1, device=1 << 30)._repr_html_()) == [
        ["unit", "parameters", "gradients", "states", "tiers", "why"],
        ["layers.0.<mlp>", "1.0 MiB", "1.0 MiB", "2.0 MiB", "disk", "memory is full"],
        ["tier", "bytes", "budget"],
        ["device", "0 B", "1.0 GiB"],
        ["host", "0 B", "64.0 MiB"],
        ["disk", "4.0 MiB", "1.0 TiB"],
    ]


def test_plan_of_a_thousand_units_is_cut_and_keeps_the_sums() -> None:
    plan = plan_of(1000, lambda at: (1 + at) << 10)
    assert str(plan).count("\nlayers.") == 1000
    units = [f"layers.{at}.<mlp>" for at in (*range(12), *range(996, 1000))]
    left_out = sum((1 + at) << 10 for at in range(12, 996))
    more = ["... 984 more, in all", *map(format_bytes, (left_out, left_out, 2 * left_out)), "", ""]
    rows = cells(plan._repr_html_())[1:18]
    assert rows[12] == more
    assert [row[0] for row in rows] == [*units[:12], more[0], *units[12:]]
    lines = [re.split("  +", line) for line in repr(plan).splitlines()[2:19]]
    assert lines == [[cell for cell in row if cell] for row in rows]


def test_units_that_are_alike_are_one_row() -> None:
    assert "layers.0.<mlp> ... layers.999.<mlp> (1000)" in repr(plan_of(1000))
