"""LoRA on a base that torchao has quantized to 8 and 4 bits: packed at rest, with the bits of plain torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from tests.conftest import Workshop, prepared, take_step
from tests.small_models import llama_config

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchao = pytest.importorskip("torchao.quantization")
    nf4 = pytest.importorskip("torchao.prototype._nf4tensor_api")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

VOCABULARY, WIDTH = 128, 128

CONFIGS: dict[str, Callable[[], Any]] = {
    "int8": lambda: torchao.Int8WeightOnlyConfig(),
    "int8 in groups": lambda: torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32)),
    "4 bits in int8": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32)),
    "fp8": lambda: torchao.Float8WeightOnlyConfig(),
    "nf4": lambda: nf4.NF4WeightOnlyConfig(),
}


def base(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = llama_config(WIDTH, WIDTH, 2, 4, VOCABULARY, num_key_value_heads=4, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    torchao.quantize_(model, CONFIGS[kind]())  # the head too
    return model.requires_grad_(False)


def adapted(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.optim.Optimizer]:
    model = base(kind, dtype)
    torch.manual_seed(1)
    wanted = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, wanted)
    return model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.5)


def losses(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    made, found = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (4, 8), generator=made)
        found.append(take_step(model(input_ids=ids, labels=ids).loss, optimizer).item())
    return found


def packed_bytes(model: nn.Module) -> int:
    """Of all frozen values, as torchao keeps them."""
    nbytes = 0
    for param in model.parameters():
        if not param.requires_grad:
            inner = getattr(param, "__tensor_flatten__", lambda: ([], None))()[0]
            nbytes += sum(getattr(param, name).nbytes for name in inner) or param.nbytes
    return nbytes


@pytest.mark.parametrize(
    ("kind", "tier"), [*((kind, "squeezed") for kind in CONFIGS), ("int8", "device"), ("nf4", "host")]
)
def test_losses_are_those_of_the_plain_program(workshop: Workshop, tier: str, kind: str) -> None:
    plain, (model, optimizer) = adapted(kind), adapted(kind)
    weight = model.get_submodule("base_model.model.model.layers.1.mlp.down_proj").weight
    workshop.prepare(model, optimizer, tier, units="LlamaDecoderLayer")
    assert losses(model, optimizer) == losses(*plain)
    outsize.release(model)
    assert model.get_submodule("base_model.model.model.layers.1.mlp.down_proj").weight is weight
    assert losses(model, optimizer) == losses(*plain)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_least_budget_cuts_a_weight_to_its_codes_and_trains_alike(workshop: Workshop, kind: str) -> None:
    plain, (model, optimizer) = adapted(kind), adapted(kind)
    fields = {"device": "cpu", "disk": workshop.disk, **dict.fromkeys(("params", "grads", "states"), "disk")}
    with pytest.raises(outsize.BudgetError) as refused:
        outsize.plan(model, optimizer, host_memory="4KiB", **fields)
    outsize.prepare(model, optimizer, host_memory=refused.value.needed, **fields)
    assert any(unit.name.endswith(("qdata", "quantized_data")) for unit in outsize.plan(model).units)
    assert losses(model, optimizer) == pytest.approx(losses(*plain), rel=1e-6)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_bf16_gives_the_same_bits_on_every_tier(workshop: Workshop, kind: str) -> None:
    runs = []
    for tier in ("host", "squeezed"):
        model, optimizer = adapted(kind, torch.bfloat16)
        workshop.prepare(model, optimizer, tier, units="LlamaDecoderLayer")
        runs.append(losses(model, optimizer))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_reads_the_base_packed_and_writes_nothing(workshop: Workshop, kind: str) -> None:
    model, optimizer = adapted(kind)
    nbytes, full = packed_bytes(model), 4 * sum(param.numel() for param in base(kind).parameters())
    workshop.prepare(model, optimizer, "host", params="disk", units="LlamaDecoderLayer", activations="keep")
    engine = prepared(model).engine
    units = {unit: unit.shard.layout.param_bytes for unit in engine.parameters.units}
    frozen = sum(nbytes for unit, nbytes in units.items() if unit.inside)
    assert nbytes <= frozen < full / 2
    losses(model, optimizer, 1)
    ids = torch.arange(24).view(2, 12)
    engine.streamer.drop_idle()
    before = outsize.memory(model)
    loss = model(input_ids=ids, labels=ids).loss
    engine.streamer.drop_idle()
    loss.backward()
    after = outsize.memory(model)
    assert 2 * frozen - max(units.values()) <= after.bytes_read - before.bytes_read <= 2 * sum(units.values())
    assert after.bytes_written == before.bytes_written


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_without_an_optimizer_are_those_of_the_plain_program(workshop: Workshop, kind: str) -> None:
    plain = base(kind)
    model = copy.deepcopy(plain)
    workshop.prepare(model, None, "squeezed", units="LlamaDecoderLayer")
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
        assert torch.equal(model.generate(ids, max_new_tokens=4), plain.generate(ids, max_new_tokens=4))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_adapters_are_saved_as_peft_does_it_and_a_checkpoint_goes_on(
    workshop: Workshop, kind: str, tmp_path: Path
) -> None:
    plain, (model, optimizer) = adapted(kind), adapted(kind)
    workshop.prepare(model, optimizer, "squeezed", units="LlamaDecoderLayer")
    assert losses(model, optimizer) == losses(*plain)
    with outsize.gathered([param for param in model.parameters() if param.requires_grad]):
        model.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(base(kind), tmp_path / "adapters").eval()
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, again(ids).logits)
    outsize.save(tmp_path / "saved", model.train(), optimizer).wait()
    model, optimizer = adapted(kind)
    workshop.prepare(model, optimizer, "host", units="LlamaDecoderLayer")
    outsize.load(tmp_path / "saved", model, optimizer)
    assert losses(model, optimizer) == losses(*plain)
