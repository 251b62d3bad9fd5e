"""Folders of torch.distributed.checkpoint, both ways; the oracle is what torch itself writes and reads."""

from __future__ import annotations

import errno
import io
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict

import outsize
from benchmarks.common import rss_bytes
from outsize.checkpoint.arrays import Readable
from outsize.formats.dcp_writing import write_dcp
from tests.api.checkpoint_runs import everything
from tests.api.dcp_runs import (
    TIERS,
    Net,
    Tied,
    adamw,
    load,
    other_run,
    plain_load,
    plain_run,
    plain_save,
    prepare,
    saved_run,
    train,
)
from tests.comparing import assert_same, exact_masters
from tests.conftest import no_file_above


@pytest.mark.parametrize("tier", TIERS)
def test_a_plain_load_of_the_state_dict_opens_a_written_folder(tier: str, tmp_path: Path) -> None:
    model, optimizer = other_run(tier, tmp_path)
    outsize.export(tmp_path / "folder", model, format="dcp", optimizer=optimizer)
    expected = everything(model)
    plain = Net()
    state = plain.state_dict()
    plain_load(state, tmp_path / "folder")
    set_model_state_dict(plain, state)
    assert_same(everything(plain), expected)


@pytest.mark.parametrize("flat", [False, True])
def test_torch_goes_on_from_a_written_folder_in_both_of_its_forms(flat: bool, tmp_path: Path) -> None:
    model, optimizer = other_run("disk", tmp_path, steps=2)
    outsize.export(tmp_path / "folder", model, format="dcp", optimizer=optimizer)
    plain, plain_optimizer = plain_run(steps=1)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(plain, plain_optimizer, options=options)
    wanted = {**weights, "optimizer": states}
    plain_load(wanted, tmp_path / "folder")
    dcp.state_dict.set_state_dict(
        plain,
        plain_optimizer,
        model_state_dict={name: wanted[name] for name in weights},
        optim_state_dict=wanted["optimizer"],
        options=options,
    )
    assert_same(everything(model, optimizer), everything(plain, plain_optimizer))
    assert plain_optimizer.param_groups[0]["lr"] == 2e-2
    assert plain_optimizer.param_groups[1]["weight_decay"] == 0.0


