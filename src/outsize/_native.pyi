"""The native core: asynchronous disk I/O and one-pass kernels. Knows addresses and bytes, not tensors.

Memory given as an address must stay alive and untouched until the call returns or, for disk I/O, until its ticket has
finished. Every function releases the GIL.
"""

from collections.abc import Sequence
from math import inf
from typing import Literal, TypedDict, final

from typing_extensions import Unpack

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
    def read_pages(self, fd: int, pages: int, count: int, address: int) -> int:
        """As `read`, of the pages of 4096 bytes whose numbers (int64) lie at `pages`, into consecutive memory."""
    def write_pages(self, fd: int, pages: int, count: int, address: int) -> int:
        """As `write`, out of consecutive memory into the pages of these numbers."""
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

@final
class Arrays:
    """The memory of one update: `numel` elements of a weight, its gradient and the optimizer's states.

    `param` is fp32 (`master` is 0), bf16 with its int16 remainder as `master`, or fp16 with its fp32 master; the fp16
    param is only written. `grad` is of any dtype; it is scaled, then clamped (NaN passes), then negated to maximize.
    `states` are fp32; with `scales` (one fp32 per 64 elements of each state) they are 8-bit codes, see `encode`.
    """

    def __init__(
        self,
        *,
        param: int,
        param_dtype: int,
        master: int,
        grad: int,
        grad_dtype: int,
        states: Sequence[int],
        scales: Sequence[int],
        numel: int,
        grad_scale: float = 1.0,
        clamp_min: float = -inf,
        clamp_max: float = inf,
    ) -> None:
        """Raise ValueError for a null address, an unknown dtype, or a master that does not fit the dtype."""

# The updates. Neither `threads`, nor alignment, nor the machine changes the bits. They raise ValueError when the number
# of states is not the optimizer's, or for a step (they count from 1) or a number of threads out of range.

class AdamOptions(TypedDict):
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    amsgrad: bool
    step: int

def adam(arrays: Arrays, *, threads: int = 1, **options: Unpack[AdamOptions]) -> None:
    """Adam, or AdamW when `decoupled`. States: exp_avg, exp_avg_sq and, with `amsgrad`, max_exp_avg_sq."""

class SgdOptions(TypedDict):
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    first: bool

def sgd(arrays: Arrays, *, threads: int = 1, **options: Unpack[SgdOptions]) -> None:
    """SGD. States: momentum_buffer if `momentum` is not 0; it is started from the gradient when `first`."""

class AdagradOptions(TypedDict):
    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    maximize: bool
    step: int

def adagrad(arrays: Arrays, *, threads: int = 1, **options: Unpack[AdagradOptions]) -> None:
    """Adagrad. States: sum."""

class LionOptions(TypedDict):
    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool

def lion(arrays: Arrays, *, threads: int = 1, **options: Unpack[LionOptions]) -> None:
    """Lion, with decoupled decay. States: exp_avg."""

def instruction_set() -> str:
    """The one in use: "avx512", "avx2", "portable" or "neon". All give the same bits."""

def instruction_sets() -> list[str]:
    """Those that this processor has, the widest last."""

def use_instruction_set(name: str) -> None:
    """For tests: use this one from now on; ValueError if the processor lacks it."""

def squared_norm(address: int, dtype: int, numel: int, threads: int = 1) -> float:
    """Sum of squares, accumulated in double in one fixed order, whatever the number of threads."""

def accumulate(dst: int, src: int, src_dtype: int, numel: int, scale: float = 1.0, threads: int = 1) -> None:
    """dst = dst * float32(scale) + float32(src); `dst` is fp32."""

def copy(dst: int, src: int, nbytes: int, threads: int = 1) -> None:
    """Copy bytes that do not overlap."""

def split_master(master: int, bf16: int, remainder: int, numel: int) -> None:
    """Split fp32 into the nearest bf16 (ties away from zero) and the int16 that recovers every bit."""

def join_master(bf16: int, remainder: int, master: int, numel: int) -> None:
    """bits(master) = (bf16_bits << 16) + remainder: the inverse of `split_master`."""

def encode(values: int, codes: int, scales: int, numel: int, root: bool) -> None:
    """fp32 to 8-bit codes (int8, or uint8 of the roots) and one fp32 scale per block of 64 elements."""

def decode(codes: int, scales: int, values: int, numel: int, root: bool) -> None:
    """8-bit codes and scales to fp32. What was decoded encodes to the same bytes."""

# Checksums are CRC-32C (Castagnoli). Memory is cut into pages of `page_bytes`, the last of which may be shorter; each
# has one uint32 at `sums`. ValueError for a null address, or a size of 0.

def page_sums(address: int, nbytes: int, page_bytes: int, sums: int) -> None:
    """Write the checksum of each page to `sums`."""

def join_sums(sums: int, count: int, page_bytes: int, last_bytes: int, group: int, out: int) -> None:
    """Write to `out` the checksums of ranges of `group` pages, from those of the pages; the data is not needed.

    The last of the `count` pages has `last_bytes`, the last range may have fewer pages. `out`: ceil(count / group).
    """
