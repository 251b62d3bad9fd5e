"""Gradients at rest behave as the loop expects: accumulated, clipped, hooked, zeroed, read and replaced."""

import copy
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.run.grads import RestingGrad
from tests.comparing import assert_same, assert_same_gradients, gradients, weights
from tests.conftest import AT_REST_TIERS, Pair, Workshop, adamw, batches, prepared, squared_error, take_step, train
from tests.small_models import Built, Stack


def backward(pair: Pair, data: list[Any]) -> None:
    """One backward a batch on both models, nothing else."""
    for model, _ in pair.both:
        for batch in data:
            squared_error(model, batch).backward()


def test_gradients_accumulate_over_several_backwards(pair: Pair) -> None:
    for model, optimizer in pair.both:
        for start in range(0, 6, 3):
            for batch in batches(6)[start : start + 3]:
                (squared_error(model, batch) / 3).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


def test_accumulated_bf16_gradients_are_added_in_fp32(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier, compute_dtype=torch.bfloat16)
    single = copy.deepcopy(pair.plain).bfloat16()
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(3)]
    total: dict[str, Tensor] = {}
    for batch in data:
        squared_error(pair.model, batch).backward()
        squared_error(single, batch).backward()
        for name, param in single.named_parameters():
            grad = param.grad.float()
            total[name] = total[name] + grad if name in total else grad
        single.zero_grad()
    for name, param in pair.model.named_parameters():
        norm = torch.linalg.vector_norm(total[name])
        assert torch.nn.utils.get_total_norm([param.grad]).item() == pytest.approx(norm.item(), rel=1e-6)
    assert_same(gradients(pair.model), {name: value.bfloat16() for name, value in total.items()})
    pair.optimizer.step()
    state = pair.optimizer.state_dict()["state"]
    for index, value in enumerate(total.values()):  # the first exp_avg is a tenth of the gradient: its bits are fp32
        torch.testing.assert_close(state[index]["exp_avg"].to(value.device), value * (1 - 0.9), rtol=1e-6, atol=0)


def test_a_gradient_accumulates_onto_what_zero_grad_zeroed(pair: Pair) -> None:
    for _, optimizer in pair.both:
        backward(pair, batches(1))
        optimizer.zero_grad(set_to_none=False)
        assert all(param.grad is not None for group in optimizer.param_groups for param in group["params"])
    pair.plain_optimizer.zero_grad(set_to_none=False)
    backward(pair, batches(2))
    assert_same_gradients(pair.model, pair.plain)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_by_every_norm_is_that_of_torch(workshop: Workshop, tier: str, norm_type: float) -> None:
    clip = {1.0: 5.0, 2.0: 0.3, float("inf"): 0.02}[norm_type]
    workshop.pair(tier=tier).train(batches(4), clip=clip, norm_type=norm_type)


def test_clipping_by_value_is_that_of_torch(pair: Pair) -> None:
    for model, optimizer in pair.both:
        for batch in batches(4):
            squared_error(model, batch).backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


def test_operations_on_gradients_apply_in_their_order(pair: Pair) -> None:
    for model, _ in pair.both:
        squared_error(model, batches(1)[0]).backward()
        for param in model.parameters():
            param.grad.mul_(0.3)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.005)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        for param in model.parameters():
            param.grad.div_(3.0)
        squared_error(model, batches(2)[1]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
    assert_same_gradients(pair.model, pair.plain)
    for _, optimizer in pair.both:
        optimizer.step()
    pair.check()


def test_the_norm_of_one_gradient_is_known(pair: Pair) -> None:
    backward(pair, batches(1))
    norms = [[param.grad.norm().item() for param in model.parameters()] for model, _ in pair.both]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def test_error_if_nonfinite_of_clipping_works(pair: Pair) -> None:
    (squared_error(pair.model, batches(1)[0]) * float("nan")).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0, error_if_nonfinite=True)


def test_gradients_survive_zero_grad_after_the_step_that_uses_them(workshop: Workshop) -> None:
    """The update runs at the next fetch; what happens between must not reach it."""
    pair = workshop.pair(tier="squeezed")
    for model, optimizer in pair.both:
        squared_error(model, batches(1)[0]).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 1e9
            group["weight_decay"] = 1e9
        optimizer.zero_grad(set_to_none=False)
    pair.check()


