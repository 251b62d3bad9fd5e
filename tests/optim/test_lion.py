"""Lion without outsize: the published algorithm and torch's manners."""

from typing import Any

import pytest
import torch

from outsize.optim import Lion


def test_lion_follows_algorithm_2() -> None:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(50, dtype=torch.float64))
    weight, momentum = param.detach().clone(), torch.zeros(50, dtype=torch.float64)
    optimizer = Lion([param], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(20):
        grad = torch.randn(50, dtype=torch.float64)
        direction = (0.9 * momentum + 0.1 * grad).sign()
        weight = weight - 0.01 * (direction + 0.1 * weight)
        momentum = 0.99 * momentum + 0.01 * grad
        param.grad = grad
        optimizer.step()
    torch.testing.assert_close(param.detach(), weight)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], momentum)


def test_maximize_climbs_where_the_plain_step_descends() -> None:
    down, up = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    for param, maximize in ((down, False), (up, True)):
        param.grad = torch.tensor([1.0, -2.0, 0.0])
        Lion([param], lr=0.5, maximize=maximize).step()
    assert down.tolist() == [-0.5, 0.5, 0.0]
    assert up.tolist() == [0.5, -0.5, 0.0]


def test_the_state_round_trips_and_a_closure_is_run() -> None:
    def train(optimizer: Lion, param: torch.nn.Parameter) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (param - 3).square().sum()
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    param = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = Lion([param, torch.nn.Parameter(torch.ones(1))], lr=0.1)  # the second never has a gradient
    assert train(optimizer, param) == 36.0
    copy = torch.nn.Parameter(param.detach().clone())
    other = Lion([copy, torch.nn.Parameter(torch.ones(1))])
    other.load_state_dict(optimizer.state_dict())
    assert train(optimizer, param) == train(other, copy)
    assert torch.equal(param, copy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"betas": (1.0, 0.5)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.5, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lion([torch.nn.Parameter(torch.zeros(1))], **options)
