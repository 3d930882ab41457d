"""The whole tensors that a model starts from: its own, given ones, or those of rank 0. One at a time.

values = Values(places_of(layers), seed, given)     each rank reads what it needs
values = FromRankZero(values, world, device)        rank 0 reads; all ranks get all, in one order
values.read("head.weight")                          to be cut, and let go before the next
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.errors import ModelError, listed
from plait.models.initial import initial_value
from plait.rules import join


@dataclass(frozen=True)
class Place:
    """Where a parameter or a buffer stands in a model."""

    layer: nn.Module
    path: str
    """Of the layer."""
    name: str
    """In the layer."""
    tensor: Tensor
    is_buffer: bool
    saved_as: tuple[str, ...]
    """Its names in `model.state_dict()`: several if it is shared, none for a buffer that is not saved."""


def places_of(layers: Sequence[tuple[str, nn.Module]]) -> dict[str, Place]:
    """The parameters and buffers of layers (path and module), each once, by its first full name."""
    names: dict[int, list[str]] = {}
    for path, layer in layers:
        saved = layer.state_dict().keys()
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(join(path, name))
        for name, buffer in layer.named_buffers(remove_duplicate=False):
            names.setdefault(id(buffer), []).extend([join(path, name)] if name in saved else [])
    places: dict[str, Place] = {}
    for path, layer in layers:
        for is_buffer, tensors in ((False, layer.named_parameters()), (True, layer.named_buffers())):
            for name, tensor in tensors:
                if id(tensor) in names:
                    saved_as = tuple(names.pop(id(tensor)))
                    places[join(path, name)] = Place(layer, path, name, tensor, is_buffer, saved_as)
    return places


class Source(Protocol):
    """Gives whole tensors by the first full names of parameters and buffers.

    Every rank goes through all names of the model in one order, and either reads or skips each.
    """

    def read(self, name: str) -> Tensor:
        """The whole tensor, not to be written to. Raises ModelError where there is no way to make it."""

    def skip(self, name: str) -> None:
        """This rank has no use for it."""


class Values:
    """What this rank reads by itself: given values, else the model's own, else what rules say (`seed`)."""

    def __init__(
        self, places: Mapping[str, Place], seed: int, given: Mapping[str, Any] | None = None
    ) -> None:
        """`given`: for each name in `model.state_dict()` a whole tensor, or a slice of a safetensors file.

        A tensor that is shared may be given under any of its names. Nothing is read before it is asked for.
        """
        self.places = places
        self._seed = seed
        self._given = given

    def read(self, name: str) -> Tensor:
        """See `Source`. Given tensors may have another floating-point dtype than the model's."""
        place = self.places[name]
        if name not in self._found or self._given is None:
            return initial_value(place.layer, place.path, place.name, self._seed)
        value = _whole(self._given[self._found[name]])
        if value.is_floating_point() == place.tensor.is_floating_point():
            return value if value.is_floating_point() else value.to(place.tensor.dtype)
        raise ModelError(
            f"the given value of {name} is {value.dtype}, but the model has {place.tensor.dtype}: convert it."
        )

    def skip(self, name: str) -> None:
        """See `Source`."""

    def known(self) -> Iterator[Tensor]:
        """All that need no rule, in the order of the places."""
        for name, place in self.places.items():
            if name in self._found or not place.tensor.is_meta:
                yield self.read(name)

    @cached_property
    def _found(self) -> Mapping[str, str]:
        """Under which name each tensor is given. ModelError where what is given does not fit the model."""
        if self._given is None:
            return {}
        if not isinstance(self._given, Mapping):
            kind = type(self._given).__name__
            raise ModelError(f"values is a {kind}: give tensors by name, such as model.state_dict().")
        found, flaws = _match(self._given, self.places)
        if flaws:
            raise ModelError(
                f"the given values do not fit the model ({'; '.join(flaws)}): give a tensor of the right "
                "shape for each name in model.state_dict()."
            )
        return found


def _match(given: Mapping[str, Any], places: Mapping[str, Place]) -> tuple[dict[str, str], list[str]]:
    """Under which name each tensor is given, and what is wrong, kind by kind."""
    found: dict[str, str] = {}
    missing, misfits, unequal = [], [], []
    for name, place in places.items():
        here = [alias for alias in place.saved_as if alias in given]
        wrong = [told for alias in here for told in _misfit(alias, given[alias], place.tensor.shape)]
        if here:
            found[name] = here[0]
        elif place.saved_as:
            missing.append(name)
        misfits += wrong
        if not wrong:
            unequal += [f"{here[0]} and {one}" for one in here[1:] if not _equal(given[here[0]], given[one])]
    saved = {alias for place in places.values() for alias in place.saved_as}
    kinds = {
        "missing": missing,
        "unexpected": [str(name) for name in given if name not in saved],
        "unfit": misfits,
        "one tensor in the model but two values": unequal,
    }
    return found, [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]


def _misfit(name: str, value: Any, shape: torch.Size) -> Iterable[str]:
    if not isinstance(value, Tensor) and not hasattr(value, "get_shape"):
        yield f"{name} is a {type(value).__name__}"
    elif isinstance(value, Tensor) and value.is_meta:
        yield f"{name} is on the meta device"
    elif _shape_of(value) != tuple(shape):
        yield f"{name} is {list(_shape_of(value))} and not {list(shape)}"


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape if isinstance(value, Tensor) else value.get_shape())


def _whole(value: Any) -> Tensor:
    """The tensor that a value stands for: itself, or all of a slice of a file."""
    whole: Tensor = value if isinstance(value, Tensor) else value[...]
    return whole.detach()


def _equal(one: Any, other: Any) -> bool:
    one, other = _whole(one), _whole(other)
    return one.dtype == other.dtype and torch.equal(one, other.to(one.device))
