"""What goes wrong around the loop is said with the name, the numbers and the remedy, and nothing is lost."""

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import outsize
from tests.conftest import AT_REST_TIERS, Pair, Workshop, batches, prepared, squared_error, train
from tests.small_models import Built, Stack


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_parameter_read_at_rest_is_named_with_the_remedy(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match=r"parameter 'head\.weight' is at rest .* outsize\.gathered"):
        pair.model.head.weight.sum()
    with pytest.raises(RuntimeError, match="at rest"):
        pair.model.head.weight.detach().numpy()
    with pytest.raises(RuntimeError, match="at rest"):
        pair.model.head.weight.data.mean()
    pair.train(batches(2))


def test_everything_but_the_values_is_readable_at_rest(pair: Pair) -> None:
    mine, theirs = pair.model.head.weight, pair.plain.head.weight
    assert (mine.shape, mine.dtype, mine.device, mine.numel()) == (theirs.shape, theirs.dtype, theirs.device, 64)
    assert mine.requires_grad and mine.is_leaf and mine.grad is None and mine.ndim == 2 and len(mine) == 4
    assert "head" in str(pair.model) and "4, 16" in repr(mine)
    assert torch.typename(mine) == theirs.type() and "of size 4x16" in repr(nn.ParameterDict({"a": mine}))
    assert torch.zeros_like(mine).shape == theirs.shape
    assert sum(param.numel() for param in pair.model.parameters()) == sum(p.numel() for p in pair.plain.parameters())
    assert mine in {mine} and (mine is pair.model.head.weight)


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_write_outside_gathered_modify_is_refused(pair: Pair) -> None:
    weight = pair.model.head.weight
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"'head\.weight' is written in place by 'fill_'"):
            weight.fill_(0)
        with pytest.raises(RuntimeError, match="written in place"), outsize.gathered(weight):
            weight.zero_()
        with pytest.raises(RuntimeError, match="written in place"), outsize.gathered(weight):
            weight[0] = 1
        with pytest.raises(RuntimeError, match="written in place"), outsize.gathered(weight):
            torch.mul(weight, 2, out=weight)
        with pytest.raises(RuntimeError, match="written in place"):
            nn.init.zeros_(weight)
    pair.train(batches(2))


def test_a_parameter_on_the_device_may_be_written_as_any_other(workshop: Workshop) -> None:
    pair = workshop.pair(tier="device")
    pair.train(batches(2))
    for model, _ in pair.both:
        with torch.no_grad():
            model.head.weight.mul_(2)
            nn.init.ones_(model.blocks[0].norm.weight)
    pair.train(batches(2))


def test_replacing_the_data_of_a_parameter_is_refused(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match=r"head\.weight\.data cannot be replaced"):
        pair.model.head.weight.data = torch.zeros(4, 16)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"head\.weight\.data cannot be replaced"):
        pair.model.head.weight.set_(torch.zeros(4, 16))
    with outsize.gathered(pair.model, modify=True), pytest.raises(RuntimeError, match=r"head\.weight\.data cannot be"):
        pair.model.head.weight.data = torch.zeros(4, 16)
    pair.train(batches(2))


def test_data_that_is_the_same_memory_is_taken(pair: Pair) -> None:
    weight = pair.model.head.weight
    weight.data = weight
    with outsize.gathered(pair.model):
        weight.data = weight.data
        weight.data = weight.detach().view(4, 16)
        for other in (weight.detach()[:3], weight.detach().view(16, 4), weight.detach().clone()):
            with pytest.raises(RuntimeError, match=r"head\.weight\.data cannot be replaced"):
                weight.data = other
    pair.train(batches(2))


class Clamps(Stack):
    def forward(self, x: Tensor) -> Tensor:
        self.blocks[1].up.bias.data.clamp_(-1, 1)
        return super().forward(x)


class Writes(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-1, 1)
        return super().forward(x)


