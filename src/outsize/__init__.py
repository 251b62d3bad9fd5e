"""outsize: train PyTorch models whose state is larger than the accelerator's memory, and larger than RAM.

The public names are those of `outsize.api`, which is imported when the first of them is asked for. So `import outsize`
takes no longer than `import torch`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outsize.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("_") and name not in ("__all__", "__version__"):  # `_native` too, which `api` imports
            raise AttributeError(f"module 'outsize' has no attribute {name!r}")
        api = import_module("outsize.api")
        globals().update({each: getattr(api, each) for each in api.__all__})
        try:
            return api.__all__ if name == "__all__" else globals()[name]
        except KeyError:
            raise AttributeError(f"module 'outsize' has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return [*__getattr__("__all__"), "optim"]
