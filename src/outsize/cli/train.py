"""`outsize train`: train a language model whose state lives on disk, watch it, and leave a report and an export."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

import outsize
from outsize.checkpoint.background import Saving
from outsize.cli import corpus, job, metrics, models, report
from outsize.cli.asked import Asked
from outsize.cli.display import Display, NoDisplay, open_display
from outsize.cli.folder import RunFolder
from outsize.cli.job import Job
from outsize.cli.metrics import Counters, Record, human, process_memory, times_memory
from outsize.cli.schedule import Schedule
from outsize.cli.team import Team

SUMMARY = "train a language model beyond memory"
DESCRIPTION = (
    "Train a language model whose parameters, gradients and optimizer state rest on disk. Without options: a Llama of "
    "120 M parameters on the source of the Python standard library, with 256 MiB for model states."
)
HELD_OUT_TOKENS = 4096  # held-out loss is the mean over this many tokens, spread over the held-out files
SAMPLE_TOKENS = 40
PROMPTS = ("def __init__(self, ", "The ")  # of source code, of other text
KEPT_CHECKPOINTS = 2
# What of a checkpoint's `extra` a resumed run goes on by.
GOES_ON_BY = ("step", "elapsed_seconds", "held_out_before", "bytes_read", "bytes_written", "data", "scaler")
EXIT_OF_FAILURE = 1  # the last checkpoint was lost behind the training
EXIT_OF_SIGNAL = 128  # and its number: 130 after Ctrl-C, 143 after SIGTERM
add_arguments = job.add_arguments


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    team = Team.open()
    asked = Asked.of(args)
    asked.job.check_ranks(team.size)
    asked = team.share(asked)
    try:
        with asked.folder.removed_if_untrained() if team.first else nullcontext():
            return _train(_prepared(asked, team, started))
    except KeyboardInterrupt as error:
        (number,) = error.args or (signal.SIGINT,)
        if team.first:
            print(f"outsize: interrupted; {_way_on(asked.folder)}", file=sys.stderr)
        return EXIT_OF_SIGNAL + int(number)


def _way_on(folder: RunFolder) -> str:
    newest = max(folder.checkpoints(), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return "there is no checkpoint to go on from"
    return f"the newest checkpoint is {newest}; go on with: {folder.command()}"


def _prepared(asked: Asked, team: Team, started: float) -> Training:
    """The run, ready for its first step or for the one after its checkpoint."""
    wanted, folder = asked.job, asked.folder
    documents = asked.documents() if team.first else []
    team.say("loading ..." if asked.checkpoint is None else f"loading, to go on with {folder.path} ...")
    for package in ("tokenizers", "matplotlib", "rich.live", "safetensors.torch"):
        importlib.import_module(package)  # a missing one is found now, not after the training
    config = models.configuration(wanted.model)
    models.model_class(config)
    base_rss = process_memory()
    files: corpus.TokenFiles | None = None
    if team.first:
        _prepare_folder(wanted, folder)
        _print_plan(wanted, folder, config, team.size)
        files = asked.tokens(documents, config)
    files = team.share(files)
    assert files is not None
    training = Training(wanted, folder, config, files, started, base_rss, team)
    if asked.checkpoint is not None:
        training.resume(asked.checkpoint)
        team.say(f"going on after step {training.step} of {wanted.steps}")
    if team.first:
        folder.write_options(wanted)
    return training


def _prepare_folder(wanted: Job, folder: RunFolder) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    if not wanted.disk:
        folder.disk.mkdir(exist_ok=True)


def _print_plan(wanted: Job, folder: RunFolder, config: Any, ranks: int) -> None:
    model = models.on_meta(config)
    optimizer = torch.optim.AdamW(models.parameter_groups(model, wanted.weight_decay), lr=wanted.lr)
    print(outsize.plan(model, optimizer, ranks=ranks, **wanted.config_fields(folder.disk)), flush=True)


class Training:
    """Model, optimizer, data and clock of one run; `advance` is one step."""

    def __init__(
        self,
        wanted: Job,
        folder: RunFolder,
        config: Any,
        files: corpus.TokenFiles,
        started: float,
        base_rss: int,
        team: Team,
    ) -> None:
        self.team = team
        self.job, self.folder, self.files, self.base_rss = wanted, folder, files, base_rss
        self.train_tokens = corpus.Tokens.open(files.train, wanted.seq_len)
        self.held_out_tokens = corpus.Tokens.open(files.held_out, wanted.seq_len)
        self.schedule = Schedule(wanted.lr, wanted.warmup, wanted.steps, wanted.seconds)
        self.model, self.optimizer, self.device = _build(wanted, folder, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=wanted.dtype == "fp16")
        self.step, self.held_out_before = 0, float("nan")
        self._saved: int | None = None
        self._saving: Saving | None = None
        self._started, self._read_before, self._written_before = started, 0, 0

    @property
    def elapsed_seconds(self) -> float:
        """Time from the start of the command, and of those that it resumes, until now."""
        return time.monotonic() - self._started

    @property
    def over(self) -> bool:
        return self.team.share(self.schedule.over(self.step, self.elapsed_seconds))

    def advance(self) -> Record:
        """One step of training: forward, backward, clip, update."""
        start, before = time.monotonic(), Counters.of(outsize.memory(self.model))
        torch.manual_seed(
            self.job.seed * 1_000_003 + self.step
        )  # dropout is a function of (seed, step), as the data is
        lr = self.schedule.lr(self.step, self.team.share(self.elapsed_seconds))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tokens = self.train_tokens.batch(self.job.seed, self.step, self.job.batch)
        tokens = tokens.tensor_split(self.team.size)[self.team.rank].to(self.device)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip or float("inf"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        mean, count = self.team.mean(float(loss.detach())), tokens.numel() * self.team.size
        return self._record(mean, float(norm), lr, count, time.monotonic() - start, before)

    def _record(
        self, loss: float, norm: float, lr: float, tokens: int, step_seconds: float, before: Counters
    ) -> Record:
        memory = outsize.memory(self.model)
        spent = Counters.of(memory).since(before)
        return Record(
            step=self.step,
            elapsed_seconds=self.elapsed_seconds,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            tokens=tokens,
            step_seconds=step_seconds,
            wait_seconds=spent.wait_seconds,
            update_seconds=spent.update_seconds,
            bytes_read=spent.bytes_read,
            bytes_written=spent.bytes_written,
            total_read=self._read_before + memory.bytes_read,
            total_written=self._written_before + memory.bytes_written,
            rss_bytes=process_memory(),
            base_rss_bytes=self.base_rss,
            state_bytes=memory.state_bytes,
            skipped_steps=memory.skipped_steps,
            memory=dict(memory.now),
        )

    def held_out_loss(self) -> float:
        """Mean loss over the held-out windows; leaves the model in training mode."""
        windows = self.held_out_tokens.spread(max(1, HELD_OUT_TOKENS // self.job.seq_len))
        total = 0.0
        self.model.eval()
        with torch.no_grad():
            for rows in windows.to(self.device).split(self.job.batch):
                total += float(self.model(input_ids=rows, labels=rows).loss) * len(rows)
        self.model.train()
        return total / len(windows)

    def save(self) -> None:
        """Write a checkpoint of this step, unless it is there, and remove all but the latest ones."""
        if self.step == self._saved:
            return
        target = self.folder.checkpoint(self.step)
        memory = outsize.memory(self.model)
        extra = {
            "step": self.step,
            "elapsed_seconds": self.elapsed_seconds,
            "held_out_before": self.held_out_before,
            "bytes_read": self._read_before + memory.bytes_read,
            "bytes_written": self._written_before + memory.bytes_written,
            "schedule": {"lr": self.job.lr, "warmup": self.job.warmup, "steps": self.job.steps},
            "data": self._data_order(),
            "scaler": self.scaler.state_dict(),
        }
        self._saving = outsize.save(str(target), self.model, self.optimizer, extra=extra, keep=KEPT_CHECKPOINTS)
        self._saved = self.step

    def is_saved(self) -> bool:
        """Wait until the last checkpoint is complete. Where it fails, say so, and what there is to go on from."""
        try:
            if self._saving is not None:
                self._saving.wait()
        except Exception as error:
            lost = f"the checkpoint of step {self._saved} could not be completed ({error})"
            if self.team.first:
                print(f"outsize: {lost}; {_way_on(self.folder)}", file=sys.stderr)
            return False
        return True

    def resume(self, checkpoint: Path) -> None:
        """Continue exactly where the checkpoint was made; the text and its order must be the same."""
        extra = outsize.load(str(checkpoint), self.model, self.optimizer)
        if not isinstance(extra, dict) or any(name not in extra for name in GOES_ON_BY):
            raise ValueError(
                f"{checkpoint} is not of a run of `outsize train`; go on in the script that saved it, or begin a run "
                f"from its weights: `outsize checkpoint export` them, add the model's config.json, and give --model"
            )
        if extra["data"] != self._data_order():
            raise ValueError(
                f"{checkpoint} was made with {_listed(extra['data'])}, now it is {_listed(self._data_order())}; "
                "give the same text, --batch, --seq-len and --seed"
            )
        if extra["scaler"]:
            self.scaler.load_state_dict(extra["scaler"])
        self.step, self.held_out_before = int(extra["step"]), float(extra["held_out_before"])
        self._saved = self.step
        self._started -= float(extra["elapsed_seconds"])
        self._read_before, self._written_before = int(extra["bytes_read"]), int(extra["bytes_written"])
        if self.team.first:
            metrics.keep_until(self.folder.metrics, self.step)

    def _data_order(self) -> dict[str, int]:
        return {
            "seed": self.job.seed,
            "batch": self.job.batch,
            "seq_len": self.job.seq_len,
            "windows": self.train_tokens.windows,
        }

    def sample(self) -> str:
        """Text that the model writes after a prompt."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.files.tokenizer))
        prompt = torch.tensor([tokenizer.encode(PROMPTS[bool(self.job.text)]).ids], device=self.device)
        torch.manual_seed(self.job.seed)
        model: Any = self.model
        model.eval()
        with torch.no_grad():
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=SAMPLE_TOKENS,
                do_sample=True,
                temperature=0.7,
                top_k=40,
                use_cache=True,
                pad_token_id=0,
            )
        model.train()
        return str(tokenizer.decode(tokens[0].tolist()))

    def export(self) -> None:
        outsize.export(str(self.folder.model), self.model)
        if not self.team.first:
            return
        source = self.job.model if models.given_tokenizer(self.job.model) else None
        models.export_companions(self.model, self.files.tokenizer, source, self.folder.model)


