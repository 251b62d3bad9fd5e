"""What layers keep for their backward: memory and time of each way, against plain torch and its own ways.

    python -m benchmarks.activations [memory] [time] [auto] [moving] [micro_batches] [tiles] [loss] [loss_bf16]
                                     [longest] [weight] [head] --disk DIR

memory         48, 24 and 12 layers, `activations="offload"` to disk: peak memory of a process of its own over that of
               one layer's forward and backward, in inputs of a layer (8 MiB each).
time           a step with the inputs on disk, or all computed again, in turns in one process, on the drive as it is
               and held to 60 MB/s, where the bytes take longer than the forward. Then the formula is the longer of
               both in the forward, and in the backward. Beside them plain torch, its checkpoints, and its
               `save_on_cpu`, which on a CPU copies. TRL's way needs an accelerator: `benchmarks.accelerator`.
auto           4 models under 4 budgets each, from all that layers keep to a twentieth of it: a step of
               `activations="auto"` over one of the best single mode that fits, in turns in one process.
moving         all on disk, half of what layers save spare: a step of `activations="auto"`, which may move out all that
               a layer saves, over one that computes all layers again, and over one that keeps all, in turns.
micro_batches  8 micro-batches in each layer against 8 that are accumulated, all on disk: bytes and time, on the drive
               as it is and held to 150 MB/s.
tiles          an MLP of a long sequence, whole and in tiles: peak memory.
loss           4,096 tokens and a vocabulary of 131,072 in fp32: peak memory and time of the head and its loss.
loss_bf16      the same of 8,192 tokens in bf16, which many CPUs emulate.
longest        a Llama of 4 layers, width 128, vocabulary 32,000: the longest sequence that trains in 2 GiB, in plain
               torch with recomputation, and with inputs of layers on disk and the MLP and the loss in tiles.
weight         one weight of 65,536 x 16,384 (4 GiB) under 768 MiB, used in tiles: memory of the process and time of a
               step. Takes 20 GiB of the disk.
head           1,024 tokens and a head of 131,072 x 1,024 (512 MiB) in tiles under 256 MiB, with its loss: peak memory
               and time beside plain torch.
"""

from __future__ import annotations

import math
import operator
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outsize
from benchmarks.common import PeakRss, Row, rss_bytes, run_child, run_rows
from benchmarks.drives import can_limit, limited
from outsize.planning.choice import Chosen

MIB = 1 << 20
WIDTH, TOKENS = 256, 8192
VOCABULARY, LOSS_TOKENS = 1 << 17, 4096
ROWS = 4
INPUT_BYTES = TOKENS * WIDTH * 4
MICRO_DRIVE = 150e6
SLOW_DRIVE = 60e6
"""Bytes a second."""


class Layer(nn.Module):
    """An MLP with a norm: a transformer's layer but for the attention."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Of(nn.Module):
    """Layers of one kind."""

    def __init__(self, layer: Callable[[], nn.Module], depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def prepared(depth: int, directory: str, width: int = WIDTH, **fields: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Of(partial(Layer, width), depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    places = dict.fromkeys(("params", "grads", "states"), fields.pop("place", "host"))
    fields = {"host_memory": "2GiB", **places, **fields}
    outsize.prepare(model, optimizer, device="cpu", disk=directory, **fields)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, parts: int = 1) -> None:
    for part in x.chunk(parts):
        (model(part).square().mean() / parts).backward()
    optimizer.step()
    optimizer.zero_grad()


def batch(width: int = WIDTH) -> Tensor:
    return torch.randn(ROWS, TOKENS // ROWS, width, generator=torch.Generator().manual_seed(0))


def peak_of(depth: str, activations: str) -> Mapping[str, object]:
    """Runs in a process of its own."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        fields = {} if activations == "keep" else {"activations_tier": "disk"}
        model, optimizer = prepared(int(depth), directory, activations=activations, **fields)
        step(model, optimizer, batch())  # what is allocated once
        before = rss_bytes()
        with PeakRss() as peak:
            step(model, optimizer, batch())
    return {"peak": peak.peak - before}


