"""Compile the simulated accelerator into `build/`: a compiler and torch's headers are all that it needs."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent
LIBRARY = HERE / "build" / "_sim.so"


def main() -> None:
    LIBRARY.parent.mkdir(exist_ok=True)
    compiler = os.environ.get("CXX", "g++")
    folders = [*include_paths(), sysconfig.get_path("include")]
    # NDEBUG as torch's own binaries: some headers check more without it than these binaries can keep.
    flags = ["-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-w", *(f"-isystem{folder}" for folder in folders)]
    objects, running = [], []
    for source in sorted(HERE.glob("*.cpp")):
        objects.append(LIBRARY.with_name(source.stem + ".o"))
        inputs = (source, HERE / "simulator.hpp", Path(__file__), Path(torch.__file__))
        if objects[-1].exists() and objects[-1].stat().st_mtime > max(one.stat().st_mtime for one in inputs):
            continue
        running.append(subprocess.Popen([compiler, *flags, "-c", str(source), "-o", str(objects[-1])]))
    codes = [one.wait() for one in running]
    if any(codes):
        sys.exit("the simulated accelerator does not compile")
    libraries = [f"-L{folder}" for folder in library_paths()] + [f"-Wl,-rpath,{folder}" for folder in library_paths()]
    libraries += ["-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    unfinished = LIBRARY.with_suffix(".part")
    subprocess.run([compiler, "-shared", *map(str, objects), *libraries, "-o", str(unfinished)], check=True)
    unfinished.replace(LIBRARY)


if __name__ == "__main__":
    main()
