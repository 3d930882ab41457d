"""The loss on the meta device: many chunks of rows follow from few."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.engine.pipeline.loss_stage import OverwritingLossStage
from plait.estimate.memory import loss_traces
from plait.estimate.memory.loss_traces import TracedLoss, traced_loss
from plait.estimate.memory.operation_recorder import OperationRecorder
from plait.estimate.time.operation_times import Elementwise
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.cross_entropy_in_place import CrossEntropyInPlace
from plait.tensor.losses import CrossEntropy

CLASSES = 2**20
"""So many that only 16 rows are converted to float32 at once."""


def traced(loss: CrossEntropy, rows: int) -> TracedLoss:
    end, queue = OverwritingLossStage(CrossEntropyInPlace(loss, None)), WeightGradientQueue()
    given = torch.empty(2, rows, CLASSES, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(2, rows, dtype=torch.int64, device="meta")
    return traced_loss(end, queue, given, targets, OperationRecorder())


@pytest.mark.parametrize("rows", [40, 45])
@pytest.mark.parametrize("loss", [plait.cross_entropy, CrossEntropy(label_smoothing=0.1)])
def test_a_loss_of_many_chunks_is_traced_from_few_as_it_would_be_from_all(
    loss: CrossEntropy, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, work = traced(loss, rows)
    assert trace.backward.results == trace.inputs, "the gradient is in the memory of the logits"
    monkeypatch.setattr(loss_traces, "CHUNKS", (98, 99))
    every, each = traced(loss, rows)
    assert work is not None
    assert each is not None
    assert (trace.forward.peak, trace.backward.peak) == (every.forward.peak, every.backward.peak)
    assert work == each
    (joined,) = work.forward
    assert isinstance(joined, Elementwise)
    assert joined.kernels > 5 * 6