def _listed(values: dict[str, int]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in values.items())


def _build(wanted: Job, folder: RunFolder, config: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.device]:
    fields = wanted.config_fields(folder.disk)
    torch.manual_seed(wanted.seed)
    with outsize.init(**fields):
        model = models.build(config, wanted.model if models.has_weights(wanted.model) else None)
    model.train()
    groups = models.parameter_groups(model, wanted.weight_decay)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=wanted.lr, betas=(0.9, 0.95))
    outsize.prepare(model, optimizer, **fields)
    return model, optimizer, outsize.Config(**fields).compute_device


def _train(training: Training) -> int:
    wanted = training.job
    if training.step == 0:
        training.held_out_before = training.held_out_loss()
        training.team.say(f"held-out loss before: {training.held_out_before:.3f}")
        if training.over:
            raise ValueError(f"--minutes {wanted.minutes} were over before the first step; give more")
    team = training.team
    display = open_display(wanted.steps, wanted.seconds) if team.first else NoDisplay()
    with display, Interruption(team) as interruption:
        while not training.over and not team.any(interruption.asked):
            _one_step(training, display)
    if not training.over:
        training.save()
        if not training.is_saved():
            return EXIT_OF_FAILURE
        team.say(f"interrupted after step {training.step}; go on with:\n  {training.folder.command()}")
        return EXIT_OF_SIGNAL + (interruption.number or signal.SIGINT)
    if not _finish(training):
        return EXIT_OF_FAILURE
    if training.step < wanted.steps:
        longer = training.elapsed_seconds / 60 + wanted.minutes
        team.say(
            f"stopped: {wanted.minutes:g} minutes are over (step {training.step} of {wanted.steps}); go on with:\n"
            f"  {training.folder.command('--minutes', f'{longer:.3g}')}"
        )
    return 0


