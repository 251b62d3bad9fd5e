"""The update of the rows of a table that a sparse gradient has; `LazyAdamW` and `RowwiseAdagrad`, and SparseAdam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch.optim._functional import sparse_adam

from outsize.move.grad_ops import AS_IT_IS
from outsize.move.rows import sparse_rows
from outsize.move.shard import SlotState, SlotUpdate, UnitShard
from outsize.move.store import MASTER
from outsize.optim.native import AdagradRule, AdamRule, Stepped, adagrad_formula, adam_formula, initial_sum
from outsize.optim.rules import Opened, Options, Piece, Rule, join_master, split_master


def update_rows(rule: Rule, shard: UnitShard, name: str, owed: SlotUpdate) -> None:
    """Update the rows of a table by a sparse gradient. Blocks."""
    rows, grad = shard.rows, owed.loose
    assert rows is not None and grad is not None
    shard.before_update()
    whole = rows.whole()
    state = shard.slot_states.get(name, SlotState())
    ids = None
    if whole is None or MASTER in whole or whole["params"].device != grad.device:
        ids, among = torch.unique(grad._indices()[0].to(rows.device), return_inverse=True)
        whole = rows.get(ids)
        values = grad._values().to(rows.device)
        grad = sparse_rows(among, values, (ids.numel(), rows.width), grad.is_coalesced())
    param, master = whole["params"], whole.get(MASTER)
    if master is not None:
        param = join_master(param.view(-1), master.view(-1)).view(param.shape)
    states = {key: value for key, value in whole.items() if key not in ("params", MASTER)}
    piece = Piece(param, None, states, grad.to(param.dtype), AS_IT_IS, owed.hyper, state, ids=ids, rows=rows.count)
    after = rule.apply_rows(piece)
    if master is not None:
        split_master(param.view(-1), whole["params"].view(-1), master.view(-1))
    if ids is not None:
        rows.put(ids, whole)
    shard.slot_states[name] = SlotState(after, initialised=True)


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _sparse_adam_options(options: Options) -> dict[str, Any]:
    found = {**options.numbers("lr"), **options.numbers("eps", least=0), **options.betas()}
    return {**found, **options.flags("maximize")}


@final
class SparseAdamRule(Rule):
    """torch's SparseAdam, which has no update for dense gradients."""

    arrays = _MOMENTS
    counts = scalars = ("step",)
    only_rows = True

    def check(self, hyper: Mapping[str, object], where: str) -> None:
        _sparse_adam_options(Options(hyper, where))

    def check_rows(self, hyper: Mapping[str, object], name: str, optimizer: str) -> None:
        self.check(hyper, f"the parameter group of {name!r}")

    def apply(self, piece: Piece) -> dict[str, object]:
        raise AssertionError("prepare refuses dense parameters")

    def apply_rows(self, piece: Piece) -> dict[str, object]:
        averages, squares = ([piece.states[name]] for name in _MOMENTS)
        options = _sparse_adam_options(Options(piece.hyper))
        sparse_adam([piece.param], [piece.grad], averages, squares, [piece.step], **options)
        return {"step": piece.step}


# Note [Rows that a batch does not touch]
# In torch a dense optimizer moves every weight in every step: momentum goes on, weights decay. A lazy one moves a row
# only in steps whose batch touches it, with the count of all steps (as torch's SparseAdam). So a table costs a step
# what the batch costs, and trains a little differently: rows that come seldom decay less.


def lazy_adamw(param: torch.Tensor, grad: torch.Tensor, states: Mapping[str, torch.Tensor], **options: Any) -> None:
    """AdamW on the rows that a sparse gradient has."""
    grad = grad.coalesce()
    ids = grad._indices()[0]
    rows = Opened(param[ids], grad._values(), {name: states[name][ids] for name in _MOMENTS})
    if ids.numel():
        adam_formula(rows, **options)
    param.index_copy_(0, ids, rows.param)
    for name, values in rows.states.items():
        states[name].index_copy_(0, ids, values)


def rowwise_adagrad(
    param: torch.Tensor, grad: torch.Tensor, total: torch.Tensor, ids: torch.Tensor | None, *, lr: float, eps: float
) -> None:
    """`total` [rows] has the sum of each row of the table, beside the rows or in host memory; `ids` says which row each
    of `param` is, None: its own."""
    grad = grad.coalesce()
    places, values = grad._indices()[0], grad._values()
    own = (places if ids is None else ids[places]).to(total.device)
    total.index_add_(0, own, values.square().mean(1).to(total.device))
    scale = total[own].to(values.device).sqrt() + eps
    param.index_add_(0, places, values / scale[:, None], alpha=-lr)


