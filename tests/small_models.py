"""The models that tests share."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block of three layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks and a head: a unit each."""

    def __init__(self, width: int = 16, hidden: int = 40, depth: int = 3, out: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(depth)])
        self.head = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InTurn(nn.Module):
    """Layers of a kind, one after the other, and a linear head where its two widths are given."""

    def __init__(self, layer: Callable[[], nn.Module], depth: int = 3, head: tuple[int, int] | None = (16, 4)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(depth)])
        self.head = nn.Identity() if head is None else nn.Linear(*head)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Product(torch.autograd.Function):
    """`x @ weight.t()`, past all that looks at operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Built(nn.Module):
    """Makes what its class names: `class Mlp(Built, up=(16, 40), act=nn.GELU, down=(40, 4))`. Two widths are those of a
    linear layer; all else is called."""

    made: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **made: Any) -> None:
        super().__init_subclass__()
        cls.made = {**cls.made, **made}

    def __init__(self) -> None:
        super().__init__()
        for name, make in self.made.items():
            setattr(self, name, nn.Linear(*make) if isinstance(make, tuple) else make())


def linears(width: int, count: int, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias) for _ in range(count)))


def llama_config(width: int, hidden: int, layers: int, heads: int, vocabulary: int, **more: Any) -> Any:
    """Of a small Llama of transformers."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return LlamaConfig(num_attention_heads=heads, **sizes, **more)
