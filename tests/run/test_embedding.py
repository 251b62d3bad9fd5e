"""Embeddings with `sparse=True`: only the rows that a batch touches move, and all bits are those of plain torch."""

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import outsize
from tests.comparing import assert_same, assert_same_state, weights
from tests.conftest import Pair, Workshop, prepared, take_step
from tests.small_models import Built

# What torch's own Adagrad says of sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ROWS, WIDTH = 3000, 24
Batch = tuple[Tensor, Tensor, Tensor]
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Clicks(nn.Module):
    """Two tables, one of which is used twice in a forward, and bags with weights."""

    def __init__(self, mode: str = "sum", dense: bool = False) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, WIDTH, padding_idx=3, sparse=True)
        self.words = nn.EmbeddingBag(ROWS, 16, mode=mode, sparse=True, include_last_offset=True, padding_idx=-1)
        self.head = nn.Linear(16, 1) if dense else nn.Identity()

    def forward(self, batch: Batch) -> Tensor:
        items, words, each = batch
        offsets = torch.arange(0, words.numel() + 1, 4)
        bags = self.words(words, offsets, per_sample_weights=each if self.words.mode == "sum" else None)
        twice = torch.tanh(self.items(items)).sum() + torch.sin(self.items(items[:, :2])).sum()
        return twice + torch.tanh(self.head(bags)).sum()


def batches(count: int, rows: int = ROWS) -> list[Batch]:
    generator = torch.Generator().manual_seed(count)

    def skewed(*size: int) -> Tensor:
        return (torch.rand(*size, generator=generator) ** 4 * rows).long()

    return [(skewed(16, 5), skewed(48), torch.rand(48, generator=generator)) for _ in range(count)]


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch)


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.01)


def lazy(model: nn.Module) -> torch.optim.Optimizer:
    return outsize.optim.LazyAdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def rowwise(model: nn.Module) -> torch.optim.Optimizer:
    return outsize.optim.RowwiseAdagrad(model.parameters(), lr=0.1)


OPTIMIZERS = (sparse_adam, sgd, adagrad, lazy, rowwise)


def small(workshop: Workshop) -> dict[str, Any]:
    """A budget that holds a few hundred rows."""
    return workshop.fields("disk", host_memory="640KiB")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    take_step(model(batch), optimizer)


def train_both(pair: Pair, data: list[Batch], around: Callable[[list[Batch]], Any] = iter) -> None:
    for batch in data:
        step(pair.plain, pair.plain_optimizer, batch)
    for batch in around(data):
        step(pair.model, pair.optimizer, batch)


