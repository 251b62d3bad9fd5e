"""Inside its module's call a parameter is an ordinary one: for compilers, for views that live on, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outsize
from tests.conftest import AT_REST_TIERS, Workshop, adamw, batches, squared_error, take_step
from tests.small_models import Block, Built, InTurn, Stack


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it looks at
@pytest.mark.parametrize(
    ("tier", "when", "activations"),
    [
        ("disk", "before", "keep"),
        ("squeezed", "before", "recompute"),
        ("squeezed", "after", "keep"),
        ("disk", "wrapped", "recompute"),
    ],
)
def test_layers_that_are_compiled_as_one_graph_train_as_in_torch(
    workshop: Workshop, tier: str, when: str, activations: str
) -> None:
    def compile_layers(model: Any) -> nn.Module:
        for index, block in enumerate(model.blocks):
            if when == "wrapped":
                model.blocks[index] = torch.compile(block, backend="aot_eager", fullgraph=True)
            else:
                block.compile(backend="aot_eager", fullgraph=True)
        return model

    pair = workshop.pair(
        lambda: Stack(depth=2) if when == "after" else compile_layers(Stack(depth=2)),
        tier=tier,
        activations=activations,
        units=[Block],
    )
    if when == "after":
        compile_layers(pair.plain)
        compile_layers(pair.model)
    pair.train(batches(2))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it looks at
def test_what_opens_the_units_inside_a_compiled_layer_is_not_compiled(workshop: Workshop) -> None:
    """It would be compiled anew for each unit, which takes seconds."""

    fields: dict[str, Any] = dict.fromkeys(("params", "grads", "states"), "auto")
    fields |= {"host_memory": "480KiB", "disk": workshop.disk}  # each weight is a unit
    pair = workshop.pair(lambda: Stack(width=64, hidden=256, depth=2), **fields)
    for block in pair.model.blocks:  # type: ignore[union-attr]
        block.compile(backend="eager")
    torch._dynamo.utils.clear_compilation_metrics()
    pair.train(batches(2, width=64))
    compiled = [each for each in torch._dynamo.utils.get_compilation_metrics() if each.co_filename]
    ours = {each.co_name for each in compiled if Path(each.co_filename).is_relative_to(Path(outsize.__file__).parent)}
    assert compiled
    assert {name for name in ours if "_resume_in_run_" not in name} <= {"run"}


class Remembers(nn.Module):
    """A block keeps a view of its weight, and the model uses the view before it calls the block."""

    def __init__(self, detached: bool = True) -> None:
        super().__init__()
        self.block = Block(16, 40)
        self.head = nn.Linear(16, 4)
        self.views: list[Tensor] = []
        self.block.up.register_forward_pre_hook(self._keep)
        self.detached = detached

    def _keep(self, module: nn.Module, _: object) -> None:
        if not self.views:
            self.views.append(module.weight.detach().t())

    def forward(self, x: Tensor) -> Tensor:
        for view in self.views:
            x = x + (x @ view).mean(-1, keepdim=True)
        return self.head(self.block(x))


@pytest.mark.parametrize("update", ["fetch", "backward"])
@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_view_that_is_kept_sees_each_step(workshop: Workshop, tier: str, update: str) -> None:
    workshop.pair(Remembers, tier=tier, update=update, activations="keep").train(batches(5))


def test_views_keep_their_units_until_they_go(workshop: Workshop) -> None:
    model: Any = Stack(depth=6)
    workshop.prepare(model, None, "squeezed", activations="keep")
    views: list[Tensor] = []
    handles = [
        block.up.register_forward_hook(lambda module, *_: views.append(module.weight.detach()))
        for block in model.blocks
    ]
    resident = []
    with torch.no_grad():
        for _ in range(2):
            model(batches(1)[0][0])
            resident.append(outsize.memory(model).now["device/resident"])
            for handle in handles:
                handle.remove()
            weights = [block.up.weight for block in model.blocks]
            with outsize.gathered(weights):
                assert all(map(torch.equal, views, weights))
            views.clear()
    assert resident[0] > 2 * resident[1]


def test_a_parameter_can_be_read_inside_its_call_and_not_outside(workshop: Workshop) -> None:
    model: Any = workshop.pair(tier="disk").model
    seen: list[Tensor] = []
    model.blocks[0].up.register_forward_hook(lambda module, *_: seen.append(module.weight.sum()))
    model(batches(1)[0][0])
    assert len(seen) == 1
    with pytest.raises(RuntimeError, match="at rest"):
        model.blocks[0].up.weight.sum()


class Banked(nn.Module):
    """A layer whose weights lie in dictionaries, one of which all layers share."""

    def __init__(self, bank: nn.ParameterDict) -> None:
        super().__init__()
        self.lin, self.bank = nn.Linear(8, 8), bank
        self.own = nn.ParameterDict({"a": torch.randn(8, 16)})

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + x @ (self.own["a"] @ self.bank["a"])


def banks() -> nn.Module:
    bank = nn.ParameterDict({"a": torch.randn(16, 8)})
    return InTurn(lambda: Banked(bank), head=None)


class Around(Built, inner=banks):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def test_a_part_of_the_model_may_be_called_whose_layers_keep_weights_in_dictionaries(
    workshop: Workshop, tier: str
) -> None:
    model, x = Around(), torch.randn(2, 8)
    expected = model.inner(x).detach()
    workshop.prepare(model, adamw(model), tier)
    assert torch.equal(model.inner(x), expected)


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_checkpoint_of_frozen_and_trained_layers_is_right(workshop: Workshop, tier: str) -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    def partly_frozen() -> nn.Module:
        model = Checkpointed()
        for block in model.blocks:
            block.norm.requires_grad_(False)
        return model

    workshop.pair(partly_frozen, adamw, tier, activations="keep").train(batches(3))


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_write_through_data_that_was_taken_before_is_found_when_the_call_ends(workshop: Workshop, tier: str) -> None:
    class Clamps(Block):
        def forward(self, x: Tensor) -> Tensor:
            data = self.up.weight.data
            out = super().forward(x)
            data.clamp_(-0.01, 0.01)
            return out

    model = nn.Sequential(Clamps(16, 40), nn.Linear(16, 4))
    workshop.prepare(model, adamw(model), tier, activations="keep")
    with pytest.raises(RuntimeError, match=r"'0\.up\.weight' is written in place outside .*modify=True"):
        squared_error(model, batches(1)[0])


def test_a_model_whose_own_parameters_never_move_begins_its_passes(tmp_path: Path) -> None:
    class Scaled(Stack):
        def __init__(self) -> None:
            super().__init__(64, 256, 8)
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    model = Scaled()
    optimizer = adamw(model)
    outsize.prepare(model, optimizer, host_memory="2MiB", disk=tmp_path, device="cpu")
    for batch in batches(6, 64):
        take_step(squared_error(model, batch), optimizer)
    report = outsize.memory(model)
    assert report.predicted > 0
    assert report.mispredicted == 0


class Differentiates(Built, weight=lambda: nn.Parameter(torch.randn(16, 16) / 4)):
    """Its forward is made of gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda each: torch.tanh(each @ self.weight).square().sum()))(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_gradients_of_torch_func_in_a_forward_need_the_model_gathered(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(
        lambda: nn.Sequential(nn.Linear(16, 16), Differentiates(), nn.Linear(16, 4)), tier=tier, activations="keep"
    )
    with pytest.raises(RuntimeError, match=r"Differentiates uses torch.func .* `with outsize.gathered\(model\):`"):
        pair.model(batches(1)[0][0])
    for batch in batches(3):
        losses = []
        for model, optimizer in pair.both:
            with outsize.gathered(model) if model is pair.model else nullcontext():
                losses.append(squared_error(model, batch))
            take_step(losses[-1], optimizer)
        torch.testing.assert_close(losses[1], losses[0])
