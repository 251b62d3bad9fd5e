"""Fine-tune a language model of 3 B parameters with LoRA in 2 GiB of memory.

    python examples/lora.py DIRECTORY [--parameters 3e9] [--host-memory 2GiB] [--steps 5] [--dtype float32]

The base is made on the spot, with random weights (7 GB on disk in bfloat16, 14 GB in float32), and is then a folder as
`save_pretrained` leaves it: put your own in its place. It is read where it lies, and never written. Needs transformers
and peft (`pip install transformers peft`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from pathlib import Path

import torch

import outsize

LAYERS, VOCABULARY = 28, 8192


def quick_dtype() -> torch.dtype:
    """bfloat16 where torch multiplies in it at full speed. Other CPUs take many times as long for it as for float32."""
    at_full_speed = torch.accelerator.is_available() or torch.backends.cpu.get_cpu_capability() == "AVX512"
    return torch.bfloat16 if at_full_speed else torch.float32


def make_base(folder: Path, parameters: float, dtype: torch.dtype = torch.bfloat16) -> None:
    """A Llama of about so many parameters, a layer at a time: memory never holds more."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    width = max(round(math.sqrt(parameters / (LAYERS * 10.7)) / 128) * 128, 128)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 64,
        num_key_value_heads=max(width // 256, 1) if width % 256 == 0 else width // 64,
        vocab_size=VOCABULARY,
        dtype=str(dtype).removeprefix("torch."),
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    files: dict[str, list[str]] = defaultdict(list)
    for name in model.state_dict():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        files[f"model-{layer}.safetensors"].append(name)
    folder.mkdir(parents=True)
    for file, names in files.items():
        tensors = {}
        for name in names:
            shape = model.get_parameter(name).shape
            scale = torch.ones if len(shape) == 1 else torch.randn
            tensors[name] = scale(shape, dtype=dtype) * (1.0 if len(shape) == 1 else 0.02)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weights = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    config.save_pretrained(folder)


def main(
    directory: Path,
    parameters: float,
    host_memory: str,
    steps: int,
    dtype: torch.dtype | None = None,
    rows: int = 4,
    tokens: int = 32,
) -> float:
    """Returns the last loss."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    if not (directory / "base").exists():
        make_base(directory / "base", parameters, dtype or quick_dtype())
    torch.manual_seed(0)
    with outsize.init(host_memory=host_memory):
        base = AutoModelForCausalLM.from_pretrained(directory / "base", dtype="auto")
        model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    outsize.prepare(model, optimizer, host_memory=host_memory)

    batch = torch.randint(0, VOCABULARY, (rows, tokens))
    loss = torch.zeros(())
    for step in range(steps):
        began, before = time.perf_counter(), outsize.memory(model)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = outsize.memory(model)
        read = (moved.bytes_read - before.bytes_read) / 1e9
        written = moved.bytes_written - before.bytes_written
        seconds = time.perf_counter() - began
        told = f"step {step}: loss {loss.item():.4f}, {seconds:.1f} s, {read:.2f} GB read, {written} bytes written"
        print(told, flush=True)
    model.save_pretrained(directory / "adapters")
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parameters", type=float, default=3e9)
    parser.add_argument("--host-memory", default="2GiB")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of the base that is made")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype) if options.dtype else None
    main(options.directory, options.parameters, options.host_memory, options.steps, dtype)
