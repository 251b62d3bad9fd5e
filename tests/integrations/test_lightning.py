"""Lightning's Trainer on a model at rest on disk. The same Trainer without a strategy is the oracle."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import outsize
from tests.comparing import assert_same_weights
from tests.small_models import Block

lightning = pytest.importorskip("lightning")

from lightning.fabric.plugins import TorchCheckpointIO  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    BaseFinetuning,
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402

from outsize.integrations.lightning import OutsizeStrategy  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(not empty|lr_scheduler.step|LeafSpec|set_vital|returned .None.)"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]

ON_DISK = {"params": "disk", "grads": "disk", "states": "disk", "host_memory": "8MiB", "activations": "keep"}
WIDTH, ROWS, BATCH = 16, 24, 4


class Net(LightningModule):
    """Blocks with dropout, and a parameter that the steps use themselves."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build()
        self.losses: list[float] = []
        self.seen: list[float] = []

    def build(self) -> None:
        self.blocks = nn.Sequential(*(Block(WIDTH, 40) for _ in range(3)))
        self.drop = nn.Dropout(self.hparams["dropout"])
        self.head = nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.blocks(x)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self(x) * self.scale - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.seen.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]) * self.scale

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Late(Net):
    """Is built by the Trainer."""

    def build(self) -> None:
        self.kind: type | None = None

    def configure_model(self) -> None:
        if self.kind is None:
            torch.manual_seed(7)
            super().build()
            self.kind = type(self.scale)


class Manual(Net):
    """Steps by itself, clips by itself."""

    automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with self.toggled_optimizer(optimizer):
            loss = self.loss(batch)
            self.manual_backward(loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
        self.losses.append(loss.item())


class Choosy(Net):
    """Passes over some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (0, 3) else loss


class Plateau(Net):
    """Its schedules follow epochs and what validation gives."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        exponential = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}, exponential]


class Counter(Callback):
    """A callback with a state."""

    steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def data(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 4, generator=generator))


def loader(shuffle: bool = False) -> Any:
    return DataLoader(data(), BATCH, shuffle=shuffle)