class LazyAdamW(Stepped):
    """AdamW (Loshchilov and Hutter 2019) for a model with tables, embeddings with `sparse=True`.

    Dense parameters are updated as by `torch.optim.AdamW`. Of a table only the rows that the batch touches move and
    decay, so a step costs what the batch costs and not what the table does. Rows that come seldom decay less than in
    `torch.optim.AdamW`; bias is corrected by the count of all steps, as in `torch.optim.SparseAdam`. Works with and
    without outsize.

    >>> table = torch.nn.Embedding(20_000, 64, sparse=True)
    >>> optimizer = outsize.optim.LazyAdamW(table.parameters(), lr=1e-3)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        LazyAdamWRule().check(defaults, "LazyAdamW")
        super().__init__(params, defaults)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        options = LazyAdamWRule().read(Options(group))
        if not state:
            state |= {"step": torch.tensor(0.0), **{key: torch.zeros_like(param) for key in _MOMENTS}}
        state["step"] += 1
        step = int(state["step"])
        if grad.is_sparse:
            lazy_adamw(param, grad, state, step=step, **options)
        else:
            opened = Opened(param, grad, {key: state[key] for key in _MOMENTS})
            adam_formula(opened, step=step, **options)


@final
class LazyAdamWRule(AdamRule):
    """The update of `LazyAdamW`, of dense parameters as by AdamW."""

    def __init__(self) -> None:
        super().__init__(amsgrad=False, decoupled=True)

    def check_rows(self, hyper: Mapping[str, object], name: str, optimizer: str) -> None:
        self.check(hyper, f"the parameter group of {name!r}")

    def apply_rows(self, piece: Piece) -> dict[str, object]:
        lazy_adamw(piece.param, piece.grad, piece.states, step=piece.step, **self.read(Options(piece.hyper)))
        return {"step": float(piece.step)}


class RowwiseAdagrad(Stepped):
    """Adagrad with one sum a row of a table, an embedding with `sparse=True` (FBGEMM's exact row-wise Adagrad; Gupta et
    al. 2014, "Training highly multiclass classifiers", section 5).

    The sum of a row is that of the means of its squared gradients, so the state of a table of [rows, width] has `rows`
    values; they stay in host memory. Dense parameters are updated as by `torch.optim.Adagrad`. Works with and without
    outsize.

    >>> table = torch.nn.Embedding(20_000, 64, sparse=True)
    >>> optimizer = outsize.optim.RowwiseAdagrad(table.parameters(), lr=0.05)
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-8) -> None:
        defaults = {"lr": lr, "eps": eps, "lr_decay": 0.0, "weight_decay": 0.0}
        Options(defaults, "RowwiseAdagrad").numbers("lr", "eps", least=0)
        super().__init__(params, defaults)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        options = Options(group)
        if not state:
            first = param.new_zeros(len(param)) if grad.is_sparse else torch.full_like(param, initial_sum(options))
            state |= {"step": torch.tensor(0.0), _ROW_SUM if grad.is_sparse else "sum": first}
        state["step"] += 1
        if grad.is_sparse:
            rowwise_adagrad(param, grad, state[_ROW_SUM], None, **options.numbers("lr", "eps"))
        else:
            opened = Opened(param, grad, {"sum": state["sum"]})
            adagrad_formula(opened, step=int(state["step"]), **AdagradRule().read(options))


_ROW_SUM = "row_sum"


@final
class RowwiseAdagradRule(AdagradRule):
    """The update of `RowwiseAdagrad`, of dense parameters as by Adagrad. A table has no array: its sums are a value of
    the parameter, in memory."""

    row_values = (_ROW_SUM,)

    def __init__(self) -> None:
        super().__init__()
        self.codes = {}
        self.scalars, self.optional = ("step", _ROW_SUM, "sum"), frozenset({"sum"})

    def apply_rows(self, piece: Piece) -> dict[str, object]:
        options, state = Options(piece.hyper).numbers("lr", "eps"), piece.state.scalars
        total = state.get(_ROW_SUM)
        if not isinstance(total, torch.Tensor):
            total = torch.zeros(piece.rows, dtype=piece.param.dtype, device="cpu")
        rowwise_adagrad(piece.param, piece.grad, total, piece.ids, **options)
        return {"step": float(piece.step), _ROW_SUM: total, "sum": None}
