"""Which threads the parts of a kernel run on: see Note [Torch's own team] in csrc/worker_pool.cpp."""

import resource
import subprocess
import sys

import pytest

COPIES = """
import ctypes, os, threading
import torch
from outsize import _native

def threads():
    return set(os.listdir("/proc/self/task"))

def copy_with_two():
    source, target = ctypes.create_string_buffer(os.urandom(1 << 20)), ctypes.create_string_buffer(1 << 20)
    _native.copy(ctypes.addressof(target), ctypes.addressof(source), 1 << 20, 2)
    assert target.raw[: 1 << 20] == source.raw[: 1 << 20]

torch.set_num_threads(THREADS)
torch.ones(1 << 20).add_(1)  # torch's own team begins
before = threads()
copy_with_two()
here = threads() - before
other = threading.Thread(target=copy_with_two)
other.start()
other.join()
child = os.fork()
if child == 0:
    copy_with_two()  # a hang, where it waited for threads of the parent
    os._exit(7)
status = os.waitpid(child, 0)[1]
print(len(here), len(threads() - before), os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(("threads", "here"), [(2, 0), (1, 1)])
def test_the_main_thread_takes_the_team_that_torch_has(threads: int, here: int) -> None:
    """Beside it, threads of ours share the cores with a team that spins. Other threads take ours, and forked children
    too."""
    script = COPIES.replace("THREADS", str(threads))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [str(here), "1", "7"], done.stderr


WITHOUT_THREADS = """
import ctypes, os, resource, threading
from outsize import _native

source, target = ctypes.create_string_buffer(os.urandom(1 << 20)), ctypes.create_string_buffer(1 << 20)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, ((used << 10) + (256 << 20),) * 2)  # a quarter of a stack
try:
    threading.Thread(target=print).start()
except RuntimeError:
    _native.copy(ctypes.addressof(target), ctypes.addressof(source), 1 << 20, 4)
    print(target.raw[: 1 << 20] == source.raw[: 1 << 20])
"""


def test_the_caller_does_the_parts_of_threads_that_cannot_be_started() -> None:
    def large_stacks() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, resource.getrlimit(resource.RLIMIT_STACK)[1]))

    command = [sys.executable, "-c", WITHOUT_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=large_stacks)
    assert done.stdout.split() == ["True"], done.stderr