def memory(directory: str) -> list[Row]:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "262144"  # in the children what is freed goes back, so a peak is one
    alone = int(str(run_child("benchmarks.activations", "--child", "peak", "1", "keep")["peak"]))
    rows = []
    for depth in (12, 24, 48):
        taken = {
            mode: int(str(run_child("benchmarks.activations", "--child", "peak", str(depth), mode)["peak"]))
            for mode in ("keep", "offload")
        }
        over = (taken["offload"] - alone) / INPUT_BYTES
        what = f"{depth} layers, inputs on disk: peak over that of one layer, in inputs of a layer"
        told = f"{over:.1f} (all kept: {(taken['keep'] - alone) / INPUT_BYTES:.0f})"
        rows.append(Row(what, told, "<= 3", over <= 3))
    return rows


class Checkpointed(Of):
    """By torch's own checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def timed(directory: str) -> list[Row]:
    rows = [timed_row(directory, nullcontext(), math.inf)]
    if can_limit():
        rows.append(timed_row(directory, limited(directory, SLOW_DRIVE), SLOW_DRIVE))
    return rows


def timed_row(directory: str, drive: AbstractContextManager[None], bytes_a_second: float) -> Row:
    x = batch()

    def plain(build: type[Of]) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = build(Layer, 12)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    def one(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        """Seconds of the forward, and of the rest."""
        began = time.perf_counter()
        with torch.autograd.graph.save_on_cpu() if kind == "save_on_cpu" else nullcontext():
            loss = model(x).square().mean()
        middle = time.perf_counter()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return middle - began, time.perf_counter() - middle

    with drive:
        loops: dict[str, tuple[nn.Module, Any]] = {
            "recompute": prepared(12, directory, activations="recompute"),
            "offload": prepared(12, directory, activations="offload", activations_tier="disk"),
            "keep": prepared(12, directory, activations="keep"),
            "plain torch": plain(Of),
            "its checkpoints": plain(Checkpointed),
            "save_on_cpu": plain(Of),
        }
        taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in loops}
        for number in range(5):
            for kind, loop in loops.items():
                seconds = one(kind, *loop)
                taken[kind] += [seconds] * (number > 0)
    middle = {kind: statistics.median(map(sum, times)) for kind, times in taken.items()}
    moving = 11 * INPUT_BYTES / bytes_a_second
    forward, rest = (statistics.median(each) for each in zip(*taken["recompute"], strict=True))
    formula = max(forward, moving) + max(rest, moving)
    ratio = middle["offload"] / formula
    told = f"{ratio:.2f} x ({', '.join(f'{kind} {seconds:.2f} s' for kind, seconds in middle.items())})"
    what = "12 layers: a step with inputs on disk over one with all computed again"
    if moving:
        what = f"the same, a drive of {bytes_a_second / 1e6:.0f} MB/s: over the formula's {formula:.2f} s"
    return Row(what, told, "<= 1.05 x", ratio <= 1.05)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))
        self.norm = nn.GroupNorm(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.nn.functional.silu(self.norm(self.one(x))))


class Gated(nn.Module):
    """A layer with more cheap operations than products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = torch.tanh(self.gate(y)) * torch.sigmoid(self.up(y))
        return x + self.drop(self.down(torch.nn.functional.gelu(y) * y))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


AUTO_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLPs": (Layer, (4, 1024, WIDTH)),
    "attention": (attention, (4, 256, WIDTH)),
    "convolutions": (Convolutions, (4, 32, 48, 48)),
    "gated": (Gated, (4, 1024, WIDTH)),
}
AUTO_SHARES = (1.05, 0.7, 0.4, 0.05)
AUTO_ROUNDS = 15


def auto(directory: str) -> list[Row]:
    return [row for name in AUTO_MODELS for row in auto_of(name)]


