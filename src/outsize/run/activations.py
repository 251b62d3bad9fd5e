"""How a layer's call is run: what it saves for the backward is kept, computed again, or moved out; whole or in parts.

Chen et al. 2016 (recomputation); ZeRO-Infinity, section 5.1.2 (inputs moved out); Korthikanti et al. 2022, section 5
(selective recomputation); Pudipeddi et al. 2020 (layer-to-layer execution: one micro-batch of a layer after the other).
"""

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from outsize.move.activations import ActivationStore
from outsize.run.choice import Choice, Cost, Lease, Measurement
from outsize.run.layer_state import LayerState, version_of
from outsize.run.packing import Packing
from outsize.run.parts import Call, Parts
from outsize.run.saved import Hooks, is_foreign, of_checkpoint, refuse_written, top_hooks
from outsize.run.split_inputs import SplitInputs

# Note [Caches of keys and values]
# Models of transformers make a cache in every forward, in training too, and hand it to their layers to fill. Nobody
# reads it in the usual loop, but the keys and values of all layers in it would be more than recomputed layers keep
# otherwise. So these get none, and the cache stays empty. Read after all, it would give wrong values to the next
# forward: so it refuses to be read, with a refusal that lies in the cache itself, where copies of it have it too.
# A cache with earlier tokens in it goes to the layers as it is, and they are not recomputed.

FRAME = "_outsize_frame"
"""The attribute of a module of a prepared model that makes its frames."""

# What `torch.utils.checkpoint` is given here cannot be traced: a compiled model runs its recomputed layers uncompiled.
_Forward = Callable[..., Any]
_outside_of_dynamo: Callable[[_Forward], _Forward] = getattr(torch, "_disable_dynamo", lambda function: function)


@final
@dataclass(frozen=True)
class Activations:
    """What a prepared model does with the activations of its layers."""

    micro_batches: int = 1
    store: ActivationStore | None = None  # where "offload" moves inputs; None where they stay where they are
    by_reference: Callable[[Hooks], Hooks] | None = None  # of hooks: the same, but views of units go by reference
    holding: Callable[[object, Hooks | None], AbstractContextManager[Any]] | None = None  # what is saved holds this
    choice: Choice | None = None  # of "auto"
    split: SplitInputs | None = None  # over tensor-parallel ranks

    def around(self, module: nn.Module, mode: str, name: str, forward: _Forward) -> Layer:
        """The `forward` of a module, run in the `mode`: "keep", "recompute", "selective", "offload" or "auto".

        Under non-reentrant checkpointing, the random state is kept, so dropout repeats, and so is what the layer was:
        see `LayerState`. Inside a region that the user already checkpoints, and while such a region is recomputed, the
        forward runs as it is: once is enough.
        `RuntimeError` where the layer changes its input in place, which is the caller's and cannot be put back.
        """
        parts = Parts(self.micro_batches, int(_is_batch_second(module)))
        return Layer(module, repr(name), forward, mode, parts, self)


