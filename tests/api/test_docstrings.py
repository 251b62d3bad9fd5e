"""Every function of the public API has an example in its docstring, which runs."""

import doctest
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
import outsize.optim
from outsize.integrations.deepspeed import config_from

OF_PLAIN_MODELS = ("BudgetError", "Config", "init", "plan", "prepare")
NOT_CALLED = ("__version__", "presets")
PUBLIC = {name: getattr(outsize, name) for name in outsize.__all__ if name not in NOT_CALLED}
OPTIMIZERS = {name: getattr(outsize.optim, name) for name in ("LazyAdamW", "Lion", "RowwiseAdagrad")}
OTHERS = {**OPTIMIZERS, "config_from": config_from}


@pytest.mark.parametrize("name", [*PUBLIC, *OTHERS])
def test_example_of_the_docstring_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("disk").mkdir()
    model = nn.Sequential(OrderedDict(body=nn.Linear(8, 8), head=nn.Linear(8, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    if name in PUBLIC and name not in OF_PLAIN_MODELS:
        outsize.prepare(model, optimizer, host_memory="64MiB", disk="disk", params="disk", states="disk")
        model(torch.ones(2, 8)).sum().backward()
    loader = [torch.randn(2, 8) for _ in range(2)]
    known: dict[str, Any] = {  # by the examples
        "torch": torch,
        "outsize": outsize,
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
    }
    found = (PUBLIC | OTHERS)[name]
    (example,) = (each for each in doctest.DocTestFinder().find(found, name, globs=known) if each.name == name)
    assert example.examples
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)
