"""Tables, embeddings with `sparse=True`, whose rows are split over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import outsize
from tests.conftest import take_step
from tests.ranks.launching import Ended, ends_on_ranks, in_turn, run_on_ranks
from tests.ranks.training import assert_near, named_weights, prepared, same_bits
from tests.small_models import Built

# What torch's own Adagrad says of sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ROWS, WORDS = 3001, 40
"""Rows that no number of ranks divides, of a table whose ranks all have some; and of one that the first has alone."""

Batch = tuple[Tensor, Tensor]


class Clicks(
    Built,
    items=lambda: nn.Embedding(ROWS, 16, padding_idx=3, sparse=True),
    words=lambda: nn.EmbeddingBag(WORDS, 4, mode="mean", sparse=True),
    head=(20, 1),
):
    """A table that is used twice, bags of another one, and a dense layer."""

    def forward(self, batch: Batch) -> Tensor:
        items, words = batch
        found = torch.tanh(self.items(items).sum(1)) + self.items(items[:, 0])
        return self.head(torch.cat([found, self.words(words)], 1)).square().sum()


def rowless(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def lazy(model: nn.Module) -> torch.optim.Optimizer:
    return outsize.optim.LazyAdamW(model.parameters(), lr=0.01)


def rowwise(model: nn.Module) -> torch.optim.Optimizer:
    return outsize.optim.RowwiseAdagrad(model.parameters(), lr=0.1)


def make(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Clicks()
    return model, optimizer(model)


def batch(step: int, rank: int) -> Batch:
    """Ranks have batches of different sizes; in the second step one asks for its own rows alone, and one for none."""
    made = torch.Generator().manual_seed(100 * step + rank)
    rows = (4 + 3 * rank) * (step != 1 or rank != 1)
    ids = torch.randint(0, 900 if step == 1 else ROWS, (rows, 5), generator=made)
    return ids, torch.randint(0, WORDS, (rows, 2), generator=made)


@dataclass(frozen=True)
class Way:
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lazy
    tier: str = "host"
    ahead: bool = False
    accumulate: int = 1
    fields: dict[str, Any] = field(default_factory=dict)

    def prepare(self, disk: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = make(self.optimizer)
        places = dict.fromkeys(("params", "grads", "states"), self.tier)
        outsize.prepare(model, optimizer, **{"host_memory": "16MiB", "disk": disk, **places, **self.fields})
        return model, optimizer


STEPS = 4


def train(model: nn.Module, optimizer: torch.optim.Optimizer, way: Way, first: int = 0, steps: int = STEPS) -> Tensor:
    """The losses of this rank."""
    rank, losses = dist.get_rank() if dist.is_initialized() else 0, []
    device = way.fields.get("device", "cpu")
    data = [tuple(each.to(device) for each in batch(step, rank)) for step in range(first, first + steps)]
    for at, each in enumerate(outsize.lookahead(data, model) if way.ahead else data):
        last = (at + 1) % way.accumulate == 0
        with nullcontext() if last else outsize.no_sync(model):
            loss = model(each)
            loss.backward()
        losses.append(loss.detach().cpu())
        if last:
            nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses)


def plain(way: Way, ranks: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain torch on the batches of all ranks."""
    model, optimizer = make(way.optimizer)
    losses = []
    for step in range(STEPS):
        loss = sum(model(batch(step, rank)) for rank in range(ranks)) / ranks
        loss.backward()
        losses.append(loss.detach())
        if (step + 1) % way.accumulate == 0:
            nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), named_weights(model)


def trained(ways: list[Way], disk: str) -> list[tuple[Tensor, dict[str, Tensor], dict[str, int]]]:
    found = []
    for way in ways:
        model, optimizer = way.prepare(disk)
        losses = train(model, optimizer, way)
        dist.all_reduce(losses)
        report = outsize.memory(model)
        counts = {
            "rows": report.rows,
            "ahead": report.rows_ahead,
            "near": report.rows_on_device,
            "own": report.state_bytes,
        }
        found.append((losses / dist.get_world_size(), named_weights(model), counts))
    return found


