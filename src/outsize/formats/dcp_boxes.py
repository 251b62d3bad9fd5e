"""Boxes of elements: the pieces in which a tensor is stored, and those that make up a range of its elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""(offsets, sizes)"""

LARGEST_TANGLE = 1 << 20
"""Pairs of pieces of one tensor that no cut through all of it parts. Those of a grid are all parted."""


def boxes_between(shape: Shape, start: int, end: int) -> Iterator[Box]:
    """The boxes that hold the elements [start, end) of a flattened tensor, one behind the other.

    Each is 1 wide in its first dimensions and whole in its last ones, so that its elements lie side by side in a
    contiguous tensor. At most two for each dimension.
    """
    if not shape and start < end:
        yield (), ()
        return
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]  # elements from one index to the next
    while start < end:
        dim = next(dim for dim, step in enumerate(steps) if start % step == 0 and start + step <= end)
        offsets = tuple(start // step % size for step, size in zip(steps, shape, strict=True))
        count = min((end - start) // steps[dim], shape[dim] - offsets[dim])
        yield offsets, (*(1,) * dim, count, *shape[dim + 1 :])
        start += count * steps[dim]


def common(one: Box, other: Box) -> Box | None:
    """The elements that lie in both."""
    low = tuple(map(max, one[0], other[0]))
    ends = (min(start + size, first + length) for start, size, first, length in zip(*one, *other, strict=True))
    sizes = tuple(end - start for start, end in zip(low, ends, strict=True))
    return (low, sizes) if all(size > 0 for size in sizes) else None


def span_of(shape: Shape, box: Box) -> tuple[int, int]:
    """(first element, end) of a box that is not empty, in the flattened tensor; others may lie between them."""
    first = last = 0
    for length, low, size in zip(shape, *box, strict=True):
        first, last = first * length + low, last * length + low + size - 1
    return first, last + 1


def fills(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Whether the boxes lie in the tensor, apart from each other, and make up all of it."""
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return False
        if any(low < 0 or size < 0 or low + size > end for low, size, end in zip(offsets, sizes, shape, strict=True)):
            return False
    if sum(prod(sizes) for _, sizes in boxes) != prod(shape):
        return False
    return _apart([box for box in boxes if prod(box[1])], len(shape))


def _apart(boxes: list[Box], ndim: int) -> bool:
    """Whether no two boxes overlap. Cuts through all of them part those that need not be compared."""
    groups = [boxes]
    for dim in 2 * list(range(ndim)):
        groups = [slab for group in groups for slab in _slabs(group, dim)]
    if sum(len(group) * (len(group) - 1) for group in groups) > 2 * LARGEST_TANGLE:
        raise ValueError("a tensor is in pieces that are no grid, and too many to be told apart")
    return all(common(*pair) is None for group in groups for pair in combinations(group, 2))


def _slabs(boxes: list[Box], dim: int) -> Iterator[list[Box]]:
    """The boxes between one cut across the dimension and the next."""
    slab: list[Box] = []
    reach = 0
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        if slab and box[0][dim] >= reach:
            yield slab
            slab = []
        slab.append(box)
        reach = max(reach, box[0][dim] + box[1][dim])
    if slab:
        yield slab
