"""`lookahead`: a loader whose batches come with the rows of tables that they need in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from outsize.api.assemble import require
from outsize.run.ahead import Lookahead


def lookahead(
    loader: Iterable[Any], model: nn.Module, ids: Callable[[Any], Mapping[str, torch.Tensor]] | None = None
) -> Lookahead:
    """Wrap a data loader: while a batch trains, the rows of tables that the next batch needs are read from disk.

    Tables are embeddings with `sparse=True`. The results are the same bits as without it: a row that the batch at work
    changes is read after its update. With several ranks every rank wraps its loader, and the owners of the rows read.

    Args:
        loader: any iterable of batches; it is asked for one batch more than the loop has used.
        model: the prepared model. Nothing of it runs ahead: the ids are found in the next batch where those of the last
            one were, in tensors of the batch or views of them.
        ids: for ids that the model computes (hashes, offsets): a function from a batch to `{parameter name: ids}`.

    Raises `ValueError` for a model that is not prepared, and in the loop for a name in `ids` that is no table's;
    `TypeError` in the loop where `ids` gives anything but such a dict.

    >>> for batch in outsize.lookahead(loader, model):
    ...     loss = model(batch).mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """
    return Lookahead(loader, require(model).engine, ids)
