"""Records of routing: the experts of each token, and how clearly they were chosen, by router and call.

Letters: k experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from plait.tensor.experts.router import Router
from plait.tensor.nested_values import Value, tensors_of
from plait.verification.definitions.router_call_recorder import RouterCall
from plait.verification.step_location import RecordKey, Records

ROUTING, MARGIN = "routing", "margin"
"""Kinds of records: experts int64 `[rows, length, k]`, and margins `[rows, length, 1]`."""


def call_names(layer: nn.Module, weights: Sequence[Tensor]) -> list[str]:
    """Return names of the calls of routers with these weights: the path, with its number if not the first."""
    paths = {id(one.weight): path for path, one in layer.named_modules() if isinstance(one, Router)}
    names: list[str] = []
    for weight in weights:
        path = paths[id(weight)]
        count = sum(name.partition("#")[0] == path for name in names)
        names.append(f"{path}#{count + 1}" if count else path)
    return names


def records_of(layer: nn.Module, number: int, calls: Sequence[RouterCall], given: Value) -> Records:
    """Return which experts the routers of layer `number` chose in `calls`, and by which margins."""
    records: Records = {}
    for name, call in zip(call_names(layer, [one.weight for one in calls]), calls, strict=True):
        for kind, tensor in ((ROUTING, call.indices), (MARGIN, call.margins.unsqueeze(-1))):
            records[RecordKey(kind, number, name)] = _by_position(tensor, given)
    return records


def _by_position(tensor: Tensor, given: Value) -> Tensor:
    """Return `[rows · length, n]` as `[rows, length, n]`, by the first tensor of a layer's input."""
    first = next(tensors_of(given), tensor)
    is_sequence = first.dim() > 2 and first.shape[0] * first.shape[1] == len(tensor)
    return (tensor.view(*first.shape[:2], -1) if is_sequence else tensor).clone()


def experts_in(parts: Sequence[Mapping[RecordKey, Tensor]], number: int) -> list[Tensor]:
    """Return the recorded experts, `[T, k]`, of each router call in layer `number` over all `parts`.

    `parts`: the records of the micro-batches of a batch.
    """
    keys = [key for key in parts[0] if key[:2] == (ROUTING, number)] if parts else []
    return [torch.cat([part[key].flatten(0, -2) for part in parts]) for key in keys]
