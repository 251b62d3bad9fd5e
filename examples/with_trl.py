"""Supervised fine-tuning and DPO with TRL, on models whose state rests on disk.

    python examples/with_trl.py DIRECTORY [STEPS]

It adds digits. The model and the data are made on the spot: put your own in their place. Needs trl
(`pip install trl`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import outsize
from outsize.integrations.transformers import Trainer

WORDS = [*map(str, range(19)), "+", "=", "<pad>", "<eos>"]
SUMS = [(first, second) for first in range(10) for second in range(10)]


class SFTTrainer(Trainer, trl.SFTTrainer):
    """TRL's, with fields of `outsize.Config` as keywords."""


class DPOTrainer(Trainer, trl.DPOTrainer):
    """TRL's, with fields of `outsize.Config` as keywords."""


def make_base(folder: Path) -> None:
    """A small Llama with random weights, and its tokenizer."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=len(WORDS),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def arguments(steps: int, learning_rate: float) -> dict[str, Any]:
    return {
        "max_steps": steps,
        "per_device_train_batch_size": 16,
        "learning_rate": learning_rate,
        "logging_steps": 1,
        "save_steps": max(steps // 2, 1),
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.accelerator.is_available(),
    }


def supervised(base: Path, out: Path, steps: int, kind: Any = SFTTrainer, peft: Any = None, **budgets: Any) -> Any:
    """As TRL's documentation has it. `kind` may be TRL's own trainer."""
    data = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in SUMS]
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(base),
        args=trl.SFTConfig(str(out), **arguments(steps, 1e-2)),
        train_dataset=Dataset.from_list(data),
        processing_class=PreTrainedTokenizerFast.from_pretrained(base),
        peft_config=peft,
        **budgets,
    )
    trainer.train()
    return trainer


def preferred(
    base: Path, out: Path, steps: int, kind: Any = DPOTrainer, peft: Any = None, resume: Any = None, **budgets: Any
) -> Any:
    """As TRL's documentation has it. The reference rests on disk too; adapters need none."""
    pairs = [{"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {(a + b + 1) % 19}"} for a, b in SUMS]
    reference = None if peft is not None else AutoModelForCausalLM.from_pretrained(base)
    if budgets and reference is not None:
        outsize.prepare(reference, **budgets)
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(base),
        ref_model=reference,
        args=trl.DPOConfig(str(out), **arguments(steps, 1e-3)),
        train_dataset=Dataset.from_list(pairs),
        processing_class=PreTrainedTokenizerFast.from_pretrained(base),
        peft_config=peft,
        **budgets,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main(directory: Path, steps: int) -> str:
    """Returns what the model says of 3 + 4."""
    budgets = {"host_memory": "16MiB", "disk": directory / "state", "params": "disk", "states": "disk"}
    make_base(directory / "base")
    trainer = supervised(directory / "base", directory / "sft", steps, **budgets)
    trainer.save_model(directory / "tuned")
    trainer = preferred(directory / "tuned", directory / "dpo", steps // 2, **budgets)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "base")
    prompt = tokenizer("3 + 4 =", return_tensors="pt").to(trainer.args.device)
    answer = trainer.model.generate(**prompt, max_new_tokens=1, do_sample=False)
    return str(tokenizer.decode(answer[0]))


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100))
