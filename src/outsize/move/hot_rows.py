"""Hot rows of a table: in a memory above the one where the table rests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch

from outsize.move.memory import new_bytes

WAYS = 8

# Note [Hot rows]
# Hot rows lie in sets of `WAYS` places: in host memory above a drive, on an accelerator above host memory and drive. A
# row's number tells its set, so the memory for finding rows grows with the places and not with the table. In a set the
# row that was used longest ago gives way. A row that was changed is written to what is below when it gives way, or when
# somebody wants the truth there (`flush`). Of a batch of which more rows meet in a set than it has places, the others
# are read and written past it.

Values = dict[str, torch.Tensor]
"""By array: rows [n, width]."""


@final
class HotRows:
    """See Note [Hot rows]. Ids are int64 and lie on `device`, as the rows do; those of a call are distinct."""

    def __init__(
        self,
        count: int,
        arrays: Mapping[str, tuple[int, torch.dtype]],
        nbytes: int,
        device: torch.device,
        read: Callable[[torch.Tensor], Values],
        write: Callable[[torch.Tensor, Values], None],
    ) -> None:
        """A table of `count` rows, over `arrays` (width, dtype). `read` and `write` move rows (ascending) of all of
        them from below and back."""
        place = sum(width * dtype.itemsize for width, dtype in arrays.values()) + 17
        self._sets = min(nbytes // place, 2 * count) // WAYS
        self._read, self._write = read, write
        self._now = 0
        places = self._sets * WAYS
        self.device, self.nbytes = device, places * place
        self._values = {
            name: new_bytes(places * width * dtype.itemsize, device).view(dtype).view(places, width)
            for name, (width, dtype) in arrays.items()
        }
        self._ids = torch.full((places,), -1, dtype=torch.int64, device=device)
        self._used = torch.full((places,), -1, dtype=torch.int64, device=device)
        self._changed = torch.zeros(places, dtype=torch.bool, device=device)

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """Where each row is; -1 where it is not here."""
        if not self._sets:
            return torch.full_like(ids, -1)
        ways = self._ways(ids)
        here = self._ids[ways] == ids[:, None]
        return torch.where(here.any(1), ways.gather(1, here.byte().argmax(1, keepdim=True)).view(-1), -1)

    def begin(self) -> None:
        """A batch begins: the rows that it has used do not give way to others of it."""
        self._now += 1

    def use(self, places: torch.Tensor) -> None:
        """The batch uses these rows; -1 are none."""
        self._used[places[places >= 0]] = self._now

    def get(self, ids: torch.Tensor, names: Iterable[str], at_once: int) -> Values:
        """Copies of these rows (ascending) of some arrays. Others come in, so many `at_once`. Blocks."""
        places = self.find(ids)
        here, missing = (places >= 0).nonzero().view(-1), (places < 0).nonzero().view(-1)
        places = places[here]
        self.use(places)
        if not missing.numel():
            return {name: self._values[name].index_select(0, places) for name in names}
        found = {}
        for name in names:
            own = self._values[name]
            found[name] = torch.empty(ids.numel(), own.shape[1], dtype=own.dtype, device=self.device)
            found[name].index_copy_(0, here, own.index_select(0, places))
        for part in missing.split(at_once):
            read = self._read(ids[part])
            for name, values in found.items():
                values.index_copy_(0, part, read[name])
            self.admit(ids[part], read)
        return found

    def put(self, ids: torch.Tensor, values: Values) -> None:
        """Other values for these rows (ascending). Blocks only where a row is not here."""
        places = self.find(ids)
        here, others = (places >= 0).nonzero().view(-1), (places < 0).nonzero().view(-1)
        into = places[here]
        for name, own in self._values.items():
            own.index_copy_(0, into, values[name].index_select(0, here) if others.numel() else values[name])
        self._changed[into] = True
        if others.numel():
            self._write(ids[others], {name: values[name].index_select(0, others) for name in self._values})

    def admit(self, ids: torch.Tensor, values: Values) -> None:
        """Take in rows (ascending) that are not here, as they are below, as far as there is room."""
        places = self._choose(ids)
        taken = (places >= 0).nonzero().view(-1)
        into = places[taken]
        self._write_changed(into[self._changed[into]])
        self._ids[into], self._used[into] = ids[taken], self._now
        for name, each in values.items():
            self._values[name].index_copy_(0, into, each.index_select(0, taken))

    def flush(self, at_once: int) -> None:
        """Write what is only here, so many rows `at_once`."""
        changed = self._changed.nonzero().view(-1)
        for places in changed[self._ids[changed].argsort()].split(at_once):
            self._write_changed(places)

    def forget(self) -> None:
        """Nothing is here any more; what was not flushed is lost."""
        self._ids.fill_(-1)
        self._used.fill_(-1)
        self._changed.fill_(False)

    def _write_changed(self, places: torch.Tensor) -> None:
        if places.numel():
            places = places[self._ids[places].argsort()]
            self._write(self._ids[places], {name: own.index_select(0, places) for name, own in self._values.items()})
            self._changed[places] = False

    def _ways(self, ids: torch.Tensor) -> torch.Tensor:
        """The places [n, WAYS] of the sets of these rows. A multiplication spreads what comes in steps."""
        spread = (ids * 0x9E3779B1 & 0x7FFFFFFFFFFF) >> 15
        return (spread % self._sets * WAYS)[:, None] + torch.arange(WAYS, device=self.device)

    def _choose(self, ids: torch.Tensor) -> torch.Tensor:
        """Places for rows that are not here: those in their sets that were used longest ago, before this batch; else
        -1."""
        if not self._sets:
            return torch.full_like(ids, -1)
        ways = self._ways(ids)
        order = ways[:, 0].argsort(stable=True)
        ways = ways[order]
        sets = ways[:, 0].contiguous()
        rank = torch.arange(ids.numel(), device=self.device) - torch.searchsorted(sets, sets)
        oldest = ways.gather(1, self._used[ways].argsort(1)).gather(1, rank.clamp(max=WAYS - 1)[:, None]).view(-1)
        chosen = torch.full_like(ids, -1)
        chosen[order] = torch.where((rank < WAYS) & (self._used[oldest] < self._now), oldest, -1)
        return chosen
