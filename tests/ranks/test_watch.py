"""The watch by hand, its thread asleep: what it leaves in the store for others, and what it makes of what is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from outsize.move import meeting, watch
from outsize.move.watch import Wait, Watch, apart


class Store:
    """A job's store in memory."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.broken = False

    def _alive(self) -> None:
        if self.broken:
            raise RuntimeError("connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self._alive()
        self.content[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._alive()
        return self.content[key]

    def check(self, keys: list[str]) -> bool:
        self._alive()
        return all(key in self.content for key in keys)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watch, "time", made)
    monkeypatch.setattr(watch, "BEAT_SECONDS", 3600.0)
    return made


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def ranks(clock: Clock, store: Store) -> Iterator[list[Watch]]:
    made = [Watch(store, [0, 1, 2], rank, lambda: None) for rank in range(3)]
    yield made
    for each in made:
        each.close()


def test_all_that_count_have_nothing_to_say(ranks: list[Watch], clock: Clock) -> None:
    for _ in range(1, 30):
        clock.now += 1.0
        for each in ranks:
            each.beat()
    assert [each.said for each in ranks] == [None] * 3


def test_the_neighbour_of_a_rank_that_stands_still_tells_all(ranks: list[Watch], clock: Clock) -> None:
    for _ in range(1, int(watch.STILL_SECONDS) + 4):
        assert ranks[0].said is None
        clock.now += 1.0
        for rank in (0, 2):
            ranks[rank].beat()
    assert ranks[0].said is not None and ranks[2].said is not None
    assert ranks[2].said[0] == 1 and "is gone" in ranks[2].said[1]


def test_a_rank_that_stood_still_itself_accuses_nobody(ranks: list[Watch], clock: Clock) -> None:
    for _ in range(1, 10):  # each time all stand still for longer than a dead one may, and wake one after the other
        clock.now += watch.STILL_SECONDS + 10.0
        for each in ranks:
            each.beat()
    assert [each.said for each in ranks] == [None] * 3


@pytest.mark.parametrize("stall", [4.0, 5.5, 26.0])
@pytest.mark.parametrize("number", range(7))
def test_who_is_gone_is_found_though_the_machine_stands_still_meanwhile(
    ranks: list[Watch], clock: Clock, number: int, stall: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.5)
    waits = [watch.BEAT_SECONDS] * 30
    waits[number] = stall

    def wait(_: float) -> bool:
        clock.now += waits.pop(0)
        ranks[2].beat()
        return False

    monkeypatch.setattr(ranks[0]._closing, "wait", wait)
    assert ranks[0].find_gone() == (1, "is gone (killed, ended or unreachable)")


def test_the_first_word_stays(ranks: list[Watch]) -> None:
    ranks[1].tell(OSError("the disk is full"))
    ranks[2].tell(RuntimeError("rank 1 has failed"))
    ranks[0].beat()
    assert ranks[0].said == (1, "has failed (OSError: the disk is full)")


def test_a_rank_that_ends_is_not_gone(ranks: list[Watch], clock: Clock) -> None:
    ranks[1].close()
    for _ in range(1, 10):
        clock.now += 1.0
        for rank in (0, 2):
            ranks[rank].beat()
    assert ranks[0].said == ranks[2].said == (1, "has ended its run")


def test_without_a_store_nobody_is_accused(ranks: list[Watch], store: Store) -> None:
    store.broken = True
    assert not ranks[2].beat()
    assert ranks[2].said == (None, "the store of this job, which rank 0 or the launcher keeps, is gone")
    ranks[2].tell(OSError("whatever"))  # there is nobody to tell, and that is no error
    assert ranks[1].find_gone() == (None, "the store of this job, which rank 0 or the launcher keeps, is gone")
    store.broken = False


def waits(lane: str, turn: int, **come: int) -> Wait:
    """For the `turn`-th collective of a lane, where the n-th one is called n on every rank."""
    keys = {name: (0, list(range(count + 1))) for name, count in come.items()}
    return Wait(f"{lane} {turn}", lane, turn, turn, [0, 1, 2], keys)


@pytest.mark.parametrize(
    ("every", "never"),
    [
        ([waits("gather", 5, gather=5, control=2), waits("control", 3, gather=4, control=3)], True),
        (
            [waits("gather", 5, gather=5, control=2), waits("gather", 6, gather=6, control=2)],
            False,
        ),  # the first is slow
        ([waits("control", 3, control=3, gather=5), waits("gather", 6, control=3, gather=6)], False),
        ([waits("gather", 5, gather=5), waits("gather", 5, gather=5)], False),
        ([waits("gather", 5, gather=5), waits("control", 1, control=1)], True),  # of a model that the other has not
        ([waits("a", 1, a=1, b=0, c=0), waits("b", 1, a=0, b=1, c=0), waits("c", 1, a=0, b=0, c=1)], True),
        ([waits("a", 1, a=1, b=0), waits("a", 1, a=1, b=0), waits("b", 1, a=1, b=1)], False),
        (
            [
                Wait("", "gather", 7, 3, [0, 1], {"gather": (7, [3])}),
                Wait("", "gather", 7, 4, [0, 1], {"gather": (7, [4])}),
            ],
            True,
        ),
        (
            [
                Wait("", "gather", 7, 3, [0, 1], {"gather": (7, [3])}),
                Wait("", "gather", 8, 5, [0, 1], {"gather": (8, [5])}),
            ],
            False,
        ),
    ],
)
def test_ranks_are_apart_if_each_waits_for_one_that_waits_elsewhere(every: list[Wait], never: bool) -> None:
    assert apart(dict(enumerate(every))) is never


@pytest.fixture
def parted(clock: Clock, store: Store) -> Iterator[list[Watch]]:
    lanes = ["gather", "control"]
    made = [Watch(store, [0, 1], rank, lambda rank=rank: waits(lanes[rank], 1, **{lanes[rank]: 1})) for rank in (0, 1)]
    yield made
    for each in made:
        each.close()


def test_ranks_that_are_apart_for_some_looks_say_what_each_waits_for(parted: list[Watch]) -> None:
    for _ in range(4):
        assert not parted[0].apart
        for each in parted:
            each.beat()
    assert parted[0].apart == parted[1].apart == {0: "gather 1", 1: "control 1"}


def test_what_a_rank_waited_for_before_it_stood_still_counts_for_nothing(parted: list[Watch]) -> None:
    parted[1].beat()
    for _ in range(20):
        parted[0].beat()
    assert not parted[0].apart
    parted[1].beat()  # it may have found that before the other waited
    parted[0].beat()
    assert not parted[0].apart
    parted[1].beat()
    parted[0].beat()
    assert parted[0].apart


def test_the_end_of_the_process_waits_for_a_watch_that_is_in_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go = threading.Event(), threading.Event()

    def get(key: str) -> bytes:
        inside.set()
        go.wait()
        return b""

    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.0)
    monkeypatch.setattr(store, "get", get)
    made = Watch(store, [0, 1], 0, lambda: None)
    store.set("word", "")
    assert inside.wait(10)
    made.close()
    threading.Timer(0.05, go.set).start()
    meeting._close_all()
    assert not any(thread.name == "outsize-ranks" for thread in threading.enumerate())
