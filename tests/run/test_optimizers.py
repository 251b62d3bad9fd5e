"""Every optimizer that can run on streamed state trains as in torch; any other is refused with the reason."""

import copy
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import outsize
from outsize.checkpoint.files import DataReader
from outsize.checkpoint.manifest import sealed
from outsize.optim.choice import rule_for
from outsize.optim.rows import LazyAdamWRule, RowwiseAdagradRule
from outsize.optim.streamed import StreamedRule
from tests.api.checkpoint_runs import everything
from tests.comparing import assert_same, assert_same_runs, assert_same_state, exact_masters, weights
from tests.conftest import TIERS, Pair, Workshop, batches, squared_error, train
from tests.run.test_third_party import Plain
from tests.small_models import Stack

OPTIM = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: OPTIM.AdamW(params, lr=1e-2),
    "AdamW amsgrad": lambda params: OPTIM.AdamW(params, lr=1e-2, amsgrad=True),
    "AdamW maximize": lambda params: OPTIM.AdamW(params, lr=1e-3, maximize=True),
    "AdamW tensor lr": lambda params: OPTIM.AdamW(params, lr=torch.tensor(1e-2), foreach=False),
    "AdamW fused": lambda params: OPTIM.AdamW(params, lr=1e-2, fused=True),
    "Adam": lambda params: OPTIM.Adam(params, lr=1e-2),
    "Adam decay": lambda params: OPTIM.Adam(params, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "Adadelta": lambda params: OPTIM.Adadelta(params, lr=0.5, weight_decay=0.01),
    "Adagrad": lambda params: OPTIM.Adagrad(params, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.5),
    "Adamax": lambda params: OPTIM.Adamax(params, lr=1e-2, weight_decay=0.01),
    "ASGD": lambda params: OPTIM.ASGD(params, lr=1e-2, t0=2),
    "NAdam": lambda params: OPTIM.NAdam(params, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.01),
    "RAdam": lambda params: OPTIM.RAdam(params, lr=1e-2),
    "RMSprop": lambda params: OPTIM.RMSprop(params, lr=1e-3, centered=True, momentum=0.9),
    "Rprop": lambda params: OPTIM.Rprop(params, lr=1e-3),
    "SGD": lambda params: OPTIM.SGD(params, lr=0.1),
    "SGD momentum": lambda params: OPTIM.SGD(params, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov": lambda params: OPTIM.SGD(params, lr=0.1, momentum=0.9, nesterov=True, maximize=False),
}


class Lion(Plain):
    """A third-party optimizer (Chen et al. 2023) with its own state name and no regard for outsize."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-3, betas=(0.9, 0.99))

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        state = self.state[param]
        if not state:
            state.update(momentum=torch.zeros_like(param), count=0)
        state["count"] += 1
        beta1, beta2 = group["betas"]
        direction = state["momentum"].mul(beta1).add(grad, alpha=1 - beta1).sign_()
        state["momentum"].mul_(beta2).add_(grad, alpha=1 - beta2)
        return direction / state["count"]


class Layerwise(Plain):
    """Scales each parameter's step by the parameter's norm, as LAMB and LARS do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return grad * param.norm() / grad.norm().clamp(min=1e-6)


class Trusting(Layerwise):
    """With a momentum, too, if the group has one."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group, param in self.stepped():
            if group.get("momentum"):
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                param.grad = momentum.mul_(group["momentum"]).add_(param.grad).clone()
        super().step()


class Sometimes(Plain):
    """Plain descent, by the unit vector of the gradient where the group trusts it."""

    elementwise = True  # as long as no group does

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, trust=False)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step()

    def direction(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        return grad / grad.norm() if group["trust"] else grad


class Lamb(Plain):
    """LAMB (You et al. 2020): Adam's direction, scaled by the norms of the parameter and of the direction."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, betas=(0.9, 0.999))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group, param in self.stepped():
            beta1, beta2 = group["betas"]
            state = self.state[param]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
            state["step"] += 1
            state["exp_avg"].mul_(beta1).add_(param.grad, alpha=1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
            update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)
            trust = param.norm() / update.norm().clamp(min=1e-6)
            param.data = param.data - group["lr"] * trust * update  # as much third-party code has it


OPTIMIZERS["Lion of a third party"] = lambda params: Lion(params)
OPTIMIZERS["Lion"] = lambda params: outsize.optim.Lion(params, weight_decay=0.1)


@pytest.mark.parametrize(
    ("name", "tier"), [(name, "squeezed") for name in OPTIMIZERS] + [(name, "device") for name in [*OPTIMIZERS][::2]]
)
def test_it_trains_as_in_torch(workshop: Workshop, tier: str, name: str) -> None:
    workshop.pair(lambda: Stack(depth=2), lambda model: OPTIMIZERS[name](model.parameters()), tier).train(
        batches(4), clip=1.0, rel=2e-6
    )


@pytest.mark.parametrize("name", ["SGD momentum", "Adagrad", "NAdam", "Rprop", "Lion of a third party"])
def test_its_state_reads_as_torch_would_show_it(workshop: Workshop, name: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: OPTIMIZERS[name](model.parameters()), "squeezed")
    pair.train(batches(3))
    assert_same_state(pair)


@pytest.mark.parametrize("name", ["SGD momentum", "Adagrad", "RMSprop", "ASGD"])
def test_its_existing_state_is_taken_over(workshop: Workshop, name: str) -> None:
    torch.manual_seed(0)
    plain = Stack(depth=2)
    optimizer = OPTIMIZERS[name](plain.parameters())
    train(plain, optimizer, batches(3))
    model = copy.deepcopy(plain)
    again = OPTIMIZERS[name](model.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    workshop.prepare(model, again, "squeezed")
    expected = train(plain, optimizer, batches(4))
    train(model, again, batches(4)).close_to(expected)


@pytest.mark.parametrize("name", ["Adagrad", "SGD momentum", "Lion of a third party"])
def test_bf16_weights_keep_exact_masters(workshop: Workshop, name: str) -> None:
    """Steps far below bf16's resolution add up."""

    def ones() -> nn.Module:
        model = nn.Linear(16, 16, bias=False)
        nn.init.ones_(model.weight)
        return model

    def slow(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[name](model.parameters())
        optimizer.param_groups[0]["lr"] = 1e-5
        return optimizer

    pair = workshop.pair(ones, slow, "disk", compute_dtype=torch.bfloat16)
    for _ in range(3):
        for model, optimizer in pair.both:
            model.weight.grad = torch.ones(16, 16, dtype=model.weight.dtype)
            optimizer.step()
    master = exact_masters(pair.model)["weight"]
    torch.testing.assert_close(master, pair.plain.weight.data, rtol=0, atol=1e-7)
    assert not torch.equal(master, torch.ones(16, 16))


def test_fp64_parameters_have_fp64_state(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2).double(), tier=tier)
    pair.train([(x.double(), y.double()) for x, y in batches(4)], clip=1.0, rel=1e-12, atol=1e-12)


def test_groups_of_one_optimizer_may_differ_in_momentum(workshop: Workshop) -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        return torch.optim.SGD(
            [{"params": params[:3], "momentum": 0.9}, {"params": params[3:], "momentum": 0.0, "lr": 0.05}], lr=0.1
        )

    workshop.pair(lambda: Stack(depth=2), grouped, "squeezed").train(batches(4))


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda params: OPTIM.Adafactor(params, lr=1e-2),
    "Layerwise": lambda params: Layerwise(params),
    "LAMB of a third party": lambda params: Lamb(params),
}
if hasattr(optim, "Muon"):
    WHOLE["Muon"] = lambda params: OPTIM.Muon([param for param in params if param.ndim == 2], lr=1e-2, ns_steps=2)


@pytest.mark.parametrize("name", WHOLE)
def test_one_that_needs_whole_parameters_gets_them(workshop: Workshop, tier: str, name: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2), lambda model: WHOLE[name](model.parameters()), tier)
    pair.train(batches(3), clip=1.0, rel=2e-6)
    assert_same_state(pair)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_parameters_of_bf16_have_exact_masters_and_the_same_bits_on_every_tier(
    workshop: Workshop, name: str
) -> None:
    found = []
    for tier in ("device", "host", "disk", "squeezed"):
        torch.manual_seed(0)
        model = Stack(depth=2)
        optimizer = WHOLE[name](model.parameters())
        workshop.prepare(model, optimizer, tier, compute_dtype=torch.bfloat16)
        trace = train(model, optimizer, [(x.bfloat16(), y.bfloat16()) for x, y in batches(3)], clip=1.0)
        found.append((trace.losses, weights(model)))
    assert_same_runs(found)


