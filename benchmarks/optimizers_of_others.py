"""Other people's optimizers against plain torch. `python -m benchmarks.optimizers_of_others --disk DIRECTORY`.

Every optimizer of pytorch_optimizer and of timm trains the same small model twice: in plain torch, and prepared with
all state on disk. It must come to the same weights, or be refused with a reason. Both packages are installed by hand:
`pip install --no-deps pytorch_optimizer timm`.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import logging
import multiprocessing
import os
import resource
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import outsize

VOCABULARY, WIDTH, INNER, STEPS = 300, 40, 264, 8
CLOSE = 1e-3
"""Of what a weight has moved: where sums are rounded in another order."""
MEMORY = 8 << 30
"""That one optimizer may take; some double what they keep in every step."""

_WITH_MUON = {"adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon"}
"""Take groups that say which parameters are matrices."""

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Language(nn.Module):
    """Predicts the next token; its largest matrices are above the sizes where optimizers factor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.middle, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, INNER), nn.Linear(INNER, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(torch.relu(self.middle(torch.relu(self.up(x)))))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (8, 17), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def judge(make: Make, disk: Path) -> tuple[str, str]:
    """What comes of one optimizer, and why."""
    torch.manual_seed(0)
    start = Language()
    plain, model = copy.deepcopy(start), copy.deepcopy(start)
    try:
        torch.manual_seed(1)
        expected = train(plain, make(plain))
    except Exception as error:
        return "does not run in plain torch", f"{type(error).__name__}: {error}"
    try:
        optimizer = make(model)
        outsize.prepare(model, optimizer, host_memory="64MiB", disk=disk, device="cpu")
    except (ValueError, TypeError) as error:
        return "refused", str(error)
    try:
        torch.manual_seed(1)
        losses = train(model, optimizer)
    except Exception as error:
        return "raises", f"{type(error).__name__}: {error}"
    worst = 0.0
    with outsize.gathered(model), torch.no_grad():
        for mine, theirs, first in zip(model.parameters(), plain.parameters(), start.parameters(), strict=True):
            moved = float((theirs - first).abs().max())
            worst = max(worst, float((mine - theirs).abs().max()) / max(moved, 1e-12))
    if losses == expected and not worst:
        return "the same bits", ""
    return (
        "right" if worst <= CLOSE else "wrong"
    ), f"differs by {worst:.1e} of what moved; {losses[-1]} {expected[-1]}"


def apart(make: Make, disk: Path) -> tuple[str, str]:
    """`judge` in a process of its own, with a bound on its memory."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        there.send(judge(make, disk))
        os._exit(0)
    there.close()
    try:
        found: tuple[str, str] = here.recv()
    except EOFError:
        found = "raises", "the process ended"
    os.waitpid(child, 0)
    return found


def of_pytorch_optimizer() -> Iterator[tuple[str, Make]]:
    import pytorch_optimizer

    for name in sorted(pytorch_optimizer.get_supported_optimizers()):

        def make(model: nn.Module, name: str = name) -> torch.optim.Optimizer:
            kind: Any = pytorch_optimizer.load_optimizer(name)
            matrices = [param for param in model.parameters() if param.ndim == 2]
            vectors = [param for param in model.parameters() if param.ndim != 2]
            groups = [{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}]
            options: dict[str, Any] = {"ranger21": {"num_iterations": 100}, "bsam": {"num_data": 100}}.get(name, {})
            given: Any = groups if name in _WITH_MUON else model.parameters()
            try:
                return kind(given, lr=1e-3, **options)  # type: ignore[no-any-return]
            except TypeError:
                return kind(given, **options)  # type: ignore[no-any-return]

        yield f"pytorch_optimizer.{name}", make


class _Anything(type):
    def __getattr__(cls, name: str) -> str:
        return name


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Absent(MetaPathFinder, Loader):
    """Stands for torchvision, of which timm's optimizers use nothing but which they import."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def of_timm() -> Iterator[tuple[str, Make]]:
    sys.meta_path.append(_Absent())
    spec = importlib.util.find_spec("timm")
    package = types.ModuleType("timm")  # without its models
    package.__path__ = list(spec.submodule_search_locations or []) if spec else []
    package.__dict__["__version__"] = ""
    sys.modules["timm"] = package
    from timm.optim import create_optimizer_v2, list_optimizers

    for name in list_optimizers():
        yield f"timm.{name}", lambda model, name=name: create_optimizer_v2(model, opt=name, lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--only", default="", help="part of the names to try")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {}
    for source in (of_pytorch_optimizer, of_timm):
        for name, make in source():
            if options.only in name:
                with tempfile.TemporaryDirectory(dir=options.disk) as disk:
                    verdict, why = apart(make, Path(disk))
                counts.setdefault(name.split(".")[0], Counter())[verdict] += 1
                print(json.dumps({"optimizer": name, "verdict": verdict, "why": why}), flush=True)
    print(json.dumps({source: dict(counter) for source, counter in counts.items()}))


if __name__ == "__main__":
    main()
