"""Where each parameter lies: the cut of a model into units and the flat layout of each unit.

Pure arithmetic on names, shapes and sizes. All kinds of state of a unit (parameters, gradients, each optimizer array)
share one element space, so a parameter has one offset whatever is stored and wherever it is stored.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

ALIGN_ELEMENTS = 64
"""Parameters start on multiples of 64 elements: 64 bytes or more for every dtype. See Note [Alignment]."""

MOSTLY = 4
"""A unit is cut in two where it has so many times as many frozen bytes as others. See Note [Adapters]."""

PAGE_ELEMENTS = 4096
"""Segments, chunks and units are multiples of 4096 elements: 4 KiB or more for every dtype, as direct I/O needs."""

# Note [Alignment]
# Some kernels give other bits when their operand starts at another alignment. A parameter therefore starts at the same
# offset from a page boundary on every tier; else the promise of tier-independent bits would break.

# Note [Adapters]
# Small trainable parameters may lie within large frozen layers (LoRA, Hu et al. 2021). They are units of their own
# beside those of the frozen ones. So they can rest in memory while a layer is read from its file, and a layer is read
# and never written. Both units of a module are used together: its call opens both.


@dataclass(frozen=True)
class ParamInfo:
    """One parameter as arithmetic sees it. `name` is the first of its names if it is tied."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class ModuleInfo:
    """One module of the tree: its own parameters (canonical names), its children, and whether it lists blocks."""

    name: str
    params: tuple[str, ...]
    children: tuple[ModuleInfo, ...]
    is_list: bool = False

    def subtree_params(self) -> Iterator[str]:
        yield from self.params
        for child in self.children:
            yield from child.subtree_params()


