"""A cluster in figures that somebody wrote down: what each rank has of its memory, drives and links."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outsize.planning.machine import Curve, Machine, typical_machine
from outsize.planning.sizes import format_bytes, parse_bytes

UPDATE_BYTES = 28
"""Of host memory that an update of one parameter reads and writes."""
LATENCY = 30e-6
"""Seconds of a collective that moves nothing."""
GATHERED = (1e5, 1e6, 1e7, 1e8, 1e9, 1e10)
MOST = 10**18
"""Of any figure."""
COUNTS = ("nodes", "accelerators", "cores", "drives")
UNUSED = {
    "network": ("nodes", 1),
    "accelerator_link": ("accelerators", 1),
    "drive_space": ("drives", 0),
    "drive_read": ("drives", 0),
    "drive_write": ("drives", 0),
}
"""Fields that may be left out where another one has this value."""


@dataclass(frozen=True)
class Cluster:
    """Nodes that are alike. Sizes are bytes, rates bytes a second unless they say otherwise; one rank runs on each
    accelerator."""

    name: str
    nodes: int
    accelerators: int
    """Of a node, as are `cores`, `host_memory`, `host_bandwidth`, `network` and `drives`."""
    accelerator_memory: int
    accelerator_bandwidth: int
    accelerator_flops: int
    """A second, that products of 16 bits reach."""
    accelerator_link: int
    """From one accelerator to others of its node, in each direction."""
    host_memory: int
    host_bandwidth: int
    host_link: int
    """Between the host and one accelerator while all are in use, in each direction."""
    cores: int
    network: int
    """To other nodes, in each direction."""
    drives: int
    drive_space: int
    """Of one drive, as are the two rates."""
    drive_read: int
    drive_write: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.accelerators

    def share(self, ranks: int) -> tuple[int, int, int]:
        """Bytes of device, host and disk that one of so many ranks has. Raises `ValueError` where they are too many."""
        if ranks > self.ranks:
            raise ValueError(f"{ranks} ranks need as many accelerators, and {self} ({self.ranks} in all)")
        here = min(ranks, self.accelerators)
        return self.accelerator_memory, self.host_memory // here, self.drives * self.drive_space // here

    def machine(self, ranks: int) -> Machine:
        """The figures for one of so many ranks, which share a node's host, drives and network."""
        here = min(ranks, self.accelerators)
        cores = max(self.cores // here, 1)
        usual = typical_machine("accelerator", cores).updates[""]
        by_memory = self.host_bandwidth / here / UPDATE_BYTES
        read, write = (self.drives * rate / here for rate in (self.drive_read, self.drive_write))
        drive = (
            {"disk_read": read, "disk_write": write, "disk_mixed": 2 / (1 / read + 1 / write)} if self.drives else {}
        )
        products = ((1e6, 1e6 / self.accelerator_flops),)
        return Machine(
            "accelerator",
            cores,
            dict.fromkeys(("bfloat16", "float16"), products),
            memory=float(self.accelerator_bandwidth),
            host_memory=self.host_bandwidth / here,
            updates={"": (min(usual[0], by_memory), min(usual[1], by_memory))},
            **drive,
            to_device=float(self.host_link),
            from_device=float(self.host_link),
            both_ways=2.0 * self.host_link,
            collectives=self._collectives(ranks),
            typical=frozenset({"operation_seconds", "disk_seconds"}),
            source=f"cluster {self.name}",
        )

    def _collectives(self, ranks: int) -> Curve:
        """Of an all-gather: each accelerator takes in what the others of its node have, and each node what the other
        nodes have, both at once."""
        near, far = min(ranks, self.accelerators), -(-ranks // self.accelerators)
        seconds = (near - 1) / near / self.accelerator_link if near > 1 else 0.0
        seconds = max(seconds, (far - 1) / far / self.network if far > 1 else 0.0)
        return tuple((nbytes, LATENCY + nbytes * seconds) for nbytes in GATHERED)

    def __str__(self) -> str:
        return (
            f"cluster {self.name} has {self.nodes} x {self.accelerators} accelerators of "
            f"{format_bytes(self.accelerator_memory)} and {self.accelerator_flops / 1e12:,.4g} TFLOP/s; a node has "
            f"{format_bytes(self.host_memory)} of host memory, and {self.drives} drives of "
            f"{format_bytes(self.drive_space)}"
        )


def cluster_of(text: str) -> Cluster:
    """A preset by its name, `32xDGX-2` for 32 nodes of it, or a file with the fields of `Cluster` in TOML or JSON.

    Raises `ValueError` that names the field and its value, `FileNotFoundError` for an unknown name.
    """
    times = re.fullmatch(r"(\d{1,6})x(.+)", text)
    count, name = (int(times[1]), times[2]) if times else (1, text)
    preset = next((each for each in PRESETS if each.lower() == name.lower()), None)
    if preset is not None:
        return _made(text, {**PRESETS[preset], "nodes": count})
    path = Path(text)
    if not path.is_file():
        raise FileNotFoundError(
            f"cluster {text!r} is no file, and no preset: these are {', '.join(PRESETS)}, and 32x{next(iter(PRESETS))} "
            f"for 32 nodes"
        )
    try:
        found = _toml(path) if path.suffix == ".toml" else json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"cluster {text!r} is neither JSON nor TOML ({error}); TOML files end in .toml") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"cluster {text!r} holds a {type(found).__name__}; it must be a table of fields")
    return _made(text, found)