SMALL = {"host_memory": "640KiB"}
"""A budget that holds a few hundred rows."""

ALIKE = [
    *([Way(optimizer), Way(optimizer, "disk", fields=SMALL)] for optimizer in (rowless, adagrad, rowwise)),
    [Way(), Way(tier="disk", fields=SMALL), Way(tier="disk", ahead=True)],
    [Way(accumulate=2), Way(accumulate=2, tier="disk")],
    [Way(fields={"stage": 0}), Way(tier="disk", fields={"stage": 0})],
    [Way(tier="device", fields={"stage": 2})],
]
"""Ways that give the same bits."""


@pytest.mark.parametrize(("ranks", "alike"), [(2, ALIKE), (3, [ALIKE[3][:2], *ALIKE[-1:]])], ids=["two", "three"])
def test_ranks_train_tables_as_plain_torch_does_on_the_whole_batch(
    ranks: int, alike: list[list[Way]], tmp_path: Path
) -> None:
    every = run_on_ranks(ranks, trained, [way for ways in alike for way in ways], str(tmp_path))
    for rank in range(ranks):
        found = iter(every[rank])
        for ways in alike:
            losses, expected = plain(ways[0], ranks)
            first, *others = [next(found) for _ in ways]
            torch.testing.assert_close(first[0], losses, rtol=1e-6, atol=1e-6)
            assert_near(first[1].values(), expected.values())
            for other in others:
                assert torch.equal(other[0], first[0])
                assert same_bits(other[1].values(), first[1].values())


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(model.parameters(), lr=0.01)


def of_16_bits(disk: str) -> list[tuple[dict[str, Tensor], Any]]:
    """Tables alone."""
    found = []
    for tier in ("host", "disk"):
        torch.manual_seed(0)
        model = nn.Embedding(ROWS, 16, sparse=True)
        optimizer = sparse_adam(model)
        places = dict.fromkeys(("params", "states"), tier)
        outsize.prepare(model, optimizer, disk=disk, host_memory="16MiB", compute_dtype=torch.bfloat16, **places)
        for step in range(STEPS):
            take_step(torch.tanh(model(batch(step, dist.get_rank())[0])).sum(), optimizer)
        found.append((named_weights(model), optimizer.state_dict()["state"][0]))
    return found


