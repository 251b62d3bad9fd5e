"""`init`: while it is active, parameters that are not in use wait on disk: any model is built in bounded memory."""

from __future__ import annotations

import errno
import functools
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch import nn

from outsize.api.budgets import find_budgets
from outsize.api.ranks import know_place
from outsize.config import Config, Fields, make_config, shows_fields
from outsize.move.disk import DiskDirectoryError, nearest
from outsize.move.progress import Progress
from outsize.run.paging import ACCOUNT, PagedParameter, PageFile, Pager

if TYPE_CHECKING:
    from typing_extensions import Unpack

LOADER_VARIABLE = "HF_DEACTIVATE_ASYNC_LOAD"

# Note [How parameters are noticed]
# Every parameter is made by `nn.Parameter.__new__`: by constructors, copies, unpickling, `from_pretrained`, on any
# thread. The new parameter changes its class in place and passes every later operation to its pager. Nothing else of
# torch needs to change; `register_parameter` only tells the pager what errors should call the parameter. The loader
# of transformers reads all weights ahead in a thread pool, which would fill the memory; its environment variable
# makes it read them one by one.


@final
class init:
    """Build a model in bounded memory: whatever makes parameters inside the block.

    Takes the fields of `outsize.Config`; parameters stay within `host_memory`, the rest is on `disk`. While a parameter
    is made that is larger than all before it, what it is larger by comes on top; where `host_memory` does not hold two
    of the largest, at most one of them. One that is larger than `host_memory` is in memory alone. The model is built on
    the CPU whatever `device` says. Leave the block, then
    call `outsize.prepare`. Parameters that fit in `host_memory` are plain ones after the block; of the others only the
    metadata can be read until `prepare`. Raises `BudgetError` with the numbers if the parameters do not fit,
    `RuntimeError` if nested or used again.

    >>> with outsize.init(host_memory="4GiB", disk="disk"):
    ...     model = torch.nn.Linear(8, 4)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model, optimizer = outsize.prepare(model, optimizer, host_memory="4GiB", disk="disk")
    """

    _active: ClassVar[init | None] = None

    @shows_fields
    def __init__(self, config: Config | None = None, **fields: Unpack[Fields]) -> None:
        know_place()
        self.config = make_config(config, fields)
        budgets = find_budgets(self.config)
        for directory in self.config.directories:
            if not os.access(nearest(directory), os.W_OK | os.X_OK):
                message = "cannot write to the disk directory; name one that is writable"
                raise DiskDirectoryError(errno.EACCES, message, str(directory))
        disk = PageFile(self.config.directories, budgets.disk) if budgets.disk is not None else None
        self._pager = Pager(budgets.host, disk)
        self._used = False

    @property
    def peak_bytes(self) -> int:
        """The most that parameters took of the memory at any time in the block."""
        return self._pager.ledger.peak[ACCOUNT]

    def __enter__(self) -> init:
        if init._active is not None:
            raise RuntimeError("outsize.init is active already; blocks of it cannot be nested: build in the outer one")
        if self._used:
            raise RuntimeError("this outsize.init was used already; make a new one: with outsize.init(...): ...")
        self._used = True
        init._active = self
        self._progress = Progress("outsize.init", shown=self.config.progress)
        self._variable = os.environ.get(LOADER_VARIABLE)
        os.environ[LOADER_VARIABLE] = "1"
        self._replaced = [
            _replace(nn.Parameter, "__new__", _making(self._pager, self._progress)),
            _replace(nn.Module, "register_parameter", _naming(self._pager)),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for owner, name, original in self._replaced:
            setattr(owner, name, original)
        if self._variable is None:
            os.environ.pop(LOADER_VARIABLE, None)
        else:
            os.environ[LOADER_VARIABLE] = self._variable
        init._active = None
        self._progress.close()
        self._pager.finish(failed=error is not None)


def _replace(owner: type, name: str, replacement: Any) -> tuple[type, str, Any]:
    original = owner.__dict__[name]
    setattr(owner, name, replacement)
    return owner, name, original


def _making(pager: Pager, progress: Progress) -> Any:
    original = nn.Parameter.__new__

    @functools.wraps(original)
    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if cls is not nn.Parameter and not issubclass(cls, PagedParameter):
            return original(cls, data, requires_grad)
        if isinstance(data, PagedParameter):
            data = data.data  # an alias: the two share one page
        param = original(nn.Parameter, data, requires_grad)
        pager.adopt(param)
        progress.add(param.numel() * param.itemsize)
        return param

    return staticmethod(new)


def _naming(pager: Pager) -> Any:
    original = nn.Module.register_parameter

    @functools.wraps(original)
    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        pager.name(param, f"{type(self).__name__}.{name}")

    return register_parameter
