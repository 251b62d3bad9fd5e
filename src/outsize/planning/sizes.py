"""Numbers of bytes, as people write and read them."""

import math
import operator
import re
from fractions import Fraction
from typing import Final

_UNIT_BYTES: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_SIZE: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)", re.IGNORECASE)
_ACCEPTED: Final = (
    "write a positive number of bytes as an int or as a string such as '4096', '512 MiB', '8GiB' or '1.5GB' "
    "(kB, MB, GB, TB, PB are powers of 1000; KiB, MiB, GiB, TiB, PiB powers of 1024)"
)


def parse_bytes(value: int | str, name: str) -> int:
    """The number of bytes that `value` stands for, rounded down to a whole one; `name` is what an error calls it.

    Units are taken in upper or lower case. Raises `ValueError` for what is not a positive size and `TypeError` for what
    is neither an integer nor a string.
    """
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise _not_a_size(value, name)
    size = _parse_text(value, name) if isinstance(value, str) else _as_int(value, name)
    if size <= 0:
        raise _not_a_size(value, name)
    return size


def format_bytes(n: int) -> str:
    """`n` bytes in the largest binary unit that leaves at least 1: "1.2 GiB"."""
    if abs(n) < 1024:
        return f"{n} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        number = f"{n / _UNIT_BYTES[unit.lower()]:.1f}"
        # Compare after rounding: 1048575 bytes are "1.0 MiB", not "1024.0 KiB".
        if abs(float(number)) < 1024:
            break
    return f"{number} {unit}"


def _parse_text(text: str, name: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNIT_BYTES:
        raise _not_a_size(text, name)
    return math.floor(Fraction(match[1]) * _UNIT_BYTES[match[2].lower()])


def _as_int(value: int, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}: {_ACCEPTED}") from None


def _not_a_size(value: object, name: str) -> ValueError:
    return ValueError(f"{name} is {value!r}, which is not a size: {_ACCEPTED}")
