"""The native core: asynchronous disk I/O and one-pass kernels. Knows addresses and bytes, not tensors.

Memory given as an address must stay alive and untouched until the call returns or, for disk I/O, until its ticket has
finished. Every function releases the GIL.
"""

from math import inf
from typing import Literal, final

FLOAT32: int
BFLOAT16: int
FLOAT16: int

@final
class DiskEngine:
    """Asynchronous reads and writes of file ranges, from any number of threads.

    A range is cut into pieces of `request_bytes`; all are queued, `depth` (uring) or `threads` (threads) are in flight.
    Short transfers are resumed, also on files opened with O_DIRECT. A range that reaches past the file's end is EIO.
    The file descriptor must stay open, and the memory alive, until the ticket has finished.
    """

    def __init__(
        self, backend: Literal["uring", "threads"], depth: int = 32, threads: int = 8, request_bytes: int = 4 << 20
    ) -> None:
        """Raise OSError when io_uring cannot be set up, ValueError for values out of range."""
    @property
    def backend(self) -> str: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...
    @property
    def requests(self) -> int:
        """Requests made to the system so far, repeated ones included."""
    def read(self, fd: int, offset: int, address: int, nbytes: int) -> int:
        """Start reading; return a ticket. Raise RuntimeError when closed, or in a forked child."""
    def write(self, fd: int, offset: int, address: int, nbytes: int) -> int:
        """Start writing; return a ticket. Raise RuntimeError when closed, or in a forked child."""
    def wait(self, ticket: int) -> None:
        """Block until all pieces have finished; then raise the OSError of the first failed one, once.

        Safe to repeat, also after `close`. The memory is free to reuse afterwards, whether it raises or not.
        """
    def done(self, ticket: int) -> bool:
        """True when `wait` would not block."""
    def inject(self, op: Literal["read", "write"], nth: int, error: int = 0, short_bytes: int = -1) -> None:
        """For tests: make the nth next piece (1-based) fail with `error`, or move only `short_bytes` at first."""
    def close(self) -> None:
        """Finish what is in flight and join the threads. Safe to repeat; in a forked child it only lets go."""

def probe_uring() -> int:
    """0 if io_uring reads and writes here (it is tried), else the errno."""

def adamw(
    param: int,
    param_dtype: int,
    remainder: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_dtype: int,
    numel: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    step: int,
    grad_scale: float = 1.0,
    clamp_min: float = -inf,
    clamp_max: float = inf,
    max_exp_avg_sq: int = 0,
    threads: int = 1,
) -> None:
    """Update `numel` weights in place with Adam (or AdamW, when `decoupled`), in one pass.

    `param` is fp32 with `remainder=0`, or bf16 with an int16 remainder; the moments are fp32; `grad` is of any dtype
    and is scaled, then clamped, then negated if `maximize`. `step` counts from 1. Neither `threads`, nor alignment,
    nor the machine changes the bits.
    """

def squared_norm(address: int, dtype: int, numel: int) -> float:
    """Sum of squares, accumulated in double in one fixed order."""

def accumulate(dst: int, src: int, src_dtype: int, numel: int, scale: float = 1.0) -> None:
    """dst = dst * float32(scale) + float32(src); `dst` is fp32."""

def split_master(master: int, bf16: int, remainder: int, numel: int) -> None:
    """Split fp32 into the nearest bf16 (ties away from zero) and the int16 that recovers every bit."""

def join_master(bf16: int, remainder: int, master: int, numel: int) -> None:
    """bits(master) = (bf16_bits << 16) + remainder: the inverse of `split_master`."""
