"""How a layer's call is run: what it saves for the backward is kept, computed again, or moved out; whole or in parts.

Chen et al. 2016 (recomputation); ZeRO-Infinity, section 5.1.2 (inputs moved out); Korthikanti et al. 2022, section 5
(selective recomputation); Pudipeddi et al. 2020 (layer-to-layer execution: one micro-batch of a layer after the other).
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, final

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.jit._fuser import optimized_execution
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from outsize.move.activations import ActivationStore
from outsize.move.pool import Pool
from outsize.run.caches import is_cache, is_filled, number_of, refuse_reading
from outsize.run.choice import Choice
from outsize.run.costs import Cost, Lease, Measurement, Moving
from outsize.run.layer_state import LayerState, version_of
from outsize.run.packing import Packing
from outsize.run.parts import Call, Parts
from outsize.run.record import Record
from outsize.run.saved import Hooks, is_foreign, of_checkpoint, refuse_written, refusing_writes, top_hooks
from outsize.run.segments import Link, Segments
from outsize.run.selective import Selection, selection
from outsize.run.split_inputs import SplitInputs
from outsize.run.wrappers import known

FRAME = "_outsize_frame"
"""The attribute of a module of a prepared model that makes its frames."""

# What `torch.utils.checkpoint` is given here cannot be traced: a compiled model runs its recomputed layers uncompiled.
_Forward = Callable[..., Any]
_outside_of_dynamo: Callable[[_Forward], _Forward] = getattr(torch, "_disable_dynamo", lambda function: function)


def _none_is_shown(_: Iterable[nn.Module]) -> bool:
    return False


@final
@dataclass(frozen=True)
class Activations:
    """What a prepared model does with the activations of its layers."""

    micro_batches: int = 1
    store: ActivationStore | None = None  # where "offload" moves inputs; None where they stay where they are
    by_reference: Callable[[Hooks], Hooks] | None = None  # of hooks: the same, but views of units go by reference
    holding: Callable[[object, Hooks | None], AbstractContextManager[Any]] | None = None  # what is saved holds this
    choice: Choice | None = None  # of "auto"; of the length of segments where all compute again
    split: SplitInputs | None = None  # over tensor-parallel ranks
    pool: Pool | None = None  # where the inputs lie that stay on an accelerator
    shown: Callable[[Iterable[nn.Module]], bool] = _none_is_shown  # whether a `gathered` block has parameters of these

    def around(self, module: nn.Module, mode: str, name: str, forward: _Forward) -> Layer:
        """The `forward` of a module, run in the `mode`: "keep", "recompute", "selective", "offload" or "auto".

        Under non-reentrant checkpointing, the random state is kept, so dropout repeats, and so is what the layer was:
        see `LayerState`. Inside a region that the user already checkpoints, and while such a region is recomputed, the
        forward runs as it is: once is enough.
        `RuntimeError` where the layer changes its input in place, which is the caller's and cannot be put back.
        """
        # Some of torch's layers have the sequence as the first dimension and the batch as the second.
        batch_second = any(getattr(each, "batch_first", None) is False for each in module.modules())
        parts = Parts(self.micro_batches, int(batch_second))
        return Layer(module, repr(name), forward, mode, parts, self)

    def saving_inputs(
        self, layer: str, mode: str, inputs: list[torch.Tensor], before: tuple[torch.Tensor, Link] | None
    ) -> AbstractContextManager[Any]:
        """Around a checkpoint: how it saves its inputs. What the layer itself saves has the checkpoint's hooks."""
        if self.by_reference is None or is_foreign(top_hooks()):
            return nullcontext()
        hooks = None if self.pool is None else self.pool.of_call(inputs)
        if before is not None:
            hooks = before[1].hooks(before[0])
        if mode == "offload" and self.store is not None:
            call = self.store.call()
            hooks = call.pack, call.unpack
        if hooks is None and self.split is None:
            return nullcontext()
        hooks = refusing_writes(hooks)
        if self.split is not None:
            hooks = self.split.of_call(layer, inputs, hooks)
        return torch.autograd.graph.saved_tensors_hooks(*self.by_reference(hooks))


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
        self._number = number_of(self._modules)
        kind = type(module).__name__
        self._short, self._name = name or kind, f"{name} ({kind})" if name else kind
        self._forward = forward
        self._mode = mode
        self._parts = parts
        self._activations = activations
        self._copies_large = True
        self._kind = type(module), tuple(param.shape for param in module.parameters())
        self._costs: list[Cost] = []  # of its calls, under "auto"
        self._repeats = False  # whether a second forward has given what the first one gave
        self._alone: dict[object, bool] = {}  # by what a call looks like: whether its parts may be computed alone
        self.__wrapped__ = forward  # that it stands for: whoever asks for the signature finds its

    @_outside_of_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again = in_backward() or of_checkpoint(top_hooks())
        traced = any(isinstance(each, Proxy) for each in (*args, *kwargs.values()))
        if (again and not self._parts.strict) or is_transformed() or traced:
            return self._forward(*args, **kwargs)
        # Parameters in a `gathered` block pass the gate, where autograd saves other tensors than in a second forward.
        mode = self._mode if torch.is_grad_enabled() and not self._activations.shown(self._modules) else "keep"
        if mode != "keep" or self._parts.count > 1:
            caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
            if any(is_filled(cache, self._number) for cache in caches) or (caches and not torch.is_grad_enabled()):
                return self._forward(*args, **kwargs)  # a part, or the second forward, would append once more
            for cache in caches:
                refuse_reading(cache, self._short)
            args = tuple(None if is_cache(value) else value for value in args)
            kwargs = {key: None if is_cache(value) else value for key, value in kwargs.items()}
        one = self._forward if mode == "keep" else partial(self._checkpointed, mode, None)
        if mode == "auto" or (mode == "recompute" and self._activations.choice is not None):
            one = self._chosen
        calls = self._parts.of(args, kwargs)
        if len(calls) == 1 or not self._in_parts(args, kwargs):
            return one(*args, **kwargs)
        return self._parts.join([one(*args, **kwargs) for args, kwargs in calls])

    @property
    def _remedy(self) -> str:
        """Where a call cannot be run again."""
        if self._parts.proven:
            return 'as tiles="auto", the default, does it with a call that exceeds the budget: pass tiles=False'
        if self._parts.strict:
            return "as outsize.tiled does it: outsize.tiled(module, tiles=1) leaves it whole"
        default = ", the default," if self._mode == "auto" else ""
        return f'as activations="{self._mode}"{default} does it: pass activations="keep" to outsize.prepare'

    def _in_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether parts computed alone give what they give together: tried once, on two rows. See Note [Parts]."""
        if self._parts.proven:
            return True
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
        module = self._modules[0]
        if lease.mode in ("recompute", "selective"):
            return self._checkpointed(lease.mode, lease, *args, **kwargs)
        if lease.mode == "offload":
            moving = Moving(choice, lease, [*known(module.parameters()), *module.buffers()])
            with holding(lease, moving.hooks):
                result = self._forward(*args, **kwargs)
            moving.ends()
            return result
        packing = Packing([*inputs, *module.buffers()]) if lease.mode == "pack" else None
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
        others = [None if at in places else _as_it_is(each) for at, each in enumerate(leaves)]

        def given(*saved: torch.Tensor) -> tuple[Any, Any]:
            """The arguments, made of their tensors. Attention asks whether two of its inputs are one tensor."""
            values = [saved[places[at]] if at in places else _as_it_is(each) for at, each in enumerate(others)]
            return tree_unflatten(values, spec)  # type: ignore[no-any-return]

        contexts = nullcontext(), state
        record = Record(lease, self._measurement(lease, inputs), not self._repeats)
        segments = None if lease is None or is_foreign(top_hooks()) else self._segments
        before, position = (None, -1) if segments is None else segments.find(inputs)
        forward = partial(self._run, [(args, kwargs)], given, selection(mode), record, position)
        del leaves
        # torch keeps the random state of those devices alone on which a positional argument lies.
        here = torch.empty(0, device=inputs[0].device if inputs else "cpu")
        with (
            self._activations.saving_inputs(self._short, mode, inputs, before),
            nullcontext() if self._repeats else set_checkpoint_early_stop(False),
        ):
            result = checkpoint(forward, here, *tensors.values(), use_reentrant=False, context_fn=lambda: contexts)
        has_backward = any(each.requires_grad for each in (*inputs, *self._modules[0].parameters()))
        if has_backward and versions != [version_of(each) for each in inputs]:
            raise RuntimeError(
                f"layer {self._name} changes its input in place, so it cannot be recomputed, {self._remedy}. Or make "
                f"the operation not in-place"
            )
        self._copies_large = state.settle()
        return result

    @property
    def _segments(self) -> Segments:
        assert self._activations.choice is not None
        return self._activations.choice.segments

    def _measurement(self, lease: Lease | None, inputs: list[torch.Tensor]) -> Measurement | None:
        if lease is None or not lease.measures:
            return None
        assert self._activations.choice is not None
        module = self._modules[0]
        # The parameters of a layer of several units are not there yet.
        there_anyway = [*(known(module.parameters()) if self._mode == "auto" else ()), *module.buffers()]
        return Measurement(self._activations.choice, lease, inputs, there_anyway)

    def _run(
        self,
        first: list[Call],
        given: Callable[..., Call],
        selection: Selection,
        record: Record,
        position: int,
        _: torch.Tensor,
        *tensors: Any,
    ) -> Any:
        """The `first` forward gets what the caller gave, lists and all; a later one, copies of these lists.

        `position` in the segment; -1 where no later call links to this one.
        """
        keeping, using = selection
        args, kwargs = first.pop() if first else given(*tensors)
        with optimized_execution(False):  # TorchScript optimizes later calls, and then saves other tensors
            if not in_backward():
                with self._frame(), self._explaining(record), keeping:
                    result = record.forward(partial(self._forward, *args, **kwargs))
                    if position >= 0:
                        self._segments.save(result, position)
                    return result
            # A selection counts operations: those of a fetch are not among them.
            with self._frame(), using, _own_errors(record):
                try:
                    result = record.again(partial(self._forward, *args, **kwargs))
                except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
                    if hasattr(error, "add_note") and not isinstance(error, torch.OutOfMemoryError):  # Python 3.11
                        error.add_note(
                            f"Layer {self._name} raised this when it ran again in the backward. If it changes objects "
                            f"that it is given, it cannot be recomputed, {self._remedy}"
                        )
                    raise
                if position >= 0:
                    self._segments.save(result, None)
        if record.is_other:
            raise RuntimeError(
                f"layer {self._name} gave other values when it ran again in the backward than in its forward: it draws "
                f"from a random generator of its own, or depends on something else that changes. So it cannot be "
                f"recomputed, {self._remedy}"
            )
        self._repeats = self._repeats or record.compares
        return result

    def _frame(self) -> AbstractContextManager[None]:
        """Both forwards run inside a frame, the first one too where the loop calls `module.forward`."""
        frame = self._modules[0].__dict__.get(FRAME)
        return nullcontext() if frame is None else frame()

    def _explaining(self, record: Record) -> AbstractContextManager[Any]:
        """Inside: a tensor saved for the backward that is not recomputed raises an error with the layer's name.

        So does one that the forward that ran again saved, and then wrote to.
        """
        hooks = top_hooks()
        if hooks is None:
            return nullcontext()
        pack, unpack = hooks

        @wraps(pack)
        def numbered(tensor: torch.Tensor) -> tuple[int, Any]:
            return record.save(tensor), pack(tensor)

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


@contextmanager
def _own_errors(record: Record) -> Iterator[None]:
    """A forward may catch an error of a hook, as TorchScript and einx do. Raise it: it ends a recomputation early."""
    hooks = top_hooks()
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    raised: list[BaseException] = []

    @wraps(pack)
    def noting(tensor: torch.Tensor) -> Any:
        if raised:  # the forward caught it and tried something else
            raise raised[0]
        record.versions.append(tensor._version)
        try:
            return pack(tensor)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        with torch.autograd.graph.saved_tensors_hooks(noting, unpack):
            yield
    except Exception:
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


def _as_it_is(leaf: Any) -> Any:
    """A mapping that torch does not take apart, as the encodings of transformers: a layer may put its results there."""
    return copy.copy(leaf) if isinstance(leaf, UserDict) else leaf


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
    if isinstance(before, Layer) and before._parts.strict:
        module.__dict__["forward"] = before.__wrapped__
        if module.forward == type(module).forward.__get__(module):
            del module.__dict__["forward"]
    if tiles > 1:
        parts = Parts(tiles, dim, strict=True)
        module.__dict__["forward"] = Layer(module, "", module.forward, "recompute", parts, Activations())
    return module
