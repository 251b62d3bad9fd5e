"""Fine-tuning with PEFT on a frozen base that is read in place and never written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
from tests.conftest import Workshop, prepared, take_step
from tests.small_models import llama_config

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

VOCABULARY, LAYERS = 200, 4
BUDGET = 1792 << 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = llama_config(128, 256, LAYERS, 4, VOCABULARY, num_key_value_heads=2)
    folder = tmp_path_factory.mktemp("base")
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="1MB")
    return folder


def base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=6, task_type="CAUSAL_LM"),
}


def adapted(folder: Path, kind: str = "lora") -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = peft.get_peft_model(base(folder), CONFIGS[kind]())
    return model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)


def prepare(workshop: Workshop, model: Any, optimizer: torch.optim.Optimizer, **fields: Any) -> None:
    place = {"disk": None, "params": "auto", "grads": "auto", "states": "auto", "host_memory": BUDGET}
    workshop.prepare(model, optimizer, **{**place, **fields})


def batch(rows: int = 8) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(2))


def losses(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    return [take_step(model(input_ids=batch(), labels=batch()).loss, optimizer).item() for _ in range(steps)]


def base_bytes(model: Any) -> int:
    return sum(param.numel() * param.itemsize for param in model.parameters() if not param.requires_grad)


@pytest.mark.parametrize("kind", CONFIGS)
def test_losses_are_those_of_plain_peft_and_the_base_is_never_written(
    workshop: Workshop, folder: Path, kind: str
) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    plain, (model, optimizer) = adapted(folder, kind), adapted(folder, kind)
    prepare(workshop, model, optimizer)
    assert losses(model, optimizer) == pytest.approx(losses(*plain), abs=1e-6)
    report = outsize.memory(model)
    assert report.bytes_read > base_bytes(model)
    assert report.bytes_written == 0
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_step_writes_the_adapters_and_what_belongs_to_them_where_they_rest_on_disk(
    workshop: Workshop, folder: Path
) -> None:
    plain, (model, optimizer) = adapted(folder), adapted(folder)
    at_rest = dict.fromkeys(("params", "grads", "states"), "disk")
    prepare(workshop, model, optimizer, disk=workshop.disk, **at_rest)
    assert losses(model, optimizer) == pytest.approx(losses(*plain), abs=1e-6)
    workshop.settle(model)
    before = outsize.memory(model).bytes_written
    losses(model, optimizer, 1)
    workshop.settle(model)
    trained = [unit.shard.layout.param_bytes for unit in prepared(model).engine.parameters.units if unit.shard.arrays]
    assert 0 < outsize.memory(model).bytes_written - before <= 4 * sum(trained)  # and the gradient, and two moments


def test_micro_batches_read_the_base_twice_a_step(workshop: Workshop, folder: Path) -> None:
    (model, optimizer), plain = adapted(folder), adapted(folder)
    prepare(workshop, model, optimizer, micro_batches=4, units="LlamaDecoderLayer", host_memory="2MiB")
    found = losses(model, optimizer)
    before = outsize.memory(model).bytes_read
    found += losses(model, optimizer, 2)
    assert outsize.memory(model).bytes_read - before <= 2 * 2 * base_bytes(model)
    assert found == pytest.approx(losses(*plain, steps=4), abs=1e-6)


def test_adapters_are_saved_and_loaded_as_peft_does_it(workshop: Workshop, folder: Path, tmp_path: Path) -> None:
    (plain, plain_optimizer), (model, optimizer) = adapted(folder), adapted(folder)
    prepare(workshop, model, optimizer)
    losses(plain, plain_optimizer)
    losses(model, optimizer)
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    ours, theirs = (safetensors.load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "plain"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-4)  # Adam divides noise by noise
    again = peft.PeftModel.from_pretrained(base(folder), tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(again.eval()(batch()).logits, model.eval()(batch()).logits)
        model.load_adapter(tmp_path / "plain", "default")  # what other libraries resume by
        assert torch.equal(model(batch()).logits, plain.eval()(batch()).logits)
    assert outsize.memory(model).bytes_written == 0, "the base stays where it is"


def test_adapters_that_rest_on_disk_are_saved_as_peft_does_it(workshop: Workshop, folder: Path, tmp_path: Path) -> None:
    model, optimizer = adapted(folder, "dora")
    prepare(workshop, model, optimizer, params="disk", states="disk", disk=workshop.disk)
    losses(model, optimizer)
    model.save_pretrained(tmp_path / "at rest", state_dict=model.state_dict())
    model.save_pretrained(tmp_path / "with embeddings", save_embedding_layers=True)
    with outsize.gathered(model):
        model.save_pretrained(tmp_path / "gathered")
    outsize.release(model)
    model.save_pretrained(tmp_path / "plain")
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("at rest", "gathered", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    larger = (tmp_path / "with embeddings" / "adapter_model.safetensors").stat().st_size
    assert larger > 2 * files[0].stat().st_size
    assert "save_pretrained" not in vars(model)


def test_adapters_are_merged_after_release(workshop: Workshop, folder: Path) -> None:
    model, optimizer = adapted(folder)
    prepare(workshop, model, optimizer)
    losses(model, optimizer)
    with torch.no_grad():
        expected = model.eval()(batch()).logits
        with pytest.raises(RuntimeError, match="is at rest"):
            model.merge_and_unload()
        outsize.release(model)
        torch.testing.assert_close(model.merge_and_unload()(batch()).logits, expected, rtol=0, atol=1e-5)


def test_a_checkpoint_of_what_is_trained_leaves_the_base_where_it_is(
    workshop: Workshop, folder: Path, tmp_path: Path
) -> None:
    model, optimizer = adapted(folder)
    prepare(workshop, model, optimizer)
    losses(model, optimizer, 2)
    outsize.save(tmp_path / "ckpt", model, optimizer, frozen=False).wait()
    expected = losses(model, optimizer)
    nbytes = sum(file.stat().st_size for file in (tmp_path / "ckpt").iterdir() if file.suffix == ".bin")
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert 3 * 4 * trained <= nbytes < 3 * 4 * trained + base_bytes(model) / 4, "weights, two moments, and padding"
    again, its_optimizer = adapted(folder)
    prepare(workshop, again, its_optimizer)
    losses(again, its_optimizer, 1)
    outsize.load(tmp_path / "ckpt", again, its_optimizer)
    assert losses(again, its_optimizer) == expected
    for each in (model, again):
        assert any(unit.shard.in_place for unit in prepared(each).engine.parameters.units)
    other = torch.nn.Linear(2, 2)
    workshop.prepare(other, tier="host")
    with pytest.raises(ValueError, match="unexpected parameters: .*base_layer.weight"):
        outsize.load(tmp_path / "ckpt", other)


def test_state_that_accelerate_saves_leaves_the_base_where_it_is(folder: Path, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from outsize.integrations.accelerate import prepare

    def run() -> tuple[Any, ...]:
        accelerator = accelerate.Accelerator(cpu=True)
        return accelerator, *prepare(accelerator, *adapted(folder), host_memory=BUDGET, device="cpu")

    accelerator, *objects = run()
    losses(*objects)
    accelerator.save_state(str(tmp_path))
    expected = losses(*objects)
    again, *others = run()
    again.load_state(str(tmp_path))
    assert losses(*others) == expected
    assert outsize.memory(others[0]).bytes_written == 0
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # which all of the process share


def test_what_a_state_dict_has_of_a_unit_at_rest_is_no_garbage(workshop: Workshop, folder: Path) -> None:
    model, optimizer = adapted(folder)
    prepare(workshop, model, optimizer)
    unit = next(unit for unit in prepared(model).engine.parameters.units if unit.shard.in_place)
    prepared(model).engine.streamer.drop_idle()
    state, name = model.state_dict(), next(iter(unit.parameters))
    for read in (torch.sum, torch.clone, lambda value: value.numpy(), lambda value: value.data_ptr()):
        with pytest.raises(RuntimeError, match="is at rest"):
            read(state[name])
    with outsize.gathered(model.get_parameter(name)):
        assert torch.equal(state[name].clone(), adapted(folder)[0].get_parameter(name))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_are_merged_layer_by_layer_under_init(
    workshop: Workshop, folder: Path, tmp_path: Path, kind: str
) -> None:
    model, optimizer = adapted(folder, kind)
    losses(model, optimizer)
    model.save_pretrained(tmp_path / "adapters")

    def merged() -> Any:
        return peft.PeftModel.from_pretrained(base(folder), tmp_path / "adapters").merge_and_unload()

    plain = merged()
    with torch.device("cpu"), outsize.init(host_memory="1MiB", disk=workshop.disk, device="cpu") as context:
        model = merged()
    assert context.peak_bytes <= 1 << 20 < base_bytes(plain.requires_grad_(False))
    prepare(workshop, model, None, disk=workshop.disk)  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(model(batch()).logits, plain(batch()).logits)
