"""Imported by the server that ranks are forked from: what every rank would otherwise import for itself."""

import gc
from contextlib import suppress

import pytest  # the module of a test imports it, and takes longer to do so than ranks take to start
import safetensors.torch
import torch
import torch.distributed
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

import outsize.api.ranks
import outsize.run.paging
import tests.ranks.training
import tests.seeds

with suppress(ImportError):
    import transformers.models.llama.modeling_llama  # noqa: F401

    import outsize.cli.train
with suppress(ImportError):
    import datasets  # noqa: F401  # Accelerate imports it where it is there
torch.set_num_threads(1)
_param = torch.nn.Parameter(torch.zeros(1))
_optimizer = torch.optim.AdamW([_param])  # torch imports its compiler with the first one
_param.grad = torch.zeros(1)
torch.nn.utils.clip_grad_norm_([_param], 1.0)
_optimizer.step()
gc.collect()
gc.freeze()  # the collector of a rank looks at its own objects only

__all__ = ["outsize", "pytest", "safetensors", "tests"]
