"""Keys and values of `generate()` at rest on disk or on the host: the tokens of plain transformers."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from outsize.move.tokens import TokenStore
from tests.conftest import Workshop, threads

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from outsize.integrations.key_values import held_bytes  # noqa: E402
from outsize.integrations.transformers import KeyValueCache  # noqa: E402

VOCABULARY, PROMPT, NEW = 99, 20, 11
CACHE = "cache" if "cache" in signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
"""What this version of transformers calls the argument."""
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": VOCABULARY}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(num_hidden_layers=3, **GROUPED),
    "qwen, one layer": lambda: transformers.Qwen3Config(num_hidden_layers=1, head_dim=16, **GROUPED),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=4, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
    "gemma, every other layer with a window": lambda: transformers.Gemma2Config(
        num_hidden_layers=4, head_dim=16, sliding_window=8, **GROUPED
    ),
}


def build(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()


def answers(model: Any, batch: int = 3, device: str = "cpu", new: int = NEW, **how: Any) -> torch.Tensor:
    """Greedy tokens; the first prompt is padded on the left."""
    generator = torch.Generator("cpu").manual_seed(4)
    tokens = torch.randint(1, VOCABULARY, (batch, PROMPT), generator=generator, device="cpu")
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    how = {CACHE if name == "cache" else name: value for name, value in how.items()}
    found: torch.Tensor = model.generate(
        tokens.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **how,
    )
    return found.cpu()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is empty when the test is over, and no thread is left."""
    folder = tmp_path / "keys"
    folder.mkdir()
    before = threads()
    yield folder
    assert not os.listdir(folder)
    assert threads() <= before


