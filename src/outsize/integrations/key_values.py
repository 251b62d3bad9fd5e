"""Keys and values of transformers' `generate()` that do not fit in memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from outsize.api.resources import Resources
from outsize.config import Config
from outsize.move.conveyor import Job
from outsize.move.memory import PAGE_BYTES
from outsize.move.tokens import SLABS, TokenStore, form_of, row_bytes, slab_bytes
from outsize.planning.layout import round_up

ALIGNED = 64
"""Bytes: values begin there behind the keys. See Note [Alignment] in planning/layout.py."""

SUM_BYTES = 6
"""What `Generation` keeps in memory for each page."""


class KeyValueCache(Cache):  # type: ignore[misc]  # not read by mypy
    """Keys and values at rest on `disk`, or in host memory beside an accelerator; those of two layers are in memory.

    ```python
    with KeyValueCache(model.config, tokens=4096, disk="/mnt/nvme") as cache:
        model.generate(**inputs, cache=cache, max_new_tokens=64)
    ```

    `tokens`: the most of one sequence, prompt and answer. Each forward of a layer reads what the layer keeps, while the
    layer before it computes, and writes the new tokens alone. Layers with a sliding window stay in memory. One cache
    is for one call of `generate`. `close` gives files and memory back; so does the end of the object. Raises
    `ValueError` for a model of which it cannot hold the cache, `OSError` where the drive is full.
    """

    def __init__(
        self, config: Any, tokens: int, disk: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    ) -> None:
        layers: list[Any] = _layers_of(config)
        moved = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        directories: Any = Config(device="cpu", disk=disk).disk or ()
        self._shared = _Shared(len(moved), tokens, [Path(each) for each in directories])
        for number, index in enumerate(moved):
            layers[index] = _MovedLayer(self._shared, number)
        super().__init__(layers=layers)

    @property
    def bytes_written(self) -> int:
        """To `disk`, so far."""
        resources = self._shared.resources
        return 0 if resources is None else resources.bytes_written

    @property
    def bytes_read(self) -> int:
        """From `disk`, so far."""
        resources = self._shared.resources
        return 0 if resources is None else resources.bytes_read

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        with torch.inference_mode(False), torch.no_grad():
            self._shared.reorder(beam_idx)

    def close(self) -> None:
        """Remove the files and end the thread; safe to repeat."""
        self._shared.closed = True
        if self._shared.resources is not None:
            self._shared.resources.close()

    def __enter__(self) -> KeyValueCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def held_bytes(config: Any, whole: int, tokens: int) -> tuple[int, int]:
    """While `whole` bytes of keys and values are moved: (bytes where the model computes, bytes on the host for a disk).

    Raises `ValueError` for a model whose keys and values cannot be moved.
    """
    layers = _layers_of(config)
    moved = sum(type(layer) is DynamicLayer for layer in layers)
    one = whole // len(layers)
    staging = SLABS * slab_bytes(one // tokens, tokens) + whole // PAGE_BYTES * SUM_BYTES
    return (len(layers) - moved + 2) * one + 2 * ALIGNED, staging


def _layers_of(config: Any) -> list[Any]:
    if config.is_encoder_decoder:
        raise ValueError(f"KeyValueCache cannot hold keys of an encoder, and {config.model_type} has one")
    layers: list[Any] = DynamicCache(config=config).layers
    others = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    if others:
        raise ValueError(
            f"KeyValueCache holds the keys and values of attention alone, and {config.model_type} has layers that keep "
            f"something else ({', '.join(sorted(others))})"
        )
    if not any(type(layer) is DynamicLayer for layer in layers):
        raise ValueError(
            f"KeyValueCache has nothing to move: each layer of {config.model_type} attends to a sliding window, whose "
            f"keys and values stay in memory"
        )
    return layers


class _Shared:
    """What the layers share: the store of their tokens, and memory for two of them."""

    def __init__(self, layers: int, tokens: int, disk: Sequence[Path]) -> None:
        self._layers, self._tokens, self._disk = layers, tokens, disk
        self.closed = False
        self.resources: Resources | None = None
        self._store: TokenStore | None = None
        self._origins: torch.Tensor | None = None  # [tokens, batch]; see Note [Tokens at rest] in move/tokens.py
        self._ahead: tuple[int, int, Job | None, list[torch.Tensor]] | None = None  # layer, all its tokens, read, where
        self._turn = 0  # the buffer that was given out last

    def count(self, layer: int) -> int:
        """Tokens."""
        return 0 if self._store is None else self._store.counts[layer]

    def update(self, layer: int, kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All keys and values of the layer, with these new ones. They last until the next update."""
        if self.closed:
            raise ValueError(
                "this KeyValueCache was closed, and its tokens are gone; make one for each call of generate()"
            )
        count, new = self.count(layer), kept[0].shape[2]
        if count + new > self._tokens:
            raise ValueError(
                f"KeyValueCache was made for {self._tokens} tokens a sequence, and {count + new} are needed: pass "
                f"tokens={count + new} or more, prompt and answer together. A cache is for one call of generate()"
            )
        if len({each.dtype for each in kept}) > 1:
            raise ValueError(
                f"layer {layer} gives keys of {kept[0].dtype} and values of {kept[1].dtype}, as it may under "
                f"torch.autocast, and KeyValueCache holds one dtype: load the model in the dtype in which it is to "
                f"compute, and call generate() without autocast"
            )
        store = self._store or self._open(kept)
        if form_of(kept) != store.form:
            raise ValueError(
                f"layer {layer} gives keys and values of another form than the first layer: (batch, heads, width) "
                f"{form_of(kept)[2]}, not {store.form[2]}, or another dtype or device. KeyValueCache holds one form; "
                f"make one for each call of generate()"
            )
        if self._ahead is None or self._ahead[:2] != (layer, count + new):
            self._forget_ahead()
            self._ahead = self._read(store, layer, count + new)
        reading, out = self._ahead[2:]
        self._ahead = None
        if reading is not None:
            store.arrive(reading)
        for whole, each in zip(out, kept, strict=True):
            whole[:, :, count:].copy_(each)
        store.append(layer, kept)
        # The first layer goes on with the next token, as a rule. A wrong guess costs a wait.
        self._read_ahead(store, (layer + 1) % self._layers, new if layer + 1 < self._layers else 1)
        return out

    def reorder(self, rows: torch.Tensor) -> None:
        """Row i of the batch goes on with what row `rows[i]` has so far."""
        if self._store is None:
            return
        self._forget_ahead()
        count, device = self.count(0), self._store.form[0]
        if self._origins is None:
            self._origins = torch.arange(rows.numel(), device=device).repeat(self._tokens, 1)
        self._origins[:count] = self._origins[:count, rows.to(device)]
        self._read_ahead(self._store, 0, 1)

    def _read_ahead(self, store: TokenStore, layer: int, new: int) -> None:
        if store.counts[layer] and store.counts[layer] + new <= self._tokens:
            self._ahead = self._read(store, layer, store.counts[layer] + new)

    def _read(self, store: TokenStore, layer: int, total: int) -> tuple[int, int, Job | None, list[torch.Tensor]]:
        """Start to bring the layer's tokens into the buffer that is not in use, with room for `total` of them."""
        self._turn = 1 - self._turn
        _, dtype, shapes = store.form
        out, start = [], 0
        for batch, heads, width in shapes:
            nbytes = batch * heads * total * width * dtype.itemsize
            flat = self._buffers[self._turn][start : start + nbytes]
            out.append(flat.view(dtype).view(batch, heads, total, width))
            start = round_up(start + nbytes, ALIGNED)
        count = store.counts[layer]
        origins = None if self._origins is None else self._origins[:count]
        return layer, total, store.read(layer, out, origins) if count else None, out

    def _forget_ahead(self) -> None:
        if self._ahead is not None and self._ahead[2] is not None:
            self._ahead[2].written.wait()  # the buffer and the origins are free then
        self._ahead = None

    def _open(self, kept: Sequence[torch.Tensor]) -> TokenStore:
        device, row, tokens = kept[0].device, row_bytes(kept), self._tokens
        if not self._disk and device.type == "cpu":
            raise ValueError(
                "KeyValueCache without a disk holds keys and values in host memory, where a model on the CPU has them "
                "anyway: name a disk, or leave KeyValueCache out"
            )
        on_disk = bool(self._disk)
        resources = Resources(self._disk, slab_bytes(row, tokens), SLABS if on_disk else 0, device, 0, on_disk)
        try:
            whole = self._layers * round_up(row * tokens, PAGE_BYTES)
            file = resources.open_file("keys-values", whole, verify=True, summed=True) if on_disk else None
            store = TokenStore(self._layers, tokens, kept, resources.conveyor, resources.lanes, file)
            self._buffers = [torch.empty(row * tokens + ALIGNED, dtype=torch.uint8, device=device) for _ in range(2)]
        except BaseException:
            resources.close()
            raise
        weakref.finalize(self, resources.close)
        self.resources, self._store, resources.tokens = resources, store, store
        return store


