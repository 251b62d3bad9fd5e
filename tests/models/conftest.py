"""Tiny models from their configurations, one batch for each step, and the same training loop for outsize and torch."""

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from tests.conftest import squeeze

transformers = pytest.importorskip("transformers")

VOCABULARY = 97
LENGTH = 12
ROWS = 3
STEPS = 2

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, and the batch of a step. `eps` keeps AdamW from amplifying rounding where gradients are all but zero."""

    build: Callable[..., nn.Module]
    batch: Callable[[torch.Generator], Batch]
    eps: float = 1e-8
    host_memory: str = "512KiB"


def tokens(random: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (ROWS, length), generator=random)  # [ROWS, length]


def text(random: torch.Generator) -> Batch:
    """Rows padded on the left, as a decoder's labels path wants them."""
    ids = tokens(random)
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :1] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def right_padded_text(random: torch.Generator) -> Batch:
    ids = tokens(random)
    mask = torch.ones_like(ids)
    mask[0, -4:], mask[2, -2:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def classified_text(random: torch.Generator) -> Batch:
    batch = right_padded_text(random)
    return {**batch, "labels": torch.randint(0, 3, (ROWS,), generator=random)}


def text_pairs(random: torch.Generator) -> Batch:
    batch = right_padded_text(random)
    return {**batch, "labels": tokens(random, LENGTH - 5)}


def images(random: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, 16, 16, generator=random)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (ROWS,), generator=random)}


def images_with_text(random: torch.Generator) -> Batch:
    ids = tokens(random)
    ids[:, -1] = VOCABULARY - 1  # the end of the text, which CLIP pools
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=random), "input_ids": ids}


def speech(random: torch.Generator) -> Batch:
    return {"input_features": torch.randn(ROWS, 8, 32, generator=random), "labels": tokens(random)}


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENCODER = {name: value for name, value in DECODER.items() if "token_id" not in name and "key_value" not in name}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(**extra: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | special | drops | extra))


def dropping_gpt2(**extra: Any) -> nn.Module:
    return gpt2(**{"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2} | extra)


def llama(**extra: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER | extra))


def mixtral(**extra: Any) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER | experts | extra))


def qwen2(**extra: Any) -> nn.Module:
    tied = {"tie_word_embeddings": True}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER | tied | extra))


def qwen3(**extra: Any) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER | {"head_dim": 12} | extra))


def gemma(**extra: Any) -> nn.Module:
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**DECODER | {"head_dim": 12} | extra))


def bert(**extra: Any) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER | UNDROPPED | extra))


def bert_classifier(**extra: Any) -> nn.Module:
    config = transformers.BertConfig(**ENCODER | UNDROPPED | {"num_labels": 3} | extra)
    return transformers.BertForSequenceClassification(config)


def distilbert(**extra: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "dim": 48, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}
    drops = {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 64}
    return transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**sizes | drops | extra))


def t5(**extra: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 48, "d_ff": 96, "d_kv": 12, "num_layers": 2, "num_heads": 4}
    rest = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes | rest | extra))


def vit(**extra: Any) -> nn.Module:
    sizes = {name: ENCODER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    rest = {"num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_labels": 3}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes | rest | UNDROPPED | extra))


