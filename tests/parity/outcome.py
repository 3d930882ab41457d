"""What a run gives, on either side."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from plait.plan.layout import Layout


@dataclass
class Outcome:
    """Of a training run: per step the loss (of each call) and the norm before clipping.

    `gradients` are those of the first step, before clipping; `parameters` those after the last. By full name.

    Of a rank they are its parts: `coordinate` and `layouts` say which. On a single device they are whole.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    coordinate: dict[str, int] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
