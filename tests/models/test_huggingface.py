"""Hugging Face models through the API unchanged: the plain model beside it is the oracle."""

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]

MODELS = [
    "gpt2",
    "gpt2 with dropout",
    "llama",
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma",
    "bert",
    "bert classifier",
    "distilbert",
    "t5",
    "vit",
    "clip",
    "whisper",
]


@pytest.mark.parametrize(
    ("name", "activations"),
    [(name, ("recompute", "keep", "recompute", "auto")[index % 4]) for index, name in enumerate(MODELS)],
)
def test_trains_like_torch_with_everything_on_disk(twins: Make, name: str, activations: str) -> None:
    pair = twins(name, activations=activations)
    pair.train()
    pair.check_weights()
    pair.check_streamed()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(("name", "use_reentrant"), [(name, index % 2 == 0) for index, name in enumerate(MODELS)])
def test_composes_with_gradient_checkpointing(twins: Make, name: str, use_reentrant: bool) -> None:
    pair = twins(name)
    for model in (pair.model, pair.plain):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.train()
    pair.train()
    pair.check_weights()


@pytest.mark.parametrize(
    ("name", "activations"), [("gpt2", "keep"), ("llama", "recompute"), ("bert", "recompute"), ("t5", "keep")]
)
def test_trains_with_every_layer_cut_into_its_smallest_modules(twins: Make, name: str, activations: str) -> None:
    layers = ["Conv1D", "Embedding"] if name == "gpt2" else ["Linear", "Embedding"]
    budget = "384KiB" if activations == "keep" else "464KiB"  # what runs again holds its whole layer
    pair = twins(name, units=layers, host_memory=budget, activations=activations)
    pair.train()
    pair.check_weights()
    pair.check_streamed()
