"""Language models of `transformers` by configuration: the default one, well-known shapes, or the user's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 8192
# hidden, intermediate, layers, heads, key-value heads, vocabulary
_SHAPES = {
    "default": (768, 3072, 12, 12, 12, VOCABULARY),
    "7b": (4096, 11008, 32, 32, 32, 32000),
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "13b": (5120, 13824, 40, 40, 40, 32000),
    "70b": (8192, 28672, 80, 64, 8, 32000),
    "405b": (16384, 53248, 126, 128, 8, 128256),
}
SHAPES = tuple(name for name in _SHAPES if name != "default")


def llama(shape: str = "default") -> Any:
    """Configuration of a Llama of a well-known shape; `default` has 120 M parameters and tied embeddings."""
    from transformers import LlamaConfig

    hidden, intermediate, layers, heads, key_value_heads, vocabulary = _SHAPES[shape]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=shape == "default",
        bos_token_id=None if shape == "default" else 1,
        eos_token_id=0 if shape == "default" else 2,
    )


def configuration(path: str | None) -> Any:
    """The Hugging Face configuration in a file or folder on this machine; the default Llama without a path."""
    if path is None:
        return llama()
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"--model {path}: no configuration there; give a config.json or a folder that holds one"
        )
    from transformers import AutoConfig

    with refused():
        return AutoConfig.from_pretrained(str(file))


def check_language_model(config: Any, length: int) -> None:
    """Raise `ValueError` unless its model predicts each token from those before it, in texts of such a length."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    name = f"--model: a model of type {config.model_type!r}"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{name} does not continue text (transformers has no causal language model of it)")
    one_way = any(getattr(config, flag, False) for flag in ("is_decoder", "is_encoder_decoder", "causal"))
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not one_way:
        raise ValueError(f"{name} sees the token that it is to predict; set is_decoder to true in its configuration")
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < length:
        raise ValueError(f"--seq-len is {length} but max_position_embeddings of the model is {most}; lower --seq-len")


@contextmanager
def refused(what: str = "transformers makes no model of this configuration") -> Iterator[None]:
    """Around what transformers does with the user's files, of which it checks little: an error of any kind may come."""
    try:
        yield
    except Exception as error:
        told = isinstance(error, (OSError, ValueError, ModuleNotFoundError, AssertionError))
        if told and not isinstance(error, (json.JSONDecodeError, UnicodeError)):
            raise
        raise ValueError(f"{what}: {error} ({type(error).__name__})") from error


def holds(path: str | None, *patterns: str) -> bool:
    """Whether the user's model is a folder with such a file."""
    return path is not None and any(any(Path(path).glob(pattern)) for pattern in patterns)


def build(config: Any, path: str | None = None) -> Any:
    """The model in fp32, from the weights in the user's folder if there are any, else freshly initialised."""
    from transformers import AutoModelForCausalLM

    if path is not None and holds(path, "*.safetensors", "pytorch_model*.bin"):
        with refused(f"the weights in {path} cannot be read"):
            return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def on_meta(config: Any) -> Any:
    """The model without memory behind its parameters: shapes only."""
    with refused(), torch.device("meta"):
        return build(config)
