"""Programs of one rank, run by the executor: every order of actions gives the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from plait.engine.pipeline.executor import Executor
from plait.engine.pipeline.loss_stage import LossStage
from plait.engine.pipeline.pipeline_rank import PipelineRank
from plait.engine.pipeline.stage import Stage
from plait.engine.pipeline.stage_exchange import Exchange
from plait.models.layers.layer_sequence import private_copy, sequence_of
from plait.models.layers.shape_inference import infer
from plait.schedules.action import Action
from plait.schedules.check import check
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import LoweringSpec
from plait.schedules.schedule import Schedule
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.losses import cross_entropy

COUNTS = (2, 2)
"""Layers per stage; both stages live on the one rank."""
ORDERS = {
    "one at a time": "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1",
    "all forwards first": "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1",
    "weights last": "0F0 1F0 1I0 0I0 0F1 1F1 1I1 0I1 1W0 1W1 0W0 0W1",
    "mixed": "0F0 0F1 1F0 1I0 1F1 0I0 1W0 1B1 0W0 0B1",
}
INPUTS = torch.tensor([[1, 2, 3], [4, 0, 1]])
TARGETS = torch.tensor([[2, 3, 4], [0, 1, -100]])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 5)).double()


def pipeline_of(layers: nn.Sequential) -> PipelineRank:
    queue = WeightGradientQueue()
    defer_weight_gradients(layers, queue)
    sequence = sequence_of(layers).layers
    stages = {0: Stage(0, sequence[:2], queue), 1: Stage(1, sequence[2:], queue)}
    return PipelineRank(stages, Exchange(0, {}, torch.device("cpu")), LossStage(cross_entropy), COUNTS)


def gradients_by(order: str) -> tuple[Tensor, list[Tensor]]:
    layers = model()
    skeleton = copy.deepcopy(layers).to("meta")
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    pipeline = pipeline_of(layers)
    made = Schedule("by hand", 2, (0, 0), (tuple(map(Action.parse, order.split())),))
    check(made)
    batch, targets = list(INPUTS.split(1)), list(TARGETS.split(1))
    infos = infer(private_copy(sequence_of(skeleton).layers, {}), batch[0], input_gradients=False)
    pipeline.begin(batch, [infos] * 2)
    pipeline.loss_stage.begin(targets, torch.tensor(1 / 5, dtype=torch.float64))
    Executor(pipeline.handlers(), bind_layers=pipeline.bind_layers).run(
        lower(made, LoweringSpec(COUNTS, {}))[0]
    )
    for stage in pipeline.stages.values():
        assert not any((stage.values, stage.gradients, stage.runs, stage.work, stage.queue.pending)), (
            "nothing is left over"
        )
    return torch.stack(pipeline.loss_stage.totals).sum() / 5, [
        parameter.grad for parameter in layers.parameters()
    ]


def test_a_pipelined_rank_equals_the_model_run_whole() -> None:
    whole = model()
    loss = nn.functional.cross_entropy(whole(INPUTS).flatten(0, 1), TARGETS.flatten())
    loss.backward()
    got, gradients = gradients_by(ORDERS["one at a time"])
    torch.testing.assert_close(got, loss.detach(), rtol=1e-13, atol=0)
    for gradient, parameter in zip(gradients, whole.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_order_of_actions_gives_the_same_bits(order: str) -> None:
    loss, gradients = gradients_by(order)
    wanted_loss, wanted = gradients_by(ORDERS["one at a time"])
    assert torch.equal(loss, wanted_loss)
    assert all(torch.equal(got, other) for got, other in zip(gradients, wanted, strict=True))
