"""Who a process is: the variables of launchers, and the accelerator that goes with them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import outsize
from outsize.api.ranks import LAUNCHERS, local_ranks, take_accelerator

LIMIT_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def train_where(variables: Mapping[str, str], disk: str, pipe: Any) -> None:
    """A process as a launcher starts it: (its place in the job, its neighbours, a weight after a step)."""
    torch.set_num_threads(1)
    os.environ.update(variables)
    torch.manual_seed(0)
    with outsize.init(host_memory="64MiB", disk=disk, device="cpu"):
        model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    outsize.prepare(model, optimizer, host_memory="64MiB", disk=disk, device="cpu")
    rank = dist.get_rank()
    model(torch.full((2, 8), float(rank))).sum().backward()
    optimizer.step()
    with outsize.gathered(model):
        found = model.weight.detach().clone().tolist()
    pipe.send((rank, dist.get_world_size(), os.environ["LOCAL_RANK"], local_ranks(), found))


@pytest.mark.parametrize("names", LAUNCHERS, ids=lambda names: names[0])
def test_ranks_that_mpirun_and_srun_start_find_each_other(names: tuple[str, ...], tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in range(2):
        ours, theirs = context.Pipe(duplex=False)
        variables = dict(zip(names, (str(rank), "2", str(rank), "2"), strict=True)) | meeting
        process = context.Process(target=train_where, args=(variables, str(tmp_path), theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    found = []
    for process, ours in started:
        assert ours.poll(LIMIT_SECONDS), "a rank hangs"
        found.append(ours.recv())
        process.join(LIMIT_SECONDS)
    torch.manual_seed(0)
    plain = torch.nn.Linear(8, 8).weight.detach() - 0.5  # the mean of the gradients 0 and 2, times the learning rate
    for rank, (place, size, local, neighbours, weight) in enumerate(found):
        assert (place, size, local, neighbours) == (rank, 2, str(rank), 2)
        assert torch.allclose(torch.tensor(weight), plain)


@pytest.fixture
def four_accelerators(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine with four; what torch was told to use is noted."""
    chosen: list[Any] = [0]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: chosen[-1])
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: chosen.append(device.index))
    return chosen


@pytest.mark.parametrize(
    ("local_rank", "current", "asked", "expected"),
    [
        (None, 0, None, 0),
        (None, 2, None, 2),
        ("0", 0, None, 0),
        ("3", 0, None, 3),
        ("3", 0, "cuda", 3),
        ("5", 0, None, 1),  # more ranks than accelerators
        ("3", 2, None, 2),  # the script has chosen
        ("3", 0, "cuda:1", 1),
    ],
)
def test_each_rank_takes_the_accelerator_of_its_place(
    local_rank: str | None,
    current: int,
    asked: str | None,
    expected: int,
    four_accelerators: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    four_accelerators.append(current)
    config = outsize.Config(device=asked)
    assert config.compute_device == torch.device("cuda", expected)
    take_accelerator(config.compute_device)
    assert four_accelerators[-1] == (current if local_rank is None else expected)


def test_fields_that_are_made_before_the_place_is_known_mean_the_accelerator_of_the_place(
    four_accelerators: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that what is set below is gone after the test
        monkeypatch.delenv(name)
    config = outsize.Config(device="cuda", stage=3)
    places = {"MASTER_ADDR": "here", "MASTER_PORT": "1", "SLURM_PROCID": "7", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    local_ranks()  # whatever asks first
    assert config.compute_device == torch.device("cuda", 3)
    take_accelerator(config.compute_device)
    assert four_accelerators[-1] == 3
    assert config.compute_device == torch.device("cuda", 3)


def test_a_rank_that_computes_on_the_cpu_takes_no_accelerator(
    four_accelerators: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    take_accelerator(outsize.Config(device="cpu").compute_device)
    assert four_accelerators == [0]
