"""Type checkers and prompts know the fields; mypy takes the loop of the README."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import outsize
from outsize.config import Config, Fields

ROOT = Path(__file__).parents[2]
PREAMBLE = """
from typing import Any, NamedTuple
from typing_extensions import assert_type
class Output(NamedTuple):
    loss: torch.Tensor
class MyModel(torch.nn.Module):
    def __init__(self, config: dict[str, int]) -> None: ...
    def __call__(self, **batch: torch.Tensor) -> Output:
        return Output(torch.ones(1))
config: dict[str, int] = {}
loader: list[dict[str, torch.Tensor]] = []
scheduler: torch.optim.lr_scheduler.LRScheduler
fields: dict[str, Any] = {}
"""
MORE = """
assert_type(outsize.prepare(model, optimizer), tuple[MyModel, torch.optim.AdamW])
assert_type(outsize.prepare(model, host_memory=1 << 30), tuple[MyModel, None])
outsize.prepare(model, optimizer, disk=["/a", "/b"], **outsize.presets["zero-infinity-nvme"])
outsize.plan(model, optimizer, outsize.Config(stage=2), ranks=8, units=torch.nn.Linear, **fields)
"""
WRONG = """
outsize.prepare(model, optimizer, host_memry="4GiB")
outsize.prepare(model, params="dsk")
outsize.plan(model, stage=4)
outsize.init(disk=3)
outsize.Config(update="later")
"""


def readme_loop() -> str:
    found = re.search(r"```python\n(import torch, outsize.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_mypy_takes_the_loop_of_the_readme_and_finds_typos(tmp_path: Path) -> None:
    head, loop = readme_loop().split("\n", 1)
    right = head + PREAMBLE + loop + MORE
    script = tmp_path / "loop.py"
    script.write_text(right + WRONG)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(script)]  # strict, by our own configuration
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found = sorted({int(line) for line in re.findall(r"loop\.py:(\d+): error", said)})
    first = right.count("\n") + 2
    assert found == list(range(first, first + WRONG.count("outsize."))), said


def test_types_of_the_keywords_are_those_of_the_config() -> None:
    def plain(annotation: object) -> str:
        return str(getattr(annotation, "__forward_arg__", annotation))

    assert {name: plain(kind) for name, kind in Fields.__annotations__.items()} == {
        field.name: field.type for field in fields(Config)
    }


@pytest.mark.parametrize("function", [outsize.prepare, outsize.plan, outsize.init])
def test_prompts_see_the_fields_and_their_defaults(function: object) -> None:
    shown = inspect.signature(function).parameters  # type: ignore[arg-type]
    assert {field.name: shown[field.name].default for field in fields(Config)} == {
        field.name: field.default for field in fields(Config)
    }


def test_the_page_lists_the_fields_in_order() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    table = page[page.index("| field |") : page.index("## Budgets")]
    listed = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert listed == [field.name for field in fields(Config)]
