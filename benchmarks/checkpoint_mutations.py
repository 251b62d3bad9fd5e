"""Ways in which a checkpoint's folder comes to be damaged: by a drive, by an accident, by a hand."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outsize.checkpoint.manifest import MANIFEST_NAME

Damage = Callable[[Path, random.Random], str]
"""Damages one file; says what it did."""

DEEP = 100_000
_DEEP_LIST, _DEEP_OBJECT, _LONG = "deep list", "deep object", "long number"
_PLACEHOLDERS = {
    f'"{_DEEP_LIST}"': "[" * DEEP + "]" * DEEP,
    f'"{_DEEP_OBJECT}"': '{"a":' * DEEP + "1" + "}" * DEEP,
    f'"{_LONG}"': "9" * 10_000,
}
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    7,
    4096,
    1 << 31,
    (1 << 62) - 1,
    1 << 63,
    10**400,
    1.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0" * 100_000,
    "model.bin",
    "manifest.json",
    "../origin/model.bin",
    "/etc/passwd",
    "sub/model.bin",
    ".",
    "\x00",
    "\ud800",
    "float32",
    "bool",
    "complex128",
    "float8_e5m2",
    [],
    {},
    [[]],
    [0, (1 << 61)],
    [1 << 61] * 300,
    {"$tensor": {"file": "model.bin", "offset": 0, "dtype": "uint8", "shape": [5056]}},
    {"$tensor": {"dtype": "float32", "shape": [1 << 40], "values": []}},
    {"$tuple": 3},
    {"$items": [[[], 1]]},
    {"$float": "one"},
    {"$counter": [["a", "b"]]},
    {"$pickle": "x"},
    _DEEP_LIST,
    _DEEP_OBJECT,
    _LONG,
)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in a JSON tree but the root."""
    found: list[tuple[Any, Any]] = []
    stack = [tree]
    while stack:
        value = stack.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            found.append((value, key))
            stack.append(value[key])
    return found


def odd_json(text: str, draw: random.Random) -> tuple[str, str]:
    """The manifest with one to three values that it should not have, and what was done."""
    tree = json.loads(text)
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        spots = places(tree)
        if not spots:
            break
        container, key = draw.choice(spots)
        done.append(_change(container, key, spots, draw))
    changed = json.dumps(tree)
    for placeholder, content in _PLACEHOLDERS.items():
        changed = changed.replace(placeholder, content)
    if draw.random() < 0.1:
        changed, said = _with_name_twice(changed, draw)
        done.append(said)
    return changed, ", ".join(done)


def _change(container: Any, key: Any, spots: list[tuple[Any, Any]], draw: random.Random) -> str:
    kind = draw.choice(("replace", "replace", "replace", "shift", "remove", "rename", "swap", "repeat"))
    value = container[key]
    if kind == "shift" and type(value) is int:
        container[key] = value + draw.choice((-4096, -64, -1, 1, 64, 4096))
    elif kind == "remove":
        del container[key]
    elif kind == "rename" and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
    elif kind == "swap":
        other, where = draw.choice(spots)
        container[key], other[where] = json.loads(
            json.dumps([other.get(where) if isinstance(other, dict) else other[where], value])
        )
    elif kind == "repeat" and isinstance(container, list):
        container.append(value)
    else:
        container[key] = draw.choice(ODD_VALUES)
        return f"{key!r} = {str(container[key])[:40]!r}"
    return f"{kind} {key!r}"


def _with_name_twice(text: str, draw: random.Random) -> tuple[str, str]:
    """Give one object a second entry of a name that it has."""
    at = draw.choice([index for index, char in enumerate(text) if char == "{"])
    end = text.find('":', at)
    if end < 0 or text[at + 1 : at + 2] != '"':
        return text, "nothing more"
    return f'{text[: at + 1]}{text[at + 1 : end]}": 3, {text[at + 1 :]}', f"a second {text[at + 2 : end][:40]!r}"