def under_autocast(model: Any, **how: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return answers(model, **how)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "long prompt in parts": {"prefill_chunk_size": 6},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_are_those_of_plain_transformers(disk: Path, kind: str, way: str) -> None:
    model = build(kind)
    expected = answers(model, **WAYS[way])
    with KeyValueCache(model.config, tokens=PROMPT + NEW, disk=disk) as cache:
        assert torch.equal(answers(model, cache=cache, **WAYS[way]), expected)
        assert cache.bytes_read > 0 < cache.bytes_written


def test_a_cache_that_was_closed_says_so(disk: Path) -> None:
    model = build()
    with KeyValueCache(model.config, tokens=PROMPT + NEW, disk=disk) as cache:
        pass
    with pytest.raises(ValueError, match="was closed"):
        answers(model, cache=cache)


@pytest.mark.parametrize(("sim", "way"), [*(("hold", way) for way in WAYS), ("random", "beams")], indirect=["sim"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_beside_an_accelerator_they_rest_on_host_or_disk(sim: Any, disk: Path, tier: str, way: str) -> None:
    """Copies are held back as long as they may be."""
    model = build("gemma, every other layer with a window")
    expected = answers(model, **WAYS[way])
    model.to("sim")
    with torch.inference_mode():
        cache = KeyValueCache(model.config, tokens=PROMPT + NEW, disk=disk if tier == "disk" else None)
        found = answers(model, device="sim", cache=cache, **WAYS[way])
    cache.close()
    assert torch.equal(found, expected)


def test_with_the_weights_on_disk_too(disk: Path, workshop: Workshop) -> None:
    plain, model = build(), build()
    model.to(workshop.device)
    workshop.prepare(model, tier="squeezed")
    with KeyValueCache(model.config, tokens=PROMPT + NEW, disk=disk) as cache:
        assert torch.equal(answers(model, device=workshop.device, cache=cache), answers(plain))


@pytest.mark.parametrize("nbytes", [1, 100_000])
def test_slabs_of_a_token_and_of_a_layer(disk: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr("outsize.move.tokens.SLAB_BYTES", nbytes)
    model = build()
    with KeyValueCache(model.config, tokens=4 * (PROMPT + NEW), disk=disk) as cache:
        assert torch.equal(answers(model, cache=cache), answers(model))


def test_several_folders_share_the_bytes(disk: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    model = build()
    with KeyValueCache(model.config, tokens=PROMPT + NEW, disk=[disk, second]) as cache:
        assert torch.equal(answers(model, cache=cache), answers(model))
    assert not os.listdir(second)


def settle(cache: Any) -> None:
    """Wait until all is written."""
    for jobs in cache._shared._store._written:
        jobs[-1].written.wait()


@pytest.mark.parametrize("batch", [5, 64])
def test_a_token_is_written_once_and_nothing_else_is(disk: Path, batch: int) -> None:
    """The bytes after the last whole page wait in memory."""
    model = build()
    token = batch * 2 * 2 * 16 * 4  # keys and values, heads, width, fp32
    for new in (4, 12):
        with KeyValueCache(model.config, tokens=40, disk=disk) as cache:
            answers(model, batch, new=new, cache=cache)
            settle(cache)
            assert cache.get_seq_length() == PROMPT + new - 1
            assert cache.bytes_written == 3 * ((PROMPT + new - 1) * token // 4096 * 4096)


def test_memory_holds_two_layers(disk: Path) -> None:
    given: dict[int, int] = {}

    class Seen(KeyValueCache):  # type: ignore[misc]
        def update(self, *args: Any, **kwargs: Any) -> Any:
            for each in super().update(*args, **kwargs):
                given[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
                yield each

    model = build()
    with Seen(model.config, tokens=40, disk=disk) as cache:
        assert torch.equal(answers(model, cache=cache), answers(model))
    layer = 40 * 3 * 2 * 2 * 16 * 4
    assert len(given) == 2
    assert sum(given.values()) == held_bytes(model.config, 3 * layer, 40)[0] == 2 * (layer + 64)


def test_a_long_prompt_waits_for_the_drive(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would lie in memory as a whole."""
    home = TokenStore._home

    def slowly(*args: Any) -> Any:
        time.sleep(0.05)
        return home(*args)

    monkeypatch.setattr(TokenStore, "_home", slowly)
    model, under_way = build(), []
    with KeyValueCache(model.config, tokens=40, disk=disk) as cache:

        def look(*_: Any) -> None:
            under_way.append(sum(not job.done() for jobs in cache._shared._store._written for job in jobs))

        for layer in model.model.layers:
            layer.register_forward_hook(look)
        begin(model, cache)
    assert len(under_way) == 3
    assert max(under_way) <= 1


def begin(model: Any, cache: Any) -> torch.Tensor:
    """A prompt goes in; returns the next token."""
    with torch.inference_mode():
        logits = model(torch.arange(1, 31).view(2, 15), **{CACHE: cache}).logits
    settle(cache)
    found: torch.Tensor = logits[:, -1:].argmax(-1)
    return found


def test_a_full_disk_is_an_error_that_names_the_file(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = build()
    cache = KeyValueCache(model.config, tokens=40, disk=disk)
    with pytest.raises(OSError, match="No space left on device.*reserving") as caught:
        answers(model, cache=cache)
    assert str(caught.value.filename).startswith(str(disk))
    assert not os.listdir(disk)


@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_drive_that_fails_is_an_error_that_names_the_file(disk: Path, operation: Any) -> None:
    model = build()
    cache = KeyValueCache(model.config, tokens=40, disk=disk)
    token = begin(model, cache)
    cache._shared.resources.disk.inject(operation, 1, errno.EIO)
    with pytest.raises(OSError, match="Input/output error") as caught, torch.inference_mode():
        for _ in range(20):  # a page is written after some tokens
            model(token, **{CACHE: cache})
    assert str(caught.value.filename).startswith(str(disk))
    del cache, caught


def test_bytes_that_change_on_the_drive_are_found(disk: Path) -> None:
    model = build()
    with KeyValueCache(model.config, tokens=40, disk=disk) as cache:
        token = begin(model, cache)
        (file,) = disk.glob("*/keys-values*")
        with open(file, "r+b") as opened:
            opened.write(b"x" * 64)
        with pytest.raises(OSError, match="bad checksum"), torch.inference_mode():
            cache.reorder_cache(torch.arange(2))  # what was read ahead is read again
            model(token, **{CACHE: cache})


def test_the_files_go_with_the_cache_after_an_error_too(disk: Path) -> None:
    model = build()

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    model.model.layers[2].register_forward_hook(fail)
    with pytest.raises(KeyError):
        answers(model, cache=KeyValueCache(model.config, tokens=40, disk=disk))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.MistralConfig(sliding_window=8), "each layer of mistral attends to a sliding window"),
        (lambda: transformers.T5Config(), "of an encoder, and t5 has one"),
        (lambda: transformers.JambaConfig(), "jamba has layers that keep something else"),
        pytest.param(
            lambda: transformers.Gemma3nTextConfig(),
            "has layers that keep something else",
            marks=pytest.mark.skipif(
                CACHE != "cache", reason="this version of transformers lists its layers otherwise"
            ),
        ),
    ],
)
def test_models_whose_cache_is_another_are_refused(disk: Path, config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyValueCache(config(), tokens=40, disk=disk)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda model, cache: answers(model, new=30, cache=cache), "made for 40 tokens a sequence, and 41 are needed"),
        (
            lambda model, cache: answers(model, 1, cache=cache, assistant_model=build()),
            "can be cropped|leave the assistant out",
        ),
        (lambda model, cache: (answers(model, cache=cache), cache.crop(-1)), "cannot give up tokens"),
        (lambda model, cache: (begin(model, cache), answers(model, cache=cache)), "another form"),
        (lambda model, cache: model(torch.ones(1, 3, dtype=torch.long), **{CACHE: cache}), "gradients would flow"),
        (lambda model, cache: under_autocast(model, cache=cache), "keys of torch.float32 and values of torch.bfloat16"),
    ],
)
def test_what_the_cache_cannot_do_is_refused(disk: Path, how: Any, message: str) -> None:
    model = build()
    with KeyValueCache(model.config, tokens=40, disk=disk) as cache, pytest.raises(ValueError, match=message):
        how(model, cache)


@pytest.mark.parametrize("mode", ["last_loop", "per_loop"])
def test_a_model_that_runs_a_layer_several_times_is_refused(disk: Path, mode: str) -> None:
    if not hasattr(transformers, "DoryConfig"):
        pytest.skip("this version of transformers has no such model")
    ends = {"n_input_layers": 1, "n_output_layers": 1, "layer_types": ["full_attention"] * 4}
    config = transformers.DoryConfig(num_hidden_layers=4, head_dim=16, recurrent_kv_cache_mode=mode, **ends, **GROUPED)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with KeyValueCache(config, tokens=40, disk=disk) as cache, pytest.raises(ValueError, match="several times"):
        answers(model, cache=cache)


def test_a_model_sees_whether_there_is_something_before_its_tokens(disk: Path) -> None:
    model = build()
    with KeyValueCache(model.config, tokens=40, disk=disk) as cache:
        assert not cache.is_initialized
        begin(model, cache)
        assert cache.is_initialized


def test_host_memory_of_a_model_on_the_cpu_is_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match="name a disk, or leave KeyValueCache out"):
        answers(model, cache=KeyValueCache(model.config, tokens=40))
