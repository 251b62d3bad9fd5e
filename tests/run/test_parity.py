"""The promise that matters most: the same loop on a prepared model gives what plain torch gives."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from tests.comparing import (
    assert_same,
    assert_same_gradients,
    assert_same_runs,
    assert_same_state,
    exact_masters,
    weights,
)
from tests.conftest import KINDS, Pair, Workshop, adamw, batches, squared_error, train
from tests.small_models import Stack


@pytest.mark.slow
def test_twenty_clipped_steps_give_the_losses_norms_and_weights_of_torch(workshop: Workshop, tier: str) -> None:
    workshop.pair(tier=tier).train(batches(20), clip=0.5)


def test_all_mixtures_of_tiers_give_the_same_bits(workshop: Workshop) -> None:
    runs = []
    for places in itertools.product(("device", "host", "disk"), repeat=3):
        if "device" not in workshop.exact_tiers and places == ("device",) * 3:
            continue
        model, optimizer = workshop.made(lambda: Stack(depth=2), **dict(zip(KINDS, places, strict=True)))
        runs.append((train(model, optimizer, batches(3), clip=0.5), weights(model)))
    assert_same_runs(runs)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_made_before_or_after_prepare_sets_the_rate_of_its_own_step(
    workshop: Workshop, tier: str, when: str
) -> None:
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    pair = Pair(plain, adamw(plain), model, adamw(model))

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)

    theirs = schedule(pair.plain_optimizer)
    ours = schedule(pair.optimizer) if when == "before" else None
    workshop.prepare(model, pair.optimizer, tier)
    ours = ours or schedule(pair.optimizer)
    expected = train(plain, pair.plain_optimizer, batches(8), scheduler=theirs)
    train(model, pair.optimizer, batches(8), scheduler=ours).close_to(expected)
    pair.check()
    assert ours.get_last_lr() == theirs.get_last_lr()


def test_parameter_groups_keep_their_own_rates_decays_and_betas(workshop: Workshop, tier: str) -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [param for param in model.parameters() if param.ndim > 1]
        vectors = [param for param in model.parameters() if param.ndim <= 1]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.3, "betas": (0.8, 0.9)},
                {"params": vectors, "lr": 3e-2, "weight_decay": 0.0, "eps": 1e-6},
                {"params": []},
            ],
            lr=1e-2,
        )

    workshop.pair(optimizer=grouped, tier=tier).train(batches(6))


def test_frozen_parameters_do_not_move(workshop: Workshop, tier: str) -> None:
    def half_frozen() -> nn.Module:
        model = Stack()
        model.blocks[1].requires_grad_(False)  # a whole unit
        model.blocks[2].up.weight.requires_grad_(False)  # a part of one
        return model

    pair = workshop.pair(half_frozen, tier=tier)
    before = weights(pair.model)
    pair.train(batches(6), clip=0.5)
    after = weights(pair.model)
    for name in ("blocks.1.up.weight", "blocks.1.norm.bias", "blocks.2.up.weight"):
        assert torch.equal(before[name], after[name])
    assert not torch.equal(before["blocks.2.up.bias"], after["blocks.2.up.bias"])


def test_parameters_unfrozen_in_mid_run_start_to_train(workshop: Workshop, tier: str) -> None:
    def frozen() -> nn.Module:
        model = Stack()
        model.blocks[0].requires_grad_(False)
        model.blocks[1].down.weight.requires_grad_(False)
        return model

    pair = workshop.pair(frozen, tier=tier)
    pair.train(batches(3))
    for model, _ in pair.both:
        model.requires_grad_(True)
    pair.train(batches(4))


def test_parameters_frozen_in_mid_run_stop(pair: Pair) -> None:
    pair.train(batches(3))
    for model, _ in pair.both:
        model.blocks[2].requires_grad_(False)
        model.head.bias.requires_grad_(False)
    pair.train(batches(4))


def test_parameters_that_are_not_in_the_optimizer_get_gradients_and_stay(workshop: Workshop, tier: str) -> None:
    def heads_only(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.head.parameters(), lr=1e-2)

    pair = workshop.pair(optimizer=heads_only, tier=tier)
    before = weights(pair.model)
    pair.train(batches(4))
    after = weights(pair.model)
    assert torch.equal(before["blocks.0.up.weight"], after["blocks.0.up.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])


def test_a_model_without_an_optimizer_gives_outputs_and_gradients(workshop: Workshop, tier: str) -> None:
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    workshop.prepare(model, None, tier)
    for each in (plain, model):
        squared_error(each, batches(1)[0]).backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("loaded", ["before", "after"])
def test_a_state_dict_that_is_loaded_before_or_after_prepare_is_used(
    workshop: Workshop, tier: str, loaded: str
) -> None:
    torch.manual_seed(0)
    plain = Stack()
    optimizer = adamw(plain)
    train(plain, optimizer, batches(3))
    model = copy.deepcopy(plain)
    again = adamw(model)
    if loaded == "before":
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    workshop.prepare(model, again, tier)
    if loaded == "after":
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    Pair(plain, optimizer, model, again).train(batches(4), clip=0.5)


def test_gradients_that_exist_before_prepare_count_in_the_first_step(workshop: Workshop, tier: str) -> None:
    torch.manual_seed(0)
    plain = Stack()
    squared_error(plain, batches(1)[0]).backward()
    model = copy.deepcopy(plain)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        mine.grad = theirs.grad.clone()
    pair = Pair(plain, adamw(plain), model, adamw(model))
    workshop.prepare(model, pair.optimizer, tier)
    pair.train(batches(3), clip=0.5)


def test_the_optimizer_state_reads_as_torch_would_show_it(pair: Pair) -> None:
    pair.train(batches(3))
    assert pair.optimizer.state_dict()["param_groups"] == pair.plain_optimizer.state_dict()["param_groups"]
    assert_same_state(pair, rtol=1e-5, atol=1e-7)


def test_a_closure_given_to_step_is_run(pair: Pair) -> None:
    losses: dict[bool, list[float]] = {False: [], True: []}
    for ours, (model, optimizer) in enumerate(pair.both):
        for batch in batches(3):

            def closure(model: nn.Module = model, optimizer: Any = optimizer, batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = squared_error(model, batch)
                loss.backward()
                return loss

            losses[bool(ours)].append(float(optimizer.step(closure).detach()))
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)
    pair.check()


def test_prepare_returns_the_same_two_objects(workshop: Workshop) -> None:
    model = Stack()
    optimizer = adamw(model)
    params = list(model.parameters())
    assert outsize.prepare(model, optimizer, **workshop.fields("disk")) == (model, optimizer)
    workshop.watch(model)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert [tuple(p.shape) for p in params] == [tuple(p.shape) for p in Stack().parameters()]
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in params)


def rounded(master: Tensor) -> Tensor:
    """fp32 to bf16, to nearest, ties up."""
    bits = (master.view(torch.int32).to(torch.int64) + 0x8000) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)


def adamw_by_hand(master: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor], step: int) -> None:
    """torch's single-tensor AdamW, with a correctly rounded root (torch may take its own from MKL, which is not)."""
    exp_avg, exp_avg_sq = moments
    master.mul_(1 - 1e-2 * 0.1)
    exp_avg.lerp_(grad, 1 - 0.9)
    exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
    denominator = (exp_avg_sq.double().sqrt().float() / (1 - 0.999**step) ** 0.5).add_(1e-8)
    master.addcdiv_(exp_avg, denominator, value=-(1e-2 / (1 - 0.9**step)))


