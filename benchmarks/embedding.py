"""Tables of which only the rows that a batch touches move, against plain torch with `sparse=True`.

python -m benchmarks.embedding [row ...] --disk DIR
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import outsize
from benchmarks.common import Row, run_child, run_rows
from outsize.move.disk import StripedFile, open_engine
from outsize.move.memory import HostBuffer

WIDTH, BATCH, LOOKUPS = 64, 4096, 8
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Model(nn.Module):
    """A bag of items, and a small head."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag.from_pretrained(table, freeze=False, sparse=True, mode="mean")
        self.head = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.items(ids)).squeeze(-1)


def batches(rows: int, count: int, batch: int = BATCH, exponent: float = 1.05) -> Batches:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        u = torch.rand(batch, LOOKUPS, generator=generator, dtype=torch.float64)
        rank = (1 - u * (1 - (rows + 1.0) ** (1 - exponent))) ** (1 / (1 - exponent))
        ids = (rank.long() - 1).clamp(0, rows - 1) * 7_368_787 % rows
        found.append((ids, (ids[:, 0] % 2).float()))
    return found


def table(rows: int, path: Path | None = None) -> torch.Tensor:
    if path is None:
        return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)) * 0.1
    values = torch.from_file(str(path), shared=True, size=rows * WIDTH)
    for part in values.split(1 << 20):
        part.normal_(0, 0.1)
    return values.view(rows, WIDTH)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SparseAdam": lambda model: torch.optim.SparseAdam(model.parameters(), lr=0.01),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "LazyAdamW": lambda model: outsize.optim.LazyAdamW(model.parameters()),
    "RowwiseAdagrad": lambda model: outsize.optim.RowwiseAdagrad(model.parameters()),
}


