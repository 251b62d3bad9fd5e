"""`outsize.init` against plain construction with the same seed. Memory is bounded by the budget, and by what one
parameter exceeds all before it while it is made."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import outsize
from outsize.api.building import init
from outsize.run.paging import PagedParameter, page_in
from tests.scripts import run_script
from tests.small_models import llama_config

transformers = pytest.importorskip("transformers")

BUDGET = 3 << 20
LARGEST = 1 << 20


@pytest.fixture(autouse=True)
def on_the_host(device: str) -> Iterator[None]:
    """Where `init` builds, whatever the device is."""
    with torch.device("cpu"):
        yield


class Custom(nn.Module):
    """Parameters made in every way that constructors know; 10 MiB, the largest of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 512) for _ in range(8)])
        self.free = nn.Parameter(torch.randn(512, 512))
        self.listed = nn.ParameterList([torch.rand(256, 256) for _ in range(2)])
        self.frozen = nn.Parameter(torch.empty(512, 256), requires_grad=False)
        self.frozen.numpy()[:] = 3.0
        self.frozen[2:4].zero_()
        self.register_buffer("table", torch.arange(100_000).float())
        self.apply(self.start)
        self.norms = [float(param.detach().norm()) for param in self.parameters()]
        with torch.no_grad():
            self.layers[3].weight.copy_(self.layers[0].weight * 2)
            self.layers[4].weight.data = self.layers[1].weight.data.t().contiguous()
        self.twin = copy.deepcopy(self.layers[5])
        self.cast = nn.Linear(512, 256).to(torch.bfloat16)
        self.moved = nn.Linear(512, 512, device="meta").to_empty(device="cpu")
        nn.init.trunc_normal_(self.moved.weight)
        nn.init.sparse_(self.moved.weight, 0.5)
        nn.init.zeros_(self.moved.bias)

    @torch.no_grad()
    def start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            start = nn.init.orthogonal_ if module is self.layers[2] else nn.init.xavier_normal_  # the first is slow
            start(module.weight)
            module.weight.mul_(1.5)


def llama() -> nn.Module:
    config = llama_config(256, 512, 8, 4, 1000, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=1000, n_positions=64)
    )


def normed() -> nn.Module:
    return nn.Sequential(
        *[
            nn.Sequential(
                nn.Conv2d(128, 128, 3), nn.BatchNorm2d(128), nn.utils.parametrizations.weight_norm(nn.Linear(512, 512))
            )
            for _ in range(6)
        ]
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2, tied": gpt2,
    "custom": Custom,
    "lstm": lambda: nn.LSTM(256, 256, num_layers=8, bidirectional=False),
    "normalisation and weight norm": normed,
    "encoder of copied layers": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(256, 4, 512, batch_first=True), 8
    ),
}


def build(
    make: Callable[[], nn.Module], disk: Path | None, budget: int = BUDGET
) -> tuple[nn.Module, init, torch.Tensor]:
    torch.manual_seed(0)
    with init(host_memory=budget, disk=disk, device="cpu") as context:
        model = make()
        state = torch.get_rng_state()
    return model, context, state


def plain(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return make(), torch.get_rng_state()


def same(model: nn.Module, oracle: nn.Module) -> bool:
    for param in model.parameters():
        page_in(param)
    ours, theirs = model.state_dict(), oracle.state_dict()
    return list(ours) == list(theirs) and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs
    )


def files(disk: Path) -> list[str]:
    return [entry.name for entry in disk.iterdir()]


@pytest.mark.parametrize("name", MODELS)
def test_builds_the_bits_of_plain_construction_in_bounded_memory(tmp_path: Path, name: str) -> None:
    oracle, oracle_state = plain(MODELS[name])
    model, context, state = build(MODELS[name], tmp_path)
    assert sum(param.numel() * param.element_size() for param in oracle.parameters()) > BUDGET + LARGEST
    assert context.peak_bytes <= BUDGET + LARGEST
    assert files(tmp_path) != []
    assert torch.equal(state, oracle_state)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in oracle.named_parameters()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in oracle.named_modules()]
    assert same(model, oracle)
    assert files(tmp_path) == []


def test_reads_the_values_that_constructors_ask_for(tmp_path: Path) -> None:
    oracle, _ = plain(Custom)
    model, _, _ = build(Custom, tmp_path)
    assert model.norms == oracle.norms


