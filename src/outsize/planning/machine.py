"""The figures of a machine that bound a step: how fast it computes, updates and moves bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import exp, isfinite, log
from typing import Any

from outsize.planning.text import Rows, text_table

Curve = tuple[tuple[float, float], ...]
"""(amount of work, seconds that it takes), ascending."""

GIGA = 1e9
CPU, ACCELERATOR = "cpu", "accelerator"
_FLOPS = {CPU: 40e9, ACCELERATOR: 60e12}
_HALF = {CPU: 0.5, ACCELERATOR: 5.0}
"""How many times as fast products of 16 bits are."""
_MEMORY = {CPU: 15e9, ACCELERATOR: 1.5e12}


@dataclass(frozen=True)
class Machine:
    """What one machine does in a second; all rates are bytes a second unless they say otherwise.

    `typical` names the figures that were not measured: they have values that are usual.
    """

    device: str = CPU
    cores: int = 1
    """That updates may use."""
    products: Mapping[str, Curve] = field(default_factory=dict)
    """By dtype: seconds by FLOPs of products of matrices; attention and convolutions count as such."""
    memory: float = _MEMORY[CPU]
    """Of a copy on the computing device, read and written bytes together."""
    host_memory: float = _MEMORY[CPU]
    new_memory: float = 6e9
    """Of memory that comes from the system, beside what is then written there: buffers come and go on the CPU."""
    checksums: float = 10e9
    """Of memory that one core sums, as all is that is read from a disk or written there."""
    operation_seconds: float = 10e-6
    """Of an operation beside its work, in Python, torch and autograd."""
    updates: Mapping[str, tuple[float, float]] = field(default_factory=lambda: {"": (2e8, 4e8)})
    """By the format of the state: elements that the AdamW kernel updates a second, on half of the cores and on all."""
    disk_read: float = 1.5e9
    disk_write: float = 1.5e9
    disk_mixed: float = 1.5e9
    """Half read, half written at once."""
    disk_seconds: float = 100e-6
    """Of a request that is alone, beside its bytes."""
    to_device: float = 20e9
    from_device: float = 20e9
    both_ways: float = 35e9
    collectives: Curve = ((1e6, 1e-3), (1e9, 2e-2))
    """Of an all-gather over all ranks, by the bytes that each has in the end."""
    typical: frozenset[str] = frozenset()
    source: str = ""
    """Whose figures they are, where somebody wrote them down in place of measuring."""

    def __post_init__(self) -> None:
        pairs = {**self.products, "collectives": self.collectives, "updates": tuple(self.updates.values())}
        flat = {
            name: [each for amount, seconds in found for each in (amount, seconds)] for name, found in pairs.items()
        }
        flat |= {each.name: [getattr(self, each.name)] for each in fields(self) if each.type in ("int", "float")}
        for name, values in flat.items():
            if not values:
                raise ValueError(f"{name} of the machine has no figure; leave it out, or measure it with outsize.probe")
            for value in values:
                if not isfinite(value) or value <= 0:
                    raise ValueError(f"{name} of the machine is {value}; every rate and time must be above 0")

    @property
    def measured(self) -> bool:
        return not (self.typical or self.source)

    def seconds_of(self, dtype: str, flops: float, nbytes: float) -> float:
        """Of one operation on the computing device."""
        curve = self.products.get(dtype)
        if curve is None:
            kind = CPU if self.device == CPU else ACCELERATOR
            rate = _FLOPS[kind] * (self.cores if kind == CPU else 1) * (1 if dtype == "float32" else _HALF[kind])
            curve = ((1.0, 1 / rate),)
        products = seconds_on(curve, flops) if flops else 0.0
        return self.operation_seconds + max(products, nbytes / self.memory)

    def update_rate(self, kind: str, all_cores: bool) -> float:
        """Elements a second."""
        return self.updates.get(kind, next(iter(self.updates.values())))[all_cores]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "typical": sorted(self.typical)}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Machine:
        """Raises `ValueError`, `TypeError` or `KeyError` for what is no machine."""
        known = {each.name: found[each.name] for each in fields(cls)}
        if found.keys() - known:
            raise KeyError(f"{', '.join(found.keys() - known)} is no figure of a machine")
        known["products"] = {name: tuple(map(tuple, curve)) for name, curve in found["products"].items()}
        known["updates"] = {name: tuple(pair) for name, pair in found["updates"].items()}
        known["collectives"] = tuple(map(tuple, found["collectives"]))
        known["typical"] = frozenset(found["typical"])
        return cls(**known)

    def __str__(self) -> str:
        return "\n".join(text_table(self._rows(), "<><"))

    __repr__ = __str__

    def _rows(self) -> Rows:
        rows: list[tuple[str, str, str]] = [("figure", "value", "")]

        def row(name: str, what: str, value: float, unit: str, remark: str = "") -> None:
            rows.append((what, f"{value:,.3g} {unit}", "typical" if name in self.typical else remark))

        for dtype, curve in sorted(self.products.items()):
            rate = max(x / y for x, y in curve) / GIGA
            row("products", f"products, {dtype}", rate, "GFLOP/s", "at best")
        if "products" in self.typical:
            row("products", "products", 1 / (self.seconds_of("float32", GIGA, 0) - self.operation_seconds), "GFLOP/s")
        row("operation_seconds", "of an operation, in Python", self.operation_seconds * 1e6, "us")
        row("memory", "memory of the device", self.memory / GIGA, "GB/s", "copy, read + write")
        row("host_memory", "memory of the host", self.host_memory / GIGA, "GB/s", "copy, read + write")
        if self.device == CPU:
            row("new_memory", "new memory", self.new_memory / GIGA, "GB/s", "as it comes from the system")
        row("checksums", "checksums", self.checksums / GIGA, "GB/s", "one core")
        for name, (half, full) in self.updates.items():
            row("updates", f"AdamW {name}".strip(), full / GIGA, "G elements/s", f"half of the cores {half / GIGA:.3g}")
        row("disk_read", "disk read", self.disk_read / GIGA, "GB/s")
        row("disk_write", "disk write", self.disk_write / GIGA, "GB/s")
        row("disk_mixed", "disk, half of each", self.disk_mixed / GIGA, "GB/s")
        row("disk_seconds", "a request alone", self.disk_seconds * 1e6, "us", "beside its bytes")
        if self.device != CPU:
            row("to_device", "host to device", self.to_device / GIGA, "GB/s")
            row("from_device", "device to host", self.from_device / GIGA, "GB/s")
            row("both_ways", "both at once", self.both_ways / GIGA, "GB/s")
        if self.collectives != Machine.collectives:
            row("collectives", "all-gather", max(x / y for x, y in self.collectives) / GIGA, "GB/s", "at best")
        return rows


def seconds_on(curve: Curve, amount: float) -> float:
    """Seconds of an amount of work: between two measured ones straight in both logarithms, beyond them at the rate of
    the largest, below them no less than a fixed cost takes."""
    at = bisect_left(curve, (amount,))
    if at == len(curve):
        return curve[-1][1] * amount / curve[-1][0]
    if at == 0:
        return curve[0][1] * max(amount / curve[0][0], 0.2)
    (low, before), (high, after) = curve[at - 1], curve[at]
    share = log(amount / low) / log(high / low)
    return exp(log(before) * (1 - share) + log(after) * share)


def typical_machine(device: str, cores: int) -> Machine:
    """One that nobody has measured."""
    kind = CPU if device == CPU else ACCELERATOR
    known = {"device", "cores", "typical", "source"}
    typical = frozenset(each.name for each in fields(Machine) if each.name not in known)
    updates = {"": (4e7 * max(cores, 1), 6e7 * max(cores, 1))}
    return Machine(device, cores, memory=_MEMORY[kind], updates=updates, typical=typical)
