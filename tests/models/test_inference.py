"""Answers from models that are larger than the budget: same tokens as plain transformers, weights read in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from tests.conftest import Workshop, prepared
from tests.small_models import llama_config

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors.torch")

VOCABULARY = 200


def config_of(kind: str) -> Any:
    if kind == "gpt2":  # its head is its embedding
        return transformers.GPT2Config(n_embd=128, n_layer=8, n_head=4, vocab_size=VOCABULARY, n_positions=64)
    return llama_config(128, 256, 8, 4, VOCABULARY, num_key_value_heads=2, max_position_embeddings=64)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    model = transformers.AutoModelForCausalLM.from_config(config_of(request.param))
    model.save_pretrained(folder, max_shard_size="1MB")
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def bytes_of(model: Any) -> int:
    return sum(param.numel() * param.itemsize for param in model.parameters())


def prompts(count: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(4))


def answers(model: Any, tokens: torch.Tensor, new: int = 6, **how: Any) -> torch.Tensor:
    mask = torch.ones_like(tokens)
    found: torch.Tensor = model.generate(
        tokens, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None, **how
    )
    return found


def prepare(workshop: Workshop, model: Any, share: float, **fields: Any) -> Any:
    """A budget of a share of the model beside the staging arena, and no directory on disk."""
    budget = int(bytes_of(model) * share) + (512 << 10)
    place = {"disk": None, "params": "auto", "grads": "auto", "states": "auto"}
    workshop.prepare(model, host_memory=budget, **place, **fields)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_greedy_tokens_are_those_of_plain_transformers(
    workshop: Workshop, folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    load(folder, dtype).save_pretrained(tmp_path / "model")
    plain, model = load(tmp_path / "model", dtype), prepare(workshop, load(tmp_path / "model", dtype), 0.5)
    assert any(unit.shard.in_place for unit in prepared(model).engine.parameters.units)
    with torch.no_grad():
        assert torch.equal(model(prompts()).logits, plain(prompts()).logits)
    with torch.inference_mode():
        assert torch.equal(model(prompts()).logits, plain(prompts()).logits)
    assert torch.equal(answers(model, prompts()), answers(plain, prompts()))
    assert outsize.memory(model).bytes_written == 0


def test_what_layers_save_moves_to_no_disk_where_there_is_no_directory(workshop: Workshop, folder: Path) -> None:
    plain = load(folder)
    for tenths in range(5 + (plain.config.model_type == "llama"), 11, 2):
        model = prepare(workshop, load(folder), tenths / 10, activations="auto")
        torch.testing.assert_close(model(prompts()).logits, plain(prompts()).logits)
        del model


def read_for_each_token(model: Any, tokens: torch.Tensor, new: int = 6) -> float:
    answers(model, tokens)  # the order is learnt
    before = outsize.memory(model).bytes_read
    answers(model, tokens, new)
    return (outsize.memory(model).bytes_read - before) / new


def test_what_the_budget_holds_is_not_read_again(workshop: Workshop, folder: Path) -> None:
    """Least recently used first would miss every unit of a cycle."""
    model = prepare(workshop, load(folder), 0.6)
    units = prepared(model).engine.parameters.units
    largest = max(unit.nbytes for unit in units)
    read = read_for_each_token(model, prompts())
    budget = prepared(model).placed.budgets.computing[1]
    assert read <= bytes_of(model) - (budget - 3 * largest)  # the one in use, the next one, and what is no whole unit
    assert outsize.memory(model).mispredicted == 0


def test_a_batch_reads_the_weights_once_for_each_token(workshop: Workshop, folder: Path) -> None:
    model = prepare(workshop, load(folder), 0.4)
    one = read_for_each_token(model, prompts(1))
    many = read_for_each_token(model, prompts(16))
    assert 0 < many <= 1.05 * one


def test_the_first_layers_of_the_next_token_come_while_the_last_ones_compute(workshop: Workshop, folder: Path) -> None:
    model = prepare(workshop, load(folder), 0.4)
    answers(model, prompts())
    schedule = prepared(model).engine.streamer.schedule
    in_place = [unit.index for unit in prepared(model).engine.parameters.units if unit.shard.in_place]
    waiting = set(schedule.upcoming(len(in_place) + 2))
    assert in_place[0] in waiting  # the last token's order goes on with the first unit


def test_long_prompts_in_chunks_give_the_same_answers(workshop: Workshop, folder: Path) -> None:
    plain, model = load(folder), prepare(workshop, load(folder), 0.5)
    tokens = prompts(2, 24)
    assert torch.equal(answers(model, tokens, prefill_chunk_size=8), answers(plain, tokens))


def test_no_gradients_are_planned_without_an_optimizer(workshop: Workshop, folder: Path) -> None:
    model = prepare(workshop, load(folder), 0.5)
    assert all(unit.size.grads == unit.size.states == 0 for unit in outsize.plan(model).units)
    assert not any("grad" in kind or "states" in kind for kind in outsize.memory(model).peak)


def test_a_backward_without_an_optimizer_still_gives_gradients(workshop: Workshop, folder: Path) -> None:
    plain, model = load(folder), prepare(workshop, load(folder), 0.5)
    for each in (plain, model):
        each(input_ids=prompts(), labels=prompts()).loss.backward()
    name, expected = next(
        (name, param.grad) for name, param in plain.named_parameters() if "layers.5" in name or "h.5" in name
    )
    param = model.get_parameter(name)
    with outsize.gathered(param, grads=True):
        torch.testing.assert_close(param.grad, expected)


def test_images_are_encoded_before_the_first_forward(workshop: Workshop) -> None:
    """`generate` does so, by a method of the model that uses a parameter of its own."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = transformers.LlavaNextConfig(
        vision_config=vision,
        text_config=config_of("llama"),
        image_token_id=VOCABULARY - 1,
        image_grid_pinpoints=[[16, 16]],
        image_seq_length=4,
    )
    torch.manual_seed(0)
    model = transformers.LlavaNextForConditionalGeneration(config).eval()
    images = {"pixel_values": torch.randn(1, 2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}
    tokens = torch.cat([torch.full((1, 10), VOCABULARY - 1), prompts(1)], 1)
    expected = answers(model, tokens, **images)
    workshop.prepare(model)
    assert torch.equal(answers(model, tokens, **images), expected)


def test_units_are_smaller_where_weights_stream_and_nothing_is_updated(workshop: Workshop) -> None:
    """So less is at work at once, and more weights stay in memory."""
    units = {}
    for memory in ("6MiB", "64MiB"):
        blocks = (nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)) for _ in range(16))  # 0.5 MiB each
        model = nn.Sequential(*blocks)
        outsize.prepare(model, host_memory=memory, disk=workshop.disk, device="cpu")
        units[memory] = [unit.name for unit in outsize.plan(model).units]
        workshop.watch(model)
    assert units["6MiB"][:3] == ["0.0", "0.1", "1.0"]
    assert units["64MiB"][:3] == ["0", "1", "2"]
