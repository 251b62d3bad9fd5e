"""Where ranks meet to share a model, and what a process says to the others before it ends."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from outsize.move.lanes import LOOK, ROWS, SAVE, Lane, Model, RanksError, broke
from outsize.move.watch import ENDED, Wait, Watch, await_closed, named

logger = logging.getLogger("outsize")

STUCK_SECONDS = 1.5
"""After so long a wait a rank says what it waits for."""

MEETING = timedelta(minutes=10)
"""How far apart ranks may come to `prepare`."""

MEETING_WORD_SECONDS = 10.0
"""After so long a wait for the others the log says for whom."""


def meet(everyone: list[int], sync: bool) -> Model:
    """Wait until all ranks are here. Where they share a model already, its watch finds out if they never will."""
    number, own = next(_made), dist.get_rank()
    shared = [each for each in _open_models() if each.watch.members == everyone and not each.watch.closed]
    watch = Watch(own_store(number, everyone, apart=True), everyone, own, partial(_stuck, everyone))
    model = Model(number, sync, watch)
    lane = Lane("prepare", everyone, model)
    with _lock:
        _models.add(model)
    _listen_to_errors()
    began, told = time.monotonic(), False
    try:
        with lane.waiting(lane.next("outsize.prepare of another model", number)):
            while missing := watch.missing():
                if shared and not shared[0].watch.over:
                    shared[0].check("outsize.prepare", remedy="")
                waited = time.monotonic() - began
                if waited > MEETING.total_seconds():
                    raise RanksError(
                        f"{named(missing)} did not come to outsize.prepare within {MEETING}: every rank must call it, "
                        f"as often as the others"
                    )
                if waited > MEETING_WORD_SECONDS and not told:
                    told = True
                    here, away = named([own]), named(missing)
                    logger.warning("%s waits in outsize.prepare for %s, as every rank must call it", here, away)
                time.sleep(LOOK.total_seconds())
                _refuse_who_left(watch)
            watch.look([], 0)  # a rank may have come and left again
            _refuse_who_left(watch)
    except BaseException:
        model.close()
        raise
    return model


def _refuse_who_left(watch: Watch) -> None:
    if watch.said is not None:
        rank, became = watch.said
        who = "" if rank is None else f"{named([rank])} "
        left = "has left outsize.prepare with an error" if became == ENDED else became
        raise RanksError(f"{who}{left} while this rank was in outsize.prepare: start the job again")


def _stuck(members: Sequence[int]) -> Wait | None:
    """What this rank has been waiting for, for some time, of whatever model these ranks share."""
    models = [model for model in reversed(_open_models()) if model.watch.members == members]
    lanes = [lane for model in models for lane in list(model.lanes)]  # what the loop waits for comes before a gather
    lanes.sort(key=lambda lane: not lane.name.endswith(ROWS))
    come = {lane.name: (lane.before, list(lane.come)) for lane in lanes}
    long = time.monotonic() - STUCK_SECONDS
    waits = [each for lane in lanes for each in list(lane.waits.values()) if each[0] < long]
    if any(unless is not None and unless() for _, _, unless in waits):
        return None  # it goes on as soon as it looks
    for lane in lanes:
        for since, turn, _ in sorted(lane.waits.values(), key=lambda each: each[1].number):
            if not lane.name.endswith(SAVE) and since < long:
                return Wait(lane.model.words(turn), lane.name, turn.number, turn.key, lane.members, come)
    return None


_made = itertools.count()  # every rank makes its groups in the same order


def own_store(number: int, members: Sequence[int], apart: bool = False) -> Any:
    """A place of its own in the store of the job. After a restart the store may still hold what the last try wrote.

    `apart`: on a connection of its own, which nobody else's waiting holds up."""
    store: Any = distributed_c10d._get_default_store()
    base = store
    while isinstance(base, distributed_c10d.PrefixStore):
        base = base.underlying_store
    if apart and type(base).__name__ == "TCPStore" and hasattr(store, "clone"):
        store = store.clone()  # a store in memory or in a file has no connection
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed_c10d.PrefixStore(f"outsize/{attempt}/{number}/{members[0]}-{members[-1]}", store)


_models: weakref.WeakSet[Model] = weakref.WeakSet()
_lock = threading.Lock()  # the watches look at all


def _open_models() -> list[Model]:
    with _lock:
        return sorted(_models, key=lambda each: each.number)


def _tell_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """An error ends this process: say so to the others, who wait for it. Where one of torch's own connections broke
    (of pipelines, of tensor parallelism), first find out and say which rank is gone."""
    for model in _open_models():
        if broke(error) and (gone := model.watch.find_gone()) is not None:
            rank, became = gone
            logger.error("%s%s", "" if rank is None else f"{named([rank])} of {dist.get_world_size()} ", became)
        model.watch.tell(error)
    _excepthook(kind, error, trace)


def _listen_to_errors() -> None:
    global _excepthook
    if _excepthook is None:  # once: whoever has chained to it meanwhile is called before it
        _excepthook, sys.excepthook = sys.excepthook, _tell_all


_excepthook: Any = None


def _close_all() -> None:
    for model in _open_models():
        model.close()
    await_closed()


atexit.register(_close_all)
