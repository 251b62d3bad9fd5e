"""A table, an embedding with `sparse=True`, is used by rows: only those that a batch touches move.

The operation is torch's own, on the rows that the batch needs, with ids that count among these. So autograd makes the
gradient that torch makes, a sparse tensor of these rows, and leaves it in `param.grad`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from outsize.move.rows import Rows, sparse_rows
from outsize.run.once import differentiable_once
from outsize.run.wrappers import is_wrapper

if TYPE_CHECKING:
    from outsize.run.engine import Engine
    from outsize.run.streamer import Streamer
    from outsize.run.unit import Unit

LOOKUPS: dict[Any, inspect.Signature] = {each: inspect.signature(each) for each in (F.embedding, F.embedding_bag)}


def tables_of(model: nn.Module) -> dict[str, nn.Module]:
    """The weights of embeddings with `sparse=True`, by their first name, and one of the modules that use each.

    Raises `ValueError` for one that something else uses too, and for one with a hook or a parametrization.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    users: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for param in module._parameters.values():
            if param is not None and not is_wrapper(param):  # a frozen one, which comes whole
                users.setdefault(names[id(param)], []).append((name, module))
        if _is_table(module) and (parametrize.is_parametrized(module, "weight") or "weight" not in module._parameters):
            raise ValueError(
                f"table {f'{name}.weight'!r} is an embedding with sparse=True and has a parametrization, which would "
                f"need all of its rows; use sparse=False, or remove the parametrization"
            )
    return {
        param: modules[0][1]
        for param, modules in users.items()
        if any(_is_table(module) for _, module in modules) and _check(param, modules)
    }


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def _check(name: str, users: list[tuple[str, nn.Module]]) -> bool:
    other = next((user for user, module in users if not _is_table(module)), None)
    param = users[0][1].weight
    assert isinstance(param, nn.Parameter)
    problem = None
    if other is not None:
        problem = f"module {other!r} uses it too, without sparse=True: set sparse=False, or untie the two"
    elif param._backward_hooks or param._post_accumulate_grad_hooks:
        problem = "it has a hook, which would be given rows in place of the whole gradient: remove the hook"
    elif any(module.scale_grad_by_freq for _, module in users):
        problem = "torch has no scale_grad_by_freq for it: set scale_grad_by_freq=False"
    elif any(module.max_norm is not None for _, module in users):
        found = next(module.max_norm for _, module in users if module.max_norm is not None)
        problem = f"max_norm={found} would write its weight in every forward: set max_norm=None"
    if problem is not None:
        raise ValueError(f"table {name!r} is an embedding with sparse=True, and {problem}")
    return True


@final
class Table:
    """One table at work."""

    def __init__(self, unit: Unit, streamer: Streamer) -> None:
        self.unit = unit
        ((self.name, self.param),) = unit.parameters.items()
        self._streamer = streamer
        self.seen: list[torch.Tensor] | None = None  # the ids of this batch, where somebody wants to know them

    @property
    def rows(self) -> Rows:
        rows = self.unit.shard.rows
        assert rows is not None
        return rows

    @property
    def count(self) -> int:
        return int(self.unit.shard.whole_slots[self.name].shape[0])

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start to read these rows (ascending), each rank those that rest with it; every rank calls it."""
        if self.unit.owners is None:
            self.rows.prefetch(ids)
        elif self.rows.on_disk:
            self.unit.owners.prefetch(ids)

    def check(self, ids: torch.Tensor) -> None:
        """Raises `IndexError` for ids outside the table."""
        least, most = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if not 0 <= least <= most < self.count:
            raise IndexError(
                f"table {self.name!r} has the rows 0 to {self.count - 1}, and the batch asks for ids from {least} to "
                f"{most}"
            )

    def rows_for(self, ids: torch.Tensor, padding: int | None) -> _Fetched:
        """What the operation is given: all rows where they rest where it computes, else those that it needs."""
        rows = self.rows
        self._streamer.live.check()
        if self.seen is not None:
            self.seen.append(ids)
        whole = rows.whole() if self.unit.owners is None else None
        if whole is not None and whole["params"].device == ids.device:
            return _Fetched(whole["params"], ids, padding, None)
        wanted, among, place = distinct(ids, padding)
        with self._streamer.live.waiting():
            if self.unit.owners is None:
                values = rows.get_params(wanted.to(rows.device))
            else:
                values = self.unit.owners.get_params(wanted.cpu())
        return _Fetched(values.to(ids.device), among, place, wanted)


def row_of_padding(given: Mapping[str, Any], rows: int, name: str) -> int | None:
    """The row that `padding_idx` names among the arguments of a lookup."""
    padding: int | None = given.get("padding_idx")
    if padding is not None and not -rows <= padding < rows:
        raise IndexError(f"padding_idx={padding}, and table {name!r} has {rows} rows")
    return None if padding is None else padding % rows


def distinct(ids: torch.Tensor, padding: int | None) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """The rows that are asked for, ascending, that of the `padding` among them; the ids and the padding, counted among
    these. torch sums bags in another order where there is no padding."""
    every = ids.reshape(-1) if padding is None else torch.cat([ids.reshape(-1), ids.new_tensor([padding])])
    wanted, among = torch.unique(every, return_inverse=True)
    place = None if padding is None else int(among[-1])
    return wanted.to(torch.int64), among[: ids.numel()].to(ids.dtype).view(ids.shape), place


class _Fetched(NamedTuple):
    rows: torch.Tensor  # [n, width]
    ids: torch.Tensor  # among these rows, as the next
    padding: int | None
    wanted: torch.Tensor | None  # int64 [n], which these rows are; None: all


class _Rows(torch.autograd.Function):
    """Rows in the graph. Their gradient becomes one of the table."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, engine: Engine, fetched: list[_Fetched]) -> torch.Tensor:
        ctx.engine, ctx.wanted, ctx.shape = weakref.ref(engine), fetched[0].wanted, param.shape
        return fetched[0].rows.detach()

    @staticmethod
    @differentiable_once("the gradient of a table (an embedding with sparse=True) has no derivative: use sparse=False")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.engine().backward.watch()
        if ctx.wanted is None:
            return grad, None, None
        ids = ctx.wanted.to(grad.device)[grad._indices()[0]]
        return sparse_rows(ids, grad._values(), ctx.shape, grad.is_coalesced()), None, None


def look_up(engine: Engine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on a table; `NotImplemented` where it needs all of it."""
    signature = LOOKUPS.get(func)
    if signature is None:
        return NotImplemented
    given = signature.bind(*args, **kwargs).arguments
    table = engine.tables.get(id(given["weight"]))
    if table is None or torch._C._functorch.peek_interpreter_stack() is not None:
        return NotImplemented
    is_whole = table.unit.current
    if not is_whole:
        engine.check_use(table.param, func.__name__)
    table.check(given["input"])
    if is_whole:
        return NotImplemented
    if not given.get("sparse", False) and torch.is_grad_enabled() and table.param.requires_grad:
        raise RuntimeError(
            f"table {table.name!r} is an embedding with sparse=True, and {func.__name__} without sparse=True would "
            f"make a gradient of all its rows: pass sparse=True"
        )
    with torch._C.DisableTorchFunctionSubclass():
        fetched = table.rows_for(given["input"], row_of_padding(given, table.count, table.name))
        given |= {"input": fetched.ids, "padding_idx": fetched.padding}
        given["weight"] = _Rows.apply(table.param, engine, [fetched])
        operation: Callable[..., Any] = func
        return operation(**given)
