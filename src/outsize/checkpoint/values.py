"""Plain values as JSON and back, exactly: what JSON cannot say is written as an object with one key that starts with $.

`$tuple` (a list), `$items` (a dict with keys that are not plain strings, as pairs), `$counter` (a `Counter`, as pairs),
`$float` ("inf", "-inf", "nan") and `$tensor` (whatever the caller makes of a tensor). No pickle on either way.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

MAX_DEPTH = 64
MAX_INT_BITS = 2048
"""Python turns integers of this size into text and back whatever its limit on digits (640 at least)."""

INLINE_NUMEL = 256
"""Elements of a tensor that may stand in the manifest itself: a step count, a learning rate."""

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8)
DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (*_FLOATS, *_INTEGERS, torch.bool, torch.complex64, torch.complex128)
}

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

TensorToJson = Callable[[str, torch.Tensor], Any]
TensorFromJson = Callable[[Any], Any]


def encode(value: Any, path: str, tensor: TensorToJson, depth: int = 0) -> Any:
    """`value` as JSON. Raises `TypeError` that names the path of whatever cannot be stored exactly."""
    if depth > MAX_DEPTH:
        raise TypeError(f"{path} is nested more than {MAX_DEPTH} deep, or holds itself; it cannot be saved")
    if type(value) is int and value.bit_length() > MAX_INT_BITS:
        raise ValueError(f"{path} is an integer of {value.bit_length()} bits; at most {MAX_INT_BITS} can be saved")
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if type(value) is list:
        return [encode(each, f"{path}[{at}]", tensor, depth + 1) for at, each in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(each, f"{path}[{at}]", tensor, depth + 1) for at, each in enumerate(value)]}
    if type(value) in (dict, OrderedDict, Counter):
        return _encode_dict(value, path, tensor, depth)
    if isinstance(value, torch.dtype) and value in DTYPE_NAMES:
        return {"$dtype": DTYPE_NAMES[value]}
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.dtype not in DTYPE_NAMES or value.device.type == "meta":
            raise TypeError(f"{path} is a {value.layout} tensor of {value.dtype} on {value.device}; it cannot be saved")
        return {"$tensor": tensor(path, value.detach())}
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which outsize.save does not store: it keeps "
        f"dict, list, tuple, str, int, float, bool, None and torch.Tensor, and never pickles. Convert it first"
    )


def _encode_dict(value: dict[Any, Any], path: str, tensor: TensorToJson, depth: int) -> Any:
    for key in value:
        if type(key) not in (str, int, bool):
            raise TypeError(f"{path} has the key {key!r} of type {type(key).__name__}; keys must be str or int")
        if type(key) is int:
            encode(key, f"a key of {path}", tensor, depth)
    pairs = [(key, encode(each, f"{path}[{key!r}]", tensor, depth + 1)) for key, each in value.items()]
    if type(value) is Counter:
        return {"$counter": [list(pair) for pair in pairs]}
    if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$items": [list(pair) for pair in pairs]}


def decode(value: Any, tensor: TensorFromJson) -> Any:
    """What `encode` was given. Raises `ValueError` or `TypeError` for what `encode` cannot have made."""
    if isinstance(value, list):
        return [decode(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value)) if len(value) == 1 else ""
    if mark == "$float":
        return float(value[mark])
    if mark == "$tuple":
        return tuple(decode(each, tensor) for each in value[mark])
    if mark == "$items":
        return {key: decode(each, tensor) for key, each in value[mark]}
    if mark == "$counter":
        return Counter({key: decode(each, tensor) for key, each in value[mark]})
    if mark == "$dtype":
        if value[mark] not in DTYPES:
            raise ValueError(f"unknown dtype {value[mark]!r}")
        return DTYPES[value[mark]]
    if mark == "$tensor":
        return tensor(value[mark])
    if any(key.startswith("$") for key in value):
        raise ValueError(f"unknown mark among {sorted(value)}")
    return {key: decode(each, tensor) for key, each in value.items()}


def inline(path: str, tensor: torch.Tensor) -> Any:
    """A small tensor in the manifest itself."""
    if tensor.numel() > INLINE_NUMEL or tensor.is_complex():
        raise TypeError(f"{path} is a tensor of {tensor.numel()} elements of {tensor.dtype}; only small ones are saved")
    values = [encode(each, path, inline) for each in tensor.reshape(-1).tolist()]
    return {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "values": values}


def from_inline(value: Any) -> torch.Tensor:
    numbers = [decode(each, from_inline) for each in value["values"]]
    return torch.tensor(numbers, dtype=DTYPES[value["dtype"]], device="cpu").reshape(value["shape"])
