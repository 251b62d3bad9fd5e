"""What `prepare` cannot take is said with the name, the numbers and the remedy, and nothing has happened."""

import errno
import os
import pickle
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import outsize
from tests.conftest import Workshop, adamw, batches, refused, squared_error
from tests.small_models import Stack, linears


def test_a_budget_below_the_largest_unit_names_the_unit_and_the_numbers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(256, 256))
    refused(
        model, adamw(model), r"unit '1.*' needs 5.* KiB.*host_memory is 5.* KiB; raise host_memory to at least",
        host_memory="500KiB", disk=tmp_path, device="cpu", tiles=False,
    )  # fmt: skip


def test_the_least_budget_that_is_named_is_accepted_where_updates_are_delayed(tmp_path: Path) -> None:
    """The larger budget must not join parameters into a unit that padding makes too large for it."""
    model = nn.TransformerEncoderLayer(32, 4, 128)
    fields: dict[str, Any] = {"disk": tmp_path, "device": "cpu", "delayed_update": 1}
    with pytest.raises(outsize.BudgetError) as caught:
        outsize.plan(model, host_memory="64KiB", **fields)
    outsize.plan(model, host_memory=caught.value.needed, **fields)


HELD_IN_MEMORY = (
    {"params": "host", "host_memory": "64KiB"},
    {"grads": "device", "states": "disk", "host_memory": "300KiB"},
    {"states": "host", "delayed_update": 1, "host_memory": "1MiB"},
    {"params": "disk", "grads": "host", "states": "device", "host_memory": "64KiB", "disk_space": "4KiB"},
    {"params": "host", "states": "device", "device": "meta", "device_memory": "100KiB", "host_memory": "4KiB"},
    {"params": "host", "grads": "host", "disk": None, "compute_dtype": torch.bfloat16, "host_memory": "200KiB"},
)


@pytest.mark.parametrize("wanted", HELD_IN_MEMORY, ids=lambda wanted: "-".join(map(str, wanted)))
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_budget_that_an_error_names_is_accepted_at_once(
    tmp_path: Path, wanted: dict[str, Any], ranks: int
) -> None:
    model = nn.Sequential(nn.Linear(96, 96), nn.LSTM(96, 160, 3), nn.Linear(160, 4000))
    fields: dict[str, Any] = {"disk": tmp_path, "device": "cpu", "tiles": False, **wanted}
    named: list[str] = []
    while (error := refusal(model, ranks=ranks, **fields)) is not None:
        assert error.field not in named
        said = re.search(rf"raise {error.field} to at least ([0-9.]+ [KMG]iB)", str(error))
        assert said is not None
        assert outsize.Config(host_memory=said[1]).host_memory == error.needed > error.available
        named.append(error.field)
        fields[error.field] = error.needed
    assert named


def refusal(model: nn.Module, **fields: Any) -> outsize.BudgetError | None:
    try:
        outsize.plan(model, **fields)
    except outsize.BudgetError as error:
        return error
    return None


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
    model = linears(64, 64)
    refused(model, adamw(model), r"do not fit host_memory=.* no disk is given; pass disk=", host_memory="1MiB")


@pytest.mark.parametrize("kind", ["missing", "file", "read-only"])
def test_an_unusable_disk_directory_is_named(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "place" / "disk" if kind == "missing" else tmp_path / "place"
    if kind == "file":
        place.write_text("x")
    elif kind == "read-only":
        place.mkdir()
        read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))  # root may write to any mode: the drive refuses
        monkeypatch.setattr(Path, "mkdir", Mock(side_effect=read_only))
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


