"""The optional safetensors library: asked for by name where it is missing, and its errors made those of the system."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def require_safetensors(what: str) -> Any:
    """The module `safetensors.torch`. Raises `ImportError` that says how to get it."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{what} needs the safetensors library; install it with: pip install safetensors") from error
    return safetensors.torch


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn the library's own error for a failed write into an `OSError` with path and errno."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        code = int(found.group(1))
        raise OSError(code, f"{os.strerror(code)} (writing weights)", str(path)) from error