def new(kind: type[Net] = Net, seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return kind(**options)


def trainer_of(folder: Path, strategy: Any = "auto", **changes: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    fields: dict[str, Any] = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, **quiet, **changes}
    return Trainer(strategy=strategy, default_root_dir=folder, **fields)


Make = Callable[..., OutsizeStrategy]


@pytest.fixture
def on_disk(tmp_path: Path) -> Make:
    return lambda **changes: OutsizeStrategy(**{**ON_DISK, "disk": tmp_path / "disk", **changes})


def scaled() -> dict[str, Any]:
    """A loss scale at which the first steps overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": 0.05}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Net, {}),
        (Net, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05}),  # the last of an epoch's steps is of two
        (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "precision": "64-true"}),
        (Net, {"precision": "bf16-mixed", "val_check_interval": 2}),
        (Net, scaled),
        (Manual, {}),
        (Late, {}),
        (Choosy, {}),
        (Choosy, {"accumulate_grad_batches": 2}),
        (Plateau, {"max_epochs": 3}),
    ],
    ids=["plain", "accumulated", "value", "bf16", "fp16", "manual", "late", "choosy", "accumulated choosy", "plateau"],
)
def test_trains_like_the_plain_trainer(kind: type[Net], changes: Any, on_disk: Make, tmp_path: Path) -> None:
    def train(strategy: Any) -> tuple[Net, Trainer]:
        model = new(kind)
        torch.manual_seed(1)
        trainer = trainer_of(tmp_path, strategy, **(changes() if callable(changes) else changes))
        trainer.fit(model, loader(shuffle=True), loader())
        return model, trainer

    (plain, theirs), (model, ours) = train("auto"), train(on_disk())
    assert len(model.losses) == 6 * (theirs.max_epochs or 0)
    for mine, expected in ((model.losses, plain.losses), (model.seen, plain.seen)):
        assert mine == pytest.approx(expected, rel=1e-5)
    assert ours.optimizers[0].param_groups[0]["lr"] == theirs.optimizers[0].param_groups[0]["lr"]
    assert_same_weights(model, plain)
    if changes is scaled:
        assert 0 < outsize.memory(model).skipped_steps < 6
    for mine, expected in zip(ours.predict(model, loader()), theirs.predict(plain, loader()), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-4)
    memory = outsize.memory(model)
    assert memory.now["disk/states"] > 0
    assert sum(size for name, size in memory.peak.items() if not name.startswith("disk")) <= 8 << 20
    if isinstance(model, Late):
        assert model.kind is not nn.Parameter, "it is built by outsize.init"


def test_half_precision_keeps_exact_masters(on_disk: Make, tmp_path: Path) -> None:
    runs = {}
    for precision in ("32-true", "bf16-true"):
        model = new(dropout=0.0)
        trainer_of(tmp_path, on_disk(), precision=precision, max_epochs=6).fit(model, loader())
        runs[precision] = model.losses
    assert model.scale.dtype is torch.bfloat16
    assert runs["bf16-true"] == pytest.approx(runs["32-true"], rel=2e-2)


@pytest.mark.parametrize("middle", [False, True], ids=["end of an epoch", "middle of an epoch"])
def test_resumed_training_is_bit_for_bit_the_same(middle: bool, on_disk: Make, tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def train(seed: int, checkpoint: Path | None = None, **changes: Any) -> tuple[Net, Counter, Trainer]:
        model, counter = new(seed=seed), Counter()
        folder = tmp_path / "ckpt"
        saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=4 if middle else None, save_top_k=-1)
        trainer = trainer_of(
            tmp_path, on_disk(**changes), max_epochs=3, enable_checkpointing=True, callbacks=[saving, counter]
        )
        torch.manual_seed(seed)
        batches = stateful(data(), BATCH, shuffle=True) if middle else loader(shuffle=True)
        trainer.fit(model, batches, loader(), ckpt_path=checkpoint)
        return model, counter, trainer

    whole, _, finished = train(0)
    step = 8 if middle else 6
    for seed, tier in ((1, "disk"), (2, "host")):
        again, counter, trainer = train(
            seed, tmp_path / "ckpt" / f"step={step}.ckpt", params=tier, states=tier, grads=tier
        )
        assert again.losses == whole.losses[step:]
        assert again.seen[-6:] == whole.seen[-6:]
        assert trainer.optimizers[0].param_groups[0]["lr"] == finished.optimizers[0].param_groups[0]["lr"]
        assert_same_weights(again, whole, atol=0)
        assert counter.steps == trainer.global_step == 18


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_after_backward"])
def test_gradients_of_an_accumulation_go_on(hook: str, on_disk: Make, tmp_path: Path) -> None:
    """Those of a checkpoint in the midst of a batch, as after an error, do not: the batch is not done."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    whole_batch = hook.endswith("end")

    def save(trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 2:
            trainer.save_checkpoint(tmp_path / "ckpt")

    def train(checkpoint: Path | None = None, **hooks: Any) -> Net:
        model, start = new(), LambdaCallback(**hooks)
        trainer = trainer_of(tmp_path, on_disk(), max_epochs=1, accumulate_grad_batches=2, callbacks=[start])
        trainer.fit(model, stateful(data(), BATCH), ckpt_path=checkpoint)
        return model

    found: list[bool] = []
    whole = train(**{hook: save})
    again = train(tmp_path / "ckpt", on_train_start=lambda _, model: found.append(model.scale.grad is not None))
    assert found == [whole_batch]
    if whole_batch:
        assert again.losses == whole.losses[3:]
        assert_same_weights(again, whole, atol=0)

    def refuse(trainer: Any, *_: Any) -> None:
        assert "zero_grad" not in vars(trainer.lightning_module)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "ckpt", on_load_checkpoint=refuse)


@dataclass
class Size:
    width: int = WIDTH


def test_a_class_of_the_users_in_a_checkpoint_is_named_to_be_read(on_disk: Make, tmp_path: Path) -> None:
    model = new()
    model.save_hyperparameters({"size": Size()})
    trainer = trainer_of(tmp_path, on_disk(), max_epochs=1)
    trainer.fit(model, loader())
    trainer.save_checkpoint(tmp_path / "ckpt")
    with pytest.raises(ValueError, match="add_safe_globals"):
        trainer_of(tmp_path, on_disk()).fit(new(), loader(), ckpt_path=tmp_path / "ckpt", weights_only=False)
    with torch.serialization.safe_globals([Size]):
        trainer_of(tmp_path, on_disk()).fit(new(), loader(), ckpt_path=tmp_path / "ckpt")


def test_checkpoints_come_and_go_as_in_the_plain_trainer(on_disk: Make, tmp_path: Path) -> None:
    """The best two, the last, and what `ckpt_path="best"` opens."""

    def train(strategy: Any, folder: Path) -> tuple[set[str], Any, list[float]]:
        saving = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True, every_n_train_steps=3)
        trainer = trainer_of(tmp_path, strategy, max_epochs=4, enable_checkpointing=True, callbacks=[saving])
        model = new(dropout=0.0)
        trainer.fit(model, loader(), loader())
        first = trainer.test(ckpt_path="best", dataloaders=loader(), verbose=False)[0]["val_loss"]
        last = trainer.validate(ckpt_path="last", dataloaders=loader(), verbose=False)[0]["val_loss"]
        return set(os.listdir(folder)), Path(saving.best_model_path).name, [first, last]

    plain, ours = train("auto", tmp_path / "plain"), train(on_disk(), tmp_path / "ours")
    assert ours[:2] == plain[:2]
    assert ours[2] == pytest.approx(plain[2], rel=1e-5)
    assert not list((tmp_path / "ours").glob("*/grads.bin")), "gradients that the next batch drops are saved"


