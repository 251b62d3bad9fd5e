"""A trace of real steps, and one of a simulated step in the same form."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
from outsize.move.tracing import begun, tracing
from outsize.planning.machine import typical_machine
from outsize.planning.trace import LANES, Trace
from tests.conftest import take_step
from tests.small_models import linears


def spans(path: Path) -> dict[str, list[dict[str, Any]]]:
    """By lane; every lane has its name in the file."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert tuple(names.values()) == LANES
    found: dict[str, list[dict[str, Any]]] = {lane: [] for lane in LANES}
    for each in events:
        if each["ph"] == "X":
            found[names[each["tid"]]].append(each)
    assert {each["name"] for each in events if each["ph"] == "C"} >= {"device bytes", "host bytes"}
    return found


def test_a_real_and_a_simulated_step_on_disk_fill_the_same_lanes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = linears(128, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    fields = {"host_memory": "640KiB", "disk": tmp_path / "disk", "device": "cpu"}
    fields |= dict.fromkeys(("params", "grads", "states"), "disk")
    plan = outsize.plan(model, optimizer, example=(torch.zeros(8, 128),), machine=typical_machine("cpu", 2), **fields)
    plan.prediction.trace.write(tmp_path / "simulated.json")
    model, optimizer = outsize.prepare(model, optimizer, **fields)
    with outsize.trace(tmp_path / "real.json"):
        for _ in range(4):
            take_step(model(torch.ones(8, 128)).sum(), optimizer)
    assert not tracing() and begun() == 0.0
    real, simulated = spans(tmp_path / "real.json"), spans(tmp_path / "simulated.json")
    filled = {lane for lane in LANES if simulated[lane]}
    assert filled == {"compute", "in", "out", "disk reads", "disk writes", "updates"}
    assert {lane for lane in LANES if real[lane]} == filled
    for found in (real, simulated):
        assert {each["name"] for each in found["compute"]} >= {"0", "1", "2", "3"}
        for lane in LANES:  # one thing after the other
            ends = [(each["ts"], each["ts"] + each["dur"]) for each in sorted(found[lane], key=lambda each: each["ts"])]
            assert all(before[1] <= after[0] + 1e-3 for before, after in itertools.pairwise(ends))


def test_a_trace_is_written_after_an_error_and_not_where_it_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ours"), outsize.trace(tmp_path / "trace.json"):
        raise RuntimeError("ours")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ran = []
    for path in (tmp_path / "nowhere" / "trace.json", tmp_path):
        with pytest.raises(OSError, match=str(path)), outsize.trace(path):
            ran.append(path)
    assert not ran
    assert not tracing()


def test_a_lane_does_one_thing_after_the_other(tmp_path: Path) -> None:
    trace = Trace()
    for began, ended in ((1.0, 3.0), (2.0, 4.0), (2.0, 3.0)):
        trace.span("disk reads", "unit", began, ended)
    for tier in ("device", "host"):
        trace.count(tier, 1, 1.0)
    trace.write(tmp_path / "trace.json")
    found = [(each["ts"], each["dur"]) for each in spans(tmp_path / "trace.json")["disk reads"]]
    assert found == [(0.0, 2e6), (2e6, 1e6)]


def test_a_full_drive_is_told_with_the_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        Trace().write("/dev/full")
