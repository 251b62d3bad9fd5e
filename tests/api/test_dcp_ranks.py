"""A folder that several ranks of FSDP2 have written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.api.checkpoint_runs import everything
from tests.api.dcp_runs import Net, adamw, load, other_run, plain_load, train
from tests.ranks.launching import run_on_ranks


def _write_shards(root: str) -> None:
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.empty, model.scale})
    optimizer = adamw(model)
    train(model, optimizer, 2)
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        weights, states = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{root}/flat-{flat}")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that two ranks of FSDP2 wrote."""
    root = tmp_path_factory.mktemp("sharded")
    run_on_ranks(2, _write_shards, str(root))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
def test_shards_of_two_fsdp_ranks_are_put_together(flat: bool, sharded: Path, tmp_path: Path) -> None:
    folder = sharded / f"flat-{flat}"
    assert len(list(folder.glob("*.distcp"))) == 2
    torch.manual_seed(0)
    plain = Net()
    plain_optimizer = adamw(plain)
    weights, states = get_state_dict(
        plain, plain_optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    plain_load({"model": weights, "optim": states}, folder)
    model, optimizer = other_run("disk", tmp_path)
    load(folder, model, optimizer)
    found = everything(model, optimizer)
    for name, value in weights.items():
        assert torch.equal(found[name], value), name
    for name in ("head.weight", "blocks.0.up.bias"):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            expected = states[f"state.{name}.{key}"] if flat else states["state"][name][key]
            assert torch.equal(found[f"{name}/{key}"], expected), name
    train(model, optimizer, 1)
