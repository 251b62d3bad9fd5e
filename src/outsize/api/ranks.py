"""The ranks of the job: found or joined, and agreed with each other before anything moves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from outsize.checkpoint.peers import PeerFailedError, together
from outsize.config import Config, has_chosen_accelerator
from outsize.move.comm import Ranks, combined, exchange
from outsize.planning.errors import BudgetError
from outsize.planning.layout import ParamInfo
from outsize.planning.placement import Budgets
from outsize.run.local import is_distributed

T = TypeVar("T")

LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""Where mpirun (Open MPI; MPICH and Intel MPI) and srun say who a process is, in place of torchrun's variables."""


def know_place() -> None:
    """Make torchrun's variables of those of `LAUNCHERS`, where `MASTER_ADDR` and `MASTER_PORT` are set too."""
    environment = os.environ
    if "RANK" not in environment and "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        for rank, size, local, local_size in LAUNCHERS:
            if environment.get(rank, "").isdigit() and environment.get(size, "").isdigit():
                environment["RANK"], environment["WORLD_SIZE"] = environment[rank], environment[size]
                environment.setdefault("LOCAL_RANK", environment.get(local, "0"))
                if environment.get(local_size, "").isdigit():
                    environment.setdefault("LOCAL_WORLD_SIZE", environment[local_size])
                break


def take_accelerator(device: torch.device) -> None:
    """Make the accelerator of this process torch's current one, unless the script has chosen: `.cuda()` means it."""
    if device.type == "meta":
        raise ValueError(
            "device is 'meta', which has no memory: outsize.plan takes it, for an accelerator that is not here"
        )
    if device.type != "cpu" and "LOCAL_RANK" in os.environ and not has_chosen_accelerator():
        torch.accelerator.set_device_index(device)


def join() -> None:
    """Join the job that a launcher has started this process for, unless that is done or there is none."""
    if dist.is_initialized():
        return
    know_place()
    environment = os.environ
    if int(environment.get("WORLD_SIZE") or 1) > 1 and "RANK" in environment and "MASTER_ADDR" in environment:
        # After a restart the launcher's store may still hold what the last try wrote, addresses among it.
        store, rank, size = next(iter(rendezvous("env://")))
        store = PrefixStore(f"outsize/attempt-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        device = torch.accelerator.current_accelerator(check_available=True)
        backend = "gloo" if device is None else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def local_ranks() -> int:
    """Ranks on this machine, which share its cores, memory and drives."""
    know_place()
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(int(text), 1) if text.isdigit() else 1


TENSOR_NAMES = ("tp", "tensor", "tensor_parallel")
STAGE_NAMES = ("pp", "pipe", "pipeline", "pipeline_parallel")
OTHER_NAMES = ("cp", "ep")


def open_ranks(config: Config, params: Sequence[torch.Tensor]) -> Ranks | None:
    """The ranks that share the model; None where this process is alone. Raises `ValueError` for another mesh."""
    join()
    mesh: Any = config.mesh
    split: list[Any] = [param for param in params if is_distributed(param)]
    if not dist.is_initialized():
        if mesh is not None:
            raise ValueError("mesh needs the ranks of torch.distributed; start the job with torchrun, or leave it out")
        return None
    backend, sync = str(dist.get_default_backend_for_device(config.compute_device)), config.unused == "sync"
    if mesh is None:
        if split:
            raise ValueError(
                "the model has tensor-parallel parameters (DTensors); pass mesh=, a DeviceMesh that names the "
                "data-parallel and the tensor-parallel dimension, the one that parallelize_module was given a part of"
            )
        members = list(range(dist.get_world_size()))
        return Ranks(members, backend, sync=sync) if len(members) > 1 else None
    grid, place = _grid(mesh, split_over(params))
    stage, copy, share, part = place
    stages, copies = grid[:, copy, share, part].tolist(), grid[stage, :, share, part].tolist()
    sharing, tensor = grid[stage, copy, :, part].tolist(), grid[stage, copy, share].tolist()
    for param in split:
        _check_tensor_parallel(param, tensor)
    if grid.numel() == 1 and not split:
        return None
    copies, stages = (ranks if len(ranks) > 1 else [] for ranks in (copies, stages))
    tensor = tensor if len(tensor) > 1 or (split and stages) else []
    return Ranks(sharing, backend, copies, tensor, stages, grid.flatten().tolist(), sync)


def names_of(mesh: Any) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (f"dim {at}" for at in range(mesh.ndim)))


def split_over(params: Iterable[Any]) -> set[str]:
    """The mesh dimensions over which parameters are split already."""
    return {name for param in params if is_distributed(param) for name in names_of(param.device_mesh)}


def dimensions(names: Sequence[str], used: Collection[str] = ()) -> tuple[list[int], list[int], list[int]]:
    """Which dimensions of a mesh are stages of a pipeline, which data-parallel, which tensor-parallel.

    `used`: those over which parameters are split already.
    """
    tensor = [at for at, name in enumerate(names) if name in TENSOR_NAMES or name in used]
    stages = [at for at, name in enumerate(names) if name in STAGE_NAMES]
    shared = [at for at in range(len(names)) if at not in (*tensor, *stages)]
    if any(name in OTHER_NAMES for name in names) or len(tensor) > 1 or len(stages) > 1 or len(shared) > 2:
        raise ValueError(
            f"mesh has the dimensions {tuple(names)}; outsize takes one that is "
            f"data-parallel (split), or two (copies, split), one that is tensor-parallel, called one of "
            f"{TENSOR_NAMES}, and one of pipeline stages, called one of {STAGE_NAMES}"
        )
    return stages, shared, tensor