def test_a_written_folder_becomes_a_torch_save_file(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model, optimizer = other_run("disk", tmp_path)
    outsize.export(tmp_path / "folder", model, format="dcp", optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "folder", tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    plain = Net()
    plain.load_state_dict({name: found[name] for name in plain.state_dict()})
    assert_same(everything(plain), everything(model))
    expected = optimizer.state[model.head.weight]["exp_avg"]
    assert torch.equal(found["optimizer"]["state"]["head.weight"]["exp_avg"], expected)


def test_bf16_weights_are_written_as_they_are_or_as_their_fp32_masters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    masters = everything(model)
    prepare(model, adamw(model), "disk", tmp_path, compute_dtype=torch.bfloat16)
    outsize.export(tmp_path / "own", model, format="dcp")
    outsize.export(tmp_path / "wide", model, format="dcp", dtype=torch.float32)
    wide, own = Net().state_dict(), Net().bfloat16().state_dict()
    plain_load(wide, tmp_path / "wide")
    plain_load(own, tmp_path / "own")
    for name in wide:
        rounded = masters[name].to(own[name].dtype)
        assert torch.equal(wide[name], rounded.float() if name in FROZEN else masters[name]), name
        assert torch.equal(own[name], rounded), name


def test_a_tied_weight_is_written_under_all_its_names_and_found_under_any(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    prepare(model, None, "disk", tmp_path)
    outsize.export(tmp_path / "folder", model, format="dcp")
    state = Tied().state_dict()
    plain_load(state, tmp_path / "folder")
    assert_same(state, expected)
    plain_save({"model": {name: 2 * expected[name] for name in ("head.weight", "head.bias")}}, tmp_path / "one")
    load(tmp_path / "one", model)
    assert torch.equal(everything(model)["embed.weight"], 2 * expected["embed.weight"])


def test_a_head_of_its_own_of_another_shape_does_not_fit_a_tied_model(tmp_path: Path) -> None:
    model = Tied()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    prepare(model, None, "disk", tmp_path)
    plain_save({"model": {**state, "head.weight": torch.zeros(31, 8)}}, tmp_path / "folder")
    with pytest.raises(ValueError, match="another shape: head.weight is 31x8 there and 30x8 here"):
        load(tmp_path / "folder", model)


def entry(numel: int, read: Callable[[], Tensor]) -> Readable:
    """An fp32 tensor that is read at once."""
    return Readable((numel,), torch.float32, lambda *_: read(), run=numel)


def test_writing_holds_one_tensor_whatever_the_size_of_the_model(tmp_path: Path) -> None:
    numel, count = 1 << 19, 40
    seen: list[int] = []

    def read(fill: float) -> Tensor:
        tensor = torch.full((numel,), fill)
        seen.append(rss_bytes())
        return tensor

    entries = {(f"weight{at}",): entry(numel, partial(read, float(at))) for at in range(count)}
    write_dcp(tmp_path / "folder", entries)
    assert max(seen) - seen[0] <= 4 * 4 * numel
    state = {f"weight{at}": torch.empty(numel) for at in range(count)}
    plain_load(state, tmp_path / "folder")
    assert all(torch.equal(value, torch.full((numel,), float(name[6:]))) for name, value in state.items())


def test_a_full_disk_is_named_and_leaves_no_metadata(tmp_path: Path) -> None:
    entries = {("weight",): entry(1 << 20, partial(torch.zeros, 1 << 20))}
    with no_file_above(1 << 20), pytest.raises(OSError, match="folder") as raised:
        write_dcp(tmp_path / "folder", entries)
    assert raised.value.errno == errno.EFBIG
    assert ".metadata" not in os.listdir(tmp_path / "folder")


def test_an_error_of_a_read_comes_through_as_it_is(tmp_path: Path) -> None:
    def stop() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dcp(tmp_path / "folder", {("weight",): entry(4, stop)})


def test_values_of_one_key_are_refused(tmp_path: Path) -> None:
    entries = {("weight",): entry(4, partial(torch.zeros, 4))}
    with pytest.raises(ValueError, match="same key"):
        write_dcp(tmp_path / "other", entries, {("weight",): 1})


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_training_goes_on_from_a_folder_of_torch_as_torch_does(tier: str, flat: bool, tmp_path: Path) -> None:
    plain, plain_optimizer = saved_run(tmp_path / "folder", flat)
    model, optimizer = other_run(tier, tmp_path)
    load(tmp_path / "folder", model, optimizer)
    assert_same(everything(model, optimizer), everything(plain, plain_optimizer))
    assert [group["lr"] for group in optimizer.param_groups] == [2e-2, 1e-2]
    expected = train(plain, plain_optimizer, 3)
    assert train(model, optimizer, 3) == pytest.approx(expected, rel=1e-6)
    ours, theirs = everything(model, optimizer), everything(plain, plain_optimizer)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-5)


def test_options_of_the_groups_are_those_of_the_folder(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=3e-3)

    model, optimizer = other_run("host", tmp_path, make=make)
    plain, plain_optimizer = plain_run(make=make)
    plain_optimizer.param_groups[0].update(lr=torch.tensor(0.125), betas=(0.5, 0.75), weight_decay=0.5)
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        states = get_state_dict(plain, plain_optimizer, options=options)[1]
        plain_save({"model": plain.state_dict(), "optim": states}, tmp_path / f"folder{flat}")
        optimizer.param_groups[0].update(lr=1.0, betas=(0.1, 0.2), weight_decay=0.0)
        load(tmp_path / f"folder{flat}", model, optimizer)
        assert optimizer.param_groups[0]["lr"] == torch.tensor(0.125)
        assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
        assert optimizer.param_groups[0]["weight_decay"] == 0.5
        assert len(optimizer.param_groups[0]["params"]) == len(plain_optimizer.param_groups[0]["params"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_any_optimizer_goes_both_ways(name: str, tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[name]([param for param in model.parameters() if param.requires_grad])

    plain, plain_optimizer = saved_run(tmp_path / "folder", make=make)
    model, optimizer = other_run("disk", tmp_path, make=make)
    load(tmp_path / "folder", model, optimizer)
    assert_same(everything(model, optimizer), everything(plain, plain_optimizer))
    train(model, optimizer, 1)
    outsize.export(tmp_path / "back", model, format="dcp", optimizer=optimizer)
    expected = everything(model, optimizer)
    train(model, optimizer, 1)
    load(tmp_path / "back", model, optimizer)
    assert_same(everything(model, optimizer), expected)


def test_8_bit_states_are_written_as_values_and_come_back_as_they_were(tmp_path: Path) -> None:
    model, optimizer = other_run("disk", tmp_path, state_format="compact")
    outsize.export(tmp_path / "folder", model, format="dcp", optimizer=optimizer)
    expected = everything(model, optimizer)
    train(model, optimizer, 1)
    load(tmp_path / "folder", model, optimizer)
    assert_same(everything(model, optimizer), expected)


def test_states_under_numbers_are_found_by_the_order_of_the_parameters(tmp_path: Path) -> None:
    plain, plain_optimizer = plain_run()
    plain_save({"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict()}, tmp_path / "folder")
    model, optimizer = other_run("disk", tmp_path)
    load(tmp_path / "folder", model, optimizer)
    assert_same(everything(model, optimizer), everything(plain, plain_optimizer))


def place(state: Any, at: str) -> dict[str, Any]:
    for name in reversed([each for each in at.split(".") if each]):
        state = {name: state}
    return state


@pytest.mark.parametrize("at", ["", "model", "state_dict", "app.model", "module", "trainer.nets.student"])
def test_weights_are_found_under_any_name(at: str, tmp_path: Path) -> None:
    plain, _ = plain_run(steps=1)
    others = {"train_state": {"step": torch.tensor(3), "losses": torch.ones(4)}, "epoch": 3, "note": io.BytesIO(b"x")}
    plain_save({**place(plain.state_dict(), at), **others}, tmp_path / "folder")
    model, _ = other_run("disk", tmp_path)
    load(tmp_path / "folder", model)
    assert_same(everything(model), everything(plain))


def test_a_part_of_a_wrapped_model_is_found_with_its_optimizer(tmp_path: Path) -> None:
    plain, _ = plain_run(steps=1)
    wrapped = nn.ModuleDict({"net": plain})
    plain_optimizer = adamw(wrapped)
    train(plain, plain_optimizer, 1)
    weights, states = get_state_dict(wrapped, plain_optimizer)
    plain_save({"state_dict": weights, "optimizer_0": states}, tmp_path / "folder")
    model, optimizer = other_run("disk", tmp_path)
    load(tmp_path / "folder", model, optimizer)
    assert_same(everything(model, optimizer), everything(plain, plain_optimizer))


def test_of_several_copies_of_the_weights_the_usual_place_counts(tmp_path: Path) -> None:
    plain, _ = plain_run(steps=1)
    averaged = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    plain_save({"ema": averaged, "model": plain.state_dict()}, tmp_path / "folder")
    model, _ = other_run("disk", tmp_path)
    load(tmp_path / "folder", model)
    assert_same(everything(model), everything(plain))
    plain_save({"ema": averaged, "slow": averaged}, tmp_path / "two")
    with pytest.raises(ValueError, match="more than once: under 'ema.', 'slow.'"):
        load(tmp_path / "two", model)


FROZEN = ("empty", "frozen")
"""Have no master: in 16 bits they are rounded."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tier", TIERS)
def test_masters_of_16_bit_weights_are_the_folders_fp32_weights(dtype: torch.dtype, tier: str, tmp_path: Path) -> None:
    plain, plain_optimizer = saved_run(tmp_path / "folder")
    torch.manual_seed(1)
    model = Net()
    optimizer = adamw(model)
    prepare(model, optimizer, tier, tmp_path, compute_dtype=dtype)
    load(tmp_path / "folder", model, optimizer)
    expected = {name: value.detach() for name, value in plain.named_parameters()}
    exact = {name: value.to(dtype).float() if name in FROZEN else value for name, value in expected.items()}
    assert_same(exact_masters(model), exact)
    for name, value in everything(model).items():
        if name in expected:
            assert torch.equal(value, expected[name].to(dtype)), name
    assert torch.equal(optimizer.state[model.scale]["exp_avg"], plain_optimizer.state[plain.scale]["exp_avg"])
    outsize.export(tmp_path / "back", model, format="dcp", optimizer=optimizer, dtype=torch.float32)
    state = plain.state_dict()
    plain_load(state, tmp_path / "back")
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_bf16_folders_become_weights_of_the_same_values(compute_dtype: torch.dtype | None, tmp_path: Path) -> None:
    plain, _ = plain_run(steps=1)
    stored = {name: value.bfloat16() for name, value in plain.named_parameters()}
    plain_save({"model": {**plain.state_dict(), **stored}}, tmp_path / "folder")
    model, _ = other_run("disk", tmp_path, compute_dtype=compute_dtype)
    load(tmp_path / "folder", model)
    assert_same(exact_masters(model), {name: value.detach().float() for name, value in stored.items()})


def test_weights_alone_leave_the_optimizer_as_it_is(tmp_path: Path) -> None:
    plain, _ = saved_run(tmp_path / "folder")
    model, optimizer = other_run("disk", tmp_path)
    before = everything(model, optimizer)
    load(tmp_path / "folder", model)
    after = everything(model, optimizer)
    assert_same({name: value for name, value in after.items() if "/" not in name}, everything(plain))
    assert torch.equal(after["head.bias/exp_avg"], before["head.bias/exp_avg"])


def test_the_optimizer_alone_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    plain, plain_optimizer = plain_run()
    plain_save({"optimizer": get_state_dict(plain, plain_optimizer)[1]}, tmp_path / "folder")
    model, optimizer = other_run("disk", tmp_path)
    before = everything(model)
    load(tmp_path / "folder", None, optimizer)
    assert_same(everything(model), before)
    expected = everything(plain, plain_optimizer)
    found = everything(model, optimizer)
    assert_same(
        {name: value for name, value in found.items() if "/" in name},
        {name: value for name, value in expected.items() if "/" in name},
    )


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_without_strict_what_one_side_lacks_stays_as_it_is(
    compute_dtype: torch.dtype | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, plain_optimizer = plain_run()
    weights, states = get_state_dict(plain, plain_optimizer)
    for name in ("blocks.0.up.bias", "norm.running_mean"):
        del weights[name]
    del states["state"]["blocks.0.up.bias"]  # type: ignore[union-attr, arg-type]
    plain_save({"model": {**weights, "more": torch.ones(3)}, "optim": states}, tmp_path / "folder")
    model, optimizer = other_run("disk", tmp_path, compute_dtype=compute_dtype)
    before, halves = exact_masters(model), everything(model, optimizer)
    load(tmp_path / "folder", model, optimizer, strict=False)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records if record.name == "outsize"] == [
        "1 missing parameters, passed over: blocks.0.up.bias",
        "1 missing buffers, passed over: norm.running_mean",
        "1 unexpected weights, passed over: more",
    ]
    expected = {name: value.detach() for name, value in plain.named_parameters()}
    for name in FROZEN:
        expected[name] = expected[name].to(compute_dtype).float()
    assert_same(exact_masters(model), {**expected, "blocks.0.up.bias": before["blocks.0.up.bias"]})
    after = everything(model, optimizer)
    for name in ("norm.running_mean", "blocks.0.up.bias/exp_avg", "blocks.0.up.bias/step"):
        assert torch.equal(after[name], halves[name]), name
    assert torch.equal(after["head.bias/exp_avg"], plain_optimizer.state[plain.head.bias]["exp_avg"])
    plain_save({"model": {**weights, "head.bias": torch.ones(3)}}, tmp_path / "shape")
    with pytest.raises(ValueError, match="head.bias is 3 there and 50 here"):
        load(tmp_path / "shape", model, strict=False)


# -- through the public functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_export_and_load_speak_the_format(
    tier: str, early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if early:  # as Python 3.11.2 does
        monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda it, _: (getattr, (type(it), it.name)))
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model)
    prepare(model, optimizer, tier, tmp_path)
    train(model, optimizer, 2)
    outsize.export(tmp_path / "dcp", model, format="dcp", optimizer=optimizer)
    other = Net()
    resumed = adamw(other)
    prepare(other, resumed, tier, tmp_path)
    train(other, resumed, 1)
    assert outsize.load(tmp_path / "dcp", other, resumed) is None
    losses = train(model, optimizer, 2, seed=3), train(other, resumed, 2, seed=3)
    assert losses[0] == losses[1]
    third = Net()
    prepare(third, None, tier, tmp_path)
    outsize.load(tmp_path / "dcp", third)


def test_export_refuses_what_the_format_has_not_got(tmp_path: Path) -> None:
    model = Net()
    prepare(model, None, "host", tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(FileExistsError, match="a new or an empty folder"):
        outsize.export(tmp_path / "full", model, format="dcp")
    with pytest.raises(ValueError, match="max_shard_size is for safetensors"):
        outsize.export(tmp_path / "dcp", model, 1 << 20, format="dcp")
    with pytest.raises(ValueError, match="format is 'pickle'"):
        outsize.export(tmp_path / "dcp", model, format="pickle")
    with pytest.raises(ValueError, match="safetensors holds weights alone"):
        outsize.export(tmp_path / "dcp", model, optimizer=adamw(Net()))