def train_with_masters(model: nn.Module, start: dict[str, Tensor], data: list[Any], clip: float) -> dict[str, Tensor]:
    """A bf16 model with fp32 masters kept by hand."""
    found = {name: value.clone() for name, value in start.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in start.items()}
    for step, batch in enumerate(data, 1):
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(rounded(found[name]))
        squared_error(model, batch).backward()
        grads = {name: param.grad.float() for name, param in model.named_parameters()}
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads.values()]))
        factor = float(torch.clamp(clip / (norm + 1e-6), max=1.0))
        for name, grad in grads.items():
            adamw_by_hand(found[name], grad * factor, moments[name], step)
        model.zero_grad()
    return found


@pytest.mark.slow
def test_bf16_weights_and_masters_are_those_of_masters_kept_by_hand_bit_for_bit(workshop: Workshop, tier: str) -> None:
    torch.manual_seed(0)
    model = Stack(depth=2)
    plain = copy.deepcopy(model).bfloat16()
    start = weights(model)
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(20)]
    expected = train_with_masters(plain, start, data, clip=0.5)
    optimizer = adamw(model)
    workshop.prepare(model, optimizer, tier, compute_dtype=torch.bfloat16)
    train(model, optimizer, data, clip=0.5)
    assert_same(weights(model), {name: rounded(value) for name, value in expected.items()})
    assert_same(exact_masters(model), expected)
