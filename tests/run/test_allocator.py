"""What the allocator of the C library keeps, and what it gives back to the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import run_script

MATRIX = 1024 * 1024
SCRIPT = """
import ctypes, json, resource, sys
from pathlib import Path
import torch
from torch import nn
import outsize

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

places, directory = sys.argv[1].split(), sys.argv[2]
for place in places:
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tiers = dict.fromkeys(("params", "grads", "states"), "disk") if place == "disk" else {}
    outsize.prepare(
        model, optimizer, host_memory="1GiB", disk=directory, device="cpu", compute_dtype=torch.bfloat16, **tiers
    )
    grown, counts = resident() - before, []
    for _ in range(8):
        first = faults()
        model(torch.ones(8, 1024, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(faults() - first)
    outsize.release(model)
    del model, optimizer
print(json.dumps([grown, sorted(counts)[4]]))
"""


@pytest.mark.parametrize(
    ("places", "least", "most"),
    [("memory", 0, 200), ("disk", 4 * 512, 1 << 20), ("disk memory", 4 * 512, 1 << 20)],
    ids=["kept where all lies in memory", "given back where it rests on disk", "given back from then on"],
)
def test_gradients_of_a_step_lie_where_those_of_the_step_before_did(
    places: str, least: int, most: int, tmp_path: Path
) -> None:
    status, said, errors = run_script(SCRIPT, places, tmp_path)
    assert status == 0, errors
    _, faults = map(int, said.strip("[] \n").split(","))
    assert least <= faults <= most  # pages that came from the system in a step; gradients are 8 x 512


def test_weights_that_prepare_has_moved_leave_no_memory(tmp_path: Path) -> None:
    status, said, errors = run_script(SCRIPT, "memory memory", tmp_path)  # the second one's weights lie in the heap
    assert status == 0, errors
    grown, _ = map(int, said.strip("[] \n").split(","))
    weights = 8 * MATRIX * 4  # in two halves; states have no memory before the first step
    assert grown < 1.5 * weights  # the fp32 weights took as much
