"""Stores, transfers, the conveyor and the run's directory: each alone, with plain bytes as oracle."""

from __future__ import annotations

import errno
import os
import random
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outsize import _native
from outsize.move import disk as disk_tier
from outsize.move import memory
from outsize.move import store as store_module
from outsize.move.buffer import Buffer
from outsize.move.disk import STRIPE_BYTES, DiskDirectoryError, RunDirectory, StripedFile, free_bytes
from outsize.move.generations import Generations
from outsize.move.memory import HostBuffer, Ledger
from outsize.move.store import DiskStore, Store
from outsize.run.buffers import unused
from tests.scripts import Script

PAGE = 4096


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Page-aligned random bytes."""
    buffer = HostBuffer(nbytes)
    buffer.bytes.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return buffer.bytes


def empty(nbytes: int) -> torch.Tensor:
    return HostBuffer(nbytes).bytes


@pytest.fixture(params=["uring", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[_native.DiskEngine]:
    if request.param == "uring" and _native.probe_uring() != 0:
        pytest.skip("io_uring is refused here")
    engine = _native.DiskEngine(request.param)
    yield engine
    engine.close()


def places(root: Path, count: int) -> list[Path]:
    found = [root / str(index) for index in range(count)]
    for place in found:
        place.mkdir()
    return found


@pytest.fixture(params=["host", "one file", "two stripes", "three stripes", "records"])
def store(request: pytest.FixtureRequest, tmp_path: Path, engine: _native.DiskEngine) -> Iterator[Store]:
    nbytes = 3 * STRIPE_BYTES + 5 * PAGE
    if request.param == "host":
        host = Buffer(nbytes, Ledger(), account="host/states", lasting=True)
        yield host
        host.drop()
        return
    count = {"one file": 1, "two stripes": 2, "three stripes": 3, "records": 2}[request.param]
    folders = places(tmp_path, count)
    record = (300, 450) if request.param == "records" else None
    total = nbytes // 2 * 3 + 450 if record else nbytes + 2 * PAGE
    file = Generations(lambda number: StripedFile(engine, folders, f"unit.{number}", total), verify=True)
    store = DiskStore(file, 100 if record else 2 * PAGE, nbytes, Ledger(), "states", record)
    yield store
    store.drop()
    file.close()


# -- stores ----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(store: Store) -> None:
    content = noise(store.nbytes)
    store.write(0, content).wait()
    out = empty(store.nbytes)
    store.read(0, out).wait()
    assert torch.equal(out, content)


def test_parts_land_where_they_belong(store: Store) -> None:
    expected = torch.zeros(store.nbytes, dtype=torch.uint8)
    zeros = empty(store.nbytes)
    store.write(0, zeros).wait()
    ranges = [(0, PAGE), (STRIPE_BYTES - PAGE, 2 * PAGE), (2 * STRIPE_BYTES - PAGE, STRIPE_BYTES + 2 * PAGE)]
    for seed, (start, length) in enumerate(ranges):
        content = noise(length, seed)
        store.write(start, content).wait()
        expected[start : start + length] = content
    out = empty(store.nbytes)
    store.read(0, out).wait()
    assert torch.equal(out, expected)
    for start, length in ranges:
        part = empty(length)
        store.read(start, part).wait()
        assert torch.equal(part, expected[start : start + length])


def test_bytes_that_are_no_whole_pages_leave_their_neighbours_as_they_are(store: Store) -> None:
    expected = torch.zeros(store.nbytes, dtype=torch.uint8)
    for seed, (start, length) in enumerate([(0, store.nbytes), (5, 3), (PAGE - 1, 2 * PAGE), (store.nbytes - 7, 7)]):
        content = noise(length, seed)
        store.put(start, content)
        expected[start : start + length] = content
    assert torch.equal(store.get(0, store.nbytes), expected)
    assert torch.equal(store.get(PAGE - 9, PAGE + 20), expected[PAGE - 9 : 2 * PAGE + 11])


def test_what_was_never_written_reads_as_zeros(store: Store) -> None:
    out = noise(2 * PAGE)
    store.read(PAGE, out).wait()
    assert not out.any()


def test_many_transfers_may_be_on_their_way_at_once(store: Store) -> None:
    contents = [noise(PAGE, seed) for seed in range(64)]
    writes = [store.write(index * PAGE, content) for index, content in enumerate(contents)]
    for write in reversed(writes):
        write.wait()
        write.wait()  # safe to repeat
        assert write.done()
    outs = [empty(PAGE) for _ in contents]
    for read in [store.read(index * PAGE, out) for index, out in enumerate(outs)]:
        read.wait()
    assert all(torch.equal(out, content) for out, content in zip(outs, contents, strict=True))


def test_an_empty_transfer_is_over_at_once(store: Store) -> None:
    for transfer in (store.read(0, empty(0)), store.write(0, empty(0))):
        transfer.wait()
        assert transfer.done()


def test_arrays_in_one_file_of_records_leave_each_other_as_they_are(tmp_path: Path, engine: _native.DiskEngine) -> None:
    sizes, rows = (256, 24, 9000), 2 * store_module.WINDOW_BYTES // 9280  # more than is moved at once
    file = Generations(lambda number: StripedFile(engine, [tmp_path], f"unit.{number}", (rows + PAGE // 24 + 1) * 9280))
    stores, contents = [], []
    for at, size in enumerate(sizes):
        nbytes = -(-rows * size // PAGE) * PAGE
        stores.append(DiskStore(file, sum(sizes[:at]), nbytes, Ledger(), "states", (size, 9280)))
        contents.append(noise(nbytes, at))
        stores[at].write(0, contents[at]).wait()
    stores[2].put(13000, noise(500, 3))  # a page within one row
    contents[2][13000:13500] = noise(500, 3)
    stores[1].write(PAGE, contents[0][:PAGE]).wait()
    contents[1][PAGE : 2 * PAGE] = contents[0][:PAGE]
    for store, content in zip(stores, contents, strict=True):
        assert torch.equal(store.get(0, store.nbytes), content)
    first = HostBuffer(3 * PAGE).bytes
    file.read(0, first).wait()
    assert torch.equal(first[:9280], torch.cat([content[:size] for content, size in zip(contents, sizes, strict=True)]))
    file.close()


def test_closing_twice_is_safe_and_gives_the_bytes_back(tmp_path: Path, engine: _native.DiskEngine) -> None:
    ledger = Ledger()
    file = Generations(lambda number: StripedFile(engine, [tmp_path], f"unit.{number}", PAGE))
    memory = Buffer(PAGE, ledger, account="host/params", lasting=True)
    stores: list[Store] = [memory, DiskStore(file, 0, PAGE, ledger, "params")]
    assert ledger.now == {"host/params": PAGE, "disk/params": PAGE}
    for store in stores:
        store.drop()
        store.drop()
    file.close()
    assert ledger.now == {"host/params": 0, "disk/params": 0}
    assert ledger.peak == {"host/params": PAGE, "disk/params": PAGE}


def test_a_name_that_a_file_system_keeps_does_not_stop_the_closing(
    tmp_path: Path, engine: _native.DiskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    file = StripedFile(engine, [tmp_path], "unit.0", PAGE)
    generations = Generations(lambda number: file)
    monkeypatch.setattr(os, "unlink", refuse)
    generations.close()
    assert not file.devices, "nothing is open"


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_names_the_file_and_the_errno(
    tmp_path: Path, engine: _native.DiskEngine, operation: str, code: int
) -> None:
    file = StripedFile(engine, [tmp_path], "unit-7", 4 * PAGE)
    engine.inject(operation, 1, code, -1)
    content = noise(4 * PAGE)
    transfer = file.read(0, content) if operation == "read" else file.write(0, content)
    for _ in range(2):  # the error stays
        with pytest.raises(OSError, match="unit-7") as caught:
            transfer.wait()
        assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / "unit-7"))
    assert transfer.done()
    file.write(0, content).wait()  # another transfer is another matter
    file.close()


def test_a_file_that_was_cut_off_is_told_from_a_drive_that_fails(tmp_path: Path, engine: _native.DiskEngine) -> None:
    file = StripedFile(engine, [tmp_path], "unit-7", 4 * PAGE)
    os.truncate(tmp_path / "unit-7", PAGE + 5)
    content = noise(4 * PAGE)
    with pytest.raises(OSError, match=r"shorter than it must be.*unit-7"):
        file.read(0, content).wait()
    file.close()


def test_an_error_in_one_stripe_waits_for_the_others(tmp_path: Path, engine: _native.DiskEngine) -> None:
    file = StripedFile(engine, places(tmp_path, 3), "unit", 3 * STRIPE_BYTES)
    engine.inject("write", 2, errno.EIO, -1)
    content = noise(3 * STRIPE_BYTES)
    transfer = file.write(0, content)
    with pytest.raises(OSError, match="Input/output error"):
        transfer.wait()
    assert transfer.done()
    file.close()


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("moved", [PAGE, 3 * PAGE])
def test_short_transfers_are_resumed(tmp_path: Path, engine: _native.DiskEngine, operation: str, moved: int) -> None:
    file = StripedFile(engine, [tmp_path], "unit", 8 * PAGE)
    content, out = noise(8 * PAGE), empty(8 * PAGE)
    for nth in (1, 1):
        engine.inject(operation, nth, 0, moved)
        file.write(0, content).wait()
        file.read(0, out).wait()
        assert torch.equal(out, content)
    file.close()


# -- files and directories -------------------------------------------------------------------------------------------


def test_preallocated_space_is_taken_before_anything_is_written(tmp_path: Path, engine: _native.DiskEngine) -> None:
    file = StripedFile(engine, places(tmp_path, 2), "unit", 4 * STRIPE_BYTES)
    used = [sum(p.stat().st_blocks for p in tmp_path.rglob("unit"))]
    file.preallocate(STRIPE_BYTES, 2 * STRIPE_BYTES)
    used.append(sum(p.stat().st_blocks for p in tmp_path.rglob("unit")))
    assert used[0] == 0
    assert used[1] * 512 >= 2 * STRIPE_BYTES
    file.close()


def test_a_full_disk_is_an_error_with_path_and_size(
    tmp_path: Path, engine: _native.DiskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = StripedFile(engine, [tmp_path], "unit", 1 << 20)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: free space there \(reserving 1.0 MiB\).*unit"):
        file.preallocate(0, 1 << 20)
    file.close()


def test_a_file_system_that_refuses_direct_io_gets_a_plain_file(
    tmp_path: Path, engine: _native.DiskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, mode)

    monkeypatch.setattr(disk_tier.os, "open", refuse)
    file = StripedFile(engine, [tmp_path], "unit", 4 * PAGE)
    content, out = noise(4 * PAGE), empty(4 * PAGE)
    file.write(0, content).wait()
    file.read(0, out).wait()
    assert torch.equal(out, content)
    file.close()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs")
def test_tmpfs_works(engine: _native.DiskEngine) -> None:
    with_run = RunDirectory(Path("/dev/shm"))
    file = StripedFile(engine, [with_run.path], "unit", 4 * PAGE)
    content, out = noise(4 * PAGE), empty(4 * PAGE)
    file.write(0, content).wait()
    file.read(0, out).wait()
    assert torch.equal(out, content)
    file.close()
    with_run.close()
    assert not with_run.path.exists()


def test_each_run_has_its_own_directory_and_removes_it(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    assert first.path != second.path
    assert first.path.parent == second.path.parent == tmp_path
    (first.path / "unit").write_text("x")
    first.close()
    first.close()
    assert not first.path.exists()
    assert second.path.exists()
    second.close()
    assert not list(tmp_path.iterdir())


HOLD = """
import sys, time
from pathlib import Path
from outsize.move.disk import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
(run.path / "unit").write_text("mine")
print(run.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_live_runs_directory_is_left_alone_and_a_killed_ones_is_removed(tmp_path: Path) -> None:
    other = Script(HOLD, tmp_path)
    try:
        theirs = Path(other.stdout.readline().strip())
        mine = RunDirectory(tmp_path)
        assert (theirs / "unit").read_text() == "mine"
        mine.close()
    finally:
        other.kill()
        other.end()
    assert theirs.exists()  # a kill leaves it
    again = RunDirectory(tmp_path)
    assert not theirs.exists()
    again.close()
    assert not list(tmp_path.iterdir())


def test_only_directories_of_runs_are_ever_removed(tmp_path: Path) -> None:
    others = ["data", "outsize", "outsize-checkpoint", "outsize-run-7b", "outsize-run-7b.new", "outsize-run-8-abc"]
    for name in others:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "outsize-run-7b" / "step-100").mkdir()
    dead = tmp_path / "outsize-run-999999999-0123456789ab"
    dead.mkdir()
    (dead / "lock").write_text("")
    RunDirectory(tmp_path).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == others
    assert (tmp_path / "outsize-run-7b" / "step-100").exists()


