"""`activations="offload"`: what moves, how often, and what a drive that fills up does to a run."""

from __future__ import annotations

import errno
import os
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import outsize
from tests.comparing import weights
from tests.conftest import TIERS, Trace, Workshop, adamw, batches, prepared, squared_error, train
from tests.small_models import Block, Built, Stack

TO_DISK: dict[str, Any] = {"activations": "offload", "activations_tier": "disk"}
PAGE, DEPTH, WIDTH = 4096, 5, 16
ROWS = PAGE // 4 // WIDTH


class Given(Block):
    """Gets a parameter of the model, and a mask that all layers get."""

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(mask @ (x + positions))


class Positions(
    Built,
    positions=lambda: nn.Parameter(torch.randn(2 * ROWS, WIDTH) / 10),
    layers=lambda: nn.ModuleList([Given(WIDTH, 40) for _ in range(DEPTH)]),
    head=(WIDTH, 4),
):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(ROWS, ROWS).tril() / ROWS
        for layer in self.layers:
            x = layer(x, self.positions[ROWS:], mask)
        return self.head(x)


@pytest.mark.parametrize("tier", TIERS)
def test_parameters_never_move_and_what_all_layers_get_moves_once(workshop: Workshop, tier: str) -> None:
    """A page of each layer's input but the last one's, and four pages of the mask."""
    pair = workshop.pair(Positions, adamw, tier, disk=workshop.disk, **TO_DISK)
    for x, _ in batches(2, rows=ROWS):
        loss = pair.model(x).sum()
        assert outsize.memory(pair.model).now["disk/activations"] == (DEPTH - 1 + ROWS * 4 * ROWS // PAGE) * PAGE
        loss.backward()
        del loss
        assert outsize.memory(pair.model).now["disk/activations"] == 0
    pair.optimizer.zero_grad()
    pair.train(batches(2, rows=ROWS))


@pytest.mark.parametrize(("operation", "code"), [("write", errno.ENOSPC), ("read", errno.EIO)])
def test_after_a_drive_has_failed_the_next_step_gives_the_same_bits(
    workshop: Workshop, operation: Literal["read", "write"], code: int
) -> None:
    """Whichever of a step's writes finds no space, or of its reads fails."""

    def run(**fields: Any) -> tuple[nn.Module, Any]:
        model, optimizer = workshop.made(lambda: Stack(depth=5), tier="host", disk=workshop.disk, **fields)
        return model, optimizer

    data = batches(4, rows=ROWS)
    kept, kept_optimizer = run(activations="keep")
    model, optimizer = run(**TO_DISK)
    expected, found = Trace(), Trace()
    for nth, batch in enumerate(data, 1):
        disk = prepared(model).resources.disk
        assert disk is not None
        if nth <= 3:  # of four inputs that leave the last is still there when it is wanted
            disk.inject(operation, nth, code, -1)
            with pytest.raises(OSError, match=os.strerror(code)) as caught:
                squared_error(model, batch).backward()
            assert caught.value.errno == code
            assert str(workshop.disk) in str(caught.value), "the error names the file"
            del caught
            optimizer.zero_grad()
        expected.losses += train(kept, kept_optimizer, [batch]).losses
        found.losses += train(model, optimizer, [batch]).losses
    assert found == expected
    assert all(torch.equal(value, weights(kept)[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("nth", [1, 3])
def test_a_write_that_fails_is_told_once(workshop: Workshop, nth: int) -> None:
    """What of the step is still there moves out anew in the next one, which gives torch's values."""
    pair = workshop.pair(Positions, adamw, "host", disk=workshop.disk, **TO_DISK)
    (batch,) = batches(1, rows=ROWS)
    x = batch[0].expand(1 << 8, ROWS, WIDTH)
    disk = prepared(pair.model).resources.disk
    assert disk is not None
    disk.inject("write", nth, errno.ENOSPC, -1)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        squared_error(pair.model, (x, batch[1])).backward()
    pair.optimizer.zero_grad()
    pair.train([(x, batch[1])])
    del caught
