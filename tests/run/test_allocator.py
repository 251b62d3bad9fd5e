"""What the allocator of the C library keeps, and what it gives back to the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from outsize.move import memory
from tests.conftest import Workshop, adamw, prepared
from tests.scripts import run_script

MATRIX = 1024 * 1024
GRADS = 8 * MATRIX * 2
pytestmark = pytest.mark.skipif(
    any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ), reason="the allocator is the user's"
)
SCRIPT = """
import ctypes, gc, json, resource, sys
from pathlib import Path
import torch
from torch import nn
import outsize

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, of which one fault brings many

places, directory = sys.argv[1].split(), sys.argv[2]
example = torch.ones(8, 1024, dtype=torch.bfloat16)
planning = "plan" in places
for place in (each for each in places if each != "plan"):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tiers = {} if place == "memory" else dict.fromkeys(("params", "grads", "states"), "disk")
    budget = "32MiB" if place == "tight" else "1GiB"
    outsize.prepare(
        model, optimizer, host_memory=budget, disk=directory, device="cpu", compute_dtype=torch.bfloat16, **tiers
    )
    grown, counts = resident() - before, []
    if planning:
        other = nn.Linear(1024, 1024)
        tiers = dict.fromkeys(("params", "grads", "states"), "disk")
        optimizer_of_other = torch.optim.AdamW(other.parameters())
        outsize.plan(other, optimizer_of_other, example=torch.ones(8, 1024), disk=directory, device="cpu", **tiers)
    for _ in range(8):
        first = faults()
        model(example).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(faults() - first)
    outsize.release(model)
    del model, optimizer
print(json.dumps([grown, sorted(counts)[4]]))
"""


@pytest.mark.parametrize(
    ("places", "least", "most"),
    [
        ("memory", 0, MATRIX),
        ("disk", 0, GRADS * 5 // 4),  # gradients on their way to disk lie in pages of their own
        ("tight", GRADS * 3 // 2, 1 << 40),
        ("tight memory", 0, MATRIX),
        ("memory plan", 0, MATRIX),
    ],
    ids=[
        "kept where all lies in memory",
        "kept beside a disk where the budget has room",
        "given back where it has none",
        "kept after a model that had no room is released",
        "kept beside a plan",
    ],
)
def test_gradients_of_a_step_lie_where_those_of_the_step_before_did(
    places: str, least: int, most: int, tmp_path: Path
) -> None:
    status, said, errors = run_script(SCRIPT, places, tmp_path)
    assert status == 0, errors
    _, faults = map(int, said.strip("[] \n").split(","))
    assert least <= faults <= most  # bytes that came from the system in a step


@pytest.mark.parametrize("trained", [0, 1])
def test_where_little_has_gradients_freed_memory_is_kept_beside_room_for_the_weights_again(
    workshop: Workshop, trained: int
) -> None:
    """Operations leave holes too."""
    for budget, kept in (("7MiB", False), ("12MiB", True)):
        with torch.device("cpu"):
            model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))  # 4 MiB
        model[trained:].requires_grad_(False)
        optimizer = adamw(model[:trained]) if trained else None
        workshop.prepare(model, optimizer, host_memory=budget, device="cpu", params="disk")
        placed = prepared(model).placed
        assert placed.stay_gathered
        assert (placed.kept_bytes > 0, placed.returns_freed_memory) == (kept, not kept)


def test_weights_at_rest_in_host_memory_leave_room_to_be_gathered_before_freed_memory_is_kept(
    workshop: Workshop,
) -> None:
    for budget, kept in (("12MiB", False), ("24MiB", True)):
        with torch.device("cpu"):
            model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))  # 4 MiB
        workshop.prepare(model.requires_grad_(False), host_memory=budget, device="cpu", params="host")
        assert (prepared(model).placed.kept_bytes > 0) == kept


OPERATIONS = """
import ctypes, resource, sys
from pathlib import Path
import torch
from torch import nn
import outsize
from outsize.api import placed

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, of which one fault brings many
placed.LEAST_HOLES, directory = int(sys.argv[1]), sys.argv[2]
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(512, 512), *(nn.Tanh() for _ in range(3)), nn.Linear(512, 512)) for _ in range(20))
)
model[:-1].requires_grad_(False)
optimizer = torch.optim.AdamW(model[-1].parameters(), lr=1e-4)
tiers = dict.fromkeys(("params", "grads", "states"), "disk")
outsize.prepare(
    model, optimizer, host_memory="56MiB", disk=directory, device="cpu", activations="recompute", **tiers
)
example = torch.ones(1024, 512, requires_grad=True)
faults = []
for _ in range(3):
    first = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model(example).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first)
