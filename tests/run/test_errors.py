"""What goes wrong is said with the name, the numbers and the remedy, and nothing is lost."""

import copy
import errno
import gc
import os
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset

import outsize
from tests.conftest import (
    AT_REST_TIERS,
    Pair,
    Stack,
    Workshop,
    adamw,
    batches,
    prepared,
    squared_error,
    train,
)
from tests.scripts import run_script

# -- mistakes in prepare: nothing has happened ---------------------------------------------------------------------


def refused(model: nn.Module, optimizer: torch.optim.Optimizer | None, match: str, **fields: Any) -> None:
    """`prepare` raises and the model still works."""
    before = {name: type(param) for name, param in model.named_parameters()}
    with pytest.raises((ValueError, TypeError), match=match):
        outsize.prepare(model, optimizer, **fields)
    assert {name: type(param) for name, param in model.named_parameters()} == before


def test_a_budget_below_the_largest_unit_names_the_unit_and_the_numbers() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(256, 256))
    refused(
        model, adamw(model), r"unit '1.*' needs 5.* KiB.*host_memory is 5.* KiB; raise host_memory to at least",
        host_memory="500KiB", device="cpu",
    )  # fmt: skip


def test_a_budget_error_has_the_numbers_of_its_message_and_survives_a_pickle() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(256, 256))
    with pytest.raises(outsize.BudgetError) as caught:
        outsize.prepare(model, adamw(model), host_memory="500KiB", device="cpu")
    error = caught.value
    assert (error.field, error.available) == ("host_memory", 500 << 10)
    with pytest.raises(outsize.BudgetError):
        outsize.plan(model, host_memory=error.needed - 1, device="cpu", units=nn.Linear)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), vars(copied)) == (str(error), vars(error))


def test_a_model_that_fits_nowhere_says_what_to_add() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(64)])
    refused(model, adamw(model), r"do not fit host_memory=.* no disk is given; pass disk=", host_memory="1MiB")


@pytest.mark.parametrize("kind", ["missing", "file", "read-only"])
def test_an_unusable_disk_directory_is_named(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "place" / "disk" if kind == "missing" else tmp_path / "place"
    if kind == "file":
        place.write_text("x")
    elif kind == "read-only":
        place.mkdir()
        read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))  # root may write to any mode: the drive refuses
        monkeypatch.setattr(os, "mkdir", Mock(side_effect=read_only))
    model = Stack()
    refused(model, adamw(model), str(place), disk=place, params="disk", host_memory="64MiB")


def test_a_disk_directory_is_made_when_something_goes_there(tmp_path: Path, device: str) -> None:
    place, model = tmp_path / "place", Stack()
    fields: dict[str, Any] = {"disk": place, "host_memory": "64MiB", "device": device}
    assert outsize.plan(model, **fields, params="disk").budgets.disk
    with pytest.raises(outsize.BudgetError):
        outsize.prepare(model, adamw(model), **fields, disk_space="4KiB", states="disk")
    with outsize.init(**fields):
        model = Stack()
    assert not place.exists()
    outsize.prepare(model, adamw(model), **fields, params="disk")
    assert len(list(place.iterdir())) == 1
    outsize.release(model)
    assert place.is_dir() and not list(place.iterdir())


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(workshop: Workshop) -> None:
    model = Stack()
    fields = workshop.fields("disk", disk_space="100KiB")
    refused(model, adamw(model), r"do not fit the disk: 100.0 KiB may be used there", **fields)
    assert not os.listdir(workshop.disk)


