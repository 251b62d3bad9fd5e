"""Which rule runs an optimizer: a native kernel, its own step on pieces, or its own step on whole parameters."""

from __future__ import annotations

import torch

from outsize.optim.native import AdagradRule, AdamRule, Lion, LionRule, SGDRule
from outsize.optim.rows import LazyAdamW, LazyAdamWRule, RowwiseAdagrad, RowwiseAdagradRule, SparseAdamRule
from outsize.optim.rules import Rule
from outsize.optim.streamed import StreamedRule


def rule_for(optimizer: torch.optim.Optimizer, state_format: str = "exact") -> Rule:
    """The rule for exactly this class; a subclass of a torch optimizer may have changed its step and runs that.

    Raises `ValueError` for an optimizer that cannot run on streamed state, and for one whose state has no compact
    format where that is asked for.
    """
    rule = _rule_for(optimizer)
    missing = [name for name in rule.arrays if name not in rule.codes]
    if state_format == "compact" and (missing or not rule.arrays):
        what = f"its {', '.join(missing)} must stay exact" if missing else "it keeps no state for each element"
        raise ValueError(
            f"state_format='compact' is not available for {type(optimizer).__name__}: {what}; use AdamW, Adam, SGD "
            f"with momentum, Adagrad or outsize.optim.Lion, or leave state_format at 'exact'"
        )
    return rule


def _rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    kind = type(optimizer)
    groups = optimizer.param_groups
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return AdamRule(any(group.get("amsgrad", False) for group in groups), kind is torch.optim.AdamW)
    if kind is torch.optim.SGD:
        return SGDRule(any(group["momentum"] != 0 for group in groups))
    if kind is torch.optim.Adagrad:
        return AdagradRule()
    if kind is torch.optim.SparseAdam:
        return SparseAdamRule()
    if kind is LazyAdamW:
        return LazyAdamWRule()
    if kind is RowwiseAdagrad:
        return RowwiseAdagradRule()
    if kind is Lion:
        return LionRule()
    return StreamedRule(optimizer)