def auto_of(name: str) -> list[Row]:
    build, shape = AUTO_MODELS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def loop(**fields: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Of(build)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        places = dict.fromkeys(("params", "grads", "states"), "host")
        outsize.prepare(model, optimizer, device="cpu", **{"host_memory": "1GiB", **places, **fields})
        return model, optimizer

    def spare(budget: int) -> int:
        try:
            found = outsize.plan(loop(host_memory=budget)[0]).activations
        except ValueError:
            return 0
        return 0 if found is None else found.spare

    def budget_for(nbytes: int) -> int:
        few, many = 0, 1 << 30
        while many - few > 1 << 16:
            middle = (few + many) // 2
            few, many = (few, middle) if spare(middle) >= nbytes else (middle, many)
        return many

    def kept_by(budget: int) -> Chosen:
        model, optimizer = loop(host_memory=budget)
        for _ in range(3):
            step(model, optimizer, x)
        found = outsize.plan(model).activations
        assert found is not None
        return found

    all_of_it = kept_by(1 << 30).nbytes
    budgets = {share: budget_for(int(share * all_of_it)) for share in AUTO_SHARES}
    bytes_of = {"keep": all_of_it, "recompute": 0, **kept_by(budgets[AUTO_SHARES[-1]]).bytes_if_all}
    loops = {mode: loop(activations=mode) for mode in ("keep", "selective", "recompute")}
    chosen = {share: loop(host_memory=budget) for share, budget in budgets.items()}
    every: dict[object, tuple[nn.Module, Any]] = {**loops, **chosen}
    taken: dict[object, list[float]] = {kind: [] for kind in every}
    for number in range(AUTO_ROUNDS + 3):  # the choice is made in the first three
        for kind, (model, optimizer) in every.items():
            began = time.perf_counter()
            step(model, optimizer, x)
            taken[kind] += [time.perf_counter() - began] * (number >= 3)
    rows, before = [], 1 << 62
    for share, (model, _) in chosen.items():
        found = outsize.plan(model).activations
        assert found is not None
        fitting = [mode for mode in loops if bytes_of.get(mode, 1 << 62) <= found.spare]
        ratios = {mode: statistics.median(map(operator.truediv, taken[share], taken[mode])) for mode in fitting}
        best = max(ratios, key=lambda mode: ratios[mode])
        peak = outsize.memory(model).peak.get("device/activations", 0)
        modes = ", ".join(f"{count} {mode}" for mode, count in Counter(found.modes.values()).items())
        what = f"{name}, 8 layers: a step of auto over one of the best mode that fits {found.spare / MIB:.1f} MiB"
        told = f"{ratios[best]:.2f} x {best}; {modes}; {peak / MIB:.1f} MiB kept"
        rows.append(Row(what, told, "<= 1.03 x", ratios[best] <= 1.03 and peak <= min(found.spare, before)))
        before = peak
    return rows


def moving(directory: str) -> list[Row]:
    """Wide layers take long for each byte that they save."""
    shape, width, depth, rounds = (1, 512, 1024), 1024, 6, 7
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def loop(**fields: Any) -> tuple[nn.Module, Any]:
        return prepared(depth, directory, width, place="disk", **fields)

    everything = loop()
    step(*everything, x)
    step(*everything, x)
    found = outsize.plan(everything[0]).activations
    assert found is not None
    budget = (2 << 30) - found.spare + found.nbytes * 55 // 100
    loops = {
        "auto": loop(host_memory=budget),
        "keep": loop(activations="keep"),
        "recompute": loop(activations="recompute"),
    }
    taken: dict[str, list[float]] = {kind: [] for kind in loops}
    for number in range(rounds + 4):  # the choice is made in the first four
        for kind, (model, optimizer) in loops.items():
            began = time.perf_counter()
            step(model, optimizer, x)
            taken[kind] += [time.perf_counter() - began] * (number >= 4)
    found = outsize.plan(loops["auto"][0]).activations
    assert found is not None
    report = outsize.memory(loops["auto"][0])
    modes = ", ".join(f"{count} {mode}" for mode, count in Counter(found.modes.values()).items())
    out = report.peak.get("disk/activations", 0) / MIB
    over = {
        kind: statistics.median(map(operator.truediv, taken["auto"], taken[kind])) for kind in ("recompute", "keep")
    }
    kept = f"{found.bytes_if_all['keep'] / MIB:.0f} MiB saved, {found.spare / MIB:.0f} MiB spare"
    what = f"{depth} layers, {kept}: a step of auto over one that computes all again, and over one that keeps all"
    told = f"{over['recompute']:.2f} x, {over['keep']:.2f} x; {modes}; {out:.0f} MiB out at once"
    return [Row(what, told, "< 1 x", over["recompute"] < 1.0)]


def micro_batches(directory: str) -> list[Row]:
    rows = [*micro_batches_of(directory, 4), *micro_batches_of(directory, 1)]
    if can_limit():
        with limited(directory, MICRO_DRIVE):
            (_, row) = micro_batches_of(directory, 1, 4)
        ratio = float(row.measured.split()[0])
        rows.append(Row(f"the same, a drive of {MICRO_DRIVE / 1e6:.0f} MB/s", row.measured, ">= 2 x", ratio >= 2))
    return rows


def micro_batches_of(directory: str, rows: int, steps: int = 5) -> list[Row]:
    width, depth = 1024, 12
    x = torch.randn(8, rows, width, generator=torch.Generator().manual_seed(0))
    seconds, moved = {}, {}
    ways: dict[str, tuple[dict[str, Any], int]] = {
        "the whole batch": ({}, 1),
        "layer by layer": ({"micro_batches": 8}, 1),
        "accumulated": ({}, 8),
    }
    for kind, (fields, parts) in ways.items():
        model, optimizer = prepared(depth, directory, width, place="disk", activations="recompute", **fields)
        times = []
        for _ in range(steps):
            before, began = outsize.memory(model), time.perf_counter()
            step(model, optimizer, x, parts)
            times.append(time.perf_counter() - began)
            after = outsize.memory(model)
        seconds[kind] = statistics.median(times[1:])
        moved[kind] = after.bytes_read - before.bytes_read + after.bytes_written - before.bytes_written
        del model, optimizer
    whole, ours, theirs = (moved[kind] for kind in ways)
    told = f"{ours / MIB:.0f} MiB; {whole / MIB:.0f} the whole batch, {theirs / MIB:.0f} accumulated"
    ratio = seconds["accumulated"] / seconds["layer by layer"]
    what = f"8 micro-batches of {rows} x 1 rows, 48 M parameters all on disk"
    return [
        Row(f"{what}: bytes moved in a step", told, "<= 1.05 x of the whole batch", ours <= 1.05 * whole),
        Row(f"{what}: a step that accumulates them over one layer by layer", f"{ratio:.2f} x", "measured", True),
    ]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 256))


