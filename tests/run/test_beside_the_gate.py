"""Ways to a parameter's values that are no operation of torch on it, or one that torch does more with than it says."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

import outsize
from outsize.run.grads import RestingGrad
from tests.conftest import Block, Stack, Workshop, adamw, batches, prepared, squared_error

NAME = "model.safetensors"


class Ensemble(nn.Module):
    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, 16) / 4)
        self.copied = copied

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.clone() if self.copied else self.weight
        return torch.vmap(lambda each: x @ each)(weight).sum(0)


def test_vmap_over_a_parameter_is_refused_and_over_its_copy_right(workshop: Workshop, tier: str) -> None:
    x = torch.randn(4, 16)
    model = Ensemble(copied=False)
    workshop.prepare(model, adamw(model), tier)
    if tier == "device":  # where the values always are
        model(x).sum().backward()
    else:
        with pytest.raises(RuntimeError, match=r"torch.vmap takes 'weight' apart .*pass a copy, `weight.clone\(\)`"):
            model(x)
    pair = workshop.pair(lambda: Ensemble(copied=True), tier=tier)
    pair.train([(torch.randn(4, 16), torch.randn(4, 16)) for _ in range(3)])
    with torch.no_grad(), outsize.gathered(model):
        assert torch.equal(torch.vmap(lambda each: x @ each)(model.weight)[3], x @ model.weight[3])


def test_torch_func_grad_is_refused_outside_gathered_and_right_inside(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), tier=tier, activations="keep")
    x = torch.randn(4, 16)

    def gradients_of(model: nn.Module) -> dict[str, Tensor]:
        def loss(params: dict[str, Tensor]) -> Tensor:
            out: Tensor = torch.func.functional_call(model, params, (x,))
            return out.square().sum()

        found: dict[str, Tensor] = torch.func.grad(loss)(dict(model.named_parameters()))
        return found

    expected = gradients_of(pair.plain)
    if tier != "device":
        with pytest.raises(RuntimeError, match=r"runs inside torch.func .*outsize.gathered\(model\)"):
            gradients_of(pair.model)
    with outsize.gathered(pair.model):
        found = gradients_of(pair.model)
    assert all(torch.allclose(found[name], value, rtol=1e-5, atol=1e-6) for name, value in expected.items())


class Casts(TorchDispatchMode):
    """Counts what is cast to bf16, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16:
            self.shapes[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_autocast_keeps_no_copy_of_the_weights(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(lambda: nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4)), tier=tier)
    found = []
    for model, _ in pair.both:
        with Casts() as casts, torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                out = model(torch.randn(4, 16))
            assert torch.is_autocast_cache_enabled()
        out.sum().backward()
        found.append(casts.shapes[24, 16])
    assert found == [1, 1 if tier == "device" else 3]  # torch casts once and keeps it


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(16, 40) for _ in range(2)])
        self.head = nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = Product.apply(x, self.head.weight)
        return out


@pytest.mark.parametrize("update", ["fetch", "backward"])
def test_gradients_of_a_function_of_the_users_own_come_to_rest(workshop: Workshop, tier: str, update: str) -> None:
    pair = workshop.pair(OwnFunction, tier=tier, units=["Block", "Linear"], update=update)
    squared_error(pair.model, batches(1)[0]).backward()
    grad = pair.model.head.weight.grad  # type: ignore[union-attr]
    assert isinstance(grad, RestingGrad) or prepared(pair.model).engine.units[-1].resident
    squared_error(pair.plain, batches(1)[0]).backward()
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.step()
        optimizer.zero_grad()
    pair.train(batches(3))


def test_frames_of_a_backward_may_run_on_a_thread_of_autograd(workshop: Workshop) -> None:
    model = Stack(depth=2)
    workshop.prepare(model, adamw(model), "host", activations="keep")
    engine = prepared(model).engine
    x = torch.randn(4, 16, requires_grad=True)

    class Recomputes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            own, engine._thread = engine._thread, threading.get_ident() + 1  # as on a thread of autograd's
            try:
                with torch.no_grad():
                    model.blocks[0](grad)
            finally:
                engine._thread = own
            return grad

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with engine.frame(model):
                return torch.autograd.grad(Recomputes.apply(x).sum(), x)[0]

    assert torch.equal(Outer()(x), torch.ones(4, 16))


@pytest.mark.parametrize(
    ("optimizer", "compact"), [(adamw, True), (adamw, False), (lambda model: RMSprop(model.parameters()), False)]
)
@pytest.mark.parametrize(
    ("dtype", "loaded"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_a_default_device_is_of_no_concern(
    workshop: Workshop, dtype: str, loaded: str, optimizer: Any, compact: bool, tmp_path: Path
) -> None:
    state_format = "compact" if compact else "exact"
    dtypes = {name: getattr(torch, name) for name in (dtype, loaded)}
    how = {"optimizer": optimizer, "state_format": state_format}
    pair = workshop.pair(lambda: Stack(depth=2), tier="disk", compute_dtype=dtypes[dtype], **how)
    again = workshop.pair(lambda: Stack(depth=2), tier="device", compute_dtype=dtypes[loaded], **how)
    x, y = (each.to(dtypes[dtype]) for each in batches(1)[0])
    with torch.device("meta"):  # where nothing has bytes, as an accelerator's have none for the CPU
        F.mse_loss(pair.model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0)
        pair.model.head.weight.grad.clamp_(-1, 1).mul_(0.5).clamp_(-1, 1)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        assert pair.optimizer.state_dict()["state"]
        outsize.save(tmp_path / "ckpt", pair.model, pair.optimizer).wait()
        outsize.load(tmp_path / "ckpt", again.model, again.optimizer)
        outsize.export(tmp_path / "model", again.model, dtype=torch.float32)
        outsize.export(tmp_path / "first", pair.model, dtype=torch.float32)
        other = nn.Sequential(nn.Linear(4, 4, device="cpu"), nn.Linear(4, 4, device="cpu"))
        workshop.prepare(other, torch.optim.RMSprop(other.parameters()), "disk")
    masters, first = load_file(tmp_path / "model" / NAME), load_file(tmp_path / "first" / NAME)
    assert all(torch.equal(value, first[name]) for name, value in masters.items())


def test_a_fetch_that_finds_no_memory_may_be_tried_again(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(depth=2)
    workshop.prepare(model, adamw(model), "host")
    x, y = batches(1)[0]
    expected = squared_error(model, (x, y)).item()
    prepared(model).engine.streamer.drop_idle()
    buffer = prepared(model).engine.units[0].shard.buffer
    grow = type(buffer)._grow

    def full(self: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(type(buffer), "_grow", full)
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    monkeypatch.setattr(type(buffer), "_grow", grow)
    assert squared_error(model, (x, y)).item() == expected
