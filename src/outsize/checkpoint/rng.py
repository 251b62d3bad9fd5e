"""The states of the random number generators that training draws from."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

HOST_KINDS = ("torch", "python", "numpy")
"""Whose states are stored, beside that of the accelerator, which stands under the type of the device."""


def is_known(kind: str) -> bool:
    """Whether this process can have such a generator."""
    try:
        return kind in HOST_KINDS or torch.device(kind).type == kind
    except RuntimeError:
        return False


def capture_rng(device: torch.device) -> dict[str, Any]:
    """The states of torch, Python, NumPy (if it is in use) and the computing device, as plain values."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss),
    }
    numpy = _numpy()
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, torch.tensor(keys.tolist(), dtype=torch.int64, device="cpu"), *rest)
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def check_capturable() -> None:
    """Raise `TypeError` for a generator whose state has another form than those that are stored."""
    numpy = _numpy()
    if numpy is not None and not _has_usual_generator(numpy):
        name = numpy.random.get_state(legacy=False)["bit_generator"]
        raise TypeError(
            f"numpy.random draws from {name}, and outsize.save stores the state of MT19937, its default, alone; draw "
            f"from a numpy.random.Generator of your own and put its state into extra"
        )


def check_rng(states: dict[str, Any]) -> None:
    """Raise whatever `restore_rng` would raise for these states; the generators stay as they are."""
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(_python_state(states))
    numpy = _numpy()
    if numpy is not None and "numpy" in states:
        numpy.random.RandomState().set_state(_numpy_state(states))
    for kind in states.keys() - set(HOST_KINDS):
        if not isinstance(states[kind], torch.Tensor) or states[kind].dtype is not torch.uint8:
            raise ValueError(f"the state of the generator of {kind!r} is no tensor of bytes")


def restore_rng(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators that were captured; one that this process has not got is left out."""
    torch.set_rng_state(states["torch"])
    random.setstate(_python_state(states))
    numpy = _numpy()
    if numpy is not None and "numpy" in states and _has_usual_generator(numpy):
        numpy.random.set_state(_numpy_state(states))
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def _numpy() -> Any:
    return sys.modules.get("numpy")


def _has_usual_generator(numpy: Any) -> bool:
    return bool(numpy.random.get_state(legacy=False)["bit_generator"] == "MT19937")


def _python_state(states: dict[str, Any]) -> Any:
    version, words, gauss = states["python"]
    return version, tuple(words.tolist()), gauss


def _numpy_state(states: dict[str, Any]) -> Any:
    name, keys, *rest = states["numpy"]
    return name, keys.tolist(), *rest
