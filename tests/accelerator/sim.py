"""The device module of the simulated accelerator: `torch.sim`, once `load` has been called.

torch allows one such backend a process, and must know it before the first backward. So the tests load it when they are
collected, and it is available only inside `switched_on`: without that, outsize and torch find no accelerator.
"""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import DefaultDeviceType

from tests.accelerator.build import LIBRARY

_initialized = True  # else torch's checkpoint forgets the device's random numbers
_native: Any = None
_available = False
_count = 1

Device = torch.device | str | int | None  # what torch takes for a device


@dataclass(frozen=True)
class Stop:
    """What stopped a host thread at a place: "pageable copy", "pinned copy", "item", "event", "stream" or "device"."""

    kind: str
    thread: str
    place: str
    calls: int
    seconds: float


def load() -> None:
    """Make `torch.sim` and the device "sim" known, switched off."""
    global _native
    if _native is not None:
        return
    if not LIBRARY.exists():
        raise FileNotFoundError(f"{LIBRARY} is not built; run: make setup")
    loader = importlib.machinery.ExtensionFileLoader("_sim", str(LIBRARY))
    spec = importlib.util.spec_from_loader("_sim", loader)
    assert spec is not None
    _native = importlib.util.module_from_spec(spec)
    loader.exec_module(_native)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _native.set_device_count(2)
    torch.set_num_threads(torch.get_num_threads())  # after a fork torch makes its pool anew, which two threads may not
    torch.ones((), requires_grad=True).backward()  # now torch has a thread for the backward of each
    _native.set_device_count(1)
    set_clock(None)


@contextmanager
def switched_on(policy: str = "now", seed: int = 0, memory_cap: int = 1 << 30, devices: int = 1) -> Iterator[Any]:
    """The device is available inside, or two of it, with a clean record; what was found wrong raises at the end. Which
    of them is the current one must be at the end as it was."""
    global _available, _count
    load()
    gc.collect()  # what an earlier test left in a traceback is not this one's memory
    _native.reset()
    set_policy(policy, seed)
    set_memory_cap(memory_cap)
    _count = devices
    _native.set_device_count(devices)
    manual_seed_all(0)
    reset_peak_memory_stats()
    _available = True
    DefaultDeviceType.set_device_type("sim")
    try:
        yield sys.modules[__name__]
        assert current_device() == 0
        for index in range(devices):
            synchronize(index)
        found = problems()
        assert not found, "\n".join(found)
    finally:
        _native.reset()
        set_policy("now")
        set_clock(None)
        set_device(0)
        _available = False
        DefaultDeviceType.set_device_type("cpu")


# ---- what only a simulation has ----


def set_policy(policy: str, seed: int = 0) -> None:
    """When copies run: "now", "hold" (when somebody waits for them) or "random"."""
    assert policy in ("now", "hold", "random")
    _native.set_policy(policy, seed)


def set_memory_cap(nbytes: int) -> None:
    """Allocations beyond it raise `torch.OutOfMemoryError`."""
    _native.set_memory_cap(nbytes)


def set_detector(on: bool) -> None:
    """Whether races are looked for."""
    _native.set_detector(on)


def set_clock(
    flops: float | None, memory: float = 2e12, to_device: float = 50e9, to_host: float = 50e9, launch: float = 5e-6
) -> None:
    """Let kernels and copies take time, in flops and bytes a second and seconds a launch; `flops=None` stops the clock.

    Their work is done at once all the same: keep tensors small, or the host pays for what the device should do.
    """
    _native.set_clock(flops is not None, flops or 1.0, memory, to_device, to_host, launch)


def problems() -> list[str]:
    """Races and spoilt copies found since the device was switched on."""
    return list(_native.problems())


def counts() -> list[Stop]:
    """What stopped the host, by kind, thread and place."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        Stop(kind, names.get(thread, "a thread of torch"), place, calls, seconds)
        for kind, thread, place, calls, seconds in _native.counts()
    ]


def pooled() -> int:
    """Bytes that are allocated in pools."""
    return sum(nbytes for pool, nbytes in _native.pools().items() if pool != 0)


def reset_counts() -> None:
    _native.reset_counts()


def is_awake(index: int) -> bool:
    """Whether it was chosen or had work, since the device was switched on."""
    return bool(_native.is_awake(index))


def host_register(address: int, nbytes: int) -> None:
    """Pin these bytes of the host's memory."""
    _native.host_register(address, nbytes)


def host_unregister(address: int) -> None:
    """Unpin them; an error while a copy of them is in flight."""
    _native.host_unregister(address)


# ---- what every device module has ----

Stream = torch.Stream
Event = torch.Event


def is_available() -> bool:
    return _available


def is_initialized() -> bool:
    return True


def init() -> None:
    return


def device_count() -> int:
    return _count if _available else 0


def current_device() -> int:
    return int(torch._C._accelerator_getDeviceIndex())


def _index(device: Device) -> int:
    index = device if isinstance(device, int) else torch.device("sim" if device is None else device).index
    return current_device() if index is None else index


class device:
    """The block in which a device is the current one."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch._C._accelerator_exchangeDevice(self._index)

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self._before)


def set_device(device: Device) -> None:
    torch._C._accelerator_setDeviceIndex(_index(device))


def synchronize(device: Device = None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(device))


def current_stream(device: Device = None) -> torch.Stream:
    return torch._C._accelerator_getStream(_index(device))


def stream(chosen: torch.Stream) -> torch.Stream:
    """The block in which it is the current one."""
    return chosen


def set_stream(stream: torch.Stream) -> None:
    torch._C._accelerator_setStream(stream)


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def _is_in_bad_fork() -> bool:
    return False


def manual_seed(seed: int) -> None:
    if _native is not None:
        _native.default_generator(-1).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(_count if _native is not None else 0):
        _native.default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    return int(_native.default_generator(-1).initial_seed())


def get_rng_state(device: Device = "sim") -> torch.Tensor:
    return _native.default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = "sim") -> None:
    _native.default_generator(_index(device)).set_state(new_state)


def memory_stats(device: Device = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(0)


def memory_allocated(device: Device = None) -> int:
    return torch.accelerator.memory_allocated(0)


def max_memory_allocated(device: Device = None) -> int:
    return torch.accelerator.max_memory_allocated(0)


def memory_reserved(device: Device = None) -> int:
    return torch.accelerator.memory_reserved(0)


def max_memory_reserved(device: Device = None) -> int:
    return torch.accelerator.max_memory_reserved(0)


def reset_peak_memory_stats(device: Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(0)


class MemPool:
    """Memory that only allocations inside `use_mem_pool` take."""

    _numbers = itertools.count(1)

    def __init__(self, use_on_oom: bool = False) -> None:
        self.number, self.device = next(self._numbers), current_device()


@contextmanager
def use_mem_pool(pool: MemPool, device: Device = None) -> Iterator[None]:
    assert pool.device == _index(device)
    _native.set_pool(pool.number)
    try:
        yield
    finally:
        _native.set_pool(0)


def mem_get_info(device: Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(0)


def empty_cache() -> None:
    torch.accelerator.empty_cache()
