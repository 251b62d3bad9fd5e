"""What a rule is: the update of one parameter's piece, given its state. Rules know nothing of tiers or chunks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn, final

import torch

from outsize import _native
from outsize.move.codes import CodeKind, decode, encode
from outsize.move.grad_ops import GradOps
from outsize.move.shard import SlotState


@dataclass
class Piece:
    """A run of elements of one parameter with all that the update needs; every tensor is 1-D of the same length.

    `param` is in the parameter's own dtype and is updated in place; `master` is the int16 remainder of a bf16 parameter
    or the fp32 master of an fp16 one; `states` are in fp32 (fp64 for an fp64 parameter), or, when compact, the 8-bit
    codes of the arrays that have `scales` [blocks]; `grad` is as it rests, `ops` not applied.
    """

    param: torch.Tensor
    master: torch.Tensor | None
    states: dict[str, torch.Tensor]
    grad: torch.Tensor
    ops: GradOps
    hyper: dict[str, object]
    state: SlotState
    threads: int = 1
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    noted: Any = None
    """What the rule had noted of the parameter when the step was called."""
    ids: torch.Tensor | None = None
    """Where these are rows of a table: which of its `rows` each is (int64); None: all."""
    rows: int = 0

    @property
    def step(self) -> int:
        """Which step of the parameter this is, from 1."""
        return int(number(self.state.scalars.get("step", 0))) + 1


class Rule(ABC):
    """One optimizer's arithmetic."""

    arrays: tuple[str, ...]
    """The names of the per-element arrays, as in `torch.optim`'s state."""

    codes: Mapping[str, CodeKind] = MappingProxyType({})
    """The arrays that can be kept compact, and how."""

    whole: bool = False
    """Whether the update needs whole parameters, in their shape."""

    merges: bool = False
    """Whether parameters side by side, with the same options and scalars, may be updated as one."""

    tried: Mapping[str, object] = MappingProxyType({})
    """What a trial has found in the state of a parameter beside arrays."""

    counts: tuple[str, ...] = ()
    """The per-parameter values that count steps; a parameter that was stepped has them."""

    scalars: tuple[str, ...] | None = None
    """The per-parameter values that there can be; None: whatever the optimizer keeps."""

    optional: frozenset[str] = frozenset()
    """The arrays that a parameter's state may be without, which then has None for it in its scalars."""

    narrow: Mapping[str, torch.dtype] = MappingProxyType({})
    """The arrays that the optimizer keeps in a dtype of fewer bits than the fp32 in which they rest."""

    row_values: tuple[str, ...] = ()
    """What a table has in place of arrays: one value a row, in host memory. Else its arrays have values for it too, of
    which only the rows that a batch touches move."""

    only_rows: bool = False
    """Whether it updates rows of tables and nothing else."""

    def check_rows(self, hyper: Mapping[str, object], name: str, optimizer: str) -> None:
        """Raise `ValueError` for a table `name` of which the update cannot change single rows."""
        raise ValueError(
            f"table {name!r} is an embedding with sparse=True, and {optimizer} cannot update single rows of it; use "
            f"SGD without momentum, Adagrad, SparseAdam, outsize.optim.LazyAdamW or outsize.optim.RowwiseAdagrad, or "
            f"sparse=False"
        )

    def apply_rows(self, piece: Piece) -> dict[str, object]:
        """As `apply`, of rows [n, width] whose `grad` is sparse, [n, width] too: as torch does it."""
        raise TypeError(f"{type(self).__name__} updates no rows, and check_rows has refused tables")

    def note(self, param: torch.Tensor) -> object:
        """What the update will read beside options, as it is now: from the parameter and from the optimizer itself."""
        return None

    def check_closure(self, groups: Sequence[Mapping[str, object]]) -> None:
        """Raise `RuntimeError` if a step with these `groups` does more with a closure than to call it at first."""
        return

    def look_ahead(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, object]], stepped: Sequence[bool]
    ) -> Callable[[], None] | None:
        """What a step with these `groups`, of which `stepped` have gradients, changes of them and of the optimizer.

        None: nothing. What is returned makes the changes.
        """
        return None

    @abstractmethod
    def check(self, hyper: Mapping[str, object], where: str) -> None:
        """Raise, naming `where` the parameter group is, for options with which no update can run."""

    def needs(self, hyper: Mapping[str, object]) -> tuple[str, ...]:
        """The arrays that a parameter group with these options, which were checked, cannot do without."""
        return self.arrays

    def always(self, hyper: Mapping[str, object]) -> tuple[str, ...]:
        """Those of them that there are after the first step already."""
        return self.needs(hyper)

    @abstractmethod
    def apply(self, piece: Piece) -> dict[str, object]:
        """Update the piece in place. Returns the per-parameter values after the step."""


FLOAT32_MAX = torch.finfo(torch.float32).max

# Note [Options out of range]
# torch looks at the options when an optimizer is made, and later computes with whatever they are. Here an update runs
# long after `step()`, so `step()` looks at them. What torch's arithmetic makes sense of goes on (a negative learning
# rate, a momentum above 1); what it raises for, or makes NaN of every weight, is an error.