def test_a_full_disk_in_prepare_leaves_the_model_usable(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = Stack()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        outsize.prepare(model, adamw(model), **workshop.fields("disk"))
    assert str(workshop.disk) in str(caught.value)
    assert not os.listdir(workshop.disk)
    squared_error(model, batches(1)[0]).backward()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"host_memroy": "1GiB"}, "host_memroy.*did you mean 'host_memory'"),
        ({"host_memory": -1}, "host_memory is -1"),
        ({"host_memory": "lots"}, "host_memory is 'lots'"),
        ({"params": "tape"}, "params is 'tape'; it must be one of"),
        ({"params": "disk"}, "params='disk' needs a directory"),
        ({"tiles": 4}, "tiles is 4; it must be 'auto' or False"),
        ({"stage": 4}, "stage is 4"),
        ({"units": "nowhere"}, "units names 'nowhere'"),
        ({"device": "moon"}, "device is 'moon'"),
        ({"compute_dtype": torch.int8}, "compute_dtype is torch.int8"),
    ],
    ids=str,
)
def test_unknown_fields_and_values_are_refused(fields: dict[str, Any], match: str) -> None:
    model = Stack()
    refused(model, adamw(model), match, **fields)


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not list"):
        outsize.prepare([], None)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="a model has one optimizer; give it several parameter groups"):
        outsize.prepare(nn.Linear(2, 2), [], host_memory="1MiB")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, not dict"):
        outsize.prepare(Stack(), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameters"):
        outsize.prepare(nn.ReLU())


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    refused(Stack(), adamw(Stack()), "parameter group 0 holds a parameter of shape .* not in the model")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_parameters_that_cannot_be_trained_are_named(dtype: torch.dtype) -> None:
    model = Stack()
    model.odd = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=dtype is not torch.int64)
    refused(model, adamw(model), r"parameter 'odd' is a Parameter of torch\.(complex64|int64)")


def test_parameters_on_the_meta_device_are_named() -> None:
    with torch.device("meta"):
        model = Stack()
    refused(model, adamw(model), r"parameter 'blocks\.0\.norm\.weight' is on the meta device")


def test_lazy_modules_are_named() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    refused(model, None, r"parameter '0\.(weight|bias)' of a lazy module")


