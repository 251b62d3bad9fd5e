"""Tiers from budgets: what fits, what goes where, and errors that name unit, numbers and remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.planning.errors import BudgetError
from outsize.planning.placement import (
    MIN_DEPTH,
    Budgets,
    RunAgain,
    UnitBytes,
    check_largest_unit,
    format_at_least,
    least_staging,
    most_at_once,
    place,
    slab_bytes,
    with_gradients_to_disk,
)
from outsize.planning.sizes import parse_bytes

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


def test_without_a_disk_the_least_budget_that_is_named_is_accepted() -> None:
    sizes = [UnitBytes("large", 6 * MIB, 6 * MIB, 12 * MIB), *units(4)]
    for host in (MIB, 20 * MIB):
        with pytest.raises(BudgetError, match=r"24.0 MiB in unit 'large'.* no disk is given") as caught:
            place(sizes, Budgets(host=host), AUTO)
        assert caught.value.available == host
        assert all(each.stay for each in place(sizes, Budgets(host=caught.value.needed), AUTO))


def test_a_disk_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"do not fit the disk: 20\.0 MiB may be used there"):
        place(units(10), Budgets(host=40 * MIB, disk=20 * MIB), ON_DISK)


def test_memory_asked_for_and_not_there_is_refused() -> None:
    wanted = {"params": "host", "grads": "disk", "states": "disk"}
    with pytest.raises(ValueError, match="do not fit host_memory="):
        place(units(40), Budgets(host=64 * MIB, disk=1 << 40), wanted)


def test_host_memory_counts_those_gradients_that_go_to_disk() -> None:
    """The first unit's, the largest, stay on the device. Where the host has no room for those on their way, all rest in
    memory or the budget is refused."""
    sizes = [UnitBytes("large", 8 * MIB, 8 * MIB, 0), *[UnitBytes(f"{at}", MIB, MIB, 0) for at in range(20)]]
    budgets = Budgets(host=4 * MIB, device=34 * MIB, disk=1 << 40)
    wanted = {"params": "disk", "grads": "auto", "states": "disk"}
    tiers = place(sizes, budgets, wanted)
    assert {each.grads for each in tiers} == {"device", "disk"}
    assert tiers[0].grads == "device"
    moving = budgets.moving_bytes(sizes, True, with_gradients_to_disk(sizes, tiers))
    assert moving <= budgets.host < budgets.moving_bytes(sizes, True, sizes)
    with pytest.raises(BudgetError, match="gradients on their way to disk .* unit '[0-9]+'") as caught:
        place(sizes, replace(budgets, host=2 * MIB), wanted)
    place(sizes, replace(budgets, host=caught.value.needed), wanted)
    few = place(sizes[:2], replace(budgets, host=2 * MIB, device=32 * MIB), wanted)
    assert {each.grads for each in few} == {"device", "host"}


WISHES = st.fixed_dictionaries({kind: st.sampled_from(["auto", "device", "host", "disk"]) for kind in AUTO})


@given(st.integers(1, 30), st.integers(0, 60), st.sampled_from([None, 0, 40]), st.sampled_from([None, 9]), WISHES)
def test_budgets_that_are_raised_by_what_is_missing_hold_the_model(
    count: int, host: int, device: int | None, disk: int | None, wanted: dict[str, str]
) -> None:
    fields = {"host_memory": host * MIB, "device_memory": device, "disk_space": disk}
    if disk is None:
        wanted = {kind: "auto" if tier == "disk" else tier for kind, tier in wanted.items()}
    for _ in range(40 + 4 * count):
        budgets = Budgets(fields["host_memory"] or 0, fields["device_memory"], fields["disk_space"])
        try:
            place(units(count), budgets, wanted)
            return
        except BudgetError as error:
            told = error
        assert told.needed > told.available >= 0
        assert told.field in str(told)
        fields[told.field] = (fields[told.field] or 0) + told.needed - told.available
    pytest.fail("the budgets never hold the model")


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


def test_units_that_one_forward_uses_at_once_are_refused_by_the_module_and_the_budget_that_holds_them() -> None:
    together = {"lstm": (0, 1, 2)}
    with pytest.raises(ValueError, match=r"module 'lstm' needs 12.0 MiB .*raise host_memory to at least 13.8 MiB"):
        place(units(8), Budgets(host=12 * MIB, disk=1 << 40), ON_DISK, together)
    assert place(units(8), Budgets(host=parse_bytes("13.8MiB", ""), disk=1 << 40), ON_DISK, together)


def test_a_layer_that_runs_again_takes_all_of_its_weights_and_the_largest_gradients_of_one_unit() -> None:
    of_layer = [*units(3), replace(units(1)[0], grads=6 * MIB), replace(units(1)[0], grads=20 * MIB, tiles=MIB)]
    assert most_at_once(of_layer, {"layer": RunAgain(range(4))}) == (22 * MIB, "layer", (0, 1, 2, 3))
    assert most_at_once(of_layer, {"layer": RunAgain((0, 4))}) == (10 * MIB, "layer.0", ())
    assert most_at_once(of_layer, {"layer": RunAgain((0, 1, 2, 4))})[0] == 16 * MIB
    with pytest.raises(ValueError, match=r"layer 'layer' needs 22.0 MiB .* runs again .* or pass activations='auto'"):
        place(of_layer, Budgets(host=20 * MIB, disk=1 << 40), ON_DISK, {"layer": RunAgain(range(4))})


@given(st.integers(8, 100), st.integers(1, 8))
def test_what_rests_in_memory_leaves_room_for_units_that_are_used_at_once(host: int, count: int) -> None:
    many, budgets = units(10), Budgets(host * MIB, disk=1 << 40)
    together = {"": tuple(range(count))}
    try:
        tiers = place(many, budgets, AUTO, together)
    except ValueError:
        return
    if all(each.params == "device" for each in tiers):
        return
    resting = sum(
        getattr(unit, kind)
        for unit, each in zip(many, tiers, strict=True)
        for kind in AUTO
        if getattr(each, kind) == "device"
    )
    assert resting + sum(unit.gathered for unit in many[:count]) <= budgets.computing[1]


@given(st.integers(1, 1 << 36), st.sampled_from([16, 32, 100]), st.sampled_from([None, 1]))
def test_the_least_budget_is_the_least_that_is_accepted(working: int, element_bytes: int, device: int | None) -> None:
    budgets = Budgets(1, device, least_staging=least_staging(element_bytes))
    least = budgets.least_for(working)

    def accepts(nbytes: int) -> bool:
        asked = Budgets(nbytes, None if device is None else nbytes, least_staging=budgets.least_staging)
        try:
            check_largest_unit([UnitBytes("unit", working, 0, 0)], asked)
        except ValueError:
            return False
        return True

    assert accepts(least) and not accepts(least - 1)
    assert accepts(parse_bytes(format_at_least(least), ""))


@given(st.integers(1 << 10, 1 << 45))
def test_a_least_size_is_written_without_rounding_down_and_within_three_hundredths(nbytes: int) -> None:
    assert nbytes <= parse_bytes(format_at_least(nbytes), "") <= nbytes * 1.03 + 103


@given(st.integers(1, 64))
def test_the_least_staging_holds_its_slabs(element_bytes: int) -> None:
    staging = least_staging(element_bytes)
    assert MIN_DEPTH * slab_bytes(staging, element_bytes) <= staging