def peak_of_positions(module: nn.Module) -> Mapping[str, object]:
    """Of the forward and the backward of an MLP."""
    x = torch.randn(1, 16384, 256, requires_grad=True)
    module(x[:, :64]).sum().backward()
    before = rss_bytes()
    with PeakRss() as peak:
        module(x).sum().backward()
    return {"peak": peak.peak - before}


def tile_peak(tiles: str) -> Mapping[str, object]:
    """Runs in a process of its own."""
    return peak_of_positions(outsize.tiled(mlp(), dim=1, tiles=int(tiles)))


BUDGETS = ("256MiB", "8GiB")
"""Below what the MLP takes, and far above."""


def chosen_tile_peak(budget: str) -> Mapping[str, object]:
    """Runs in a process of its own."""
    model = nn.ModuleList([mlp(), nn.Linear(256, 16)])
    outsize.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), host_memory=budget, activations="keep")
    return peak_of_positions(model[0])


def tiles(directory: str) -> list[Row]:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "262144"  # what is freed goes back
    peaks = {n: int(str(run_child("benchmarks.activations", "--child", "tiles", n)["peak"])) for n in ("1", "16")}
    chosen = {n: int(str(run_child("benchmarks.activations", "--child", "chosen tiles", n)["peak"])) for n in BUDGETS}

    def row(what: str, ours: int, whole: int, most: float) -> Row:
        told = f"{ours / whole:.2f} x ({ours / MIB:.0f} / {whole / MIB:.0f} MiB)"
        return Row(
            f"an MLP of 16,384 positions, {what}: peak memory over the whole",
            told,
            f"<= {most} x",
            ours <= most * whole,
        )

    return [
        row("in 16 tiles", peaks["16"], peaks["1"], 0.3),
        row("tiles chosen by outsize under 256 MiB", *(chosen[budget] for budget in BUDGETS), most=0.5),
    ]


