"""The states of the random number generators that training draws from."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def capture_rng(device: torch.device) -> dict[str, Any]:
    """The states of torch, Python, NumPy (if it is in use) and the computing device, as plain values."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, torch.tensor(keys.tolist(), dtype=torch.int64), *map(_plain, rest))
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators that were captured; one that this process has not got is left out."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.tolist(), *rest))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def check_rng(states: Any) -> None:
    """Raise `ValueError` for what `capture_rng` cannot have made."""
    words = states["python"][1]
    if states["torch"].shape != torch.get_rng_state().shape or len(words) != len(random.getstate()[1]):
        raise ValueError("the states of the random number generators have another size")


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
