"""Activation checkpointing of a unit (Chen et al. 2016): keep its inputs, recompute the rest in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.jit._fuser import optimized_execution
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointError, checkpoint

from outsize.run.layer_state import LayerState, version_of
from outsize.run.saved import of_checkpoint, top_hooks

# Note [Caches of keys and values]
# Models of transformers make a cache in every forward, in training too, and hand it to their layers to fill. Nobody
# reads it in the usual loop, but the keys and values of all layers in it would be more than recomputed layers keep
# otherwise. So these get none, and the cache stays empty. Read after all, it would give wrong values to the next
# forward: so it refuses to be read, with a refusal that lies in the cache itself, where copies of it have it too.
# A cache with earlier tokens in it goes to the layers as it is, and they are not recomputed.

# What `torch.utils.checkpoint` is given here cannot be traced: a compiled model runs its recomputed layers uncompiled.
_Forward = Callable[..., Any]
_outside_of_dynamo: Callable[[_Forward], _Forward] = getattr(torch, "_disable_dynamo", lambda function: function)


def recomputed(
    module: nn.Module, name: str, frame: Callable[[], AbstractContextManager[None]], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """The `forward` of a module, run under non-reentrant checkpointing whenever gradients are recorded.

    The random state is kept, so dropout repeats, and so is what the layer was: see `LayerState`. Inside a region that
    the user already checkpoints, and while such a region is recomputed, the forward runs as it is: once is enough.
    The second forward runs inside a `frame()`, as the first does. `RuntimeError` where the layer changes its input in
    place, which is the caller's and cannot be put back.
    """
    layer = _Layer(module, name, forward, frame)

    @_outside_of_dynamo
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or in_backward() or of_checkpoint(top_hooks()) or _is_transformed():
            return forward(*args, **kwargs)
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        if any(_is_filled(cache) for cache in caches):
            return forward(*args, **kwargs)  # earlier tokens are in it: recomputing would append them twice
        for cache in caches:
            _refuse_reading(cache, name)
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
        return layer.checkpointed(args, kwargs)

    return run


@final
class _Layer:
    """What is recomputed as a whole, and what its last forward told about its buffers."""

    def __init__(self, module: nn.Module, name: str, forward: _Forward, frame: Callable[[], Any]) -> None:
        self._modules = list(module.modules())
        self._name = f"{name!r} ({type(module).__name__})"
        self._forward = forward
        self._frame = frame
        self._copies_large = True
        # torch keeps the random state of those devices alone on which a positional argument lies.
        self._here = torch.empty(0, device=next(module.parameters()).device)

    def checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = _tensors((*args, *kwargs.values()))
        versions = [version_of(each) for each in inputs]
        state = LayerState(self._modules, self._name, self._copies_large)
        contexts = (nullcontext(), state)
        distinct = {id(each): each for each in args}  # attention asks whether its inputs are one tensor
        places = [list(distinct).index(id(each)) for each in args]
        forward = partial(self._run, places, **kwargs)
        result = checkpoint(forward, self._here, *distinct.values(), use_reentrant=False, context_fn=lambda: contexts)
        if versions != [version_of(each) for each in inputs] and self._has_backward(inputs):
            raise RuntimeError(
                f"layer {self._name} changes its input in place, so it cannot be recomputed, which "
                f'activations="recompute" asks for and "auto", the default, chooses for such layers: pass '
                f'activations="keep", or make the operation not in-place'
            )
        self._copies_large = state.settle()
        return result

    def _run(self, places: Sequence[int], _: torch.Tensor, *distinct: Any, **kwargs: Any) -> Any:
        args = [distinct[place] for place in places]
        with optimized_execution(False):  # TorchScript optimizes later calls, and then saves other tensors
            if not in_backward():
                with self._explaining():
                    return self._forward(*args, **kwargs)
            with self._frame(), _own_errors():
                return self._forward(*args, **kwargs)

    def _explaining(self) -> AbstractContextManager[Any]:
        """Inside: a tensor saved for the backward that is not recomputed raises an error with the layer's name."""
        hooks = top_hooks()
        if hooks is None:
            return nullcontext()
        pack, unpack = hooks

        def explained(packed: Any) -> torch.Tensor:
            try:
                return unpack(packed)
            except CheckpointError as error:
                raise CheckpointError(
                    f"layer {self._name} did other operations when it ran again in the backward than in its forward, "
                    f'so it cannot be recomputed, which activations="recompute" asks for and "auto", the default, '
                    f'chooses for such layers: pass activations="keep" to outsize.prepare. What torch says: {error}'
                ) from error

        return torch.autograd.graph.saved_tensors_hooks(pack, explained)

    def _has_backward(self, inputs: list[torch.Tensor]) -> bool:
        return any(each.requires_grad for each in (*inputs, *self._modules[0].parameters()))


@contextmanager
def _own_errors() -> Iterator[None]:
    """TorchScript makes an error of its own of one in a hook: raise that one, with which a recomputation ends early."""
    hooks = top_hooks()
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    raised: list[BaseException] = []

    @wraps(pack)
    def noting(tensor: torch.Tensor) -> Any:
        try:
            return pack(tensor)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        with torch.autograd.graph.saved_tensors_hooks(noting, unpack):
            yield
    except RuntimeError:
        if raised:
            raise raised[0] from None
        raise
    finally:
        raised.clear()  # an error kept here would keep what was running


def _tensors(values: Iterable[Any], nested: bool = True) -> list[torch.Tensor]:
    """The tensors among the arguments of a forward, and in the lists, tuples and mappings among them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif nested and isinstance(value, (list, tuple, Mapping)):
            found += _tensors(value.values() if isinstance(value, Mapping) else value, nested=False)
    return found


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def _is_transformed() -> bool:
    """Whether what runs now cannot be recomputed: torch.func or forward AD see it, or weights made once are shared."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or parametrize._cache_enabled > 0
    )


_READS = ("get_seq_length", "get_mask_sizes")
"""What a forward asks of a cache before anything else."""


@final
@dataclass(frozen=True)
class _LeftEmpty:
    """Takes the place of each of a cache's `_READS`. See Note [Caches of keys and values]."""

    layer: str

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"this cache (past_key_values) comes from a forward that recorded gradients, and is empty: layer "
            f"{self.layer!r} is recomputed in the backward, and did not fill it. To use the cache of such a forward, "
            f'pass activations="keep" to outsize.prepare; if no gradients are needed, run the forward under '
            f"torch.no_grad()"
        )


def _is_cache(value: object) -> bool:
    """A key-value cache of transformers, recognised by what it offers."""
    return not isinstance(value, (torch.Tensor, nn.Module)) and callable(getattr(value, "get_seq_length", None))


def _is_filled(cache: Any) -> bool:
    return not isinstance(cache.get_seq_length, _LeftEmpty) and int(cache.get_seq_length()) > 0


def _refuse_reading(cache: Any, layer: str) -> None:
    """The cache, and the caches of which it is made, stay empty: an encoder-decoder's has two."""
    if isinstance(cache.get_seq_length, _LeftEmpty):
        return
    for part in vars(cache).values():
        if _is_cache(part):
            _refuse_reading(part, layer)
    for name in _READS:
        setattr(cache, name, _LeftEmpty(layer))


def can_recompute(module: nn.Module) -> bool:
    """Whether a second forward is nobody else's concern: batch norms of several ranks speak to each other."""
    return not any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
