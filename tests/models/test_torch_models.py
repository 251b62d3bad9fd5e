"""Models of plain torch whose structure is not that of a stack of layers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import outsize
from tests.small_models import Built

WIDTH = 48


class Translator(nn.Module):
    """torch's own encoder, whose fused evaluation path reads the weights of its children."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 96, dropout=0.1, batch_first=True)
        self.embedding = nn.Embedding(64, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0)
        return self.head(encoded).masked_fill((ids == 0)[..., None], 0.0)  # [rows, length, 64]


def block(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())


class SmallUNet(
    Built,
    down=lambda: nn.ModuleList([block(3, 16), block(16, 32), block(32, 64)]),
    up=lambda: nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(64, 16, 2, 2)]),
    head=lambda: nn.Conv2d(32, 2, 1),
):
    """Down and up again, with running statistics and with skips from one end of the model to the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = skips.pop()
        for up in self.up:
            x = torch.cat([up(x), skips.pop()], 1)
        return self.head(x)  # [rows, 2, height, width]


class Recurrent(
    Built,
    embedding=lambda: nn.Embedding(64, WIDTH),
    lstm=lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True),
    head=(2 * WIDTH, 64),
):
    """torch's LSTM gets all its weights in one call, as a list that the module keeps."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])  # [rows, length, 64]


class Normalised(nn.Module):
    """Weights that are computed from parameters at each use."""

    def __init__(self) -> None:
        super().__init__()
        parametrize = nn.utils.parametrizations
        self.first = parametrize.weight_norm(nn.Linear(WIDTH, 160))
        self.second = parametrize.spectral_norm(nn.Linear(160, 160))
        self.third = nn.Linear(160, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))  # [rows, 8]


def words(random: torch.Generator) -> torch.Tensor:
    ids = torch.randint(1, 64, (3, 10), generator=random)
    ids[0, -3:] = 0
    return ids


MODELS: dict[str, tuple[type[nn.Module], Callable[[torch.Generator], torch.Tensor]]] = {
    "transformer encoder": (Translator, words),
    "unet": (SmallUNet, lambda random: torch.randn(2, 3, 16, 16, generator=random)),
    "lstm": (Recurrent, words),
    "weight norm": (Normalised, lambda random: torch.randn(4, WIDTH, generator=random)),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("activations", ["keep", "recompute", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_like_torch_with_everything_on_disk(
    everything_on_disk: dict[str, Any], name: str, activations: str
) -> None:
    build, make = MODELS[name]
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    outsize.prepare(model, optimizer, host_memory="832KiB", activations=activations, **everything_on_disk)
    random = torch.Generator().manual_seed(1)
    for step in range(4):
        inputs, seen = make(random), []
        for each, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
            torch.manual_seed(step)
            each.train()
            loss = each(inputs).square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            its_optimizer.step()
            its_optimizer.zero_grad()
            each.eval()
            with torch.no_grad():
                seen.append((float(loss.detach()), float(norm), float(each(inputs).square().mean())))
        assert seen[0] == pytest.approx(seen[1], rel=2e-6)
    with outsize.gathered(model):
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-5)
