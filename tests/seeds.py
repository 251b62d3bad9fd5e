"""Imported for its effect: `torch.manual_seed` keeps no stack trace, which took it most of a millisecond.

torch notes the seed for each kind of accelerator that has not begun yet, with a trace of who gave it.
"""

import traceback
from types import SimpleNamespace
from typing import Any

import torch

for _kind in (torch.cuda, torch.xpu, torch.mtia):
    _module: Any = _kind
    _module.traceback = SimpleNamespace(**{**vars(traceback), "format_stack": list})
