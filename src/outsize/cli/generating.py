"""`outsize generate`: answers of a language model that may be larger than memory, to a file of prompts."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

import outsize
from outsize.api.budgets import find_budgets
from outsize.cli.models import refused
from outsize.cli.options import DTYPES, at_least
from outsize.config import Config
from outsize.move.disk import naming
from outsize.planning.sizes import format_bytes

SUMMARY = "answer prompts with a model that may be larger than memory"
DESCRIPTION = (
    "Answer every prompt of a file with a language model whose weights are read from its own folder, layer by layer. "
    "All prompts of a batch share each read: outsize generate MODEL_FOLDER --prompts prompts.txt --host-memory 2GiB"
)
JSON_LINES = ".jsonl"
CHUNK_TOKENS = 512
"""Of a long prompt, what the model takes at once: it bounds the activations."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=os.path.abspath, metavar="MODEL_FOLDER", help="weights, config.json and tokenizer"
    )
    add = parser.add_argument
    add("--prompts", type=Path, required=True, metavar="FILE", help="a prompt a line; .jsonl: objects with 'prompt'")
    add("--out", type=Path, metavar="FILE", help="answers; .jsonl: objects (default: text to the standard output)")
    add("--batch", type=at_least(1), default=8, help="prompts at once: they share each read of the weights")
    add("--max-new-tokens", type=at_least(1), default=64, help="the longest answer")
    add("--dtype", choices=tuple(DTYPES), help="of the weights (default: the folder's; another one needs --disk)")
    add("--device", help="cpu, cuda, xpu, ... (default: the accelerator, else cpu)")
    add("--device-memory", help="budget, such as 8GiB")
    add("--host-memory", help="budget for the weights and what is kept of the prompts, such as 2GiB")
    add(
        "--disk",
        type=os.path.abspath,
        nargs="+",
        metavar="DIR",
        help="folders for what does not fit: keys and values, converted weights",
    )


@dataclass(frozen=True)
class Prompt:
    """One prompt and its tokens."""

    text: str
    tokens: list[int]


def run(args: argparse.Namespace) -> int:
    import transformers
    from rich.progress import Progress  # noqa: F401  # before a model is loaded

    texts = _read_prompts(args.prompts)
    if args.out is not None:
        _check_out(args.out)
    if not Path(args.model, "config.json").is_file():
        what = "no config.json in the folder" if Path(args.model).is_dir() else "no folder there"
        raise FileNotFoundError(f"{args.model}: {what}; give one with weights, config.json and tokenizer")
    with refused(f"the tokenizer in {args.model} cannot be read"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, padding_side="left")
    with refused():
        config = transformers.AutoConfig.from_pretrained(args.model)
    prompts = [Prompt(text, tokenizer(text)["input_ids"]) for text in texts]
    _check_lengths(prompts, config, args)
    model = _load(transformers, config, prompts, args)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    with ExitStack() as opened:
        out: TextIO = sys.stdout
        if args.out is not None:
            opened.callback(_remove_empty, args.out)
            out = opened.enter_context(_new_file(args.out))
        as_json = args.out is not None and args.out.suffix == JSON_LINES
        count = opened.enter_context(_progress(len(prompts)))
        for first in range(0, len(prompts), args.batch):
            batch = prompts[first : first + args.batch]
            for prompt, answer in zip(batch, _answers(model, tokenizer, batch, args, count), strict=True):
                with naming(args.out or "the standard output", "writing an answer"):
                    _write(out, prompt.text, answer, as_json)
    return 0