def check_same(pair: Pair) -> None:
    """Weights and the optimizer's state, bit for bit."""
    assert_same(weights(pair.model), weights(pair.plain))
    assert_same_state(pair, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_get_the_bits_of_plain_torch_on_every_tier(workshop: Workshop, optimizer: Optimizer) -> None:
    data = batches(15)
    pair = workshop.pair(Clicks, optimizer, "disk")
    train_both(pair, data)
    check_same(pair)
    for tier in ("device", "host"):
        other = workshop.pair(Clicks, optimizer, tier)
        for batch in data:
            step(other.model, other.optimizer, batch)
        check_same(Pair(pair.plain, pair.plain_optimizer, other.model, other.optimizer))


@pytest.mark.parametrize(
    ("optimizer", "ahead"), [(optimizer, number % 2 == 0) for number, optimizer in enumerate(OPTIMIZERS)]
)
def test_rows_that_give_way_in_a_small_cache_keep_their_bits(
    workshop: Workshop, optimizer: Optimizer, ahead: bool
) -> None:
    torch.manual_seed(0)
    plain = Clicks(mode="mean")
    model = copy.deepcopy(plain)
    pair = Pair(plain, optimizer(plain), model, optimizer(model))
    outsize.prepare(model, pair.optimizer, **small(workshop))
    workshop.watch(model)
    train_both(pair, batches(20), (lambda data: outsize.lookahead(data, model)) if ahead else iter)
    report = outsize.memory(model)
    assert report.row_hits < report.rows, "some rows came from the drive"
    assert report.bytes_written > 0, "some rows gave way"
    assert (report.rows_ahead > 0) == ahead
    check_same(pair)


@pytest.mark.parametrize("optimizer", [sgd, adagrad, lazy, rowwise])
def test_tables_and_dense_layers_train_under_one_optimizer(workshop: Workshop, tier: str, optimizer: Optimizer) -> None:
    pair = workshop.pair(lambda: Clicks(dense=True), optimizer, tier)
    pair.train(batches(6), loss_of=mean, rel=1e-5)


def test_gradients_add_up_and_go_as_in_torch(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(Clicks, adagrad, tier)
    first, second, third = batches(3)
    for model, optimizer in pair.both:
        model(first).backward()
        model(second).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model(third).backward()
    theirs, ours = pair.plain.items.weight.grad, pair.model.items.weight.grad
    assert ours is not None
    assert ours.is_sparse
    assert torch.equal(ours.coalesce().values(), theirs.coalesce().values())
    for model, optimizer in pair.both:
        optimizer.step()
        optimizer.zero_grad()
        assert model.items.weight.grad is None
    check_same(pair)


def test_rows_of_16_bits_have_exact_masters_on_every_tier(workshop: Workshop) -> None:
    found = []
    for tier in ("device", "host", "disk"):
        model, optimizer = workshop.made(lambda: Clicks(mode="mean"), lazy, tier, compute_dtype=torch.bfloat16)
        for items, words, each in batches(10):
            step(model, optimizer, (items, words, each.bfloat16()))
        found.append((weights(model), optimizer.state_dict()["state"]))
    for other, states in found[1:]:
        assert_same(other, found[0][0])
        for index, entry in found[0][1].items():
            assert_same(states[index], entry)


# -- bytes ---------------------------------------------------------------------------------------------------------


def test_a_step_reads_the_pages_of_its_rows_and_hits_read_nothing(workshop: Workshop) -> None:
    model = nn.Embedding(4096, 64, sparse=True)  # a row and its state have 768 bytes
    optimizer = lazy(model)
    workshop.prepare(model, optimizer, "disk")
    ids = torch.tensor([0, 1, 5, 15, 40, 4095, 40])
    pages = 5  # of 7 ids: row 5 begins on the page of 0 and 1, and ends on the next
    before = outsize.memory(model)
    model(ids).sum().backward()
    first = outsize.memory(model)
    assert first.bytes_read - before.bytes_read == pages * 4096
    optimizer.step()
    model(ids).sum().backward()
    optimizer.step()
    after = outsize.memory(model)
    assert after.bytes_read == first.bytes_read
    assert after.bytes_written == before.bytes_written, "rows that changed stay in memory while there is room"
    assert (after.rows, after.row_hits) == (12, 6)
    workshop.settle(model)
    assert outsize.memory(model).bytes_written - before.bytes_written == pages * 4096


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ids_that_share_memory_are_told_apart(workshop: Workshop, order: tuple[int, int]) -> None:
    """Two tables whose ids are rows of one tensor; the last batch is shorter."""
    pair = workshop.pair(lambda: Pairs(), sgd, "disk", host_memory="4MiB")
    ids = torch.randint(0, ROWS, (2, 100), generator=torch.Generator().manual_seed(0))
    parts = [part.contiguous().unbind(0) for part in ids.split(40, dim=1)]
    data = [tuple(part[at] for at in order) for part in parts]
    missed = []

    def ahead(data: Any) -> Iterator[Any]:
        for batch in outsize.lookahead(data, pair.model):
            yield batch
            report = outsize.memory(pair.model)
            missed.append(report.rows - report.row_hits)

    train_both(pair, data, ahead)
    assert missed[0] < missed[1] == missed[2], "the first two batches tell whose the ids are; the third misses none"
    check_same(pair)


class Pairs(
    Built, users=lambda: nn.Embedding(ROWS, WIDTH, sparse=True), items=lambda: nn.Embedding(ROWS, WIDTH, sparse=True)
):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.users(batch[0]) * self.items(batch[1])).sum()


def test_memory_for_hot_rows_follows_the_budget_and_not_the_table(workshop: Workshop) -> None:
    for rows in (10_000, 40_000):
        model, optimizer = workshop.made(partial(nn.Embedding, rows, 64, sparse=True), lazy, host_memory="4MiB")
        for at in range(0, rows, 5000):
            take_step(model(torch.arange(at, at + 5000)).sum(), optimizer)
        peak = outsize.memory(model).peak
        others = ("disk",) if workshop.device == "cpu" else ("disk", "device")
        memory = sum(size for name, size in peak.items() if not name.startswith(others))
        assert memory <= 4 << 20
        assert peak["host/hot rows"] > 1 << 20


# -- ahead ---------------------------------------------------------------------------------------------------------


class Columns(nn.Module):
    """The ids are a column of the batch; or the model makes them."""

    def __init__(self, hashed: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.hashed = hashed

    def ids(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["clicks"][:, 1]
        return ids * 7 % ROWS if self.hashed else ids

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tanh(self.table(self.ids(batch))).sum()


def columns(count: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(count)
    for at in range(count):
        rows = 20 if at == count - 1 else 32
        yield {"price": torch.rand(rows), "clicks": torch.randint(0, ROWS, (rows, 3), generator=generator)}


@pytest.mark.parametrize("hashed", [False, True])
def test_rows_of_the_next_batch_are_read_ahead(
    workshop: Workshop, hashed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pair = workshop.pair(lambda: Columns(hashed), lazy, "disk")
    given = (lambda batch: {"table.weight": pair.model.ids(batch)}) if hashed else None
    with caplog.at_level(logging.WARNING, "outsize"):
        for batch, mine in zip(columns(12), outsize.lookahead(columns(12), pair.model, given), strict=True):
            for (model, optimizer), each in zip(pair.both, (batch, mine), strict=True):
                take_step(model(each), optimizer)
            if len(mine["price"]) == 32:
                missed = outsize.memory(pair.model)
    report = outsize.memory(pair.model)
    assert report.rows - report.row_hits == missed.rows - missed.row_hits, "the last batch, a shorter one, misses none"
    assert report.rows_ahead > 200
    assert not caplog.records
    check_same(pair)


def test_ids_that_are_not_found_ahead_are_told_once(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    model = Columns(hashed=True)
    workshop.prepare(model, sgd(model), "disk")
    with caplog.at_level(logging.WARNING, "outsize"):
        for batch in outsize.lookahead(list(columns(4)), model):
            model(batch)
    assert [record for record in caplog.messages if "'table.weight'" in record and "pass ids=" in record]
    assert len(caplog.records) == 1
    with pytest.raises(ValueError, match=r"ids= names 'other'; the tables.*'table.weight'"):
        list(outsize.lookahead(columns(3), model, lambda batch: {"other": batch["clicks"]}))
    with pytest.raises(TypeError, match=r"ids= gave a Tensor; it must give \{parameter name: ids\}"):
        list(outsize.lookahead(columns(3), model, lambda batch: batch["clicks"]))  # type: ignore[arg-type]


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "into"), [(each, ("device", "disk")[number % 2]) for number, each in enumerate(OPTIMIZERS)]
)
def test_a_checkpoint_has_the_truth_of_rows_in_memory(
    workshop: Workshop, tmp_path: Path, optimizer: Optimizer, into: str
) -> None:
    data = batches(12)
    pair = workshop.pair(Clicks, optimizer, "disk")
    train_both(pair, data[:5])
    step(pair.plain, pair.plain_optimizer, data[5])
    mean(pair.model, data[5]).backward()
    with pytest.raises(TypeError, match=r"gradient of 'items.weight' is sparse.*zero_grad\(\)"):
        outsize.save(tmp_path / "saved", pair.model, pair.optimizer)
    pair.optimizer.step()
    outsize.save(tmp_path / "saved", pair.model, pair.optimizer)
    pair.optimizer.zero_grad()
    train_both(pair, data[6:])  # the saved files are frozen: what is written goes elsewhere
    check_same(pair)
    other = workshop.pair(Clicks, optimizer, into)
    train_both(Pair(other.plain, other.plain_optimizer, other.model, other.optimizer), data[8:9])
    outsize.load(tmp_path / "saved", other.model, other.optimizer)
    for batch in data[6:]:
        step(other.model, other.optimizer, batch)
    check_same(Pair(pair.plain, pair.plain_optimizer, other.model, other.optimizer))


def test_what_is_exported_shown_and_changed_is_what_rows_are(workshop: Workshop, tier: str, tmp_path: Path) -> None:
    pair = workshop.pair(Clicks, adagrad, tier)
    train_both(pair, batches(4))
    outsize.export(tmp_path / "out", pair.model)
    exported = load_file(tmp_path / "out" / "model.safetensors")["items.weight"]
    assert torch.equal(exported, pair.plain.items.weight.cpu())
    with outsize.gathered(pair.model, modify=True), torch.no_grad():
        pair.model.items.weight.mul_(2)
    with torch.no_grad():
        pair.plain.items.weight.mul_(2)
    pair.optimizer.load_state_dict(copy.deepcopy(pair.plain_optimizer.state_dict()))
    train_both(pair, batches(4))
    check_same(pair)
    outsize.release(pair.model)
    for batch in batches(3):
        for model, optimizer in pair.both:
            step(model, optimizer, batch)
    assert torch.equal(pair.model.items.weight, pair.plain.items.weight)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_takes_back_the_state_that_it_gave(workshop: Workshop, optimizer: Optimizer) -> None:
    pair = workshop.pair(Clicks, optimizer, "host")
    train_both(pair, batches(3))
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    train_both(pair, batches(2))
    pair.optimizer.load_state_dict(copy.deepcopy(pair.plain_optimizer.state_dict()))
    train_both(pair, batches(2))
    check_same(pair)


def test_sums_of_other_rows_are_refused(workshop: Workshop) -> None:
    pair = workshop.pair(Clicks, rowwise, "host")
    train_both(pair, batches(1))
    state = pair.optimizer.state_dict()
    index = next(index for index, entry in state["state"].items() if "row_sum" in entry)
    rows = len(state["state"][index]["row_sum"])
    state["state"][index]["row_sum"] = torch.zeros(rows - 1)
    with pytest.raises(ValueError, match=rf"keeps \['row_sum'\] of shape \({rows},\) and 'step'"):
        pair.optimizer.load_state_dict(state)
    check_same(pair)


def test_a_table_that_init_makes_starts_with_the_same_rows(workshop: Workshop) -> None:
    torch.manual_seed(0)
    plain = Clicks()
    torch.manual_seed(0)
    with outsize.init(host_memory="640KiB", disk=workshop.disk):
        model = Clicks()
    optimizer = lazy(model)
    outsize.prepare(model, optimizer, **small(workshop))
    workshop.watch(model)
    assert_same(weights(model), weights(plain))


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_ids_outside_the_table_are_refused_with_its_name_and_range(workshop: Workshop, tier: str, wrong: int) -> None:
    pair = workshop.pair(Clicks, sgd, tier)
    items, words, each = batches(1)[0]
    items[3, 2] = wrong
    with pytest.raises(IndexError, match=rf"table 'items\.weight' has the rows 0 to {ROWS - 1}, and .* {wrong}"):
        pair.model((items, words, each))
    train_both(pair, batches(3))
    with outsize.gathered(pair.model):
        pass
    with pytest.raises(IndexError, match=r"table 'items\.weight' has the rows"):
        pair.model((items, words, each))  # which computes with the gathered rows
    train_both(pair, batches(3))
    check_same(pair)


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _hooked() -> nn.Module:
    model = nn.Embedding(10, 4, sparse=True)
    model.weight.register_hook(lambda grad: grad)
    return model


def _parametrized() -> nn.Module:
    model = nn.Embedding(10, 4, sparse=True)
    parametrize.register_parametrization(model, "weight", _Doubled())
    return model


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 10))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_hooked, r"table 'weight'.* has a hook.*remove the hook"),
        (_parametrized, r"table '.*weight'.* parametrization.*sparse=False"),
        (_tied, r"table '0.weight'.* module '1' uses it too.*untie"),
        (lambda: nn.Embedding(10, 4, max_norm=1.0, sparse=True), r"table 'weight'.* max_norm=1.0 .*max_norm=None"),
        (lambda: nn.Embedding(10, 4, scale_grad_by_freq=True, sparse=True), r"scale_grad_by_freq=False"),
    ],
)
def test_tables_whose_rows_cannot_move_alone_are_refused(
    workshop: Workshop, build: Callable[[], nn.Module], message: str
) -> None:
    model = build()
    with pytest.raises(ValueError, match=message):
        outsize.prepare(model, sgd(model), **workshop.fields("disk"))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda params: torch.optim.AdamW(params), r"AdamW cannot update single rows.*LazyAdamW"),
        (lambda params: torch.optim.RMSprop(params), r"RMSprop cannot update single rows.*LazyAdamW"),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), r"momentum .*'0.weight'.* is 0.9.*momentum=0"),
        (lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1), r"weight_decay .* is 0.1"),
        (lambda params: torch.optim.Adagrad(params, weight_decay=0.1), r"weight_decay .* is 0.1"),
        (lambda params: torch.optim.SparseAdam(params), r"SparseAdam updates only .* '1.weight' is none.*LazyAdamW"),
    ],
)
def test_optimizers_that_cannot_update_rows_are_refused(workshop: Workshop, optimizer: Any, message: str) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=message):
        outsize.prepare(model, optimizer(model.parameters()), **workshop.fields("disk"))


