"""`outsize train`: train a language model whose state lies on disk, watch it, and leave a report and an export."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

import outsize
from outsize.checkpoint.folder import locked
from outsize.cli import corpus, models, options, reporting, watch
from outsize.integrations.transformers import Trainer, last_checkpoint
from outsize.planning.sizes import format_bytes

HELD_OUT_TOKENS = 4096  # the held-out loss is the mean over so many tokens, spread over the held-out text
SAMPLE_TOKENS = 40
PROMPTS = ("def __init__(self, ", "The ")  # of source code, of other text
INTERRUPTED = 128  # and the signal's number: 130 after Ctrl-C, 143 after SIGTERM, 129 where the terminal closed


def run(args: argparse.Namespace) -> int:
    wanted, folder, checkpoint = options.find_run(args)  # each rank finds the same: nothing is written yet
    if checkpoint is not None:
        step = json.loads(Path(checkpoint, "trainer_state.json").read_text())["global_step"]
        if step >= wanted.steps:
            print(
                f"{checkpoint} is at step {step} of {wanted.steps}: there is nothing to do; give more --steps, or open "
                f"that folder with from_pretrained"
            )
            return 0
    arguments = _training_arguments(wanted, folder, checkpoint)
    PartialState().wait_for_everyone()
    with ExitStack() as held:
        _by_first(lambda: held.enter_context(_held(folder)))
        return _Run(wanted, folder, checkpoint, arguments).train()


def _by_first(work: Callable[[], object]) -> None:
    """The first rank does the work. What refuses it is told by all."""
    told: list[Exception | None] = [None]
    if PartialState().is_main_process:
        try:
            work()
        except Exception as error:
            told = [error]
    (refused,) = broadcast_object_list(told)
    if refused is not None:
        raise refused


def _training_arguments(wanted: argparse.Namespace, folder: Path, checkpoint: str | None) -> Any:
    """Joins the other ranks, where there are any."""
    device = outsize.Config(device=wanted.device).compute_device
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=wanted.steps,
        per_device_train_batch_size=wanted.batch,
        per_device_eval_batch_size=wanted.batch,
        learning_rate=wanted.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=wanted.warmup,
        weight_decay=wanted.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=wanted.clip,
        fp16=wanted.dtype == "fp16",
        seed=wanted.seed,
        use_cpu=device.type == "cpu",
        save_steps=wanted.save_every,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=wanted.eval_every,
        eval_on_start=checkpoint is None,
        prediction_loss_only=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        dataloader_pin_memory=False,
    )
    if wanted.batch % arguments.world_size:
        ranks = arguments.world_size
        raise ValueError(f"--batch {wanted.batch} cannot be shared by {ranks} ranks; give a multiple of {ranks}")
    arguments.per_device_train_batch_size //= arguments.world_size
    return arguments


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """No other command trains in the folder meanwhile. Leaves nothing behind, of what was not there before, if nothing
    is saved or drawn."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = locked(folder)
    if lock < 0:
        raise ValueError(f"another `outsize train` is at work in {folder}; let it end, or name another folder by --run")
    try:
        yield
    finally:
        if made and not any(folder.glob("report.png")) and not any(folder.glob("checkpoint-*")):
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # somebody else has begun to use it
                for parent in made[1:]:
                    parent.rmdir()
        os.close(lock)


