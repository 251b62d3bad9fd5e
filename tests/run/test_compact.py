"""8-bit moments: the same bits on every tier, close to the exact ones, and through checkpoints in both directions."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import outsize
from tests.comparing import assert_same, weights
from tests.conftest import AT_REST_TIERS, Workshop, batches, prepared, train
from tests.small_models import Stack, linears

SQUARE = partial(linears, 256, 4, bias=False)
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "Lion": lambda params: outsize.optim.Lion(params, lr=1e-3),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return Stack(width=24, hidden=130, depth=2)  # sizes that are no multiples of a block


def cast(data: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(dtype), y.to(dtype)) for x, y in data]


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_tier_gives_the_same_bits(
    workshop: Workshop, request: pytest.FixtureRequest, name: str, turn: int
) -> None:
    """Each optimizer in each dtype, and on the first tier and another one: a different one for each dtype. With
    `--every-tier`: on all."""
    found = []
    dtype = (torch.float32, torch.bfloat16, torch.float16)[turn]
    first, *others = workshop.exact_tiers
    if not request.config.getoption("--every-tier"):
        others = [others[(turn + [*OPTIMIZERS].index(name)) % len(others)]]
    for tier in (first, *others):
        model = build()
        optimizer = OPTIMIZERS[name](model.parameters())
        workshop.prepare(model, optimizer, tier, state_format="compact", compute_dtype=dtype)
        trace = train(model, optimizer, cast(batches(3, width=24), dtype), clip=1.0)
        state = copy.deepcopy(optimizer.state_dict()["state"])
        found.append((trace.losses, weights(model), state))
    for losses, values, state in found[1:]:
        assert losses == found[0][0]
        assert_same(values, found[0][1])
        for index, entry in found[0][2].items():
            for key, value in entry.items():
                assert torch.equal(torch.as_tensor(state[index][key]), torch.as_tensor(value))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_nearly_as_the_exact_state_does(workshop: Workshop, name: str) -> None:
    losses = []
    for state_format in ("exact", "compact"):
        model = build()
        optimizer = OPTIMIZERS[name](model.parameters())
        workshop.prepare(model, optimizer, "host", state_format=state_format)
        losses.append(train(model, optimizer, batches(4, width=24) * 10).losses)
    exact, compact = losses
    assert compact != exact
    assert compact[-1] == pytest.approx(exact[-1], rel=0.03)
    assert compact[-1] < compact[0] * 0.95


def test_it_takes_about_six_bytes_a_parameter(workshop: Workshop) -> None:
    model, _ = workshop.made(SQUARE, tier="host", state_format="compact", compute_dtype=torch.bfloat16)
    now = outsize.memory(model).now
    numel = sum(param.numel() for param in model.parameters())
    assert (now["host/params"] + now["host/states"]) / numel == pytest.approx(6.125, rel=0.001)
    assert outsize.memory(model).state_bytes / numel == pytest.approx(6.125 + 2, rel=0.001)


def test_the_disk_moves_the_codes_and_no_more(workshop: Workshop) -> None:
    model, optimizer = workshop.made(SQUARE, state_format="compact", grads="host", units=nn.Linear)
    numel = sum(param.numel() for param in model.parameters())
    data = [(torch.randn(4, 256), torch.randn(4, 256))]
    train(model, optimizer, data)
    workshop.settle(model)
    prepared(model).engine.streamer.drop_idle()
    before = outsize.memory(model)
    train(model, optimizer, data)
    workshop.settle(model)
    after = outsize.memory(model)
    moved = (4 + 2.125) * numel
    assert after.bytes_written - before.bytes_written == pytest.approx(moved, rel=0.001)
    assert after.bytes_read - before.bytes_read <= (moved + 4 * numel) * 1.001  # and a fetch for the forward


@pytest.mark.parametrize("tier", AT_REST_TIERS)
def test_the_state_reads_as_values_and_can_be_set(workshop: Workshop, tier: str) -> None:
    model, optimizer = workshop.made(build, tier=tier, state_format="compact")
    train(model, optimizer, batches(3, width=24))
    param = model.blocks[1].up.weight  # type: ignore[union-attr]
    entry = optimizer.state[param]  # type: ignore[index]
    assert entry["exp_avg"].shape == param.shape
    assert entry["exp_avg"].dtype is torch.float32
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = optimizer.state[param]  # type: ignore[index]
    assert torch.equal(again["exp_avg"], entry["exp_avg"])
    assert torch.equal(again["exp_avg_sq"], entry["exp_avg_sq"])


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_resumed_run_goes_on_bit_for_bit(workshop: Workshop, tier: str) -> None:
    model, optimizer = workshop.made(build, tier=tier, state_format="compact", compute_dtype=torch.bfloat16)
    data = cast(batches(6, width=24), torch.bfloat16)
    train(model, optimizer, data[:3])
    outsize.save(workshop.disk.parent / "ckpt", model, optimizer)
    expected = train(model, optimizer, data[3:]).losses
    other = build()
    again = torch.optim.AdamW(other.parameters(), lr=1e-2)
    workshop.prepare(
        other, again, "disk" if tier == "host" else "host", state_format="compact", compute_dtype=torch.bfloat16
    )
    outsize.load(workshop.disk.parent / "ckpt", other, again)
    assert train(other, again, data[3:]).losses == expected
    assert_same(weights(model), weights(other))


@pytest.mark.parametrize(("first", "second"), [("exact", "compact"), ("compact", "exact")])
def test_the_format_may_change_when_a_checkpoint_is_loaded(workshop: Workshop, first: str, second: str) -> None:
    model, optimizer = workshop.made(build, state_format=first)
    train(model, optimizer, batches(5, width=24))
    outsize.save(workshop.disk.parent / "ckpt", model, optimizer)
    other = build()
    again = torch.optim.AdamW(other.parameters(), lr=1e-2)
    workshop.prepare(other, again, "squeezed", state_format=second)
    outsize.load(workshop.disk.parent / "ckpt", other, again)
    assert_same(weights(model), weights(other))
    expected = train(model, optimizer, batches(4, width=24)).losses
    assert train(other, again, batches(4, width=24)).losses == pytest.approx(expected, rel=0.02)


def test_existing_state_is_taken_over(workshop: Workshop) -> None:
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, optimizer, batches(3, width=24))
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    workshop.prepare(plain, optimizer, "disk", state_format="compact")
    for index, entry in optimizer.state_dict()["state"].items():
        largest = expected[index]["exp_avg"].abs().max()
        torch.testing.assert_close(
            entry["exp_avg"], expected[index]["exp_avg"].cpu(), rtol=0, atol=0.01 * largest.item()
        )


def test_float64_parameters_stay_exact(workshop: Workshop, tier: str) -> None:
    pair = workshop.pair(lambda: Stack(depth=2).double(), tier=tier, state_format="compact")
    pair.train(cast(batches(4), torch.float64), rel=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (lambda params: torch.optim.RMSprop(params), "its square_avg must stay exact"),
        (lambda params: torch.optim.SGD(params, lr=0.1), "it keeps no state for each element"),
    ],
)
def test_an_optimizer_without_a_compact_format_is_refused(workshop: Workshop, optimizer: object, reason: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=rf"state_format='compact' is not available for .*{reason}"):
        outsize.prepare(
            model,
            optimizer(model.parameters()),
            state_format="compact",
            **workshop.fields("disk"),  # type: ignore[operator]
        )
