"""Side by side: a plain model that torch trains and its copy that outsize trains, on every tier.

A tier is a name: "device", "host" and "disk" put everything there; "squeezed" is the disk with room for two gathered
units only, so that units come and go all the time. Every engine of a test is closed by the garbage collector when the
test is over, and must leave nothing behind.
"""

import copy
import gc
import itertools
import os
import resource
import shutil
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import outsize
import tests.seeds  # noqa: F401
from outsize.api.assemble import Prepared, require
from tests import workers
from tests.accelerator import sim as simulator
from tests.accelerator.left_out import DEVICE_ALONE, LEFT_OUT, LEFT_OUT_ON_CUDA
from tests.comparing import assert_same_weights
from tests.ranks.launching import fork_server
from tests.small_models import Stack

TIERS = ("device", "host", "disk", "squeezed")
PAIRS = (("device", "disk"), ("host", "squeezed"))
AT_REST_TIERS = TIERS[1:]
KINDS = ("params", "grads", "states")
DEVICES = ("sim", "sim:1", "cuda")

SHARED_MEMORY, ENOUGH_BYTES = Path("/dev/shm"), 6 << 30
ON_DRIVE = ("tests/native/", "tests/move/", "tests/durability/")
"""Where tests have a folder on a drive. All others have one in memory, where there is room: no waiting for a drive."""

torch.set_num_threads(1)  # tiny tensors: more threads only cost
hypothesis.settings.register_profile("outsize", deadline=None)  # other work may hold up any example
hypothesis.settings.load_profile("outsize")

Loss = Callable[[nn.Module, Any], Tensor]


STARTERS = {"Script", "run_script", "run_on_ranks", "ends_on_ranks", "first_failure", "context"}
"""What starts processes."""

TESTS_AT_ONCE = 8
"""So many tests of a file a worker takes at once, where none starts processes."""

EVERY_TIER = (
    *("tests/run/test_parity.py::test_twenty", "tests/run/test_parity.py::test_bf16_weights"),
    *("tests/run/test_parity.py::test_parameters_", "tests/run/test_parity.py::test_gradients_that_exist"),
    *("tests/run/test_parity.py::test_a_state_dict",),
    *("tests/run/test_same_bits", "tests/integrations"),
)
"""Where each case runs on each tier."""

SIMULATED_WHOLE = ("tests/accelerator", "tests/run/test_parity", "tests/run/test_same_bits")
"""Where each case runs on the simulated device."""