class _MovedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer whose keys and values are moved."""

    is_sliding = False

    def __init__(self, shared: _Shared, number: int) -> None:
        super().__init__()
        self._shared, self._number = shared, number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the first update opens what all layers share."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(
                "KeyValueCache is for answers, and gradients would flow through it: call generate(), or run the model "
                "under torch.inference_mode()"
            )
        with torch.inference_mode(False), torch.no_grad():  # the conveyor writes to what is made here
            keys, values = self._shared.update(self._number, (key_states, value_states))
        self.is_initialized = True  # by which some models know a prompt from what follows it
        return keys, values

    def get_seq_length(self) -> int:
        return self._shared.count(self._number)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Any) -> None:
        """Nothing: `KeyValueCache` does it for all layers at once."""

    def _refuse(self, *_: Any) -> None:
        raise ValueError(
            "KeyValueCache cannot give up tokens, which assisted generation asks for, nor change its batch: leave the "
            "assistant out, and make a cache for each call of generate()"
        )

    reset = crop = batch_repeat_interleave = batch_select_indices = _refuse

    def _refuse_looking(self, *_: Any) -> None:
        raise ValueError(
            "KeyValueCache shows a layer's keys and values to its attention alone, and cannot be copied. Models that "
            "run a layer several times ask for that: call generate() without KeyValueCache"
        )

    keys = values = property(_refuse_looking, lambda self, nothing: None)
    __deepcopy__ = _refuse_looking