def test_a_directory_that_is_being_made_is_not_taken_for_dead(tmp_path: Path) -> None:
    fresh, old = (tmp_path / f"outsize-run-999999999-{each * 12}.new" for each in "ab")
    for entry in (fresh, old):
        entry.mkdir()
    age(old, 2)
    RunDirectory(tmp_path).close()
    assert fresh.exists()
    assert not old.exists()


def age(entry: Path, hours: float) -> None:
    past = time.time() - hours * 3600
    os.utime(entry, (past, past))


def test_a_directory_whose_lock_was_cleaned_away_is_dead_only_when_nothing_in_it_has_changed_for_long(
    tmp_path: Path,
) -> None:
    alive, dead = (tmp_path / f"outsize-run-999999999-{each * 12}" for each in "ab")
    for entry in (alive, dead):
        entry.mkdir()
        (entry / "unit").write_text("state")
        age(entry, 2)
    age(dead / "unit", 2)
    RunDirectory(tmp_path).close()
    assert (alive / "unit").exists()
    assert not dead.exists()


def test_a_lock_is_as_young_as_the_newest_file_of_its_run(engine: _native.DiskEngine, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    age(run.path / "lock", 240)
    StripedFile(engine, [run.path], "unit", PAGE).close()
    assert time.time() - (run.path / "lock").stat().st_mtime < 3600
    (run.path / "lock").unlink()
    StripedFile(engine, [run.path], "other", PAGE).close()
    assert not (run.path / "lock").exists()  # one without a lock on it would be a dead run's
    run.close()


@pytest.mark.parametrize(("kind", "code"), [("missing", errno.ENOENT), ("file", errno.ENOTDIR)])
def test_an_unusable_directory_is_a_users_mistake_and_an_os_error(tmp_path: Path, kind: str, code: int) -> None:
    place = tmp_path / "place" / "disk" if kind == "missing" else tmp_path / "place"
    if kind == "file":
        place.write_text("x")
    for action in (lambda: RunDirectory(place), lambda: free_bytes([place])):
        with pytest.raises(DiskDirectoryError, match="place") as caught:
            action()
        assert isinstance(caught.value, OSError)
        assert isinstance(caught.value, ValueError)
        assert caught.value.errno == code


def test_free_space_counts_each_file_system_once(tmp_path: Path) -> None:
    first, second = places(tmp_path, 2)
    assert free_bytes([first, second]) == pytest.approx(free_bytes([first]), rel=0.01)


def test_the_limit_on_open_files_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [1024, 5000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.__setitem__(0, wanted[0]))
    disk_tier.allow_open_files(50)
    assert limits[0] == 1024
    disk_tier.allow_open_files(2000)
    assert 4512 < limits[0] <= 5000
    disk_tier.allow_open_files(3000)  # not two of each, but all
    assert limits[0] == 5000
    with pytest.raises(ValueError, match=r"are 4600 files on disk, and of the 5000 that this process may have open"):
        disk_tier.allow_open_files(4600)
    limits[:] = [1024, resource.RLIM_INFINITY]
    disk_tier.allow_open_files(1 << 20)
    assert limits[0] > 1 << 21


def test_an_unknown_disk_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_DISK_ENGINE", "tape")
    with pytest.raises(ValueError, match="OUTSIZE_DISK_ENGINE is 'tape'; it must be 'uring' or 'threads'"):
        disk_tier.open_engine()


# -- memory ----------------------------------------------------------------------------------------------------------


def test_a_dropped_buffer_keeps_its_address_and_reads_as_zeros() -> None:
    buffer = HostBuffer(3 * PAGE + 5)
    view = buffer.bytes[PAGE:]
    address = buffer.address
    buffer.bytes.fill_(7)
    buffer.drop()
    assert buffer.address == address
    assert address % PAGE == 0
    assert not view.any()
    view.fill_(3)
    assert int(buffer.bytes[PAGE]) == 3


def resident_bytes(buffer: HostBuffer) -> int:
    """How much of the buffer is in memory, by the page map of this process."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(buffer.address // PAGE * 8)
        entries = pagemap.read(-(-buffer.nbytes // PAGE) * 8)
    return sum(entry >> 63 for (entry,) in struct.iter_unpack("<Q", entries)) * PAGE


def test_a_buffer_brings_no_page_of_its_neighbours_into_memory() -> None:
    buffers = [HostBuffer((5 << 20) + PAGE) for _ in range(12)]  # the kernel merges their mappings
    for buffer in buffers[::2]:
        buffer.bytes.fill_(1)
        assert resident_bytes(buffer) == buffer.nbytes
        buffer.drop()
    assert [resident_bytes(buffer) for buffer in buffers] == [0] * len(buffers)


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "a system that moves none"])
def test_buffers_that_hand_their_pages_on_hold_what_is_written_to_them(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the sizes and the order: no page is in two buffers, or lost, and who hands on reads as zeros."""
    monkeypatch.setattr(memory, "_can_move_pages", True)
    if not moves:
        monkeypatch.setattr(memory, "_MREMAP_MOVE", 1 << 20)  # which no kernel knows
    drawn = random.Random(0)
    buffers = [HostBuffer((drawn.choice([1, 4, 5, 8]) << 20) + drawn.randrange(8) * PAGE) for _ in range(16)]
    held: dict[int, int] = {}
    for _ in range(150):
        index, value = drawn.randrange(len(buffers)), drawn.randrange(1, 255)
        free = [other for other in range(len(buffers)) if other not in held]
        if index not in held:
            heir = index
        else:
            heir = drawn.choice(free)
            buffers[index].hand_on(buffers[heir])
            del held[index]
            assert not buffers[index].bytes.any()
        if drawn.random() < 0.8 and len(held) < 8:
            buffers[heir].bytes.fill_(value)
            held[heir] = value
        else:
            buffers[heir].drop()
            assert resident_bytes(buffers[heir]) == 0
        assert all(bool((buffers[each].bytes == value).all()) for each, value in held.items())


def test_pages_are_handed_on_without_new_memory() -> None:
    first, second = HostBuffer(16 << 20), HostBuffer(16 << 20)
    first.bytes.fill_(7)
    first.hand_on(second)
    assert resident_bytes(first) == 0
    assert resident_bytes(second) >= 12 << 20 or not memory._can_move_pages
    second.bytes.fill_(8)
    second.hand_on(first)  # and back, part by part
    assert resident_bytes(second) == 0
    assert resident_bytes(first) >= 12 << 20 or not memory._can_move_pages


def test_the_ledger_remembers_peaks() -> None:
    ledger = Ledger()
    ledger.add("host/params", 5)
    ledger.add("host/params", 7)
    ledger.remove("host/params", 10)
    assert (ledger.now["host/params"], ledger.peak["host/params"]) == (2, 12)
    with pytest.raises(AssertionError, match="below zero"):
        ledger.remove("host/params", 3)


class _Below(torch.Tensor):
    """Makes a buffer where autograd does not look, as what answers for a gradient at rest does."""

    made: HostBuffer

    @staticmethod
    def __new__(cls) -> _Below:
        return torch.Tensor._make_wrapper_subclass(cls, (1,))  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.made = HostBuffer(100)
        return torch.ones(1)


def test_a_buffer_is_known_to_be_in_use_wherever_it_was_made() -> None:
    _Below().neg()
    for made in (HostBuffer(100).bytes, _Below.made.bytes):
        assert unused(made)
        view = made[:8].view(torch.float32)
        assert not unused(made)
        del view
        assert unused(made)


def test_many_small_buffers_take_few_mappings() -> None:
    """A process may have 65,530: those of buffers side by side are one."""

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    kept = [HostBuffer(1000) for _ in range(500)]
    for each in kept:
        each.bytes.fill_(1)
    assert mappings() - before < 100