class Head(nn.Module):
    """The end of a language model."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def measured(model: nn.Module, width: int, count: int, fewer: int, dtype: torch.dtype) -> Mapping[str, object]:
    """A head and its loss on so many tokens, after fewer of them: peak memory, time, the loss."""
    x = torch.randn(1, count, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(0))

    def once(tokens: int) -> float:
        loss = torch.nn.functional.cross_entropy(model(x[:, :tokens]).float().view(-1, VOCABULARY), labels[:tokens])
        loss.backward()
        model.zero_grad()
        return loss.item()

    once(fewer)
    before, times = rss_bytes(), []
    for _ in range(3):
        began = time.perf_counter()
        with PeakRss() as peak:
            loss = once(count)
        times.append(time.perf_counter() - began)
    return {"peak": peak.peak - before, "seconds": statistics.median(times), "loss": loss}


def compared(*child: str) -> tuple[list[int], str, float, float]:
    """Of outsize and of torch: peaks, times in words, their ratio, and how far their losses are apart."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "262144"
    name, *arguments = child
    plain, ours = (
        run_child("benchmarks.activations", "--child", name, kind, *arguments) for kind in ("plain", "outsize")
    )
    seconds = [float(str(each["seconds"])) for each in (ours, plain)]
    ratio = seconds[0] / seconds[1]
    told = f"{ratio:.2f} x ({seconds[0]:.1f} / {seconds[1]:.1f} s)"
    apart = abs(float(str(ours["loss"])) / float(str(plain["loss"])) - 1)
    return [int(str(each["peak"])) for each in (ours, plain)], told, ratio, apart


def loss_of(kind: str, dtype: str, tokens: str) -> Mapping[str, object]:
    """Runs in a process of its own."""
    torch.manual_seed(0)
    compute = getattr(torch, dtype)
    model = Head().to(compute)
    if kind == "outsize":
        outsize.prepare(model, device="cpu", host_memory="1GiB", params="device", grads="device")
    return measured(model, WIDTH, int(tokens), 512, compute)


def loss(directory: str) -> list[Row]:
    return loss_rows("float32", LOSS_TOKENS)


def loss_bf16(directory: str) -> list[Row]:
    return loss_rows("bfloat16", 2 * LOSS_TOKENS)


def loss_rows(dtype: str, tokens: int) -> list[Row]:
    peaks, times, ratio, apart = compared("loss", dtype, str(tokens))
    whole = tokens * VOCABULARY * getattr(torch, dtype).itemsize
    what = f"{tokens:,} tokens x 131,072 logits ({whole >> 30} GiB in {dtype}), head and loss"
    told = f"{peaks[0] / MIB:.0f} MiB ({peaks[1] / MIB:.0f} in torch)"
    least = 2 * VOCABULARY * WIDTH * 4 + 2 * whole // 16
    return [
        Row(f"{what}: peak memory", told, "the weight's gradient twice and 2 tiles of a sixteenth", peaks[0] <= least),
        Row(f"{what}: time; losses {apart:.0e} apart", times, "<= 1.10 x", ratio <= 1.1),
    ]


def sequence_of(kind: str, length: str) -> Mapping[str, object]:
    """Runs in a process of its own."""
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    before = rss_bytes()
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32000, max_position_embeddings=1 << 20, use_cache=False, **sizes)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with tempfile.TemporaryDirectory(dir=".") as directory:
        if kind == "plain":
            model.gradient_checkpointing_enable()
        else:
            for layer in model.model.layers:
                outsize.tiled(layer.mlp, dim=1, tiles=8)
            places = {**dict.fromkeys(("params", "grads", "states", "activations_tier"), "disk"), "disk": directory}
            outsize.prepare(model, optimizer, device="cpu", host_memory="128MiB", activations="offload", **places)
        ids = torch.randint(32000, (1, int(length)), generator=torch.Generator().manual_seed(0))
        began = time.perf_counter()
        with PeakRss() as peak:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
        seconds = time.perf_counter() - began
    return {"peak": peak.peak - before, "seconds": seconds, "loss": loss.item()}


