"""transformers' `Trainer` on a model whose state is larger than memory.

```python
from outsize.integrations.transformers import Trainer

trainer = Trainer(model, TrainingArguments("out"), train_dataset=data, host_memory="4GiB", disk="/mnt/nvme")
trainer.train()
```

A model that is prepared already goes in with its optimizer: `Trainer(model, args, optimizers=(optimizer, None))`.
`KeyValueCache` holds the keys and values of `generate()` where they do not fit in memory.
Trainers of other libraries mix it in: `class Mine(outsize.integrations.transformers.Trainer, trl.SFTTrainer): ...`
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer import TRAINER_STATE_NAME

import outsize
from outsize.api.methods import adapters_gathered, adapters_of, saved_by_transformers
from outsize.checkpoint.manifest import MANIFEST_NAME
from outsize.integrations.accelerate import STATE, prepare
from outsize.integrations.key_values import KeyValueCache as KeyValueCache
from outsize.planning.sizes import format_bytes

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"outsize needs transformers 5 or newer, this is {transformers.__version__}: pip install -U transformers"
    )


class Trainer(transformers.Trainer):  # type: ignore[misc]  # not read by mypy
    """As `transformers.Trainer`; fields of `outsize.Config` are keywords beside its own.

    The optimizer is that of the `TrainingArguments`, unless `optimizers` gives one. `bf16` and `fp16` of the arguments
    are autocast, as ever; `compute_dtype=torch.bfloat16` keeps the weights in 16 bits with exact fp32 masters instead.

    The log of a step has the figures of `outsize.Monitor` too, so whatever `report_to` names gets them.

    A checkpoint holds the exported weights, as `from_pretrained` opens them, and the state in its folder `outsize`.
    Training that is resumed from it is bit for bit that of a run that never stopped. Under torchrun every rank calls
    `save_model`. Raises `ValueError` for what cannot train such a model, before anything is moved.
    """

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        budgets = {field.name: kwargs.pop(field.name) for field in fields(outsize.Config) if field.name in kwargs}
        super().__init__(*args, **kwargs)
        self._saving: Any = None
        self._refuse_what_cannot_train()
        _, self.optimizer = prepare(self.accelerator, self.model, self.create_optimizer(), **budgets)
        self._monitor = outsize.Monitor(self.model)
        self.add_callback(_Begins(self._monitor))

    def _refuse_what_cannot_train(self) -> None:
        for refused, what, remedy in (
            (self.args.torch_compile, "torch_compile is on", "call .compile() of the model's layers"),
            (
                self.args.bf16_full_eval or self.args.fp16_full_eval,
                "bf16_full_eval or fp16_full_eval is on, which casts the model",
                "bf16=True evaluates in 16 bits too",
            ),
            (self.args.n_gpu > 1, f"one process sees {self.args.n_gpu} accelerators", "start one each, with torchrun"),
            (
                getattr(self.args, "sync_ref_model", False),
                "sync_ref_model is on",
                "copy the weights in a callback of your own, inside outsize.gathered(model)",
            ),
            (self.model_init is not None, "model_init is given", "pass the model"),
        ):  # fmt: skip
            if refused:
                raise ValueError(f"{what}, and outsize cannot train so; {remedy}")

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Nothing: `outsize.prepare` places the model."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As `transformers.Trainer.log`, with what the last step took beside its loss."""
        if "loss" in logs:
            logs.update(self._monitor.step(step=self.state.global_step))
        super().log(logs, start_time)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Trainer.train`; with `True` it goes on from the newest checkpoint that is complete. When it
        returns the last checkpoint is on the drive; raises what went wrong with it."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"there is no complete checkpoint in {self.args.output_dir}; one that was saved without outsize, "
                    f"or with save_only_model=True, has no state to go on with"
                )
        if resume_from_checkpoint and not Path(resume_from_checkpoint, TRAINER_STATE_NAME).is_file():
            raise ValueError(f"{resume_from_checkpoint} is no checkpoint of a Trainer: it has no {TRAINER_STATE_NAME}")
        found = super().train(resume_from_checkpoint, *args, **kwargs)
        if self._saving is not None:
            self._saving.wait()
        return found

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `transformers.Trainer.save_model`, by every rank: before 5.21 the first one alone saves."""
        self._saved = False
        super().save_model(output_dir, _internal_call)
        if not self._saved:
            self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self._saved = True
        if adapters_of(self.model):
            with adapters_gathered(self.model):
                super()._save(output_dir, state_dict)
            return
        own = hasattr(type(self.model), "save_pretrained") and not saved_by_transformers(self.model)
        calls_it = super()._save.__func__ is not transformers.Trainer._save  # of a library, mixed in
        if own and (calls_it or isinstance(self.model, transformers.PreTrainedModel)):
            with outsize.gathered(self.model):  # its class saves in a way of its own
                super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir)
        outsize.export(folder, self.model)  # every rank takes part
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.args.should_save and self.args.save_total_limit:
            _bring_to_the_past(self.args.output_dir)
        try:
            super()._save_checkpoint(*args, **kwargs)
        except RuntimeError as error:
            if "inline_container" not in str(error):  # with which torch.save hides why it could not write
                raise
            place, free = self.args.output_dir, shutil.disk_usage(self.args.output_dir).free
            what = f"torch.save could not write a file of the checkpoint; {format_bytes(free)} are free on the drive"
            raise OSError(errno.EIO, f"{what} ({error})", place) from error

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        extra = {"scheduler": self.lr_scheduler.state_dict()}
        place, base_too = Path(output_dir, STATE), not adapters_of(self.model)
        self._saving = outsize.save(place, self.model, self.optimizer.optimizer, extra, frozen=base_too)
        if self.args.save_total_limit == 1:
            self._saving.wait()  # the checkpoint before it is removed next

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the weights come with the optimizer's state, once the optimizer is there."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            if not Path(checkpoint, STATE).is_dir():
                raise ValueError(
                    f"{checkpoint} has weights and no state of a training: it was saved with save_only_model=True, or "
                    f"without outsize. Begin anew with its weights, which from_pretrained opens"
                )
            extra = outsize.load(Path(checkpoint, STATE), self.model, self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(extra["scheduler"])

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if adapters_of(self.model) and not (best / STATE).is_dir():
            super()._load_best_model()
        else:
            outsize.load(best / STATE if (best / STATE).is_dir() else best, self.model)


class _Begins(transformers.TrainerCallback):  # type: ignore[misc]
    """What comes between two steps, evaluations and checkpoints, is no part of a step's figures."""

    def __init__(self, monitor: outsize.Monitor) -> None:
        self._monitor = monitor

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._monitor.begin()


def _bring_to_the_past(output_dir: str | Path) -> None:
    """`save_total_limit` removes the checkpoints with the oldest times: after a clock was set back, the next one."""
    with suppress(OSError):  # one that is another user's, or removed meanwhile
        times = {path: path.stat().st_mtime for path in Path(output_dir).glob("checkpoint-*[0-9]") if path.is_dir()}
        ahead = max(times.values(), default=0.0) - time.time()
        for path, changed in times.items() if ahead > 0 else ():
            os.utime(path, (changed - ahead, changed - ahead))


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint of a Trainer's folder that is complete; a run that is killed may leave others."""
    named = ((re.fullmatch(r"checkpoint-([0-9]+)", path.name), path) for path in Path(output_dir).glob("checkpoint-*"))
    found = {int(match[1]): path for match, path in named if match}
    return next((str(found[step]) for step in sorted(found, reverse=True) if is_complete(found[step])), None)


def is_complete(checkpoint: Path) -> bool:
    """`outsize.save` makes its folder appear complete; the Trainer's own state is written after it. A loss of power may
    leave that empty: nobody syncs it."""
    try:
        step = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())["global_step"]
        drawn = all(path.stat().st_size for path in checkpoint.glob("rng_state*.pth"))
        return isinstance(step, int) and drawn and (checkpoint / STATE / MANIFEST_NAME).is_file()
    except (OSError, ValueError, TypeError, KeyError):
        return False