@final
class Layer:
    """The `forward` of a module whose call is run so, and what its last forward told about its buffers.

    A copy of the module has a copy of it.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        forward: _Forward,
        mode: str,
        parts: Parts,
        activations: Activations,
    ) -> None:
        self._modules = list(module.modules())
        self._short, self._name = name, f"{name} ({type(module).__name__})"
        self._forward = forward
        self._mode = mode
        self._parts = parts
        self._activations = activations
        self._copies_large = True
        self._kind = type(module), tuple(param.shape for param in module.parameters())
        self._costs: list[Cost] = []  # of its calls, under "auto"
        self._repeats = False  # whether a second forward has given what the first one gave
        self._alone: dict[object, bool] = {}  # by what a call looks like: whether its parts may be computed alone
        self.__wrapped__ = forward  # whoever asks for the signature finds that of the forward

    @_outside_of_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again = in_backward() or of_checkpoint(top_hooks())
        if (again and not self._parts.strict) or is_transformed():
            return self._forward(*args, **kwargs)
        mode = self._mode if torch.is_grad_enabled() else "keep"
        if mode != "keep" or self._parts.count > 1:
            caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
            if any(_is_filled(cache) for cache in caches) or (caches and not torch.is_grad_enabled()):
                return self._forward(*args, **kwargs)  # a part, or the second forward, would append once more
            for cache in caches:
                _refuse_reading(cache, self._short)
            args = tuple(None if _is_cache(value) else value for value in args)
            kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
        one = self._forward if mode == "keep" else partial(self._checkpointed, mode, None)
        if mode == "auto":
            one = self._chosen
        calls = self._parts.of(args, kwargs)
        if len(calls) == 1 or not self._in_parts(args, kwargs):
            return one(*args, **kwargs)
        return self._parts.join([one(*args, **kwargs) for args, kwargs in calls])

    @property
    def strict(self) -> bool:
        """Whether it was asked for by `outsize.tiled`."""
        return self._parts.strict

    @property
    def _remedy(self) -> str:
        """Where a call cannot be run again."""
        if self.strict:
            return "as outsize.tiled does it: outsize.tiled(module, tiles=1) leaves it whole"
        return (
            'which activations="recompute" asks for and "auto", the default, chooses for such layers: pass '
            'activations="keep" to outsize.prepare'
        )

    def plain(self) -> _Forward:
        """The forward that it stands for."""
        return self._forward

    def _in_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether parts computed alone give what they give together: tried once, on two rows. See Note [Parts]."""
        key = self._parts.look(args, kwargs), self._modules[0].training
        if key not in self._alone:
            with torch.no_grad(), LayerState(self._modules, self._name, True):
                fault = self._parts.fault(self._forward, args, kwargs)
            self._alone[key] = fault is None
            if fault is not None:
                self._parts.refuse(self._name, fault)
        return self._alone[key]

    def _chosen(self, *args: Any, **kwargs: Any) -> Any:
        choice, holding = self._activations.choice, self._activations.holding
        assert choice is not None and holding is not None
        leaves, _ = tree_flatten((args, kwargs))
        inputs = [each for each in leaves if isinstance(each, torch.Tensor)]
        if any(each.is_nested for each in inputs):  # they have no sizes to compare
            return self._checkpointed("recompute", None, *args, **kwargs)
        options = tuple(each for each in leaves if isinstance(each, (int, str)))
        lease = choice.lease(self._costs, self._short.strip("'"), (options, *self._form(inputs)), inputs)
        del leaves
        if lease.mode not in ("keep", "pack"):
            return self._checkpointed(lease.mode, lease, *args, **kwargs)
        packing = Packing([*inputs, *self._modules[0].buffers()]) if lease.mode == "pack" else None
        with holding(lease, packing and packing.hooks):
            return self._forward(*args, **kwargs)

    def _form(self, inputs: Sequence[torch.Tensor]) -> tuple[object, ...]:
        """What a call saves for the backward hangs on this, and on the sizes of its inputs."""
        with torch._C.DisableTorchFunctionSubclass():
            trained = tuple(param.requires_grad for param in self._modules[0].parameters())
        kinds = tuple((each.dtype, each.requires_grad) for each in inputs)
        return self._kind, kinds, trained, self._modules[0].training, torch._C._is_any_autocast_enabled()

    def _checkpointed(self, mode: str, lease: Lease | None, *args: Any, **kwargs: Any) -> Any:
        inputs = _tensors((*args, *kwargs.values()))
        versions = [version_of(each) for each in inputs]
        state = LayerState(self._modules, self._name, self._copies_large)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = {id(each): each for each in leaves if isinstance(each, torch.Tensor)}
        places = {at: list(tensors).index(id(each)) for at, each in enumerate(leaves) if id(each) in tensors}
        others = [None if at in places else each for at, each in enumerate(leaves)]

        def given(*saved: torch.Tensor) -> tuple[Any, Any]:
            """The arguments, made of their tensors. Attention asks whether two of its inputs are one tensor."""
            values = [saved[places[at]] if at in places else each for at, each in enumerate(others)]
            return tree_unflatten(values, spec)  # type: ignore[no-any-return]

        contexts = nullcontext(), state
        record = _Record(lease, self._measurement(lease, inputs), not self._repeats)
        forward = partial(self._run, [(args, kwargs)], given, _selection(mode), record)
        del leaves
        # torch keeps the random state of those devices alone on which a positional argument lies.
        here = torch.empty(0, device=inputs[0].device if inputs else "cpu")
        with self._saving_inputs(mode, inputs), nullcontext() if self._repeats else set_checkpoint_early_stop(False):
            result = checkpoint(forward, here, *tensors.values(), use_reentrant=False, context_fn=lambda: contexts)
        if versions != [version_of(each) for each in inputs] and self._has_backward(inputs):
            raise RuntimeError(
                f"layer {self._name} changes its input in place, so it cannot be recomputed, which "
                f'activations={self._mode!r} asks for and "auto", the default, chooses for such layers: pass '
                f'activations="keep", or make the operation not in-place'
            )
        self._copies_large = state.settle()
        return result

    def _measurement(self, lease: Lease | None, inputs: list[torch.Tensor]) -> Measurement | None:
        if lease is None or not lease.measures:
            return None
        assert self._activations.choice is not None
        module = self._modules[0]
        return Measurement(self._activations.choice, lease, [*inputs, *module.parameters(), *module.buffers()])

    def _saving_inputs(self, mode: str, inputs: list[torch.Tensor]) -> AbstractContextManager[Any]:
        """Around a checkpoint: how it saves its inputs. What the layer itself saves has the checkpoint's hooks."""
        store, split, by_reference = self._activations.store, self._activations.split, self._activations.by_reference
        if by_reference is None or is_foreign(top_hooks()):
            return nullcontext()
        hooks: Hooks | None = None
        if mode == "offload" and store is not None:
            call = store.call()
            hooks = call.pack, call.unpack
        if split is not None:
            hooks = split.of_call(self._short, inputs, hooks)
        return nullcontext() if hooks is None else torch.autograd.graph.saved_tensors_hooks(*by_reference(hooks))

    def _run(
        self,
        first: list[Call],
        given: Callable[..., Call],
        selection: _Selection,
        record: _Record,
        _: torch.Tensor,
        *tensors: Any,
    ) -> Any:
        """The `first` forward gets what the caller gave, lists and all; a later one, copies of these lists."""
        keeping, using = selection
        args, kwargs = first.pop() if first else given(*tensors)
        with optimized_execution(False):  # TorchScript optimizes later calls, and then saves other tensors
            if not in_backward():
                with self._explaining(record), keeping:
                    return record.forward(partial(self._forward, *args, **kwargs))
            # A selection counts operations: those of a fetch are not among them.
            with self._frame(), using, _own_errors(record):
                result = record.again(partial(self._forward, *args, **kwargs))
        if record.is_other:
            raise RuntimeError(
                f"layer {self._name} gave other values when it ran again in the backward than in its forward: it draws "
                f"from a random generator of its own, or depends on something else that changes. So it cannot be "
                f"recomputed, {self._remedy}"
            )
        self._repeats = self._repeats or record.compares
        return result

    def _frame(self) -> AbstractContextManager[None]:
        """The second forward runs inside a frame, as the first does."""
        frame = self._modules[0].__dict__.get(FRAME)
        return nullcontext() if frame is None else frame()

    def _explaining(self, record: _Record) -> AbstractContextManager[Any]:
        """Inside: a tensor saved for the backward that is not recomputed raises an error with the layer's name.

        So does one that the forward that ran again saved, and then wrote to.
        """
        hooks = top_hooks()
        if hooks is None:
            return nullcontext()
        pack, unpack = hooks

        @wraps(pack)
        def numbered(tensor: torch.Tensor) -> tuple[int, Any]:
            return record.note(tensor), pack(tensor)

        def explained(packed: tuple[int, Any]) -> torch.Tensor:
            number, placeholder = packed
            try:
                tensor = unpack(placeholder)
                refuse_written(tensor, record.versions[number])
                return tensor
            except CheckpointError as error:
                raise CheckpointError(
                    f"layer {self._name} did other operations when it ran again in the backward than in its forward, "
                    f"so it cannot be recomputed, {self._remedy}. What torch says: {error}"
                ) from error

        return torch.autograd.graph.saved_tensors_hooks(numbered, explained)

    def _has_backward(self, inputs: list[torch.Tensor]) -> bool:
        return any(each.requires_grad for each in (*inputs, *self._modules[0].parameters()))