@pytest.mark.parametrize("fields", [{"delayed_update": True}, {"state_format": "compact"}])
def test_fields_that_rows_do_not_serve_are_refused(workshop: Workshop, fields: dict[str, Any]) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(ValueError, match=r"table 'weight'.* cannot be moved alone with .*leave it out, or"):
        outsize.prepare(model, adagrad(model), **workshop.fields("disk", **fields))


def test_a_step_that_cannot_be_made_of_rows_changes_nothing(workshop: Workshop) -> None:
    pair = workshop.pair(Clicks, sgd, "disk")
    model, optimizer = pair.model, pair.optimizer
    model.head.forward = lambda _: F.embedding(torch.arange(3), model.items.weight)
    with pytest.raises(RuntimeError, match=r"embedding without sparse=True .* pass sparse=True"):
        model(batches(1)[0])
    model.head.forward = lambda x: x
    model(batches(1)[0]).backward()
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises((RuntimeError, ValueError), match="momentum"):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0
    with outsize.gathered(model), pytest.raises(RuntimeError, match=r"gathered shows table 'items.weight'"):
        optimizer.step()
    optimizer.zero_grad()
    train_both(pair, batches(3))
    check_same(pair)
    assert prepared(model).engine.tables


def test_the_plan_says_what_a_large_embedding_costs_and_which_form_does_not() -> None:
    def plan_of(sparse: bool) -> str:
        with torch.device("meta"):
            model = nn.EmbeddingBag(1 << 20, 64, sparse=sparse)
        optimizer = lazy(model) if sparse else torch.optim.AdamW(model.parameters())
        return str(outsize.plan(model, optimizer, host_memory="1GiB", disk=".", disk_space="8GiB", device="cpu"))

    assert "'weight' is updated as a whole: each step reads and writes 1.5 GiB" in plan_of(False)
    assert "outsize.optim.LazyAdamW moves these alone" in plan_of(False)
    assert "table 'weight': a step reads and writes the rows that its batch touches" in plan_of(True)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_have_each_a_part_of_a_table_in_the_plan(stage: int) -> None:
    def bytes_of(ranks: int) -> int:
        with torch.device("meta"):
            model = nn.Embedding(3 << 16, 64, sparse=True)
        fields = {"host_memory": "1GiB", "device": "cpu", "stage": stage}
        return outsize.plan(model, lazy(model), ranks=ranks, **fields).state_bytes

    assert bytes_of(1) == (3 << 16) * 64 * 12
    assert bytes_of(3) == bytes_of(1) // 3