print(min(faults) * resource.getpagesize(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


def test_where_units_come_and_go_a_part_of_the_budget_is_for_what_operations_free(tmp_path: Path) -> None:
    found = []
    for number, least in enumerate((1 << 40, 2 << 20)):  # none, and what there is
        program = [sys.executable, "-c", OPERATIONS, str(least), str(tmp_path / str(number))]  # a heap of its own
        said = subprocess.run(program, check=True, capture_output=True, text=True).stdout
        found.append([int(each) for each in said.split()])
    (faults, peak), (fewer, higher) = found
    assert fewer < 0.88 * faults  # bytes that came from the system in a step
    assert higher - peak < 32 << 20  # of the whole process


LARGE_HEAP = """
import ctypes, gc, sys
from pathlib import Path
import torch
from torch import nn
import outsize

def mebibytes(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(name)) >> 10

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, of which parts stay
torch.ones(31 << 18)  # blocks of its size come from the heap now
blocks, above = [torch.ones(15 << 18) for _ in range(12)], torch.ones(1 << 10)
del blocks
widths = [1024, 7900, 1024, 3000, 1024, 6500, 1024, 2000, 1024, 5000, 1024, 4000, 1024, 7000, 1024]
layers = [nn.Sequential(nn.Linear(*each), nn.GELU()) for each in zip(widths, widths[1:])]
together, budget = int(sys.argv[2]), sys.argv[3]
units = [layers[at : at + together] for at in range(0, len(layers), together)]
model = nn.Sequential(*(each[0] if together == 1 else nn.Sequential(*each) for each in units))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
example = torch.ones(8, 1024)
with torch.no_grad():
    model(example)
tiers = dict.fromkeys(("params", "grads", "states"), "disk")
fields = {"host_memory": budget + "MiB", "units": list(map(str, range(len(model)))), **tiers}
outsize.prepare(model, optimizer, disk=sys.argv[1], device="cpu", **fields)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = mebibytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
for _ in range(2):
    model(example).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(mebibytes("VmHWM") - before)
"""


@pytest.mark.parametrize(("together", "budget"), [(1, 144), (4, 200)])
def test_gradients_leave_no_holes_in_a_heap_in_which_the_model_was_made(
    together: int, budget: int, tmp_path: Path
) -> None:
    """Blocks above the threshold are no mappings where they fit into what is free in the heap."""
    program = [sys.executable, "-c", LARGE_HEAP, str(tmp_path), str(together), str(budget)]
    grown = int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
    assert grown < budget + 56  # the budget, a gradient, and what is looked at


def test_freed_memory_goes_back_when_as_much_has_come_or_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trimmed = [100 << 20], list[int]()
    monkeypatch.setattr(memory, "resident_bytes", lambda: (now[0], 0))
    monkeypatch.setattr(memory, "_libc", SimpleNamespace(malloc_trim=lambda _: trimmed.append(now[0])))
    ledger = memory.Ledger(memory.FreedMemory(memory.LOOK_BYTES))
    ledger.add("host/grads in flight", memory.LOOK_BYTES - 1)
    ledger.add("disk/params", memory.LOOK_BYTES)
    ledger.remove("host/grads in flight", 5)
    assert not trimmed
    ledger.add("device/resident", 1)
    assert trimmed == [now[0]]
    now[0] += memory.LOOK_BYTES // 2
    ledger.add("device/resident", 1)
    assert len(trimmed) == 1
    now[0] += memory.LOOK_BYTES // 2 + 4096
    ledger.add("device/resident", 1)
    assert len(trimmed) == 2
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")  # the allocator is the user's
    ledger.add("device/resident", memory.LOOK_BYTES)
    assert len(trimmed) == 2


def test_a_heap_that_takes_long_to_look_through_is_trimmed_for_a_twentieth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, trimmed = [0.0], list[float]()

    def trim(_: int) -> None:
        clock[0] += 0.05
        trimmed.append(clock[0])

    times = SimpleNamespace(monotonic=lambda: clock[0], thread_time=lambda: clock[0])
    monkeypatch.setattr(memory, "time", times)
    monkeypatch.setattr(memory, "resident_bytes", lambda: (1 << 30, 0))
    monkeypatch.setattr(memory, "_libc", SimpleNamespace(malloc_trim=trim))
    ledger = memory.Ledger(memory.FreedMemory(memory.LOOK_BYTES))
    for _ in range(1000):
        clock[0] += 0.01
        ledger.add("device/resident", memory.LOOK_BYTES)
    assert len(trimmed) == 10 + 1  # in ten seconds, and the first at once
    assert 0.05 * len(trimmed) < 0.06 * clock[0]


def test_weights_that_prepare_has_moved_leave_no_memory(tmp_path: Path) -> None:
    status, said, errors = run_script(SCRIPT, "memory memory", tmp_path)  # the second one's weights lie in the heap
    assert status == 0, errors
    grown, _ = map(int, said.strip("[] \n").split(","))
    weights = 8 * MATRIX * 4  # in two halves; states have no memory before the first step
    assert grown < 1.5 * weights  # the fp32 weights took as much
