"""Accelerate's loop on a model at rest on disk. The same loop with plain Accelerate is the oracle."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outsize
from tests.comparing import assert_same, assert_same_weights, weights
from tests.conftest import prepared
from tests.ranks.launching import run_on_ranks

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration  # noqa: E402

from outsize.integrations.accelerate import STATE, prepare  # noqa: E402

ON_DISK = {"params": "disk", "grads": "disk", "states": "disk", "host_memory": "8MiB", "activations": "keep"}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Accelerators share what they know of the process."""
    forget()
    yield
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {**ON_DISK, "disk": tmp_path / "disk"}


def build(seed: int = 0, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 4))


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(28, 8, generator=generator), torch.randn(28, 4, generator=generator))
    return DataLoader(rows, 4, generator=generator)  # else it draws from the numbers of the model


def made(model: nn.Module) -> tuple[Any, ...]:
    """What a script gives to `prepare`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, data(), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def loop(accelerator: Any, objects: tuple[Any, ...], skip: int = 0, save_at: int | None = None) -> list[Any]:
    """As Accelerate's documentation has it. The loss, the norm and the learning rate of each batch."""
    model, optimizer, loader, scheduler = objects
    shown = []
    for at, (inputs, targets) in enumerate(accelerator.skip_first_batches(loader, skip), skip):
        if at == save_at:
            accelerator.save_state()
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.3) if accelerator.sync_gradients else 0.0
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        shown.append((accelerator.reduce(loss.detach(), "mean").item(), float(norm), scheduler.get_last_lr()[0]))
    return shown


@pytest.mark.parametrize("how", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}], ids=str)
@pytest.mark.parametrize("before", [False, True], ids=["here", "before"])
def test_loop_is_that_of_plain_accelerate(how: dict[str, Any], before: bool, disk: dict[str, Any]) -> None:
    accelerator, model = accelerate.Accelerator(cpu=True, **how), build()
    plain = accelerator.prepare(*made(copy.deepcopy(model)))
    torch.manual_seed(3)
    expected = loop(accelerator, plain)
    accelerator = accelerate.Accelerator(cpu=True, **how)
    given = made(model)
    if before:
        outsize.prepare(*given[:2], **disk)
    objects = prepare(accelerator, *given, **({} if before else disk))
    assert objects[0] is model
    torch.manual_seed(3)
    for ours, theirs in zip(loop(accelerator, objects), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert_same_weights(model, plain[0])
    peak = outsize.memory(model).peak
    assert sum(nbytes for name, nbytes in peak.items() if not name.startswith("disk")) <= 8 << 20


def test_a_state_that_is_loaded_goes_on_bit_for_bit(disk: dict[str, Any], tmp_path: Path) -> None:
    shown: list[int] = []

    def look(models: list[Any], weights: list[Any], _: str) -> None:
        shown.extend([len(models), len(weights)])
        weights.pop(0)  # as a hook does that has written them itself: those of the first model, which is ours

    def run(seed: int) -> tuple[Any, Any]:
        config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=config)
        prepare(accelerator, build(seed), **disk)  # a reference, which is not saved
        objects = prepare(accelerator, *made(build(seed)), **disk)
        plain = accelerator.prepare(nn.Linear(2, 1))  # which outsize does not have
        second, _ = prepare(accelerator, *made(nn.Linear(2, 1))[:2], **disk)
        accelerator.register_save_state_pre_hook(look)
        accelerator.register_load_state_pre_hook(lambda models, _: shown.append(len(models)))
        return accelerator, (*objects, plain, second)

    accelerator, (*objects, plain, second) = run(0)
    accelerator.save_state()  # it goes, as one alone stays
    whole = loop(accelerator, objects, save_at=3)  # between the two halves of a step: with a gradient
    expected, (checkpoint,) = weights(objects[0]), (tmp_path / "checkpoints").iterdir()
    forget()
    accelerator, (*objects, again, second_again) = run(1)
    accelerator.load_state(str(checkpoint))
    assert shown == [4] * 5  # hooks of the user have all models
    assert loop(accelerator, objects, skip=3) == whole[3:]
    assert_same(weights(objects[0]), expected)
    assert torch.equal(again.weight, plain.weight)
    assert_same_weights(second_again, second, atol=0)
    files = {each.name: each.stat().st_size for each in checkpoint.iterdir()}
    assert STATE in files and files["model.safetensors"] < 1000 and "model_1.safetensors" not in files
    assert files["optimizer.bin"] < 3000
    assert objects[1].state_dict()["state"]  # the user's own call has it


