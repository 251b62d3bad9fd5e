"""Imported for its effects: `torch.manual_seed` keeps no stack trace, which took it most of a millisecond, and pytest
shows the values in failed asserts of `tests/comparing.py`, as it does in tests.

torch notes the seed for each kind of accelerator that has not begun yet, with a trace of who gave it.
"""

import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("tests.comparing")
for _kind in (torch.cuda, torch.xpu, torch.mtia):
    _module: Any = _kind
    _module.traceback = SimpleNamespace(**{**vars(traceback), "format_stack": list})