def test_a_second_step_on_the_same_gradients_repeats_the_update(pair: Pair) -> None:
    backward(pair, batches(1))
    for _, optimizer in pair.both:
        optimizer.step()
        optimizer.step()
    pair.check()


def test_a_backward_between_step_and_zero_grad_accumulates(pair: Pair) -> None:
    for model, optimizer in pair.both:
        for batch in batches(3):
            squared_error(model, batch).backward()
            optimizer.step()  # and never zero_grad
    pair.check()
    assert_same_gradients(pair.model, pair.plain)


def test_tensor_hooks_change_the_gradient_that_is_used(pair: Pair) -> None:
    for model, _ in pair.both:
        model.blocks[1].up.weight.register_hook(lambda grad: grad * 3)
        model.head.bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    pair.train(batches(3), clip=1.0)


def test_a_post_accumulate_hook_that_returns_a_tensor_is_refused_as_torch_does(pair: Pair) -> None:
    for model in (pair.plain, pair.model):
        handle = model.head.weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))
        with pytest.raises(RuntimeError, match="post accumulate grad hooks should return None"):
            model(batches(1)[0][0]).sum().backward()
        handle.remove()


def test_post_accumulate_hooks_see_the_gradient(pair: Pair) -> None:
    seen: list[list[float]] = [[], []]
    for shown, (model, _) in zip(seen, pair.both, strict=True):

        def hook(param: Tensor, shown: list[float] = shown) -> None:
            shown.append(float(param.grad.abs().sum()))
            param.grad.mul_(0.5)

        model.blocks[2].down.weight.register_post_accumulate_grad_hook(hook)
    pair.train(batches(3), clip=1.0)
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


def test_what_a_hook_adds_to_a_gradient_that_is_complete_is_used(pair: Pair) -> None:
    hooks = []
    for model, _ in pair.both:

        def hook(param: Tensor, complete: Tensor = model.head.bias) -> None:
            complete.grad.add_(torch.full((4,), 0.5, device=param.device))

        hooks.append(model.blocks[0].up.weight.register_post_accumulate_grad_hook(hook))
    pair.train(batches(3), clip=1.0)
    for each in hooks:  # torch's collector does not look into them
        each.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("modify", "inside"), [(False, False), (False, True), (True, False)])
def test_looking_at_gradients_on_disk_loses_none_of_them(
    workshop: Workshop, modify: bool, inside: bool, dtype: torch.dtype
) -> None:
    """A backward after it, or inside, adds to all: also where they had left memory, and where one was looked at."""
    seen = []
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(3)]
    for tier in ("host", "disk"):
        torch.manual_seed(0)
        model = Stack()
        workshop.prepare(model, adamw(model), tier, compute_dtype=dtype)
        block: Any = model.blocks[1]
        for batch in data:
            squared_error(model, batch).backward()
            for each in prepared(model).engine.gradients:
                each.place.flush_and_drop()
            with outsize.gathered(block.up.weight, grads=True, modify=modify):
                block.up.weight.grad.norm()
            with outsize.gathered(model, grads=True, modify=modify):
                if inside:
                    squared_error(model, batch).backward(inputs=[model.head.weight, block.down.bias])
                else:
                    [param.grad.norm() for param in model.parameters()]
        seen.append(gradients(model))
    assert_same(seen[1], seen[0])


class Wide(
    Built,
    layers=lambda: nn.ModuleList(nn.ParameterList(torch.randn(600, 600) / 24 for _ in range(4)) for _ in range(2)),
):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for weight in layer:
                x = x @ weight
        return x


def test_gradients_that_are_on_disk_make_way_while_those_of_the_next_unit_come(workshop: Workshop) -> None:
    pair = workshop.pair(Wide, tier="disk", units=["layers.0", "layers.1"])
    first, second = prepared(pair.model).engine.parameters.units
    in_flight: list[int] = []
    arriving = list(pair.model.layers[0])[::-1]
    hooks: list[Callable[[Tensor], None]] = [
        lambda _: second.await_written(),
        lambda _: in_flight.append(outsize.memory(pair.model).now["host/grads in flight"]),
    ]
    handles = [param.register_post_accumulate_grad_hook(hook) for param, hook in zip(arriving[1:], hooks, strict=False)]
    pair.model(torch.randn(2, 600)).sum().backward()
    for handle in handles:
        handle.remove()
    assert in_flight == [first.nbytes]


