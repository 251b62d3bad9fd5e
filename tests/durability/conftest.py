"""Tiny states are treated as large ones are: linked, or copied and written behind the training."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outsize.checkpoint import writer

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True, scope="module")
def large() -> Iterator[None]:
    """State of any size counts as large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "AT_ONCE_BYTES", -1)
        yield


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on a file system where syncing costs nothing, where there is one."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        yield tmp_path_factory.mktemp("swift")
        return
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield Path(folder)
