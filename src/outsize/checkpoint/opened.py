"""A folder opened for a live model: a checkpoint of ours, safetensors, or one of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from outsize.checkpoint.arrays import Readable
from outsize.checkpoint.differences import Differences
from outsize.checkpoint.manifest import GradNote


@final
@dataclass(frozen=True)
class Opened:
    """What a folder holds, by the names of the live model. It was found to be whole and to fit. Close it after use."""

    weights: Mapping[str, Readable]
    """The values become exact masters where the live parameter has one."""
    buffers: Mapping[str, Readable]
    passed_over: Differences
    """What only one side has."""
    close: Callable[[], None]
    resting: Mapping[str, Mapping[str, Readable]] = field(default_factory=dict)
    """By parameter: "weight" and "master" as they rest, where both are stored for the live dtype."""
    arrays: Mapping[str, Mapping[str, Readable]] = field(default_factory=dict)
    """By parameter: the optimizer's arrays."""
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By parameter: the optimizer's other values, `Readable` where they lie in files. A parameter that has any state is
    among them."""
    absent: Collection[str] = ()
    """The live parameters of which the folder has nothing: they keep what they have."""
    hyper: Sequence[Mapping[str, Any]] = ()
    """The options of each parameter group."""
    steps: int = 0
    """Those that the optimizer has taken."""

    # Of a checkpoint of ours alone:
    trained_alone: bool = False
    """Whether it was saved without what was never trained."""
    name: str = ""
    """What tells it from other checkpoints."""
    grads: Mapping[str, Mapping[str, tuple[Readable, GradNote]]] = field(default_factory=dict)
    """By the keys of `GRADS`, then by parameter."""
    extra: Any = None
    extra_states: Mapping[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] | None = None