@pytest.mark.parametrize("tier", AT_REST_TIERS)
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Clamps, r"'blocks\.1\.up\.bias' is .* wrap the forward in that context"),
        (Writes, r"'head\.weight' is written in place by 'clamp_'"),
    ],
)
def test_a_write_inside_a_forward_names_the_parameter_and_all_that_must_be_wrapped(
    workshop: Workshop, tier: str, build: type[Stack], message: str
) -> None:
    pair = workshop.pair(build, tier=tier)
    with pytest.raises(RuntimeError, match=message):
        pair.model(batches(1)[0][0])


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_layer_that_writes_to_its_weight_says_that_the_forward_must_be_wrapped(workshop: Workshop, tier: str) -> None:
    class Clamps(Built, inner=(16, 16)):
        def forward(self, x: Tensor) -> Tensor:
            self.inner.weight.data.clamp_(-0.1, 0.1)
            return self.inner(x)

    pair = workshop.pair(
        lambda: nn.Sequential(Clamps(), Clamps(), nn.Linear(16, 4)), tier=tier, activations="recompute"
    )
    with pytest.raises(RuntimeError, match=r"inner\.weight' is .* wrap the forward in that context"):
        squared_error(pair.model, batches(1)[0])
    for model, optimizer in pair.both:
        with outsize.gathered(pair.model, modify=True):
            loss = squared_error(model, batches(1)[0])
        loss.backward()
        optimizer.step()
    pair.check()