def test_preparing_twice_is_refused(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    with pytest.raises(ValueError, match="already prepared"):
        outsize.prepare(pair.model, pair.optimizer)
    pair.train(batches(2))


# -- mistakes around the loop --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_parameter_read_at_rest_is_named_with_the_remedy(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
    with pytest.raises(RuntimeError, match=r"parameter 'head\.weight' is at rest .* outsize\.gathered"):
        pair.model.head.weight.sum()
    with pytest.raises(RuntimeError, match="at rest"):
        pair.model.head.weight.detach().numpy()
    with pytest.raises(RuntimeError, match="at rest"):
        pair.model.head.weight.data.mean()
    pair.train(batches(2))


def test_everything_but_the_values_is_readable_at_rest(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
    mine, theirs = pair.model.head.weight, pair.plain.head.weight
    assert (mine.shape, mine.dtype, mine.device, mine.numel()) == (theirs.shape, theirs.dtype, theirs.device, 64)
    assert mine.requires_grad and mine.is_leaf and mine.grad is None and mine.ndim == 2 and len(mine) == 4
    assert "head" in str(pair.model) and "4, 16" in repr(mine)
    assert torch.zeros_like(mine).shape == theirs.shape
    assert sum(param.numel() for param in pair.model.parameters()) == sum(p.numel() for p in pair.plain.parameters())
    assert mine in {mine} and (mine is pair.model.head.weight)


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_write_outside_gathered_modify_is_refused(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
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


def test_replacing_the_data_of_a_parameter_is_refused(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
    with pytest.raises(RuntimeError, match=r"head\.weight\.data cannot be replaced"):
        pair.model.head.weight.data = torch.zeros(4, 16)
    pair.train(batches(2))


def test_replacing_the_data_is_refused_where_values_may_be_written_too(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
    with outsize.gathered(pair.model, modify=True), pytest.raises(RuntimeError, match=r"head\.weight\.data cannot be"):
        pair.model.head.weight.data = torch.zeros(4, 16)
    pair.train(batches(2))


def test_data_that_is_the_same_memory_is_taken(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
    weight = pair.model.head.weight
    weight.data = weight
    with outsize.gathered(pair.model):
        weight.data = weight.data
        weight.data = weight.detach().view(4, 16)
        for other in (weight.detach()[:3], weight.detach().view(16, 4), weight.detach().clone()):
            with pytest.raises(RuntimeError, match=r"head\.weight\.data cannot be replaced"):
                weight.data = other
    pair.train(batches(2))


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_write_to_a_view_names_the_parameter_and_all_that_must_be_wrapped(workshop: Workshop, tier: str) -> None:
    class Clamps(Stack):
        def forward(self, x: Tensor) -> Tensor:
            self.blocks[1].up.bias.data.clamp_(-1, 1)
            return super().forward(x)

    pair = workshop.pair(Clamps, tier=tier)
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.up\.bias' is .* wrap the forward in that context"):
        pair.model(batches(1)[0][0])


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_layer_that_writes_to_its_weight_says_that_the_forward_must_be_wrapped(workshop: Workshop, tier: str) -> None:
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

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


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_write_inside_a_forward_is_refused(workshop: Workshop, tier: str) -> None:
    class Writes(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.head.weight.clamp_(-1, 1)
            return super().forward(x)

    pair = workshop.pair(Writes, tier=tier)
    with pytest.raises(RuntimeError, match=r"'head\.weight' is written in place by 'clamp_'"):
        pair.model(batches(1)[0][0])


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


@pytest.mark.parametrize("move", ["half", "double", "bfloat16", "to dtype", "to meta", "share_memory"])
def test_moves_of_a_prepared_model_are_refused_with_the_remedy(workshop: Workshop, move: str) -> None:
    pair = workshop.pair(tier="disk")
    actions: dict[str, Any] = {
        "half": pair.model.half,
        "double": pair.model.double,
        "bfloat16": pair.model.bfloat16,
        "to dtype": lambda: pair.model.to(torch.float64),
        "to meta": lambda: pair.model.to("meta"),
        "share_memory": pair.model.share_memory,
    }
    with pytest.raises(RuntimeError, match=r"cannot be moved or cast"):
        actions[move]()
    pair.train(batches(2))


@pytest.mark.parametrize("move", ["half", "to dtype"])
def test_moves_of_a_part_of_a_prepared_model_are_refused(workshop: Workshop, move: str) -> None:
    pair = workshop.pair(tier="disk")
    part = pair.model.blocks[0]
    with pytest.raises(RuntimeError, match="cannot be moved or cast"):
        part.half() if move == "half" else part.to(torch.float64)
    pair.train(batches(2))


@pytest.mark.parametrize("move", ["meta", "double", "share_memory"])
def test_moves_of_a_part_or_of_the_whole_that_would_replace_parameters_are_refused(
    workshop: Workshop, tier: str, move: str
) -> None:
    pair = workshop.pair(tier=tier)
    for module in (pair.model.blocks[0], nn.ModuleList([pair.model])):
        before = dict(module.named_parameters())
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            module.to("meta") if move == "meta" else getattr(module, move)()
        assert all(param is before[name] for name, param in module.named_parameters())
    pair.train(batches(2))


def test_moves_of_a_part_or_of_the_whole_that_change_nothing_are_let_through(workshop: Workshop, tier: str) -> None:
    """At rest, and with a gradient: nothing is read."""
    pair = workshop.pair(tier=tier)
    for module in (pair.model.blocks[0], pair.model.head, nn.ModuleList([pair.model])):
        for _ in range(2):
            assert module.to(torch.float32).to("cpu").float().cpu() is module
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
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.lstm.flatten_parameters()
            return self.lstm(x)[0]

    pair = workshop.pair(Recurrent, tier=tier)
    pair.model.lstm.flatten_parameters()
    pair.model.lstm.to(torch.float32)
    pair.train(batches(3))


def test_moves_that_change_nothing_are_let_through(workshop: Workshop) -> None:
    model = workshop.pair(tier="disk").model
    assert model.to("cpu") is model
    assert model.to(torch.float32) is model
    assert model.to(device="cpu", dtype=torch.float32) is model
    assert model.to(torch.zeros(1)) is model


def test_a_step_without_gradients_is_refused_and_changes_nothing(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        pair.optimizer.step()
    pair.train(batches(2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_after_a_loss_that_is_not_finite_is_refused_and_changes_nothing(
    workshop: Workshop, tier: str, value: float
) -> None:
    pair = workshop.pair(tier=tier)
    pair.train(batches(2))
    (squared_error(pair.model, batches(1)[0]) * value).backward()
    with pytest.raises(FloatingPointError, match=r"gradient of 'blocks\.0\..*' is not finite .*Nothing was updated"):
        pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.train(batches(3))


def test_one_gradient_that_is_not_finite_is_named(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
    squared_error(pair.model, batches(1)[0]).backward()
    pair.model.head.bias.grad = torch.tensor([0.0, float("nan"), 0.0, 0.0])
    with pytest.raises(FloatingPointError, match=r"'head\.bias' is not finite \(1 of"):
        pair.optimizer.step()


def test_adding_a_group_of_foreign_parameters_is_refused(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
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

    model = Stack(depth=2)
    optimizer = Angry(model.parameters(), lr=0.1)
    workshop.prepare(model, optimizer, "disk")
    train(model, optimizer, batches(1))
    optimizer.param_groups[0]["lr"] = 13
    squared_error(model, batches(1)[0]).backward()
    optimizer.step()
    with pytest.raises(ArithmeticError, match="thirteen is too many"):
        squared_error(model, batches(1)[0])
    with pytest.raises(RuntimeError, match=r"training stopped after an error .*thirteen is too many"):
        squared_error(model, batches(1)[0])


# -- threads and processes -----------------------------------------------------------------------------------------


def test_a_forward_from_a_second_thread_at_once_is_refused(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    inside, leave = threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            leave.wait(10)

    rows = batches(1)[0][0]

    def other() -> None:
        try:
            pair.model(rows)
        except BaseException as error:
            caught.append(error)

    handle = pair.model.blocks[1].register_forward_hook(wait)
    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(RuntimeError, match="two threads at once"):
        pair.model(batches(1)[0][0])
    leave.set()
    thread.join()
    handle.remove()
    assert not caught
    pair.train(batches(3))


def test_training_may_move_to_another_thread(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
    expected = train(pair.plain, pair.plain_optimizer, batches(3))
    found = []
    data = batches(3)
    thread = threading.Thread(target=lambda: found.append(train(pair.model, pair.optimizer, data)))
    thread.start()
    thread.join()
    found[0].close_to(expected)
    pair.check()


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """The batches of the other tests, one row each."""

    def __init__(self) -> None:
        self.data = batches(4)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_data_loader_workers_work_and_leave_the_files_alone(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    loader = DataLoader(Numbers(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        pair.train(loader)
    assert len(os.listdir(workshop.disk)) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_ends_normally_removes_nothing(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    child = os.fork()
    if child == 0:
        prepared(pair.model).resources.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    pair.train(batches(2))


def test_two_models_train_at_once_in_one_directory(workshop: Workshop) -> None:
    pairs: list[Pair] = [workshop.pair(tier="squeezed"), workshop.pair(lambda: Stack(depth=2), tier="disk")]
    for _ in range(2):
        for pair in pairs:
            pair.train(batches(2))
    assert len(os.listdir(workshop.disk)) == 2


def test_a_model_whose_engine_was_closed_says_so(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    prepared(pair.model).engine.streamer.drop_idle()
    prepared(pair.model).resources.close()
    with pytest.raises(RuntimeError, match="closed"):
        pair.model(batches(1)[0][0])


# -- another optimizer, another wrapper ----------------------------------------------------------------------------


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_step_of_an_optimizer_that_was_not_passed_is_refused(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
    other = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    squared_error(pair.model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"this SGD was not passed to outsize\.prepare, and steps on 'blocks\.0"):
        other.step()
    pair.optimizer.zero_grad()
    pair.train(batches(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_steps_of_other_models_are_of_no_concern(workshop: Workshop) -> None:
    """torch has one list of hooks for all optimizers: it may not change while one steps, and compiled steps read it."""
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    @torch.compile(backend="eager", fullgraph=False)
    def step(x: torch.Tensor) -> None:
        plain(x).sum().backward()
        optimizer.step()

    workshop.pair(tier="host")
    hooks = len(_global_optimizer_pre_hooks)
    workshop.pair(tier="host")
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == hooks
    before = plain.weight.detach().clone()
    step(torch.ones(2, 4))
    torch.testing.assert_close(plain.weight, before - 0.2)


def test_where_nothing_moves_another_optimizer_may_step(workshop: Workshop) -> None:
    pair = workshop.pair(tier="device")
    for model, _ in pair.both:
        squared_error(model, batches(1)[0]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    pair.check()


def test_what_wraps_the_models_own_optimizer_steps(workshop: Workshop, tier: str) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, wrapped: torch.optim.Optimizer) -> None:
            super().__init__([torch.ones(1)], {})
            self.wrapped, self.param_groups = wrapped, wrapped.param_groups

        def step(self, closure: Any = None) -> None:
            self.wrapped.step()

    pair = workshop.pair(tier=tier)
    train(pair.plain, pair.plain_optimizer, batches(3))
    train(pair.model, Wrapper(pair.optimizer), batches(3))
    pair.check()


@pytest.mark.parametrize("what", ["deepcopy", "pickle"])
def test_copies_of_the_optimizer_are_refused_with_the_remedy(workshop: Workshop, what: str) -> None:
    pair = workshop.pair(tier="disk")
    with pytest.raises(RuntimeError, match=r"optimizer of a prepared model cannot be copied .*outsize\.save"):
        copy.deepcopy(pair.optimizer) if what == "deepcopy" else pickle.dumps(pair.optimizer)
    pair.train(batches(2))


def test_an_embedding_that_writes_its_weight_is_refused_in_prepare(workshop: Workshop) -> None:
    model = nn.Sequential(nn.Embedding(8, 16, max_norm=1.0), nn.Linear(16, 4))
    refused(model, adamw(model), r"'0' has max_norm=1\.0, which writes its weight", **workshop.fields("disk"))


def test_an_error_without_text_is_named_by_its_type(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    prepared(pair.model).engine.streamer.live.stop(MemoryError())
    with pytest.raises(RuntimeError, match=r"training stopped after an error \(MemoryError\);"):
        pair.model(batches(1)[0][0])


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_models_that_are_wrapped_for_data_parallelism_are_refused() -> None:
    model: Any = nn.parallel.DistributedDataParallel(Stack())
    refused(model, adamw(model), r"the model is wrapped in DistributedDataParallel: .*pass the plain module")
    refused(nn.Sequential(model), None, r"'0' is wrapped in DistributedDataParallel")


@pytest.mark.usefixtures("alone")
def test_wrapping_a_prepared_model_for_data_parallelism_is_refused(workshop: Workshop) -> None:
    model = Stack()
    workshop.prepare(model, adamw(model), "squeezed", stage=0)
    with pytest.raises(RuntimeError, match="do not wrap a prepared model"):
        nn.parallel.DistributedDataParallel(model)


def replaced_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer that halves its learning rate in a step of its own."""
    inner = optimizer.step

    def step(self: torch.optim.Optimizer, *args: Any) -> Any:
        self.param_groups[0]["lr"] *= 0.5
        return inner(*args)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


def test_a_step_that_was_replaced_on_the_optimizer_is_refused_in_prepare(workshop: Workshop) -> None:
    model = Stack()
    optimizer = replaced_step(adamw(model))
    refused(
        model,
        optimizer,
        r"`step` of this AdamW .* replaced by 'replaced_step.<locals>.step'.* call prepare first",
        **workshop.fields("host"),
    )
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps it
    refused(
        model,
        optimizer,
        r"`step` of this AdamW .* replaced by 'replaced_step.<locals>.step'.* call prepare first",
        **workshop.fields("host"),
    )


def _same_memory() -> nn.Module:
    model = Stack()
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data
    return model


def _overlapping_columns() -> nn.Module:
    model, columns = Stack(), torch.randn(40, 24)
    model.blocks[0].up.weight = nn.Parameter(columns[:, :16])
    model.blocks[1].up.weight = nn.Parameter(columns[:, 8:])
    return model


def _buffer_of_a_parameter() -> nn.Module:
    model = Stack()
    model.register_buffer("scale", model.head.bias.detach()[:2])
    return model


def _expanded() -> nn.Module:
    model = Stack()
    model.head.bias = nn.Parameter(torch.zeros(1).expand(4))
    return model


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (_same_memory, r"'blocks.0.up.weight' and 'blocks.1.up.weight' share memory and are two objects.*Tie them"),
        (_overlapping_columns, r"'blocks.0.up.weight' and 'blocks.1.up.weight' share memory"),
        (_buffer_of_a_parameter, r"buffer 'scale' is a view of parameter 'head.bias'.*compute the view in forward"),
        (_expanded, r"'head.bias' of shape \(4,\) was made by expand.*clone"),
    ],
)
def test_memory_that_parameters_share_is_refused_with_both_names(build: Callable[[], nn.Module], match: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=match):
        outsize.prepare(model, adamw(model), host_memory="64MiB")
    model(torch.randn(2, 16))


def test_parameters_that_lie_in_one_memory_side_by_side_train_like_torch(workshop: Workshop) -> None:
    def build() -> nn.Module:
        model, columns = Stack(), torch.linspace(-1, 1, 40 * 32).view(40, 32)
        model.blocks[0].up.weight = nn.Parameter(columns[:, :16])
        model.blocks[1].up.weight = nn.Parameter(columns[:, 16:])
        return model

    workshop.pair(build).train(batches(2))


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


@pytest.mark.parametrize(
    "read",
    [lambda grad: grad.numpy(), lambda grad: grad.tolist(), np.asarray, lambda grad: grad.detach().cpu().numpy()],
)
def test_a_gradient_at_rest_that_is_read_names_the_remedy(workshop: Workshop, read: Callable[[Tensor], Any]) -> None:
    model = workshop.pair().model
    squared_error(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"the gradient of 'head.weight' is at rest .*gathered\(param, grads=True\)"):
        read(model.head.weight.grad)


def test_a_compiled_step_is_the_step(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier)
    for model, optimizer, step in (
        (pair.plain, pair.plain_optimizer, pair.plain_optimizer.step),
        (pair.model, pair.optimizer, torch.compile(pair.optimizer.step, backend="eager")),
    ):
        for batch in batches(2):
            squared_error(model, batch).backward()
            step()
            optimizer.zero_grad()
    pair.check()
    torch.compiler.reset()


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    script = f"""
import resource, sys, torch, outsize
from torch import nn
limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[1] == "prepare":
    limit()
try:
    outsize.prepare(model, optimizer, host_memory="64MiB", disk={str(tmp_path)!r}, params="disk", states="disk")
    limit()
    outsize.save({str(tmp_path / "saved")!r}, model, optimizer)
except OSError as error:
    assert "ulimit -f" in str(error) and {str(tmp_path)!r} in str(error), error
    sys.exit(7)
"""
    for when in ("prepare", "save"):
        status, _, errors = run_script(script, when)
        assert status == 7, f"{when}: {errors}"


def test_a_disk_engine_that_the_kernel_refuses_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from outsize.move import disk

    monkeypatch.setenv("OUTSIZE_DISK_ENGINE", "uring")
    monkeypatch.setattr(disk._native, "probe_uring", lambda: errno.EPERM)
    with pytest.raises(
        OSError, match=r"refuses io_uring \(Operation not permitted\); unset it, or set it to 'threads'"
    ):
        disk.open_engine()


def test_two_models_whose_directories_are_one_by_a_link_keep_their_files(workshop: Workshop, tmp_path: Path) -> None:
    first = workshop.pair()
    (tmp_path / "link").symlink_to(workshop.disk)
    second = workshop.pair(disk=tmp_path / "link")
    for pair in (first, second, first):
        pair.train(batches(2))


def test_two_models_whose_directories_are_one_by_a_mount_keep_their_files(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount shows the same inodes under another path, which no path tells."""
    first = workshop.pair()
    monkeypatch.setattr(Path, "resolve", lambda path, strict=False: Path("/elsewhere") / path.name)
    second = workshop.pair()
    monkeypatch.undo()
    for pair in (first, second, first):
        pair.train(batches(2))