@final
class Options:
    """The options of a parameter group as numbers. Errors name the group, the option and the value."""

    def __init__(self, hyper: Mapping[str, object], where: str = "the parameter group") -> None:
        self._hyper = hyper
        self._where = where

    def number(self, key: str, least: float = -FLOAT32_MAX, default: float | None = None) -> float:
        """A finite number, at least `least`; torch admits tensors of one element."""
        if default is not None and key not in self._hyper:
            return default
        value = self._value(key)
        found = self._number(key, value, value)
        if not least <= found <= FLOAT32_MAX:
            bound = "a finite number" if least < 0 else f"a finite number, at least {least:g}"
            self._refuse(ValueError, key, value, bound)
        return found

    def numbers(self, *keys: str, least: float = -FLOAT32_MAX) -> dict[str, float]:
        return {key: self.number(key, least) for key in keys}

    def betas(self) -> dict[str, float]:
        """A pair of factors of running averages."""
        value: Any = self._value("betas")
        try:
            first, second = value
        except (TypeError, ValueError):
            self._refuse(TypeError if value is None else ValueError, "betas", value, "two numbers")
        pair = {"beta1": self._number("betas", first, value), "beta2": self._number("betas", second, value)}
        if not all(0 <= beta < 1 for beta in pair.values()):
            self._refuse(ValueError, "betas", value, "two numbers in [0, 1)")
        return pair

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._hyper.get(key, default)
        try:
            return bool(value)
        except (RuntimeError, TypeError, ValueError):
            self._refuse(TypeError, key, value, "True or False")

    def flags(self, *keys: str) -> dict[str, bool]:
        return {key: self.flag(key) for key in keys}

    def _value(self, key: str) -> object:
        if key not in self._hyper:
            raise ValueError(f"{self._where} has no {key!r}, which the update needs; set it")
        return self._hyper[key]

    def _number(self, key: str, value: Any, shown: object) -> float:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (str, bytes, complex, torch.Tensor)) or not hasattr(value, "__float__"):
            self._refuse(TypeError, key, shown, "a number" if value is shown or key != "betas" else "two numbers")
        try:
            return float(value)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError):
            self._refuse(TypeError, key, shown, "a number")

    def _refuse(self, kind: type[Exception], key: str, value: object, wanted: str) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise kind(f"{key!r} of {self._where} must be {wanted}, not {shown}")


def number(value: object) -> float:
    """A count of steps as a float; torch keeps it as a tensor."""
    return float(value.item() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]


@dataclass
class Opened:
    """A piece as torch's own operations take it, all in fp32 (or fp64); updated in place."""

    param: torch.Tensor
    grad: torch.Tensor
    states: dict[str, torch.Tensor]


@contextmanager
def opened(piece: Piece, codes: Mapping[str, CodeKind]) -> Iterator[Opened]:
    """The piece with its master, decoded states and finished gradient; on leaving they are written back."""
    param = piece.param if piece.master is None else join_master(piece.param, piece.master)
    grad = piece.ops.apply_(piece.grad.to(device=param.device, dtype=param.dtype, copy=True))
    states = dict(piece.states)
    for name, scales in piece.scales.items():
        states[name] = decode(states[name], scales, codes[name] == "root")
    yield Opened(param, grad, states)
    for name, scales in piece.scales.items():
        encode(states[name], piece.states[name], scales, codes[name] == "root")
    if piece.master is not None:
        split_master(param, piece.param, piece.master)


# Note [The 16-bit remainder]
# bits(master) = (bits(bf16) << 16) + remainder with remainder in [-2**15, 2**15): the bf16 value is the master rounded
# to nearest, ties up in bits. Both directions are exact, so the fp32 master costs two bytes beside the bf16 weight.
#
# fp16 has other exponent bits, so its master is kept whole: the fp32 master is the truth and the fp16 parameter is the
# master rounded to nearest even.


def join_master(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 parameter and its remainder, or of an fp16 parameter: then `master` itself."""
    if param.dtype is torch.float16:
        return master
    if param.device.type == "cpu":
        whole = torch.empty(param.numel(), dtype=torch.float32, device="cpu")
        _native.join_master(param.data_ptr(), master.data_ptr(), whole.data_ptr(), param.numel())
        return whole
    bits = (param.view(torch.int16).to(torch.int32) << 16) + master.to(torch.int32)
    return bits.view(torch.float32)


def split_master(whole: torch.Tensor, param: torch.Tensor, master: torch.Tensor) -> None:
    """Write the master `whole` into a 16-bit parameter and what `master` keeps of it: `join_master`'s inverse."""
    if whole.dtype is param.dtype is torch.bfloat16:  # nothing is left to keep
        param.copy_(whole)
        master.zero_()
        return
    whole = whole.float()
    if param.dtype is torch.float16:
        param.copy_(whole)
        if master.data_ptr() != whole.data_ptr():
            master.copy_(whole)
        return
    if param.device.type == "cpu":
        held = whole.contiguous()
        _native.split_master(held.data_ptr(), param.data_ptr(), master.data_ptr(), param.numel())
        return
    bits = whole.contiguous().view(torch.int32)
    high = ((bits.to(torch.int64) + 0x8000) >> 16).to(torch.int32)
    param.copy_(high.to(torch.int16).view(torch.bfloat16))
    master.copy_((bits.to(torch.int64) - (high.to(torch.int64) << 16)).to(torch.int16))
