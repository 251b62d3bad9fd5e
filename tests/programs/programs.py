"""Random programs: from a seed, what is trained and how, and what the loop does."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.programs.models import LAYERS, NetSpec
from tests.programs.operations import OPERATIONS
from tests.programs.spec import KINDS, Spec

TIERS = ("auto", "device", "host", "disk", "disk")

OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "eps": 1e-3}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.01, "eps": 1e-3}),
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adagrad", {"lr": 0.02, "lr_decay": 0.1, "eps": 1e-3}),
    ("RMSprop", {"lr": 0.002, "momentum": 0.5, "centered": True, "eps": 1e-2}),
    ("Lion", {"lr": 0.001, "weight_decay": 0.1}),
    ("NAdam", {"lr": 0.002, "eps": 1e-3}),
    ("RAdam", {"lr": 0.002, "eps": 1e-3}),
    ("Adamax", {"lr": 0.002, "eps": 1e-3}),
    ("Adadelta", {"lr": 0.1, "eps": 1e-4}),
    ("ASGD", {"lr": 0.01}),
    ("Rprop", {"lr": 0.001}),
    ("Adafactor", {"lr": 0.001}),
)
"""With an eps in whose light the rounding of a gradient that is almost zero does not show."""

SMOOTH = OPTIMIZERS[:8]
"""Where a gradient that is rounded otherwise, as a mean over ranks is, gives about the same weight."""

WITH_CODES = ("AdamW", "Adam", "Adagrad", "Lion")
"""Those that have `state_format="compact"`, whatever their options."""

OF_GRADIENTS = {
    *("backward", "two_forwards", "two_backwards", "step", "zero_grad", "clip"),
    *("drop_gradient", "scale_gradients", "read_gradients", "change_gradients"),
}
"""What `update="backward"` leaves to whole steps."""


@dataclass(frozen=True)
class Call:
    """One operation with its arguments."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """Prints as Python, and as the command that repeats it."""

    spec: Spec
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        command = f"python -m benchmarks.programs --seed {self.spec.seed} --ranks {self.spec.ranks}"
        calls = "".join(f"    {call!r},\n" for call in self.calls)
        return f"# {command}\nProgram({self.spec!r}, (\n{calls}))"


def program_of(seed: int, ranks: int = 1) -> Program:
    draw = random.Random(f"{seed} on {ranks}")
    spec = _spec(draw, seed, ranks)
    names = [name for name in OPERATIONS if spec.gradients_stay or name not in OF_GRADIENTS]
    if ranks > 1:
        names.remove("read_state")  # of which each rank has a part
    if "unused" in spec.fields:
        names.remove("failing")  # who fails gives nothing to those that have not come so far
    often = [OPERATIONS[name].often for name in names]
    calls = []
    for name in draw.choices(names, often, k=draw.choice((12, 24, 36))):
        arguments = {key: draw.choice(values) for key, values in OPERATIONS[name].arguments.items()}
        calls.append(Call(name, arguments))
    return Program(spec, tuple(calls))


def _spec(draw: random.Random, seed: int, ranks: int) -> Spec:
    net = NetSpec(
        width=draw.choice((8, 12, 24)),
        layers=tuple(draw.choice(list(LAYERS)) for _ in range(draw.randint(1, 4))),
        tied=draw.random() < 0.5,
        shared=draw.random() < 0.3,
        twice=draw.random() < 0.3,
    )
    optimizer, options = draw.choice(SMOOTH if ranks > 1 else OPTIMIZERS)
    fields, elsewhere = _fields(draw, ranks), {kind: draw.choice(TIERS) for kind in KINDS}
    if fields.get("stage") in (1, 2):
        fields["params"] = elsewhere["params"] = "device"
    if optimizer == "Adafactor":
        net = replace(net, layers=tuple(kind for kind in net.layers if kind != "odd") or ("feed",))  # divides by numel
    if optimizer in WITH_CODES and "amsgrad" not in options and draw.random() < 0.3:
        fields["state_format"] = "compact"
    late = draw.random() < 0.25
    return Spec(
        seed=seed,
        net=net,
        optimizer=optimizer,
        options=options,
        fields=fields,
        elsewhere=elsewhere,
        room=None if late else draw.choice((None, 1.0, 1.0, 1.1, 1.5)),
        groups=draw.choice((1, 2)),
        late=late,
        scheduler=draw.choice((None, "before", "after")),
        frozen=tuple(index for index in range(40) if draw.random() < 0.1) if draw.random() < 0.4 else (),
        large=draw.random() < 0.5,
        ranks=ranks,
        uneven=draw.random() < 0.5,
    )


def _fields(draw: random.Random, ranks: int) -> dict[str, Any]:
    fields: dict[str, Any] = {kind: draw.choice(TIERS) for kind in KINDS}
    fields["activations"] = draw.choice(("keep", "recompute", "offload", "selective", "auto"))
    if ranks > 1:
        fields["stage"] = draw.choice((0, 1, 2, 3, 3, 3))
        if draw.random() < 0.2:
            fields["unused"] = "sync"
    when = draw.random()
    if when < 0.2 and "unused" not in fields:
        fields["update"] = "backward"
    elif when > 0.85:
        fields["delayed_update"] = draw.choice((1, 2, 3))
    if draw.random() < 0.3:
        fields["compute_dtype"] = draw.choice((torch.bfloat16, torch.float16))
    if draw.random() < 0.3:
        fields["units"] = draw.choice((["Linear"], ["layers.0", "head"], ["norm"]))
    if draw.random() < 0.2:
        fields["verify"] = True
    return fields
