"""outsize: train PyTorch models whose state is larger than the accelerator's memory, and larger than RAM.

The public names are those of `outsize.api`, which is imported when the first of them is asked for. `import outsize`
alone imports nothing else, torch included.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from outsize.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> _Any:
        if name.startswith("_") and name not in ("__all__", "__version__"):  # `_native` too, which `api` imports
            raise AttributeError(f"module 'outsize' has no attribute {name!r}")
        api, here = _import_module("outsize.api"), globals()
        for each in ("__all__", *api.__all__):
            if each not in here:  # else somebody has set it
                here[each] = getattr(api, each)
        try:
            return here[name]
        except KeyError:
            raise AttributeError(f"module 'outsize' has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*__getattr__("__all__"), *globals()})
