"""The oracle is what the papers print, and the engine's own promises."""

import itertools
import math

import pytest

from outsize.plan.memory import (
    EXACT_STATE,
    BytesPerSecond,
    DiskTraffic,
    OnDisk,
    Scheme,
    Stage,
    activation_bytes_per_layer,
    chen_segment_layers,
    disk_traffic,
    efficiency,
    infinity_activation_bytes,
    infinity_activation_checkpoint_bytes,
    infinity_activation_working_values,
    infinity_model_state_bytes,
    infinity_model_working_bytes,
    infinity_parameters,
    intensity_of_activation_checkpoints,
    intensity_of_optimizer_state,
    intensity_of_parameters_and_gradients,
    largest_parameters,
    offload_traffic_bytes,
    step_floor_seconds,
    zero_bytes_per_device,
    zero_communication_elements,
)
from outsize.plan.tables import zero_rows, zero_table

GB, GIB, TIB = 10**9, 2**30, 2**40
EVERYTHING = OnDisk(params=True, grads=True, states=True)
NOTHING = OnDisk()


def printed(value: float, text: str) -> bool:
    """Whether `text` is `value` rounded, halves either way, to as many decimals as `text` has."""
    decimals = len(text.partition(".")[2])
    return abs(value - float(text)) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


@pytest.mark.parametrize(
    ("parameters", "ranks", "stage", "gigabytes"),
    [
        (7_500_000_000, 64, 0, "120"),
        (7_500_000_000, 64, 1, "31.4"),
        (7_500_000_000, 64, 2, "16.6"),
        (7_500_000_000, 64, 3, "1.88"),
        (128_000_000_000, 1024, 0, "2048"),
        (128_000_000_000, 1024, 1, "513"),
        (128_000_000_000, 1024, 3, "2"),
        (10**12, 1024, 0, "16000"),
        (10**12, 1024, 3, "15.6"),
    ],
)
def test_zero_states_are_those_printed(parameters: int, ranks: int, stage: Stage, gigabytes: str) -> None:
    assert printed(zero_bytes_per_device(parameters, ranks, stage) / GB, gigabytes)


@pytest.mark.parametrize(
    ("parameters", "stage", "gigabytes"), [(128 * GB, 1, 513), (128 * GB, 2, 257), (10**12, 1, 4011), (10**12, 2, 2013)]
)
def test_zero_states_are_those_printed_where_the_paper_cut_the_decimals_off(
    parameters: int, stage: Stage, gigabytes: int
) -> None:
    assert math.floor(zero_bytes_per_device(parameters, 1024, stage) / GB) == gigabytes


def test_one_rank_has_everything_at_any_stage() -> None:
    stages: tuple[Stage, ...] = (0, 1, 2, 3)
    assert {zero_bytes_per_device(1000, 1, stage) for stage in stages} == {16_000}


def test_only_stage_three_communicates_more_than_data_parallelism() -> None:
    stages: tuple[Stage, ...] = (0, 1, 2, 3)
    assert [zero_communication_elements(10, stage) for stage in stages] == [20, 20, 20, 30]


def test_offloading_moves_four_bytes_a_parameter() -> None:
    assert offload_traffic_bytes(13 * GB) == 52 * GB


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "trillions", "states", "activations", "checkpoints"),
    [
        (80, 10240, 128, ".10", "1.83", "2.03", ".05"),
        (100, 20480, 160, ".50", "9.16", "3.91", ".12"),
        (128, 25600, 256, "1.01", "18.31", "7.13", ".20"),
        (195, 65536, 512, "10.05", "182.81", "24.38", ".76"),
        (315, 163840, 1024, "101.47", "1845.70", "88.59", "3.08"),
    ],
)
def test_infinity_table_is_reproduced(
    layers: int, hidden: int, heads: int, trillions: str, states: str, activations: str, checkpoints: str
) -> None:
    assert printed(infinity_parameters(layers, hidden) / 1e12, trillions)
    assert printed(infinity_model_state_bytes(layers, hidden) / TIB, states)
    assert printed(infinity_activation_bytes(layers, hidden, heads, batch=32, sequence=1024) / TIB, activations)
    assert printed(infinity_activation_checkpoint_bytes(layers, hidden, batch=32, sequence=1024) / TIB, checkpoints)


