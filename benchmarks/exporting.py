"""Weights out of a model and back: streamed exports and `from_pretrained` under `outsize.init`, against bounds.

Rows: export, masters, imports, drive. Each runs in a process of its own; bandwidth is measured in the same run.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import outsize
from benchmarks.common import PeakRss, Row, plain_disk_bandwidth, rss_bytes, run_child, run_rows
from benchmarks.models import llama

GB = 1e9
DISK_PLACES = {"params": "disk", "grads": "disk", "states": "disk"}
ROUNDS = 5


def export_child(disk: str, layers: str, kind: str) -> dict[str, Any]:
    """Export a Llama that is all on disk, a few times, each against plain direct I/O of as many bytes."""
    import transformers.models.llama.modeling_llama  # noqa: F401  (an import, not the model's memory)

    base = rss_bytes()
    dtype = torch.bfloat16 if kind == "masters" else torch.float32
    with outsize.init(host_memory="256MiB", disk=disk):
        model = llama(int(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outsize.prepare(model, optimizer, disk=disk, host_memory="256MiB", compute_dtype=dtype, **DISK_PLACES)
    parameters = sum(param.numel() for param in model.parameters())
    moved, folder, probe = 8 * parameters, Path(disk) / "weights", Path(disk) / "probe"
    plain_disk_bandwidth(probe, moved // 2, "mixed", repeats=1)  # lay its blocks out
    seconds, plain, peaks = [], [], []
    for _ in range(ROUNDS):
        shutil.rmtree(folder, ignore_errors=True)
        plain.append(plain_disk_bandwidth(probe, moved // 2, "mixed", repeats=1))
        with PeakRss() as memory:
            began = time.perf_counter()
            outsize.export(folder, model, dtype=torch.float32)
            seconds.append(time.perf_counter() - began)
        peaks.append(memory.peak - base)
    shares = [moved / each / bandwidth for each, bandwidth in zip(seconds, plain, strict=True)]
    return {"parameters": parameters, "moved": moved, "seconds": seconds, "shares": shares, "rss": max(peaks)}


def _exported(disk: str, layers: int, kind: str, label: str) -> list[Row]:
    found = run_child("benchmarks.exporting", "--child", "export", disk, str(layers), kind)
    share = sorted(found["shares"])[ROUNDS // 2]  # type: ignore[call-overload]
    seconds = sorted(found["seconds"])[ROUNDS // 2]  # type: ignore[call-overload]
    rss = found["rss"] / GB  # type: ignore[operator]
    what = f"export of {found['parameters'] / 1e9:.2f} B parameters, {label}"  # type: ignore[operator]
    rate = f"{share:.0%} ({seconds:.1f} s, {found['moved'] / seconds / GB:.2f} GB/s)"
    return [
        Row(f"{what}: peak RSS over imports", f"{rss:.2f} GB", "<= 0.50 GB", rss <= 0.50),
        Row(f"{what}: share of plain direct I/O, half reads, half writes", rate, ">= 80 %", share >= 0.80),
    ]


def export(disk: str) -> list[Row]:
    """1.0 B fp32 parameters, all on disk."""
    return _exported(disk, 101, "own", "fp32")


def masters(disk: str) -> list[Row]:
    """The fp32 masters of a bf16 model: two arrays are joined on the way."""
    return _exported(disk, 48, "masters", "fp32 masters of bf16")


def import_child(disk: str, folder: str, dtype: str) -> dict[str, Any]:
    """`from_pretrained` under a 256 MiB budget."""
    import transformers.models.llama.modeling_llama

    base = rss_bytes()
    began = time.perf_counter()
    with PeakRss() as memory, outsize.init(host_memory="256MiB", disk=disk):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    seconds = time.perf_counter() - began
    return {"rss": memory.peak - base, "seconds": seconds, "parameters": sum(p.numel() for p in model.parameters())}


def imports(disk: str) -> list[Row]:
    """A folder of 2.0 GB in several files."""
    folder = Path(disk) / "pretrained"
    model = llama(48)
    outsize.prepare(model, None, host_memory="8GiB", disk=disk)
    outsize.export(folder, model, max_shard_size="500MB")
    del model
    rows = []
    for dtype in ("float32", "bfloat16"):
        found = run_child("benchmarks.exporting", "--child", "import", disk, str(folder), dtype)
        rss = found["rss"] / GB  # type: ignore[operator]
        what = f"from_pretrained of 2.0 GB under outsize.init with 256 MiB, as {dtype}: peak RSS over imports"
        rows.append(Row(what, f"{rss:.2f} GB ({found['seconds']:.1f} s)", "<= 0.45 GB", rss <= 0.45))
    return rows


def _drive_seconds(disk: str, before: tuple[int, int], after: tuple[int, int], writing: str) -> float:
    """What plain direct I/O takes for the bytes that were read and written between two looks."""
    rates = (plain_disk_bandwidth(Path(disk) / mode, 1 << 30, mode, repeats=1) for mode in ("read", writing))
    return sum((new - old) / rate for new, old, rate in zip(after, before, rates, strict=True))


def _moved() -> tuple[int, int]:
    """Bytes that this process has read from drives and written to them."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def _not_cached(folder: Path) -> None:
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drive_child(disk: str, what: str, place: str) -> dict[str, Any]:
    """Load or export 2.0 GB of fp32 parameters a few times, each beside the drive's own time for the bytes."""
    with outsize.init(host_memory="8GiB", disk=disk):
        model = llama(48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places: dict[str, Any] = DISK_PLACES if place == "on disk" else {}
    outsize.prepare(model, optimizer, disk=disk, host_memory="256MiB" if places else "8GiB", **places)
    folder, seconds, shares = Path(disk) / what, [], []
    if what == "load" and not folder.exists():
        outsize.save(folder, model, optimizer).wait()
        return {}
    for _ in range(ROUNDS + 1):
        if what == "load":
            _not_cached(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
        before, began = _moved(), time.perf_counter()
        if what == "load":
            outsize.load(folder, model, optimizer)
        else:
            outsize.export(folder, model)
        seconds.append(time.perf_counter() - began)
        shares.append(seconds[-1] / _drive_seconds(disk, before, _moved(), "write" if what == "load" else "new"))
    return {"seconds": seconds[1:], "shares": shares[1:]}  # the first one takes fresh memory


def pretrained_child(disk: str) -> dict[str, Any]:
    """`from_pretrained` of 2.0 GB, in turns with a loop that asks safetensors for each tensor of the same files."""
    import safetensors
    import transformers.models.llama.modeling_llama

    folder, seconds, plain = Path(disk) / "export", [], []
    for _ in range(ROUNDS + 1):
        _not_cached(folder)
        began = time.perf_counter()
        for path in folder.glob("*.safetensors"):
            with safetensors.safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  (it is no mapping)
                    file.get_slice(name)[...]
        plain.append(time.perf_counter() - began)
        _not_cached(folder)
        began = time.perf_counter()
        with outsize.init(host_memory="256MiB", disk=disk):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        seconds.append(time.perf_counter() - began)
        del model
    return {"seconds": seconds[1:], "shares": [own / other for own, other in zip(seconds, plain, strict=True)][1:]}


def drive(disk: str) -> list[Row]:
    """2.0 GB to and from the drive, over the drive's own time."""
    run_child("benchmarks.exporting", "--child", "drive", disk, "load", "on disk")  # writes the checkpoint
    rows = []
    for what, place in itertools.product(("load", "export"), ("in memory", "on disk")):
        found = run_child("benchmarks.exporting", "--child", "drive", disk, what, place)
        rows.append(_over(f"{what} of 2.0 GB, model {place}: over the drive", found))
    found = run_child("benchmarks.exporting", "--child", "pretrained", disk)
    rows.append(_over("from_pretrained of 2.0 GB: over safetensors' own reading", found))
    return rows


def _over(what: str, found: dict[str, Any]) -> Row:
    share, seconds = (sorted(found[key])[ROUNDS // 2] for key in ("shares", "seconds"))
    return Row(what, f"{share:.2f} x ({seconds:.1f} s)", "<= 1.20 x", share <= 1.2)


ROWS: dict[str, Callable[[str], list[Row]]] = {"export": export, "masters": masters, "imports": imports, "drive": drive}
CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "export": export_child,
    "import": import_child,
    "drive": drive_child,
    "pretrained": pretrained_child,
}


def main() -> int:
    return run_rows(__doc__, ROWS, CHILDREN)


if __name__ == "__main__":
    raise SystemExit(main())