def test_a_parameter_larger_than_the_staging_arena_is_updated_whole(workshop: Workshop) -> None:
    workshop.pair(wide, adafactor, "disk", host_memory="2MiB").train(batches(3))


def wide() -> nn.Module:
    """Matrices and vectors whose factored moments are too large for a manifest."""
    return nn.Sequential(nn.Linear(16, 3000), nn.Tanh(), nn.Linear(3000, 4))


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIM.Adafactor(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("build", [Stack, wide])
def test_factored_state_survives_a_checkpoint_on_another_tier(
    workshop: Workshop, tier: str, build: Callable[[], nn.Module]
) -> None:
    pair = workshop.pair(build, adafactor, "disk")
    pair.train(batches(3))
    outsize.save(workshop.disk.parent / "ckpt", pair.model, pair.optimizer)
    again = workshop.pair(build, adafactor, tier)
    outsize.load(workshop.disk.parent / "ckpt", again.model, again.optimizer)
    expected = train(pair.model, pair.optimizer, batches(3))
    assert train(again.model, again.optimizer, batches(3)).losses == expected.losses
    assert_same(everything(again.model, again.optimizer), everything(pair.model, pair.optimizer))


def test_numpy_reads_large_factored_state(workshop: Workshop) -> None:
    numpy_reader = pytest.importorskip("tests.api.numpy_reader")
    pair = workshop.pair(wide, adafactor, "disk")
    pair.train(batches(1))
    folder = workshop.disk.parent / "ckpt"
    outsize.save(folder, pair.model, pair.optimizer)
    records = json.loads((folder / "manifest.json").read_text())["parameters"]
    state = pair.optimizer.state_dict()["state"]
    for at, key in ((0, "row_var"), (1, "variance"), (2, "col_var")):
        region = list(records.values())[at]["scalars"][key]["$tensor"]
        assert region["file"] == "model.bin"
        assert torch.equal(torch.from_numpy(numpy_reader.array(folder, region)), state[at][key])


@pytest.mark.parametrize("damage", ["shared", "outside"])
def test_large_factored_state_that_cannot_be_is_refused_before_it_is_read(
    workshop: Workshop, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = workshop.pair(wide, adafactor, "disk")
    pair.train(batches(1))
    folder = workshop.disk.parent / "ckpt"
    outsize.save(folder, pair.model, pair.optimizer)
    content = json.loads((folder / "manifest.json").read_text())
    region = content["parameters"]["0.weight"]["scalars"]["row_var"]["$tensor"]
    if damage == "outside":
        region["offset"] = content["files"]["model.bin"]["bytes"] - 64
    else:
        scalars = content["parameters"]["0.bias"]["scalars"]
        scalars.update({f"more {at}": {"$tensor": region} for at in range(20)})
    (folder / "manifest.json").write_text(sealed(json.dumps(content)))
    read: list[int] = []

    def counted(self: DataReader, region: Any, start: int = 0, end: int | None = None) -> Tensor:
        read.append(region.numel * region.dtype.itemsize)
        return original(self, region, start, end)

    original = DataReader.read
    monkeypatch.setattr(DataReader, "read", counted)
    before = weights(pair.model)
    reason = "lies outside of" if damage == "outside" else "more bytes than the files"
    with pytest.raises(ValueError, match=f"damaged.*{reason}"):
        outsize.load(folder, pair.model, pair.optimizer)
    assert sum(read) <= 2 * content["files"]["model.bin"]["bytes"]  # the generators' states lie there too
    assert_same(weights(pair.model), before)
    pair.train(batches(1))


# -- options that come after prepare ---------------------------------------------------------------------------------


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIM.RMSprop(model.blocks.parameters(), lr=1e-3)  # type: ignore[union-attr]


def by_group(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.add_param_group({"params": model.head.parameters(), "momentum": 0.9})  # type: ignore[union-attr, dict-item]


def option(**values: Any) -> Callable[[torch.optim.Optimizer, nn.Module], None]:
    return lambda optimizer, _: optimizer.param_groups[0].update(values)


NEW_ARRAY = "set the option .*"
LATER: dict[str, tuple[Any, Callable[[torch.optim.Optimizer, nn.Module], object], str]] = {
    "SGD momentum": (lambda model: OPTIM.SGD(model.parameters(), lr=0.1), option(momentum=0.9), NEW_ARRAY),
    "AdamW amsgrad": (lambda model: OPTIM.AdamW(model.parameters(), lr=0.1), option(amsgrad=True), NEW_ARRAY),
    "momentum": (rmsprop, option(momentum=0.9), NEW_ARRAY),
    "centered": (rmsprop, option(centered=True), NEW_ARRAY),
    "OneCycleLR": (rmsprop, lambda optimizer, _: optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 10), NEW_ARRAY),
    "add_param_group": (rmsprop, by_group, NEW_ARRAY),
    "trust": (lambda model: Sometimes(model.parameters()), option(trust=True), "Sometimes needs whole parameters.*"),
}


@pytest.mark.parametrize("how", LATER)
def test_an_option_that_cannot_be_served_is_refused_before_anything_changes(
    workshop: Workshop, tier: str, how: str
) -> None:
    make, change, reason = LATER[how]
    pair = workshop.pair(optimizer=make, tier=tier)
    pair.train(batches(1))
    before, options = weights(pair.model), {**pair.optimizer.param_groups[0]}
    change(pair.optimizer, pair.model)
    squared_error(pair.model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match=f"{reason} before prepare. Nothing was updated"):
        pair.optimizer.step()
    assert_same(weights(pair.model), before)
    pair.optimizer.zero_grad()
    del pair.optimizer.param_groups[1:]
    pair.optimizer.param_groups[0].update(options)
    pair.plain_optimizer.zero_grad()
    pair.train(batches(2))


def test_options_that_change_every_step_are_not_tried_again(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = workshop.pair(optimizer=lambda model: OPTIM.NAdam(model.parameters(), lr=1e-3), tier="host")
    schedules = [optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 12) for _, optimizer in pair.both]
    tried = []
    original = StreamedRule._try_out
    monkeypatch.setattr(StreamedRule, "_try_out", lambda *args: tried.append(args) or original(*args))
    for _ in range(10):
        for (model, optimizer), schedule in zip(pair.both, schedules, strict=True):
            train(model, optimizer, batches(1), scheduler=schedule)
    pair.check()
    assert len(tried) == 1  # the scheduler put options of its own beside the optimizer's


def test_a_whole_parameter_optimizer_may_begin_to_keep_another_array(workshop: Workshop) -> None:
    pair = workshop.pair(optimizer=lambda model: Trusting(model.parameters()), tier="disk")
    pair.train(batches(2))
    for _, optimizer in pair.both:
        optimizer.param_groups[0]["momentum"] = 0.9
    pair.train(batches(3))


def test_a_load_takes_the_place_of_a_state_that_was_replaced(workshop: Workshop, tmp_path: Path) -> None:
    pair = workshop.pair(tier="host")
    pair.train(batches(2))
    outsize.save(tmp_path / "two", pair.model, pair.optimizer).wait()
    pair.optimizer.state = defaultdict(dict)
    outsize.load(tmp_path / "two", pair.model, pair.optimizer)
    pair.train(batches(2))


def test_a_state_that_was_replaced_is_what_is_saved(workshop: Workshop, tmp_path: Path) -> None:
    pair = workshop.pair(tier="host")
    pair.train(batches(2))
    for _, optimizer in pair.both:
        optimizer.state = defaultdict(dict)
    outsize.save(tmp_path / "none", pair.model, pair.optimizer).wait()
    pair.train(batches(1))
    assert len(pair.optimizer.state)
    outsize.load(tmp_path / "none", pair.model, pair.optimizer)
    assert not len(pair.optimizer.state)


def test_an_entry_takes_what_it_holds_already(pair: Pair) -> None:
    pair.train(batches(1))
    for state in pair.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.to("cpu").clone()  # as scripts do when they resume
    pair.train(batches(1))


def test_dense_parameters_of_row_wise_adagrad_move_as_with_adagrad(workshop: Workshop) -> None:
    options = {"weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "maximize": True}

    def rowwise(model: nn.Module) -> torch.optim.Optimizer:
        return outsize.optim.RowwiseAdagrad([{"params": model.parameters(), **options}], lr=1e-3)

    pair = workshop.pair(optimizer=rowwise, tier="disk")
    other = copy.deepcopy(pair.plain)
    pair.train(batches(3))
    train(other, optim.Adagrad(other.parameters(), lr=1e-3, eps=1e-8, **options), batches(3))  # type: ignore[arg-type]
    for mine, theirs in zip(pair.plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


# -- the table in the documentation ----------------------------------------------------------------------------------


def table_of_optimizers() -> str:
    """What `docs/optimizers.md` says, found out by trying every optimizer of this version of torch."""
    lines = ['| optimizer | how it runs | `state_format="compact"` |', "|---|---|---|"]
    for name in sorted(name for name in dir(optim) if name[0].isupper() and name != "Optimizer"):
        params = [nn.Parameter(torch.zeros(4, 6))]
        options = {"momentum": 0.9} if name == "SGD" else {}
        lines.append(f"| `torch.optim.{name}` | {_how(getattr(optim, name)(params, **options))} |")
    for kind in (outsize.optim.Lion, outsize.optim.LazyAdamW, outsize.optim.RowwiseAdagrad):
        lines.append(f"| `outsize.optim.{kind.__name__}` | {_how(kind([nn.Parameter(torch.zeros(4, 6))]))} |")
    return "\n".join(lines)


def _how(optimizer: torch.optim.Optimizer) -> str:
    try:
        rule = rule_for(optimizer)
    except ValueError as error:
        reason = str(error).split("(", 1)[1].split("), so it")[0]
        return f"refused: {reason} | "
    if rule.only_rows:
        return "on the rows of tables | "
    compact = "yes" if rule.arrays and not set(rule.arrays) - set(rule.codes) else ""
    if isinstance(rule, (LazyAdamWRule, RowwiseAdagradRule)):
        return f"native kernel, one pass; on the rows of tables | {compact}"
    if not isinstance(rule, StreamedRule):
        return f"native kernel, one pass | {compact}"
    return f"its own `step()` on {'whole parameters' if rule.whole else 'pieces'} | {compact}"


def test_the_table_in_the_documentation_is_true() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    missing = [line for line in table_of_optimizers().splitlines() if line not in page]
    assert not missing, "write these lines into docs/optimizers.md:\n" + "\n".join(missing)


def reset(optimizer: torch.optim.Optimizer, how: str) -> None:
    """The ways in which users let Adam begin anew."""
    if how == "replace":
        optimizer.state = defaultdict(dict)
    elif how == "clear":
        optimizer.state.clear()
    else:
        for param in list(optimizer.state):
            del optimizer.state[param]


@pytest.mark.parametrize(
    ("tier", "how", "update"),
    [
        (tier, how, ("fetch", "backward")[(row // 2 + column) % 2])
        for row, tier in enumerate(TIERS)
        for column, how in enumerate(["replace", "clear", "delete"])
        if (row + column) % 2 == 0
    ],
)
def test_a_reset_of_the_state_begins_anew_as_in_torch(workshop: Workshop, tier: str, how: str, update: str) -> None:
    pair = workshop.pair(tier=tier, update=update)
    pair.train(batches(2))
    for _, optimizer in pair.both:
        reset(optimizer, how)
    pair.train(batches(3))
    entry = pair.optimizer.state[pair.model.head.weight]
    assert entry["step"] == 3
    torch.testing.assert_close(entry["exp_avg"], pair.plain_optimizer.state[pair.plain.head.weight]["exp_avg"])


def test_entries_of_a_state_that_replaces_the_optimizers_own_are_taken_over(pair: Pair) -> None:
    pair.train(batches(4))
    for model, optimizer in pair.both:
        kept = {key: value.clone() for key, value in optimizer.state[model.head.weight].items()}
        optimizer.state = defaultdict(dict, {model.head.weight: kept})
    pair.train(batches(3))


def test_a_state_of_other_parameters_in_place_of_the_optimizers_own_is_refused(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    pair.train(batches(2))
    squared_error(pair.model, batches(1)[0]).backward()
    pair.optimizer.state = {nn.Parameter(torch.ones(3)): {"step": 1}}
    with pytest.raises(ValueError, match="an entry for .*, which is no parameter of the model"):
        pair.optimizer.step()