def test_loads_a_pretrained_model_in_bounded_memory(tmp_path: Path) -> None:
    disk, folder = tmp_path / "disk", tmp_path / "model"
    disk.mkdir()
    oracle, _ = plain(llama)
    oracle.save_pretrained(folder)
    model, context, _ = build(lambda: transformers.AutoModelForCausalLM.from_pretrained(folder), disk)
    assert context.peak_bytes <= BUDGET + LARGEST
    assert same(model, oracle)
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


def test_loads_a_state_in_the_block_by_copy_and_by_assignment(tmp_path: Path) -> None:
    oracle, _ = plain(Custom)
    state = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}

    def make() -> nn.Module:
        torch.manual_seed(1)
        model = Custom()
        model.load_state_dict(state)
        return model

    model, context, _ = build(make, tmp_path)
    assert context.peak_bytes <= BUDGET + LARGEST
    assert same(model, oracle)


def test_a_model_that_fits_is_plain_and_writes_nothing(tmp_path: Path) -> None:
    oracle, _ = plain(Custom)
    model, _, _ = build(Custom, tmp_path, 1 << 30)
    assert files(tmp_path) == []
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert same(model, oracle)


def test_without_a_disk_a_model_that_fits_is_built() -> None:
    oracle, _ = plain(Custom)
    model, _, _ = build(Custom, None, 1 << 30)
    assert same(model, oracle)


def test_without_a_disk_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"host_memory is 3.0 MiB and there is no disk; pass disk="):
        build(Custom, None)


def test_parameters_that_are_all_in_use_are_refused_with_the_numbers(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = Custom()
        model.aliases = [param.data for param in model.parameters()]
        return model

    message = r"in use at the same time but host_memory is 3.0 MiB; raise host_memory"
    with pytest.raises(outsize.BudgetError, match=message) as caught:
        build(make, tmp_path)
    assert caught.value.field == "host_memory"
    assert caught.value.needed > caught.value.available == 3 << 20


def test_parameters_of_one_size_never_exceed_the_budget(tmp_path: Path) -> None:
    budget, parameter = 4 << 20, 1 << 20
    _, context, _ = build(lambda: nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(12)]), tmp_path, budget)
    assert budget - 2 * parameter <= context.peak_bytes <= budget


def test_a_model_that_just_fits_is_plain_although_room_was_kept_for_more(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(4)])

    oracle, _ = plain(make)
    model, context, _ = build(make, tmp_path, 4 << 20)
    assert context.peak_bytes <= 4 << 20
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert files(tmp_path) == []
    assert same(model, oracle)


def test_many_small_parameters_are_built_within_the_budget(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.ModuleList([nn.Linear(100, 100, bias=False) for _ in range(200)])  # 7.6 MiB, 40,000 bytes each

    oracle, _ = plain(make)
    model, context, _ = build(make, tmp_path)
    assert context.peak_bytes <= BUDGET
    assert same(model, oracle)


def test_parameters_too_small_for_the_disk_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot go to disk, .*below 8.0 KiB.* host_memory is 1.0 MiB; raise"):
        build(lambda: nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(400)]), tmp_path, 1 << 20)


def test_disk_space_is_a_limit(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="disk_space"),
        init(host_memory=BUDGET, disk=tmp_path, disk_space=1 << 20, device="cpu"),
    ):
        Custom()


def test_a_missing_directory_is_an_error_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="does not exist"):
        init(host_memory=BUDGET, disk=tmp_path / "none" / "disk", device="cpu")


def torch_as_it_is() -> tuple[object, ...]:
    return (
        nn.Parameter.__dict__["__new__"],
        nn.Module.__dict__["register_parameter"],
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        os.environ.get("HF_DEACTIVATE_ASYNC_LOAD"),
    )


def test_an_exception_inside_leaves_torch_as_it_was_and_the_disk_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    before = torch_as_it_is()

    def fail() -> None:
        model = Custom()
        raise KeyError(len(list(model.parameters())))

    with pytest.raises(KeyError), init(host_memory=BUDGET, disk=tmp_path, device="cpu"):
        fail()
    assert torch_as_it_is() == before
    gc.collect()
    assert files(tmp_path) == []


def test_nested_and_repeated_use_are_refused(tmp_path: Path) -> None:
    outer = init(host_memory=BUDGET, disk=tmp_path, device="cpu")
    with outer, pytest.raises(RuntimeError, match="cannot be nested"), init(device="cpu"):
        pass
    with pytest.raises(RuntimeError, match="used already; make a new one"), outer:
        pass
    with init(device="cpu"):
        pass


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="did you mean 'host_memory'"):
        init(host_memori="1GiB")