@dataclass(frozen=True)
class Slot:
    """One parameter in its unit, or the part of it in a rank's slice: `numel` elements from `offset` (elements).

    `first` is where in the parameter the part begins, `segment` which segment of the unit it lies in.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    numel: int
    first: int = 0
    segment: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Segment:
    """A run of a unit's element space in which all parameters have one dtype, and are trainable or are not.

    `start` and `numel` are elements.
    """

    dtype: str
    itemsize: int
    start: int
    numel: int
    byte_start: int
    trainable: bool = True

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class UnitLayout:
    """The flat layout of one unit: `numel` padded elements, `param_bytes` bytes in the parameters' own dtypes."""

    index: int
    name: str
    slots: tuple[Slot, ...]
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    @property
    def param_bytes(self) -> int:
        return sum(segment.numel * segment.itemsize for segment in self.segments)

    def segment_of(self, slot: Slot) -> Segment:
        return self.segments[slot.segment]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first of a strided tensor to behind the last."""
    return 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True)) if all(size) else 0


def page_range(start: int, end: int) -> tuple[int, int]:
    """The whole pages that hold the elements [start, end), in elements; they never leave the segment."""
    return start // PAGE_ELEMENTS * PAGE_ELEMENTS, round_up(end, PAGE_ELEMENTS)


def cut_units(
    root: ModuleInfo,
    params: Mapping[str, ParamInfo],
    unit_bytes: int,
    chosen: frozenset[str] | None = None,
    alone: Iterable[str] = (),
    ranks: int = 1,
    align: int = ALIGN_ELEMENTS,
) -> dict[str, tuple[str, ...]]:
    """Cut the module tree into units: the parameters of each, by the name of the module that it is named after.

    A module is a unit when its bytes fit, else its children are looked at. `chosen` holds the names of modules that
    must be units, where the user gave them; then nothing else is cut. The modules of a list (a model's layers) are
    units of their own even where the whole list would fit, so that there is something to overlap. Parameters left over
    join their parent's unit; tied parameters stay with their first user. Parameters of `alone` are units of their own.
    Padding counts too, but where it makes the unit no larger than its largest parameter would be alone.
    """
    small_bytes = min(unit_bytes // 32, 1 << 20)
    assigned: set[str] = set()
    units: dict[str, tuple[str, ...]] = {}

    def nbytes(names: Iterable[str]) -> int:
        return sum(params[name].nbytes for name in names)

    def fits(names: Sequence[str]) -> bool:
        within = nbytes(names) <= unit_bytes
        return within and padded(names) <= max([unit_bytes, *(padded([name]) for name in names)])

    def padded(names: Sequence[str]) -> int:
        return _lay_out_unit(0, "", [params[name] for name in names], ranks, align).param_bytes

    def free(names: Iterable[str]) -> list[str]:
        return [name for name in dict.fromkeys(names) if name not in assigned]

    def take(names: Iterable[str]) -> list[str]:
        taken = free(names)
        assigned.update(taken)
        return taken

    def emit(name: str, names: list[str]) -> list[str]:
        """Make a unit; nothing is left for the parent's."""
        if names:
            units[name] = tuple(names)
        return []

    def visit(module: ModuleInfo, inside_block: bool) -> list[str]:
        """Emit the units below `module`; return the parameters that are left for its parent's unit."""
        below = free(module.subtree_params())
        if chosen is not None:
            if module.name in chosen:
                return emit(module.name, take(below))
        elif inside_block or not _holds_blocks(module):
            if nbytes(below) <= small_bytes and not inside_block:
                return take(below)
            if (len(below) < 2 and not module.children) or fits(below):
                return emit(module.name, take(below))
        left_over = take(module.params)
        for child in module.children:
            left_over += visit(child, inside_block=module.is_list and not inside_block)
        if chosen is not None or module.is_list:
            return left_over
        if left_over and not fits(left_over):  # the large ones are units of their own, the small ones stay together
            for name in left_over:
                if params[name].nbytes > small_bytes:
                    emit(name, [name])
            left_over = [name for name in left_over if params[name].nbytes <= small_bytes]
        return emit(module.name, left_over) if nbytes(left_over) > small_bytes else left_over

    for name in alone:
        emit(name, take([name]))
    emit(root.name, visit(root, inside_block=False))
    order = {name: position for position, name in enumerate(dict.fromkeys(root.subtree_params()))}
    return dict(sorted(units.items(), key=lambda unit: min(order[name] for name in unit[1])))


def part_adapters(
    cuts: Mapping[str, tuple[str, ...]], params: Mapping[str, ParamInfo]
) -> tuple[dict[str, tuple[str, ...]], dict[int, int]]:
    """The cut with adapters as units of their own: (the units, for each unit of adapters the index of the unit that it
    was cut from, which comes just before it). See Note [Adapters]."""
    found: dict[str, tuple[str, ...]] = {}
    beside: dict[int, int] = {}
    for name, names in cuts.items():
        trained = tuple(each for each in names if params[each].trainable)
        frozen = tuple(each for each in names if not params[each].trainable)
        if (
            trained
            and frozen
            and MOSTLY * sum(params[each].nbytes for each in trained) <= sum(params[each].nbytes for each in frozen)
        ):
            beside[len(found) + 1] = len(found)
            found |= {name: frozen, f"{name} (trained)".lstrip(): trained}
        else:
            found[name] = names
    return found, beside


def _holds_blocks(module: ModuleInfo) -> bool:
    """Whether a list of at least two modules with parameters lies at or below `module`."""
    if module.is_list and sum(any(True for _ in child.subtree_params()) for child in module.children) > 1:
        return True
    return any(_holds_blocks(child) for child in module.children)


def lay_out(
    cuts: Mapping[str, Sequence[str]], params: Mapping[str, ParamInfo], ranks: int = 1, align: int = ALIGN_ELEMENTS
) -> tuple[UnitLayout, ...]:
    """The layout of each unit; each segment is padded so that every rank's share is a whole number of pages.

    With `align=PAGE_ELEMENTS` no two parameters share a page, so each can be read and written alone.
    """
    return tuple(
        _lay_out_unit(index, name, [params[each] for each in cut], ranks, align)
        for index, (name, cut) in enumerate(cuts.items())
    )


def _lay_out_unit(index: int, name: str, infos: Sequence[ParamInfo], ranks: int, align: int) -> UnitLayout:
    slots: list[Slot] = []
    segments: list[Segment] = []
    position = byte_position = 0
    kinds = dict.fromkeys((info.dtype, info.trainable) for info in infos)
    for dtype, trainable in sorted(kinds, key=lambda kind: not kind[1]):  # each rank has its share of the trainable
        start = position
        members = [info for info in infos if (info.dtype, info.trainable) == (dtype, trainable)]
        for info in members:
            slots.append(Slot(info.name, info.shape, dtype, position, info.numel, segment=len(segments)))
            position = round_up(position + info.numel, align)
        position = start + round_up(max(position - start, 1), PAGE_ELEMENTS * ranks)
        segments.append(Segment(dtype, members[0].itemsize, start, position - start, byte_position, trainable))
        byte_position += (position - start) * members[0].itemsize
    return UnitLayout(index, name, tuple(slots), tuple(segments))


def slice_of(layout: UnitLayout, rank: int, ranks: int) -> UnitLayout:
    """The part of a unit that rests with one of `ranks` ranks: an equal run of each segment, as a layout of its own.

    Every parameter has a slot; one that does not meet the slice has no elements there.
    """
    if ranks == 1:
        return layout
    slots: dict[str, Slot] = {}
    segments: list[Segment] = []
    position = byte_position = 0
    for index, segment in enumerate(layout.segments):
        share = segment.numel // ranks
        begin = segment.start + rank * share
        for slot in layout.slots:
            if slot.segment == index:
                low = min(max(slot.offset, begin), begin + share)
                numel = max(min(slot.end, begin + share) - low, 0)
                first = low - slot.offset if numel else 0
                slots[slot.name] = Slot(slot.name, (numel,), slot.dtype, position + low - begin, numel, first, index)
        segments.append(replace(segment, start=position, numel=share, byte_start=byte_position))
        position += share
        byte_position += share * segment.itemsize
    return UnitLayout(layout.index, layout.name, tuple(slots[slot.name] for slot in layout.slots), tuple(segments))


def tile_rows(shape: Sequence[int], itemsize: int, nbytes: int, ranks: int = 1) -> int:
    """Rows of a parameter that each rank has of a tile of at most `nbytes`, or of a few more: every tile begins at a
    whole page."""
    row, step = prod(shape[1:]), _whole_pages(shape)
    return min(max(nbytes // (ranks * row * itemsize * step), 1) * step, _rank_rows(shape, ranks))


def with_whole_rows(layout: UnitLayout, ranks: int) -> UnitLayout:
    """The same unit, of one parameter, padded so that each of several ranks has whole rows, in whole pages."""
    if ranks == 1:
        return layout
    ((slot,), (segment,)) = layout.slots, layout.segments
    numel = ranks * _rank_rows(slot.shape, ranks) * prod(slot.shape[1:])
    return replace(layout, segments=(replace(segment, numel=numel),))


def _rank_rows(shape: Sequence[int], ranks: int) -> int:
    return shape[0] if ranks == 1 else round_up(-(-shape[0] // ranks), _whole_pages(shape))


def _whole_pages(shape: Sequence[int]) -> int:
    """The fewest rows that are whole pages."""
    return PAGE_ELEMENTS // gcd(prod(shape[1:]), PAGE_ELEMENTS)


def chunk_ranges(segment: Segment, chunk_numel: int) -> Iterator[tuple[int, int]]:
    """The chunks of a segment as half-open ranges of the unit's elements; whole pages, never across a segment."""
    assert chunk_numel % PAGE_ELEMENTS == 0
    for start in range(segment.start, segment.end, chunk_numel):
        yield start, min(start + chunk_numel, segment.end)


def slots_in(layout: UnitLayout, start: int, end: int) -> Iterator[tuple[Slot, int, int]]:
    """The slots that meet the elements [start, end), each with the part of that range that it owns."""
    for slot in layout.slots:
        low, high = max(slot.offset, start), min(slot.end, end)
        if low < high:
            yield slot, low, high


@dataclass(frozen=True)
class ArrayLayout:
    """Where one array of a unit (one value for `per` elements, or none in some segments) lies in its own bytes."""

    starts: tuple[tuple[int, int, int, int], ...]  # (first element, end element, itemsize, first byte) a segment
    nbytes: int
    per: int = 1

    def span(self, start: int, end: int) -> tuple[int, int]:
        """(first byte, number of bytes) of the elements [start, end), which lie in one segment."""
        for first, last, itemsize, byte_start in self.starts:
            if first <= start and end <= last:
                assert (start - first) % self.per == 0, "a range begins where a value begins"
                return byte_start + (start - first) // self.per * itemsize, -(-(end - start) // self.per) * itemsize
        raise AssertionError("a range never crosses a segment")

    def elements(self, first: int, nbytes: int) -> tuple[int, int]:
        """The elements [start, end) whose values are the bytes [first, first + nbytes): the inverse of `span`."""
        for start, end, itemsize, byte_start in self.starts:
            if itemsize and byte_start <= first < byte_start + (end - start) // self.per * itemsize:
                low = start + (first - byte_start) // itemsize * self.per
                return low, low + nbytes // itemsize * self.per
        raise AssertionError("the bytes lie in one segment")

    def has(self, slot: Slot) -> bool:
        """Whether there are values for the parameter."""
        return bool(self.starts[slot.segment][2])


def array_layout(
    layout: UnitLayout, itemsizes: Mapping[str, int], per: int = 1, segments: Container[Segment] | None = None
) -> ArrayLayout:
    """The layout of an array with a value of `itemsizes[dtype]` bytes for each `per` elements of such a parameter.

    `segments`: those that have values; None: all. Where a value serves several elements the whole array, not each
    chunk of it, is a number of pages.
    """
    starts = []
    position = 0
    for segment in layout.segments:
        itemsize = itemsizes.get(segment.dtype, 0) if segments is None or segment in segments else 0
        starts.append((segment.start, segment.end, itemsize, position))
        position += segment.numel // per * itemsize
    return ArrayLayout(tuple(starts), round_up(position, PAGE_ELEMENTS), per)
