"""An environment for each peer in `build/peers`, with the versions of `requirements/NAME.txt`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "build" / "peers"
REQUIREMENTS = Path(__file__).parent / "requirements"
OURS = "outsize"
"""The environment that runs this."""

DEEPSPEED = {
    "DS_ACCELERATOR": "cpu",
    "DS_BUILD_OPS": "0",
    **dict.fromkeys(("DS_BUILD_CPU_ADAM", "DS_BUILD_AIO", "DS_BUILD_SHM_COMM"), "1"),
}
"""Its operations are compiled when it is installed. They need g++ and the headers of libaio (`apt-get install
libaio-dev`). One that is missing is compiled by the first job, within its time."""


def python_of(name: str) -> str:
    """The interpreter of a peer. Its environment is made where it is missing, or where its versions have changed."""
    if name == OURS:
        return sys.executable
    wanted, folder = (REQUIREMENTS / f"{name}.txt").read_text(), FOLDER / name
    stamp, python = folder / "installed.txt", str(folder / "bin" / "python")
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making the environment of {name} in {folder} ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        lines = wanted.split()
        own = [line for line in lines if line.startswith("deepspeed==")]
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *(line for line in lines if line not in own)], check=True)
        if own:  # it asks for torch while it is built
            subprocess.run([*pip, "--no-build-isolation", *own], check=True, env={**os.environ, **DEEPSPEED})
        stamp.write_text(wanted)
    return python
