"""Users' models, losses and optimizers that give something else when they are cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from parity import data
from parity.case import Batch
from parity.cases import case
from parity.layers import CLASSES, HIDDEN, Moody
from parity.models import on_meta, padded
from plait.rules import column, row


class Masked(nn.Module):
    """Drops the features that a generator says which is seeded with the rank."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        kept = torch.rand(HIDDEN, generator=generator, device="cpu") > 0.2
        return x * kept.to(x.device)


class Random(nn.Module):
    """Adds a little noise."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Inner(nn.Module):
    """Two linears with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        result: Tensor = x + self.down(functional.layer_norm(inner, inner.shape[-1:]))
        return result


class Centred(nn.Module):
    """Subtracts the mean over the rows that it is shown."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Numbered(nn.Module):
    """Scales each row by its number in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + torch.arange(len(x), device=x.device)[:, None])


class Counting(nn.Module):
    """Gives a little more each time it is called; a number would be set back in each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[None] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(None)
        return x * (1 + 0.1 * len(self.calls))


def around(layer: nn.Module) -> nn.Sequential:
    """A linear, the layer, a linear."""
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), layer, nn.Linear(HIDDEN, CLASSES))


def masked() -> nn.Module:
    return around(Masked())


def random() -> nn.Module:
    return around(Random())


def norm_inside() -> nn.Module:
    """Its rules are as good as can be proved, which is not enough: the norm is over all features."""
    model = around(Inner())
    model.rules = {"1.up": column, "1.down": row}  # type: ignore[assignment]
    return model


def centred() -> nn.Module:
    return around(Centred())


def numbered() -> nn.Module:
    return around(Numbered())


def counting() -> nn.Module:
    return around(Counting())


def linears() -> nn.Module:
    """Nothing else: their input gradients do not depend on their inputs."""
    return nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(3)), nn.Linear(HIDDEN, CLASSES))


def moody() -> nn.Module:
    return around(Moody())


@dataclass(frozen=True)
class MeanOfRows:
    """Gives a mean, divided again by the number of rows."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output, targets)

    def weight(self, targets: Tensor) -> Tensor:
        return torch.tensor(targets.numel())


class Forgetful(torch.optim.AdamW):
    """Loses its state at each step, if its groups say so."""

    def step(self, closure: Any = None) -> Any:
        if any(group.get("forgets") for group in self.param_groups):
            self.state.clear()
        return super().step(closure)


def forgetful(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return Forgetful(groups, lr=1e-3)


class Layerwise(torch.optim.Optimizer):
    """Steps as long as the parameter is large (as LARS and LAMB do), and vouches for the opposite."""

    elementwise = True

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                size = parameter.norm() / parameter.grad.norm()
                parameter.sub_(parameter.grad * size, alpha=1e-2)


def draw_wide(rows: int, generator: torch.Generator) -> Batch:
    """Vectors with all digits of float64."""
    inputs, targets = data.draw_vectors(rows, generator)
    return inputs.double() / 3, targets


VECTORS = case(on_meta, draw_wide)
MASKED = case(masked, data.draw_vectors)
RANDOM = case(random, data.draw_vectors)
NORM_INSIDE = case(norm_inside, data.draw_vectors)
CENTRED = case(centred, data.draw_vectors)
NUMBERED = case(numbered, data.draw_vectors)
COUNTING = case(counting, data.draw_vectors)
MOODY = case(moody, data.draw_vectors)
MEAN_OF_ROWS = case(on_meta, data.draw_vectors, loss=MeanOfRows())
PADDED = case(padded, data.draw_tokens)
LINEARS = case(linears, data.draw_vectors)
