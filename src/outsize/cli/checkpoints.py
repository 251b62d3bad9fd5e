"""`outsize checkpoint`: what is in a directory of checkpoints, whether it is whole, and what may go. Needs no model."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from outsize.checkpoint.directory import (
    UNREADABLE,
    beyond,
    checkpoints_in,
    lookalikes_in,
    remove_all,
    set_all_aside,
    was_removed,
    without_foreign,
)
from outsize.checkpoint.files import open_manifest
from outsize.checkpoint.folder import remove_leftovers
from outsize.checkpoint.manifest import MANIFEST_NAME, Manifest
from outsize.cli.options import DTYPES
from outsize.formats.pieces import stored_weights
from outsize.formats.weights import files_of, merged_folder, runs_of, write_shards
from outsize.planning.sizes import format_bytes, parse_bytes

STATE = "outsize"  # the folder of `outsize.save` in a checkpoint of the Trainer
SUMMARY = "list, verify, export and prune checkpoints"
DESCRIPTION = "Work on the folders that outsize.save and `outsize train` write. No model is needed."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the checkpoints of a directory, newest first")
    ls.add_argument("path", type=Path, help="a directory of checkpoints, or one checkpoint")
    verify = actions.add_parser("verify", help="compare every byte with its checksum; exit code 1 if any is damaged")
    verify.add_argument("path", type=Path, nargs="+", help="checkpoints, or directories of them")
    export = actions.add_parser("export", help="write the weights as safetensors, without loading them into memory")
    export.add_argument("path", type=Path, help="a checkpoint")
    export.add_argument("out", type=Path, help="the folder for the safetensors files")
    export.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of the weights (default: their own)")
    export.add_argument("--max-shard-size", default="5GB", help="bytes of one file, such as 500MB (default: 5GB)")
    prune = actions.add_parser("prune", help="remove all but the newest checkpoints of a directory")
    prune.add_argument("path", type=Path, help="a directory of checkpoints")
    prune.add_argument(
        "--keep", type=int, required=True, help="how many complete checkpoints stay, damaged ones not counted"
    )
    prune.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")


def run(args: argparse.Namespace) -> int:
    code: int = {"ls": _ls, "verify": _verify, "export": _export, "prune": _prune}[args.action](args)
    return code


def _found(path: Path, incomplete: Sequence[Path] = ()) -> list[Path]:
    """A checkpoint itself, or those of a directory, newest first, and at the end those with a damaged manifest.

    Raises `FileNotFoundError` where there are none, nor any incomplete ones.
    """
    if (path / MANIFEST_NAME).is_file():
        return [path]
    folders = [path, *sorted(path.glob("checkpoint-*"), key=lambda each: each.stat().st_mtime, reverse=True)]
    found = []
    for folder in folders:
        damaged = [each for each in lookalikes_in(folder) if os.path.lexists(each / MANIFEST_NAME)]
        found += checkpoints_in(folder) + damaged
    if not found and not incomplete:
        raise FileNotFoundError(f"{path}: there is no checkpoint")
    return found


def _ls(args: argparse.Namespace) -> int:
    rows = [("checkpoint", "saved (UTC)", "steps", "parameters", "size", "state")]
    alike = {} if (args.path / MANIFEST_NAME).is_file() else lookalikes_in(args.path)
    incomplete = [each for each in alike if not os.path.lexists(each / MANIFEST_NAME)]
    for path in _found(args.path, incomplete):
        try:
            manifest, data = open_manifest(path)
            data.close()
            rows.append(_row(path, manifest))
        except (ValueError, OSError) as error:
            if was_removed(path, error):
                continue
            rows.append((path.name, "", "", "", "", f"damaged: {error}"))
    for path in incomplete:
        rows.append((path.name, "", "", "", "", UNREADABLE if alike[path] == UNREADABLE else "incomplete: no manifest"))
    cells = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    for row in cells:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip())
    return 0


def _row(path: Path, manifest: Manifest) -> tuple[str, str, str, str, str, str]:
    optimizer = manifest.optimizer
    numel = sum(record.weight.numel for record in manifest.parameters.values())
    size = sum(record.nbytes for record in manifest.files.values())
    return (
        path.name if path.name != STATE else path.parent.name,
        manifest.saved_at[:19].replace("T", " "),
        str(optimizer.steps) if optimizer is not None else "-",
        f"{numel:,}",
        format_bytes(size),
        f"complete, {optimizer.kind if optimizer is not None else 'no optimizer'}",
    )


def _printable(text: str) -> str:
    """A manifest or a name may hold what a terminal obeys, or cannot print."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _verify(args: argparse.Namespace) -> int:
    damaged = 0
    for path in [found for given in args.path for found in _found(given)]:
        try:
            manifest, data = open_manifest(path)
            with closing(data):
                data.verify(files=manifest.files)
        except (ValueError, OSError) as error:
            if was_removed(path, error):
                print(f"{path}: another run has just removed it")
                continue
            damaged += 1
            print(f"outsize: {_printable(str(error))}", file=sys.stderr)
            continue
        size = format_bytes(sum(record.nbytes for record in manifest.files.values()))
        print(_printable(f"{path}: {len(manifest.files)} files, {size}, every checksum is right"))
    return 1 if damaged else 0


def _export(args: argparse.Namespace) -> int:
    manifest, data = open_manifest(_found(args.path)[0])
    with closing(data):
        weights = stored_weights(manifest, data, DTYPES.get(args.dtype))
        files = files_of(weights, parse_bytes(args.max_shard_size, "--max-shard-size"))
        regions = [region for record in manifest.parameters.values() for region in record.leaves(state=False)]
        data.verify([*regions, *manifest.buffers.values()])
        with merged_folder(args.out.resolve()) as folder:
            write_shards(folder, files, runs_of(files))
    size = sum(weight.nbytes for weight in weights.values())
    print(_printable(f"{args.out}: {len(weights)} tensors, {format_bytes(size)}, as safetensors"))
    return 0


def _prune(args: argparse.Namespace) -> int:
    if args.keep < 1:
        raise ValueError(f"--keep is {args.keep}; at least one checkpoint stays")
    if not args.path.is_dir():
        raise FileNotFoundError(f"{args.path}: there is no such directory")
    found = checkpoints_in(args.path)
    outdated = without_foreign(beyond(found, args.keep))
    if not args.dry_run:
        remove_leftovers(args.path)
        remove_all(set_all_aside(outdated))
    left = [] if args.dry_run else [path for path in outdated if path.exists()]  # why was logged
    for path in outdated:
        if path not in left:
            print(_printable(f"{'would remove' if args.dry_run else 'removed'} {path}"))
    if not outdated:
        count = "1 checkpoint" if len(found) == 1 else f"{len(found) or 'no'} checkpoints"
        print(_printable(f"{args.path}: nothing to remove; it holds {count} of outsize.save"))
    return 1 if left else 0
