"""The rows of a table on several ranks: each rests with one of them, its owner, which reads it for all."""

from __future__ import annotations

from typing import NamedTuple, final

import torch

from outsize.move.comm import Ranks
from outsize.move.rows import Rows, distinct, sparse_rows
from outsize.move.shard import UnitShard

ASKED, GIVEN, GRADIENTS, AHEAD = "rows asked for", "rows given", "gradients of rows", "rows ahead"

# Note [Rows and their owners]
# Each rank has a run of whole rows, in whole pages. Every use of a table is three steps on all ranks: they tell each
# other how many rows each asks of each, ask the owners by number, and get the values. A gradient goes the same way as
# the numbers. The owner adds what the ranks send in the order of ranks, so the sum has the same bits on every tier.


class _Routes(NamedTuple):
    """Rows that this rank and others want of each other."""

    own: torch.Tensor  # int64: what others want of this rank, in the order of ranks, counted from its first row
    sent: list[int]  # to each rank, of the numbers
    received: list[int]  # from each


@final
class Owners:
    """The way to the rows of one table. Every method is called by all ranks, in the same order. Ids are int64 in host
    memory, ascending and distinct. Values move between accelerators where there are any."""

    def __init__(self, shard: UnitShard, ranks: Ranks) -> None:
        (slot,) = shard.whole.slots
        self._shard, self._ranks = shard, ranks
        self._device = shard.device if ranks.on_device else torch.device("cpu")
        ranks.open_rows()
        self._share = shard.layout.numel // (slot.numel // slot.shape[0])  # rows of each rank; the last have fewer

    def get_params(self, ids: torch.Tensor) -> torch.Tensor:
        """Copies of these rows of the table [n, width], where values move. Blocks."""
        routes = self._ask(ids, ASKED)
        every, among = torch.unique(routes.own, return_inverse=True)
        values = self._rows.get_params(every.to(self._rows.device)).to(self._device)
        values = values.index_select(0, among.to(self._device))
        return self._ranks.trade(values, routes.received, routes.sent, GIVEN, self._shard.layout.index)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Each owner starts to read what of these rows it has, as far as there is room."""
        self._rows.prefetch(distinct([self._ask(ids, AHEAD).own]))

    def mean(self, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The mean over the ranks of their gradients (sparse, of the whole table), added up in `dtype`: sparse, of the
        rows that rest here [rows, width], where values move. Blocks."""
        grad = grad.detach().to(self._device, dtype).coalesce()
        routes = self._ask(grad._indices()[0].cpu(), GRADIENTS)
        unit = self._shard.layout.index
        came = self._ranks.trade(grad._values(), routes.sent, routes.received, GRADIENTS, unit)
        ids, among = torch.unique(routes.own, return_inverse=True)
        total = came.new_zeros(ids.numel(), self._rows.width)
        places_of = among.to(self._device).split(routes.received)
        for values, places in zip(came.split(routes.received), places_of, strict=True):
            total.index_add_(0, places, values)
        total.div_(self._ranks.size)
        return sparse_rows(ids.to(self._device), total, (self._rows.count, self._rows.width), True)

    @property
    def _rows(self) -> Rows:
        rows = self._shard.rows
        assert rows is not None
        return rows

    def _ask(self, ids: torch.Tensor, kind: str) -> _Routes:
        ranks, unit = self._ranks, self._shard.layout.index
        bounds = torch.arange(ranks.size + 1, device="cpu") * self._share
        sent = torch.searchsorted(ids, bounds).diff()
        received = ranks.counts(sent, kind, unit)[:, ranks.rank].tolist()
        came = ranks.trade(ids, sent.tolist(), received, kind, unit)
        return _Routes(came - ranks.rank * self._share, sent.tolist(), received)
