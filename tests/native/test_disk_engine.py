"""One contract, both backends. The oracle is plain file I/O."""

import ctypes
import errno
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from outsize._native import DiskEngine, probe_uring
from tests.conftest import no_file_above

BLOCK = 4096
REQUEST = 16 * BLOCK  # small, so that modest ranges become many pieces


class Memory:
    """Page-aligned memory with an address."""

    def __init__(self, content: bytes | int) -> None:
        nbytes = content if isinstance(content, int) else len(content)
        self._map = mmap.mmap(-1, max(nbytes, 1))
        self._nbytes = nbytes
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        if not isinstance(content, int):
            self._map[:nbytes] = content

    def content(self) -> bytes:
        return self._map[: self._nbytes]


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.fixture(params=["uring", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[DiskEngine]:
    if request.param == "uring" and probe_uring() != 0:
        pytest.skip(f"io_uring is refused here: {os.strerror(probe_uring())}")
    engine = DiskEngine(request.param, depth=8, threads=3, request_bytes=REQUEST)
    yield engine
    engine.close()


@pytest.fixture
def buffered(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "buffered", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[int]:
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"this file system has no O_DIRECT: {error}")
    yield fd
    os.close(fd)


def fill(fd: int, content: bytes) -> None:
    """Write the file's content without the engine."""
    with open(f"/proc/self/fd/{fd}", "wb") as file:
        file.write(content)


def content_of(fd: int) -> bytes:
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read()


def error_of(engine: DiskEngine, ticket: int) -> int | None:
    with pytest.raises(OSError) as raised:  # noqa: PT011
        engine.wait(ticket)
    return raised.value.errno


def test_backend_reads_back_its_name(engine: DiskEngine) -> None:
    assert engine.backend in ("uring", "threads")


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 'uring' or 'threads'"):
        DiskEngine("floppy")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [{"request_bytes": 5000}, {"request_bytes": 0}, {"depth": 0}, {"threads": 0}])
def test_bad_sizes_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        DiskEngine("threads", **bad)


@pytest.mark.parametrize("nbytes", [0, 1, 511, BLOCK, REQUEST - 1, REQUEST, REQUEST + 1, 40 * REQUEST + 12345])
def test_any_size_round_trips_on_a_buffered_file(engine: DiskEngine, buffered: int, nbytes: int) -> None:
    source, target = Memory(noise(nbytes)), Memory(nbytes)
    engine.wait(engine.write(buffered, 7, source.address, nbytes))
    assert content_of(buffered)[7:] == source.content()
    engine.wait(engine.read(buffered, 7, target.address, nbytes))
    assert target.content() == source.content()
    assert (engine.bytes_written, engine.bytes_read) == (nbytes, nbytes)


def test_direct_file_round_trips(engine: DiskEngine, direct: int) -> None:
    nbytes = 40 * REQUEST + 3 * BLOCK
    source, target = Memory(noise(nbytes)), Memory(nbytes)
    engine.wait(engine.write(direct, BLOCK, source.address, nbytes))
    engine.wait(engine.read(direct, BLOCK, target.address, nbytes))
    assert target.content() == source.content()
    assert content_of(direct)[BLOCK:] == source.content()


@pytest.mark.parametrize("limit", [0, BLOCK, BLOCK + 512, REQUEST - 1])
def test_a_limit_on_the_size_of_files_is_told(engine: DiskEngine, direct: int, limit: int) -> None:
    source = Memory(noise(3 * REQUEST))
    with no_file_above(limit):
        assert error_of(engine, engine.write(direct, 0, source.address, 3 * REQUEST)) == errno.EFBIG


def test_many_requests_are_all_done_after_their_waits(engine: DiskEngine, buffered: int) -> None:
    sources = [Memory(noise(5 * BLOCK, seed=i)) for i in range(300)]
    tickets = [engine.write(buffered, i * 5 * BLOCK, memory.address, 5 * BLOCK) for i, memory in enumerate(sources)]
    for ticket in reversed(tickets):
        engine.wait(ticket)
    assert content_of(buffered) == b"".join(memory.content() for memory in sources)
    assert engine.requests == 300


def test_one_wait_covers_every_piece(engine: DiskEngine, buffered: int) -> None:
    nbytes = 200 * REQUEST
    fill(buffered, noise(nbytes))
    target = Memory(nbytes)
    engine.wait(engine.read(buffered, 0, target.address, nbytes))
    assert target.content() == noise(nbytes)
    assert engine.requests == 200


def test_four_threads_share_an_engine(engine: DiskEngine, buffered: int) -> None:
    part = 20 * REQUEST + 77
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(5):
                source, target = Memory(noise(part, seed=10 * index + turn)), Memory(part)
                engine.wait(engine.write(buffered, index * part, source.address, part))
                engine.wait(engine.read(buffered, index * part, target.address, part))
                assert target.content() == source.content()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_requests_outlive_the_thread_that_started_them(engine: DiskEngine, buffered: int) -> None:
    nbytes = 100 * REQUEST
    fill(buffered, noise(nbytes))
    target, tickets = Memory(nbytes), []
    thread = threading.Thread(target=lambda: tickets.append(engine.read(buffered, 0, target.address, nbytes)))
    thread.start()
    thread.join()
    engine.wait(tickets[0])
    assert target.content() == noise(nbytes)


@pytest.mark.parametrize("short_bytes", [1, 100, BLOCK, BLOCK + 1, 3 * BLOCK + 17, REQUEST - 1])
@pytest.mark.parametrize("file", ["buffered", "direct"])
def test_short_transfers_resume(
    engine: DiskEngine, request: pytest.FixtureRequest, file: str, short_bytes: int
) -> None:
    fd: int = request.getfixturevalue(file)
    nbytes = 5 * REQUEST
    source, target = Memory(noise(nbytes)), Memory(nbytes)
    for nth in (1, 3, 5):
        engine.inject("write", nth, short_bytes=short_bytes)
        engine.inject("read", nth, short_bytes=short_bytes)
    engine.wait(engine.write(fd, 0, source.address, nbytes))
    assert content_of(fd) == source.content()
    engine.wait(engine.read(fd, 0, target.address, nbytes))
    assert target.content() == source.content()
    assert engine.requests == 2 * (5 + 3)
    assert (engine.bytes_written, engine.bytes_read) == (nbytes, nbytes)


@pytest.mark.parametrize(("op", "code"), [("write", errno.ENOSPC), ("write", errno.EIO), ("read", errno.EIO)])
def test_a_failed_piece_fails_its_ticket_only(engine: DiskEngine, buffered: int, op: str, code: int) -> None:
    nbytes = 6 * REQUEST
    fill(buffered, bytes(2 * nbytes))
    memory, other = Memory(noise(nbytes)), Memory(noise(nbytes, seed=1))
    start = engine.write if op == "write" else engine.read
    engine.inject(op, 4, error=code)  # type: ignore[arg-type]
    failing = start(buffered, 0, memory.address, nbytes)
    sound = start(buffered, nbytes, other.address, nbytes)
    assert error_of(engine, failing) == code
    engine.wait(sound)


def test_a_failed_ticket_has_finished_every_other_piece(engine: DiskEngine, buffered: int) -> None:
    nbytes = 50 * REQUEST
    source = Memory(noise(nbytes))
    engine.inject("write", 1, error=errno.ENOSPC)
    assert error_of(engine, engine.write(buffered, 0, source.address, nbytes)) == errno.ENOSPC
    assert content_of(buffered)[REQUEST:] == source.content()[REQUEST:]
    assert engine.bytes_written == nbytes - REQUEST


def test_the_first_failed_piece_gives_the_error(engine: DiskEngine, buffered: int) -> None:
    engine.inject("write", 2, error=errno.ENOSPC)
    engine.inject("write", 5, error=errno.EIO)
    source = Memory(8 * REQUEST)
    assert error_of(engine, engine.write(buffered, 0, source.address, 8 * REQUEST)) == errno.ENOSPC


def test_an_error_waits_for_its_wait_and_is_raised_once(engine: DiskEngine, buffered: int) -> None:
    engine.inject("write", 1, error=errno.EIO)
    source = Memory(BLOCK)
    failing = engine.write(buffered, 0, source.address, BLOCK)
    engine.wait(engine.write(buffered, BLOCK, source.address, BLOCK))
    engine.close()
    assert engine.done(failing)
    assert error_of(engine, failing) == errno.EIO
    engine.wait(failing)
    assert engine.done(failing)


def test_waiting_twice_is_fine(engine: DiskEngine, buffered: int) -> None:
    source = Memory(BLOCK)
    ticket = engine.write(buffered, 0, source.address, BLOCK)
    engine.wait(ticket)
    engine.wait(ticket)
    assert engine.done(ticket)


def test_two_threads_wait_for_one_ticket(engine: DiskEngine, buffered: int) -> None:
    source = Memory(noise(100 * REQUEST))
    ticket = engine.write(buffered, 0, source.address, 100 * REQUEST)
    threads = [threading.Thread(target=engine.wait, args=(ticket,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_a_ticket_never_issued_is_refused(engine: DiskEngine) -> None:
    with pytest.raises(ValueError, match="never issued"):
        engine.wait(1)
    with pytest.raises(ValueError, match="never issued"):
        engine.done(0)


@pytest.mark.parametrize("length", [0, 100, BLOCK, REQUEST, REQUEST + 100, 2 * REQUEST - 1])
@pytest.mark.parametrize("file", ["buffered", "direct"])
def test_reading_past_the_end_is_an_error(
    engine: DiskEngine, request: pytest.FixtureRequest, file: str, length: int
) -> None:
    fd: int = request.getfixturevalue(file)
    fill(fd, noise(length))
    target = Memory(2 * REQUEST)
    with pytest.raises(OSError, match="the file is shorter than it must be") as caught:
        engine.wait(engine.read(fd, 0, target.address, 2 * REQUEST))
    assert caught.value.errno == errno.EIO
    assert target.content()[:length] == noise(length)


def test_a_closed_descriptor_is_an_error(engine: DiskEngine, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "closed", os.O_RDWR | os.O_CREAT)
    os.close(fd)
    memory = Memory(3 * REQUEST)
    assert error_of(engine, engine.write(fd, 0, memory.address, 3 * REQUEST)) == errno.EBADF


def test_a_misaligned_direct_write_is_an_error(engine: DiskEngine, direct: int) -> None:
    memory = Memory(2 * REQUEST)
    for offset, address, nbytes in ((3, 0, BLOCK), (0, 1, BLOCK), (0, 0, BLOCK + 1)):
        with pytest.raises(ValueError, match="whole blocks"):
            engine.write(direct, offset, memory.address + address, nbytes)


BOUNCE = 64 * BLOCK


@pytest.mark.parametrize("offset", [0, 3, BLOCK - 1, BLOCK, BOUNCE - 5])
@pytest.mark.parametrize("nbytes", [1, BLOCK, BLOCK + 1, BOUNCE, 3 * BOUNCE + 777])
def test_a_direct_read_may_begin_and_end_anywhere(engine: DiskEngine, direct: int, offset: int, nbytes: int) -> None:
    """Also in the last block of the file, which is not whole; no byte beside those asked for is touched."""
    content = noise(offset + nbytes)
    fill(direct, content)
    around = b"?" * 9
    memory = Memory(around + bytes(nbytes) + around)
    engine.wait(engine.read(direct, offset, memory.address + len(around), nbytes))
    assert memory.content() == around + content[offset:] + around
    assert engine.bytes_read == nbytes


@pytest.mark.parametrize("short", [1, BLOCK, 20 * BLOCK])
def test_a_short_direct_read_of_any_bytes_is_made_again(engine: DiskEngine, direct: int, short: int) -> None:
    content = noise(2 * BOUNCE)
    fill(direct, content)
    memory = Memory(2 * BOUNCE - 7)
    engine.inject("read", 1, short_bytes=short)
    engine.wait(engine.read(direct, 7, memory.address, 2 * BOUNCE - 7))
    assert memory.content() == content[7:]


def test_a_direct_read_past_the_end_is_an_error(engine: DiskEngine, direct: int) -> None:
    fill(direct, noise(BOUNCE + 100))
    memory = Memory(2 * BOUNCE)
    assert error_of(engine, engine.read(direct, 1, memory.address, BOUNCE + 100)) == errno.EIO
    engine.inject("read", 2, error=errno.ENODEV)
    assert error_of(engine, engine.read(direct, 1, memory.address, BOUNCE)) == errno.ENODEV


def test_many_direct_reads_of_any_bytes_share_the_memory_that_they_pass_through(
    engine: DiskEngine, direct: int
) -> None:
    content = noise(100 * 1000)
    fill(direct, content)
    memories = [Memory(977) for _ in range(100)]
    tickets = [engine.read(direct, at * 1000 + 1, memory.address, 977) for at, memory in enumerate(memories)]
    for at, (ticket, memory) in enumerate(zip(tickets, memories, strict=True)):
        engine.wait(ticket)
        assert memory.content() == content[at * 1000 + 1 : at * 1000 + 978]


def test_an_error_is_the_specific_subclass_of_oserror(engine: DiskEngine, buffered: int) -> None:
    engine.inject("read", 1, error=errno.EACCES)
    with pytest.raises(PermissionError, match=os.strerror(errno.EACCES)):
        engine.wait(engine.read(buffered, 0, Memory(BLOCK).address, BLOCK))


def test_done_turns_true_without_a_wait(engine: DiskEngine, buffered: int) -> None:
    source = Memory(20 * REQUEST)
    first = engine.write(buffered, 0, source.address, 20 * REQUEST)
    while not engine.done(first):
        os.sched_yield()
    assert len(content_of(buffered)) == 20 * REQUEST


def test_done_is_false_while_a_piece_is_in_flight(engine: DiskEngine, tmp_path: Path) -> None:
    # 2000 pieces queue behind eight: they cannot all be done when `write` returns.
    source = Memory(2000 * REQUEST)
    fd = os.open(tmp_path / "large", os.O_RDWR | os.O_CREAT)
    ticket = engine.write(fd, 0, source.address, 2000 * REQUEST)
    seen = engine.done(ticket)
    engine.wait(ticket)
    os.close(fd)
    assert not seen


def test_close_finishes_what_is_in_flight(engine: DiskEngine, buffered: int) -> None:
    nbytes = 500 * REQUEST
    source = Memory(noise(nbytes))
    ticket = engine.write(buffered, 0, source.address, nbytes)
    engine.close()
    assert engine.done(ticket)
    assert content_of(buffered) == source.content()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.write(buffered, 0, source.address, nbytes)


def test_a_forked_child_lets_go_and_the_parent_goes_on(engine: DiskEngine, buffered: int) -> None:
    nbytes = 300 * REQUEST
    source = Memory(noise(nbytes))
    ticket = engine.write(buffered, 0, source.address, nbytes)
    child = os.fork()
    if child == 0:
        refused = False
        try:
            engine.read(buffered, 0, source.address, BLOCK)
        except RuntimeError:
            refused = True
        engine.close()
        del engine
        own = DiskEngine("threads")
        own.wait(own.write(buffered, nbytes, source.address, BLOCK))
        own.close()
        os._exit(0 if refused else 1)
    _, status = os.waitpid(child, 0)
    engine.wait(ticket)
    assert os.waitstatus_to_exitcode(status) == 0
    assert content_of(buffered) == source.content() + source.content()[:BLOCK]
