"""`gathered` shows full values for a while and stores what was modified, on every tier."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outsize
from tests.comparing import assert_same_gradients, weights
from tests.conftest import AT_REST_TIERS, Pair, Workshop, adamw, batches, prepared, squared_error, train
from tests.small_models import Built, Stack


def modifying(model: nn.Module, pair: Pair) -> AbstractContextManager[Any]:
    """A plain model needs no block."""
    return outsize.gathered(model, modify=True) if model is pair.model else nullcontext()


def test_values_inside_are_those_before_prepare(pair: Pair) -> None:
    with outsize.gathered(pair.model):
        for mine, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.detach().cpu().numpy().tolist() == theirs.detach().cpu().numpy().tolist()
            assert repr(mine.shape) == repr(theirs.shape)


@pytest.mark.parametrize("what", ["module", "parameter", "list", "generator", "nothing"])
def test_it_takes_a_module_a_parameter_or_several(workshop: Workshop, what: str) -> None:
    model = workshop.pair(tier="disk").model
    target = {
        "module": model.head,
        "parameter": model.head.weight,
        "list": [model.head, model.blocks[0].up.bias, [model.blocks[1]]],
        "generator": (param for param in model.head.parameters()),
        "nothing": nn.ReLU(),
    }[what]
    with outsize.gathered(target):
        if what != "nothing":
            assert model.head.weight.sum().isfinite()


def test_modifications_are_stored(pair: Pair) -> None:
    pair.train(batches(2))
    for model, _ in pair.both:
        with torch.no_grad(), modifying(model, pair):
            model.head.weight.fill_(0.25)
            model.blocks[1].up.bias.add_(1.0)
            nn.init.ones_(model.blocks[2].norm.weight)
            model.blocks[0].up.weight[3, :] = 7.0
    prepared(pair.model).engine.streamer.drop_idle()
    pair.check()
    pair.train(batches(3))


def test_modifications_between_backward_and_step_are_the_base_of_the_step(pair: Pair) -> None:
    for model, optimizer in pair.both:
        squared_error(model, batches(1)[0]).backward()
        with torch.no_grad(), modifying(model, pair):
            model.head.weight.mul_(2)
        optimizer.step()
        optimizer.zero_grad()
    pair.train(batches(2))


def test_modifications_survive_an_exception_in_the_block(workshop: Workshop, tier: str) -> None:
    model = workshop.pair(tier=tier).model
    with pytest.raises(KeyError), torch.no_grad(), outsize.gathered(model.head, modify=True):
        model.head.bias.fill_(3.0)
        raise KeyError
    prepared(model).engine.streamer.drop_idle()
    assert torch.equal(weights(model)["head.bias"], torch.full((4,), 3.0))


def test_modified_bf16_values_are_their_own_masters_and_the_others_keep_theirs(workshop: Workshop, tier: str) -> None:
    torch.manual_seed(0)
    model = Stack(depth=1)
    start = weights(model)
    workshop.prepare(model, adamw(model), tier, compute_dtype=torch.bfloat16)
    with torch.no_grad(), outsize.gathered(model, modify=True):
        model.head.weight[0].fill_(0.3)
    unit, slot = prepared(model).engine.parameters.unit_of(model.head.weight)
    rest = unit.shard.read_array(unit.shard.arrays["master"], slot.offset, slot.end).view(4, 16).to(unit.shard.device)
    value = weights(model)["head.weight"]
    master = ((value.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)
    assert torch.equal(master[0], torch.full((16,), 0.3).bfloat16().float())
    assert torch.equal(master[1:], start["head.weight"][1:])


def test_blocks_nest_in_any_way(workshop: Workshop, tier: str) -> None:
    model = workshop.pair(tier=tier).model
    with torch.no_grad(), outsize.gathered(model.head):
        with outsize.gathered(model, modify=True):
            with outsize.gathered(model.head.bias):
                model.head.bias.fill_(2.0)
            assert model.head.weight.sum().isfinite()
        assert torch.equal(model.head.bias.detach().clone().as_subclass(Tensor), torch.full((4,), 2.0))
        assert model.head.weight.sum().isfinite()
    prepared(model).engine.streamer.drop_idle()
    assert torch.equal(weights(model)["head.bias"], torch.full((4,), 2.0))


def test_training_inside_a_block_works(pair: Pair) -> None:
    expected = train(pair.plain, pair.plain_optimizer, batches(2))
    with outsize.gathered(pair.model.blocks[1]):
        train(pair.model, pair.optimizer, batches(2)).close_to(expected)
    pair.check()


@pytest.mark.parametrize("activations", ["keep", "recompute", "selective", "offload", "auto"])
def test_the_backward_of_a_forward_outside_may_come_inside_a_block(workshop: Workshop, activations: str) -> None:
    pair = workshop.pair(activations=activations)
    batch = batches(1)[0]
    for model, optimizer in pair.both:
        loss = squared_error(model, batch)
        with outsize.gathered(pair.model):
            (loss + 0.01 * model.head.weight.square().sum()).backward()
        optimizer.step()
    pair.check()


@pytest.mark.parametrize("forward_inside", [False, True])
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("tiles", [False, True])
def test_layers_that_the_user_checkpoints_or_tiles_take_a_block_around_forward_or_backward(
    workshop: Workshop, forward_inside: bool, backward_inside: bool, tiles: bool
) -> None:
    pair = workshop.pair()
    batch = batches(1)[0]
    for model, optimizer in pair.both:
        for block in model.blocks:
            if tiles and model is pair.model:
                outsize.tiled(block, dim=0, tiles=2)
            elif not tiles:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        with outsize.gathered(pair.model) if forward_inside else nullcontext():
            loss = squared_error(model, batch)
        with outsize.gathered(pair.model) if backward_inside else nullcontext():
            loss.backward()
        optimizer.step()
    pair.check()


class Slope(Built, inner=(16, 16)):
    """Its forward uses torch.func, beside which torch allows no hooks of saved tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: self.inner(y).square().sum())(x)