def test_rows_of_16_bits_have_the_same_masters_on_every_tier(tmp_path: Path) -> None:
    every = run_on_ranks(2, of_16_bits, str(tmp_path))
    torch.manual_seed(0)
    model = nn.Embedding(ROWS, 16, sparse=True)
    optimizer = sparse_adam(model)
    for step in range(STEPS):
        sum(torch.tanh(model(batch(step, rank)[0])).sum() / 2 for rank in (0, 1)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"][0]
    shares = [each[0][1]["exp_avg"] for each in every]
    assert sum(map(len, shares)) == ROWS * 16 and min(map(len, shares)) > 0
    for (held, entry), (other, others) in every:
        assert torch.equal(held["weight"], other["weight"])
        assert torch.equal(held["weight"], every[0][0][0]["weight"])
        torch.testing.assert_close(held["weight"], model.weight.detach().bfloat16(), rtol=0.02, atol=0.02)
        assert entry["step"] == others["step"] == state["step"]
        assert torch.equal(entry["exp_avg"], others["exp_avg"])


# -- checkpoints ---------------------------------------------------------------------------------------------------


def saved(way: Way, folder: str, disk: str) -> dict[str, Tensor]:
    model, optimizer = way.prepare(disk)
    train(model, optimizer, way, 0, 2)
    outsize.save(f"{folder}/{way.tier}", model, optimizer).wait()
    train(model, optimizer, way, 2, 2)  # the saved files are frozen: what is written goes elsewhere
    return named_weights(model)


def loaded(way: Way, folder: str, disk: str, again: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights as they were saved, and after two more steps. They are saved again, as they were."""
    model, optimizer = way.prepare(disk)
    train(model, optimizer, way, 5, 1)
    outsize.load(folder, model, optimizer)
    before = named_weights(model)
    outsize.save(again, model, optimizer).wait()
    train(model, optimizer, way, 2, 2)
    return before, named_weights(model)


def test_a_checkpoint_of_three_ranks_goes_on_exactly_through_one_rank_and_back(tmp_path: Path) -> None:
    def of_each(function: Callable[..., Any], way: Callable[[Any], Way], *folders: str) -> list[tuple[Any, ...]]:
        places = [(each, [str(tmp_path / each.__name__ / folder) for folder in folders]) for each in (adagrad, rowwise)]
        return [(function, way(each), *paths) for each, paths in places]

    def small(each: Any) -> Way:
        return Way(each, "disk", fields=SMALL)

    for each in (adagrad, rowwise):
        (tmp_path / each.__name__).mkdir()
    expected = run_on_ranks(3, in_turn, *of_each(saved, small, "", "run"))[0]
    every = in_turn(*of_each(loaded, Way, "disk", "run", "one"))
    for found in run_on_ranks(3, in_turn, *of_each(loaded, small, "one", "run", "three")):
        for (held, after), (before, _), last in zip(found, every, expected, strict=True):
            assert same_bits(held.values(), before.values())
            assert same_bits(after.values(), last.values())
    for found in run_on_ranks(2, in_turn, *of_each(loaded, Way, "three", "run", "two")):
        for (held, _), (before, _) in zip(found, every, strict=True):
            assert same_bits(held.values(), before.values())


@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_where_tables_alone_are_split_is_whole(stage: int, tmp_path: Path) -> None:
    disk, one, two = str(tmp_path), str(tmp_path / "one"), str(tmp_path / "two")
    way = Way(adagrad, "disk" if stage == 0 else "device", fields={"stage": stage})
    expected = run_on_ranks(2, saved, way, disk, disk)[0]
    before, _ = loaded(Way(adagrad), f"{disk}/{way.tier}", disk, one)
    for held, after in run_on_ranks(2, loaded, way, one, disk, two):
        assert same_bits(held.values(), before.values())
        assert same_bits(after.values(), expected.values())


# -- around the loop -----------------------------------------------------------------------------------------------


def around(way: Way, disk: str) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    model, optimizer = way.prepare(disk)
    train(model, optimizer, way, 0, 2)
    found = [named_weights(model)]
    outsize.export(f"{disk}/out", model)
    with outsize.gathered(model.items.weight, modify=True), torch.no_grad():  # type: ignore[arg-type]
        model.items.weight.mul_(2)  # type: ignore[union-attr, operator]
    with torch.no_grad():
        found.append({"loss": model(batch(0, 0)), **named_weights(model)})
    with outsize.gathered(model), torch.no_grad():
        assert torch.equal(model(batch(0, 0)), found[1]["loss"])
    train(model, optimizer, way, 2, 1)
    model(batch(3, dist.get_rank())).backward()
    with pytest.raises(RuntimeError, match=r"gradient of table 'items\.weight' is of this rank's batch.*zero_grad"):
        outsize.release(model)
    optimizer.zero_grad()
    found.append(named_weights(model))
    outsize.release(model)
    found.append(named_weights(model))
    return found, [sums_of(optimizer.state[param]) for param in model.parameters()]


def sums_of(state: dict[str, Any]) -> Tensor:
    return state["row_sum" if "row_sum" in state else "sum"]


def test_what_is_exported_shown_changed_and_released_is_the_whole_table(tmp_path: Path) -> None:
    ways = [(around, Way(optimizer, "disk"), str(tmp_path / optimizer.__name__)) for optimizer in (adagrad, rowwise)]
    for (_, way, disk), (ours, theirs) in zip(ways, zip(*run_on_ranks(2, in_turn, *ways), strict=True), strict=True):
        (first, shown, last, released), sums = ours
        assert all(same_bits(one.values(), other.values()) for one, other in zip(ours[0], theirs[0], strict=True))
        assert same_bits(sums, theirs[1])
        exported = load_file(f"{disk}/out/model.safetensors")
        assert all(torch.equal(exported[name], value) for name, value in first.items())
        assert torch.equal(shown["items.weight"], 2 * first["items.weight"])
        assert same_bits(released.values(), last.values())
        model, optimizer = make(way.optimizer)
        for step in range(3):
            (sum(model(batch(step, rank)) for rank in (0, 1)) / 2).backward()  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)  # type: ignore[union-attr, operator]
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                with torch.no_grad():
                    model.items.weight.mul_(2)  # type: ignore[union-attr, operator]
        assert_near(released.values(), named_weights(model).values())
        assert_near(sums, [sums_of(optimizer.state[param]) for param in model.parameters()])


def counted(disk: str) -> list[tuple[int, int, int]]:
    """(rows asked for, in memory, read ahead) without `lookahead` and with it, each batch of other rows."""
    found = []
    for ahead in (False, True):
        model, optimizer = nn.Embedding(ROWS, 16, sparse=True), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outsize.prepare(model, optimizer, disk=disk, host_memory="16MiB", params="disk", states="disk")
        rank = dist.get_rank()
        data = [torch.arange(300) * 10 + 2 * step + rank for step in range(4)]
        for ids in outsize.lookahead(data, model) if ahead else data:
            take_step(model(ids).sum(), optimizer)
        report = outsize.memory(model)
        found.append((report.rows, report.row_hits, report.rows_ahead))
    return found


def test_owners_read_ahead_what_all_ranks_need_next(tmp_path: Path) -> None:
    every = run_on_ranks(2, counted, str(tmp_path))
    assert sum(each[0][0] for each in every) == sum(each[1][0] for each in every) == 2 * 4 * 300
    assert all(each[0][1:] == (0, 0) for each in every)
    # The place of the ids in a batch is learnt from the first, while the second is on its way.
    assert sum(each[1][1] for each in every) == sum(each[1][2] for each in every) == 2 * 2 * 300


# -- refused -------------------------------------------------------------------------------------------------------


def not_finite(disk: str) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """The gradient of a row that rests with the last rank is NaN on the first."""
    way = Way()
    model, optimizer = way.prepare(disk)
    before = named_weights(model)
    items, _ = batch(0, 0)
    items[0, 0] = ROWS - 1
    loss = model.items(items).sum() * (float("nan") if dist.get_rank() == 0 else 1.0)  # type: ignore[operator]
    loss.backward()
    with pytest.raises(FloatingPointError) as error:
        optimizer.step()
    optimizer.zero_grad()
    after = named_weights(model)
    train(model, optimizer, way, 0, 1)
    return str(error.value), before, after


def test_a_gradient_of_one_rank_that_is_not_finite_stops_the_step_of_all(tmp_path: Path) -> None:
    for words, before, after in run_on_ranks(2, not_finite, str(tmp_path)):
        assert "the gradient of 'items.weight' is not finite" in words
        assert same_bits(before.values(), after.values())


def scaled(disk: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The first rank alone finds an overflow, in rows of which the last one has some."""
    model, optimizer = Way(adagrad).prepare(disk)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100), []
    for step in range(3):
        items, words = batch(step, dist.get_rank())
        factor = float("inf") if step == 1 and dist.get_rank() == 0 else 1.0
        loss = model((items, words)) + model.items(batch(0, 0)[0]).sum() * factor  # type: ignore[operator]
        scaler.scale(loss).backward()
        if step:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, [outsize.memory(model).skipped_steps], named_weights(model)


def test_a_step_that_one_rank_must_skip_is_skipped_by_all(tmp_path: Path) -> None:
    model, optimizer = make(adagrad)
    for step in (0, 2):
        losses = [model(batch(step, rank)) + model.items(batch(0, 0)[0]).sum() for rank in (0, 1)]  # type: ignore[operator]
        take_step(sum(losses) / 2, optimizer)
    for scales, skipped, found in run_on_ranks(2, scaled, str(tmp_path)):
        assert (scales, skipped) == ([256.0, 128.0, 128.0], [1])
        assert_near(found.values(), named_weights(model).values())


def fewer_lookups(at: int, disk: str) -> None:
    way = Way()
    model, optimizer = way.prepare(disk)
    for step in range(3):
        items, _ = batch(step, 0)
        loss = model.items(items).sum()  # type: ignore[operator]
        if step != at or dist.get_rank():
            loss = loss + model.items(items).sum()  # type: ignore[operator]
        take_step(loss, optimizer)


def outside(disk: str) -> None:
    model, _ = Way().prepare(disk)
    items, words = batch(0, dist.get_rank())
    items[0, 1] += dist.get_rank() * ROWS
    model((items, words))


def no_gradient(disk: str) -> None:
    model, optimizer = Way().prepare(disk)
    model(batch(0, 0)).backward()
    if dist.get_rank():
        model.items.weight.grad = None  # type: ignore[union-attr]
    optimizer.step()


def raising(*_: Any) -> None:
    raise OSError("gone")


def unreadable(disk: str) -> None:
    """An owner fails after it was asked. Its loop goes on to what needs all ranks."""
    model, optimizer = Way(tier="disk").prepare(disk)
    train(model, optimizer, Way(), 0, 1)
    if dist.get_rank() == 0:
        train(model, optimizer, Way(), 1, 1)
    rows = prepared(model).engine.tables[id(model.items.weight)].rows  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="gone"):
        patch.setattr(rows, "get_params", raising)
        model(batch(1, 1))
    outsize.save(f"{disk}/saved", model, optimizer)


