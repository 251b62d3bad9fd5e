"""transformers' Trainer on a model whose state rests on disk: adapters of PEFT, or the whole model.

    python examples/with_trainer.py DIRECTORY [STEPS] [--whole]

The model and the data are made on the spot: put your own in their place. Run it again with more steps: it goes on from
the last checkpoint. Needs transformers and peft (`pip install "outsize[transformers]" peft`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

import outsize
from outsize.integrations.transformers import Trainer, last_checkpoint

VOCABULARY, LENGTH, SAVE_EVERY = 128, 16, 10


def make_base(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, vocab_size=VOCABULARY
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main(directory: Path, steps: int, whole: bool = False) -> float:
    """Returns the last loss."""
    if not (directory / "base").exists():
        make_base(directory / "base")
    budgets = {"host_memory": "16MiB", "disk": directory / "state"}
    with outsize.init(**budgets):  # a model that is larger than memory is built within the budget
        model = AutoModelForCausalLM.from_pretrained(directory / "base")
        if not whole:
            model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = (torch.arange(LENGTH) + torch.arange(256)[:, None]) % VOCABULARY  # to count
    arguments = TrainingArguments(
        str(directory / "run"),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data, **budgets, params="disk", states="disk")
    trainer.train(resume_from_checkpoint=last_checkpoint(directory / "run"))
    trainer.save_model(directory / "adapters" if not whole else directory / "model")
    loss: float = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
    return loss


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[2:] if each.isdigit()]
    print(main(Path(sys.argv[1]), numbers[0] if numbers else 40, "--whole" in sys.argv))
