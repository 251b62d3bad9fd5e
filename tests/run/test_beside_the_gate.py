"""Ways to a parameter's values that are no operation of torch on it, or one that torch does more with than it says."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable
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
from outsize.run import owner
from outsize.run.activations import in_backward
from outsize.run.engine import Frame
from outsize.run.grads import RestingGrad
from tests.comparing import assert_same, assert_same_gradients
from tests.conftest import AT_REST_TIERS, Pair, Workshop, adamw, batches, prepared, squared_error, train
from tests.small_models import Block, Built, Product, Stack

NAME = "model.safetensors"


class Ensemble(nn.Module):
    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, 16) / 4)
        self.copied = copied

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.clone() if self.copied else self.weight
        return torch.vmap(lambda each: x @ each)(weight).sum(0)


@pytest.mark.parametrize("copied", [False, True])
def test_vmap_over_a_parameter_is_as_in_torch(workshop: Workshop, tier: str, copied: bool) -> None:
    pair = workshop.pair(lambda: Ensemble(copied), tier=tier)
    pair.train([(torch.randn(4, 16), torch.randn(4, 16)) for _ in range(3)])
    x, weight = torch.randn(4, 16), pair.model.weight
    with torch.no_grad(), outsize.gathered(pair.model):
        assert torch.equal(torch.vmap(lambda each: x @ each)(weight)[3], x @ weight[3])


def test_vmap_over_a_parameter_of_another_module_is_refused(workshop: Workshop, tier: str) -> None:
    class Borrows(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda each: x @ each)(self[0].weight).sum(0)

    model = Borrows(Ensemble(copied=False))
    workshop.prepare(model, adamw(model), tier)
    x = torch.randn(4, 16)
    if tier == "device":  # where the values always are
        model(x).sum().backward()
        return
    with pytest.raises(RuntimeError, match=r"takes '0.weight' apart .*pass a copy, `0.weight.clone\(\)`, made in"):
        model(x)
    with outsize.gathered(model[0].weight):  # as the message says where no forward runs
        copied = model[0].weight.clone()
    assert torch.vmap(lambda each: x @ each)(copied).shape[1] == 4


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


def test_the_gradient_of_a_transforms_result_is_right_after_gathered(workshop: Workshop, tier: str) -> None:
    """torch records what a transform computes with parameters that require gradients, for a backward of its result."""
    pair = workshop.pair(lambda: Stack(depth=2), tier=tier)
    for _ in range(3):
        for model, optimizer in pair.both:

            def loss(params: dict[str, Tensor], model: nn.Module = model) -> Tensor:
                out: Tensor = torch.func.functional_call(model, params, (torch.ones(4, 16),))
                return out.square().sum()

            with outsize.gathered(pair.model):
                found = torch.func.grad(loss)(dict(model.named_parameters()))
                penalty = sum((each.square().sum() for each in found.values()), torch.zeros(()))
            optimizer.zero_grad()
            penalty.backward()
        assert_same_gradients(pair.model, pair.plain, 1e-4, 1e-4)
        for _, optimizer in pair.both:
            optimizer.step()
        pair.check()
    assert all(isinstance(param, nn.Parameter) for param in pair.model.parameters())  # the copies are gone


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
        with Casts() as casts, torch.autocast(workshop.device, dtype=torch.bfloat16):
            for _ in range(3):
                out = model(torch.randn(4, 16))
            assert torch.is_autocast_cache_enabled()
        out.sum().backward()
        found.append(casts.shapes[24, 16])
    assert found == [1, 1 if tier == "device" else 3]  # torch casts once and keeps it


class OwnFunction(
    Built, blocks=lambda: nn.ModuleList([Block(16, 40) for _ in range(2)]), head=lambda: nn.Linear(16, 4, bias=False)
):
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
    assert isinstance(grad, RestingGrad) or prepared(pair.model).engine.parameters.units[-1].resident
    squared_error(pair.plain, batches(1)[0]).backward()
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.step()
        optimizer.zero_grad()
    pair.train(batches(3))


def test_frames_of_a_backward_may_run_on_a_thread_of_autograd(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_of_autograd", in_backward)
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
            with torch.no_grad():
                thread, engine.owner._thread = engine.owner._thread, threading.get_ident() + 1
                try:
                    model.blocks[0](grad)  # as on a thread of autograd's
                finally:
                    engine.owner._thread = thread
            return grad

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with Frame(engine, model):
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
    assert_same(masters, first)


def test_a_fetch_that_finds_no_memory_may_be_tried_again(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(depth=2)
    workshop.prepare(model, adamw(model), "host")
    x, y = batches(1)[0]
    expected = squared_error(model, (x, y)).item()
    prepared(model).engine.streamer.drop_idle()
    buffer = prepared(model).engine.parameters.units[0].shard.buffer

    def full(self: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(type(buffer), "materialize", full)
        model(x)
    assert squared_error(model, (x, y)).item() == expected


# -- TorchScript ---------------------------------------------------------------------------------------------------

ignores_its_deprecation = pytest.mark.filterwarnings("ignore:.*torch.jit")


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


class ScriptedNorm(
    Built, weight=lambda: nn.Parameter(torch.rand(16) + 0.5), apply_norm=lambda: [torch.jit.script(rms)]
):
    """A norm whose arithmetic is a function of TorchScript."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.apply_norm[0](x, weight=self.weight)
        return out

    def __deepcopy__(self, memo: Any) -> ScriptedNorm:
        copied = ScriptedNorm()
        copied.load_state_dict(self.state_dict())
        return copied