def _toml(path: Path) -> Any:
    try:
        toml = import_module("tomllib")
    except ModuleNotFoundError:
        raise ValueError("TOML needs Python 3.11; write JSON") from None
    return toml.loads(path.read_text())


def _made(name: str, found: Mapping[str, Any]) -> Cluster:
    known = [each.name for each in fields(Cluster) if each.name != "name"]
    values: dict[str, int] = {}
    unused = {field for field, (other, value) in UNUSED.items() if found.get(other) == value}
    missing = [field for field in known if field not in found and field not in unused]
    if missing or set(found) - set(known):
        wrong = [*(f"{field} is missing" for field in missing)]
        wrong += [f"{field} is unknown" for field in found if field not in known]
        raise ValueError(f"cluster {name!r}: {', '.join(wrong)}. The fields are: {', '.join(known)}")
    for field in known:
        value = found.get(field, 1)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            if field == "drives" and value == 0 and not isinstance(value, bool):
                values[field] = 0
            elif field in COUNTS and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field} is {value!r}; it must be an integer of at least {int(field != 'drives')}")
            else:
                values[field] = parse_bytes(value, field)
            if values[field] > MOST:
                raise ValueError(f"{field} is {value!r}; it must be at most {MOST:.0e}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"cluster {name!r}: {error}") from None
    return Cluster(name, **values)


_ORDER = tuple(each.name for each in fields(Cluster))[2:]
# accelerators, their memory, bandwidth, FLOP/s and link; host memory, bandwidth, link and cores; network; drives
_FIGURES: Mapping[str, tuple[int | float | str, ...]] = {
    "DGX-2": (
        *(16, "32GB", "900GB", 70e12, "150GB"),
        *("1.5TB", "200GB", "3GB", 48),
        *("100GB", 8, "3.5TB", "3.2GB", "2GB"),
    ),
    "DGX-A100": (
        *(8, "80GB", "2TB", 180e12, "300GB"),
        *("2TB", "300GB", "20GB", 128),
        *("200GB", 8, "3.84TB", "6.5GB", "3.5GB"),
    ),
    "DGX-H100": (
        *(8, "80GB", "3.35TB", 600e12, "450GB"),
        *("2TB", "450GB", "45GB", 112),
        *("400GB", 8, "3.84TB", "6.5GB", "3.5GB"),
    ),
    "gaming-PC": (
        *(1, "24GB", "1TB", 130e12, "20GB"),
        *("64GB", "60GB", "20GB", 16),
        *("1GB", 1, "2TB", "6GB", "5GB"),
    ),
    "laptop": (
        *(1, "8GB", "250GB", 30e12, "10GB"),
        *("32GB", "50GB", "10GB", 8),
        *("0.1GB", 1, "1TB", "4GB", "3GB"),
    ),
}
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: MappingProxyType(dict(zip(_ORDER, figures, strict=True))) for name, figures in _FIGURES.items()}
)
