"""Activations are kept, computed again or moved out, and calls run whole or in parts: the values stay the same."""

import errno
import os
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import outsize
from outsize.run import selective
from tests.comparing import weights
from tests.conftest import TIERS, Trace, Workshop, batches, sgd, squared_error, take_step, train
from tests.small_models import Built, Stack

MODES: dict[str, dict[str, Any]] = {
    "recompute": {"activations": "recompute"},
    "offload": {"activations": "offload"},
    "offload to host": {"activations": "offload", "activations_tier": "host"},
    "selective": {"activations": "selective"},
    "recompute in 3 parts": {"activations": "recompute", "micro_batches": 3},
    "offload in 2 parts": {"activations": "offload", "micro_batches": 2},
    "keep in 2 parts": {"micro_batches": 2, "activations": "keep"},
}
TO_DISK = {"activations": "offload", "activations_tier": "disk"}
ROWS, LENGTH, WIDTH = 6, 5, 16


class Layers(nn.Module):
    """Attention layers, with a mask that all of them get."""

    def __init__(self, depth: int = 5, dropout: float = 0.0, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer
        self.blocks = nn.ModuleList(
            [layer(WIDTH, 2, 24, dropout, batch_first=batch_first, norm_first=True) for _ in range(depth)]
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1] if self.blocks[0].self_attn.batch_first else x.shape[0]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def sequences(count: int, rows: int = ROWS, length: int = LENGTH) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator("cpu").manual_seed(count)

    def random(columns: int) -> Tensor:
        return torch.randn(rows, length, columns, generator=generator, device="cpu").to(torch.get_default_device())

    return [(random(WIDTH), random(4)) for _ in range(count)]


def trained(workshop: Workshop, tier: str, build: Any = Layers, data: Any = None, **fields: Any) -> tuple[Trace, Any]:
    model, optimizer = workshop.made(build, tier=tier, disk=workshop.disk, **fields)
    torch.manual_seed(1)
    return train(model, optimizer, data or sequences(3), clip=1.0), model


@pytest.mark.parametrize("tier", TIERS)
def test_no_mode_changes_a_bit(workshop: Workshop, tier: str) -> None:
    """With dropout: random numbers repeat. Parts give the same up to the order of sums."""
    build = lambda: Layers(3, dropout=0.1)  # noqa: E731
    expected, model = trained(workshop, tier, build, activations="keep")
    wanted = weights(model)
    for name, fields in MODES.items():
        if "parts" not in name:
            trace, model = trained(workshop, tier, build, **fields)
            assert trace == expected, name
            assert all(torch.equal(value, wanted[key]) for key, value in weights(model).items()), name


def test_a_kept_result_that_drew_random_numbers_leaves_them_to_those_after_it(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the fused attention of a GPU does, which draws its own dropout."""
    kept = selective._KEPT_OPERATIONS | {torch.ops.aten.native_dropout}
    monkeypatch.setattr(selective, "_KEPT_OPERATIONS", kept)

    class Dropping(Built, up=(16, 16), down=(16, 4)):
        def forward(self, x: Tensor) -> Tensor:
            dropped = torch.native_dropout(torch.tanh(self.up(x)), 0.5, True)[0]
            return self.down(torch.rand_like(dropped) * dropped)

    build = lambda: nn.Sequential(Dropping())  # noqa: E731
    fields = {"units": [Dropping]}
    expected, _ = trained(workshop, "host", build, batches(3), activations="keep", **fields)
    found, _ = trained(workshop, "host", build, batches(3), activations="selective", **fields)
    assert found == expected


@pytest.mark.parametrize("mode", [name for name in MODES if "parts" in name])
@pytest.mark.parametrize("batch_first", [True, False])
def test_parts_give_what_the_whole_batch_gives(workshop: Workshop, mode: str, batch_first: bool) -> None:
    """With as many rows as positions: what has so many rows may be a mask."""

    def build() -> nn.Module:
        return Layers(3, batch_first=batch_first)

    data = sequences(3, rows=5)
    workshop.pair(build, sgd, "disk", **MODES[mode]).train(data)


def test_the_inputs_of_layers_lie_on_disk(workshop: Workshop) -> None:
    """All but those of the last layer, and only between forward and backward."""
    model, nbytes = Layers(6), ROWS * LENGTH * WIDTH * 4
    workshop.prepare(model, tier="host", disk=workshop.disk, **TO_DISK)
    loss = model(sequences(1)[0][0]).sum()
    pages = -(-nbytes // 4096) * 4096
    assert outsize.memory(model).now["disk/activations"] == 5 * pages
    loss.backward()
    del loss
    assert outsize.memory(model).now["disk/activations"] == 0
    before = outsize.memory(model)
    model(sequences(1)[0][0]).sum().backward()
    after = outsize.memory(model)
    assert after.bytes_written - before.bytes_written == 5 * pages
    assert after.bytes_read - before.bytes_read == 4 * pages, "one is still there when it is wanted"
    assert outsize.memory(model).peak["disk/activations"] == 5 * pages, "space is used again"


class ByName(Built, blocks=lambda: nn.ModuleList([Named() for _ in range(4)])):
    """Layers get their input by name, inside a tuple, and beside a list that they fill."""

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for block in self.blocks:
            x = block(inputs=(x, {"scale": 0.5}), seen=seen)
        assert len(seen) == 4
        return (x + seen[0].detach())[..., :4]


class Named(Built, inner=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())):
    def forward(self, *, inputs: Any, seen: list[Tensor]) -> Tensor:
        x, options = inputs
        seen.append(x.detach())
        return x + options["scale"] * self.inner(x)


@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_inputs_by_name_and_in_tuples_move_too(workshop: Workshop, mode: str) -> None:
    pair = workshop.pair(ByName, sgd, "host", disk=workshop.disk, activations_tier="disk", activations=mode)
    pair.train(sequences(2))
    moved = outsize.memory(pair.model).peak.get("disk/activations", 0)
    assert moved == (3 * 4096 if mode == "offload" else 0)


def test_weights_move_once_a_step_whatever_the_number_of_micro_batches(workshop: Workshop) -> None:
    """A slow drive may cost a unit its place, in a step or from then on: the least of some steps of a model that met
    none tells what has to move."""

    def least(parts: int, accumulated: int, until: float = 0) -> int:
        torch.manual_seed(0)
        model = Layers(4)
        optimizer = sgd(model)
        workshop.prepare(model, optimizer, "squeezed", activations="recompute", micro_batches=parts)
        measured: list[int] = []
        while len(measured) < 4 or (min(measured[1:]) > until and len(measured) < 30):  # the first learns the order
            before = outsize.memory(model)
            for _ in range(accumulated):
                model(sequences(1)[0][0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after = outsize.memory(model)
            measured.append(after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written)
        return min(measured[1:])

    def as_once() -> bool:
        most = 1.1 * least(1, 1, float("inf"))
        return most < 0.6 * least(1, 3, float("inf")) and least(3, 1, most) <= most

    assert any(as_once() for _ in range(3))


class Normed(nn.Module):
    """Batch norm looks at all rows."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_a_layer_that_looks_at_all_rows_runs_whole(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    pair = workshop.pair(Normed, sgd, micro_batches=4)
    pair.train(batches(3))
    for (name, ours), (_, theirs) in zip(pair.model.named_buffers(), pair.plain.named_buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert "layer 'layers.0' (Sequential) runs on the whole batch" in caplog.text
    assert "do not go through it one by one" in caplog.text


class Biased(Built, lin=(16, 16), bias=lambda: nn.Parameter(torch.randn(1, 16))):
    """Drops out, and returns a bias that has no rows, as the layers of T5 do."""

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.dropout(self.lin(x) + bias, 0.5), bias + self.bias


class AllBiased(Built, layers=lambda: nn.ModuleList([Biased() for _ in range(3)]), head=(16, 4)):
    def forward(self, x: Tensor) -> Tensor:
        bias = torch.zeros(1, 16)
        for layer in self.layers:
            x, bias = layer(x, bias)
        return self.head(x)


def test_a_layer_that_draws_and_returns_what_has_no_rows_runs_whole(workshop: Workshop) -> None:
    workshop.pair(AllBiased, sgd, micro_batches=2).train(batches(3))


class Changing(Built, embed=(16, 16), blocks=lambda: Stack(depth=3).blocks):
    """Changes the first layer's input after that layer has run."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.embed(x)
        x = self.blocks[0](first)
        first.mul_(2.0)
        return self.blocks[2](self.blocks[1](x))[..., :4]


def test_an_input_that_changes_before_it_has_left_is_an_error(workshop: Workshop) -> None:
    with pytest.raises(RuntimeError, match="written to in place|modified by an inplace operation"):
        trained(workshop, "disk", Changing, batches(1), activations="offload")


def test_a_disk_without_room_ends_the_step_and_loses_nothing(workshop: Workshop) -> None:
    """The run goes on with a smaller batch."""
    pair = workshop.pair(lambda: Layers(4), sgd, "host", disk=workshop.disk, disk_space="16KiB", **TO_DISK)
    x, _ = sequences(1, rows=60)[0]
    with pytest.raises(OSError, match=r"raise disk_space .*, by 4.0 KiB at least, or pass") as caught:
        pair.model(x)
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value, outsize.BudgetError)
    assert (caught.value.field, caught.value.needed - caught.value.available) == ("disk_space", 4096)
    del caught
    pair.train(sequences(2))


@pytest.mark.parametrize("fields", [TO_DISK, {"activations": "selective"}], ids=["offload", "selective"])
def test_a_graph_that_is_used_twice_or_dropped(workshop: Workshop, fields: dict[str, Any]) -> None:
    pair = workshop.pair(lambda: Layers(4), sgd, "disk", **fields)
    x, _ = sequences(1)[0]
    for model, optimizer in pair.both:
        model(x).sum()  # dropped
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        take_step(loss, optimizer)
        del loss
        with torch.no_grad():
            model(x)
    assert not outsize.memory(pair.model).now.get("disk/activations")
    pair.check()


class InPlace(Built, up=(16, 24), middle=(24, 24), down=(24, 4)):
    """The result of a matrix product is written to."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.middle(torch.relu_(self.up(x)))))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_write_to_results_unseen(workshop: Workshop, kind: type[nn.RNNBase]) -> None:
    class Recurrent(
        Built, inner=lambda: kind(WIDTH, WIDTH, batch_first=True), out=lambda: nn.Linear(WIDTH, 4, bias=False)
    ):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu_(self.out(self.inner(x)[0]))

    pair = workshop.pair(lambda: nn.Sequential(Recurrent()), sgd, "host", units=[Recurrent], activations="selective")
    pair.train(sequences(2))


def test_selective_keeps_products_and_computes_again_what_was_written_to(workshop: Workshop) -> None:
    """A layer's backward computes no product of its forward again, but the one that an operation in place changed."""
    seen: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket is torch.ops.aten.addmm)
            return func(*args, **(kwargs or {}))

    def count(build: Any, **fields: Any) -> int:
        pair = workshop.pair(lambda: nn.Sequential(build()), sgd, "host", units=[build], **fields)
        pair.train(batches(2))
        loss = squared_error(pair.model, batches(1)[0])
        seen.clear()
        with Counting():
            loss.backward()
        return sum(seen)

    assert count(InPlace, activations="recompute") == 2
    assert count(InPlace, activations="selective") == 1
    assert count(InPlace, activations="keep") == 0


@pytest.mark.parametrize("mode", ["offload", "selective", "offload in 2 parts"])
def test_the_users_own_checkpoints_and_autocast(workshop: Workshop, mode: str) -> None:
    pair = workshop.pair(lambda: Layers(4), sgd, "disk", **MODES[mode])
    device = workshop.device

    def loss_of(model: Any, batch: Any) -> Tensor:
        x, y = batch
        with torch.autocast(device, torch.bfloat16):
            x = checkpoint(model.blocks[0], x, use_reentrant=False)
            for block in model.blocks[1:]:
                x = block(x)
            return (model.head(x).float() - y).square().mean()

    pair.train(sequences(2), rel=2e-2, atol=1e-1, loss_of=loss_of)


class Twice(
    Built,
    layers=lambda: nn.ModuleList(nn.Sequential(*[nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()] * 2) for _ in range(3)),
):
    """Each layer uses its weight twice, and draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("mode", ["keep", "recompute", "selective", "offload"])
def test_autocast_has_the_bits_of_torch_that_casts_at_each_use(workshop: Workshop, tier: str, mode: str) -> None:
    """On the device weights are cast once a forward, as by torch itself."""
    pair = workshop.pair(Twice, sgd, tier, activations=mode)
    for model, optimizer in pair.both:
        for number in range(4):
            torch.manual_seed(number)
            x = torch.randn(4, 8, device=workshop.device)
            with torch.autocast(workshop.device, torch.bfloat16, cache_enabled=model is pair.model or tier == "device"):
                loss = model(x).square().mean()
            loss.backward()
            if number == 1:
                optimizer.step()
                optimizer.zero_grad()
    with outsize.gathered(pair.model, grads=True):
        for ours, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            assert ours.grad is not None and plain.grad is not None
            assert torch.equal(ours.grad.cpu(), plain.grad.cpu())


class Traced(Built, blocks=lambda: nn.ModuleList(Stack() for _ in range(2))):
    """Block by block, as torchvision's networks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).mean(-1, keepdim=True).expand_as(x)
        return x


@pytest.mark.parametrize("activations", ["auto", "recompute"])
def test_a_layer_is_traced_by_fx_as_it_is(workshop: Workshop, activations: str) -> None:
    pair = workshop.pair(Traced, activations=activations)
    traced = torch.fx.symbolic_trace(pair.model)
    ((x, _),) = batches(1)
    torch.testing.assert_close(traced(x.to(workshop.device)), pair.plain(x.to(workshop.device)))


class Segments(Layers):
    """Six layers, some in one checkpoint of the user's (Chen et al. 2016). `seen`: the memory of each layer's input."""

    seen: ClassVar[list[StorageWeakRef]] = []

    def __init__(self, size: int) -> None:
        super().__init__(6, dropout=0.1)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        Segments.seen.clear()
        for first in range(0, len(self.blocks), max(self.size, 1)):
            some = partial(self.run, self.blocks[first : first + max(self.size, 1)])
            x = checkpoint(some, x, use_reentrant=False) if self.size else some(x)
        return self.head(x)

    def run(self, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            Segments.seen.append(StorageWeakRef(x.untyped_storage()))
            x = block(x)
        return x


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_layers_in_one_checkpoint_of_the_users_keep_one_input(workshop: Workshop, tier: str) -> None:
    expected, model = trained(workshop, tier, lambda: Segments(0), sequences(2), activations="keep")
    wanted = weights(model)
    for size, mode, inputs in ((3, "recompute", 2), (2, "auto", 3), (0, "recompute", 6)):
        trace, model = trained(workshop, tier, partial(Segments, size), sequences(2), activations=mode)
        assert trace == expected
        assert all(torch.equal(value, wanted[key]) for key, value in weights(model).items())
        output = model(sequences(1)[0][0])
        assert sum(not each.expired() for each in Segments.seen[:6]) == inputs
        del output


def test_what_the_user_saves_by_hooks_of_their_own_is_theirs(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Layers(3), sgd, "disk", activations="offload")
    seen = []

    def loss_of(model: Any, batch: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(1) or t.clone(), lambda t: t):  # type: ignore[func-returns-value]
            return (model(batch[0]) - batch[1]).square().mean()

    pair.train(sequences(2), loss_of=loss_of)
    assert seen
    assert outsize.memory(pair.model).peak.get("disk/activations", 0) == 0


class Stopped(Exception):
    """Raised in the middle of a pass."""


@pytest.mark.parametrize("mode", ["offload", "selective", "offload in 2 parts"])
def test_an_error_in_the_middle_leaves_nothing_behind(workshop: Workshop, mode: str) -> None:
    pair = workshop.pair(lambda: Layers(4), sgd, "disk", **MODES[mode])
    hooks = [pair.model.blocks[2].register_forward_hook(raise_it)]  # type: ignore[operator, index]
    with pytest.raises(Stopped):
        pair.model(sequences(1)[0][0])
    hooks.pop().remove()
    loss = pair.model(sequences(1)[0][0]).sum()
    loss.register_hook(raise_it)
    with pytest.raises(Stopped):
        loss.backward()
    del loss
    pair.optimizer.zero_grad()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    pair.train(sequences(2))


def raise_it(*_: Any) -> None:
    raise Stopped


def test_fields_that_ask_for_too_much_are_refused(workshop: Workshop) -> None:
    with pytest.raises(ValueError, match="activations_tier='disk' needs a directory"):
        outsize.Config(activations="offload", activations_tier="disk")
    with pytest.raises(ValueError, match="activations_tier is 'device'; it must be one of 'auto', 'host', 'disk'"):
        outsize.Config(activations_tier="device")
    with pytest.raises(ValueError, match="micro_batches is 0"):
        outsize.Config(micro_batches=0)


def test_bytes_that_come_back_changed_are_an_error(workshop: Workshop) -> None:
    model = Layers(4)
    workshop.prepare(model, tier="host", disk=workshop.disk, **TO_DISK)
    loss = model(sequences(1)[0][0]).sum()
    [path] = [
        os.path.join(folder, name) for folder, _, files in os.walk(workshop.disk) for name in files if "act" in name
    ]
    with open(path, "r+b") as file:
        file.seek(0)
        file.write(b"\xff" * 64)
        os.fsync(file.fileno())
    with pytest.raises(OSError, match="not what was written"):
        loss.backward()


def test_accumulated_gradients_of_parts(workshop: Workshop) -> None:
    pair = workshop.pair(lambda: Layers(4), sgd, "squeezed", activations="offload", micro_batches=2)
    for model, optimizer in pair.both:
        for x, y in sequences(2):
            (model(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    pair.check()


@pytest.mark.parametrize("mode", ["recompute", "offload", "keep in 2 parts"])
def test_a_layer_of_several_units_is_a_layer(workshop: Workshop, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attention and each linear layer is a unit of its own."""
    monkeypatch.setattr(Counted, "calls", 0)

    def build() -> nn.Module:
        model = Layers(3)
        for block in model.blocks:
            block.activation = Counted()
        return model

    units = [nn.MultiheadAttention, nn.Linear, nn.LayerNorm]
    pair = workshop.pair(build, sgd, units=units, **MODES[mode])
    pair.train(sequences(2))
    of_torch = 2 * 3
    assert Counted.calls - of_torch >= 2 * of_torch  # in two parts it was tried before


class Counted(nn.Module):
    """Counts how often it runs."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return torch.relu(x)


class Around(nn.Module):
    calls = 0

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        Around.calls += 1
        return self.model(x)


class BothHaveIt(nn.Module):
    """As a loss that wraps a loss: each has the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        self.inner = Around(self.model)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_module_around_a_layer_that_stands_elsewhere_too_does_not_run_again(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Around, "calls", 0)
    pair = workshop.pair(BothHaveIt, sgd, activations="recompute", units=nn.Sequential)
    pair.train([(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 4)) for _ in range(2)])
    assert Around.calls == 2 * 2  # torch's, and ours
