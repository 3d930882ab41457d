from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from parity import woven
from parity.case import Case
from parity.cases import case
from parity.data import draw_vectors
from parity.layers import CLASSES, HIDDEN
from parity.recorded_steps import recording_engine
from plait.engine import Engine
from plait.errors import PlanError
from plait.plan.plan import Plan


class Shifted(nn.Module):
    """A linear, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, CLASSES)
        self.register_buffer("shift", torch.ones(CLASSES, dtype=torch.float64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden) + self.shift


CASE: Case = case(lambda: nn.Sequential(Shifted()), draw_vectors)


def move_parameter(engine: Engine) -> None:
    """Replace a parameter's memory."""
    weight = dict(engine.named_parameters())["0.linear.weight"]
    weight.data = weight.data.clone()


def move_buffer(engine: Engine) -> None:
    """Replace a buffer."""
    engine._runner.modules[0].shift = torch.ones(CLASSES, dtype=torch.float64)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (move_parameter, "the parameter 0.linear.weight of stage 0"),
        (move_buffer, "the buffer 0.shift of stage 0"),
    ],
)
def test_memory_that_moves_after_a_recording_is_refused_by_name(
    move: Callable[[Engine], None], name: str
) -> None:
    engine = recording_engine(CASE, Plan(precision="fp64", cuda_graphs=True))
    batches = woven.shares(CASE, engine, 5)
    engine.forward_backward(*batches[0])
    move(engine)  # no graph uses it yet
    for batch in batches[1:4]:
        engine.forward_backward(*batch)
    move(engine)
    with pytest.raises(PlanError, match=f"{name} has moved from address 0x.* to 0x.* since graphs"):
        engine.forward_backward(*batches[4])
