"""outsize: train PyTorch models whose state is larger than the accelerator's memory, and larger than RAM."""

from outsize.api.building import init
from outsize.api.exporting import export
from outsize.api.gather import gathered, no_sync
from outsize.api.loading import load
from outsize.api.public import memory, plan, prepare
from outsize.api.releasing import release
from outsize.api.saving import save
from outsize.config import Config, presets
from outsize.run.activations import tiled

__all__ = [
    "Config",
    "export",
    "gathered",
    "init",
    "load",
    "memory",
    "no_sync",
    "plan",
    "prepare",
    "presets",
    "release",
    "save",
    "tiled",
]
