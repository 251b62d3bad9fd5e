"""Another optimizer than the model's own, what wraps the model or the optimizer, and what is left when they go."""

import copy
import errno
import gc
import pickle
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import outsize
from tests.conftest import (
    AT_REST_TIERS,
    Stack,
    Workshop,
    adamw,
    batches,
    prepared,
    squared_error,
    train,
)
from tests.run.test_mistakes_in_prepare import refused
from tests.scripts import run_script


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
