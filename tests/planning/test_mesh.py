"""Plans of jobs with data, tensor and pipeline parallelism. Oracles: the papers' formulas, and the plans of parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.planning.parallel import Parallel, sent_for_a_token, sent_in_a_step
from tests.small_models import Built

WIDTH, LAYERS = 64, 6


class Layer(Built, norm=lambda: nn.LayerNorm(WIDTH), up=(WIDTH, 4 * WIDTH), down=(4 * WIDTH, WIDTH)):
    pass


class Net(nn.Module):
    def __init__(self, layers: range = range(LAYERS), ends: str = "both", tied: bool = False) -> None:
        super().__init__()
        self.body = nn.Module()
        if ends in ("both", "first"):
            self.body.embed = nn.Embedding(1000, WIDTH)
        self.body.layers = nn.ModuleDict({str(number): Layer() for number in layers})
        if ends in ("both", "last"):
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, 1000, bias=False)
        if tied:
            self.head.weight = self.body.embed.weight


FIELDS: dict[str, Any] = {"host_memory": "64MiB", "device": "cpu"}


def units(plan: outsize.Plan) -> list[tuple[str, int, int, int]]:
    return [(unit.name, unit.size.params, unit.size.grads, unit.size.states) for unit in plan.units]


def test_the_plan_of_a_pipeline_is_that_of_its_largest_stage() -> None:
    whole = Net()
    found = outsize.plan(whole, torch.optim.AdamW(whole.parameters()), mesh={"pp": 3, "dp": 2}, **FIELDS)
    part = Net(range(4, 6), "last")
    expected = outsize.plan(part, torch.optim.AdamW(part.parameters()), ranks=2, **FIELDS)
    assert units(found) == units(expected)
    assert found.parallel is not None and (found.parallel.stage, found.parallel.layers) == (2, 2)
    assert "this is stage 2 of 3, the largest one, with 2 layers" in str(found)
    assert [*whole.body.layers] == [str(number) for number in range(LAYERS)], "the model is as it was"


def test_tied_weights_are_on_both_ends() -> None:
    found = outsize.plan(Net(tied=True), mesh={"pp": 2}, **FIELDS)
    assert found.parameters == sum(param.numel() for param in Net(range(3), "last").parameters())


def test_tensor_parallelism_cuts_matrices() -> None:
    found = outsize.plan(Net(), mesh={"tp": 3}, **FIELDS)
    layer = 2 * WIDTH + 4 * WIDTH + WIDTH + -(-4 * WIDTH // 3) * WIDTH + -(-WIDTH // 3) * 4 * WIDTH
    assert found.parameters == LAYERS * layer + 2 * WIDTH + 2 * 334 * WIDTH
    assert found.parallel is not None and found.parallel.token_bytes == 4 * LAYERS * 2 * 2 * WIDTH * 4 // 3


def test_zero_sends_what_its_paper_says() -> None:
    """Section 7: twice the parameters for stages 0 to 2, three times for stage 3, less a rank's own part."""
    for stage, times in enumerate((2, 2, 2, 3)):
        assert sent_in_a_step(1000, 1000, stage, data=10, copies=1) == times * 900
    assert sent_in_a_step(1000, 1000, 3, data=10, copies=2) == 3 * 900 + 100
    assert sent_in_a_step(1000, 1000, 0, data=1, copies=1) == 0


def test_a_pipeline_waits_as_its_paper_says() -> None:
    assert Parallel(stages=4).bubble(8) == pytest.approx(3 / 11)
    assert Parallel(stages=4).bubble(8, stages_a_rank=2) == pytest.approx(1.5 / 9.5)
    assert Parallel().bubble(1) == 0.0
    assert sent_for_a_token(64, 2, layers=3, tensor=1, stages=2) == 128
    with pytest.raises(ValueError, match="0 micro-batches"):
        Parallel(stages=2).bubble(0)


@pytest.mark.parametrize(
    ("mesh", "kind", "words"),
    [
        ({"pp": 7}, ValueError, "has 6: a stage needs a layer"),
        ({"pp": 0}, ValueError, "at least 1"),
        ({"a": 2, "b": 2, "c": 2}, ValueError, "outsize takes one that is data-parallel"),
        ("pp", TypeError, "must be a DeviceMesh or sizes by name"),
    ],
)
def test_what_is_no_mesh_is_refused(mesh: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        outsize.plan(Net(), mesh=mesh, **FIELDS)
    with pytest.raises(ValueError, match="not both"):
        outsize.plan(Net(), mesh={"dp": 2}, ranks=2, **FIELDS)


def of_size(parameters: float) -> nn.Module:
    """Layers of as many parameters on the meta device, computed in bf16, more of them where the model is larger."""
    layers = 32 if parameters < 5e11 else 128 if parameters < 5e12 else 512
    side = round((parameters / layers / 4) ** 0.5 / 16) * 16
    matrix = partial(nn.Linear, side, side, bias=False, device="meta", dtype=torch.bfloat16)
    return nn.Sequential(*[nn.Sequential(*[matrix() for _ in range(4)]) for _ in range(layers)])


GPU, MEMORY, DRIVES = "32GB", f"{1500 // 16 + 32}GB", f"{28000 // 16}GB"
"""Of one of 16 GPUs; the second: with its part of the host."""
ON_DEVICE = dict.fromkeys(("params", "grads", "states"), "device")


@pytest.mark.parametrize(
    ("published", "fields"),
    [
        pytest.param(1.4e9, {"ranks": 16, "stage": 0, "host_memory": GPU, **ON_DEVICE}, id="data parallel"),
        pytest.param(20e9, {"ranks": 16, "host_memory": GPU, **ON_DEVICE}, id="ZeRO-3"),
        pytest.param(20e9, {"mesh": {"pp": 2, "tp": 8}, "host_memory": GPU, **ON_DEVICE}, id="3D parallelism"),
        pytest.param(70e9, {"ranks": 16, "host_memory": MEMORY}, id="Infinity, host"),
        pytest.param(
            1e12, {"ranks": 16, "host_memory": MEMORY, "disk": ".", "disk_space": DRIVES}, id="Infinity, NVMe"
        ),
        pytest.param(650e9, {"mesh": {"pp": 32, "tp": 16}, "host_memory": GPU, **ON_DEVICE}, id="3D, 32 nodes"),
        pytest.param(
            32e12, {"ranks": 512, "host_memory": MEMORY, "disk": ".", "disk_space": DRIVES}, id="Infinity, 32 nodes"
        ),
    ],
)
def test_the_largest_models_of_zero_infinity_fit_and_twice_as_large_ones_do_not(
    published: float, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On DGX-2 nodes of 16 V100 (Rajbhandari et al. 2021, table 1, figures 1 and 6), states alone, 14 bytes a
    parameter. What is between the two is activations and the memory that a GPU's kernels take."""
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda _: None)  # there is nothing to fill
    plan = outsize.plan(of_size(published), device="cpu", **fields)
    assert plan.parallel is not None
    parts = plan.parallel.stages * plan.parallel.tensor
    assert plan.parameters == pytest.approx(published / parts, rel=0.05)
    with pytest.raises(outsize.BudgetError):
        outsize.plan(of_size(2 * published), device="cpu", **fields)
