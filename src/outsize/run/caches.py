"""The caches of keys and values that models of transformers hand to their layers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

# Note [Caches of keys and values]
# Models of transformers make a cache in every forward, in training too, and hand it to their layers to fill. Nobody
# reads it in the usual loop, but the keys and values of all layers in it would be more than recomputed layers keep
# otherwise. So these get none, and the cache stays empty. Read after all, it would give wrong values to the next
# forward: so it refuses to be read, with a refusal that lies in the cache itself, where copies of it have it too.
# Layers that are not recomputed get it, and may ask how long they are themselves, by their number.
# A cache with earlier tokens in it goes to the layers as it is, and they are not recomputed.


_READS = ("get_seq_length", "get_mask_sizes")
"""What a forward asks of a cache before anything else."""


@final
@dataclass(frozen=True)
class _LeftEmpty:
    """Takes the place of each of a cache's `_READS`. See Note [Caches of keys and values]."""

    layer: str
    lengths: weakref.ref[Any] | None = None
    """The cache whose layers may ask how long they are."""

    def __reduce__(self) -> Any:
        return _LeftEmpty, (self.layer,)  # copies tell nobody

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = None if self.lengths is None else self.lengths()
        if cache is not None and any((*args, *kwargs.values())):  # a layer asks about itself, by its number
            return type(cache).get_seq_length(cache, *args, **kwargs)
        raise RuntimeError(
            f"this cache of keys and values comes from a forward that recorded gradients, and is empty: layer "
            f"{self.layer} is recomputed in the backward, and did not fill it. To use the cache of such a forward, "
            f'pass activations="keep" to outsize.prepare; if no gradients are needed, run the forward under '
            f"torch.no_grad()"
        )


def is_cache(value: object) -> bool:
    """A key-value cache of transformers, recognised by what it offers. A cache may name the class of its layers."""
    return not isinstance(value, (torch.Tensor, nn.Module, type)) and callable(getattr(value, "get_seq_length", None))


def is_filled(cache: Any, layer: int) -> bool:
    """Whether it has earlier tokens of the layer of this number: one before it may have filled its own by now."""
    if isinstance(cache.get_seq_length, _LeftEmpty):
        return False
    try:
        return int(cache.get_seq_length(layer)) > 0
    except (TypeError, ValueError):  # of another library, or a layer that knows no length
        return int(cache.get_seq_length()) > 0


def number_of(modules: Iterable[nn.Module]) -> int:
    """By which a layer of these modules asks a cache."""
    numbers = (getattr(each, "layer_idx", None) for each in modules)
    return next((number for number in numbers if isinstance(number, int)), 0)


def refuse_reading(cache: Any, layer: str) -> None:
    """The cache, and the caches of which it is made, stay empty: an encoder-decoder's has two."""
    if isinstance(cache.get_seq_length, _LeftEmpty):
        return
    for part in vars(cache).values():
        if is_cache(part):
            refuse_reading(part, layer)
    for name in _READS:
        setattr(cache, name, _LeftEmpty(layer, weakref.ref(cache) if name == "get_seq_length" else None))