@pytest.mark.parametrize(
    ("build", "activations"),
    [
        *((Stack, activations) for activations in ("keep", "recompute", "selective", "offload", "auto")),
        *((lambda: nn.Sequential(Slope(), nn.Linear(16, 4)), activations) for activations in ("keep", "recompute")),
    ],
)
def test_the_backward_of_a_forward_inside_may_come_after_the_block(
    workshop: Workshop, build: Callable[[], nn.Module], activations: str
) -> None:
    pair = workshop.pair(build, activations=activations)
    batch = batches(1)[0]
    for model, optimizer in pair.both:
        with outsize.gathered(pair.model):
            loss = squared_error(model, batch)
        loss.backward()
        optimizer.step()
    pair.check()


def test_a_forward_inside_a_modifying_block_sees_the_changes(pair: Pair) -> None:
    x = batches(1)[0][0]
    with torch.no_grad():
        pair.plain.blocks[0].up.weight.mul_(2)
        expected = pair.plain(x)
        with outsize.gathered(pair.model, modify=True):
            pair.model.blocks[0].up.weight.mul_(2)
            torch.testing.assert_close(pair.model(x), expected)
        torch.testing.assert_close(pair.model(x), expected)


def test_weights_of_unprepared_models_are_refused(workshop: Workshop) -> None:
    with (
        pytest.raises(ValueError, match="not a parameter of a model that outsize.prepare prepared"),
        outsize.gathered(nn.Linear(2, 2)),
    ):
        pass
    with pytest.raises(TypeError, match="not int"), outsize.gathered(3):  # type: ignore[arg-type]
        pass


def test_parameters_of_two_models_are_refused(workshop: Workshop) -> None:
    first, second = workshop.pair(tier="host").model, workshop.pair(tier="disk").model
    with pytest.raises(ValueError, match="two prepared models"), outsize.gathered([first, second]):
        pass


