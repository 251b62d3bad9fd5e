"""Checksums of pages: CRC-32C."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outsize import _native

PAGE = 4096

pytestmark = pytest.mark.usefixtures("instruction_set")

# The fixture sets the same instruction set for every example.
many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def crc32c(data: bytes) -> int:
    """The definition, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def bytes_of(data: bytes, offset: int = 0) -> Tensor:
    """The bytes at an address that is `offset` past a multiple of 64."""
    memory = torch.zeros(64 + offset + len(data), dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + offset
    memory[start : start + len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return memory[start : start + len(data)]


def random_bytes(nbytes: int) -> Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))


def raw(memory: Tensor) -> bytes:
    return bytes(memory.tolist())


def sums_tensor(sums: list[int]) -> Tensor:
    return torch.tensor(sums, dtype=torch.int64).to(torch.int32)  # torch computes little with uint32


def pages(memory: Tensor, page_bytes: int) -> list[bytes]:
    return [raw(page) for page in memory.split(page_bytes)] if memory.numel() else []


def page_sums(memory: Tensor, page_bytes: int) -> list[int]:
    guard = 0x5EED
    sums = torch.full((-(-memory.numel() // page_bytes) + 1,), guard, dtype=torch.int32)
    _native.page_sums(memory.data_ptr(), memory.numel(), page_bytes, sums.data_ptr())
    assert sums[-1] == guard
    return [each & 0xFFFFFFFF for each in sums[:-1].tolist()]


def join_sums(sums: list[int], page_bytes: int, last_bytes: int, group: int) -> list[int]:
    source, guard = sums_tensor(sums), 0x5EED
    out = torch.full((-(-len(sums) // group) + 1,), guard, dtype=torch.int32)
    _native.join_sums(source.data_ptr(), len(sums), page_bytes, last_bytes, group, out.data_ptr())
    assert out[-1] == guard
    return [each & 0xFFFFFFFF for each in out[:-1].tolist()]


# The first four are those of RFC 3720, B.4.
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"a", 0xC1D04330),
    ],
)
def test_the_published_checksums_are_met(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected
    assert page_sums(bytes_of(data), PAGE) == [expected]
    assert page_sums(bytes_of(data * 9), len(data)) == [expected] * 9


def test_every_short_length_at_every_alignment_of_a_word() -> None:
    data = raw(random_bytes(300))
    for nbytes in range(1, 301):
        memory = bytes_of(data[:nbytes], nbytes % 8)
        assert page_sums(memory, PAGE) == [crc32c(data[:nbytes])]
    for offset in range(64):
        assert page_sums(bytes_of(data, offset), 67) == [crc32c(data[at : at + 67]) for at in range(0, 300, 67)]


@many
@given(data=st.binary(min_size=1, max_size=2000), page_bytes=st.integers(1, 600), offset=st.integers(0, 63))
def test_every_page_has_its_own_checksum(data: bytes, page_bytes: int, offset: int) -> None:
    memory = bytes_of(data, offset)
    assert page_sums(memory, page_bytes) == [crc32c(page) for page in pages(memory, page_bytes)]


@pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE, 4 * PAGE, 9 * PAGE, 9 * PAGE + 1, 23 * PAGE - 1])
def test_checksums_are_those_of_an_independent_implementation(nbytes: int) -> None:
    google_crc32c = pytest.importorskip("google_crc32c")
    memory = random_bytes(nbytes)
    for page_bytes in (512, PAGE, 2 * PAGE + 8, 1 << 40):
        assert page_sums(memory, page_bytes) == [google_crc32c.value(page) for page in pages(memory, page_bytes)]


def test_no_memory_has_no_pages() -> None:
    _native.page_sums(0, 0, PAGE, 0)
    _native.join_sums(0, 0, PAGE, 0, 2, 0)


def test_every_flipped_bit_is_found_in_its_page() -> None:
    memory, page_bytes = random_bytes(6 * 75 + 20), 75
    sums = page_sums(memory, page_bytes)
    for at in range(memory.numel()):
        for bit in range(8):
            memory[at] ^= 1 << bit
            found = page_sums(memory, page_bytes)
            assert [one != other for one, other in zip(found, sums, strict=True)].index(True) == at // page_bytes
            memory[at] ^= 1 << bit
    assert page_sums(memory, page_bytes) == sums


@many
@given(
    data=st.binary(min_size=1, max_size=1500),
    page_bytes=st.integers(1, 200),
    group=st.one_of(st.integers(1, 12), st.just(1 << 62)),
)
def test_joined_checksums_are_those_of_the_joined_pages(data: bytes, page_bytes: int, group: int) -> None:
    sums = [crc32c(data[at : at + page_bytes]) for at in range(0, len(data), page_bytes)]
    whole = page_bytes * group
    expected = [crc32c(data[at : at + whole]) for at in range(0, len(data), whole)]
    last_bytes = len(data) - (len(sums) - 1) * page_bytes
    assert join_sums(sums, page_bytes, last_bytes, group) == expected


def test_real_pages_are_joined() -> None:
    memory = random_bytes(37 * PAGE + 100)
    joined = join_sums(page_sums(memory, PAGE), PAGE, 100, 16)
    assert joined == page_sums(memory, 16 * PAGE)
    assert join_sums(joined, 16 * PAGE, 5 * PAGE + 100, 3) == page_sums(memory, memory.numel())


def mirrored(value: int) -> int:
    return int(f"{value:032b}"[::-1], 2)


def product(a: int, b: int) -> int:
    """Of two polynomials, modulo Castagnoli's; the highest power is in the highest bit."""
    result = 0
    for bit in reversed(range(32)):
        result <<= 1
        result ^= 0x11EDC6F41 if result >> 32 else 0
        result ^= a if b >> bit & 1 else 0
    return result


def power(exponent: int) -> int:
    """x ** exponent"""
    if exponent == 0:
        return 1
    root = power(exponent // 2)
    return product(product(root, root), 2 if exponent % 2 else 1)


@pytest.mark.parametrize("nbytes", [1, PAGE, (1 << 31) - 1, 1 << 31, (1 << 32) + 5, (1 << 63) + 3, (1 << 64) - 1])
def test_pages_of_any_size_are_joined(nbytes: int) -> None:
    first, second, third = 0xE3069283, 0x8A9136AA, 0xC1D04330
    pair = mirrored(product(mirrored(first), power(8 * nbytes))) ^ second
    assert join_sums([first, second, third], nbytes, 1, 2) == [pair, third]
    assert join_sums([first, second], nbytes, nbytes, 2) == [pair]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda at: _native.page_sums(0, 1, PAGE, at), "address is a null address"),
        (lambda at: _native.page_sums(at, 1, PAGE, 0), "sums is a null address"),
        (lambda at: _native.page_sums(at, 1, 0, at), "page_bytes is 0"),
        (lambda at: _native.join_sums(0, 1, PAGE, 1, 1, at), "sums is a null address"),
        (lambda at: _native.join_sums(at, 1, PAGE, 1, 1, 0), "out is a null address"),
        (lambda at: _native.join_sums(at, 1, 0, 1, 1, at), "page_bytes is 0"),
        (lambda at: _native.join_sums(at, 1, PAGE, 1, 0, at), "group is 0"),
        (lambda at: _native.join_sums(at, 1, PAGE, 0, 1, at), "last_bytes is 0; it must be from 1 to 4096"),
        (lambda at: _native.join_sums(at, 1, PAGE, PAGE + 1, 1, at), "last_bytes is 4097; it must be from 1 to 4096"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[int], object], message: str) -> None:
    memory = torch.zeros(64)
    with pytest.raises(ValueError, match=message):
        call(memory.data_ptr())