def longest(directory: str) -> list[Row]:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "262144"
    most = 2 << 30

    def run(kind: str, length: int) -> Mapping[str, float]:
        found = run_child("benchmarks.activations", "--child", "sequence", kind, str(length))
        return {key: float(str(value)) for key, value in found.items()}

    short, longer = run("plain", 2048), run("plain", 4096)
    a_token = (longer["peak"] - short["peak"]) / 2048
    plain = int(4096 + (most - longer["peak"]) / a_token) // 256 * 256
    while run("plain", plain)["peak"] > most:
        plain -= 256
    ours, same = run("outsize", 8 * plain), run("outsize", 4096)
    apart = abs(same["loss"] / longer["loss"] - 1)
    what = f"8 times the longest sequence of plain torch with recomputation in 2 GiB ({plain:,} tokens): peak memory"
    told = f"{ours['peak'] / MIB:.0f} MiB for {8 * plain:,} tokens, {ours['seconds']:.0f} s; losses {apart:.0e} apart"
    return [Row(what, told, "<= 2048 MiB", ours["peak"] <= most and apart <= 1e-6)]


def weight_of(budget: str) -> Mapping[str, object]:
    """Runs in a process of its own."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        with outsize.init(host_memory=budget, disk=directory):
            model = nn.Sequential(nn.Linear(1 << 14, 1 << 16), nn.GELU(), nn.Linear(1 << 16, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        before = rss_bytes()
        outsize.prepare(model, optimizer, device="cpu", host_memory=budget, disk=directory)
        x, times = torch.randn(16, 1 << 14), []
        with PeakRss() as peak:
            for _ in range(3):
                began = time.perf_counter()
                step(model, optimizer, x)
                times.append(time.perf_counter() - began)
        moved = outsize.memory(model)
    return {
        "peak": peak.peak - before,
        "seconds": times[-1],
        "moved": (moved.bytes_read + moved.bytes_written) // 3,
    }


def weight(directory: str) -> list[Row]:
    found = run_child("benchmarks.activations", "--child", "weight", "768MiB")
    peak = int(str(found["peak"]))
    told = (
        f"{peak / MIB:.0f} MiB; a step {float(str(found['seconds'])):.1f} s, {int(str(found['moved'])) >> 30} GiB moved"
    )
    what = "a weight of 4 GiB (16 GiB with its gradient and state) under 768 MiB: what the process takes beside Python"
    return [Row(what, told, "<= 768 MiB", peak <= 768 * MIB)]


def head_of(kind: str, directory: str) -> Mapping[str, object]:
    """Runs in a process of its own."""
    torch.manual_seed(0)
    model = Head(1024)
    if kind == "outsize":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outsize.prepare(model, optimizer, device="cpu", host_memory="256MiB", disk=directory)
    return measured(model, 1024, 1024, 256, torch.float32)


def head(directory: str) -> list[Row]:
    peaks, times, _, apart = compared("head", directory)
    told = f"{peaks[0] / MIB:.0f} MiB ({peaks[1] / MIB:.0f} in torch, which has the weight besides)"
    what = "a head of 512 MiB in tiles and its loss, 1,024 tokens (512 MiB of logits), under 256 MiB"
    return [
        Row(f"{what}: peak memory", told, "<= the budget and two tiles of logits", peaks[0] <= (256 + 128) * MIB),
        Row(f"the same: time; losses {apart:.0e} apart", times, "4 products in place of 3", apart <= 1e-6),
    ]


if __name__ == "__main__":
    ROWS_OF = {
        "memory": memory,
        "time": timed,
        "auto": auto,
        "moving": moving,
        "micro_batches": micro_batches,
        "tiles": tiles,
        "loss": loss,
        "loss_bf16": loss_bf16,
        "longest": longest,
        "weight": weight,
        "head": head,
    }
    CHILDREN: dict[str, Any] = {
        "peak": peak_of,
        "tiles": tile_peak,
        "chosen tiles": chosen_tile_peak,
        "loss": loss_of,
        "sequence": sequence_of,
    }
    CHILDREN |= {"weight": weight_of, "head": head_of}
    raise SystemExit(run_rows(__doc__, ROWS_OF, CHILDREN))