def test_a_paged_model_answers_everything_but_its_values(tmp_path: Path) -> None:
    oracle, _ = plain(gpt2)
    model, _, _ = build(gpt2, tmp_path)
    weight, expected = model.transformer.h[0].mlp.c_fc.weight, oracle.transformer.h[0].mlp.c_fc.weight
    assert isinstance(weight, PagedParameter)
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.numel(), len(weight)) == (expected.shape, expected.dtype, 262144, 256)
    assert (weight.requires_grad, weight.grad, weight.is_leaf, weight.device) == (True, None, True, expected.device)
    assert str(model) == str(oracle)
    assert repr(weight) == "Parameter(shape=(256, 1024), dtype=torch.float32, built under outsize.init)"
    assert model.lm_head.weight is model.transformer.wte.weight
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.zero_grad()
    model.train().eval().requires_grad_(False).requires_grad_(True)
    other = nn.Linear(1024, 256)
    other.weight = weight
    assert other.weight is weight


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    with torch.device("cpu"):
        return build(Custom, tmp_path_factory.mktemp("disk"))[0]


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: weight.sum(),
        lambda weight: weight.data,
        lambda weight: weight.detach().numpy(),
        lambda weight: weight.tolist(),
        lambda weight: weight.data_ptr(),
        lambda weight: weight[0],
        lambda weight: weight.mul_(2),
        lambda weight: np.asarray(weight),
        lambda weight: nn.functional.linear(torch.zeros(1, 512), weight),
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_values_on_disk_are_refused_by_name_with_the_remedy(
    on_disk: nn.Module, read: Callable[[torch.Tensor], object]
) -> None:
    weight = on_disk.layers[2].weight
    with pytest.raises(RuntimeError, match=r"'Linear.weight'.* call outsize.prepare\(model, optimizer\) first"):
        read(weight)
    errors = []

    def elsewhere() -> None:
        try:
            read(weight)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_aliases_made_in_the_block_stay_what_they_are(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = Custom()
        model.alias = model.layers[0].weight.data
        model.array = model.layers[1].weight.detach().numpy()
        return model

    oracle, _ = plain(make)
    model, _, _ = build(make, tmp_path, 4 << 20)
    assert torch.equal(model.alias, oracle.alias)
    assert np.array_equal(model.array, oracle.array)
    assert model.alias.data_ptr() == model.layers[0].weight.data_ptr()
    assert same(model, oracle)


def test_a_backward_in_the_block_finds_the_saved_parameters(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = Custom()
        x = torch.ones(2, 512)
        for layer in model.layers[:2]:
            x = layer(x)
        later = [nn.Linear(512, 512) for _ in range(6)]
        x.sum().backward()
        model.later = nn.ModuleList(later)
        return model

    oracle, _ = plain(make)
    model, _, _ = build(make, tmp_path, 4 << 20)
    assert torch.equal(model.layers[0].weight.grad, oracle.layers[0].weight.grad)
    assert same(model, oracle)


def test_a_fill_that_fails_keeps_the_values(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = Custom()
        for layer in model.layers:
            with pytest.raises(RuntimeError):
                layer.weight.data.normal_(0.0, -1.0)
            with torch.no_grad(), pytest.raises(RuntimeError):
                layer.weight.normal_(0.0, -1.0)
        return model

    oracle, _ = plain(make)
    model, _, _ = build(make, tmp_path)
    assert same(model, oracle)


def test_two_parameters_over_one_storage_share_their_page(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.base = nn.Parameter(torch.randn(512, 512))
        model.same = nn.Parameter(model.base)
        model.part = nn.Parameter(model.base.data[:256])
        model.others = nn.ModuleList([nn.Linear(512, 512) for _ in range(6)])
        with torch.no_grad():
            model.part.fill_(2.0)
        return model

    oracle, _ = plain(make)
    model, _, _ = build(make, tmp_path)
    assert isinstance(model.base, PagedParameter)
    assert model.base.shape == model.same.shape
    assert same(model, oracle)
    assert model.base.data_ptr() == model.same.data_ptr() == model.part.data_ptr()


def test_threads_may_build_too(tmp_path: Path) -> None:
    def make() -> nn.Module:
        layers: list[nn.Module] = []
        threads = [
            threading.Thread(target=lambda: layers.extend(nn.Linear(512, 512) for _ in range(6))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for layer in layers:
            nn.init.constant_(layer.weight, 4.0)
        return nn.ModuleList(layers)

    model, _, _ = build(make, tmp_path, 8 << 20)
    assert isinstance(model[0].weight, PagedParameter)
    assert all(bool((page_in(layer.weight) == 4.0).all()) for layer in model)


def test_what_is_dropped_leaves_the_disk(tmp_path: Path) -> None:
    model, _, _ = build(Custom, tmp_path)
    assert files(tmp_path) != []
    del model
    gc.collect()
    assert files(tmp_path) == []


def train(model: nn.Module, disk: Path, budget: int, device: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = outsize.prepare(model, optimizer, host_memory=budget, disk=disk, states="disk", device=device)
    tokens = torch.randint(0, 1000, (2, 16), device=device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    with outsize.gathered(model):
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("make", [llama, gpt2])
def test_prepare_afterwards_trains_as_without_init(tmp_path: Path, make: Callable[[], nn.Module], device: str) -> None:
    expected = train(plain(make)[0], tmp_path, 64 << 20, device)
    gc.collect()
    built, other = tmp_path / "built", tmp_path / "other"
    built.mkdir()
    other.mkdir()
    model, _, _ = build(make, built)
    found = train(model, other, 64 << 20, device)
    assert files(built) == []
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_prepare_inside_the_block_is_refused(tmp_path: Path) -> None:
    with init(host_memory=BUDGET, disk=tmp_path, device="cpu"):
        model = nn.Linear(512, 512)
        with pytest.raises(RuntimeError, match=r"inside the outsize.init block; leave the block first"):
            outsize.prepare(model, None, host_memory="64MiB", device="cpu")


SCRIPT = """
import os, signal, sys, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from torch import nn
from outsize.api.building import init

def resident(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key)) << 10

torch.set_num_threads(1)
nn.init.orthogonal_(nn.Linear(8, 8).weight)
end, disk = sys.argv[1:]
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")
before = resident("VmRSS")
with init(host_memory="16MiB", disk=disk, device="cpu"):
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)])
print(resident("VmHWM") - before, len(os.listdir(disk)), flush=True)
if end != "exit":
    os.kill(os.getpid(), getattr(signal, end))
"""


@dataclass(frozen=True)
class Ended:
    """What a build of 96 MiB within 16 MiB has left, by the way its process ended."""

    peak: int  # bytes
    entries: int  # on disk, at the end of the block
    disk: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    found = {}
    for end, expected in {"exit": 0, "SIGINT": 130, "SIGKILL": -signal.SIGKILL}.items():
        disk = tmp_path_factory.mktemp(end)
        status, said, errors = run_script(SCRIPT, end, disk)
        assert status == expected, errors
        peak, entries = said.split()
        found[end] = Ended(int(peak), int(entries), disk)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "SIGINT"])
def test_memory_is_bounded_and_the_end_leaves_nothing(ended: dict[str, Ended], end: str) -> None:
    budget, parameter, slack = 16 << 20, 4 << 20, 24 << 20
    assert ended[end].peak <= budget + parameter + slack  # of 96 MiB
    assert ended[end].entries == 1
    assert files(ended[end].disk) == []


@pytest.mark.slow
def test_what_a_killed_build_left_is_removed_by_the_next(ended: dict[str, Ended]) -> None:
    disk = ended["SIGKILL"].disk
    assert len(files(disk)) == 1
    model, _, _ = build(Custom, disk)
    assert len(files(disk)) == 1
    del model
    gc.collect()
    assert files(disk) == []


@pytest.mark.slow
def test_an_interpreter_that_ends_with_a_model_says_nothing(tmp_path: Path) -> None:
    """In a process of its own: one that is forked empties its modules in another order."""
    build_and_end = (
        "import sys, torch, outsize\n"
        "with outsize.init(host_memory='300KiB', disk=sys.argv[1], device='cpu'):\n"
        "    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", build_and_end, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""


def test_values_in_a_list_of_ones_own_class_are_read(tmp_path: Path) -> None:
    """torch's functions take any list."""

    class Several(list[torch.Tensor]):
        pass

    with init(host_memory=BUDGET, disk=tmp_path):
        made = [nn.Parameter(torch.full((512, 512), float(number))) for number in range(8)]
        assert torch.stack(Several(made[:2])).mean() == 0.5
        assert torch.cat(Several(made[2:4])).mean() == 2.5
