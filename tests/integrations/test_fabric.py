"""Lightning's Fabric on a model at rest on disk, and both strategies on two ranks. What runs without is the oracle."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import outsize
from tests.comparing import assert_same_weights, weights
from tests.conftest import squared_error
from tests.ranks.launching import in_turn, run_on_ranks
from tests.small_models import Stack

pytest.importorskip("lightning")

from lightning.fabric import Fabric

from outsize.integrations.lightning import OutsizeFabricStrategy
from tests.integrations.test_lightning import ON_DISK, data, new, trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(not empty|lr_scheduler.step|LeafSpec)"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]

ROWS = 48


def fabric_of(strategy: Any = "auto", devices: int = 1, precision: Any = None) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def train(
    fabric: Fabric,
    save: Path | None = None,
    load: Path | None = None,
    seed: int = 0,
    batch: int = 4,
    clip: str = "max_norm",
    at_rest: bool = False,
) -> tuple[list[float], nn.Module]:
    """The loop of Fabric's documentation, in two epochs; it saves after the first one, or goes on after it."""
    torch.manual_seed(seed)
    with fabric.init_module() if at_rest else torch.device("cpu"):
        built: nn.Module = Stack(depth=2)
    optimizer: Any = torch.optim.AdamW(built.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    model, optimizer = fabric.setup(built, optimizer)
    loader: Any = fabric.setup_dataloaders(DataLoader(data(ROWS), batch))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    if load is not None:
        assert fabric.load(load, state) == {}
    losses = []
    for epoch in range(state["epoch"], 2):
        for index, each in enumerate(loader):
            accumulating = index % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = squared_error(model, each)
                fabric.backward(loss / 2)
            losses.append(float(fabric.all_reduce(loss.detach())))
            if not accumulating:
                fabric.clip_gradients(model, optimizer, **{clip: 0.05})
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        state["epoch"] = epoch + 1
        if save is not None and epoch == 0:
            fabric.save(save, state)
    return losses, built


def on_disk(folder: Path, **changes: Any) -> OutsizeFabricStrategy:
    return OutsizeFabricStrategy(**{**ON_DISK, "disk": folder / "disk", **changes})


@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16-mixed"}, {"clip": "clip_val"}, {"at_rest": True}], ids=lambda each: str([*each])
)
def test_trains_like_plain_fabric(changes: dict[str, Any], tmp_path: Path) -> None:
    how = dict(changes)
    precision = how.pop("precision", None)
    expected, plain = train(fabric_of(precision=precision), **how)
    losses, model = train(fabric_of(on_disk(tmp_path), precision=precision), **how)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same_weights(model, plain)
    assert sum(size for name, size in outsize.memory(model).peak.items() if not name.startswith("disk")) <= 8 << 20


