"""How much memory and disk there is, where the user names no budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

from outsize.api.ranks import local_ranks
from outsize.checkpoint.folder import remove_leftovers
from outsize.config import Config
from outsize.move.disk import dead_saves, free_bytes
from outsize.planning.placement import Budgets

HOST_MARGIN = 0.8
DEVICE_MARGIN = 0.7
DISK_MARGIN = 0.95
"""The share of what is free that is used when the user names no budget; the rest is for activations and others."""

UNKNOWN_BYTES = 1 << 62
"""More than there is anywhere: what an accelerator has free of which torch does not tell."""

CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Where the kernel tells of this container's memory: (folder, limit, use, and the field of memory.stat with what is in
the use but free for the taking: cached files that nobody has read again)."""


def find_budgets(config: Config, dry: bool = False) -> Budgets:
    """The budgets in bytes; what the user did not name follows from what is free."""
    here = local_ranks()
    host = config.host_memory if config.host_memory is not None else int(available_memory() * HOST_MARGIN) // here
    device = config.device_memory
    if config.compute_device.type != "cpu" and device is None:
        free = available_memory(config.compute_device)
        if free >= UNKNOWN_BYTES:
            raise ValueError(
                f"torch does not tell how much memory {config.compute_device} has free: give device_memory"
            )
        device = int(free * DEVICE_MARGIN)
    if config.compute_device.type == "cpu":
        host = min(int(host), int(device)) if device is not None else host
        device = None
    asked = cast("int | None", config.disk_space)
    disk = asked if dry else None
    if config.directories and disk is None:
        for directory in config.directories:
            for saved_into in dead_saves(directory):  # half a checkpoint holds the space of the run's files
                remove_leftovers(saved_into)
        disk = int(free_bytes(config.directories) * DISK_MARGIN) // here
        disk = disk if asked is None else min(disk, asked)
    offloads = config.activations == "offload" and config.activations_tier != "host" and bool(config.directories)
    return Budgets(int(host), None if device is None else int(device), disk, offloads=offloads)


def available_memory(device: torch.device | None = None) -> int:
    """Free bytes of an accelerator, `UNKNOWN_BYTES` where torch does not tell; else bytes of host memory that a new
    process could take, within the control group's limit."""
    if device is not None and device.type != "cpu":
        module = torch.get_device_module(device)
        return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else UNKNOWN_BYTES
    free = _meminfo_available()
    for limit, used in _control_group():
        free = min(free, max(limit - used, 0))
    return free


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_group() -> Iterator[tuple[int, int]]:
    """(the limit, what is used of it) in bytes."""
    for folder, limit, used, inactive in CONTROL_GROUPS:
        try:
            bound, taken = int((folder / limit).read_text()), int((folder / used).read_text())
        except (OSError, ValueError):
            continue
        yield bound, max(taken - _statistic(folder / "memory.stat", inactive), 0)


def _statistic(path: Path, name: str) -> int:
    try:
        return int(dict(line.split() for line in path.read_text().splitlines())[name])
    except (OSError, ValueError, KeyError):
        return 0