def ended(function: Callable[..., Any], *args: Any) -> list[Ended]:
    ends = ends_on_ranks(2, function, *args)
    assert all(end.error and end.seconds < 10 for end in ends), ends
    return ends


def test_an_owner_that_cannot_read_ends_all_with_an_error(tmp_path: Path) -> None:
    waits, failed = ended(unreadable, str(tmp_path))
    assert "rank 1: save in step 1" in (failed.error or "")
    assert "rows given of unit 'items.weight'" in (waits.error or "")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("at", [0, 2])
def test_a_rank_that_looks_up_less_often_ends_all_with_an_error(at: int, tmp_path: Path) -> None:
    for end in ended(fewer_lookups, at, str(tmp_path)):
        assert "gone different ways" in (end.error or "")
        assert "rows asked for of unit 'items.weight'" in (end.error or "") and "rank 1" in (end.error or "")


def test_what_one_rank_asks_for_or_lacks_ends_all(tmp_path: Path) -> None:
    other, own = ended(outside, str(tmp_path))
    assert own.kind == "IndexError" and f"the rows 0 to {ROWS - 1}" in (own.error or "")
    assert "rank 1" in (other.error or "")
    for end in ended(no_gradient, str(tmp_path)):
        assert "take different steps" in (end.error or "") and "'items.weight'" in (end.error or "")


def refused(disk: str) -> list[str]:
    found = []
    for optimizer, fields in [
        (lazy, {"mesh": init_device_mesh("cpu", (2, 1))}),
        (lazy, {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))}),
        (lazy, {"unused": "sync"}),
        (lazy, {"compute_dtype": torch.float16}),
    ]:
        with pytest.raises(ValueError, match="table 'items.weight' is an embedding with sparse=True") as error:
            Way(optimizer, fields=fields).prepare(disk)  # type: ignore[arg-type]
        found.append(str(error.value))
    return found


def test_what_split_tables_do_not_serve_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for words in run_on_ranks(2, refused, str(tmp_path)):
        for each, remedy in zip(words, ("one dimension", "sparse=False", "unused='error'", "bfloat16"), strict=True):
            assert remedy in each