SIMULATED_ON_EVERY_TIER = ("tests/accelerator", "tests/run/test_same_bits")
"""The same on the simulated device, which is slower."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", *DEVICES), help="where the models of the tests compute")
    parser.addoption("--every-tier", action="store_true", help="each case, on each tier; else in turns")
    parser.addoption("--workers", default=1, type=int, help="how many processes run tests; see tests/workers.py")


def pytest_configure(config: pytest.Config) -> None:
    if SHARED_MEMORY.is_mount() and shutil.disk_usage(SHARED_MEMORY).free > ENOUGH_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED_MEMORY))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--device") in DEVICES
    if not config.getoption("--every-tier"):
        items[:] = (
            _take_turns(_one_of_each(items), SIMULATED_ON_EVERY_TIER) if wanted else _take_turns(items, EVERY_TIER)
        )
    for item in items if wanted else ():
        if (reason := _left_out(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    simulated = "sim" in session.config.getoption("--device") or any(
        "sim" in getattr(item, "fixturenames", ()) or item.nodeid.startswith("tests/accelerator/")
        for item in session.items
    )
    capture: Any = session.config.pluginmanager.getplugin("capturemanager")

    def begin() -> None:
        capture.resume_global_capture()  # what ranks say belongs to their tests
        fork_server()
        capture.suspend_global_capture()
        if simulated:
            simulator.load()  # torch must know the device before the first backward of the process

    _warm_up()
    gc.collect()
    gc.freeze()  # modules and tests, which every collection would look through
    return workers.run(session, session.config.getoption("--workers"), begin, *_queues(session.items))


def _warm_up() -> None:
    """Let torch import what it imports late, its compiler among others, before processes are forked."""
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.zeros(1)
    nn.utils.clip_grad_norm_([param], 1.0)
    optimizer.step()


def _queues(items: list[pytest.Item]) -> tuple[list[range], list[range]]:
    """The tests that start processes, file by file, and the others, a few at a time. One worker begins with the former:
    few processes run at once."""
    starting, others = [], []
    first = 0
    for module, of_one in itertools.groupby(items, lambda item: item.getparent(pytest.Module)):
        end = first + len(list(of_one))
        if STARTERS.isdisjoint(vars(module.obj)):
            others += [range(each, min(each + TESTS_AT_ONCE, end)) for each in range(first, end, TESTS_AT_ONCE)]
        else:
            starting.append(range(first, end))
        first = end
    return starting, others


def _left_out(item: pytest.Item) -> str | None:
    """Why a test does not run on an accelerator."""
    if item.nodeid.startswith(DEVICE_ALONE) and any(f"[{tier}" in item.nodeid for tier in AT_REST_TIERS):
        return "computes its updates on the CPU, as without the device"
    left_out = LEFT_OUT | LEFT_OUT_ON_CUDA if item.config.getoption("--device") == "cuda" else LEFT_OUT
    return next((why for test, why in left_out.items() if item.nodeid.startswith(test)), None)


def _one_of_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of each test that runs without the device too one case, the same in every run. The device's own tests are whole,
    and those of the same bits on each tier."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        whole = item.nodeid.startswith(SIMULATED_WHOLE)
        cases.setdefault(item.nodeid if whole else item.nodeid.partition("[")[0], []).append(item)
    return [
        min(of_one, key=lambda item: (bool(_left_out(item)), zlib.crc32(item.nodeid.encode())))
        for of_one in cases.values()
    ]


def _take_turns(items: list[pytest.Item], whole: tuple[str, ...]) -> list[pytest.Item]:
    """Of a case that has three tiers or more, those whose turn it is, from case to case; but `whole` files."""
    tiers: dict[str, list[str]] = {}
    cases = {}
    for item in items:
        tier = getattr(getattr(item, "callspec", None), "params", {}).get("tier")
        if tier in TIERS and not item.nodeid.startswith(whole):
            cases[item] = case = item.nodeid.replace(tier, "tier", 1)
            tiers.setdefault(case, []).append(tier)
    turn = {}
    for case, each in tiers.items():
        there = [some for some in PAIRS if set(some) & set(each)] if len(each) > 2 else [tuple(each)]
        turn[case] = there[zlib.crc32(case.encode()) % len(there)]
    return [item for item in items if item not in cases or item.callspec.params["tier"] in turn[cases[item]]]


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the test computes: what it makes lies there, unless it says otherwise."""
    chosen = str(request.config.getoption("--device"))
    if chosen == "cpu" or request.node.nodeid.startswith("tests/accelerator/"):  # which choose for themselves
        yield "cpu"
        return
    switch = simulator.switched_on("hold", devices=1 + chosen.endswith("1")) if "sim" in chosen else nullcontext()
    with switch, torch.device(chosen), _DrawnOnCpu():
        yield chosen