def test_what_is_saved_goes_on_bit_for_bit_also_from_another_strategy(tmp_path: Path) -> None:
    whole, model = train(fabric_of(on_disk(tmp_path)), save=tmp_path / "ours")
    for tier in ("disk", "host"):
        fabric = fabric_of(on_disk(tmp_path, params=tier, grads=tier, states=tier))
        losses, again = train(fabric, load=tmp_path / "ours", seed=5)
        assert losses == whole[len(whole) // 2 :]
        assert_same_weights(again, model, atol=0)
    expected, _ = train(fabric_of(), save=tmp_path / "plain")
    losses, _ = train(fabric_of(on_disk(tmp_path)), load=tmp_path / "plain", seed=5)
    assert losses == pytest.approx(expected[len(expected) // 2 :], rel=1e-5)


def test_weights_alone_are_run(tmp_path: Path) -> None:
    losses, model = train(fabric_of(on_disk(tmp_path)), save=tmp_path / "state")
    torch.save(weights(model), tmp_path / "weights.pt")
    fabric = fabric_of("outsize")
    run = fabric.setup(Stack(depth=2))
    fabric.load_raw(tmp_path / "weights.pt", run)
    with torch.no_grad():
        assert torch.equal(run(torch.ones(2, 16)), model(torch.ones(2, 16)))
    rest = fabric.load(tmp_path / "state", {"model": run})
    assert rest["epoch"] == 1
    assert losses
    fabric.load_raw(tmp_path / "state", run)


def test_what_cannot_be_set_up_or_saved_is_refused(tmp_path: Path) -> None:
    fabric, model = fabric_of(on_disk(tmp_path)), Stack()
    one, other = (torch.optim.SGD(part.parameters(), 0.1) for part in (model.blocks, model.head))
    with pytest.raises(ValueError, match="got 2 optimizers.*several parameter groups"):
        fabric.setup(model, one, other)
    with pytest.raises(ValueError, match=r"fabric.setup\(model, optimizer\)"):
        fabric.setup_optimizers(one)
    with pytest.raises(ValueError, match="has 0 models"):
        fabric.save(tmp_path / "state", {"model": model})
    blocks, head = fabric.setup(model.blocks, one)[0], fabric.setup(model.head, other)[0]
    with pytest.raises(ValueError, match="has 2 models.*a folder of its own"):
        fabric.save(tmp_path / "state", {"blocks": blocks, "head": head})
    with pytest.raises(TypeError, match="takes no filter"):
        fabric.save(tmp_path / "state", {"model": head}, filter={"model": lambda *_: True})
    outsize.save(tmp_path / "other", model.head)
    with pytest.raises(ValueError, match=r"not saved by Lightning; outsize.load"):
        fabric.load(tmp_path / "other", {"model": head})
    fabric.save(tmp_path / "state", {"model": head})
    with pytest.raises(KeyError, match="has no 'epoch'"):
        fabric.load(tmp_path / "state", {"model": head, "epoch": 0})
    with pytest.raises(ValueError, match="already prepared"):
        fabric.setup(model.head)


def as_torchrun(rank: int) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in variables.items()}, TORCHELASTIC_RUN_ID="job")


def as_lightning(rank: int) -> None:
    """What Lightning's own launcher tells its processes."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    del os.environ["LOCAL_WORLD_SIZE"]


def fabric_on_a_rank(folder: Path) -> Any:
    as_lightning(torch.distributed.get_rank())
    shown = []
    for how in ({"save": folder / "fabric"}, {"load": folder / "fabric", "seed": 5}):
        fabric = fabric_of(on_disk(folder), devices=2)
        losses, model = train(fabric, batch=2, at_rest=True, **how)
        shown.append((losses, weights(model)))
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
    return shown


def trainer_on_a_rank(folder: Path) -> Any:
    """Of a run of `ddp`, of one of outsize, and of one that goes on from its first epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from outsize.integrations.lightning import OutsizeStrategy

    as_torchrun(torch.distributed.get_rank())
    shown = []
    for saves, seed, name in ((False, 0, None), (True, 0, None), (True, 5, "step=2.ckpt")):
        model = new(seed=seed, dropout=0.0)
        strategy: Any = OutsizeStrategy(**ON_DISK, disk=folder / "disk") if saves else "ddp"
        callbacks = [ModelCheckpoint(folder / "trainer", "{step}", save_top_k=-1)] if saves else []
        fields = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05, "enable_checkpointing": saves}
        trainer = trainer_of(folder, strategy, devices=2, callbacks=callbacks, **fields)
        checkpoint = name and folder / "trainer" / name
        trainer.fit(model, DataLoader(data(ROWS), 4), DataLoader(data(ROWS), 4), ckpt_path=checkpoint)
        shown.append((model.losses, trainer.callback_metrics["val_loss"].item(), weights(model)))
    return shown


def test_two_ranks_train_and_resume_as_without(tmp_path: Path) -> None:
    """As `ddp` under torchrun, as one rank of Fabric under Lightning's own launcher."""
    expected, plain = train(fabric_of(), batch=4)
    calls = ((trainer_on_a_rank, tmp_path), (fabric_on_a_rank, tmp_path))
    for trainer, fabric in run_on_ranks(2, in_turn, *calls):
        (losses, values), (resumed, again) = fabric
        assert losses == pytest.approx(expected, rel=1e-5)
        assert resumed == losses[len(losses) // 2 :]
        for name, value in plain.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), rtol=0, atol=1e-5)
            assert torch.equal(again[name], values[name])

        (of_ddp, val_of_ddp, theirs), (whole, val_loss, values), (resumed, same_val_loss, again) = trainer
        assert len(whole) == 12
        assert whole == pytest.approx(of_ddp, rel=1e-5)
        assert same_val_loss == val_loss == pytest.approx(val_of_ddp, rel=1e-5)
        assert resumed == whole[6:]
        for name, value in theirs.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-5)
            assert torch.equal(again[name], values[name])