def test_a_view_of_several_parameters_names_them(workshop: Workshop) -> None:
    pair = workshop.pair(tier="host")
    weight = pair.model.blocks[0].up.weight
    views: list[Tensor] = []

    def take(*_: object) -> None:
        views.append(weight.detach().as_strided((weight.untyped_storage().nbytes() // 4,), (1,), 0))

    pair.model.register_forward_pre_hook(take)  # before the call that opens the block
    pair.model(batches(1)[0][0])
    view = views[0]
    with pytest.raises(RuntimeError, match=r"parameter 'blocks\.0\.\S+, blocks\.0\.\S+, blocks\.0\.\S+ and 3 more' is"):
        view.sum()


@pytest.mark.parametrize("what", ["deepcopy", "pickle", "torch.save"])
def test_copies_and_pickles_are_refused_with_the_remedy(workshop: Workshop, tmp_path: Path, what: str) -> None:
    pair = workshop.pair(tier="disk")
    actions: dict[str, Any] = {
        "deepcopy": lambda: copy.deepcopy(pair.model.head.weight),
        "pickle": lambda: pickle.dumps(pair.model.head.weight),
        "torch.save": lambda: torch.save([pair.model.head.weight], tmp_path / "model.pt"),
    }
    with pytest.raises(RuntimeError, match=r"'head\.weight' is managed by outsize.*outsize\.save"):
        actions[what]()
    pair.train(batches(2))


def test_deepcopy_of_the_model_is_refused_with_the_remedy(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    with pytest.raises(RuntimeError, match=r"outsize\.save"):
        copy.deepcopy(pair.model)
    pair.train(batches(2))


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "bfloat16": lambda module: module.bfloat16(),
    "to dtype": lambda module: module.to(torch.float64),
    "to meta": lambda module: module.to("meta"),
    "share_memory": lambda module: module.share_memory(),
}


@pytest.mark.parametrize("move", MOVES)
def test_moves_of_a_part_or_of_the_whole_that_would_replace_parameters_are_refused(pair: Pair, move: str) -> None:
    for module in (pair.model, pair.model.blocks[0], nn.ModuleList([pair.model])):
        before = dict(module.named_parameters())
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            MOVES[move](module)
        assert all(param is before[name] for name, param in module.named_parameters())
    pair.train(batches(2))


def test_moves_of_a_part_or_of_the_whole_that_change_nothing_are_let_through(pair: Pair) -> None:
    """At rest, and with a gradient: nothing is read."""
    for module in (pair.model, pair.model.blocks[0], pair.model.head, nn.ModuleList([pair.model])):
        for _ in range(2):
            assert module.to(torch.float32).to("cpu").float().cpu() is module
            assert module.to(device="cpu", dtype=torch.float32).to(torch.zeros(1)) is module
            squared_error(pair.model, batches(1)[0]).backward()
    assert pair.model.head.weight.to(torch.float32) is pair.model.head.weight
    pair.optimizer.zero_grad()
    pair.train(batches(2))


def test_a_layer_that_casts_a_part_to_what_it_is_trains_like_torch(workshop: Workshop, tier: str) -> None:
    """The routers of Switch Transformers and NLLB-MoE."""

    class Router(Stack):
        def forward(self, x: Tensor) -> Tensor:
            self.head = self.head.to(torch.float32)
            return super().forward(x)

    workshop.pair(Router, tier=tier).train(batches(4))


def test_recurrent_weights_stay_where_they_are_when_they_are_to_be_flattened(workshop: Workshop, tier: str) -> None:
    class Recurrent(Built, lstm=lambda: nn.LSTM(16, 4)):
        def forward(self, x: Tensor) -> Tensor:
            self.lstm.flatten_parameters()
            return self.lstm(x)[0]

    pair = workshop.pair(Recurrent, tier=tier)
    pair.model.lstm.flatten_parameters()
    pair.model.lstm.to(torch.float32)
    pair.train(batches(3))


def test_a_step_without_gradients_is_refused_and_changes_nothing(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        pair.optimizer.step()
    pair.train(batches(2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_after_a_loss_that_is_not_finite_is_refused_and_changes_nothing(pair: Pair, value: float) -> None:
    pair.train(batches(2))
    (squared_error(pair.model, batches(1)[0]) * value).backward()
    with pytest.raises(FloatingPointError, match=r"gradient of 'blocks\.0\..*' is not finite .*Nothing was updated"):
        pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.train(batches(3))


def test_one_gradient_that_is_not_finite_is_named(pair: Pair) -> None:
    squared_error(pair.model, batches(1)[0]).backward()
    pair.model.head.bias.grad = torch.tensor([0.0, float("nan"), 0.0, 0.0])
    with pytest.raises(FloatingPointError, match=r"'head\.bias' is not finite \(1 of"):
        pair.optimizer.step()


def test_adding_a_group_of_foreign_parameters_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"shape \(1,\) is not in the model.*before prepare"):
        pair.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        pair.optimizer.add_param_group({"params": [pair.model.head.weight]})
    assert len(pair.optimizer.param_groups) == 1
    pair.train(batches(2))


def test_adding_a_group_beyond_the_budget_is_refused_and_leaves_the_optimizer_as_it_was(workshop: Workshop) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    workshop.prepare(model, optimizer, "device", host_memory="700KiB")
    with pytest.raises(ValueError, match=r"host_memory=700.0 KiB.*raise host_memory"):
        optimizer.add_param_group({"params": list(model[1].parameters())})
    assert len(optimizer.param_groups) == 1
    model[0](torch.randn(2, 8)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("other", ["SGD", "Adagrad", "another model's", "nonsense"])
def test_a_state_dict_of_another_optimizer_is_refused_and_nothing_is_changed(workshop: Workshop, other: str) -> None:
    pair = workshop.pair(tier="disk")
    pair.train(batches(2))
    before = copy.deepcopy(pair.optimizer.state_dict())
    model = Stack(width=16, hidden=44 if other == "another model's" else 40)
    kinds = {"SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "Adagrad": torch.optim.Adagrad}
    optimizer = kinds.get(other, torch.optim.AdamW)(model.parameters())
    train(model, optimizer, batches(1))
    state = {"a": 1} if other == "nonsense" else optimizer.state_dict()
    with pytest.raises(ValueError, match=r"param_groups|does not fit AdamW.*Nothing was changed"):
        pair.optimizer.load_state_dict(state)
    after = pair.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert all(torch.equal(after["state"][index][key], value) for key, value in entry.items())
    pair.train(batches(2))


def test_an_error_of_the_update_reaches_the_user_with_its_message(workshop: Workshop) -> None:
    class Angry(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if self.param_groups[0]["lr"] == 13:
                raise ArithmeticError("thirteen is too many")
            super().step()

    model, optimizer = workshop.made(lambda: Stack(depth=2), lambda model: Angry(model.parameters(), lr=0.1))
    train(model, optimizer, batches(1))
    optimizer.param_groups[0]["lr"] = 13
    squared_error(model, batches(1)[0]).backward()
    optimizer.step()
    with pytest.raises(ArithmeticError, match="thirteen is too many"):
        squared_error(model, batches(1)[0])
    with pytest.raises(RuntimeError, match=r"training stopped after an error .*thirteen is too many"):
        squared_error(model, batches(1)[0])


def test_an_error_without_text_is_named_by_its_type(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    prepared(pair.model).engine.streamer.live.stop(MemoryError())
    with pytest.raises(RuntimeError, match=r"training stopped after an error \(MemoryError\);"):
        pair.model(batches(1)[0][0])


def test_a_parameter_is_shown_by_its_name_and_tier_and_nothing_moves(workshop: Workshop, tier: str) -> None:
    model = workshop.pair(tier=tier).model
    weight, before = model.head.weight, outsize.memory(model)
    place = {"squeezed": "disk"}.get(tier, tier)
    shown = f"Parameter('head.weight', shape=(4, 16), dtype=torch.float32, tier={place!r})"
    assert repr(weight) == f"{weight}" == str(weight) == shown
    assert str([weight]) == f"[{shown}]"
    assert outsize.memory(model) == before
    with outsize.gathered(weight):
        assert repr(weight) == shown


def test_a_parameter_whose_model_is_gone_is_shown(workshop: Workshop) -> None:
    pair = workshop.pair()
    weight = pair.model.head.weight
    del pair
    gc.collect()
    assert repr(weight) == "Parameter(shape=(4, 16), dtype=torch.float32, managed by outsize)"


READS = r"the gradient of 'head.weight' is at rest .*gathered\(param, grads=True\)"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda grad: grad.numpy(), READS),
        (lambda grad: grad.tolist(), READS),
        (np.asarray, READS),
        (lambda grad: grad.detach().cpu().numpy(), READS),
        (lambda grad: grad.sum(), READS),
        (copy.deepcopy, "is at rest and cannot be copied; see outsize.gathered"),
        (pickle.dumps, "is at rest and cannot be pickled; use outsize.save"),
        (lambda grad: grad.mul_(torch.ones(4, 16)), "can be multiplied by one number only"),
        (lambda grad: grad.norm(dim=0), "only the norm over all its elements is known"),
    ],
    ids=["numpy", "tolist", "asarray", "cpu", "sum", "copy", "pickle", "mul", "norm"],
)
def test_what_a_gradient_at_rest_cannot_do_is_said_with_the_remedy(
    workshop: Workshop, use: Callable[[Tensor], Any], message: str
) -> None:
    pair = workshop.pair()
    squared_error(pair.model, batches(1)[0]).backward()
    grad = pair.model.head.weight.grad
    assert repr(grad) == "RestingGrad('head.weight', shape=(4, 16), dtype=torch.float32)"
    with pytest.raises(RuntimeError, match=message):
        use(grad)
    pair.optimizer.step()


@pytest.mark.parametrize(
    ("use", "kind", "message"),
    [
        (lambda pair: pair.optimizer.add_param_group([]), TypeError, "param_group must be a dict, but got"),
        (lambda pair: setattr(pair.optimizer, "state", 5) or pair.optimizer.step(), TypeError, "must be a mapping"),
        (lambda pair: outsize.no_sync(5).__enter__(), ValueError, "takes a model that outsize.prepare"),
        (lambda pair: outsize.save("x", pair.model, {}), TypeError, "optimizer must be a torch.optim.Optimizer"),
        (lambda pair: outsize.plan(Stack(), ranks=0, host_memory="1MiB"), ValueError, "ranks is 0; it must be an int"),
        (lambda pair: two_groups_for_one(pair), ValueError, "the state dict has parameter groups of .* parameters"),
    ],
    ids=["add_param_group", "state", "no_sync", "save", "plan", "load_state_dict"],
)
def test_what_is_not_what_a_function_takes_is_said(
    workshop: Workshop, use: Callable[[Any], Any], kind: type[Exception], message: str
) -> None:
    pair = workshop.pair()
    squared_error(pair.model, batches(1)[0]).backward()
    state = pair.optimizer.state
    with pytest.raises(kind, match=message):
        use(pair)
    pair.optimizer.state = state
    pair.optimizer.step()


def two_groups_for_one(pair: Any) -> None:
    first, *others = pair.plain.parameters()
    pair.optimizer.load_state_dict(torch.optim.AdamW([{"params": [first]}, {"params": others}]).state_dict())


def test_no_sync_does_not_add_up_what_the_backward_uses(workshop: Workshop) -> None:
    model = workshop.pair(update="backward").model
    with pytest.raises(ValueError, match="update='backward' applies each at once; use update='fetch'"):
        outsize.no_sync(model).__enter__()
