"""Tiers from budgets: what fits, what goes where, and errors that name unit, numbers and remedy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.plan.placement import Budgets, UnitBytes, place, slab_bytes

MIB = 1 << 20
AUTO = {"params": "auto", "grads": "auto", "states": "auto"}
ON_DISK = {"params": "disk", "grads": "disk", "states": "disk"}


def units(count: int, size: int = 4 * MIB) -> list[UnitBytes]:
    return [UnitBytes(f"layer.{i}", size, size, 2 * size) for i in range(count)]


def test_what_fits_stays_on_the_device() -> None:
    tiers = place(units(4), Budgets(host=100 * MIB), AUTO)
    assert {(t.params, t.grads, t.states) for t in tiers} == {("device", "device", "device")}


def test_on_a_cpu_the_rest_goes_to_disk_and_the_most_moved_bytes_stay() -> None:
    tiers = place(units(10), Budgets(host=64 * MIB, disk=1 << 40), AUTO)
    assert [t.params for t in tiers].count("device") > [t.states for t in tiers].count("device")
    assert all(t.states in ("device", "disk") for t in tiers)


def test_with_an_accelerator_the_rest_goes_to_the_host_and_then_to_disk() -> None:
    tiers = place(units(10), Budgets(host=60 * MIB, device=40 * MIB, disk=1 << 40), AUTO)
    used = {tier for t in tiers for tier in (t.params, t.grads, t.states)}
    assert used == {"device", "host", "disk"}


def test_a_unit_larger_than_the_budget_is_named_with_numbers_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"unit 'layer.0' needs 8.0 MiB .* host_memory is 8.0 MiB; raise host_memory"):
        place(units(3), Budgets(host=8 * MIB, disk=1 << 40), ON_DISK)


def test_without_a_disk_the_shortage_says_so() -> None:
    with pytest.raises(ValueError, match="no disk is given; pass disk="):
        place(units(10), Budgets(host=40 * MIB), AUTO)


def test_a_disk_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"do not fit the disk: 20\.0 MiB may be used there"):
        place(units(10), Budgets(host=40 * MIB, disk=20 * MIB), ON_DISK)


def test_memory_asked_for_and_not_there_is_refused() -> None:
    wanted = {"params": "host", "grads": "disk", "states": "disk"}
    with pytest.raises(ValueError, match="do not fit host_memory="):
        place(units(40), Budgets(host=64 * MIB, disk=1 << 40), wanted)


@given(st.integers(1, 30), st.integers(0, 400), st.sampled_from([None, 0, 40, 100, 1000]))
def test_no_tier_holds_more_than_its_budget(count: int, host: int, device: int | None) -> None:
    budgets = Budgets(host * MIB, None if device is None else device * MIB, 1 << 40)
    try:
        tiers = place(units(count), budgets, AUTO)
    except ValueError:
        return
    used: dict[str, int] = {}
    for unit, each in zip(units(count), tiers, strict=True):
        for kind in ("params", "grads", "states"):
            tier = getattr(each, kind)
            used[tier] = used.get(tier, 0) + getattr(unit, kind)
    if device is None:
        assert used.get("device", 0) + used.get("host", 0) <= budgets.host
    else:
        assert used.get("device", 0) <= device * MIB
        assert used.get("host", 0) <= budgets.host


@given(st.integers(1 << 18, 1 << 25), st.integers(1, 40))
def test_slabs_fit_the_staging_arena_or_hold_one_page_of_every_array(staging: int, element_bytes: int) -> None:
    nbytes = slab_bytes(staging, element_bytes)
    assert nbytes % 4096 == 0
    assert nbytes >= 4096 * element_bytes
    assert nbytes == 4096 * element_bytes or 3 * nbytes <= staging
