import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.planning.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1),
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("8GiB", 8 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1.5 GiB", 3 * 2**29),
        ("  2 tb ", 2 * 10**12),
        ("64KIB", 65536),
        ("3 kB", 3000),
        ("0.001 kB", 1),
        ("1 PiB", 2**50),
        ("1.9", 1),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_are_read_exactly(value: int | str, size: int) -> None:
    assert parse_bytes(value, "host_memory") == size


NUMBERS = [0, -1, True, False, math.nan, math.inf]
TEXTS = ["", " ", "0", "0 GiB", "0.5", "-1GiB", "+1GiB", "nan", "inf", "GiB", "8G", "8 gigs", "1e9", "1,5GB", "1.GB"]
ODD_TEXTS = ["1 2 GB", "8GiB\x00", "\u0663GiB", "9" * 5000]


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS, *ODD_TEXTS])
def test_what_is_no_positive_size_is_refused_with_name_value_and_remedy(value: Any) -> None:
    with pytest.raises(ValueError, match=r"disk_space is .*'8GiB'") as error:
        parse_bytes(value, "disk_space")
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [None, 1.5, 8e9, b"8GiB", [8], {}, object()])
def test_other_types_are_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"host_memory is .*'8GiB'"):
        parse_bytes(value, "host_memory")


def test_integers_of_other_libraries_are_integers() -> None:
    class Int64:
        def __index__(self) -> int:
            return 4096

    value: Any = Int64()
    assert parse_bytes(value, "host_memory") == 4096


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (1_288_490_189, "1.2 GiB"),
        (8 * 2**30, "8.0 GiB"),
        (2**50, "1.0 PiB"),
        (5000 * 2**50, "5000.0 PiB"),
        (-(3 * 2**19), "-1.5 MiB"),
    ],
)
def test_sizes_are_written_with_one_decimal(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1, 2**62))
def test_what_is_written_is_read_back_to_its_last_digit(size: int) -> None:
    text = format_bytes(size)
    number, unit = text.split()
    assert abs(parse_bytes(text, "size") - size) <= 0.05 * parse_bytes(f"1 {unit}", "unit") + 1
    assert float(number) < 1024 or unit == "PiB"


@given(st.text())
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_bytes(text, "size") > 0
