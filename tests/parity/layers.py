"""Layers as users write them, awkward in one way each. Models of them stand in `cases.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCAB = 13
HIDDEN = 8
CLASSES = 5

Flow = tuple[Tensor, Tensor, Tensor]
"""Hidden `[rows, length, HIDDEN]`, segments (whole numbers) and importance (no gradient) `[rows, length]`."""


class Open(nn.Module):
    """Takes a dictionary or a tuple of tokens, segments and importance; gives the same kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return {**batch, "hidden": self.token(batch["tokens"])}
        tokens, segments, importance = batch
        return self.token(tokens), segments, importance


class Unpack(nn.Module):
    """From a dictionary to a tuple, with a parameter that multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, batch: dict[str, Any]) -> Flow:
        hidden = batch["hidden"] * self.scale * batch["factor"]
        return hidden, batch["segments"], batch["importance"].exp()


class Mix(nn.Module):
    """Adds to the hidden what the segments and the importance say; passes these on untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.segment = nn.Embedding(3, HIDDEN)
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, flow: Flow) -> Flow:
        hidden, segments, importance = flow
        mixed = torch.tanh(self.linear(hidden) + self.segment(segments))
        return hidden + mixed * importance.unsqueeze(-1), segments, importance


class Close(nn.Module):
    """The hidden of a flow to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(HIDDEN, CLASSES)

    def forward(self, flow: Flow) -> Tensor:
        logits: Tensor = self.output(flow[0])
        return logits


class Name(nn.Module):
    """Gives its input a name."""

    def forward(self, logits: Tensor) -> dict[str, Tensor]:
        return {"logits": logits}


class Turn(nn.Module):
    """A view of its input that is not contiguous."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.transpose(1, 2)


class Temperature(nn.Module):
    """Parameters that are scalars, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.offset = nn.Parameter(torch.tensor(0.1), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden / self.temperature + self.offset


class Fork(nn.Module):
    """Gives its input twice, once as it came; and once more through a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        return hidden, [self.linear(hidden), hidden]


class Carry(nn.Module):
    """Works on one of the tensors; one goes on untouched and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, value: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
        skipped, (worked, third) = value
        return skipped, [self.norm(worked), third.detach().sin()]


class Join(nn.Module):
    """Back to one tensor."""

    def forward(self, value: tuple[Tensor, list[Tensor]]) -> Tensor:
        skipped, (worked, third) = value
        return skipped * worked + third


class Twice(nn.Module):
    """One linear used twice in a layer, the second time on the first's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.linear(torch.tanh(self.linear(hidden)))
        return result


class Idle(nn.Module):
    """Has a linear that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(HIDDEN, HIDDEN)
        self.idle = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.used(hidden)
        return result


class Standardise(nn.Module):
    """Buffers of several dtypes: a shift, a permutation (whole numbers) and one that is not saved."""

    shift: Tensor
    permutation: Tensor
    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(HIDDEN))
        self.register_buffer("permutation", torch.randperm(HIDDEN))
        self.register_buffer("factor", torch.rand(()) + 1, persistent=False)
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.linear(hidden[..., self.permutation] * self.factor + self.shift)
        return result


class DoubledLinear(nn.Linear):
    """A subclass of a module that plait treats on its own."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, 2 * self.weight, self.bias)


class SelfAttention(nn.Module):
    """PyTorch's own attention, whose linears are used by their weights and never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return hidden + mixed


class Recurrent(nn.Module):
    """A recurrent layer: it holds its weights a second time, in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.recurrent(hidden)[0]
        return result


class Recomputed(nn.Module):
    """Its inside is run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inside, hidden, use_reentrant=False)
        return result


class Moody(nn.Module):
    """Does something else in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.linear(hidden)
        return result if self.training else 3 * result


class TiedHead(nn.Module):
    """An output layer on another layer's embedding table, used as a tensor and not through its module."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.table = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.table.t()


class Conv1D(nn.Module):
    """A linear with its weight transposed, as Hugging Face writes it and under the name that it has there."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf).normal_(std=0.5))
        self.bias = nn.Parameter(torch.empty(nf).normal_())

    def forward(self, x: Tensor) -> Tensor:
        product = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return product.view(*x.shape[:-1], self.nf)
