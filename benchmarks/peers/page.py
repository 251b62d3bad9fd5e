"""`docs/comparison.md` and its pictures, from the results of the contests."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.contests import CONTESTS, JOBS, RESULTS, SHAPES, results_of
from benchmarks.peers.environments import ROOT

PAGE = ROOT / "docs" / "comparison.md"
TEXT = Path(__file__).with_name("page.txt")
GB, MEMORY = 1e9, 24e9
EXACT_BYTES, DISK_MARGIN = 14, 0.95
"""On the drive, of each parameter in bf16: weight, remainder, two moments, gradient. What is left free."""

Found = Mapping[str, Sequence[Mapping[str, Any]]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def middle(found: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Of the rounds; None where the job failed."""
    given = [each[name] for each in found if name in each]
    return statistics.median(given) if given else None


def largest(free_bytes: int) -> str:
    parameters = DISK_MARGIN * free_bytes / EXACT_BYTES
    return f"{DISK_MARGIN:.0%} of {free_bytes / GB:.0f} GB / {EXACT_BYTES} bytes = {parameters / GB:.1f} B"


def in_words(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    moved = f"{found['read'] / GB:.2f} + {found['written'] / GB:.2f} GB moved"
    losses = f"losses {found['losses'][0]:.4f} to {found['losses'][-1]:.4f}"
    return f"{found['seconds']:.2f} s a step, {found['rss'] / GB:.2f} GB, {moved}, {losses}"


def ratio(found: Found, job: str, name: str) -> float | None:
    """Of the job to the first one: the median over the rounds that have both."""
    first = found[next(iter(found))]
    pairs = [(a[name], b[name]) for a, b in zip(found[job], first, strict=False) if name in a and name in b]
    return statistics.median(a / b for a, b in pairs) if pairs else None


def apart(found: Found, job: str) -> str:
    """The losses of the job against those of plain torch, or of the first job."""
    base = found.get("plain torch") or found[next(iter(found))]
    if "losses" not in base[0] or "losses" not in found[job][0]:
        return ""
    return f"{max(abs(a - b) / b for a, b in zip(found[job][0]['losses'], base[0]['losses'], strict=True)):.1e}"


def table_of(name: str, found: Found) -> str:
    """One contest: a line for each job. Ratios are those of the job to the first one."""
    head = ("", "seconds a step", "x", "GB of memory", "x", "GB read", "GB written", "losses apart", "precision")
    rows = []
    for job, rounds in found.items():
        says = JOBS[job].says if CONTESTS[name].task.get("dtype") != "float32" else "fp32"
        if (seconds := middle(rounds, "seconds")) is None:
            rows.append((job, str(rounds[0]["error"]).replace("|", " "), *[""] * 6, says))
            continue
        ratios = {key: f"{value:.2f}" if (value := ratio(found, job, key)) else "" for key in ("seconds", "rss")}
        memory, read, written = (f"{(middle(rounds, key) or 0) / GB:.2f}" for key in ("rss", "read", "written"))
        rows.append(
            (job, f"{seconds:.2f}", ratios["seconds"], memory, ratios["rss"], read, written, apart(found, job), says)
        )
    return table(head, rows) if rows else "(not measured)"


# ---------------------------------------------------------------------------------------------------------- tables


MARKS = (
    ("disk", "outsize, disk", "DeepSpeed, NVMe", "seconds", 0.4),
    ("disk", "outsize, disk", "DeepSpeed, NVMe", "rss", 0.15),
    ("disk-1", "outsize, disk", "DeepSpeed, NVMe", "seconds", 0.4),
    ("disk-1", "outsize, disk", "DeepSpeed, NVMe", "rss", 0.15),
    ("host", "outsize, host", "DeepSpeed, CPU", "seconds", 0.5),
    ("host", "outsize, host", "FSDP2, CPU offload", "seconds", 0.8),
)


def marks(results: Path = RESULTS) -> str:
    rows = []
    for contest, ours, theirs, name, most in MARKS:
        found = results_of(contest, results)
        both = ours in found and theirs in found
        inverse = ratio(found, theirs, name) if both else None
        measured = f"{1 / inverse:.2f} x" if inverse else "one of the two fails" if both else "(not measured)"
        what = "step time" if name == "seconds" else "memory beyond imports"
        reached = ("yes" if 1 / inverse <= most else "no") if inverse else ""
        rows.append((f"{CONTESTS[contest].title}: {what} over {theirs}", measured, f"<= {most} x", reached))
    return table(("outsize over a peer", "measured", "aim", "reached"), rows)


def in_24_gb(results: Path = RESULTS) -> str:
    """From the memory of two sizes, as a straight line."""
    small, large = results_of("host", results), results_of("host-0.5", results)
    rows = []
    for job in small:
        first, second = middle(small[job], "rss"), middle(large.get(job, ()), "rss")
        if first and second:
            counts = [found[job][0]["parameters"] for found in (small, large)]
            each = (second - first) / (counts[1] - counts[0])
            most = (MEMORY - (first - each * counts[0])) / each
            rows.append((job, f"{first / GB:.2f}, {second / GB:.2f}", f"{each:.1f}", f"{most / GB:.1f} B"))
    head = ("everything in host memory", "GB of memory at 0.16 and 0.5 B", "bytes a parameter", "largest in 24 GB")
    return table(head, rows) if rows else "(not measured)"


def sizes(results: Path = RESULTS) -> str:
    rows = []
    for name in (f"{kind}-{size}" for kind in ("size", "fp32", "compact") for size in SHAPES):
        for rounds in results_of(name, results).values():
            each = rounds[0]
            if "error" in each:
                rows.append((name, each["error"], *[""] * 6))
                continue
            billions = each["parameters"] / GB
            dtype = "fp32" if CONTESTS[name].task["dtype"] == "float32" else "bf16"
            states = "8-bit moments" if name.startswith("compact") else "exact"
            losses = " > ".join(f"{loss:.3f}" for loss in each["losses"])
            time = each["seconds"]
            plan = f"{each['predicted']:.1f} ({each['predicted'] / time - 1:+.0%})" if each.get("predicted") else ""
            moved = (each["read"] + each["written"]) / each["parameters"]
            cells = (
                f"{time:.1f}",
                f"{time / billions:.1f}",
                plan,
                f"{each['peak'] / 2**30:.2f}",
                f"{moved:.1f}",
                losses,
            )
            rows.append((f"{billions:.2f} B, {dtype}, {states}", *cells))
    head = (
        "parameters",
        "seconds a step",
        "a billion",
        "the plan's",
        "GiB of memory, whole process",
        "bytes moved a parameter",
    )
    return table((*head, "losses"), rows) if rows else "(not measured)"


# -------------------------------------------------------------------------------------------------------- pictures


def pictures(folder: Path, results: Path = RESULTS) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "comparison"
    from matplotlib import pyplot

    def keep(figure: Any, name: str) -> None:
        path = folder / name
        figure.savefig(path, metadata={"Date": None})
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
        pyplot.close(figure)

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for contest, mark in (("disk", "o"), ("host", "s"), ("fp32", "^")):
        for job, rounds in results_of(contest, results).items():
            seconds, memory = middle(rounds, "seconds"), middle(rounds, "rss")
            if seconds and memory:
                colour = "tab:blue" if job.startswith("outsize") else "tab:gray"
                label = f"{job} ({CONTESTS[contest].task.get('dtype', 'bfloat16').replace('float', '')})"
                axes.plot(memory / GB, seconds, mark, color=colour)
                axes.annotate(label, (memory / GB, seconds), xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.set(xlabel="GB of memory beyond imports", ylabel="seconds a step", xlim=(0, None), ylim=(0, None))
    axes.set_title("162 M parameters: left and low is better", loc="left", fontsize=9)
    keep(figure, "comparison.svg")

    figure, both = pyplot.subplots(1, 2, figsize=(7, 3), layout="constrained", sharey=True)
    for axes, contest in zip(both, ("curve", "curve-bf16"), strict=True):
        for job, rounds in results_of(contest, results).items():
            if "losses" in rounds[0]:
                axes.plot(rounds[0]["losses"], label=job, linewidth=1)
        axes.set(xlabel="step", title=CONTESTS[contest].title)
    both[0].set(ylabel="loss")
    if both[1].lines:
        both[1].legend(fontsize=6)
    keep(figure, "comparison-losses.svg")


def text(results: Path = RESULTS) -> str:
    contests = {
        name.replace("-", "_").replace(".", "_"): table_of(name, results_of(name, results)) for name in CONTESTS
    }
    machines = sorted(
        {
            str(each["machine"]) + ", " + str(each["day"])
            for name in CONTESTS
            for rounds in results_of(name, results).values()
            for each in rounds
            if "machine" in each
        }
    )
    own = {"marks": marks(results), "in_24_gb": in_24_gb(results), "sizes": sizes(results)}
    return TEXT.read_text().format(machines="; ".join(machines) or "(nothing measured)", **own, **contests)


def write() -> None:
    PAGE.write_text(text())
    pictures(PAGE.parent / "pictures")
