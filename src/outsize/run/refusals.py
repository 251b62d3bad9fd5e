"""What is said to a program that uses a parameter where it may not."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NoReturn


def read_at_rest(name: str, tier: str, operation: str) -> NoReturn:
    found = f"parameter {name!r} is at rest ({tier}) and {operation!r} "
    if _is_being_wrapped():
        raise RuntimeError(
            f"{found}cannot read it: do not wrap a prepared model (DistributedDataParallel, FSDP), outsize "
            f"averages the gradients over ranks itself. Accelerate and transformers wrap it: use "
            f"outsize.integrations.accelerate.prepare, or outsize.integrations.transformers.Trainer"
        )
    raise RuntimeError(
        f"{found}needs its values; outside a forward of the model read it inside `with outsize.gathered(param):`. "
        f"For a forward, call the module itself, not its `forward`; where a library does not, compute the loss inside "
        f"`with outsize.gathered(model):`. (Checkpoints: outsize.save; weights: outsize.export; device, dtype and "
        f"shape are fixed by prepare)"
    )


def use_by_other_thread(name: str, operation: str) -> NoReturn:
    raise RuntimeError(
        f"{operation!r} uses parameter {name!r} while another thread uses the model; one thread at a time may: open "
        f"`with outsize.gathered(param):` around it, which waits for its turn"
    )


def write(name: str, operation: str, in_forward: bool) -> NoReturn:
    how = f" by {operation!r}" if operation else ""
    raise RuntimeError(
        f"parameter {name!r} is written in place{how} outside `outsize.gathered(param, modify=True)`, where"
        f" the change would be lost; wrap {'the forward' if in_forward else 'it'} in that context"
    )


def torchscript() -> NoReturn:
    raise RuntimeError(
        "torch.jit.script and torch.jit.trace would read parameters of a prepared model as they lie there: give "
        "them a plain copy, copy.deepcopy(model) inside `with outsize.gathered(model):`"
    )


def copy(name: str, what: str) -> NoReturn:
    raise RuntimeError(
        f"parameter {name!r} is managed by outsize, so it cannot be {what}: its values may be on disk. copy.deepcopy "
        f"works inside `with outsize.gathered(model):` and gives a plain model; checkpoints are for outsize.save, "
        f"weights for outsize.export"
    )


def call_of_a_copy(kind: str) -> NoReturn:
    raise RuntimeError(
        f"this {kind} has the attributes of a module of a prepared model (copy.copy, or a library's clone of modules), "
        f"and its call would compute that module. Take copy.deepcopy(model) inside `with outsize.gathered(model):`, "
        f"which gives a plain model; or call the prepared one by torch.func.functional_call there"
    )


def vmap(name: str) -> NoReturn:
    raise RuntimeError(
        f"torch.vmap takes {name!r} apart where outsize cannot see it, and its values may be on disk: pass a "
        f"copy, `{name}.clone()`, made in a forward or inside `with outsize.gathered(param):`"
    )


def gradient_of_tiles(name: str) -> NoReturn:
    raise RuntimeError(
        f"torch.autograd.grad cannot give the gradient of {name!r}, which does not fit the budget and is used in "
        f"tiles: call backward(), and read it inside `with outsize.gathered(param, grads=True):`; or raise the budget, "
        f"or open `outsize.gathered(param)` around the forward and this call"
    )


def set_data(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name}.data cannot be replaced: the parameter's memory belongs to outsize. Write its values with `with "
        f"outsize.gathered(param, modify=True): param.copy_(...)`. Device and dtype are set by "
        f"outsize.prepare(device=..., compute_dtype=...). To give it another shape, call outsize.release(model). "
        f"A library that does so in its first forward (ActNorm): run one before outsize.prepare"
    )


def _is_being_wrapped() -> bool:
    """Whether torch's own data parallelism asks, and not what runs inside it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        place = str(frame.f_globals.get("__name__"))
        if place.startswith(("torch.nn.parallel.", "torch.distributed.fsdp.")):
            return True
        if not place.startswith(("outsize.", "torch.")):
            break
        frame = frame.f_back
    return False