def test_a_checkpoint_of_another_strategy_goes_on_here(on_disk: Make, tmp_path: Path) -> None:
    first = trainer_of(tmp_path)
    first.fit(new(dropout=0.0), loader())
    first.save_checkpoint(tmp_path / "plain.ckpt", weights_only=False)
    losses = []
    for strategy in ("auto", on_disk()):
        model = new(seed=5, dropout=0.0)
        trainer_of(tmp_path, strategy, max_epochs=3).fit(model, loader(), ckpt_path=tmp_path / "plain.ckpt")
        losses.append(model.losses)
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_model_is_evaluated_then_trained_again_and_again(on_disk: Make, tmp_path: Path) -> None:
    """And outlives its Trainer, whose weights alone are saved."""

    def train(strategy: Any) -> tuple[Net, list[float], Any]:
        model, trainer = new(dropout=0.0), trainer_of(tmp_path, strategy)
        figures = [trainer.validate(model, loader(), verbose=False)[0]["val_loss"]]
        trainer.fit(model, loader())
        assert trainer.fit_loop.max_epochs is not None
        trainer.fit_loop.max_epochs += 1
        trainer.fit(model, loader())  # with a new optimizer
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        other, fresh = new(seed=3), trainer_of(tmp_path, strategy if strategy == "auto" else on_disk())
        figures += [fresh.validate(other, loader(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)[0]["val_loss"]]
        return model, figures, model(torch.ones(2, WIDTH))

    plain, expected, value = train("auto")
    (tmp_path / "weights.ckpt").unlink()
    model, figures, found = train(on_disk())
    assert model.losses == pytest.approx(plain.losses, rel=1e-5)
    assert figures == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(found, value, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="saved without an optimizer"):
        trainer_of(tmp_path, on_disk()).fit(new(), loader(), ckpt_path=tmp_path / "weights.ckpt")


def test_loggers_get_what_a_step_took(on_disk: Make, tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, on_disk(), logger=CSVLogger(tmp_path), log_every_n_steps=2, accumulate_grad_batches=2
    )
    model = new()
    trainer.fit(model, loader())
    head, *lines = (line.split(",") for line in next(tmp_path.glob("*/*/metrics.csv")).read_text().splitlines())
    entries = [dict(zip(head, line, strict=True)) for line in lines]
    ours = [each for each in entries if each["outsize/state_bytes"]]
    assert [each["step"] for each in ours] == [each["step"] for each in entries if each["loss"]]
    for each in ours:
        assert int(each["outsize/state_bytes"]) == outsize.memory(model).state_bytes
        assert 0 < float(each["outsize/seconds"]) < 60


def test_the_tuner_finds_what_it_finds_in_the_plain_trainer(on_disk: Make, tmp_path: Path) -> None:
    """It saves, trains, and restores what it has saved."""
    found = []
    for strategy in ("auto", on_disk()):
        model = new(dropout=0.0)
        finder = Tuner(trainer_of(tmp_path, strategy)).lr_find(model, loader(), num_training=5, update_attr=False)
        assert finder is not None
        found.append(finder.results["loss"])
        assert_same_weights(model, new(dropout=0.0), atol=0)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert not list(tmp_path.glob("*lr_find*"))


def test_a_model_is_built_at_rest_before_its_trainer_runs(on_disk: Make, tmp_path: Path) -> None:
    plain, trainer = new(dropout=0.0), trainer_of(tmp_path, on_disk())
    with trainer.init_module():
        model = new(dropout=0.0)
        assert type(model.scale) is not nn.Parameter
    trainer_of(tmp_path).fit(plain, loader())
    trainer.fit(model, loader())
    assert model.losses == pytest.approx(plain.losses, rel=1e-5)


def compiled() -> Net:
    model = new()
    model._compiler_ctx = {"compiler": "dynamo"}  # as after torch.compile(model), which takes seconds
    return model


def prepared() -> Net:
    model = new()
    outsize.prepare(model, torch.optim.AdamW(model.parameters()), device="cpu", host_memory="8MiB")
    return model


class Two(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.blocks.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)]


