"""The whole tensors that a model starts from, one at a time: its own, given ones, or those of rank 0.

    values = Values(places_of(layers), seed, given)     each rank reads what it needs
    values = FromRankZero(values, world, device)        rank 0 reads, all ranks get every tensor, in one order
    values.read("head.weight")                          to be cut and let go before the next
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.comm.collectives import broadcast
from plait.comm.group import Group
from plait.errors import ModelError
from plait.models.initial import initial_value
from plait.rules import join

MOST_TOLD = 20
"""Names of one kind of mistake."""


@dataclass(frozen=True)
class Place:
    """Where a parameter or a buffer stands in a model."""

    layer: nn.Module
    path: str
    """Of the layer."""
    name: str
    """In the layer."""
    tensor: Tensor
    saved_as: tuple[str, ...]
    """Its names in `model.state_dict()`: several if it is shared, none for a buffer that is not saved."""


def places_of(layers: Iterable[tuple[str, nn.Module]]) -> dict[str, Place]:
    """The parameters and buffers of layers (path and module), each once, by their first full name."""
    places: dict[str, Place] = {}
    first: dict[int, str] = {}
    for path, layer in layers:
        saved = layer.state_dict().keys() | {name for name, _ in layer.named_parameters()}
        tensors = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
        for name, tensor in tensors:
            full_name = join(path, name)
            original = first.setdefault(id(tensor), full_name)