def bits(directory: str) -> list[Row]:
    """200 steps on disk with a cache that holds a few per cent, against plain torch."""
    rows, found = 40_000, []
    data = batches(rows, 200, batch=64)
    for name, make in OPTIMIZERS.items():
        plain = nn.EmbeddingBag.from_pretrained(table(rows), freeze=False, sparse=True, mode="sum")
        model = copy.deepcopy(plain)
        ours, theirs = make(model), make(plain)
        outsize.prepare(model, ours, host_memory="1.5MiB", disk=directory, device="cpu", params="disk", states="disk")
        for ids, _ in data:
            for each, optimizer in ((model, ours), (plain, theirs)):
                torch.tanh(each(ids)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        with outsize.gathered(model):
            same = torch.equal(model.weight, plain.weight)
        report = outsize.memory(model)
        shown = f"{'equal' if same else 'DIFFERENT'}, {report.row_hits / report.rows:.0%} of the rows were in memory"
        found.append(Row(f"{name}, 200 steps on disk against plain torch", shown, "bit-equal", same))
    return found


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def peak_of(directory: str, rows: str) -> dict[str, float]:
    """A child: the most memory of its own that a run with a table on disk has taken over its imports."""
    before, peak = anonymous_bytes(), 0
    model = Model(table(int(rows), Path(directory) / "items"))
    optimizer = OPTIMIZERS["LazyAdamW"](model)
    outsize.prepare(model, optimizer, host_memory="128MiB", disk=directory, device="cpu", params="disk", states="disk")
    for batch in outsize.lookahead(batches(int(rows), 30, 1024), model):
        step(model, optimizer, batch)
        peak = max(peak, anonymous_bytes())
    return {"peak": peak - before}


def memory(directory: str) -> list[Row]:
    peaks = []
    for rows in (500_000, 2_000_000):
        Path(directory, str(rows)).mkdir()
        found = run_child("benchmarks.embedding", "--child", "peak", f"{directory}/{rows}", str(rows))
        peaks.append(float(str(found["peak"])) / 1e6)
    more = peaks[1] - peaks[0]
    shown = f"{peaks[0]:.0f} MB with 0.4 GB of table and state, {peaks[1]:.0f} MB with 1.5 GB; budget 134 MB"
    return [Row("memory of a run over its imports (RssAnon)", shown, "independent of the table (20 MB)", more < 20)]


def moved(directory: str) -> list[Row]:
    """Every row that is asked for and not in memory costs the pages of its record, each once a batch."""
    rows = 1_000_000
    model = nn.EmbeddingBag.from_pretrained(table(rows), freeze=False, sparse=True, mode="sum")
    optimizer = OPTIMIZERS["LazyAdamW"](model)
    outsize.prepare(model, optimizer, host_memory="1GiB", disk=directory, device="cpu", params="disk", states="disk")
    record = WIDTH * 4 * 3  # bytes of a row and its state
    known: set[int] = set()
    expected = 0
    before = outsize.memory(model).bytes_read
    for ids, _ in batches(rows, 10, 1024):
        new = sorted(set(ids.view(-1).tolist()) - known)
        known.update(new)
        parts = [new[at : at + 1024] for at in range(0, len(new), 1024)]
        ends = [[at // 4096 for row in part for at in (row * record, (row + 1) * record - 1)] for part in parts]
        expected += sum(len(set(pages)) for pages in ends) * 4096
        model(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    read = outsize.memory(model).bytes_read - before
    shown = f"{read / 1e6:.1f} MB of {expected / 1e6:.1f} MB"
    return [Row("bytes read in 10 steps: pages of missed rows and their state", shown, "equal", read == expected)]


def rate(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batches, ahead: bool = False) -> float:
    """Samples a second."""
    began = time.perf_counter()
    for batch in outsize.lookahead(data, model) if ahead else data:
        step(model, optimizer, batch)
    return sum(len(ids) for ids, _ in data) / (time.perf_counter() - began)


def host(directory: str) -> list[Row]:
    rows, found = 300_000, []
    data = batches(rows, 4)
    for name in ("SGD", "Adagrad", "LazyAdamW", "RowwiseAdagrad"):
        plain = Model(table(rows))
        model = copy.deepcopy(plain)
        theirs, ours = OPTIMIZERS[name](plain), OPTIMIZERS[name](model)
        outsize.prepare(model, ours, host_memory="4GiB", device="cpu")
        ratios = []
        for _ in range(5):
            slow = rate(plain, theirs, data)
            ratios.append(rate(model, ours, data) / slow)
        ratio = statistics.median(ratios)
        shown = f"{ratio:.2f} x (median of 5)"
        found.append(Row(f"samples/s, table in host memory, {name}, over plain torch", shown, ">= 0.9 x", ratio >= 0.9))
    return found


def requests_a_second(directory: str) -> float:
    """Random pages, read and written in batches as a table does it, in the same minute."""
    engine = open_engine()
    file = StripedFile(engine, [Path(directory)], "requests", 2 << 30)
    content = HostBuffer(64 << 20).bytes.random_(0, 255)
    for at in range(0, file.nbytes, content.numel()):
        file.write(at, content).wait()
    began, count = time.perf_counter(), 0
    for _ in range(12):
        pages = torch.randperm(file.nbytes // 4096)[:3072].sort()[0]
        out = content[: pages.numel() * 4096]
        file.read(pages, out).wait()
        file.write(pages, out).wait()
        count += 2 * pages.numel()
    found = count / (time.perf_counter() - began)
    file.unlink()
    file.close()
    return found


def disk(directory: str) -> list[Row]:
    """Zipf 1.05 and a cache of about 5 % of the rows. The drive alone and the training in turns."""
    rows, rounds = 1_000_000, 5
    warm, data = batches(rows, 24)[12:], batches(rows, 12 * rounds)
    fields = {"host": {"host_memory": "4GiB"}, "disk": {"host_memory": "128MiB", "disk": directory}}
    loops, seconds, shares, rates, alone = {}, {tier: [] for tier in fields}, [], [], []
    for tier, given in fields.items():
        model = Model(table(rows))
        optimizer = OPTIMIZERS["LazyAdamW"](model)
        outsize.prepare(model, optimizer, device="cpu", params=tier, states=tier, **given)
        rate(model, optimizer, warm, True)
        loops[tier] = model, optimizer
    engine = outsize.api.assemble.require(loops["disk"][0]).resources.disk
    before, all_made = outsize.memory(loops["disk"][0]), engine.requests
    for number in range(rounds):
        part, limits = data[12 * number :][:12], [requests_a_second(directory)]
        for tier, loop in loops.items():
            made = engine.requests
            seconds[tier].append(len(part) * BATCH / rate(*loop, part, True))
        limits.append(requests_a_second(directory))
        rates.append((engine.requests - made) / seconds["disk"][-1])
        alone.append(statistics.mean(limits))
        shares.append(rates[-1] / alone[-1])
    after = outsize.memory(loops["disk"][0])
    wanted, hits = after.rows - before.rows, after.row_hits - before.row_hits
    each = (engine.requests - all_made) / (wanted - hits + after.rows_ahead - before.rows_ahead)
    ratio, share = sum(seconds["host"]) / sum(seconds["disk"]), statistics.median(shares)
    shown = f"{ratio:.3f} x of host memory, {len(data) * BATCH / sum(seconds['disk']):,.0f} samples/s; "
    shown += f"{hits / wanted:.0%} of the rows in memory or read ahead; {each:.1f} requests for each other row, "
    shown += f"{statistics.median(rates):,.0f} requests/s; the drive alone {statistics.median(alone):,.0f}; "
    shown += f"{share:.0%} (median of {rounds}: {', '.join(f'{each:.0%}' for each in sorted(shares))})"
    reached = ratio >= 0.7 or share >= 0.8
    return [Row("samples/s, table on disk, Zipf 1.05", shown, ">= 0.7 x, or 80 % of the requests/s", reached)]


if __name__ == "__main__":
    ROWS_OF = {"bits": bits, "memory": memory, "moved": moved, "host": host, "disk": disk}
    raise SystemExit(run_rows(__doc__, ROWS_OF, {"peak": peak_of}))
