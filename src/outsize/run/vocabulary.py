"""Losses over a vocabulary whose weight is used in tiles: neither the logits nor the weight exist as a whole.

The weight is read once in the forward and once in the backward. Of each tile the forward keeps a number for each row of
the head's input: the logsumexp of all logits is that of the tiles' own (Milakov and Gimelshein 2018, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from outsize.run.tiles import Found, Tile, Tiles, Wanted


class Logits(NamedTuple):
    """How logits are computed, some at a time: in the dtype `raw`, then they have the dtype `dtype`."""

    raw: torch.dtype
    dtype: torch.dtype
    tile_bytes: int
    """Of logits in fp32."""

    @property
    def wide(self) -> torch.dtype:
        return torch.float32 if self.dtype.itemsize < 4 else self.dtype

    def of_tile(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some rows after the others, with their logits of the tile in a dtype of 4 bytes or more."""
        most = max(self.tile_bytes // (4 * len(weight)), 1)
        cast, part = weight.to(self.raw), None if bias is None else bias[tile.start : tile.stop]
        for start in range(0, len(rows), most):
            at = slice(start, start + most)
            yield at, functional.linear(rows[at], cast, part).to(self.dtype).to(self.wide)


class Largest(NamedTuple):
    """The number of the largest logit of each row."""

    logits: Logits

    def forward(self, tiles: Tiles, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found = []
        for tile, weight in tiles.weights(tiles.all):
            best = [each.max(-1) for _, each in self.logits.of_tile(rows, weight, bias, tile)]
            found.append(
                (torch.cat([each.values for each in best]), torch.cat([each.indices for each in best]) + tile.start)
            )
        values, indices = (torch.stack(each) for each in zip(*found, strict=True))
        return indices.gather(0, values.argmax(0, keepdim=True))[0]

    def backward(self, tiles: Tiles, rows: torch.Tensor, grad: torch.Tensor, wanted: Wanted) -> Found:
        return None, None


class Shares(NamedTuple):
    """What of the logits of a row its loss subtracts: `of_target` [rows] times the one with the number `target` [rows],
    and `of_all` [classes] times each, in the rows that are `kept` [rows]."""

    target: torch.Tensor
    kept: torch.Tensor
    of_target: torch.Tensor
    of_all: torch.Tensor | None

    def of_sum(self) -> torch.Tensor:
        """All shares of a row, [rows]."""
        return self.of_target if self.of_all is None else self.of_target + self.kept * self.of_all.sum()

    def place(self, at: slice, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """(the column of each row's target, its share) in a tile; no share where it lies in another one."""
        target = self.target[at]
        inside = (target >= tile.start) & (target < tile.stop)
        return (target - tile.start).clamp(0, len(tile) - 1)[:, None], self.of_target[at] * inside


@final
@dataclass(eq=False)
class Losses:
    """`s * logsumexp(logits) - sum(shares * logits)` of each row, where its shares add up to `s`; without shares the
    logsumexp alone."""

    logits: Logits
    shares: Shares | None = None
    sums: torch.Tensor = field(init=False)  # of the forward, for the backward
    bias: torch.Tensor | None = field(init=False)

    def forward(self, tiles: Tiles, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found, subtracted = [], torch.zeros(len(rows), dtype=self.logits.wide, device=rows.device)
        for tile, weight in tiles.weights(tiles.all):
            sums = []
            for at, logits in self.logits.of_tile(rows, weight, bias, tile):
                if self.shares is not None:
                    column, share = self.shares.place(at, tile)
                    subtracted[at] += logits.gather(1, column)[:, 0] * share
                    if self.shares.of_all is not None:
                        subtracted[at] += self.shares.kept[at] * (logits @ self.shares.of_all[tile.start : tile.stop])
                sums.append(logits.logsumexp(-1))
            found.append(torch.cat(sums))
        self.sums, self.bias = torch.stack(found).logsumexp(0), None if bias is None else bias.detach()
        if self.shares is None:
            return self.sums.clone()
        of_sum = self.shares.of_sum()
        return torch.where(of_sum == 0, 0, of_sum * self.sums - subtracted)

    def backward(self, tiles: Tiles, rows: torch.Tensor, grad: torch.Tensor, wanted: Wanted) -> Found:
        wide, device, shares = self.logits.wide, rows.device, self.shares
        scale = grad if shares is None else grad * shares.of_sum()
        of_rows = torch.zeros(rows.shape, dtype=wide, device=device) if wanted[1] else None
        of_bias = torch.zeros(tiles.rows, dtype=wide, device=device) if wanted[2] else None
        for tile, weight in tiles.weights(tiles.all):
            of_weight = torch.zeros(weight.shape, dtype=wide, device=device) if wanted[0] else None
            for at, logits in self.logits.of_tile(rows, weight, self.bias, tile):
                part = logits.sub_(self.sums[at, None]).exp_().mul_(scale[at, None])
                if shares is not None:
                    column, share = shares.place(at, tile)
                    part.scatter_add_(1, column, (-grad[at] * share)[:, None])
                    if shares.of_all is not None:
                        part.addr_(grad[at] * shares.kept[at], shares.of_all[tile.start : tile.stop], alpha=-1)
                if of_bias is not None:
                    of_bias[tile.start : tile.stop] += part.sum(0)
                part = part.to(self.logits.raw)
                if of_rows is not None:
                    add_product(of_rows[at], part, weight.to(part.dtype))
                if of_weight is not None:
                    add_product(of_weight, part.t(), rows[at])
            if of_weight is not None:
                tiles.take(tile, of_weight)
        return (
            None if of_rows is None else of_rows.to(rows.dtype),
            None if of_bias is None else of_bias.to(self.logits.raw),
        )


def add_product(total: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    """Sums of what has 16 bits are wider."""
    if total.dtype is one.dtype:
        total.addmm_(one, other)
    else:
        total.add_((one @ other).to(total.dtype))  # torch adds unlike types a few times slower