@pytest.mark.parametrize(
    ("hidden", "heads", "states", "activations"),
    [
        (20480, 160, "6.25", "2.50"),
        (25600, 256, "9.77", "3.56"),
        (65536, 512, "64", "8"),
        (163840, 1024, "400", "18"),
    ],
)
def test_infinity_working_memory_is_that_printed(hidden: int, heads: int, states: str, activations: str) -> None:
    batch = 32 // 16  # A node's batch over its GPUs.
    values = infinity_activation_working_values(hidden, heads, batch, sequence=1024)
    assert printed(infinity_model_working_bytes(hidden) / GIB, states)
    assert printed(2 * values / GIB, activations)


def test_checkpoints_further_apart_trade_checkpoint_memory_for_working_memory() -> None:
    assert infinity_activation_checkpoint_bytes(8, 64, 2, 16, interval=4) == 2 * 2 * 16 * 64 * 2
    assert infinity_activation_working_values(64, 4, 2, 16, interval=4) == 4 * 2 * 16 * (16 * 64 + 2 * 4 * 16)


@pytest.mark.parametrize(
    ("flops_per_byte", "bytes_per_second", "share"),
    [
        (intensity_of_parameters_and_gradients(batch=1, sequence=1024), 70e9, ".506"),
        (intensity_of_optimizer_state(batch=2, sequence=1024), 1.5e12, ".916"),
        (intensity_of_activation_checkpoints(hidden=2048), 2e9, ".58"),
        (intensity_of_activation_checkpoints(hidden=8192), 1e9, ".74"),
    ],
)
def test_infinity_efficiencies_are_those_printed(flops_per_byte: float, bytes_per_second: float, share: str) -> None:
    assert printed(efficiency(flops_per_byte, bytes_per_second, peak_flops_per_second=70e12), share)


@pytest.mark.parametrize(
    ("system", "memory_bytes", "bytes_per_parameter", "billions"),
    [
        ("data parallel", 32e9, zero_bytes_per_device(1, 16, 0), 1.4),
        ("ZeRO-2", 32e9, zero_bytes_per_device(1, 16, 2), 10),
        ("ZeRO-Offload", 32e9, 2, 13),
        ("ZeRO-3", 32e9, zero_bytes_per_device(1, 16, 3), 20),
        ("3D parallelism", 16 * 32e9, 16, 20),
        ("Infinity on CPU", 1.5e12, 20, 70),
        ("Infinity on NVMe", 28e12, 20, 1000),
        ("Infinity on NVMe, 32 nodes", 32 * 28e12, 20, 32_000),
    ],
)
def test_largest_published_models_fit_and_fill_most_of_the_memory(
    system: str, memory_bytes: float, bytes_per_parameter: float, billions: float
) -> None:
    bound = largest_parameters(memory_bytes, bytes_per_parameter)
    assert 0.6 * bound <= billions * GB <= bound, system


def test_chen_segment_length_keeps_the_fewest_activations() -> None:
    def alive(layers: int, segment: int) -> int:
        return math.ceil(layers / segment) + segment

    for layers in range(1, 400):
        best = min(alive(layers, segment) for segment in range(1, layers + 1))
        assert alive(layers, chen_segment_layers(layers)) == best
        assert abs(chen_segment_layers(layers) - math.sqrt(layers)) <= 0.5


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("keep", 34 + 80),
        ("tensor-parallel", 10 + 24 / 8 + 80 / 8),
        ("tensor-sequence-parallel", 34 / 8 + 80 / 8),
        ("tensor-parallel selective", 10 + 24 / 8),
        ("tensor-sequence-parallel selective", 34 / 8),
        ("recompute", 2),
    ],
)
def test_korthikanti_bytes_per_layer_of_gpt_3(scheme: Scheme, expected: float) -> None:
    bytes_per_layer = activation_bytes_per_layer(scheme, 2048, 4, 12288, 96, tensor_parallel=8)
    assert bytes_per_layer == pytest.approx(2048 * 4 * 12288 * expected, rel=1e-12)


@pytest.mark.parametrize(("heads", "hidden", "saved"), [(96, 12288, ".70"), (128, 20480, ".65")])
def test_korthikanti_selective_recomputation_saves_what_is_printed(heads: int, hidden: int, saved: str) -> None:
    keep = activation_bytes_per_layer("tensor-sequence-parallel", 2048, 1, hidden, heads, tensor_parallel=8)
    selective = activation_bytes_per_layer(
        "tensor-sequence-parallel selective", 2048, 1, hidden, heads, tensor_parallel=8
    )
    assert printed(1 - selective / keep, saved)


