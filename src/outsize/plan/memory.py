"""How many bytes training takes, and how many it moves: the published formulas, then ours.

Every function is arithmetic on its arguments. Names carry the measure: `bytes`, `values` (elements of a tensor),
`elements` (on the wire), `seconds`. Results are exact integers where the formula gives one, else floats.

Papers:
    ZeRO            Rajbhandari et al., SC 2020, arXiv 1910.02054
    ZeRO-Offload    Ren et al., USENIX ATC 2021, arXiv 2101.06840
    ZeRO-Infinity   Rajbhandari et al., SC 2021, arXiv 2104.07857
    Chen            Chen et al. 2016, arXiv 1604.06174
    Korthikanti     Korthikanti et al. 2022, arXiv 2205.05198
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

Stage = Literal[0, 1, 2, 3]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
Scheme = Literal[
    "keep",
    "tensor-parallel",
    "tensor-sequence-parallel",
    "tensor-parallel selective",
    "tensor-sequence-parallel selective",
    "recompute",
]


# ZeRO


def zero_bytes_per_device(parameters: int, ranks: int, stage: Stage, optimizer_bytes: int = 12) -> float:
    """Model states on one device, with 2-byte parameters and gradients (ZeRO, sections 3 and 5).

    `optimizer_bytes` is per parameter: 12 for Adam with an fp32 master.
    Stage 1 divides the optimizer state by `ranks`, stage 2 the gradients too, stage 3 the parameters too.
    """
    divided = {0: 0, 1: optimizer_bytes, 2: optimizer_bytes + 2, 3: optimizer_bytes + 4}[stage]
    whole = optimizer_bytes + 4 - divided
    return parameters * (whole + divided / ranks)


def zero_communication_elements(parameters: int, stage: Stage) -> int:
    """Elements that each rank sends in a step (ZeRO, section 7).

    Stages 0 to 2 reduce-scatter the gradients and all-gather either them or the parameters; stage 3 gathers the
    parameters for the forward and again for the backward.
    """
    return parameters * (3 if stage == 3 else 2)


# ZeRO-Offload


def offload_traffic_bytes(parameters: int) -> int:
    """Bytes between CPU and GPU in a step: 2-byte gradients out, 2-byte parameters back (ZeRO-Offload, section 3)."""
    return 4 * parameters


# ZeRO-Infinity


def infinity_parameters(layers: int, hidden: int) -> int:
    """Parameters of a transformer, embeddings left out (ZeRO-Infinity, section 3)."""
    return 12 * layers * hidden**2


def infinity_model_state_bytes(layers: int, hidden: int) -> int:
    """Parameters, gradients and optimizer state at 20 bytes a parameter (ZeRO-Infinity, section 3)."""
    return 20 * infinity_parameters(layers, hidden)


def infinity_activation_bytes(layers: int, hidden: int, heads: int, batch: int, sequence: int) -> int:
    """All activations, 2 bytes each, nothing recomputed (ZeRO-Infinity, section 3)."""
    return 2 * layers * infinity_activation_working_values(hidden, heads, batch, sequence)


def infinity_activation_checkpoint_bytes(
    layers: int, hidden: int, batch: int, sequence: int, interval: int = 1
) -> float:
    """Inputs kept, 2 bytes a value, one checkpoint every `interval` layers (ZeRO-Infinity, section 3)."""
    return 2 * batch * sequence * hidden * layers / interval


def infinity_model_working_bytes(hidden: int) -> int:
    """Parameter and gradient, 2 bytes each, of the hidden-to-4-hidden linear layer (ZeRO-Infinity, section 3)."""
    return 4 * hidden * 4 * hidden


def infinity_activation_working_values(hidden: int, heads: int, batch: int, sequence: int, interval: int = 1) -> int:
    """Activation values between two checkpoints, recomputed in the backward (ZeRO-Infinity, section 3)."""
    return batch * sequence * interval * (16 * hidden + 2 * heads * sequence)


def intensity_of_parameters_and_gradients(batch: int, sequence: int) -> float:
    """FLOPs per byte of parameters and gradients moved (ZeRO-Infinity, section 4)."""
    return float(sequence * batch)


def intensity_of_optimizer_state(batch: int, sequence: int) -> float:
    """FLOPs per byte of optimizer state moved (ZeRO-Infinity, section 4)."""
    return sequence * batch / 4


def intensity_of_activation_checkpoints(hidden: int, interval: int = 1) -> float:
    """FLOPs per byte of activation checkpoints moved (ZeRO-Infinity, section 4)."""
    return float(24 * hidden * interval)


def efficiency(flops_per_byte: float, bytes_per_second: float, peak_flops_per_second: float) -> float:
    """The part of the peak that remains when computation waits for every byte (ZeRO-Infinity, section 4)."""
    fed_flops_per_second = flops_per_byte * bytes_per_second
    return fed_flops_per_second / (fed_flops_per_second + peak_flops_per_second)


# Activations


def chen_segment_layers(layers: int) -> int:
    """Layers between checkpoints that keep the fewest activations: sqrt(layers), rounded (Chen, section 4).

    `ceil(layers / segment)` checkpoints and one segment's activations are alive at once, for one extra forward.
    """
    root = math.isqrt(layers)
    return max(1, root + (layers > root * (root + 1)))


def activation_bytes_per_layer(
    scheme: Scheme, sequence: int, batch: int, hidden: int, heads: int, tensor_parallel: int = 1
) -> float:
    """Bytes kept for one transformer layer, 2-byte values and 1-byte masks (Korthikanti, sections 4 and 5).

    "selective" recomputes the attention's softmax and dropout; "recompute" keeps the layer's input alone.
    """
    attention = 5 * heads * sequence / hidden
    t = tensor_parallel
    bytes_per_value = {
        "keep": 34 + attention,
        "tensor-parallel": 10 + 24 / t + attention / t,
        "tensor-sequence-parallel": 34 / t + attention / t,
        "tensor-parallel selective": 10 + 24 / t,
        "tensor-sequence-parallel selective": 34 / t,
        "recompute": 2.0,
    }[scheme]
    return sequence * batch * hidden * bytes_per_value


# Ours


@dataclass(frozen=True)
class StateBytes:
    """Bytes at rest for one parameter. The exact fp32 master is `weight` and `remainder` together."""

    weight: int
    remainder: int
    moments: int

    @property
    def total(self) -> int:
        return self.weight + self.remainder + self.moments


EXACT_STATE: Final[Mapping[ComputeDtype, StateBytes]] = MappingProxyType(
    {
        "float32": StateBytes(weight=4, remainder=0, moments=8),
        "bfloat16": StateBytes(weight=2, remainder=2, moments=8),
        "float16": StateBytes(
            weight=2, remainder=4, moments=8
        ),  # fp16's exponent is too short: the master is kept whole.
    }
)
"""Exact AdamW: an fp32 master and two fp32 moments."""


@dataclass(frozen=True)
class OnDisk:
    """Which kinds rest on disk. The master's remainder rests with the states."""

    params: bool = False
    grads: bool = False
    states: bool = False


