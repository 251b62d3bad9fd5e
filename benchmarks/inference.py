"""Answers and fine-tuning beyond memory: `python -m benchmarks.inference [row ...] --disk DIR`.

Rows: equal token batch cache peers lora. A Llama of 86 M parameters in fp32 (0.34 GB), a budget of 96 MiB. `token`,
`batch` and `lora` hold the process to 0.1 GB/s of the drive, where that can be done, so that the drive is the limit on
any machine. `peers`: 3 B parameters in bf16 and 2 GiB, then 160 MiB; each process is held to the same memory, cached
files included: accelerate's offload to disk, and AirLLM where it can be imported. `cache` has the weights in memory.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import outsize
from benchmarks.common import PeakRss, Row, plain_disk_bandwidth, run_child, run_rows
from benchmarks.drives import MEMORY_GROUPS, can_limit, limited, within

PARAMETERS, BUDGET = 60e6, 96 << 20
DRIVE = 0.1e9
LARGE = 3e9
LARGE_MEMORY = {"large": (2 << 30, 11 << 28), "tight": (160 << 20, 3 << 28)}
"""Of the large model: (the budget, what each process may take with cached files)."""
TOKENS, NEW, RUNS = 8, 4, 3
CACHE_ROWS, CACHE_TOKENS, CACHE_NEW = 32, 512, 8


def base(directory: str, large: bool = False) -> Path:
    folder = Path(directory, "large" if large else "base")
    if not folder.exists():
        make = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "lora.py"))["make_base"]
        make(folder, LARGE if large else PARAMETERS, torch.bfloat16 if large else torch.float32)
        os.sync()
    return folder


def load(folder: Path) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def prompts(rows: int) -> torch.Tensor:
    return torch.randint(1, 8192, (rows, TOKENS), generator=torch.Generator().manual_seed(0))


def answers(model: Any, rows: int, new: int = NEW) -> torch.Tensor:
    tokens = prompts(rows)
    how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.inference_mode():
        found: torch.Tensor = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, **how)
    return found


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def slow_drive(directory: str) -> AbstractContextManager[None]:
    return limited(directory, DRIVE) if can_limit() else nullcontext()


def bandwidth(directory: str, large: bool = False) -> float:
    """Bytes a second of the drive at its best; of the model's own files where the kernel holds the process back. These
    leave the page cache."""
    size, read, nbytes = 4 << 20, 0, 0 if large else 1 << 26
    began = time.perf_counter()
    for file in sorted(base(directory, large).glob("*.safetensors")):
        with open(file, "rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while read < nbytes and (got := opened.read(size)):
                read += len(got)
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if large:
        return plain_disk_bandwidth(Path(directory) / "bandwidth", 1 << 30, "read")
    return read / (time.perf_counter() - began)


# ------------------------------------------------------------------------------------------------------ children


def plain(directory: str, size: str = "") -> dict[str, object]:
    model = load(base(directory, bool(size)))
    tokens = answers(model, 2)
    if not size:
        with torch.no_grad():
            logits = model(prompts(2)).logits
        torch.save((tokens, logits), Path(directory, "plain.pt"))
    once = statistics.median(seconds(lambda: answers(model, 1)) / NEW for _ in range(3))
    return {"seconds": once}


def ours(directory: str, rows: str, slow: str, size: str = "") -> dict[str, object]:
    """`large`, `tight`: the large model, held to the memory of its peers."""
    large = bool(size)
    budget, memory = LARGE_MEMORY.get(size, (BUDGET, 0))
    with within(memory) if large and can_limit() else nullcontext(), PeakRss() as peak:
        with outsize.init(host_memory=budget, device="cpu"):
            model = load(base(directory, large))
        preparing = seconds(lambda: outsize.prepare(model, host_memory=budget, device="cpu"))
        answers(model, int(rows), 2)
        equal = False
        if not large and Path(directory, "plain.pt").exists():
            tokens, logits = torch.load(Path(directory, "plain.pt"))
            with torch.no_grad():
                equal = torch.equal(model(prompts(2)).logits, logits) and torch.equal(answers(model, 2), tokens)
        with slow_drive(directory) if slow == "yes" else nullcontext():
            rates = [bandwidth(directory, large)]
            before = outsize.memory(model)
            taken = []
            for _ in range(RUNS):
                taken.append(seconds(lambda: answers(model, int(rows))) / NEW)
                rates.append(bandwidth(directory, large))
            after = outsize.memory(model)
    read = (after.bytes_read - before.bytes_read) / (RUNS * NEW)
    return {
        "seconds": statistics.median(taken),
        "read": read,
        "rate": statistics.median(rates),
        "equal": equal,
        "written": after.bytes_written,
        "peak": peak.peak,
        "preparing": preparing,
    }


def kept(directory: str, where: str) -> dict[str, object]:
    """Seconds a token after a long prompt, with keys and values in memory or on disk; the weights are in memory."""
    from outsize.integrations.key_values import KeyValueCache

    model = load(base(directory))
    tokens = torch.randint(1, 8192, (CACHE_ROWS, CACHE_TOKENS), generator=torch.Generator().manual_seed(0))
    times: list[float] = []

    def note(*_: object, **__: object) -> torch.Tensor:
        times.append(time.perf_counter())
        return torch.zeros(CACHE_ROWS, dtype=torch.bool)

    how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "prefill_chunk_size": 128}
    cache = KeyValueCache(model.config, CACHE_TOKENS + CACHE_NEW, directory) if where == "disk" else None
    with torch.inference_mode(), PeakRss() as peak:
        more = {} if cache is None else {"cache": cache}
        mask = torch.ones_like(tokens)
        found = model.generate(
            tokens, attention_mask=mask, max_new_tokens=CACHE_NEW, stopping_criteria=[note], **how, **more
        )
    taken = [after - before for before, after in pairwise(times)]
    text = str(found[:, CACHE_TOKENS:].tolist())
    return {"seconds": statistics.median(taken), "tokens": text, "peak": peak.peak}


def theirs(directory: str, name: str, size: str) -> dict[str, object]:
    folder = Path(directory, "offload")
    with within(LARGE_MEMORY[size][1]), PeakRss() as peak:
        made: list[Any] = []
        preparing = seconds(lambda: made.append(PEERS[name](directory, folder)))
        answers(made[0], 1, 2)
        taken = [seconds(lambda: answers(made[0], 1)) / NEW for _ in range(2)]
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    shutil.rmtree(folder, ignore_errors=True)
    return {"seconds": statistics.median(taken), "peak": peak.peak, "preparing": preparing, "written": written}


def with_accelerate(directory: str, folder: Path) -> Any:
    """All on disk: from safetensors files nothing is copied."""
    import transformers

    made = transformers.AutoModelForCausalLM
    return made.from_pretrained(base(directory, True), device_map={"": "disk"}, offload_folder=folder).eval()


def with_airllm(directory: str, folder: Path) -> Any:
    from airllm import AutoModel

    return AutoModel.from_pretrained(str(published(directory)), device="cpu", layer_shards_saving_path=str(folder))


PEERS = {"accelerate": with_accelerate, "airllm": with_airllm}


def published(directory: str) -> Path:
    """The model as AirLLM reads it: with files named as transformers names them, and with a tokenizer."""
    import tokenizers
    import transformers

    folder, made = Path(directory, "published"), base(directory, True)
    if not folder.exists():
        folder.mkdir()
        shutil.copy(made / "config.json", folder)
        index = json.loads((made / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        names = {file: f"model-{number:05}-of-{len(files):05}.safetensors" for number, file in enumerate(files, 1)}
        for file, name in names.items():
            os.link(made / file, folder / name)
        index["weight_map"] = {key: names[file] for key, file in index["weight_map"].items()}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def adapters(directory: str, kind: str) -> dict[str, object]:
    """`plain`: PEFT alone; `disk`: prepared, on the slow drive; `parts`: with eight micro-batches."""
    import peft

    torch.manual_seed(0)
    rows = 8 if kind == "parts" else 1
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(load(base(directory)), config).train()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)
    prepared = kind != "plain"
    if prepared:
        parts = {"micro_batches": 8} if kind == "parts" else {}
        outsize.prepare(model, optimizer, host_memory=BUDGET, device="cpu", **parts)
    losses: list[float] = []

    def step() -> None:
        loss = model(input_ids=prompts(rows), labels=prompts(rows)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    step()
    with slow_drive(directory) if prepared else nullcontext():
        rate = bandwidth(directory) if prepared else 0.0
        before = outsize.memory(model) if prepared else None
        taken = [seconds(step) for _ in range(2)]
    found: dict[str, object] = {"seconds": statistics.median(taken), "losses": losses, "rate": rate}
    if before is not None:
        after = outsize.memory(model)
        found |= {"read": (after.bytes_read - before.bytes_read) / 2, "written": after.bytes_written}
        found["base"] = sum(param.numel() * 4 for param in model.parameters() if not param.requires_grad)
        found["held"] = sum(unit.bytes_on("device", ("params",)) for unit in outsize.plan(model).units)
    return found


# ---------------------------------------------------------------------------------------------------------- rows


def child(directory: str, kind: str, *words: str) -> Any:
    folder = str(base(directory).parent)
    return run_child("benchmarks.inference", "--disk", folder, "--child", kind, folder, *words)


def equal(directory: str) -> list[Row]:
    child(directory, "plain")
    found = child(directory, "ours", "1", "no")
    rows = [Row("logits and greedy tokens against plain transformers", str(found["equal"]), "equal", found["equal"])]
    seconds, written = found["preparing"], found["written"]
    return [*rows, Row("prepare; bytes written in all", f"{seconds:.2f} s; {written}", "0 bytes", not written)]


def token(directory: str) -> list[Row]:
    memory, found = child(directory, "plain")["seconds"], child(directory, "ours", "1", "yes")
    bound = max(found["read"] / found["rate"], memory)
    ratio = found["seconds"] / bound
    what = f"seconds a token, {found['read'] / 1e9:.2f} GB read at {found['rate'] / 1e9:.2f} GB/s"
    text = f"{found['seconds']:.2f} s; the drive alone {found['read'] / found['rate']:.2f} s; in memory {memory:.2f} s"
    return [Row(what, f"{ratio:.2f} x ({text})", "<= 1.10 x drive or compute", ratio <= 1.1)]


def batch(directory: str) -> list[Row]:
    one, many = (child(directory, "ours", rows, "yes") for rows in ("1", "32"))
    ratio = 32 * one["seconds"] / many["seconds"]
    text = f"{1 / one['seconds']:.2f} and {32 / many['seconds']:.2f} tokens/s"
    return [Row("batch 32 over batch 1, tokens/s", f"{ratio:.1f} x ({text})", ">= 10 x", ratio >= 10)]


def cache(directory: str) -> list[Row]:
    memory, disk = (child(directory, "kept", where) for where in ("memory", "disk"))
    ratio = disk["seconds"] / memory["seconds"]
    text = ", ".join(f"{CACHE_ROWS / each['seconds']:.1f}" for each in (memory, disk))
    return [
        Row(
            f"seconds a token, {CACHE_ROWS} prompts of {CACHE_TOKENS} tokens: keys and values on disk over in memory",
            f"{ratio:.2f} x ({text} tokens/s; peak {memory['peak'] / 1e9:.2f}, {disk['peak'] / 1e9:.2f} GB)",
            "<= 1.5 x",
            ratio <= 1.5,
        ),
        Row("tokens", "equal", "equal", memory["tokens"] == disk["tokens"]),
    ]


def peers(directory: str) -> list[Row]:
    base(directory, True)
    memory = child(directory, "plain", "large")["seconds"]
    rows = []
    for size, (budget, limit) in LARGE_MEMORY.items():
        mine = child(directory, "ours", "1", "no", size)
        drive = mine["read"] / mine["rate"]
        ratio = mine["seconds"] / max(drive, memory)
        what = f"seconds a token, 3 B in bf16, budget {budget >> 20} MiB: {mine['read'] / 1e9:.2f} GB"
        what += f" at {mine['rate'] / 1e9:.2f} GB/s"
        text = f"{mine['seconds']:.2f} s; the drive alone {drive:.2f} s; in memory {memory:.2f} s"
        rows.append(Row(what, f"{ratio:.2f} x ({text})", "<= 1.10 x drive or compute", ratio <= 1.1))
        for name in PEERS if MEMORY_GROUPS.exists() else ():
            rows += beside(directory, mine, name, size, limit) if find_spec(name) else []
    return rows


def beside(directory: str, mine: Any, name: str, size: str, limit: int) -> list[Row]:
    published(directory)
    other = child(directory, "theirs", name, size)
    ratio = other["seconds"] / mine["seconds"]
    text = f"{1 / mine['seconds']:.2f} and {1 / other['seconds']:.2f} tokens/s"
    memory = f"{mine['peak'] / 1e9:.2f} and {other['peak'] / 1e9:.2f} GB"
    begin = f"{mine['preparing']:.1f} and {other['preparing']:.1f} s, "
    begin += f"{mine['written'] / 1e9:.2f} and {other['written'] / 1e9:.2f} GB"
    return [
        Row(f"tokens/s over {name}, each in {limit >> 20} MiB", f"{ratio:.1f} x ({text})", ">= 2 x", ratio >= 2),
        Row("peak resident memory of the two", memory, "equal or less", mine["peak"] <= other["peak"]),
        Row("before the first token: seconds, bytes written", begin, "", True),
    ]


def lora(directory: str) -> list[Row]:
    plain, disk, parts = (child(directory, "adapters", kind) for kind in ("plain", "disk", "parts"))
    apart = max(abs(a - b) for a, b in zip(plain["losses"], disk["losses"], strict=True))
    drive = 2 * (disk["base"] - disk["held"]) / disk["rate"]
    ratio = disk["seconds"] / max(drive, plain["seconds"])
    text = f"{disk['seconds']:.1f} s; the drive alone {drive:.1f} s; plain PEFT {plain['seconds']:.1f} s"
    reads = parts["read"] / parts["base"]
    return [
        Row("LoRA: losses against plain PEFT", f"{apart:.0e} apart", "<= 1e-6", apart <= 1e-6),
        Row(f"seconds a step at {disk['rate'] / 1e9:.2f} GB/s", f"{ratio:.2f} x ({text})", "<= 1.10 x", ratio <= 1.1),
        Row("bytes written", str(disk["written"]), "0: the adapters are in memory", not disk["written"]),
        Row("reads of the base a step, micro_batches=8", f"{reads:.2f}", "<= 2", reads <= 2),
    ]


ROWS = {"equal": equal, "token": token, "batch": batch, "cache": cache, "peers": peers, "lora": lora}
CHILDREN = {"plain": plain, "ours": ours, "kept": kept, "theirs": theirs, "adapters": adapters}


if __name__ == "__main__":
    raise SystemExit(run_rows(__doc__, ROWS, CHILDREN))