def _grid(mesh: Any, used: Collection[str]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The ranks of the mesh, [stages, copies, ranks that share one, tensor-parallel ranks], and where in it this one
    is.

    `used`: the dimensions over which parameters are split already.
    """
    names = names_of(mesh)
    stages, shared, tensor = dimensions(names, used)
    if used and not tensor:
        raise ValueError(
            f"parameters are split over the mesh dimension {', '.join(sorted(used))!r}, which mesh does not name: it "
            f"has {mesh.mesh_dim_names or 'no names'}; pass the whole mesh, with the dimension that parallelize_module "
            f"was given"
        )
    grid = mesh.mesh.cpu().permute(*stages, *shared, *tensor)
    grid = grid if tensor else grid.unsqueeze(-1)
    grid = grid if stages else grid.unsqueeze(0)
    grid = grid.reshape(len(grid), -1, grid.shape[-2] if shared else 1, grid.shape[-1])
    place = (grid == dist.get_rank()).nonzero()
    if len(place) != 1:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
    return grid, tuple(place[0].tolist())


def _check_tensor_parallel(param: Any, members: Sequence[int]) -> None:
    mesh, placements = param.device_mesh, param.placements
    if mesh.ndim != 1 or mesh.mesh.flatten().tolist() != list(members):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} lies on the ranks {mesh.mesh.tolist()}, the "
            f"tensor-parallel dimension of mesh has {list(members)}: leave the data-parallel dimension to outsize (no "
            f"fully_shard)"
        )
    if any(not each.is_replicate() and type(each).__name__ != "Shard" for each in placements):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is placed as {placements}; outsize takes Shard and Replicate"
        )


def agree_on_budgets(budgets: Budgets, ranks: Ranks) -> Budgets:
    """The least of what any rank of a stage may use, so that all place alike."""
    unlimited = 1 << 62
    values = [unlimited if each is None else each for each in (budgets.host, budgets.device, budgets.disk)]
    host, *others = combined(ranks.in_stage(), values, "prepare")
    device, disk = (None if each == unlimited else each for each in others)
    return replace(budgets, host=host, device=device, disk=disk)


BUILD_ALIKE = (
    "every rank must build the same model with the same seed, make the same optimizer and pass the same fields"
)


def check_same(
    groups: Sequence[Ranks], what: str, mine: Mapping[str, object], kind: str = "prepare", remedy: str = BUILD_ALIKE
) -> None:
    """Raise `ValueError` on every rank of the groups unless all have the same entries; names the first that differs."""
    digest = hashlib.sha256(repr([*mine.items()]).encode()).digest()
    if len(set(exchange(groups, digest, kind))) == 1:  # the entries of all ranks may take much memory
        return
    (one, first), *others = exchange(groups, (dist.get_rank(), dict(mine)), kind)
    for rank, other in others:
        for name in {**first, **other}:
            expected, found = first.get(name, "missing"), other.get(name, "missing")
            if expected != found:
                raise ValueError(
                    f"the ranks differ in {what}: {name!r} is {expected} on rank {one} and {found} on rank {rank}; "
                    f"{remedy}"
                )


def description(
    parameters: Mapping[str, torch.Tensor],
    infos: Mapping[str, ParamInfo],
    optimizer: torch.optim.Optimizer | None,
    config: Config,
) -> dict[str, object]:
    """What must be the same on every rank before a layout is made."""
    fields = "stage reduce_dtype params grads states state_format delayed_update update unused units"
    fields += " activations activations_tier micro_batches tiles"
    found: dict[str, object] = {}
    for name, info in infos.items():
        placements: Any = getattr(parameters[name], "placements", "")
        found[name] = f"{tuple(parameters[name].shape)} {info.dtype} {info.trainable} {placements}".strip()
        found[f"the gradient of {name}"] = "none" if parameters[name].grad is None else "there"
    found |= {f"the field {name}": str(getattr(config, name)) for name in fields.split()}
    found["the field device"] = config.compute_device.type
    return found | {"the optimizer": type(optimizer).__name__}


def on_all(groups: Sequence[Ranks], action: Callable[[], T]) -> T:
    """What `action` of `prepare` gives, which fails on all ranks of the groups or on none. Where a budget is too small,
    all raise the error of the rank that needs most: ranks have parts of several sizes."""
    done: list[T] = []

    def attempt() -> BudgetError | None:
        try:
            done.append(action())
        except BudgetError as error:
            return error
        return None

    try:
        refused = [each for each in together(groups, attempt, "prepare") if each is not None]
    except PeerFailedError as error:
        raise ValueError(str(error)) from error
    if refused:
        raise max(refused, key=lambda error: error.needed - error.available)
    return done[0]


def in_each_stage(ranks: Ranks | None, value: T, verb: str) -> list[T]:
    """`value` of each stage of a pipeline."""
    return [value] if ranks is None or ranks.stages is None else ranks.stages.collect(value, verb)


def everywhere(ranks: Ranks | None, action: Callable[[], T], verb: str) -> T:
    """`action`, which speaks to no other rank, on every rank of the job; where one fails, all raise."""
    done: list[T] = []
    try:
        together([] if ranks is None else ranks.everyone(), lambda: done.append(action()), verb)
    except BaseException:
        for each in done:
            getattr(each, "close", lambda: None)()
        raise
    return done[0]
