"""What a random program trains, and how: a record that prints as Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

import outsize.optim
from tests.programs.models import NetSpec

KINDS = ("params", "grads", "states")


@dataclass(frozen=True)
class Spec:
    """One model, one optimizer, one configuration.

    `fields` are those of `prepare`, and `elsewhere` what is other where a fresh model takes up a checkpoint. `room` is
    the budget, as times of the smallest that the plan accepts, or None for more than enough. `frozen` are indices of
    parameters; `late`: those of the side branch join the optimizer later. `large`: checkpoints are made as those of
    large models are. `uneven`: ranks have other numbers of rows.
    """

    seed: int
    net: NetSpec
    optimizer: str
    options: Mapping[str, Any]
    fields: Mapping[str, Any]
    elsewhere: Mapping[str, Any]
    room: float | None = None
    groups: int = 1
    late: bool = False
    scheduler: Literal["before", "after"] | None = None
    frozen: tuple[int, ...] = ()
    large: bool = False
    ranks: int = 1
    uneven: bool = False

    @property
    def places(self) -> list[dict[str, Any]]:
        """Where models rest in turn."""
        return [dict(self.fields), {**self.fields, **self.elsewhere}]

    @property
    def place_in_memory(self) -> dict[str, Any] | None:
        """The same arithmetic with everything in memory: what all other places are compared with. On several ranks
        units are slices, which norms add up. None where an accelerator steps units by formulas of its own."""
        on_cpu = torch.get_default_device().type == "cpu"
        if not on_cpu and any(
            all(place.get(kind, "auto") in ("auto", "device") for kind in KINDS) for place in self.places
        ):
            return None
        dropped = ("verify", "units") if self.ranks == 1 else ("verify",)
        kept = {name: value for name, value in self.fields.items() if name not in dropped}
        return {**kept, **dict.fromkeys(KINDS, "device" if on_cpu else "host"), "activations": "keep"}

    @property
    def follows_torch(self) -> bool:
        """Whether the arithmetic is that of plain torch."""
        return not {"compute_dtype", "state_format"} & self.fields.keys()

    @property
    def is_planned_exactly(self) -> bool:
        """Whether the plan counts each byte: not those of frozen parameters, set aside for them but not touched."""
        return not self.frozen

    @property
    def gradients_stay(self) -> bool:
        """Whether gradients are there between backward and step."""
        return "update" not in self.fields

    @property
    def gradients_come_once(self) -> bool:
        """Whether each backward has one contribution to each gradient, so that an interrupted one leaves the same."""
        return self.ranks == 1 and not (self.net.tied or self.net.shared or self.net.twice)

    @property
    def pauses(self) -> bool:
        """Whether gradients are added up before they are reduced, which takes room: other bits where there is none."""
        return self.gradients_stay and self.room is None

    def optimizer_of(self, params: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.optimizer, None) or getattr(outsize.optim, self.optimizer)
        groups: list[dict[str, Any]] = [{"params": params[index :: self.groups]} for index in range(self.groups)]
        for group in groups[1:]:
            group["lr"] = self.options["lr"] / 2
        made: torch.optim.Optimizer = kind(groups, **self.options)
        return made