def test_exact_state_is_twelve_bytes_and_fourteen_in_fp16() -> None:
    assert {dtype: state.total for dtype, state in EXACT_STATE.items()} == {
        "float32": 12,
        "bfloat16": 12,
        "float16": 14,
    }


def test_update_from_disk_keeps_the_promise_of_twelve_bytes_each_way() -> None:
    state = EXACT_STATE["bfloat16"]
    traffic = disk_traffic(state, OnDisk(params=True, states=True))
    assert traffic.read_bytes - state.weight == 12  # Without the backward's fetch.
    assert traffic.written_bytes == 12


@pytest.mark.parametrize(
    ("on_disk", "read_bytes", "written_bytes"),
    [
        (OnDisk(), 0, 0),
        (OnDisk(params=True), 4, 2),
        (OnDisk(grads=True), 2, 2),
        (OnDisk(states=True), 10, 10),
        (OnDisk(params=True, grads=True), 6, 4),
        (OnDisk(params=True, states=True), 14, 12),
        (OnDisk(grads=True, states=True), 12, 12),
        (EVERYTHING, 16, 14),
    ],
)
def test_disk_traffic_in_bf16(on_disk: OnDisk, read_bytes: int, written_bytes: int) -> None:
    assert disk_traffic(EXACT_STATE["bfloat16"], on_disk) == DiskTraffic(read_bytes, written_bytes)


def test_disk_traffic_of_the_other_dtypes() -> None:
    assert disk_traffic(EXACT_STATE["float32"], EVERYTHING) == DiskTraffic(4 + 8 + 4 + 4, 4 + 8 + 4)
    assert disk_traffic(EXACT_STATE["float16"], EVERYTHING) == DiskTraffic(2 + 4 + 8 + 2 + 2, 2 + 4 + 8 + 2)


def test_gradients_summed_in_fp32_move_four_bytes() -> None:
    traffic = disk_traffic(EXACT_STATE["bfloat16"], OnDisk(grads=True), gradient_bytes=4)
    assert traffic == DiskTraffic(4, 4)


def test_frozen_weights_are_read_twice_and_never_written() -> None:
    assert disk_traffic(EXACT_STATE["bfloat16"], EVERYTHING, trainable=False) == DiskTraffic(4, 0)
    assert disk_traffic(EXACT_STATE["bfloat16"], NOTHING, trainable=False) == DiskTraffic(0, 0)


def test_recomputing_several_units_at_once_reads_each_weight_once_more() -> None:
    for state, params, trainable in itertools.product(EXACT_STATE.values(), (False, True), (False, True)):
        on_disk = OnDisk(params=params, grads=True, states=True)
        plain = disk_traffic(state, on_disk, trainable=trainable)
        spanning = disk_traffic(state, on_disk, trainable=trainable, recompute_spans_units=True)
        assert spanning.read_bytes - plain.read_bytes == (state.weight if params else 0)
        assert spanning.written_bytes == plain.written_bytes


@pytest.mark.parametrize(
    ("slow", "seconds"),
    [
        ("compute", 3.0),
        ("host_to_device", 400.0),
        ("device_to_host", 200.0),
        ("dram", 2600.0),
        ("disk_read", 1600.0),
        ("disk_write", 1400.0),
    ],
)
def test_step_is_bound_by_its_slowest_resource(slow: str, seconds: float) -> None:
    names = ("host_to_device", "device_to_host", "dram", "disk_read", "disk_write")
    rates = BytesPerSecond(**{name: 1.0 if name == slow else 1e9 for name in names})
    traffic = disk_traffic(EXACT_STATE["bfloat16"], EVERYTHING)
    assert step_floor_seconds(100, 3.0, rates, traffic) == seconds


ZERO_TABLE = {
    7.5e9: {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
            256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)},
    128e9: {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 256: (518, 263, 8),
            1024: (513, 257, 2)},
    1e12: {1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
           256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)},
}  # fmt: skip
"""GB on a device with stage 1, 2 and 3 (Rajbhandari et al. 2020, table 1)."""


@pytest.mark.parametrize("parameters", ZERO_TABLE)
def test_the_table_of_the_zero_paper(parameters: float) -> None:
    for ranks, published in ZERO_TABLE[parameters].items():
        rows = zero_rows(parameters, ranks)
        for (_, paper, own), value in zip(rows[1:], published, strict=True):
            assert paper / 1e9 == pytest.approx(value, rel=0.006, abs=0.006)
            assert own < paper
        text = zero_table(parameters, ranks)
        assert all(f"{paper / 1e9:,.2f}" in text for _, paper, _ in rows)