@pytest.mark.parametrize("asked", [None, "1GiB"], ids=["no disk_space", "more than is free"])
def test_where_the_drive_is_too_small_the_error_says_how_much_must_be_free(
    workshop: Workshop, asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger `disk_space` would not help."""
    model = Stack()
    monkeypatch.setattr("outsize.api.budgets.free_bytes", lambda _: 100 << 10)
    match = r"95.0 KiB may be used there; free some until [0-9.]+ [KM]iB may be used there$"
    refused(model, adamw(model), match, **workshop.fields("disk", disk_space=asked))


def test_a_number_for_all_that_must_lie_in_memory_is_not_that_of_a_unit(device: str) -> None:
    model = linears(64, 64)
    fields: dict[str, Any] = {"host_memory": "64KiB", "device": device, "disk": ".", "states": "host"}
    with pytest.raises(outsize.BudgetError) as caught:
        outsize.plan(model, adamw(model), **fields)
    assert "units=" not in str(caught.value)


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
        ({"reduce_dtype": torch.int8}, "reduce_dtype is torch.int8; use torch.float32"),
        ({"unused": "sync", "update": "backward"}, "unused='sync' may reduce when .*choose one"),
        ({"delayed_update": "yes"}, "delayed_update is 'yes'; it must be True, False or the number of exact steps"),
        ({"delayed_update": 0}, "delayed_update is 0; the number of exact steps is at least 1"),
        ({"mesh": (2, 2)}, "mesh is .2, 2.; it must be a torch.distributed.device_mesh.DeviceMesh"),
        ({"device": "meta"}, "device='meta' plans for an accelerator that is not here: give its device_memory"),
        ({"device": "mps:9"}, "device is 'mps:9', and torch has no such accelerator here; use"),
        ({"disk": 7}, "disk is 7; it must be a directory or a non-empty list of directories"),
        ({"disk": ["a", 7]}, "disk holds 7; each entry must be the path of a directory"),
        ({"units": []}, "units is ..; it must be module classes or names, or a non-empty list of them"),
        ({"units": [nn.Linear, 7]}, "units holds 7; each entry must be a module class or a module's name"),
        ({"config": {"stage": 3}}, "config must be an outsize.Config, not dict"),
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
    refused(Stack(), adamw(Stack()), "parameter group 0 holds a parameter of shape .* not in the model.*ModuleList")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_parameters_that_cannot_be_trained_are_named(dtype: torch.dtype) -> None:
    model = Stack()
    model.odd = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=dtype is not torch.int64)
    remedy = "trained as buffers; keep a complex weight as torch.view_as_real" if dtype.is_complex else "as buffers$"
    refused(model, adamw(model), rf"parameter 'odd' is a Parameter of {dtype};.*{remedy}")


def test_parameters_of_inference_mode_are_named() -> None:
    with torch.inference_mode():
        model = Stack()
    refused(model, adamw(model), r"parameter 'blocks\.0\.norm\.weight' was made under torch\.inference_mode")


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


@pytest.mark.parametrize("name", ["0", "Embedding"])
def test_an_embedding_that_writes_its_weight_is_refused_in_prepare(workshop: Workshop, name: str) -> None:
    table = nn.Embedding(8, 16, max_norm=1.0)
    model = nn.Sequential(table, nn.Linear(16, 4)) if name == "0" else table
    refused(model, adamw(model), rf"'{name}' has max_norm=1\.0, which writes its weight", **workshop.fields("disk"))


class Own(nn.Parameter):
    """A class of the user's."""


def with_sparse_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.head.weight.grad = torch.zeros(4, 16).to_sparse()  # type: ignore[union-attr]


def with_own_class(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.head.weight = Own(torch.zeros(4, 16))  # type: ignore[union-attr]


def with_the_state_of_another(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    zeros = {key: torch.zeros(3) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[model.head.weight] = {"step": torch.tensor(1.0), **zeros}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (with_sparse_gradient, r"the gradient of 'head.weight' is sparse .*; call optimizer.zero_grad\(\) before"),
        (with_own_class, "parameter 'head.weight' is of the class Own; outsize takes plain ones"),
        (with_the_state_of_another, r"the optimizer's state 'exp_avg' of 'head.weight' has the shape \(3,\)"),
    ],
)
def test_what_a_model_has_already_must_fit(workshop: Workshop, change: Any, match: str) -> None:
    model = Stack()
    optimizer = adamw(model)
    change(model, optimizer)
    if change is with_own_class:
        optimizer = adamw(model)
    refused(model, optimizer, match, **workshop.fields("disk"))


@pytest.mark.parametrize("units", [None, nn.Sequential, nn.Linear], ids=["none", "large", "small"])
def test_a_unit_that_is_too_large_is_cut_by_the_budget_where_no_units_are_named(
    units: type[nn.Module] | None,
) -> None:
    """The error says so where units were named. Where they were not, there is nothing to leave out."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)) for _ in range(2)))
    fields: dict[str, Any] = {"host_memory": "400KiB", "device": "cpu", "disk": ".", "units": units}
    if units is None:
        fields |= {"host_memory": "300KiB", "tiles": False}
    error = refusal(model, **fields)
    assert error is not None
    assert str(error).endswith(" or leave units= out") == (units is not None)
    assert ("units=" in str(error)) == (units is not None)
    if units is not None:
        assert refusal(model, **{**fields, "units": None}) is None