@dataclass(frozen=True)
class DiskTraffic:
    """Bytes for one parameter in one step."""

    read_bytes: int
    written_bytes: int


def disk_traffic(
    state: StateBytes,
    on_disk: OnDisk,
    *,
    gradient_bytes: int | None = None,
    trainable: bool = True,
    recompute_spans_units: bool = False,
) -> DiskTraffic:
    """Disk traffic of one parameter in one step, for one forward and one backward.

    The forward's fetch carries the update: whatever is on disk is read, and all but the gradient written back. The
    backward's fetch reads the weight again, and the gradient is written once. Recomputing a unit inside its own
    backward shares that fetch; a recomputed region of several units fetches each of them once more
    (`recompute_spans_units`). A frozen parameter's weight is only read.
    `gradient_bytes`: 4 when contributions were added up in fp32; the weight's size if not given.
    """
    weight = state.weight if on_disk.params else 0
    fetched = weight * (3 if recompute_spans_units else 2)
    if not trainable:
        return DiskTraffic(read_bytes=fetched, written_bytes=0)
    states = state.remainder + state.moments if on_disk.states else 0
    gradient = (state.weight if gradient_bytes is None else gradient_bytes) if on_disk.grads else 0
    return DiskTraffic(read_bytes=fetched + states + gradient, written_bytes=weight + states + gradient)


@dataclass(frozen=True)
class BytesPerSecond:
    """Bandwidths that one rank has to itself."""

    host_to_device: float
    device_to_host: float
    dram: float
    disk_read: float
    disk_write: float


def step_floor_seconds(
    parameters: int,
    compute_seconds: float,
    rates: BytesPerSecond,
    disk: DiskTraffic,
    *,
    weight_bytes: int = 2,
    update_dram_bytes: int = 26,
) -> float:
    """No offloaded step is faster than its slowest resource, even if everything overlaps.

    Weights go to the device for the forward and for the backward, gradients come back once in the weight's dtype. The
    update moves `update_dram_bytes` of host memory a parameter: 26 for a bf16 weight, its remainder and fp32 moments in
    and out and a bf16 gradient in.
    """
    return max(
        compute_seconds,
        2 * weight_bytes * parameters / rates.host_to_device,
        weight_bytes * parameters / rates.device_to_host,
        update_dram_bytes * parameters / rates.dram,
        disk.read_bytes * parameters / rates.disk_read,
        disk.written_bytes * parameters / rates.disk_write,
    )


def largest_parameters(memory_bytes: float, bytes_per_parameter: float) -> int:
    """Parameters whose model states fit `memory_bytes`, with nothing left for activations: an upper bound."""
    return math.floor(memory_bytes / bytes_per_parameter)