def scripted_norms() -> nn.Module:
    model = Stack(depth=3)
    for block in model.blocks:
        block.norm = ScriptedNorm()
    return model


@ignores_its_deprecation
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_scripted_functions_of_parameters_train_as_in_torch(workshop: Workshop, tier: str, activations: str) -> None:
    pair = workshop.pair(scripted_norms, tier=tier, activations=activations)
    trace = train(pair.model, pair.optimizer, batches(5))  # first, before TorchScript has optimized the function
    trace.close_to(train(pair.plain, pair.plain_optimizer, batches(5)))
    pair.check()


def add_residual(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + torch.tanh(x + bias)


def add_residual_scripted(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    out: Tensor = torch.jit.script(add_residual)(x, bias, residual)
    return out


def add_residual_or_fail(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """As einx does."""
    try:
        return add_residual(x, bias, residual)
    except Exception as error:
        raise LookupError("the operation failed") from error


def add_residual_or_try_again(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    try:
        return add_residual(x, bias, residual)
    except Exception:
        return add_residual(x, bias, residual)


class EndsIn(Block):
    """A block whose last operation that saves anything is in a function that catches errors."""

    def __init__(self, last: Callable[..., Tensor]) -> None:
        super().__init__(16, 40)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(torch.tanh(self.up(self.norm(x))), self.down.weight)
        return self.last(hidden, self.down.bias, x)


@ignores_its_deprecation
@pytest.mark.parametrize("tier", AT_REST_TIERS)  # on the device nothing passes the gate, and torch's checkpoint fails
@pytest.mark.parametrize("last", [add_residual_scripted, add_residual_or_fail, add_residual_or_try_again])
def test_a_recomputation_may_end_where_errors_are_caught(
    workshop: Workshop, tier: str, last: Callable[..., Tensor]
) -> None:
    pair = workshop.pair(
        lambda: nn.Sequential(*(EndsIn(last) for _ in range(3)), nn.Linear(16, 4)), tier=tier, activations="recompute"
    )
    pair.train(batches(4))


@ignores_its_deprecation
def test_a_scripted_function_of_a_parameter_at_rest_is_refused(workshop: Workshop) -> None:
    pair = workshop.pair(scripted_norms, tier="squeezed")
    x = torch.randn(4, 16)
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.norm\.weight' is at rest"):
        torch.jit.script(rms)(x, pair.model.blocks[0].norm.weight)
    assert torch.equal(torch.jit.script(rms)(x, torch.ones(16)), rms(x, torch.ones(16)))


@ignores_its_deprecation
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_scripted_modules_with_parameters_that_move_are_refused(workshop: Workshop, kind: str) -> None:
    plain = nn.Linear(16, 40)
    model = Stack()
    model.blocks[1].up = torch.jit.script(plain) if kind == "script" else torch.jit.trace(plain, torch.randn(2, 16))
    with pytest.raises(ValueError, match=r"module 'blocks\.1\.up' is of TorchScript .* use the plain module"):
        workshop.prepare(model, adamw(model), "disk")
    assert type(model.head.weight) is nn.Parameter


@ignores_its_deprecation
@pytest.mark.parametrize("kind", ["script", "trace", "trace inside gathered"])
def test_a_prepared_model_is_no_more_made_into_torchscript(workshop: Workshop, kind: str) -> None:
    pair = workshop.pair(tier="disk")
    x = batches(1)[0][0]
    shown = outsize.gathered(pair.model) if "inside" in kind else contextlib.nullcontext()
    with shown, pytest.raises(RuntimeError, match=r"give them a plain copy, copy\.deepcopy\(model\) inside"):
        torch.jit.script(pair.model) if kind == "script" else torch.jit.trace(pair.model, x)
    with outsize.gathered(pair.model):
        plain = copy.deepcopy(pair.model)
    assert torch.equal(torch.jit.trace(plain, x)(x), pair.model(x))
    pair.train(batches(2))


# -- what reads values without an operation ------------------------------------------------------------------------


class Unwrapped(Built, layers=lambda: nn.ModuleList([nn.Linear(16, 16) for _ in range(3)]), head=(16, 4)):
    """Sees its weight as a plain tensor."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(F.linear(x, layer.weight.as_subclass(Tensor), layer.bias))
        out: Tensor = self.head(x)
        return out


def test_as_subclass_keeps_the_guard(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(Unwrapped, tier=tier, activations="keep")
    pair.train(batches(4))
    if tier == "squeezed":
        with pytest.raises(RuntimeError, match="'as_subclass' needs its values"):
            pair.model.head.weight.as_subclass(Tensor)
        with outsize.gathered(pair.model), pytest.raises(TypeError, match="cannot be seen as Own"):
            pair.model.head.weight.as_subclass(type("Own", (Tensor,), {}))


def test_vmap_over_a_parameter_at_rest_says_what_to_do(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    with pytest.raises(RuntimeError, match=r"torch.vmap takes 'head.weight' apart .*pass a copy"):
        torch.vmap(lambda row: row.sum())(pair.model.head.weight)


def test_a_parameter_cannot_be_swapped_with_another_tensor(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match=r"'head.bias' is managed by outsize, so it cannot be swapped"):
        torch.utils.swap_tensors(pair.model.head.bias, nn.Parameter(torch.ones(4)))
    pair.train(batches(2))


def test_a_hook_on_several_gradients_needs_no_values_and_runs(pair: Pair) -> None:
    called = []
    for model, _ in pair.both:
        params = [model.head.weight, model.blocks[0].up.bias]
        handle = torch.autograd.graph.register_multi_grad_hook(params, lambda grads: called.append(len(grads)))
        squared_error(model, batches(1)[0]).backward()
        handle.remove()
    assert called == [2, 2]


def test_a_view_of_a_parameter_is_one_node_of_the_graph(pair: Pair) -> None:
    names = []
    for model, _ in pair.both:
        with outsize.gathered(model) if model is pair.model else torch.enable_grad():
            names.append(model.head.weight.t().grad_fn.next_functions[0][0].name())
    assert names[0] == names[1]


def test_a_backward_may_begin_at_a_view_of_a_parameter(pair: Pair) -> None:
    for model, _ in pair.both:
        with outsize.gathered(model) if model is pair.model else torch.enable_grad():
            weight = model.head.weight
            (found,) = torch.autograd.grad(weight.t(), weight, grad_outputs=weight.detach().t())
            assert torch.equal(found, weight.detach())


# -- two models ----------------------------------------------------------------------------------------------------


def test_parameters_of_two_models_meet_in_one_operation(workshop: Workshop, tier: str) -> None:
    student, teacher = workshop.pair(tier=tier), workshop.pair(tier=tier)
    for pair in (student, teacher):
        train(pair.plain, pair.plain_optimizer, batches(2 if pair is student else 1))
        train(pair.model, pair.optimizer, batches(2 if pair is student else 1))

    def average(to: nn.Module, of: nn.Module) -> None:
        with torch.no_grad():
            for one, other in zip(to.parameters(), of.parameters(), strict=True):
                one.lerp_(other, 0.1)

    average(teacher.plain, student.plain)
    with outsize.gathered(teacher.model, modify=True), outsize.gathered(student.model):
        average(teacher.model, student.model)
    teacher.check()


class Tied(nn.Module):
    """Uses weights of another model beside its own, in one operation."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.linspace(-1, 1, 64).view(4, 16))
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.own * self.others[0].head.weight).t()


def test_each_of_two_models_gets_its_weights_back_for_the_backward(workshop: Workshop, pair: Pair, tier: str) -> None:
    x, y = batches(1)[0]
    grads = []
    for other, _ in pair.both:
        model = Tied(other)
        if other is pair.model:
            workshop.prepare(model, adamw(model), tier)
        with outsize.gathered(other) if other is pair.model else torch.enable_grad():
            loss = (model(x) - y).square().mean()
        loss.backward()
        if other is pair.model:
            with outsize.gathered(model, grads=True), outsize.gathered(other.head, grads=True):
                grads.append((model.own.grad.clone(), other.head.weight.grad.clone()))
        else:
            grads.append((model.own.grad, other.head.weight.grad))
    for mine, theirs in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(mine, theirs)