@final
class _Record:
    """What the last forward of a checkpointed call saved. It lives as long as anything that the call saves."""

    def __init__(self, lease: Lease | None, measurement: Measurement | None, samples: bool) -> None:
        """`samples`: a second forward must give what the first one gives."""
        self.versions: list[int] = []  # of the tensors that it saved, in order, when it saved them
        self._lease = lease
        self._measurement = measurement
        self._samples = samples
        self._saved = 0
        self._given: list[Sample] | None = None
        self.is_other = False  # whether the second forward has given something else than the first

    @property
    def compares(self) -> bool:
        """Whether a second forward is compared with the first one."""
        return self._given is not None

    def note(self, tensor: torch.Tensor) -> int:
        """An operation saves this; its number."""
        if self._measurement is not None and not in_backward():
            self._measurement.save(tensor)
        self.versions.append(tensor._version)
        return len(self.versions) - 1

    def forward(self, run: Callable[[], Any]) -> Any:
        if self._measurement is None:
            result = run()
        else:
            counting = _Counting(self._measurement) if self._measurement.counts_products else nullcontext()
            with counting:
                result = self._measurement.forward(run)
        self._saved = len(self.versions)
        if self._samples:
            self._given = _samples(result)
        return result

    def again(self, run: Callable[[], Any]) -> Any:
        """The second forward. It may end by an exception: the last tensor that it saves may be all that is wanted."""
        self.versions.clear()
        result = run() if self._measurement is None else self._measurement.again(run)
        told_by_torch = len(self.versions) != self._saved  # it did other operations
        if self._given is not None and not told_by_torch:
            self.is_other = not _are_close(self._given, _samples(result))
        return result


