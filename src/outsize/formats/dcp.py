"""Folders of `torch.distributed.checkpoint`, read without importing it, which takes seconds.

`dcp_metadata` reads what a folder says of itself, `dcp_archive` where a tensor's values lie, `dcp_folder` any piece of
them (`dcp_boxes` knows which parts have it); `dcp_names` finds the live model in it, `dcp_reading` loads it into the
stores. `dcp_writing` writes one. It alone imports `torch.distributed.checkpoint`: import it where it is used.
"""

from __future__ import annotations

from pathlib import Path

METADATA_NAME = ".metadata"


def is_dcp(folder: Path) -> bool:
    """Whether this is a complete folder of `torch.distributed.checkpoint`: the metadata is written last."""
    return (folder / METADATA_NAME).is_file()
