"""Language models of `transformers` by configuration: the default one, well-known shapes, or the user's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.cli.corpus import VOCABULARY

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
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


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


def configuration(path: Path | None) -> Any:
    """The Hugging Face configuration in a file or folder on this machine; the default Llama without a path."""
    if path is None:
        return llama()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"--model {path}: no configuration there; give a config.json or a folder that holds one"
        )
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(file))


def has_weights(path: Path | None) -> bool:
    return path is not None and path.is_dir() and any(any(path.glob(pattern)) for pattern in _WEIGHT_FILES)


def given_tokenizer(path: Path | None) -> Path | None:
    """The tokenizer.json beside the user's model, if there is one."""
    file = path / "tokenizer.json" if path is not None and path.is_dir() else None
    return file if file is not None and file.is_file() else None


def model_class(config: Any) -> Any:
    """The class that trains this configuration; imports the model's code."""
    from transformers import AutoModelForCausalLM

    known = AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        raise ValueError(f"model type {config.model_type!r} is not a causal language model of transformers")
    found = known[type(config)]
    return found[0] if isinstance(found, (list, tuple)) else found


def build(config: Any, weights: Path | None = None) -> nn.Module:
    """The model in fp32, freshly initialised or from the weights in a folder, on the device of the context."""
    from transformers import AutoModelForCausalLM

    if weights is not None:
        model = AutoModelForCausalLM.from_pretrained(str(weights), config=config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.use_cache = False  # a cache filled in the forward pass would be filled again in a recomputation
    assert isinstance(model, nn.Module)
    return model


def on_meta(config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model without memory behind its parameters: shapes only."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert isinstance(model, nn.Module)
    return model


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for vectors (norms, biases)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]


def export_companions(model: nn.Module, tokenizer: Path, source: Path | None, out: Path) -> None:
    """Configuration and tokenizer beside the exported weights, so that the Auto classes open the folder."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from outsize.cli.corpus import END_OF_TEXT

    config: Any = model.config
    config.use_cache, config.architectures = True, [type(model).__name__]
    config.save_pretrained(str(out))
    config.use_cache = False
    if source is not None:
        AutoTokenizer.from_pretrained(str(source)).save_pretrained(str(out))
    else:
        PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token=END_OF_TEXT).save_pretrained(str(out))
