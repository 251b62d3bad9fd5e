"""The only room that composes the others: what a user calls."""

from importlib.metadata import version

from outsize.api.ahead import lookahead
from outsize.api.building import init
from outsize.api.exporting import export
from outsize.api.gather import gathered, no_sync
from outsize.api.loading import load
from outsize.api.monitor import Monitor
from outsize.api.probing import probe
from outsize.api.public import plan, prepare
from outsize.api.releasing import release
from outsize.api.report import memory
from outsize.api.saving import save
from outsize.config import Config, presets
from outsize.move.tracing import trace
from outsize.planning.errors import BudgetError
from outsize.run.activations import tiled

__version__ = version("outsize")

__all__ = [
    "BudgetError",
    "Config",
    "Monitor",
    "__version__",
    "export",
    "gathered",
    "init",
    "load",
    "lookahead",
    "memory",
    "no_sync",
    "plan",
    "prepare",
    "presets",
    "probe",
    "release",
    "save",
    "tiled",
    "trace",
]
