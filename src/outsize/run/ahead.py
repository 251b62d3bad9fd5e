"""The rows of tables that the next batch needs are read while this one trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch.utils._pytree import tree_leaves

from outsize.move.rows import distinct
from outsize.planning.layout import extent
from outsize.run.embedding import Table
from outsize.run.engine import Engine

logger = logging.getLogger("outsize")

# Note [Which ids are whose]
# Nothing of the model runs ahead. A table notes the ids that a batch has brought it. They are looked for among the
# batch's own tensors, by the memory that they lie in; the next batch has them in the same place. Ids that the model
# computes are not found so: then the user says which they are. A wrong guess costs a read, and nothing else: whatever
# the forward asks for that is not there is read then.

IdsOf = Callable[[Any], Mapping[str, torch.Tensor]]


class _Place(NamedTuple):
    """Where in a batch the ids of a table were."""

    leaf: int
    like: tuple[torch.Size, tuple[int, ...]]
    """Size and strides of the batch's tensor."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, leaves: Sequence[Any]) -> torch.Tensor | None:
        """The ids in another batch; the last one may be shorter."""
        leaf = leaves[self.leaf] if self.leaf < len(leaves) else None
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.layout is not torch.strided:
            return None
        size, (known, stride) = list(self.size), self.like
        if not self.offset and self.size.numel() == known.numel():
            return leaf
        if leaf.stride() != stride or leaf.shape[1:] != known[1:]:
            return None
        if leaf.shape[0] != known[0]:
            if size[0] != known[0] or self.stride[0] != stride[0]:
                return None
            size[0] = leaf.shape[0]
        if self.offset + extent(size, self.stride) > extent(leaf.shape, stride):
            return None
        return leaf.as_strided(size, self.stride, leaf.storage_offset() + self.offset)


def _place_of(ids: torch.Tensor, leaves: Sequence[Any]) -> _Place | None:
    """In the first tensor that has all of them."""
    for at, leaf in enumerate(leaves):
        plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.dim() and ids.dim()
        if plain and leaf.untyped_storage()._cdata == ids.untyped_storage()._cdata:
            offset = int(ids.storage_offset() - leaf.storage_offset())
            last = offset + extent(ids.shape, ids.stride())
            if offset < 0 or last > extent(leaf.shape, leaf.stride()):
                continue  # another part of the same memory
            return _Place(at, (leaf.shape, leaf.stride()), ids.shape, ids.stride(), offset)
    return None


@final
class Lookahead:
    """A loader whose batches come with the rows that they need in memory. See Note [Which ids are whose]."""

    def __init__(self, loader: Iterable[Any], engine: Engine, ids_of: IdsOf | None) -> None:
        self._loader = loader
        self._engine = engine
        self._tables = list(engine.tables.values())
        self._ids_of = ids_of
        self._places: dict[str, list[_Place]] = {}
        self._told: set[str] = set()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        ended = object()
        following = next(batches, ended)
        try:
            while following is not ended:
                batch, following = following, next(batches, ended)
                with self._engine.owner.turn("outsize.lookahead"), self._engine.streamer.live.waiting():
                    for table in self._tables:
                        table.rows.land()
                    if following is not ended:
                        self._prefetch(following)
                for table in self._tables:
                    table.seen = []
                yield batch
                self._learn(batch)
        finally:
            for table in self._tables:
                table.seen = None

    def _prefetch(self, batch: Any) -> None:
        given: Mapping[str, torch.Tensor] = {} if self._ids_of is None else self._ids_of(batch)
        if not isinstance(given, Mapping):
            raise TypeError(f"ids= gave a {type(given).__name__}; it must give {{parameter name: ids}} for a batch")
        unknown = set(given) - {table.name for table in self._tables}
        if unknown:
            raise ValueError(
                f"ids= names {min(unknown)!r}; the tables, embeddings with sparse=True, are "
                f"{', '.join(repr(table.name) for table in self._tables) or 'none'}"
            )
        leaves = tree_leaves(batch)
        for table in self._tables:
            found = [place.of(leaves) for place in self._places.get(table.name, ())]
            wanted = distinct([each for each in (given.get(table.name), *found) if each is not None])
            known = not wanted.numel() or 0 <= int(wanted[0]) <= int(wanted[-1]) < table.count
            table.prefetch(wanted if known else wanted[:0])  # what is not there the forward says

    def _learn(self, batch: Any) -> None:
        leaves = tree_leaves(batch)
        for table in self._tables:
            seen, table.seen = table.seen or [], None
            if self._ids_of is None:
                places = [_place_of(ids, leaves) for ids in seen]
                self._places[table.name] = list(dict.fromkeys(place for place in places if place is not None))
                self._tell(table, None in places)

    def _tell(self, table: Table, lost: bool) -> None:
        if lost and table.name not in self._told and table.rows.disk_bytes:
            self._told.add(table.name)
            logger.warning(
                "outsize.lookahead: some ids of table %r are no tensor of the batch, so their rows are not read ahead; "
                "pass ids=, a function from a batch to {%r: ids}",
                table.name,
                table.name,
            )
