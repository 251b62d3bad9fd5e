"""Methods of the whole model that libraries call: they do at rest as they do elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outsize.api.assemble import first_prepared
from outsize.api.exporting import export
from outsize.api.gather import gathered
from outsize.run.guard import Guarded

Method = Callable[..., Any]


def methods_of(model: nn.Module) -> dict[str, Method]:
    """What takes their places, by name."""
    found: dict[str, Method] = {"load_state_dict": _loading(model)}
    if adapters_of(model) and hasattr(model, "save_pretrained"):
        found["save_pretrained"] = _saving_adapters(model)
    elif saved_by_transformers(model) and not hasattr(model, "peft_config"):
        found["save_pretrained"] = _saving(model)
    return found


def adapters_of(model: nn.Module) -> list[torch.Tensor]:
    """Of PEFT, which saves them alone."""
    names = getattr(model, "peft_config", {})
    return [param for name, param in model.named_parameters() if not names.keys().isdisjoint(name.split("."))]


@contextmanager
def adapters_gathered(model: nn.Module, embeddings: bool | str = "auto") -> Iterator[None]:
    """What PEFT saves has its values inside the block, embeddings of the base that it adapts too, or that are asked
    for. For every rank."""
    with gathered(adapters_of(model)), gathered(_saved_with_adapters(model, embeddings)):
        yield


def _saved_with_adapters(model: Any, embeddings: bool | str) -> list[torch.Tensor]:
    from peft import get_peft_model_state_dict

    own, saved = dict(model.named_parameters()), set[str]()
    for name in model.peft_config:
        saved.update(get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=embeddings))
    return [own[name] for name in sorted(saved & own.keys())]


def saved_by_transformers(model: nn.Module) -> bool:
    """Whether `save_pretrained` is transformers' own. Another class's writes more, or another layout."""
    own = getattr(type(model), "save_pretrained", None)  # of the class: a wrapper may pass on that of the model inside
    return getattr(own, "__module__", "").startswith("transformers.")


def _loading(model: nn.Module) -> Method:
    load: Method = model.load_state_dict

    @wraps(load)
    def load_state_dict(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As in torch. Memory: the parameters that are given; `outsize.load` reads files within the budget."""
        named = nn.Module.named_parameters(model, remove_duplicate=False)
        with gathered([param for name, param in named if name in state_dict], modify=True):
            return load(state_dict, *args, **kwargs)

    return load_state_dict


def _saving_adapters(model: Any) -> Method:
    save: Method = model.save_pretrained

    @wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        """As in PEFT; every rank calls it, and the first one writes. Inside a block of `gathered` it saves what the
        block shows."""
        prepared = first_prepared(model.parameters())
        if prepared is not None and prepared.engine.any_shown(model.modules()):
            return save(*args, **kwargs)
        if prepared is not None and prepared.ranks is not None and len(args) < 2:
            kwargs.setdefault("is_main_process", dist.get_rank() == 0)
        with adapters_gathered(model, kwargs.get("save_embedding_layers", "auto")):
            return save(*args, **kwargs)

    return save_pretrained


def _saving(model: Any) -> Method:
    save: Method = model.save_pretrained

    @wraps(save)
    def save_pretrained(
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        """As in transformers, by `outsize.export`, which every rank calls. Values that are given are saved as ever."""
        at_rest = state_dict is None or any(isinstance(value, Guarded) for value in state_dict.values())
        if at_rest and not push_to_hub:
            export(save_directory, model, max_shard_size)
        else:
            given = {"push_to_hub": push_to_hub, **({"max_shard_size": max_shard_size} if max_shard_size else {})}
            save(save_directory, is_main_process, state_dict, **given, **kwargs)

    return save_pretrained
