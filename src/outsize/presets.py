"""Placements under their published names, as fields for `Config` and `prepare`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

presets: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        name: MappingProxyType({"stage": stage, "params": params, "grads": grads, "states": states})
        for name, stage, params, grads, states in (
            ("ddp", 0, "device", "device", "device"),
            ("zero-2", 2, "device", "device", "device"),
            ("zero-offload", 2, "device", "host", "host"),
            ("zero-3", 3, "device", "device", "device"),
            ("zero-infinity-cpu", 3, "host", "host", "host"),
            ("zero-infinity-nvme", 3, "disk", "disk", "disk"),
        )
    }
)
"""`outsize.prepare(model, optimizer, **outsize.presets["zero-offload"])`: the placements of ZeRO (Rajbhandari et al.
2020), ZeRO-Offload (Ren et al. 2021) and ZeRO-Infinity (Rajbhandari et al. 2021, table 2)."""
