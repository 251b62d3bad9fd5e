"""The cut into units and the flat layout: arithmetic is the oracle."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from outsize.planning.layout import (
    ALIGN_ELEMENTS,
    PAGE_ELEMENTS,
    ModuleInfo,
    ParamInfo,
    array_layout,
    chunk_ranges,
    cut_units,
    lay_out,
    slots_in,
)

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float64": 8}

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
parameters = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEMSIZE)), st.booleans()), min_size=1, max_size=12).map(
    lambda drawn: {
        f"p{i}": ParamInfo(f"p{i}", shape, dtype, ITEMSIZE[dtype], trainable)
        for i, (shape, dtype, trainable) in enumerate(drawn)
    }
)


@given(parameters, st.sampled_from([1, 2, 3, 4, 8]))
def test_every_parameter_has_its_own_aligned_place(params: dict[str, ParamInfo], ranks: int) -> None:
    (layout,) = lay_out({"unit": tuple(params)}, params, ranks)
    assert {slot.name for slot in layout.slots} == set(params)
    spans = sorted((slot.offset, slot.end) for slot in layout.slots if slot.numel)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    array = array_layout(layout, ITEMSIZE)
    for slot in layout.slots:
        assert slot.numel == params[slot.name].numel
        assert slot.offset % ALIGN_ELEMENTS == 0
        assert array.span(slot.offset, slot.end)[0] % 64 == 0
        segment = layout.segment_of(slot)
        assert segment.start <= slot.offset <= slot.end <= segment.end


@given(parameters, st.sampled_from([1, 2, 3, 4, 8]))
def test_units_and_segments_are_whole_pages_for_every_rank(params: dict[str, ParamInfo], ranks: int) -> None:
    (layout,) = lay_out({"unit": tuple(params)}, params, ranks)
    assert layout.numel % (PAGE_ELEMENTS * ranks) == 0
    position = 0
    for segment in layout.segments:
        assert segment.start == position
        assert segment.byte_start % 4096 == 0
        assert segment.numel % (PAGE_ELEMENTS * ranks) == 0
        position = segment.end
    assert layout.param_bytes == sum(s.numel * ITEMSIZE[s.dtype] for s in layout.segments)


@given(parameters, st.integers(1, 5))
def test_chunks_cover_each_element_once(params: dict[str, ParamInfo], pages: int) -> None:
    (layout,) = lay_out({"unit": tuple(params)}, params)
    for segment in layout.segments:
        ranges = list(chunk_ranges(segment, pages * PAGE_ELEMENTS))
        assert ranges[0][0] == segment.start
        assert ranges[-1][1] == segment.end
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        met = [
            slot.name for start, end in ranges for slot, low, high in slots_in(layout, start, end) for _ in [high - low]
        ]
        owned = sum(high - low for start, end in ranges for _, low, high in slots_in(layout, start, end))
        assert owned == sum(slot.numel for slot in layout.slots if layout.segment_of(slot) is segment)
        assert set(met) == {slot.name for slot in layout.slots if layout.segment_of(slot) is segment and slot.numel}


@given(parameters)
def test_arrays_share_the_element_space_and_do_not_overlap(params: dict[str, ParamInfo]) -> None:
    (layout,) = lay_out({"unit": tuple(params)}, params)
    array = array_layout(layout, {"float32": 4, "bfloat16": 2})  # none for float64
    position = 0
    for segment in layout.segments:
        start, nbytes = array.span(segment.start, segment.end)
        assert start == position
        assert nbytes == segment.numel * {"float32": 4, "bfloat16": 2}.get(segment.dtype, 0)
        position += nbytes
    assert array.nbytes == position


def test_trainable_parameters_lie_together() -> None:
    params = {
        name: ParamInfo(name, (100,), "float32", 4, trainable)
        for name, trainable in (("a", False), ("b", True), ("c", False), ("d", True))
    }
    (layout,) = lay_out({"unit": tuple(params)}, params)
    assert [slot.name for slot in layout.slots] == ["b", "d", "a", "c"]


def module(
    name: str, params: tuple[str, ...] = (), children: tuple[ModuleInfo, ...] = (), lists: bool = False
) -> ModuleInfo:
    return ModuleInfo(name, params, children, lists)


def infos(**numels: int) -> dict[str, ParamInfo]:
    return {name: ParamInfo(name, (numel,), "float32", 4) for name, numel in numels.items()}


def test_the_layers_of_a_list_are_units_and_small_rests_join_their_parent() -> None:
    layers = tuple(module(f"layers.{i}", (f"l{i}",)) for i in range(3))
    root = module("", ("scale",), (module("embed", ("e",)), module("layers", (), layers, True), module("norm", ("n",))))
    params = infos(e=1000, l0=1000, l1=1000, l2=1000, n=4, scale=1)
    cuts = cut_units(root, params, 64_000)
    assert list(cuts.items()) == [
        ("", ("scale", "n")),
        ("embed", ("e",)),
        ("layers.0", ("l0",)),
        ("layers.1", ("l1",)),
        ("layers.2", ("l2",)),
    ]


def test_a_layer_that_does_not_fit_is_cut_into_its_children() -> None:
    layer = module("layers.0", (), (module("layers.0.a", ("a",)), module("layers.0.b", ("b",))))
    root = module("", (), (module("layers", (), (layer, module("layers.1", ("c",))), True),))
    cuts = cut_units(root, infos(a=600, b=600, c=600), 4_000)
    assert list(cuts) == ["layers.0.a", "layers.0.b", "layers.1"]


def test_a_unit_fits_with_its_padding() -> None:
    """Three halves of a page take two pages; two take one page, as each of them alone."""
    page, half = PAGE_ELEMENTS * 4, PAGE_ELEMENTS // 2
    layer = module("layers.0", (), tuple(module(f"layers.0.{name}", (name,)) for name in "abc"))
    other = module("layers.1", (), tuple(module(f"layers.1.{name}", (name,)) for name in "de"))
    root = module("", (), (module("layers", (), (layer, other), True),))
    sizes = infos(a=half, b=half, c=half, d=half, e=half)
    assert list(cut_units(root, sizes, 2 * page)) == ["layers.0", "layers.1"]
    assert list(cut_units(root, sizes, 2 * page - 1)) == ["layers.0.a", "layers.0.b", "layers.0.c", "layers.1"]


def test_a_tied_parameter_belongs_to_its_first_user() -> None:
    root = module("", (), (module("embed", ("w",)), module("head", ("w", "bias"))))
    cuts = cut_units(root, infos(w=1000, bias=1000), 4_100)
    assert list(cuts.items()) == [("embed", ("w",)), ("head", ("bias",))]


def test_chosen_modules_are_the_units_and_the_rest_is_the_roots() -> None:
    root = module("", (), (module("a", ("x",)), module("b", ("y",)), module("c", ("z",))))
    cuts = cut_units(root, infos(x=10, y=10, z=10), 1 << 30, frozenset({"b"}))
    assert list(cuts.items()) == [("", ("x", "z")), ("b", ("y",))]


@given(st.integers(1, 60), st.integers(1, 1 << 16))
def test_any_cut_assigns_every_parameter_to_one_unit(count: int, unit_bytes: int) -> None:
    leaves = tuple(module(f"m{i}", (f"p{i}",)) for i in range(count))
    root = module("", (), (module("half", (), leaves[: count // 2], True), module("rest", (), leaves[count // 2 :])))
    params = infos(**{f"p{i}": i * 7 + 1 for i in range(count)})
    cuts = cut_units(root, params, unit_bytes)
    assert sorted(name for cut in cuts.values() for name in cut) == sorted(params)