SAMPLES = 64
"""Elements of each result of a layer that are compared."""

MOST_UNLIKE = SAMPLES // 20
"""Kernels of accelerators may round differently the second time, and then choose differently here and there."""


Sample = tuple[torch.Size, torch.Tensor]


def _samples(result: Any) -> list[Sample]:
    """The shape of each tensor of floating-point numbers, and copies of some of its elements."""
    found = []
    for each in tree_flatten(result)[0]:
        if type(each) is torch.Tensor and each.is_floating_point() and each.layout is torch.strided:
            flat = each.detach().reshape(-1)
            found.append((each.shape, flat[:: max(flat.numel() // SAMPLES, 1)][:SAMPLES].clone()))
    return found


def _are_close(given: list[Sample], again: list[Sample]) -> bool:
    """Up to rounding."""
    for (shape, one), (other_shape, other) in zip(given, again, strict=False):
        if shape != other_shape or one.dtype != other.dtype:
            return False
        most = 1e-4 if one.dtype in (torch.float32, torch.float64) else 3e-2
        near = torch.isclose(one, other, rtol=most, atol=most * _mean_size(one), equal_nan=True)
        if int((~near).sum()) > MOST_UNLIKE:
            return False
    return len(given) == len(again)


def _mean_size(values: torch.Tensor) -> float:
    return float(values.float().abs().nan_to_num(posinf=0.0).mean()) if values.numel() else 0.0


@contextmanager
def _own_errors(record: _Record) -> Iterator[None]:
    """TorchScript makes an error of its own of one in a hook: raise that one, with which a recomputation ends early."""
    hooks = top_hooks()
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    raised: list[BaseException] = []

    @wraps(pack)
    def noting(tensor: torch.Tensor) -> Any:
        record.note(tensor)
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


_KEPT_OPERATIONS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "_scaled_mm"),
        *("convolution", "_convolution", "convolution_overrideable"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward"),
        "_efficient_attention_forward",
    )
    if hasattr(torch.ops.aten, name)
)
"""What "selective" keeps: products of matrices, convolutions and attention, which take the time of a layer."""


def _packet(func: Any) -> Any:
    """The operation with all of its overloads; of one that takes functions, nothing."""
    return getattr(func, "overloadpacket", None)


_UNTRACKED = frozenset(
    getattr(torch.ops.aten, name) for name in ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")
)
"""Their results share memory with what they view, but count the writes to it for themselves."""


@final
class _Result:
    """What an operation gave, and whether it is that still."""

    def __init__(self, value: Any) -> None:
        leaves, self._spec = tree_flatten(value)
        self._leaves = [_alias(each) if isinstance(each, torch.Tensor) else each for each in leaves]
        self._watched: list[tuple[torch.Tensor, int]] = []
        self.watch(self._leaves)

    def watch(self, values: Iterable[Any]) -> None:
        """Whoever writes to these writes to the result."""
        self._watched += [(_alias(each), version_of(each)) for each in values if isinstance(each, torch.Tensor)]

    @property
    def storages(self) -> list[int]:
        return [each.untyped_storage()._cdata for each in self._leaves if isinstance(each, torch.Tensor)]

    @property
    def changed(self) -> bool:
        return any(version_of(each) != version for each, version in self._watched)

    def value(self) -> Any:
        return tree_unflatten(
            [_alias(each) if isinstance(each, torch.Tensor) else each for each in self._leaves], self._spec
        )


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a graph. It counts writes with the tensor, which it would not by itself in here."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


Kept = dict[Any, list[_Result]]
"""By operation, in order."""


class _Keeping(TorchDispatchMode):
    """The first forward: it keeps some results."""

    supports_higher_order_operators = True

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept
        self._by_storage: dict[int, _Result] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if _packet(func) in _KEPT_OPERATIONS:
            result = _Result(value)
            self._kept.setdefault(func, []).append(result)
            self._by_storage |= dict.fromkeys(result.storages, result)
        elif _packet(func) in _UNTRACKED:
            viewed = self._by_storage.get(args[0].untyped_storage()._cdata)
            if viewed is not None:
                viewed.watch(tree_flatten(value)[0])
        return value


class _Counting(TorchDispatchMode):
    """What "selective" would keep: its bytes, and the seconds that it takes."""

    supports_higher_order_operators = True

    def __init__(self, measurement: Measurement) -> None:
        super().__init__()
        self._measurement = measurement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = partial(func, *args, **(kwargs or {}))
        return self._measurement.operation(run, _packet(func) in _KEPT_OPERATIONS)


class _Using(TorchDispatchMode):
    """A later forward: it takes what the first one kept. What was written to in place since is computed again."""

    supports_higher_order_operators = True

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept

    def __enter__(self) -> Any:
        self._used: dict[Any, int] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = self._used.get(func, 0)
        if _packet(func) in _KEPT_OPERATIONS and number < len(self._kept.get(func, ())):
            self._used[func] = number + 1
            result = self._kept[func][number]
            if not result.changed:
                return result.value()
        return func(*args, **(kwargs or {}))


_Selection = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _selection(mode: str) -> _Selection:
    """For the first forward of a checkpoint and for later ones: what the first keeps, these use."""
    if mode != "selective":
        return nullcontext(), nullcontext()
    kept: Kept = {}
    return _Keeping(kept), _Using(kept)


def _is_batch_second(module: nn.Module) -> bool:
    """Whether the layer is one of torch's with the sequence as the first dimension and the batch as the second."""
    return any(getattr(each, "batch_first", None) is False for each in module.modules())


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


def is_transformed() -> bool:
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
            f"this cache of keys and values comes from a forward that recorded gradients, and is empty: layer "
            f"{self.layer} is recomputed in the backward, and did not fill it. To use the cache of such a forward, "
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


def tiled(module: nn.Module, dim: int = 1, tiles: int = 8) -> nn.Module:
    """Run a module on one tile of its input after the other: only one tile's working memory exists at a time.

    For modules that compute each position alone: an MLP, a norm, a head. A tile runs again in the backward. The module
    is changed in place and returned; its parameters and their names stay. `dim`: the dimension that is cut, 1 for the
    sequence of `[batch, sequence, features]`. `tiles`: how many tiles; 1 undoes it. Tensors among the arguments that
    have another size there are given to each tile whole. Before `outsize.prepare` or after it, or without it.

    Raises `TypeError` or `ValueError` for other values; the first call raises `ValueError` where the module does not
    compute each position alone. The result equals that of the whole call up to the order of sums in gradients of
    parameters. Source: ZeRO-Infinity (Rajbhandari et al. 2021), section 5.1.3, along the sequence.

        >>> mlp = outsize.tiled(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)), dim=1, tiles=4)
        >>> mlp(torch.randn(2, 16, 8)).shape
        torch.Size([2, 16, 8])
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"outsize.tiled takes a torch.nn.Module, not {type(module).__name__}")
    for name, value, least in (("dim", dim, 0), ("tiles", tiles, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"outsize.tiled: {name} is {value!r}; it must be an integer of at least {least}")
    before = module.__dict__.get("forward")
    if isinstance(before, Layer) and before.strict:
        module.__dict__["forward"] = before.plain()
        if module.forward == type(module).forward.__get__(module):
            del module.__dict__["forward"]
    if tiles > 1:
        parts = Parts(tiles, dim, strict=True)
        module.__dict__["forward"] = Layer(module, "the module", module.forward, "recompute", parts, Activations())
    return module
