"""A bag whose table is above the budget, without `sparse=True`, is used in tiles: torch's own bags over the batch's
rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.comparing import assert_same_gradients
from tests.conftest import Workshop
from tests.run.test_embedding import adagrad
from tests.run.test_weights_in_tiles import in_tiles, pair_of

ROWS, WIDTH = 8800, 64
Batch = tuple[Tensor, Tensor | None]


class Bagged(nn.Module):
    def __init__(self, weighted: bool = False, shared: bool = False, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, **options)
        self.importance = nn.Parameter(torch.rand(9)) if weighted else None
        self.head = nn.Linear(WIDTH, ROWS if shared else 2, bias=False)
        if shared:
            self.head.weight = self.bag.weight

    def forward(self, batch: Batch) -> Tensor:
        ids, offsets = batch
        return self.head(self.bag(ids, offsets, self.importance))


def batches(count: int, last: bool = False) -> list[Batch]:
    """Bags of 4, 0, 3 and 2 ids, some of them twice, the padding's among them."""
    generator = torch.Generator("cpu").manual_seed(count)
    offsets = torch.tensor([0, 4, 4, 7, *([9] if last else [])], device="cpu")
    found = []
    for _ in range(count):
        ids = torch.randint(0, ROWS, (9,), generator=generator, device="cpu")
        ids[1], ids[5], ids[7] = ids[0], 3, ROWS - 1
        found.append((ids.to(torch.get_default_device()), offsets.to(torch.get_default_device())))
    return found


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch).float().square().mean()


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean"},
        {"mode": "max"},
        {"mode": "sum", "weighted": True, "padding_idx": 3},
        {"mode": "mean", "padding_idx": -1, "scale_grad_by_freq": True},
        {"mode": "max", "padding_idx": 3, "include_last_offset": True},
        {"mode": "mean", "dtype": torch.float64},
    ],
    ids=str,
)
def test_bags_train_as_in_torch(workshop: Workshop, options: dict[str, Any]) -> None:
    if options.get("dtype") is torch.float64:
        if workshop.device != "cpu":
            pytest.skip("other dtypes are the CPU's test")
        pair = pair_of(workshop, lambda: Bagged(mode="mean").double(), adagrad)
    else:
        pair = pair_of(workshop, lambda: Bagged(**options), adagrad)
    assert in_tiles(pair.model) == {"bag.weight"}
    data = batches(3, last="include_last_offset" in options)
    for model, _ in pair.both:
        squares(model, data[0]).backward()
    assert_same_gradients(pair.model, pair.plain, atol=0.0, rtol=0.0)
    for _, optimizer in pair.both:
        optimizer.zero_grad()
    pair.train(data, rel=1e-6, atol=1e-6, loss_of=squares)


def test_rows_of_bags_and_empty_batches(workshop: Workshop) -> None:
    pair = pair_of(workshop, lambda: Bagged(mode="mean"), adagrad)
    rows = batches(1)[0][0].view(3, 3)
    pair.train([(rows, None), (rows[:0], None)], atol=1e-6, loss_of=lambda model, batch: model(batch).sum())


def test_a_bag_and_a_layer_share_a_table(workshop: Workshop) -> None:
    pair = pair_of(workshop, lambda: Bagged(mode="sum", shared=True), adagrad)
    pair.train(batches(2), rel=2e-5, loss_of=squares)


def test_recomputed_bags_and_bags_of_the_users_own(workshop: Workshop) -> None:
    class Functional(Bagged):
        def forward(self, batch: Batch) -> Tensor:
            ids, offsets = batch
            return self.head(F.embedding_bag(weight=self.bag.weight, input=ids, offsets=offsets, mode="max"))

    pair = pair_of(workshop, Functional, adagrad, activations="recompute")
    pair.train(batches(2), loss_of=squares)


@pytest.mark.parametrize("ids", [[ROWS], [-1], [0, 5, ROWS + 7]])
def test_ids_outside_the_table_are_refused(workshop: Workshop, ids: list[int]) -> None:
    pair = pair_of(workshop, lambda: Bagged(mode="mean"), adagrad)
    with pytest.raises(IndexError, match="'bag.weight'"):
        pair.model((torch.tensor(ids), torch.tensor([0])))
    pair.model.bag.padding_idx = ROWS
    with pytest.raises(IndexError, match=f"padding_idx={ROWS}"):
        pair.model(batches(1)[0])
