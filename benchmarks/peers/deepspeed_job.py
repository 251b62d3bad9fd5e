"""DeepSpeed ZeRO-3: everything in host memory (ZeRO-Offload) or on the drive (ZeRO-Infinity)."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(sys.prefix, "extensions")
if (found := ctypes.util.find_library("aio")) is not None:
    ctypes.CDLL(found, ctypes.RTLD_GLOBAL)  # its operation for the drive is not linked with it

import deepspeed
import torch

from benchmarks.models import checkpointed, engine_step
from benchmarks.peers.job import CLIP, DECAY, LR, Step, Task, alone, run

AIO = {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 2, "overlap_events": True}


def configuration(task: Task, largest: int) -> dict[str, Any]:
    """Buffers as small as the largest parameter allows."""
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": largest,
        "reduce_bucket_size": largest,
        "stage3_prefetch_bucket_size": largest,
        "stage3_max_live_parameters": largest,
        "stage3_max_reuse_distance": largest,
        "stage3_param_persistence_threshold": 10_000,
        "contiguous_gradients": False,
        "overlap_comm": False,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    }
    if task.variant == "disk":
        place = {"device": "nvme", "nvme_path": task.disk, "pin_memory": True}
        zero["offload_param"] = {**place, "buffer_count": 20, "buffer_size": largest, "max_in_cpu": 0}
        zero["offload_optimizer"] = {**place, "buffer_count": 16, "pipeline_read": True, "pipeline_write": True}
    return {
        "train_micro_batch_size_per_gpu": task.sequences,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": task.compute is torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": zero,
        "aio": AIO,
        "zero_force_ds_cpu_optimizer": True,
    }


def make(task: Task) -> Step:
    """Variants: `host`, `disk`."""
    alone()
    os.environ["MASTER_PORT"] = "29511"
    deepspeed.init_distributed(dist_backend="gloo")
    model = checkpointed(task.model())
    largest = max(param.numel() for param in model.parameters())
    made = configuration(task, largest)
    deepspeed.zero.Init(module=model, config_dict_or_path=made)  # else it takes bf16 for the parameters on NVMe
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=made)
    return engine_step(engine)


if __name__ == "__main__":
    run(make)
