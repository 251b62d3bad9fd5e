"""When the gradients of several ranks are reduced, and what is known of them over all slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, final

import torch

from outsize.move.comm import Ranks, combined
from outsize.move.memory import Ledger
from outsize.move.shard import UnitShard
from outsize.run.activations import in_backward
from outsize.run.buffers import Buffers
from outsize.run.choice import Choice
from outsize.run.parameters import grad_of

if TYPE_CHECKING:
    from outsize.run.collecting import Collector, WholeGradients
    from outsize.run.unit import Unit


@final
class Reduction:
    """What the gradients of all units share: the ranks, whether backwards reduce now, and the norms over all slices."""

    # Note [Norms over slices]
    # The norm of a slice is taken when the slice is laid to rest. Whoever asks for a norm makes all ranks add up the
    # squares of all gradients at rest, once; until a gradient changes, the sums serve every further question.

    # Note [Units that some ranks do not use]
    # Where ranks use different units by design (a mixture of experts, unused="sync"), every unit is reduced, in the
    # order of the model from its end. A unit is when this rank has all its gradients, or those of a unit before it in
    # the model, or when the backward is over. A rank without a gradient gives zeros; the ranks tell each other which
    # parameters have one. A gradient that comes after its unit's turn is reduced when the backward is over.

    def __init__(
        self,
        ranks: Ranks,
        split: bool,
        dtype: torch.dtype | None,
        ledger: Ledger,
        choice: Choice,
        adds_up: bool = False,
    ) -> None:
        """`adds_up`: the budget holds the whole gradients of the model."""
        self.ranks = ranks
        self._choice = choice
        self.split = split
        self.sync = ranks.model.sync  # see Note [Units that some ranks do not use]
        self.buffers = Buffers(ledger)
        self.dtype = dtype
        self.reducing = True
        self._adds_up = adds_up and not self.sync
        self.units: Sequence[Unit] = ()
        self.collectors: list[Collector] = []
        self._due = False  # whether something may have been collected since all was reduced
        self._stale = False
        self._passed = 0  # units, from the end of the model, that this backward has reduced
        self.dropping = False  # whether what other ranks have is worth nothing: the backward was interrupted
        self._going: deque[tuple[WholeGradients, Callable[[], None]]] = deque()  # what lays the reduced to rest

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in the block collect gradients and reduce nothing, if the budget holds them; not under `sync`."""
        before, self.reducing = self.reducing, self.reducing and not self._adds_up
        try:
            yield
        finally:
            self.reducing = before

    # Note [A rank that waits comes to nothing else]
    # Under `sync` a rank may be further in its backward than the others, and one of those may need a gather of this
    # round to which this rank has not come, or another round (Note [Units in the order of the model] in
    # run/streamer.py), before it comes to the reduction that this rank waits for. It says so in the store, and this
    # rank goes on without waiting, with more memory in use. So does one whose part goes on among the copies of the
    # model: those may wait for ranks that are over with their backward, and say so too.

    def launched(self, whole: WholeGradients, lay_down: Callable[[], None]) -> None:
        """A reduction has started; `lay_down` waits for it. It runs behind the backward of the next unit."""
        self.flush()
        self._going.append((whole, lay_down))

    def flush(self) -> None:
        """Wait for the reductions that are on their way."""
        while self._going:
            whole, lay_down = self._going[0]
            if self.sync and in_backward() and not whole.over_unless_wanted():
                return
            self._going.popleft()
            lay_down()

    def collected(self) -> None:
        """A unit has something to reduce."""
        self._due = self._due or not self.sync or not in_backward()  # whose end says so under `sync`, on every rank

    @contextmanager
    def ending(self, interrupted: bool) -> Iterator[None]:
        """A backward ends: on this rank before the block, on every rank after it. An interrupted one ended early, not
        at the same place on each."""
        self.dropping = self.sync and interrupted  # also of what the next reductions lay down
        try:
            for collector in self.collectors if self.dropping else ():
                collector.abandon()
            self.unit_complete(0)
            yield
            if self.sync:
                self._passed = 0
                self._due = self._due or not interrupted
            if self.sync and not interrupted:
                self.complete()
            self.flush()
        finally:
            self.dropping = False

    def unit_complete(self, unit: int) -> None:
        """This rank has all gradients of the unit; see Note [Units that some ranks do not use]."""
        while self.sync and self._passed < len(self.collectors) - unit:
            self._passed += 1
            self.collectors[-self._passed].reduce(all_of_it=True)

    def changed(self) -> None:
        """A gradient at rest is another one now."""
        self._stale = True

    def complete(self) -> None:
        """Reduce what no backward has reduced yet, and make every norm that of the whole gradient."""
        if self._due:
            self._due = False
            self.flush()  # what is left is added to what was reduced
            for collector, is_left in zip(self.collectors, self._left(), strict=True):
                if is_left:
                    collector.reduce(all_of_it=self.sync)
        self.flush()
        self.ranks.await_device()
        if not self._stale:
            return
        self._stale = False
        if not self._parted:
            return
        grads = [grad for collector in self.collectors for grad in collector.at_rest()]
        if not grads:
            return
        unknown = [grad for grad in grads if grad.own_norm is None]
        if unknown:  # read from the device at once
            norms = torch.stack([grad.norms[2.0].detach().double() for grad in unknown]).cpu()
            for grad, norm in zip(unknown, norms, strict=True):
                grad.own_norm = norm
        squares = torch.stack([grad.own_norm.square() for grad in grads if grad.own_norm is not None])
        total = self._sum(squares, [grad.repeated for grad in grads]).sqrt_().to(grads[0].norms[2.0].device)
        for grad, norm in zip(grads, total, strict=True):
            grad.norms = {2.0: grad.norms[2.0].copy_(norm)}

    def _left(self) -> list[bool]:
        """By unit whether something was collected that is not reduced; under `sync` on any rank."""
        left = [collector.collecting for collector in self.collectors]
        return [*map(bool, combined(self.ranks.in_stage() if self.sync else (), left, "gradients", "max"))]

    def check_step(self, told: Mapping[str, str]) -> None:
        """Raise on every rank of a stage unless all are about to do the same step; `told` says what, by parameter.

        If any has measured activations anew, all choose anew."""
        news = self._choice.outdated
        for group in self.ranks.in_stage():
            news = group.agree_on_step(told, news)
        if news:
            self._choice.choose_alike(self.ranks.alike())

    @property
    def _parted(self) -> bool:
        """Whether other ranks have other parts of the parameters."""
        return self.split or self.ranks.tensor is not None

    def _sum(self, values: torch.Tensor, repeated: list[bool]) -> torch.Tensor:
        """Sums over all parts of the parameters; those that are `repeated` lie whole on every tensor-parallel rank."""
        if self.split:
            self.ranks.combine(values, "norms")
        tensor = self.ranks.tensor
        if tensor is not None:
            if tensor.rank:
                values.masked_fill_(torch.tensor(repeated, device="cpu"), 0.0)
            tensor.combine(values, "norms")
        return values

    def _over_parts(self, value: torch.Tensor, op: str) -> torch.Tensor:
        """The largest or smallest over all parts of a parameter."""
        value = value.cpu().view(1)
        if self.split:
            self.ranks.combine(value, "norms", op)
        return (value if self.ranks.tensor is None else self.ranks.tensor.combine(value, "norms", op))[0]

    def norm(self, own: torch.Tensor, order: float, repeated: bool) -> torch.Tensor:
        """The norm of this order of a whole gradient, of which this rank has the elements `own`; [] fp32."""
        wide = own.double()
        if abs(order) == inf:
            nothing = torch.tensor(max(-order, 0.0), dtype=torch.float64, device="cpu")
            part = torch.linalg.vector_norm(wide, order) if wide.numel() else nothing
            return self._over_parts(part, "max" if order > 0 else "min").float()
        if not self._parted:
            return torch.linalg.vector_norm(wide, order).float()  # type: ignore[no-any-return]
        power = (wide != 0).sum().double() if order == 0 else wide.abs().pow(order).sum()
        total = self._sum(power.cpu().view(1), [repeated])[0]
        return (total if order == 0 else total.pow(1 / order)).float()

    def all_finite(self, own: torch.Tensor) -> bool:
        """Whether a whole gradient is finite, of which this rank has the elements `own`."""
        return bool(self._over_parts(torch.isfinite(own).all().long(), "min"))

    def present(self) -> int:
        """How many parameters of this rank have a gradient that can be clipped."""
        dense = [unit for unit in self.units if unit.shard.rows is None]
        return sum(grad_of(param) is not None for unit in dense for param in unit.parameters.values())

    def show_in_stage(self, param: torch.Tensor) -> None:
        """A gradient that is kept in `param.grad`: its norm becomes a part of that of all stages."""
        grad = param.grad
        if self.ranks.stages is not None and type(grad) is torch.Tensor:
            shown = grad.as_subclass(StageGrad)
            shown.reduction = self
            param.grad = shown

    def over_stages(self, norm: torch.Tensor, order: float) -> torch.Tensor:
        """The norm of the gradients of all stages of a pipeline, from that of this stage's ([])."""
        assert self.ranks.stages is not None
        own = norm.detach().double().cpu().view(1)
        if abs(order) == inf:
            total = self.ranks.stages.combine(own, "norms", "max" if order > 0 else "min")
        elif order == 0:
            total = self.ranks.stages.combine(own, "norms")
        else:
            total = self.ranks.stages.combine(own.pow(order), "norms").pow(1 / order)
        return total[0].to(norm.device, norm.dtype)

    def in_every_stage(self, good: bool) -> bool:
        """Whether it is so in every stage of a pipeline."""
        stages = self.ranks.stages
        return good if stages is None else bool(*combined([stages], [good], "agreement on gradients"))

    def check_stages(self, bad: Sequence[str]) -> tuple[str, int] | None:
        """Agree on the step with the other stages of a pipeline. The name and the rank of a gradient that is `bad`
        where there is one in another stage."""
        stages = self.ranks.stages
        if stages is None or not stages.agree_on_step({}, bool(bad)):
            return None
        said = zip(stages.collect(list(bad[:1]), "step"), stages.members, strict=True)
        return next((names[0], rank) for names, rank in said if names)

    def everywhere(self, good: Sequence[bool]) -> list[bool]:
        """Which of some things are so on every rank."""
        return [*map(bool, combined([self.ranks], good, "agreement on gradients"))]

    def whole(self, shard: UnitShard, name: str, own: torch.Tensor, per: int = 1) -> torch.Tensor:
        """The whole gradient, 1-D, of which this rank has the elements `own`, or else one value for `per` of them."""
        if shard.ranks == 1:
            return own
        slot = shard.whole_slots[name]
        value = torch.zeros(slot.numel // per, dtype=torch.float64, device="cpu")
        first = shard.slots[name].first // per
        value[first : first + own.numel()] = own.double().cpu()
        return self.ranks.combine(value, "gradients").to(own.dtype)


# Note [One norm over all stages]
# `clip_grad_norm_` and `get_total_norm` ask each gradient for its norm, stack these, and take the norm of the stack.
# Where the stack has the norms of all gradients of a rank, the other stages have the rest, and the last norm is over
# all stages. So every rank must ask for it. The norm of fewer gradients, and all else, is as with plain tensors.


@final
class StageNorm(torch.Tensor):
    """The norm of one gradient ([]), or of several, stacked ([gradients]). See Note [One norm over all stages]."""

    order: float
    gradients: int
    reduction: Reduction

    @staticmethod
    def of(norm: torch.Tensor, order: float, gradients: int, reduction: Reduction) -> StageNorm:
        self: StageNorm = norm.as_subclass(StageNorm)
        self.order, self.gradients, self.reduction = order, gradients, reduction
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        if func is torch.Tensor.to:
            return cls.of(result, args[0].order, args[0].gradients, args[0].reduction)
        if func is torch.stack:
            first = next(each for each in args[0] if isinstance(each, cls))
            return cls.of(result, first.order, len(args[0]), first.reduction)
        if func is torch.linalg.vector_norm and _order(*args, **(kwargs or {})) == args[0].order:
            whole = args[0].gradients == args[0].reduction.present()
            return args[0].reduction.over_stages(result, args[0].order) if whole else result
        return result


def _order(_: Any, ord: float = 2.0, *__: Any, **___: Any) -> float:
    return float(ord)


@final
class StageGrad(torch.Tensor):
    """A gradient that autograd keeps on the device, whose norm is a part of that of all stages."""

    reduction: Reduction

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        if func is torch.linalg.vector_norm and isinstance(args[0], cls):
            return StageNorm.of(result, _order(*args, **(kwargs or {})), 1, args[0].reduction)
        if func is torch._foreach_norm:
            order = _order(*args, **(kwargs or {}))
            of = next(each for each in args[0] if isinstance(each, cls)).reduction
            return [StageNorm.of(norm, order, 1, of) for norm in result]
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            ours = [each for each in args[0] if isinstance(each, cls)]
            if not any(hasattr(each, "_home") for each in args[0]):  # gradients at rest have asked already
                args[1].fill_(0.0 if ours[0].reduction.in_every_stage(not args[1].item()) else 1.0)
        return result
