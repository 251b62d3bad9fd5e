"""The examples do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_a_run_that_is_stopped_and_started_again_is_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    resume = example("resume")
    expected = resume.main(tmp_path / "one", 90)
    for steps in (25, 64, 90):  # in an epoch, at its end, in the next
        loss = resume.main(tmp_path / "two", steps)
    assert loss == expected
    assert sorted(each.name for each in (tmp_path / "two" / "ckpts").iterdir()) == ["step-80", "step-90"]