class _OptionsHold(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """A checkpoint brings the options that it was saved under. Those of this command win."""

    def __init__(self, optimizer: Any) -> None:
        self._decays = [group["weight_decay"] for group in optimizer.param_groups]

    def on_train_begin(self, args: Any, state: Any, control: Any, **trained: Any) -> None:
        state.compute_steps(args, state.max_steps)
        groups, scheduler = trained["optimizer"].param_groups, trained["lr_scheduler"]
        for group, decay in zip(groups, self._decays, strict=True):
            group["weight_decay"] = decay
        scheduler.base_lrs = [args.learning_rate for _ in groups]
        if state.global_step:  # the rate of the step that comes
            scheduler.last_epoch -= 1
            scheduler.step()


class _Run:
    """The trainer of one run, ready to begin or to go on."""

    def __init__(self, wanted: argparse.Namespace, folder: Path, checkpoint: str | None, arguments: Any) -> None:
        started = time.monotonic()
        self.wanted, self.folder, self.checkpoint, self.first = wanted, folder, checkpoint, arguments.process_index == 0
        self.say("loading ..." if checkpoint is None else f"loading {checkpoint} ...")
        newest = last_checkpoint(folder)
        if newest is not None and checkpoint is not None and Path(newest).name != Path(checkpoint).name:
            self.say(f"until it is removed, --resume {folder} goes on from {newest}, not from what this run saves")
        config = models.configuration(wanted.model)
        models.check_language_model(config, wanted.seq_len)
        self.base_memory = watch.process_memory()
        given = wanted.model if models.holds(wanted.model, "tokenizer.json") else None
        _by_first(lambda: self._prepare_folder(config, arguments.world_size, given))
        with models.refused(f"the tokenizer in {folder / 'corpus'} cannot be read"):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder / "corpus"))
        fields = self.fields()
        data = self._windows(corpus.TRAIN)
        held_out = max(1, HELD_OUT_TOKENS // wanted.seq_len)
        transformers.set_seed(wanted.seed)
        with outsize.init(**fields):
            model = models.build(config, wanted.model)
        self.trainer = Trainer(
            model,
            arguments,
            data_collator=transformers.default_data_collator,
            train_dataset=data,
            eval_dataset=self._windows(corpus.HELD_OUT, held_out),
            processing_class=self.tokenizer,
            **fields,
        )
        self.trainer.remove_callback(transformers.PrinterCallback)
        seconds = wanted.minutes * 60 - (time.monotonic() - started) if wanted.minutes else None
        self.watch = watch.Watch(self.trainer, self.base_memory, wanted.batch * wanted.seq_len, seconds)
        self.trainer.add_callback(self.watch)
        self.trainer.add_callback(_OptionsHold(self.trainer.optimizer))

    def say(self, *words: object) -> None:
        if self.first:
            print(*words, flush=True)

    def _windows(self, name: str, most: int | None = None) -> corpus.Windows:
        path = self.folder / "corpus" / name
        try:
            return corpus.Windows(path, self.wanted.seq_len, most)
        except ValueError as error:
            if self.checkpoint is None:
                raise
            raise ValueError(
                f"{path} is cut short: remove {path.parent}, and the run makes it again if its text is still there"
            ) from error

    def fields(self) -> dict[str, Any]:
        return {"disk": str(self.folder / "disk"), **options.config_fields(self.wanted)}

    def _prepare_folder(self, config: Any, ranks: int, tokenizer: str | None) -> None:
        if self.checkpoint is None:
            options.check_new(self.folder)  # once more: another command may have come and gone
        if not corpus.is_there(self.folder / "corpus"):
            corpus.text_files(self.wanted.text or ())  # a file that is missing is told before the plan
        (self.folder / "disk").mkdir(parents=True, exist_ok=True)
        model = models.on_meta(config)
        print(outsize.plan(model, torch.optim.AdamW(model.parameters()), ranks=ranks, **self.fields()), flush=True)
        corpus.prepare(self.folder / "corpus", self.wanted.text or (), tokenizer, config.vocab_size)
        kept = {name: value for name, value in vars(self.wanted).items() if name not in ("run", "resume", "words")}
        fresh = self.folder / ".options.new"
        fresh.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        fresh.replace(options.options_file(self.folder))

    def train(self) -> int:
        trainer = self.trainer
        try:
            with self.watch:
                trainer.train(self.checkpoint)
            return self._finish()
        except FloatingPointError as error:
            raise ValueError(
                f"the training diverged at step {trainer.state.global_step + 1}: {error}; {self._way_on()}"
            ) from error
        except OSError as error:
            raise OSError(f"{error}; {self._way_on()}") from error
        except KeyboardInterrupt:
            self.say(f"interrupted; {self._way_on()}")
            if self.watch.signal is None:  # after the last step
                raise
            return INTERRUPTED + self.watch.signal
        finally:
            if self.first:
                self._report()

    def _report(self) -> None:
        state, peak = self.trainer.state, watch.process_memory("VmHWM") - self.base_memory
        history = [*state.log_history, {"step": state.global_step, "peak_bytes": peak}]
        try:
            if reporting.write_report(self.folder, history):
                reporting.keep_history(self.folder, history)
        except (OSError, ValueError) as error:  # that which has ended the run is told too
            print(f"the report could not be written: {error}", file=sys.stderr)

    def _way_on(self) -> str:
        newest = last_checkpoint(self.folder)
        if newest is None:
            return "there is no checkpoint to go on from"
        if int(newest.rpartition("-")[2]) >= self.wanted.steps:
            return f"{newest} has the weights of the last step, and from_pretrained opens it"
        return f"the newest checkpoint is {newest}; go on with:\n  outsize train --resume {self.folder}"

    def _finish(self) -> int:
        """Everything after the last step."""
        state, wanted = self.trainer.state, self.wanted
        if self.watch.signal is not None:
            self.say(f"interrupted after step {state.global_step}; {self._way_on()}")
            return INTERRUPTED + self.watch.signal
        after = self.trainer.evaluate()["eval_loss"]
        before = next(entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry)
        self.say(f"\nheld-out loss: {before:.3f} before, {after:.3f} after {state.global_step} steps")
        state.log_history.append({"step": state.global_step, "sample": (sample := self._sample())})
        self.say(f"a sample:\n{sample}\n")
        self.trainer.model.config.use_cache = True
        self.trainer.save_model(str(self.folder / "model"))
        used = max(1, watch.process_memory("VmHWM") - self.base_memory)
        total = outsize.memory(self.trainer.model).state_bytes
        times = f", {total / used:.1f} x the memory used" if total > used else ""
        self.say(
            f"peak memory: {format_bytes(used)} over the imports for "
            f"{format_bytes(total)} of parameters, gradients and optimizer state{times}"
        )
        self.say(outsize.memory(self.trainer.model))
        self.say(f"report: {self.folder / 'report.html'}\nmodel:  {self.folder / 'model'}  (from_pretrained opens it)")
        if state.global_step < wanted.steps:
            self.say(
                f"stopped: {wanted.minutes:g} minutes are over (step {state.global_step} of {wanted.steps}); "
                f"{self._way_on()}"
            )
        return 0

    def _sample(self) -> str:
        """Text that the model writes after a prompt."""
        model = self.trainer.model.eval()
        prompt = self.tokenizer(PROMPTS[bool(self.wanted.text)], return_tensors="pt").to(self.trainer.args.device)
        tokens = model.generate(
            prompt.input_ids,
            attention_mask=prompt.attention_mask,
            max_new_tokens=SAMPLE_TOKENS,
            do_sample=True,
            temperature=0.7,
            top_k=40,
            pad_token_id=0,
        )
        return str(self.tokenizer.decode(tokens[0]))
