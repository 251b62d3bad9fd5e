"""A call in parts: its tensors are cut along one dimension, each part is computed alone, the results are joined."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

logger = logging.getLogger("outsize")

# Note [Parts]
# A call may be cut where each row is computed for itself. A module does not say so, and a wrong guess would be silent:
# batch norm looks at all rows, a mask of [T, T] is no batch where T is the batch size by chance. So it is tried: two
# rows together must give what each gives alone. The trial runs once for a call of this form, on two rows, and leaves
# buffers and random numbers as they were. A call that draws random numbers draws others for one row; there the result
# for the first row must not change with the second.

Call = tuple[tuple[Any, ...], dict[str, Any]]

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
ROUGH = 3e-2
"""Of the trial, relative to the largest value, for other dtypes: rounding differs with the number of rows."""


@final
@dataclass(frozen=True)
class Parts:
    """`count` parts along dimension `dim`. A `strict` one refuses what cannot be cut, where another runs whole, and
    is cut under a checkpoint too. What is `proven` to compute each row alone is not tried."""

    count: int
    dim: int = 0
    strict: bool = False
    proven: bool = False

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
        """The calls that together are this one; itself alone where there is nothing to cut."""
        rows = self._rows(args, kwargs)
        if self.count == 1 or rows < 2:
            return [(args, kwargs)]
        leaves, spec = tree_flatten((args, kwargs))
        count = min(self.count, rows)
        cut = {at: each.tensor_split(count, self.dim) for at, each in enumerate(leaves) if self._is_cut(each, rows)}
        return [
            tree_unflatten([cut[at][part] if at in cut else each for at, each in enumerate(leaves)], spec)
            for part in range(count)
        ]

    def join(self, results: Sequence[Any]) -> Any:
        """The result of the whole call: tensors behind each other along `dim`, all else from the first."""
        leaves, specs = zip(*map(tree_flatten, results), strict=True)
        joined = [
            torch.cat(each, self.dim) if isinstance(each[0], torch.Tensor) and each[0].ndim > self.dim else each[0]
            for each in zip(*leaves, strict=True)
        ]
        return tree_unflatten(joined, specs[0])

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """What a call looks like, but for the sizes of its tensors: which of them are cut."""
        rows = self._rows(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        return tuple((self._is_cut(each, rows), getattr(each, "ndim", None)) for each in leaves), str(spec)

    def fault(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why the parts of this call must not be computed alone; None where they may. See Note [Parts]."""
        rows = self._rows(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        cut = [self._is_cut(each, rows) for each in leaves]
        random = Random(leaves)

        def run(*rows: int) -> Any:
            random.restore()
            index = torch.tensor(rows)
            values = [each.index_select(self.dim, index.to(each.device)) if is_cut else each for each, is_cut in pairs]
            some_args, some_kwargs = tree_unflatten(values, spec)
            return forward(*some_args, **some_kwargs)

        pairs = list(zip(leaves, cut, strict=True))
        try:
            with _disable_current_modes():  # a checkpoint that keeps some operations counts those of the forward alone
                together = run(0, 1)
                drawn = random.is_drawn()
                alone = self.join([run(0), run(1)])
                return self._difference(together, alone, run(0, 0) if drawn else None)
        except (RuntimeError, ValueError, IndexError) as error:
            return f"two rows of its input do not go through it one by one ({error})"
        finally:
            random.restore()

    def refuse(self, name: str, fault: str) -> None:
        """Raises `ValueError` where that is wanted, else tells that the layer runs whole."""
        if self.strict:
            raise ValueError(f"outsize.tiled: {name} cannot run in tiles along dim={self.dim}: {fault}")
        logger.warning("micro_batches: layer %s runs on the whole batch: %s", name, fault)

    def _difference(self, together: Any, alone: Any, first: Any = None) -> str | None:
        """Of two rows. With `first`, the result for the first one twice, the values of that row alone are compared."""
        ours, spec = tree_flatten(alone)
        theirs, wanted = tree_flatten(together)
        firsts, again = (ours, spec) if first is None else tree_flatten(first)
        if spec != wanted or again != wanted:
            return "its result has another structure when it gets fewer rows"
        for one, other, twice in zip(ours, theirs, firsts, strict=True):
            if not isinstance(one, torch.Tensor):
                if one is not other and one != other:
                    return f"it returns {other!r} for two rows and {one!r} for one"
                continue
            if one.shape != other.shape or one.ndim <= self.dim:
                return f"it returns a tensor of shape {tuple(other.shape)}, which has no rows to put together"
            if isinstance(twice, torch.Tensor) and first is not None:
                one, other = twice.narrow(self.dim, 0, 1), other.narrow(self.dim, 0, 1)
            worst = _largest(one.double() - other.double())
            if worst > TOLERANCE.get(one.dtype, ROUGH) * max(_largest(other.double()), 1e-6):
                return "its result for a row depends on the other rows"
        return None

    def _rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The rows of the first tensor; 0 where it has no such dimension."""
        first = next((each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)), None)
        return 0 if first is None or first.ndim <= self.dim else first.size(self.dim)

    def _is_cut(self, value: Any, rows: int) -> bool:
        return isinstance(value, torch.Tensor) and value.ndim > self.dim and value.size(self.dim) == rows


@final
class Random:
    """The random numbers of the CPU and of the devices of some values, as they were."""

    def __init__(self, values: Sequence[Any]) -> None:
        devices = {each.device for each in values if isinstance(each, torch.Tensor) and each.device.type != "cpu"}
        self._host = torch.get_rng_state()
        self._states = {device: torch.get_device_module(device).get_rng_state(device) for device in devices}

    def is_drawn(self) -> bool:
        now = {device: torch.get_device_module(device).get_rng_state(device) for device in self._states}
        return not torch.equal(torch.get_rng_state(), self._host) or any(
            not torch.equal(now[device], state) for device, state in self._states.items()
        )

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        for device, state in self._states.items():
            torch.get_device_module(device).set_rng_state(state, device)


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().nan_to_num().max()) if values.numel() else 0.0
