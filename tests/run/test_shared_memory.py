"""Parameters and buffers that share memory without being one object."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import outsize
from tests.conftest import Workshop, adamw, batches
from tests.small_models import Stack


def _same_memory() -> nn.Module:
    model = Stack()
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data
    return model


def _overlapping_columns() -> nn.Module:
    model, columns = Stack(), torch.randn(40, 24)
    model.blocks[0].up.weight = nn.Parameter(columns[:, :16])
    model.blocks[1].up.weight = nn.Parameter(columns[:, 8:])
    return model


def _buffer_of_a_parameter() -> nn.Module:
    model = Stack()
    model.register_buffer("scale", model.head.bias.detach()[:2])
    return model


def _expanded() -> nn.Module:
    model = Stack()
    model.head.bias = nn.Parameter(torch.zeros(1).expand(4))
    return model


def _shared_by_processes() -> nn.Module:
    """As mnist_hogwild of torch's examples."""
    return Stack().share_memory()


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (_same_memory, r"'blocks.0.up.weight' and 'blocks.1.up.weight' share memory and are two objects.*Tie them"),
        (_overlapping_columns, r"'blocks.0.up.weight' and 'blocks.1.up.weight' share memory"),
        (_buffer_of_a_parameter, r"buffer 'scale' is a view of parameter 'head.bias'.*compute the view in forward"),
        (_expanded, r"'head.bias' of shape \(4,\) was made by expand.*clone"),
        (_shared_by_processes, r"lies in memory that processes share .*torchrun"),
    ],
)
def test_memory_that_parameters_share_is_refused_with_both_names(build: Callable[[], nn.Module], match: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=match):
        outsize.prepare(model, adamw(model), host_memory="64MiB")
    model(torch.randn(2, 16))


def test_parameters_that_lie_in_one_memory_side_by_side_train_like_torch(workshop: Workshop) -> None:
    def build() -> nn.Module:
        model, columns = Stack(), torch.linspace(-1, 1, 40 * 32).view(40, 32)
        model.blocks[0].up.weight = nn.Parameter(columns[:, :16])
        model.blocks[1].up.weight = nn.Parameter(columns[:, 16:])
        return model

    workshop.pair(build).train(batches(2))


@pytest.mark.parametrize("shared", [True, False])
def test_a_parameter_in_a_mapped_file_trains_like_torch(workshop: Workshop, tmp_path: Path, shared: bool) -> None:
    def build() -> nn.Module:
        model, path = Stack(), tmp_path / f"{len(list(tmp_path.iterdir()))}"
        path.write_bytes(bytes(40 * 16 * 4))
        values = torch.from_file(str(path), shared=shared, size=40 * 16)
        model.blocks[0].up.weight = nn.Parameter(values.view(40, 16).copy_(torch.linspace(-1, 1, 640).view(40, 16)))
        return model

    workshop.pair(build).train(batches(2))


def test_a_copy_of_a_model_that_processes_share_trains_like_torch(workshop: Workshop) -> None:
    workshop.pair(lambda: copy.deepcopy(_shared_by_processes())).train(batches(2))