def test_a_copy_taken_inside_lives_on_outside(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    with outsize.gathered(pair.model):
        copies = [param.detach().clone() for param in pair.model.parameters()]
    with torch.no_grad():
        pair.model(batches(1)[0][0])
    for mine, theirs in zip(copies, pair.plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert not mine.requires_grad


def test_a_view_kept_from_inside_raises_outside(workshop: Workshop) -> None:
    model = workshop.pair(tier="squeezed").model
    with outsize.gathered(model):
        kept = model.blocks[0].up.weight.detach()
        row = model.blocks[0].up.weight[0]
    for view in (kept, row):
        with pytest.raises(RuntimeError, match=r"'blocks.0.up.weight' is at rest"):
            view.sum()
    with outsize.gathered(model):
        row.sum()


def test_optimizer_state_may_be_read_inside(pair: Pair) -> None:
    pair.train(batches(2))
    with outsize.gathered(pair.model.head):
        state = pair.optimizer.state[pair.model.head.weight]
    torch.testing.assert_close(state["exp_avg"], pair.plain_optimizer.state[pair.plain.head.weight]["exp_avg"])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_step_inside_a_modifying_block_is_refused_where_masters_lose_bits(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier, compute_dtype=torch.bfloat16)
    x, y = batches(1)[0]
    squared_error(pair.model, (x.bfloat16(), y.bfloat16())).backward()
    with outsize.gathered(pair.model, modify=True), pytest.raises(RuntimeError, match=r"step\(\) inside gathered"):
        pair.optimizer.step()
    pair.optimizer.step()


def test_a_step_inside_a_modifying_block_is_exact_in_fp32(pair: Pair) -> None:
    train(pair.plain, pair.plain_optimizer, batches(3))
    with outsize.gathered(pair.model, modify=True):
        train(pair.model, pair.optimizer, batches(3))
    pair.check()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_backward_after_a_modification_is_refused_as_in_torch(
    workshop: Workshop, tier: str, activations: str
) -> None:
    pair = workshop.pair(tier=tier, activations=activations)
    for model, _ in pair.both:
        loss = squared_error(model, batches(1)[0])
        with torch.no_grad(), modifying(model, pair):
            model.head.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()
        del loss
    pair.plain_optimizer.zero_grad()
    pair.optimizer.zero_grad()
    pair.train(batches(2))


def test_a_backward_after_a_modification_of_what_it_does_not_use_is_right(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier, activations="keep")
    for model, _ in pair.both:
        loss = squared_error(model, batches(1)[0])
        with torch.no_grad(), modifying(model, pair):
            model.head.bias.mul_(2)
        loss.backward()
    assert_same_gradients(pair.model, pair.plain)


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_gradient_that_is_written_without_modify_is_refused(pair: Pair) -> None:
    for model, _ in pair.both:
        squared_error(model, batches(1)[0]).backward()
    with (
        pytest.raises(RuntimeError, match=r"gradient of 'head\.weight' was written .* pass modify=True too"),
        outsize.gathered(pair.model, grads=True),
    ):
        pair.model.head.weight.grad.mul_(2)
    assert_same_gradients(pair.model, pair.plain)


def test_a_backward_adds_to_gradients_that_are_shown(pair: Pair) -> None:
    first, second = batches(2)
    for model, _ in pair.both:
        squared_error(model, first).backward()
    squared_error(pair.plain, second).backward()
    with outsize.gathered(pair.model, grads=True):
        squared_error(pair.model, second).backward()
    assert_same_gradients(pair.model, pair.plain)


def test_an_error_inside_a_block_that_shows_gradients_comes_through(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    squared_error(pair.model, batches(1)[0]).backward()
    with pytest.raises(KeyError), outsize.gathered(pair.model, grads=True):
        pair.model.head.weight.grad.mul_(2)
        raise KeyError


def test_a_backward_after_a_load_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    model, optimizer = workshop.made(lambda: Stack(depth=2), tier="host")
    outsize.save(tmp_path / "ckpt", model, optimizer).wait()
    loss = squared_error(model, batches(1)[0])
    outsize.load(tmp_path / "ckpt", model)
    with pytest.raises(RuntimeError, match=r"outsize\.load has replaced"):
        loss.backward()


class Tied(Stack):
    """A stack whose first and last matrices are one parameter."""

    def __init__(self) -> None:
        super().__init__(hidden=16)
        self.head.weight = self.blocks[0].up.weight
        self.head.bias = nn.Parameter(torch.zeros(16))


def test_each_parameter_has_a_storage_of_exactly_its_own_bytes_inside(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(Tied, tier=tier)
    with outsize.gathered(pair.model), outsize.gathered(pair.model.head):
        storages = [param.untyped_storage() for param in pair.model.parameters()]
        sizes = [param.numel() * param.itemsize for param in pair.model.parameters()]
        assert [storage.nbytes() for storage in storages] == sizes
        assert len({storage.data_ptr() for storage in storages}) == len(storages)
        assert not any(param.storage_offset() for param in pair.model.parameters())
    pair.train(batches(2, out=16))


def test_writers_that_look_for_shared_storages_write_every_tensor(workshop: Workshop, tmp_path: Path) -> None:
    from huggingface_hub import load_state_dict_from_file, save_torch_model
    from safetensors.torch import load_file, save_model

    pair = workshop.pair(Tied)
    with outsize.gathered(pair.model):
        save_model(pair.model, str(tmp_path / "model.safetensors"))
        save_torch_model(pair.model, tmp_path)
    for written in (
        load_file(tmp_path / "model.safetensors"),
        load_state_dict_from_file(tmp_path / "model.safetensors"),
    ):
        plain = pair.plain.state_dict()
        assert len(written) == len(plain) - 1  # one name for the tied pair
        assert all(torch.equal(written[name], plain[name].cpu()) for name in written)


@pytest.mark.slow
def test_accelerate_saves_and_loads_a_model_inside(workshop: Workshop, tmp_path: Path) -> None:
    from accelerate import Accelerator

    pair = workshop.pair()
    pair.model._is_accelerate_prepared = True  # type: ignore[assignment]
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(pair.model)
    with outsize.gathered(pair.model):
        accelerator.save_state(str(tmp_path / "state"))
        accelerator.save_model(pair.model, str(tmp_path / "model"))
    with torch.no_grad(), outsize.gathered(pair.model, modify=True):
        for param in pair.model.parameters():
            param.zero_()
    with outsize.gathered(pair.model, modify=True):
        accelerator.load_state(str(tmp_path / "state"))
    pair.check(atol=0)


def test_a_deep_copy_made_inside_is_a_plain_model(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(Tied, tier=tier)
    with outsize.gathered(pair.model):
        copied = copy.deepcopy(pair.model)
    assert copied.head.weight is copied.blocks[0].up.weight
    assert {type(param) for param in copied.parameters()} == {nn.Parameter}
    assert {key for module in copied.modules() for key in vars(module)} == {
        key for module in pair.plain.modules() for key in vars(module)
    }
    optimizer = adamw(copied)
    data = batches(2, out=16)
    assert train(copied, optimizer, data) == train(pair.plain, pair.plain_optimizer, data)
    workshop.pair(Tied).train(data)
    pair.model.to(workshop.device)
    copied.double()


def clone(module: nn.Module) -> nn.Module:
    """As libraries for meta-learning clone modules."""
    copied = module.__new__(type(module))
    copied.__dict__ = module.__dict__.copy()
    copied.__dict__["_modules"] = {name: clone(child) for name, child in module._modules.items() if child is not None}
    return copied


@pytest.mark.parametrize("copier", [copy.copy, clone])
def test_the_call_of_a_copy_of_the_attributes_is_refused(pair: Pair, tier: str, copier: Any) -> None:
    ((x, _),) = batches(1)
    with outsize.gathered(pair.model):
        for module in (pair.model, pair.model.blocks[0])[tier == "device" :]:  # there the whole has plain attributes
            with pytest.raises(
                RuntimeError, match=rf"this {type(module).__name__} has the attributes of a module of a"
            ):
                copier(module)(x)
    pair.train(batches(2))


def test_a_deep_copy_and_the_state_of_a_copy_are_its_own(pair: Pair) -> None:
    own = nn.Parameter(torch.ones_like(pair.plain.blocks[0].up.weight))
    copied = clone(pair.model)
    up = copied.blocks[0].up
    up._parameters = {**up._parameters, "weight": own}
    with outsize.gathered(pair.model):
        state, plain = copied.state_dict(), copy.deepcopy(copied)
        assert {type(param) for param in plain.parameters()} == {nn.Parameter}
        for name, expected in pair.plain.state_dict().items():
            expected = own if name == "blocks.0.up.weight" else expected
            assert torch.equal(state[name], expected) and torch.equal(plain.state_dict()[name], expected)
        ((x, _),) = batches(1)
        assert not torch.equal(plain(x), pair.model(x))
    pair.train(batches(2))


class Wrapper(Built, inner=Stack):
    """Passes attributes on, as PEFT's models do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def test_a_deep_copy_of_a_wrapper_is_a_wrapper(workshop: Workshop) -> None:
    model = workshop.pair(Wrapper).model
    with outsize.gathered(model):
        copied = copy.deepcopy(model)
    assert isinstance(copied, Wrapper) and isinstance(copied.inner, Stack)
    assert not any("__deepcopy__" in vars(module) for module in copied.modules())


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_average_of_the_weights_is_kept_as_in_torch(workshop: Workshop, when: str) -> None:
    pair = workshop.pair()
    average = torch.optim.swa_utils.AveragedModel
    plain = average(pair.plain)
    with outsize.gathered(pair.model):
        ours = average(pair.model) if when == "after" else average(copy.deepcopy(pair.plain))
    for batch in batches(3):
        pair.train([batch])
        plain.update_parameters(pair.plain)
        with outsize.gathered(pair.model):
            ours.update_parameters(pair.model)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_assigning_a_state_dict_is_refused_with_the_remedy(workshop: Workshop) -> None:
    pair = workshop.pair()
    with (
        pytest.raises(RuntimeError, match=r"assign=True\) would replace .* leave assign out"),
        outsize.gathered(pair.model, modify=True),
    ):
        pair.model.load_state_dict(pair.plain.state_dict(), assign=True)
    pair.train(batches(1))


@pytest.mark.parametrize("how", [{}, {"modify": True}, {"grads": True}])
def test_what_inference_mode_has_looked_at_trains_as_before(pair: Pair, how: dict[str, bool]) -> None:
    """Autograd passes a tensor of inference mode by, mostly without a word."""
    pair.train(batches(1))
    for model, _ in pair.both:
        squared_error(model, batches(1)[0]).backward()
    with torch.inference_mode():
        for block in (outsize.gathered(pair.model, **how), outsize.gathered(next(pair.model.parameters()), **how)):
            with block:
                assert all(param.isfinite().all() for param in list(pair.model.parameters())[:1])
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model, _ in pair.both]
    torch.testing.assert_close(norms[0], norms[1])
    for _, optimizer in pair.both:
        optimizer.step()
        optimizer.zero_grad()
    pair.train(batches(2))