class _DrawnOnCpu(TorchFunctionMode):
    """What a generator of the CPU draws lies on the default device nevertheless."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn_by = kwargs.get("generator")
        makes = "device" not in kwargs and not any(isinstance(each, Tensor) for each in args)
        if drawn_by is None or drawn_by.device.type != "cpu" or not makes:
            return func(*args, **kwargs)
        return func(*args, **kwargs, device="cpu").to(torch.get_default_device())


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The simulated accelerator, its copies held back until somebody waits for them, or by the policy that is the
    parameter; races fail the test. Name it before `workshop`, which closes what runs on it."""
    with simulator.switched_on(getattr(request, "param", "hold"), seed=11) as device:
        yield device


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of the test's own. See `ON_DRIVE`."""
    if not request.node.nodeid.startswith(ON_DRIVE):
        yield request.getfixturevalue("tmp_path")
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    """Each tier in turn."""
    return str(request.param)


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    """The loss of most tests: `batch` is (inputs, targets)."""
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def batches(count: int, width: int = 16, out: int = 4, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    """The same random batches every time."""
    generator = torch.Generator("cpu").manual_seed(count)

    def random(columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device="cpu").to(torch.get_default_device())

    return [(random(width), random(out)) for _ in range(count)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Where gradients are rounding noise alone (of the bias of keys), which Adam would amplify."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def prepared(model: nn.Module) -> Prepared:
    """What `outsize.prepare` made of the model."""
    return require(model)


def squeeze(model: nn.Module, units: int = 2) -> None:
    """Leave room for so many gathered units, as the smallest budget would."""
    streamer = prepared(model).engine.streamer
    streamer.room.planned_capacity = units * max(unit.nbytes for unit in prepared(model).engine.parameters.units)
    streamer.room.excess.logged = True
    streamer.drop_idle()


def refused(model: nn.Module, optimizer: torch.optim.Optimizer | None, match: str, **fields: Any) -> None:
    """`prepare` raises and the model still works."""
    before = {name: type(param) for name, param in model.named_parameters()}
    with pytest.raises((ValueError, TypeError), match=match):
        outsize.prepare(model, optimizer, **fields)
    assert {name: type(param) for name, param in model.named_parameters()} == before


@dataclass
class Trace:
    """What a run showed: one entry a step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def close_to(self, other: "Trace", rel: float = 1e-6) -> None:
        assert self.losses == pytest.approx(other.losses, rel=rel, abs=1e-12)
        assert self.norms == pytest.approx(other.norms, rel=rel, abs=1e-12)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[Any],
    loss_of: Loss = squared_error,
    clip: float | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    norm_type: float = 2.0,
) -> Trace:
    """The user's loop."""
    trace = Trace()
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type)
            trace.norms.append(norm.item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        trace.losses.append(loss.item())
    return trace


def take_step(
    loss: Tensor, optimizer: torch.optim.Optimizer, clip: tuple[Iterable[Tensor], float] | None = None
) -> Tensor:
    """A step of the plainest loop, with the norm of the gradients of these parameters clipped; the loss again."""
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(*clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass
class Pair:
    """A plain model with its optimizer, and their prepared copies."""

    plain: nn.Module
    plain_optimizer: torch.optim.Optimizer
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def both(self) -> tuple[tuple[nn.Module, torch.optim.Optimizer], tuple[nn.Module, torch.optim.Optimizer]]:
        """Plain first."""
        return (self.plain, self.plain_optimizer), (self.model, self.optimizer)

    def train(self, data: Iterable[Any], rel: float = 1e-6, atol: float = 1e-5, seed: int = 0, **how: Any) -> Trace:
        """Train both, compare every loss, every norm and all weights; returns the trace of the prepared copy."""
        data = list(data)
        torch.manual_seed(seed)
        expected = train(self.plain, self.plain_optimizer, data, **how)
        torch.manual_seed(seed)
        trace = train(self.model, self.optimizer, data, **how)
        trace.close_to(expected, rel)
        self.check(atol)
        return trace

    def check(self, atol: float = 1e-5) -> None:
        assert_same_weights(self.model, self.plain, atol)


class Workshop:
    """Prepares models on a tier, in a directory of its own."""

    def __init__(self, disk: Path, device: str) -> None:
        self.disk = disk
        self.device = device
        self._resources: list[weakref.ref[Any]] = []

    @property
    def exact_tiers(self) -> tuple[str, ...]:
        """Those on which a run gives the same bits: an accelerator steps by torch's formulas, the host by ours."""
        return TIERS if self.device == "cpu" else AT_REST_TIERS

    def fields(self, tier: str, **fields: Any) -> dict[str, Any]:
        """The keywords of `prepare` for a tier."""
        place = "disk" if tier == "squeezed" else tier
        chosen: dict[str, Any] = {"host_memory": "64MiB", "device": self.device, **dict.fromkeys(KINDS, place)}
        if "disk" in {**chosen, **fields}.values() or any(fields.get(kind) == "disk" for kind in KINDS):
            chosen["disk"] = self.disk
        return {**chosen, **fields}

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, tier: str = "disk", **fields: Any
    ) -> None:
        outsize.prepare(model, optimizer, **self.fields(tier, **fields))
        self.watch(model)
        if tier == "squeezed":
            squeeze(model)

    def made(
        self,
        build: Callable[[], nn.Module] = Stack,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        tier: str = "disk",
        seed: int = 0,
        **fields: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A prepared model and its optimizer."""
        torch.manual_seed(seed)
        model = build()
        chosen = optimizer(model)
        self.prepare(model, chosen, tier, **fields)
        return model, chosen

    def watch(self, model: nn.Module) -> None:
        """Check after the test that the engine of this model is gone."""
        self._resources.append(weakref.ref(prepared(model).resources))

    def pair(
        self,
        build: Callable[[], nn.Module] = Stack,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        tier: str = "disk",
        **fields: Any,
    ) -> Pair:
        """A plain model and its prepared copy, each with its own optimizer."""
        torch.manual_seed(0)
        plain = build()
        model = copy.deepcopy(plain)
        pair = Pair(plain, optimizer(plain), model, optimizer(model))
        self.prepare(model, pair.optimizer, tier, **fields)
        return pair

    def settle(self, model: nn.Module) -> None:
        """Run every update that is owed and let everything arrive where it rests."""
        engine = prepared(model).engine
        engine.streamer.settle_all()
        for unit in engine.parameters.units:
            unit.await_written()

    def leftovers(self) -> list[Any]:
        return [ref() for ref in self._resources if ref() is not None]


@contextmanager
def no_file_above(nbytes: int) -> Iterator[None]:
    """What a file system without room does: no file that is written inside may become larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def random_state() -> Tensor:
    """Of the generator that the device draws from."""
    device = torch.get_default_device()
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state()


def forget_last_graph() -> None:
    """The threads on which torch runs a backward keep its graph until the next one, here after an error."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if here is not None else 0
    for place in ["cpu", *(f"{here}:{index}" for index in range(count))]:
        torch.ones((), requires_grad=True, device=place).backward()


@pytest.fixture
def workshop(tmp_path: Path, device: str, request: pytest.FixtureRequest) -> Iterator[Workshop]:
    """Prepares models; afterwards every engine must be gone, with its thread and its files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    before = threads()
    workshop = Workshop(disk, device)
    yield workshop
    forget_last_graph()
    gc.collect()
    if workshop.leftovers():  # a graph that a module had kept went with the module: now its parameters can go
        gc.collect()
    left, files = workshop.leftovers(), os.listdir(disk)
    gc.freeze()  # what lives now needs no look at the next collection
    for resources in left:
        resources.close()
    if not getattr(request.node, "failed", False):  # a failure's traceback keeps the test's objects
        assert not left, "an engine outlives its model"
        assert not files, "files are left in the disk directory"
        assert threads() <= before, "threads are left"


@pytest.fixture
def pair(workshop: Workshop, tier: str) -> Iterator[Pair]:
    """A plain stack and its prepared copy, on each tier in turn."""
    pair = workshop.pair(tier=tier)
    yield pair
    vars(pair).clear()  # pytest keeps what it gave until all fixtures are over


def threads() -> set[str]:
    return {f"{thread.name}-{thread.ident}" for thread in threading.enumerate() if "outsize" in thread.name}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = (yield).get_result()
    item.failed = getattr(item, "failed", False) or report.failed or hasattr(report, "wasxfail")  # type: ignore[attr-defined]