def test_a_step_that_a_scaler_skips_does_not_move_the_scheduler(disk: dict[str, Any]) -> None:
    shown = []
    for train in (accelerate.Accelerator.prepare, prepare):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # which it makes on an accelerator
        given = made(build(dropout=0.0))
        model, optimizer, _, scheduler = train(accelerator, *given, **({} if train is not prepare else disk))
        for factor in (1.0, float("inf"), 1.0, 1.0):
            accelerator.backward(model(torch.ones(2, 8)).square().mean() * factor)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            shown.append((optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped, scheduler.get_last_lr()))
    assert shown[:4] == shown[4:]
    assert shown[1][0]


def wrapped(model: nn.Module) -> dict[str, Any]:
    return {"model": nn.DataParallel(model)}


def with_its_optimizer(model: nn.Module) -> dict[str, Any]:
    optimizer = accelerate.Accelerator(cpu=True).prepare_optimizer(torch.optim.SGD(model.parameters()))
    return {"model": model, "optimizer": optimizer}


def with_another_optimizer(model: nn.Module) -> dict[str, Any]:
    outsize.prepare(model, torch.optim.SGD(model.parameters()), device="cpu", host_memory="8MiB")
    return {"model": model}


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        ({}, wrapped, "wrapped in DataParallel.*pass the model itself"),
        ({}, with_its_optimizer, "accelerator.prepare had the optimizer already.*call this prepare in its place"),
        ({}, with_another_optimizer, "pass the optimizer that was prepared"),
        ({}, lambda model: {"model": model, "more": nn.Linear(1, 1)}, "2 models and 1 optimizers.*call it once"),
        ({}, lambda model: {"model": model, "host_memory": "1 apple"}, "1 apple"),
        ({"distributed_type": "FSDP"}, lambda model: {"model": model}, "FSDP is on.*leave it out"),
        ({"distributed_type": "DEEPSPEED"}, lambda model: {"model": model}, "DEEPSPEED is on.*leave it out"),
        ({"num_processes": 2}, lambda model: {"model": model}, "of 1 ranks the Accelerator knows 2.*cpu=True"),
        ({"mixed_precision": "fp8"}, lambda model: {"model": model}, "fp8.*use bf16"),
        ({"dynamo_backend": "eager"}, lambda model: {"model": model}, r"torch.compile is on.*\.compile\(\)"),
    ],
)
def test_what_cannot_train_is_refused_with_the_remedy(change: Any, given: Any, message: str, monkeypatch: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True, dynamo_backend=change.pop("dynamo_backend", None))
    for name, value in change.items():  # these need devices or packages that are not here
        kind = accelerate.DistributedType(value) if name == "distributed_type" else value
        monkeypatch.setattr(accelerate.Accelerator, name, kind)
    given = given(build())
    objects = [given.pop("model"), *([given.pop("more")] if "more" in given else [])]
    optimizer = given.pop("optimizer", None) or torch.optim.AdamW(objects[0].parameters())
    with pytest.raises(ValueError, match=message):
        prepare(accelerator, *objects, optimizer, **given)
    assert not accelerator._optimizers


def rank_of_two(folder: Path) -> list[Any]:
    """What a whole run shows, and what one shows that goes on."""
    rank = torch.distributed.get_rank()
    # As `accelerate launch --cpu --num_processes 2` has it.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    shown = []
    for seed, skip, save_at in ((0, 0, 3), (1, 3, None)):
        config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
        split = DataLoaderConfiguration(split_batches=True)
        accelerator = accelerate.Accelerator(
            gradient_accumulation_steps=2, project_config=config, dataloader_config=split
        )
        objects = prepare(accelerator, *made(build(seed, dropout=0.0)), **ON_DISK, disk=folder / "disk")
        with accelerator.no_sync(objects[0]):
            assert not prepared(objects[0]).engine.reduction.reducing
        if skip:
            accelerator.load_state()
        shown.append(loop(accelerator, objects, skip, save_at))
        shown.append(weights(objects[0]))
        forget()
    return shown


def test_two_ranks_train_and_go_on_like_one_plain_process(disk: dict[str, Any], tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = accelerator.prepare(*made(build(dropout=0.0)))
    torch.manual_seed(3)
    expected = loop(accelerator, plain)
    (whole, values, resumed, again), _ = run_on_ranks(2, rank_of_two, tmp_path)
    assert whole == [pytest.approx(each, rel=1e-5) for each in expected]
    assert resumed == whole[3:]
    for name, value in plain[0].named_parameters():
        torch.testing.assert_close(values[name], value.detach(), rtol=0, atol=1e-5)
        assert torch.equal(values[name], again[name])