class Without(Net):
    def configure_optimizers(self) -> None:
        return None


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, *_: Any) -> None:
        pass

    def finetune_function(self, *_: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (prepared, {}, r"prepared already.*outsize.release\(model\)"),
        (compiled, {}, r"compiled.*\.compile\(\) of its layers"),
        (lambda: new(Two), {}, "gives 2 optimizers.*several parameter groups"),
        (lambda: new(Without), {}, "gives no optimizer.*: return it"),
        (new, {"plugins": [FSDPPrecision("bf16-mixed")]}, "FSDPPrecision is of another strategy"),
        (new, {"plugins": [TorchCheckpointIO()]}, "leave the CheckpointIO out"),
        (new, {"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging holds a second model.*outsize.gathered"),
        (new, {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging holds a second model"),
        (new, {"callbacks": [Unfreezes()]}, "Unfreezes compares.*optimizer.add_param_group"),
        (new, {"callbacks": [ModelPruning("l1_unstructured")]}, "ModelPruning writes.*outsize.gathered"),
        (new, {"fields": {"host_memory": "1 apple"}}, "1 apple"),
        (new, {"fields": {"host_memroy": 1}}, "did you mean 'host_memory'"),
        (new, {"fields": {"find_unused_parameters": True}}, "unknown field 'find_unused_parameters'"),
    ],
)
def test_what_cannot_train_is_refused_with_the_remedy(
    model: Any, changes: Any, message: str, on_disk: Make, tmp_path: Path
) -> None:
    given = model()
    fields = {**changes}.pop("fields", {})
    others = {name: value for name, value in changes.items() if name != "fields"}
    with pytest.raises((ValueError, TypeError), match=message):
        trainer_of(tmp_path, on_disk(**fields), **others).fit(given, loader())
    assert getattr(given, "losses", []) == []


def test_an_old_lightning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    import outsize.integrations.lightning as ours

    monkeypatch.setattr(lightning, "__version__", "2.5.6")
    spec = importlib.util.spec_from_file_location("old", str(ours.__file__))
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="2.6 or newer, this is 2.5.6: pip install"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_snippets_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    snippets = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    assert len(snippets) == 5
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"outsize": outsize, "torch": torch, "safetensors": safetensors, "Callback": Callback}
    names |= {"MyModel": Net, "model": new(), "loader": loader()}
    for snippet in snippets:
        quiet = "accelerator='cpu', devices=1, logger=False, enable_progress_bar=False, "
        exec(snippet.replace("/mnt/nvme", "disk").replace("Trainer(", f"Trainer({quiet}"), names)
    assert names["state"]["step"] == ROWS // BATCH
    average = names["HeadAverage"]()
    trainer_of(tmp_path, "outsize", callbacks=[average]).fit(model := new(), loader())
    for value, start, end in zip(average.average, new().head.parameters(), model.head.parameters(), strict=True):
        assert torch.linalg.vector_norm(value - end) < torch.linalg.vector_norm(start - end)