def clip(**extra: Any) -> nn.Module:
    sizes = {name: ENCODER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    texts = sizes | {"vocab_size": VOCABULARY, "num_attention_heads": 4, "eos_token_id": VOCABULARY - 1}
    pictures = sizes | {"num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    parts = {"text_config": texts, "vision_config": pictures, "projection_dim": 24}
    return transformers.CLIPModel(transformers.CLIPConfig(**parts | extra))


def whisper(**extra: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 48, "num_mel_bins": 8, "max_source_positions": 16}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    rest = {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_target_positions": 64, "dropout": 0.0}
    config = transformers.WhisperConfig(**sizes | layers | ends | rest | extra)
    return transformers.WhisperForConditionalGeneration(config)


ZOO = {
    "gpt2": Case(gpt2, text, eps=1e-5),
    "gpt2 with dropout": Case(dropping_gpt2, right_padded_text, eps=1e-5),
    "llama": Case(llama, text),
    "mixtral": Case(mixtral, text, host_memory="1MiB"),  # the experts of a layer are one parameter
    "qwen2": Case(qwen2, right_padded_text, eps=1e-5),
    "qwen3": Case(qwen3, text),
    "gemma": Case(gemma, right_padded_text),
    "bert": Case(bert, right_padded_text, eps=1e-5),
    "bert classifier": Case(bert_classifier, classified_text, eps=1e-5),
    "distilbert": Case(distilbert, right_padded_text, eps=1e-5),
    "t5": Case(t5, text_pairs),
    "vit": Case(vit, images, eps=1e-5),
    "clip": Case(clip, images_with_text, eps=1e-5),
    "whisper": Case(whisper, speech, eps=1e-5),
}


class Twins:
    """A prepared model and its plain twin, each with its own AdamW, fed with the same batches and random states."""

    def __init__(self, model: nn.Module, batch: Callable[[torch.Generator], Batch], eps: float, **fields: Any) -> None:
        self.batch = batch
        self.random = torch.Generator().manual_seed(1)
        self.plain = copy.deepcopy(model)
        self.plain_optimizer = self._adamw(self.plain, eps)
        self.bytes = sum(param.nbytes for param in model.parameters())
        self.model, self.optimizer = outsize.prepare(model, self._adamw(model, eps), **fields)

    @staticmethod
    def _adamw(model: nn.Module, eps: float) -> torch.optim.Optimizer:
        trained = [param for param in model.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1, eps=eps)

    def train(self, steps: int = STEPS) -> None:
        """Train both; losses must agree to 1e-6 and gradient norms to 1e-5, relative."""
        for step in range(steps):
            batch = self.batch(self.random)
            loss, norm = train_step(self.model, self.optimizer, batch, seed=step)
            plain_loss, plain_norm = train_step(self.plain, self.plain_optimizer, batch, seed=step)
            assert loss == pytest.approx(plain_loss, rel=1e-6), f"step {step}"
            assert norm == pytest.approx(plain_norm, rel=1e-5), f"step {step}"

    def check_weights(self, tolerance: float = 1e-5) -> None:
        plain = dict(self.plain.named_parameters())
        for name, param in self.model.named_parameters():
            with outsize.gathered(param):
                torch.testing.assert_close(param.detach().clone(), plain[name].detach(), rtol=tolerance, atol=tolerance)

    def check_streamed(self) -> None:
        """Nothing of the states rested in memory, and the weights were never all gathered at once."""
        report = outsize.memory(self.model)
        assert report.bytes_read > self.bytes
        assert report.peak["device/resident"] < self.bytes


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, seed: int) -> tuple[float, float]:
    """The user's loop body: (loss, gradient norm before clipping)."""
    torch.manual_seed(seed)
    extra = {"return_loss": True} if "pixel_values" in batch and "input_ids" in batch else {}
    loss = model(**batch, **extra).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), float(norm)


@pytest.fixture(scope="session")
def zoo() -> dict[str, Case]:
    return ZOO


@pytest.fixture
def everything_on_disk(tmp_path: Path) -> dict[str, Any]:
    """The fields that put everything on disk; with a budget below the weights, a model streams."""
    return {"disk": tmp_path, "params": "disk", "grads": "disk", "states": "disk"}


@pytest.fixture
def twins(everything_on_disk: dict[str, Any], device: str) -> Callable[..., Twins]:
    """`twins("llama", activations="keep")`: the model of the zoo on disk beside its plain twin."""

    def make(
        name: str,
        build: dict[str, Any] | None = None,
        change: Callable[[nn.Module], nn.Module] = lambda model: model,
        **fields: Any,
    ) -> Twins:
        torch.manual_seed(0)
        case = ZOO[name]
        model = change(case.build(**build or {}))
        pair = Twins(model, case.batch, case.eps, **everything_on_disk | {"host_memory": case.host_memory} | fields)
        if device != "cpu":  # where the budget of the host does not bound what is gathered
            squeeze(pair.model)
        return pair

    return make


@pytest.fixture(autouse=True)
def _quiet_and_small() -> Iterator[None]:
    """One thread, because the models are tiny; and only errors from transformers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
    torch.set_num_threads(threads)
