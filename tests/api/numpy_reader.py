"""Fifty lines that read a checkpoint with numpy alone: see docs/checkpoint-format.md."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy


def array(folder: Path, region: Any) -> Any:
    """A region as an array; bfloat16 as its bits, 8-bit optimizer state decoded."""
    if "parts" in region:
        return numpy.concatenate([array(folder, part) for part in region["parts"]], region["dim"])
    if "codec" in region:
        return decoded(folder, region)
    dtype = numpy.dtype({"bfloat16": "uint16"}.get(region["dtype"], region["dtype"]))
    pieces = region.get("pieces") or [[region.get("file"), region.get("offset"), prod(region["shape"])]]
    row = prod(region["shape"][1:]) if "stride" in region else 1  # elements that lie together
    stride = region.get("stride", dtype.itemsize)
    parts = []
    for file, offset, count in pieces:
        content = numpy.fromfile(folder / file, "uint8", offset=offset)
        parts.append(numpy.ndarray((count // row, row), dtype, content, strides=(stride, dtype.itemsize)))
    return numpy.concatenate(parts).reshape(region["shape"])


def decoded(folder: Path, region: Any) -> Any:
    codes = array(folder, region["codes"]).reshape(-1).astype(numpy.float32)
    scales = numpy.repeat(array(folder, region["scales"]), 64)[: codes.size]
    if region["codec"] == "signed":
        flat = codes / (254 - numpy.abs(codes)) * scales
    else:
        flat = numpy.square(codes * numpy.float32(1 / 255) * scales)
    return flat.reshape(region["codes"]["shape"])


def weight(folder: Path, record: Any) -> Any:
    """The fp32 master of a parameter."""
    stored = array(folder, record["weight"])
    if record["master"] is None or record["weight"]["dtype"] == "float16":
        return array(folder, record["master"] or record["weight"])
    rest = array(folder, record["master"]).astype(numpy.int32).view(numpy.uint32)
    return ((stored.astype(numpy.uint32) << 16) + rest).view(numpy.float32)
