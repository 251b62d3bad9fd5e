"""Prepared models beside threads and processes: what works, and what is refused."""

import os
import threading
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import outsize
from tests.conftest import Pair, Workshop, batches, prepared, train
from tests.small_models import Stack, linears


def test_a_forward_from_a_second_thread_at_once_is_refused(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    inside, leave = threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            leave.wait(10)

    rows = batches(1)[0][0]

    def other() -> None:
        try:
            pair.model(rows)
        except BaseException as error:
            caught.append(error)

    handle = pair.model.blocks[1].register_forward_hook(wait)
    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(RuntimeError, match="two threads at once"):
        pair.model(batches(1)[0][0])
    leave.set()
    thread.join()
    handle.remove()
    assert not caught
    pair.train(batches(3))


def test_training_may_move_to_another_thread(pair: Pair) -> None:
    expected = train(pair.plain, pair.plain_optimizer, batches(3))
    found = []
    data = batches(3)
    thread = threading.Thread(target=lambda: found.append(train(pair.model, pair.optimizer, data)))
    thread.start()
    thread.join()
    found[0].close_to(expected)
    pair.check()


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """The batches of the other tests, one row each."""

    def __init__(self) -> None:
        self.data = batches(4)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_data_loader_workers_work_and_leave_the_files_alone(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    loader = DataLoader(Numbers(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        pair.train(loader)
    assert len(os.listdir(workshop.disk)) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_ends_normally_removes_nothing(workshop: Workshop) -> None:
    pair = workshop.pair(tier="disk")
    child = os.fork()
    if child == 0:
        prepared(pair.model).resources.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    pair.train(batches(2))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_that_a_model_of_init_is_not_its_own(workshop: Workshop) -> None:
    with outsize.init(host_memory="1MiB", disk=workshop.disk, device="cpu"):
        model = linears(256, 8)
    child = os.fork()
    if child == 0:
        try:
            outsize.prepare(model, host_memory="4MiB", disk=workshop.disk, device="cpu")
        except RuntimeError as error:
            os._exit(0 if "by another process, not by this fork; use the model there" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    outsize.prepare(model, host_memory="4MiB", disk=workshop.disk, device="cpu")


def test_two_models_train_at_once_in_one_directory(workshop: Workshop) -> None:
    pairs: list[Pair] = [workshop.pair(tier="squeezed"), workshop.pair(lambda: Stack(depth=2), tier="disk")]
    for _ in range(2):
        for pair in pairs:
            pair.train(batches(2))
    assert len(os.listdir(workshop.disk)) == 2


def test_a_model_whose_engine_was_closed_says_so(workshop: Workshop) -> None:
    pair = workshop.pair(tier="squeezed")
    prepared(pair.model).engine.streamer.drop_idle()
    prepared(pair.model).resources.close()
    with pytest.raises(RuntimeError, match="closed"):
        pair.model(batches(1)[0][0])