def test_a_gradient_set_by_the_user_is_used(pair: Pair) -> None:
    for model, optimizer in pair.both:
        for param in model.parameters():
            param.grad = torch.full(param.shape, 0.25)
        optimizer.step()
        optimizer.zero_grad()
    pair.train(batches(2))


def test_a_gradient_removed_by_the_user_leaves_its_parameter_alone(pair: Pair) -> None:
    before = weights(pair.model)
    for model, optimizer in pair.both:
        for batch in batches(2):
            squared_error(model, batch).backward()
            model.head.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
    pair.check()
    assert torch.equal(weights(pair.model)["head.weight"], before["head.weight"])


def test_gradients_at_rest_take_no_memory_on_the_disk_tier(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    squared_error(pair.model, batches(1)[0]).backward()
    assert all(isinstance(param.grad, RestingGrad) for param in pair.model.parameters())
    prepared(pair.model).engine.streamer.room.make(1 << 30)
    assert outsize.memory(pair.model).now["host/grads in flight"] == 0
    squared_error(pair.plain, batches(1)[0]).backward()
    assert_same_gradients(pair.model, pair.plain)


MISUSES = {
    "in place, to another": lambda grad, other: operator.iadd(other, grad),
    "to another": lambda grad, other: other + grad,
    "another": lambda grad, other: grad + other,
    "itself": lambda grad, other: grad.add_(grad),
    "a multiple": lambda grad, other: grad.add_(other, alpha=2),
    "a number": lambda grad, other: grad.add_(1.0),
    "into it": lambda grad, other: torch.add(other, other, out=grad),
}


@pytest.mark.parametrize("tier", AT_REST_TIERS)
@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES.keys())
def test_adding_that_needs_the_values_is_refused_and_changes_nothing(
    pair: Pair, misuse: Callable[[Tensor, Tensor], Tensor]
) -> None:
    backward(pair, batches(1))
    other = torch.ones(4, 16)
    with pytest.raises(RuntimeError, match=r"'head\.weight' is at rest and aten\.add.* needs its values.*grads=True"):
        misuse(pair.model.head.weight.grad, other)
    assert torch.equal(other, torch.ones(4, 16))
    assert_same_gradients(pair.model, pair.plain)


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_a_hook_that_adds_the_gradient_to_another_is_refused(pair: Pair) -> None:
    backward(pair, batches(1))
    pair.model.head.weight.register_post_accumulate_grad_hook(lambda param: param.grad + torch.ones(4, 16))
    with pytest.raises(RuntimeError, match="needs its values"):
        squared_error(pair.model, batches(1)[0]).backward()


