"""The models that the benchmarks train, and one timed training run of each kind."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 32_000
TOKENS = 128


def llama(layers: int, hidden: int = 768, mlp: int = 3072, vocabulary: int = VOCABULARY, seed: int = 0) -> nn.Module:
    """A Llama of transformers with these sizes; 12 layers of the defaults make 162 M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 1),
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def tokens(seed: int = 1, vocabulary: int = VOCABULARY, batch: int = 1, length: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> tuple[float, float]:
    """One step of the user's loop; (loss, gradient norm)."""
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), float(norm)


def engine_step(engine: Any) -> Callable[[torch.Tensor], float]:
    """The same loop with an engine of DeepSpeed, which clips and clears gradients itself: the loss of a batch."""

    def step(batch: torch.Tensor) -> float:
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step


def timed_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, warmup: int = 2) -> dict[str, Any]:
    """Median seconds of a step after `warmup` steps, and every loss."""
    seconds, losses = [], []
    for step in range(warmup + steps):
        began = time.perf_counter()
        loss, _ = train_step(model, optimizer, tokens(step))
        seconds.append(time.perf_counter() - began)
        losses.append(loss)
        print(f"step {step}: {seconds[-1]:.2f} s, loss {loss:.4f}", file=sys.stderr)
    return {"seconds": statistics.median(seconds[warmup:]), "losses": losses}


def checkpointed(model: nn.Module) -> nn.Module:
    """The same model with transformers' own activation checkpointing, for the plain runs."""
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    return model.train()