def _one_step(training: Training, display: Display) -> None:
    wanted = training.job
    record = training.advance()
    if wanted.eval_every and training.step % wanted.eval_every == 0 and not training.over:
        record = record.with_held_out(training.held_out_loss())
    if training.team.first:
        metrics.append(training.folder.metrics, record)
    display.show(record)
    if wanted.save_every and training.step % wanted.save_every == 0 and not training.over:
        training.save()


def _finish(training: Training) -> bool:
    """Everything after the last step: evaluation, checkpoint, sample, export, report.

    Whether the checkpoint is complete.
    """
    folder, before, after = training.folder, training.held_out_before, training.held_out_loss()
    peak = process_memory("VmHWM")
    training.save()
    say = training.team.say
    say(f"\nheld-out loss: {before:.3f} before, {after:.3f} after {training.step} steps ({after - before:+.3f} nats)")
    say(f"a sample:\n{training.sample()}\n")
    training.export()
    if not training.team.first:
        return training.is_saved()
    state = outsize.memory(training.model).state_bytes
    over = max(1, peak - training.base_rss)
    print(
        f"peak RSS: {human(over)} over the imports ({human(peak)} in all) for {human(state)} of "
        f"parameters, gradients and optimizer state{times_memory(state, over)}"
    )
    print(outsize.memory(training.model))
    held_out = [(0, before), (training.step, after)]
    report.write(folder.report, metrics.read(folder.metrics), held_out, peak)
    print(f"report:     {folder.report}")
    is_saved = training.is_saved()
    if is_saved:
        print(f"checkpoint: {folder.checkpoint(training.step)}")
    print(f"model:      {folder.model}  (AutoModelForCausalLM.from_pretrained opens it)")
    return is_saved


class Interruption:
    """Ctrl-C and SIGTERM ask for the end of the run after the step at hand; a second one ends it at once."""

    def __init__(self, team: Team) -> None:
        self.number: int | None = None  # of the signal that asked
        self._team = team
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        return self.number is not None

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt(number)
        self.number = number
        self._team.say("\nfinishing this step, then saving (once more: stop at once)")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