def _check_out(path: Path) -> None:
    """Raise what would be raised when the file is made, after the model was loaded."""
    if os.path.lexists(path):  # a link that leads nowhere, too
        raise ValueError(f"--out {path} exists; name another file, or remove it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"--out {path}: the folder {path.parent} cannot be written to")


def _read_prompts(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {path} is not text in UTF-8 ({error}); convert it first") from error
    lines = [line for line in text.split("\n") if line.strip()]  # `splitlines` cuts at U+2028 and the like, too
    if path.suffix == JSON_LINES:
        try:
            lines = [json.loads(line)["prompt"] for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--prompts {path}: a line is no object with 'prompt' ({error!r})") from error
        if not all(isinstance(line, str) for line in lines):
            raise ValueError(f"--prompts {path}: a 'prompt' is no text")
    if not lines:
        raise ValueError(f"--prompts {path} holds no prompts; write one a line")
    return lines


def _check_lengths(prompts: Sequence[Prompt], config: Any, args: argparse.Namespace) -> None:
    """Raise `ValueError` for a prompt that is empty, or too long for the model with its answer."""
    most = getattr(config, "max_position_embeddings", None)
    for number, prompt in enumerate(prompts, 1):
        if not prompt.tokens:
            raise ValueError(f"--prompts {args.prompts}: prompt {number} has no tokens")
        needed = len(prompt.tokens) + args.max_new_tokens
        if most is not None and needed > most:
            raise ValueError(
                f"--prompts {args.prompts}: prompt {number} has {len(prompt.tokens)} tokens, and {needed} with an "
                f"answer of --max-new-tokens {args.max_new_tokens}, but the model takes {most}: shorten it, or lower "
                f"--max-new-tokens. Nothing was written"
            )


def cache_bytes(config: Any, batch: int, tokens: int, itemsize: int) -> int:
    """What a batch keeps of so many tokens each: a key and a value for each layer and key-value head."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * batch * tokens * itemsize)


def _load(transformers: Any, config: Any, prompts: Sequence[Prompt], args: argparse.Namespace) -> Any:
    """The prepared model. The budget that the computation lives under holds its cache too."""
    names = ("device", "device_memory", "host_memory", "disk")
    made = Config(**{name: getattr(args, name) for name in names if getattr(args, name) is not None})
    dtype = DTYPES.get(args.dtype, "auto")
    with refused(f"the weights in {args.model} cannot be read"), torch.device("cpu"), outsize.init(made):
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, config=config, dtype=dtype).eval()
    longest = max(len(prompt.tokens) for prompt in prompts) + args.max_new_tokens
    fields = {"device": made.device, "disk": args.disk}
    fields |= _budgets(made, config, longest, min(args.batch, len(prompts)), model.dtype.itemsize, args)
    return outsize.prepare(model, **{name: value for name, value in fields.items() if value is not None})[0]


def _budgets(made: Config, config: Any, tokens: int, batch: int, itemsize: int, args: argparse.Namespace) -> Any:
    """What the keys and values leave for the weights. Sets `args.cache` to the tier where they rest."""
    from outsize.integrations.key_values import held_bytes

    whole = cache_bytes(config, batch, tokens, itemsize)
    on_cpu = made.compute_device.type == "cpu"
    computing = "host_memory" if on_cpu else "device_memory"
    found = find_budgets(made)
    budgets: dict[str, Any] = {"device_memory": found.device, "host_memory": found.host}
    taken, reason, args.cache = {computing: whole}, "", None
    if whole >= budgets[computing] if on_cpu else 2 * whole > budgets[computing]:
        fit_on_host = not on_cpu and whole < budgets["host_memory"]
        try:
            held, staging = held_bytes(config, whole, tokens)
            args.cache = "host" if fit_on_host else "disk" if args.disk else None
        except ValueError as error:
            reason = f" ({error})"
    if args.cache is not None:
        taken = {computing: held + staging} if on_cpu else {computing: held, "host_memory": staging}
        if args.cache == "host":
            taken["host_memory"] = whole
    what = f"keys and values of {batch} prompts of {tokens} tokens take {format_bytes(whole)}"
    for field, nbytes in taken.items():
        if nbytes >= budgets[field]:
            rest = f", {format_bytes(nbytes)} of {field} while they rest on {args.cache}" if args.cache else ""
            disk = "" if args.disk or reason else ", or name a --disk for them"
            raise ValueError(
                f"{what}{rest}, but {field} is {format_bytes(budgets[field])}: lower --batch, or raise "
                f"--{field.replace('_', '-')}{disk}{reason}"
            )
        budgets[field] -= nbytes
    if args.cache is not None:
        share = f"{format_bytes(taken[computing])} of --{computing.replace('_', '-')}"
        print(f"{what}; they rest on {args.cache}, and two layers of them at a time take {share}", file=sys.stderr)
    return budgets


def _answers(model: Any, tokenizer: Any, batch: Sequence[Prompt], args: argparse.Namespace, count: Any) -> list[str]:
    from outsize.integrations.key_values import KeyValueCache

    device = next(model.parameters()).device
    inputs = tokenizer.pad({"input_ids": [prompt.tokens for prompt in batch]}, return_tensors="pt").to(device)
    length = inputs["input_ids"].shape[1]

    def counted(tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        count(len(batch), done=0)
        return torch.zeros(len(batch), dtype=torch.bool, device=tokens.device)

    more: dict[str, Any] = {"prefill_chunk_size": CHUNK_TOKENS} if length > CHUNK_TOKENS else {}
    with ExitStack() as opened, torch.inference_mode():
        if args.cache is not None:
            cache = KeyValueCache(
                model.config, length + args.max_new_tokens, args.disk if args.cache == "disk" else None
            )
            # Older versions of transformers call it `past_key_values`.
            names = inspect.signature(model.forward).parameters
            more["cache" if "cache" in names else "past_key_values"] = opened.enter_context(cache)
        found = model.generate(
            **inputs,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            stopping_criteria=[counted],
            **more,
        )
    count(0, done=len(batch))
    decoded: list[str] = tokenizer.batch_decode(found[:, length:], skip_special_tokens=True)
    return decoded


def _write(out: TextIO, prompt: str, answer: str, as_json: bool) -> None:
    line = json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False) if as_json else f"{prompt}{answer}\n"
    print(line, file=out, flush=True)


@contextmanager
def _new_file(path: Path) -> Iterator[TextIO]:
    with open(path, "x", encoding="utf-8") as file:
        try:
            yield file
        finally:
            with naming(path, "writing an answer"):  # what an error has left is written once more
                file.close()


def _remove_empty(path: Path) -> None:
    """What went wrong before the first answer leaves no file, which would be in the way of the next try."""
    if path.exists() and not path.stat().st_size:
        path.unlink()


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar of prompts on the standard error, with tokens a second; yields what counts tokens and prompts."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts, {task.fields[tokens]} tokens, {task.fields[rate]}"),
    )
    tokens = 0
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, tokens=0, rate="")

        def count(more: int, done: int) -> None:
            nonlocal tokens
            tokens += more
            seconds = progress.tasks[0].elapsed or 0.0
            rate = f"{tokens / seconds:.3g} tokens/s" if seconds else ""
            progress.update(task, advance=done, tokens=tokens, rate=rate)

        yield count
