"""`validation_means`: the mean loss over validation data, and the means of metrics, on any plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.app.loop.validation_rows import ValidationRows
from plait.engine.engine import Engine
from plait.errors import DataError
from plait.ranks.collectives import all_reduce
from plait.ranks.device import sent
from plait.tensor.layer_values import map_tensors

Metric = Callable[[Any, Any], Tensor]
"""Function of the model's whole output and the targets: one value for each row or token that counts."""


def validation_means(data: ValidationRows, engine: Engine, metrics: Mapping[str, Metric]) -> list[float]:
    """Return the loss of all rows together, as of one batch, and the mean of each metric.

    Communication: that of `evaluate`; with metrics that of `output`, and an all-reduce over `world`.
    Raises `DataError` where no target counts.
    """
    mesh, device = engine.mesh, engine.mesh.device
    loss, weight = torch.zeros(2, dtype=torch.float64, device=device)
    sums = torch.zeros(len(metrics), 2, dtype=torch.float64, device=device)
    for share in data.shares(mesh.index("dp"), mesh.size("dp")):
        inputs, targets = data.batches.batch(share.batch, share.rows)
        mean = engine.evaluate(inputs, targets, rows=None if share.counted else 0)
        counted = engine.loss_weight()
        total = mean * counted if engine.averages_loss else mean
        loss += torch.where(counted > 0, total, 0.0)  # of a batch in which no target counts, 0 / 0
        weight += counted
        if metrics:
            found = _sums(engine, metrics, inputs, targets)  # on all ranks, for its communication
            sums += found.where(torch.tensor(share.counted, device=device), 0.0)
    if not weight:
        raise DataError(
            "no target of the validation data counts: all are -100, as where answers are cut off. Give "
            "other data, or validate more batches."
        )
    means = [float(loss / weight if engine.averages_loss else loss)]
    if metrics:
        # Ranks of tp and cp have the same values, and count them as often as each other.
        total = all_reduce(sums, mesh.group("world"), checked=False).about("the metrics").wait()
        means += [value / count if count else math.nan for value, count in total.tolist()]
    return means


def _sums(engine: Engine, metrics: Mapping[str, Metric], inputs: Any, targets: Any) -> Tensor:
    """Return sum and number of each metric's values, `[metrics, 2]`; zeros but on the last stage."""
    output, device = engine.output(inputs, everywhere=False), engine.mesh.device
    if output is None:
        return torch.zeros(len(metrics), 2, dtype=torch.float64, device=device)
    targets = map_tensors(lambda one: sent(one, device), targets)
    found = []
    for name, metric in metrics.items():
        values = torch.as_tensor(metric(output, targets)).double()
        if not values.dim():
            raise DataError(
                f"the metric {name} returned one number, of which no mean over batches of unlike sizes "
                "can be made: return a value for each row or token, as output.argmax(1) == targets has."
            )
        found.append(torch.stack([values.sum(), torch.ones_like(values).sum()]))
    return torch.stack(found)