@pytest.mark.parametrize("shape", [(4, 16), (16,), ()])
def test_what_the_user_adds_in_place_is_part_of_the_gradient(pair: Pair, shape: tuple[int, ...]) -> None:
    backward(pair, batches(1))
    more = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for model, optimizer in pair.both:
        model.head.weight.grad += more
        model.blocks[0].up.bias.grad.zero_().add_(torch.ones(()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    assert_same_gradients(pair.model, pair.plain)
    pair.check()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_backwards_that_keep_their_graph_add_up(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(tier=tier, activations="keep")
    for model, _ in pair.both:
        for batch in batches(2):
            squared_error(model, batch).backward(create_graph=True)
    assert_same_gradients(pair.model, pair.plain)
    for model, _ in pair.both:
        model.zero_grad()  # of plain gradients: a parameter and the graph of its gradient hold each other


def test_gradients_are_added_to_others_inside_gathered(pair: Pair) -> None:
    total = torch.zeros(4, 16)
    for batch in batches(2):
        backward(pair, [batch])
        with outsize.gathered(pair.model.head.weight, grads=True):
            total += pair.model.head.weight.grad
        pair.optimizer.zero_grad()
    torch.testing.assert_close(total, pair.plain.head.weight.grad)


def test_retain_graph_and_two_backwards_add_up(pair: Pair) -> None:
    for model, optimizer in pair.both:
        for batch in batches(2):
            loss = squared_error(model, batch)
            loss.backward(retain_graph=True)
            take_step(loss, optimizer)
    pair.check()


def test_a_backward_through_a_graph_from_before_the_step_is_refused_as_in_torch(pair: Pair) -> None:
    for model, optimizer in pair.both:
        first, second = batches(2)
        squared_error(model, first).backward()
        stale = squared_error(model, second)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified"):
            stale.backward()
        optimizer.zero_grad()
        squared_error(model, second).backward()
        optimizer.step()
    pair.check()


class SideBySide(Built, layers=lambda: nn.ModuleList([nn.Linear(512, 512) for _ in range(6)])):
    """Layers whose weights no backward reads, as none of their inputs has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_gradients_that_come_while_updates_are_owed_leave_those_as_they_are(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(SideBySide, tier=tier)
    for model, optimizer in pair.both:
        for step in range(4):
            torch.manual_seed(step)
            out = model(torch.randn(8, 512))
            out.mean().backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            take_step(out.square().mean(), optimizer)
    pair.check()


def test_autograd_grad_gives_plain_tensors_and_leaves_param_grad_alone(pair: Pair) -> None:
    found = []
    for model, _ in pair.both:
        params = list(model.parameters())
        found.append(torch.autograd.grad(squared_error(model, batches(1)[0]), params))
        assert all(param.grad is None for param in params)
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


def test_autograd_grad_fills_in_zeros_for_unused_parameters(pair: Pair) -> None:
    out = pair.model.blocks[0](batches(1)[0][0]).sum()
    head, up = pair.model.head.weight, pair.model.blocks[0].up.weight
    grads = torch.autograd.grad(out, [head, up], retain_graph=True, materialize_grads=True)
    assert torch.equal(grads[0], torch.zeros(4, 16))
    assert grads[1].abs().sum() > 0
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(out, [head, up])


def test_backward_with_inputs_fills_only_their_gradients(pair: Pair) -> None:
    for model, optimizer in pair.both:
        for batch in batches(2):
            squared_error(model, batch).backward(inputs=[model.head.weight, model.blocks[1].up.bias])
            assert model.head.bias.grad is None
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


def test_the_gradient_of_the_input_is_that_of_torch(pair: Pair) -> None:
    found = []
    for model, _ in pair.both:
        x, y = batches(1)[0]
        x = x.clone().requires_grad_()
        squared_error(model, (x, y)).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-8)


def penalized(model: nn.Module, batch: Any) -> Tensor:
    """A loss with the gradient of the input in it (WGAN-GP)."""
    x, y = batch
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - y).square().mean() + slope.square().mean()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_gradient_penalty_trains_as_in_torch(workshop: Workshop, tier: str, activations: str) -> None:
    workshop.pair(tier=tier, activations=activations).train(batches(3), loss_of=penalized)


def parameter_penalized(model: nn.Module, batch: Any) -> Tensor:
    """A loss with the gradients of the parameters in it (MAML and the like)."""
    loss = squared_error(model, batch)
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(slope.square().sum() for slope in slopes)


def test_a_penalty_on_parameter_gradients_trains_as_in_torch(workshop: Workshop, tier: str) -> None:
    workshop.pair(tier=tier, activations="keep").train(batches(3), loss_of=parameter_penalized)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("constant", [False, True], ids=["", "some have no graph"])
def test_a_penalty_on_gradients_that_a_backward_left_trains_as_in_torch(
    workshop: Workshop, tier: str, activations: str, constant: bool
) -> None:
    pair = workshop.pair(tier=tier, activations=activations)
    for model, optimizer in pair.both:
        for batch in batches(3):
            loss = model(batch[0]).mean() if constant else squared_error(model, batch)
            loss.backward(create_graph=True)
            sum(param.grad.square().sum() for param in model.parameters() if param.grad is not None).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


class Descends(nn.Module):
    """Its forward asks for a gradient, of its input or of its weight."""

    def __init__(self, of_weight: bool) -> None:
        super().__init__()
        self.lin, self.out, self.of_weight = nn.Linear(16, 16), nn.Linear(16, 16), of_weight

    def forward(self, x: Tensor) -> Tensor:
        energy = (nn.functional.dropout(torch.tanh(self.lin(x)), 0.2) * x).square().mean()
        (slope,) = torch.autograd.grad(energy, self.lin.weight if self.of_weight else x, create_graph=True)
        return x + self.out(x @ slope if self.of_weight else x - slope)


@pytest.mark.parametrize("of_weight", [False, True])
@pytest.mark.parametrize("activations", ["keep", "recompute", "selective", "offload", "auto"])
def test_a_layer_that_asks_for_a_gradient_in_its_forward_trains_as_in_torch(
    workshop: Workshop, activations: str, of_weight: bool
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), *(Descends(of_weight) for _ in range(3)), nn.Linear(16, 4))

    workshop.pair(build, activations=activations).train(batches(3))


def test_a_forward_inside_gathered_trains_as_any_other(pair: Pair) -> None:
    for model, optimizer in pair.both:
        for batch in batches(3):
            with outsize.gathered(model) if model is pair.model else nullcontext():
                squared_error(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


def test_a_penalty_on_weights_read_inside_gathered_reaches_them(pair: Pair) -> None:
    for model, optimizer in pair.both:
        for batch in batches(2):
            loss = squared_error(model, batch)
            with outsize.gathered(model.head) if model is pair.model else nullcontext():
                (loss + model.head.weight.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


def test_frozen_then_clipped_gradients_are_those_of_the_rest(workshop: Workshop, tier: str) -> None:
    def frozen() -> nn.Module:
        model = Stack()
        model.blocks[0].requires_grad_(False)
        return model

    pair = workshop.pair(frozen, tier=tier)
    trace = train(pair.model, pair.optimizer, batches(2), clip=0.1)
    trace.close_to(train(pair.plain, pair.plain_optimizer, batches(2), clip=0.1))
    assert pair.model.blocks[0].up.weight.grad is None


def test_an_optimizer_step_by_hand_needs_no_gradient_of_unused_units(workshop: Workshop, tier: str) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return model.blocks[1](batch[0]).square().mean()

    pair = workshop.pair(optimizer=adamw, tier=tier)
    pair.train(batches(3), loss_of=loss_of, clip=0.1)


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_values_put_into_the_data_of_a_gradient_at_rest_are_refused_with_the_remedy(pair: Pair) -> None:
    backward(pair, batches(1))
    grad = pair.model.head.weight.grad
    with pytest.raises(RuntimeError, match=r"'head.weight' .* would be lost: .*gathered\(param, grads=True, modify"):
        grad.data = torch.zeros(4, 16)
    grad.data = grad.data
    for model, optimizer in pair.both:
        for param in model.parameters():
            param.grad.data.mul_(0.5)
        optimizer.step()
    pair.check()


class Branches(Built, block=lambda: nn.ModuleDict({"q": nn.Linear(16, 16), "k": nn.Linear(16, 16)}), head=(16, 4)):
    """Two layers of one shape in one unit."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block["q"](x)) * torch.sigmoid(self.block["k"](x)))


@pytest.mark.parametrize("tier", AT_REST_TIERS)
@pytest.mark.parametrize("how", ["same", "swap"])
@pytest.mark.parametrize("units", [["block", "head"], [nn.Linear]], ids=["one unit", "two units"])
def test_the_gradient_at_rest_of_another_parameter_is_refused_by_name(
    workshop: Workshop, tier: str, how: str, units: Any
) -> None:
    pair = workshop.pair(Branches, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), tier, units=units)
    backward(pair, batches(1))
    q, k = pair.model.block["q"].weight, pair.model.block["k"].weight
    before = q.grad, k.grad
    k.grad, q.grad = (q.grad, k.grad) if how == "swap" else (q.grad, q.grad)
    with pytest.raises(RuntimeError, match=r"'block\.[qk]\.weight' was made the gradient of 'block\.[kq]\.weight'"):
        pair.optimizer.step()
    q.grad, k.grad = before
    with outsize.gathered([q, k], grads=True, modify=True):
        k.grad.copy_(q.grad)
    pair.plain.block["k"].weight.grad.copy_(pair.plain.block["q"].weight.grad)
    for _, optimizer in pair.both:
        optimizer.step()
        optimizer.zero_grad()
    pair.train(batches(2))


def test_a_step_writes_what_belongs_to_trainable_parameters_alone(workshop: Workshop) -> None:
    """An adapter inside a unit of frozen weights: gradient, two moments and weight of one page of elements."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 4))
        model.requires_grad_(False)[2].requires_grad_(True)
        return model

    pair = workshop.pair(
        build, lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), units=["Sequential"]
    )
    data = [(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(4)]
    pair.train(data[:1])
    workshop.settle(pair.model)
    before = outsize.memory(pair.model).bytes_written
    pair.train(data[1:])
    workshop.settle(pair.model)
    assert outsize.memory(pair.model).bytes_written - before == 3 * 4 * (4096 * 4)
