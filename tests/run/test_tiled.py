"""`outsize.tiled`: a module runs on one tile of its input after the other."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from tests.conftest import TIERS, Workshop, sgd
from tests.small_models import Built, InTurn


class Mlp(nn.Module):
    """As in a transformer; `scale` is given to each tile whole."""

    def __init__(self, width: int = 16, hidden: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        self.widest = 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.widest = max(self.widest, x.shape[1])
        return x + self.dropout(self.down(torch.relu(self.up(x)))) * (1.0 if scale is None else scale)


def data(rows: int = 2, positions: int = 125) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(rows)
    values = torch.randn(rows, positions, 20, generator=generator, device="cpu").to(torch.get_default_device())
    return values[..., :16], values[..., 16:]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "selective"])
def test_tiles_train_what_the_whole_trains(workshop: Workshop, tier: str, activations: str) -> None:
    """125 positions in 4 tiles; tiled before `prepare`, and after it."""
    for first in (True, False):
        torch.manual_seed(0)

        def build(first: bool = first) -> nn.Module:
            model = InTurn(lambda: nn.Sequential(nn.LayerNorm(16), Mlp()), 2)
            for layer in model.layers if first else ():
                outsize.tiled(layer[1], tiles=4)  # type: ignore[index]
            return model

        pair = workshop.pair(build, sgd, tier, activations=activations)
        for layer in pair.plain.layers:  # type: ignore[union-attr]
            outsize.tiled(layer[1], tiles=1)
        for layer in () if first else pair.model.layers:  # type: ignore[union-attr]
            outsize.tiled(layer[1], tiles=4)
        outsize.tiled(pair.model.head, tiles=3)  # type: ignore[arg-type]
        pair.train([data(2), data(1), data(2, 3)])
        assert pair.plain.layers[0][1].widest == 125  # type: ignore[index, union-attr]
        assert pair.model.layers[0][1].widest == 32  # type: ignore[index, union-attr]


def test_without_prepare_and_undone() -> None:
    torch.manual_seed(0)
    plain = Mlp()
    tiles = outsize.tiled(copy.deepcopy(plain), tiles=5)
    again = copy.deepcopy(tiles)
    for module in (tiles, again, pickle.loads(pickle.dumps(tiles))):
        x, scale = data()[0].requires_grad_(), torch.full((16,), 0.5)
        module(x, scale=scale).square().sum().backward()
        mine = x.grad
        x.grad = None
        plain.zero_grad()
        plain(x, scale=scale).square().sum().backward()
        torch.testing.assert_close(mine, x.grad)
        torch.testing.assert_close(module.up.weight.grad, plain.up.weight.grad)
        assert module.widest == 25
        assert set(module.state_dict()) == set(plain.state_dict())
    assert "forward" not in vars(outsize.tiled(tiles, tiles=1))
    tiles(x)
    assert tiles.widest == 125
    assert again.widest == 25


def test_tiles_keep_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd keeps of a tiled MLP is its input."""

    def kept(module: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = data()[0].contiguous().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x)
        return sum(sizes.values()) - sum(each.nbytes for each in module.parameters())

    mlp = Mlp()
    assert kept(mlp) > 4 * data()[0].nbytes
    assert kept(outsize.tiled(mlp)) <= data()[0].nbytes


def test_dropout_repeats() -> None:
    mlp = outsize.tiled(Mlp(dropout=0.5), tiles=4)
    x = data()[0].requires_grad_()
    torch.manual_seed(3)
    mlp(x).square().sum().backward()
    tiled = x.grad
    torch.manual_seed(3)
    y = x.detach().requires_grad_()
    forward = mlp.forward.__wrapped__  # type: ignore[attr-defined]
    torch.cat([forward(tile) for tile in y.tensor_split(4, 1)], 1).square().sum().backward()
    torch.testing.assert_close(tiled, y.grad)


class Mixing(nn.Module):
    """Each position sees the mean of all."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


REFUSED: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "takes a torch.nn.Module, not int", lambda: outsize.tiled(3)),  # type: ignore[arg-type]
    (ValueError, "tiles is 0; it must be an integer of at least 1", lambda: outsize.tiled(Mlp(), tiles=0)),
    (ValueError, "dim is -1; it must be an integer of at least 0", lambda: outsize.tiled(Mlp(), dim=-1)),
    (ValueError, r"Mixing cannot run in tiles .* depends on the", lambda: mixed(Mixing())),
    (ValueError, r"cannot run in tiles .* one by one", lambda: mixed(nn.Unflatten(1, (2, -1)))),
]


def mixed(module: nn.Module) -> None:
    outsize.tiled(module, tiles=4)(data(2, 126)[0])


@pytest.mark.parametrize(("kind", "message", "call"), REFUSED)
def test_what_cannot_be_tiled_is_refused(kind: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(kind, match=message):
        call()


class Shifts(Built, lin=(8, 8)):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x.add_(1))


def test_the_remedy_for_a_module_that_changes_its_input_is_that_of_the_call_that_tiles_it() -> None:
    module, x = outsize.tiled(Shifts(), tiles=4), torch.ones(2, 16, 8)
    with pytest.raises(RuntimeError, match=r"^layer Shifts changes .*: outsize.tiled\(module, tiles=1\) leaves"):
        module(x)
    outsize.tiled(module, tiles=1)(x).sum().backward()
