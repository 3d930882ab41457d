from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity import woven
from parity.capturable import TensorAdam
from parity.cases import gpt2
from parity.recorded_steps import graphs_of, recording_engine
from parity.repeated_operations import OperationRecorder
from plait.engine.cuda_graphs.optimizer_graph import CHANGED, RECORDED, REPLAYED, OptimizerGraph
from plait.plan.plan import Plan


def parameters() -> list[nn.Parameter]:
    """Two of them, the same each time."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [nn.Parameter(one) for one in made]


def gradients(count: int) -> Iterator[list[Tensor]]:
    """Those of `count` steps."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2)]


def compared(
    make: Callable[[Any], torch.optim.Optimizer], change: Callable[[int, Any], None], steps: int = 6
) -> list[str]:
    """How each step was done, after a comparison with plain steps; `change` is called before each step."""
    ours, plain = parameters(), parameters()
    mine, other = make(ours), make(plain)
    graph, done = OptimizerGraph(OperationRecorder()), []
    for one in (*ours, *plain):
        one.grad = torch.zeros_like(one)
    for number, drawn in enumerate(gradients(steps)):
        for one, another, gradient in zip(ours, plain, drawn, strict=True):
            assert one.grad is not None
            assert another.grad is not None
            one.grad.copy_(gradient)
            another.grad.copy_(gradient)
        for optimizer in (mine, other):
            change(number, optimizer)
        done.append(graph.step(mine))
        other.step()
        assert all(torch.equal(one, another) for one, another in zip(ours, plain, strict=True)), number
    return done


def test_a_replayed_step_reads_rate_and_count_from_tensors() -> None:
    def change(number: int, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"].fill_(0.1 / (number + 1))

    make = lambda given: TensorAdam(given, torch.tensor(0.1, dtype=torch.float64))  # noqa: E731
    assert compared(make, change) == [CHANGED, RECORDED, REPLAYED, REPLAYED, REPLAYED, REPLAYED]


def test_a_number_that_changes_ends_the_recording() -> None:
    def change(number: int, optimizer: Any) -> None:
        if number == 3:
            optimizer.param_groups[0]["eps"] = 1e-3

    make = lambda given: TensorAdam(given, torch.tensor(0.1, dtype=torch.float64))  # noqa: E731
    assert compared(make, change) == [CHANGED, RECORDED, REPLAYED, CHANGED, RECORDED, REPLAYED]


def test_state_that_was_loaded_ends_the_recording() -> None:
    def change(number: int, optimizer: Any) -> None:
        if number == 3:
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.state = {
                key: {n: t.clone() for n, t in one.items()} for key, one in optimizer.state.items()
            }

    make = lambda given: TensorAdam(given, torch.tensor(0.1, dtype=torch.float64))  # noqa: E731
    assert compared(make, change)[:4] == [CHANGED, RECORDED, REPLAYED, CHANGED]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda given: torch.optim.AdamW(given, lr=0.1), "the optimizer: AdamW is not capturable"),
        (lambda given: TensorAdam(given, 0.1), "the optimizer: its learning rate is no tensor"),
    ],
)
def test_other_optimizers_step_eagerly_by_name(make: Any, why: str) -> None:
    assert compared(make, lambda number, optimizer: None, 3) == [why] * 3


def test_an_engine_replays_the_step_of_a_capturable_optimizer() -> None:
    engine = recording_engine(gpt2(layers=1, tied=False), Plan(precision="fp64", cuda_graphs=True))
    optimizer = TensorAdam(engine.parameters(), torch.tensor(0.1, dtype=torch.float64))
    plain = woven.weave(gpt2(layers=1, tied=False), Plan(precision="fp64"))
    other = TensorAdam(plain.parameters(), 0.1)
    for number, batch in enumerate(woven.shares(gpt2(layers=1, tied=False), engine, 5)):
        rate = 0.1 / (number + 1)
        optimizer.param_groups[0]["lr"].fill_(rate)
        other.param_groups[0]["lr"] = rate
        for one, its in ((engine, optimizer), (plain, other)):
            one.forward_backward(*batch)
            one.step(its, 0.05)
            its.zero_grad()
    assert graphs_of(engine).counts.eager[CHANGED] == 1
    for one, another in zip(engine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, another)