def flip(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return f"flip at {at}"


def garble(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at, count = draw.randrange(len(content)), draw.randint(1, 64)
    content[at : at + count] = draw.randbytes(len(content[at : at + count]))
    path.write_bytes(content)
    return f"{count} random bytes at {at}"


def drop(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at, count = draw.randrange(len(content)), draw.choice((1, 1, 3, 100, 4096))
    del content[at : at + count]
    path.write_bytes(content)
    return f"{count} bytes less at {at}"


def insert(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    content[at:at] = draw.choice((b"\x00", b"{", b'"', b"0", b"\xff", b"\xc3", draw.randbytes(30)))
    path.write_bytes(content)
    return f"bytes more at {at}"


def truncate(path: Path, draw: random.Random) -> str:
    nbytes = draw.randrange(path.stat().st_size)
    os.truncate(path, nbytes)
    return f"cut to {nbytes}"


def extend(path: Path, draw: random.Random) -> str:
    with open(path, "ab") as file:
        return f"{file.write(draw.choice((bytes(1), bytes(4096), bytes(1 << 20), draw.randbytes(100))))} bytes more"


def zero_page(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at = draw.randrange(0, len(content), 4096)
    content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    path.write_bytes(content)
    return f"zeros at {at}"


def move_page(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    one, other = (draw.randrange(0, len(content), 4096) for _ in range(2))
    page = content[one : one + 4096]
    content[other : other + len(page)] = page
    path.write_bytes(content)
    return f"the page at {one} also at {other}"


def swap_files(path: Path, draw: random.Random) -> str:
    other = draw.choice(sorted(path.parent.iterdir()))
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)
    return f"changed places with {other.name}"


def linked_elsewhere(path: Path, draw: random.Random) -> str:
    kept = path.with_name(f"{path.name}.kept")
    path.rename(kept)
    target = draw.choice((kept, Path("/dev/zero"), Path("/nowhere"), path, path.parent))
    path.symlink_to(target)
    return f"a symbolic link to {target.name}"


def pipe(path: Path, _: random.Random) -> str:
    path.unlink()
    os.mkfifo(path)
    return "a pipe"


def folder(path: Path, _: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a folder"


def missing(path: Path, _: random.Random) -> str:
    path.unlink()
    return "missing"


def empty(path: Path, _: random.Random) -> str:
    os.truncate(path, 0)
    return "empty"


COMMON: tuple[Damage, ...] = (
    *(flip, flip, flip, garble, drop, insert, truncate, extend, zero_page, move_page),
    *(swap_files, linked_elsewhere, pipe, folder, missing, empty),
)


def some_line(path: Path, draw: random.Random) -> str:
    """Lose a line, write it twice, or let two change places."""
    lines = path.read_text().splitlines(keepends=True)
    one, other = (draw.randrange(len(lines)) for _ in range(2))
    kind = draw.choice(("lost", "twice", "swapped"))
    if kind == "lost":
        del lines[one]
    elif kind == "twice":
        lines.insert(one, lines[one])
    else:
        lines[one], lines[other] = lines[other], lines[one]
    path.write_text("".join(lines))
    return f"line {one} {kind}"


def some_digit(path: Path, draw: random.Random) -> str:
    """Another digit in place of one: the manifest still reads well."""
    content = bytearray(path.read_bytes())
    at = draw.choice([index for index, char in enumerate(content) if chr(char).isdigit()])
    content[at] = ord(draw.choice("0123456789"))
    path.write_bytes(content)
    return f"another digit at {at}"


def odd_values(path: Path, draw: random.Random) -> str:
    text, said = odd_json(path.read_text(), draw)
    path.write_text(text)
    return said


MANIFEST_ONLY: tuple[Damage, ...] = (some_line, some_digit, some_digit, odd_values, odd_values, odd_values)


def damage(path: Path, draw: random.Random) -> str:
    """Damage one file of a checkpoint in one of the ways; says which and how."""
    ways = COMMON + (MANIFEST_ONLY if path.name == MANIFEST_NAME else ())
    return f"{path.name}: {draw.choice(ways)(path, draw)}"
