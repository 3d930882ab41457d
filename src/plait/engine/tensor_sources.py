"""Sources of a model's whole tensors, which are read one at a time to be sharded.

source = LocalSource(locate_tensors(layers), seed, given)    each rank reads the tensors that it needs
source = RankZeroSource(source, world, device)               rank 0 reads and broadcasts, in one order
source.read("head.weight")                                   to be sharded, and freed before the next
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.engine.sharding.unit import Unit
from plait.errors import ModelError, PlaitError, listed
from plait.models.initial_values import ModuleReset, initial_value
from plait.plan.rules import join
from plait.ranks.collectives import broadcast
from plait.ranks.group import Group
from plait.ranks.text_collectives import broadcast_text
from plait.tensor.find_module_hooks import has_load_hooks


@dataclass(frozen=True)
class TensorLocation:
    """The layer and names of a parameter or buffer of a model."""

    layer: nn.Module
    path: str
    """The layer's path."""
    name: str
    """The tensor's name in the layer."""
    tensor: Tensor
    is_buffer: bool
    saved_as: tuple[str, ...]
    """The names in `model.state_dict()`: several if shared, none for a buffer that is not saved."""


def locate_tensors(layers: Sequence[tuple[str, nn.Module]]) -> dict[str, TensorLocation]:
    """Return the parameters and buffers of layers (path and module), each once, by its first full name."""
    names: dict[int, list[str]] = {}
    for path, layer in layers:
        saved = layer.state_dict().keys()
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(join(path, name))
        for name, buffer in layer.named_buffers(remove_duplicate=False):
            names.setdefault(id(buffer), []).extend([join(path, name)] if name in saved else [])
    locations: dict[str, TensorLocation] = {}
    for path, layer in layers:
        for is_buffer, tensors in ((False, layer.named_parameters()), (True, layer.named_buffers())):
            for name, tensor in tensors:
                if id(tensor) in names:
                    saved_as = tuple(names.pop(id(tensor)))
                    locations[join(path, name)] = TensorLocation(
                        layer, path, name, tensor, is_buffer, saved_as
                    )
    return locations


@dataclass
class LocalSource:
    """Initial values that each rank reads alone: given tensors, else the model's own, else random ones."""

    locations: Mapping[str, TensorLocation]
    seed: int
    given: Mapping[str, Any] | None = None
    """For each name in `model.state_dict()` a whole tensor, or a slice of a safetensors file, read lazily.

    A shared tensor may be given under any of its names.
    """
    _latest: ModuleReset = field(default_factory=ModuleReset, init=False, repr=False)

    def read(self, name: str) -> Tensor:
        """Return the whole tensor `name`, not to be written to. Raises ModelError if it has no value.

        Its floating-point dtype may differ from the model's.
        """
        location = self.locations[name]
        if name not in self._found or self.given is None:
            return initial_value(location.layer, location.path, location.name, self.seed, self._latest)
        value = _whole(self.given[self._found[name]])
        if value.is_floating_point() == location.tensor.is_floating_point():
            return value if value.is_floating_point() else value.to(location.tensor.dtype)
        raise ModelError(
            f"the given value of {name} is {value.dtype}, but the model has {location.tensor.dtype}: "
            "convert it."
        )

    def skip(self, name: str) -> None:
        """Do nothing: `read` does not communicate, so a rank need not take part in reading `name`."""

    def unit_built(self, name: str, unit: Unit | None) -> None:
        """Do nothing: a unit's parameters have their values when it is built."""

    def known(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each tensor that is given, or that the model has off the meta device."""
        for name, location in self.locations.items():
            if name in self._found or not location.tensor.is_meta:
                yield name, self.read(name)

    @cached_property
    def _found(self) -> Mapping[str, str]:
        """The key in `given` of each given tensor, by name in the model. ModelError if they do not fit."""
        if self.given is None:
            return {}
        if not isinstance(self.given, Mapping):
            kind = type(self.given).__name__
            raise ModelError(f"values is a {kind}: give tensors by name, such as model.state_dict().")
        for location in self.locations.values():
            if has_load_hooks(location.layer):
                raise ModelError(
                    f"layer {location.path!r} has a hook that converts a state dict before loading, which "
                    "plait does not call: load the values by model.load_state_dict(), and give plait "
                    "model.state_dict()."
                )
        found, faults = _match(self.given, self.locations)
        if faults:
            raise ModelError(
                f"the given values do not fit the model ({'; '.join(faults)}): give a tensor of the right "
                "shape for each name in model.state_dict()."
            )
        return found


@dataclass(frozen=True)
class RankZeroSource:
    """Initial values that rank 0 of a group reads and broadcasts to all its ranks.

    Reading and skipping are collective: a broadcast of the dtype or an error message, then of the tensor.
    """

    source: LocalSource
    group: Group
    device: torch.device
    """Of this rank, for the broadcasts."""

    def read(self, name: str) -> Tensor:
        """Return the whole tensor on `device`. Raises ModelError on all ranks if rank 0 fails."""
        value, failure, text = None, None, ""
        if self.group.index == 0:
            try:
                value = self.source.read(name).to(self.device).contiguous()
                text = str(value.dtype)
            except Exception as raised:  # any error, because the other ranks wait
                failure, text = raised, f"rank 0 refuses: {raised}"
                if not isinstance(raised, PlaitError):
                    kind = type(raised).__name__
                    text = f"rank 0 cannot read {name} ({kind}: {raised}): check its values."
        text = broadcast_text(text, self.group, self.device)
        if failure is not None:
            raise failure
        if value is None:
            dtype = getattr(torch, text.removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise ModelError(text)
            value = torch.empty(self.source.locations[name].tensor.shape, dtype=dtype, device=self.device)
        return broadcast(value, self.group, checked=False).wait()

    def skip(self, name: str) -> None:
        """Take part in the broadcast of a tensor that this rank does not need, and discard it."""
        self.read(name)

    def unit_built(self, name: str, unit: Unit | None) -> None:
        """Do nothing: a unit's parameters have their values when it is built."""


class TensorSource(Protocol):
    """Protocol of a source of whole tensors, by the first full name of each parameter and buffer.

    Every rank iterates over all names of the model in one order, and reads or skips each.
    """

    def read(self, name: str) -> Tensor:
        """Return the whole tensor `name`, not to be written to."""

    def skip(self, name: str) -> None:
        """Take part in reading a tensor that this rank does not need."""

    def unit_built(self, name: str, unit: Unit | None) -> None:
        """Move values into a unit just built, if they come late; `unit` is None on ranks without it."""


def _match(
    given: Mapping[str, Any], locations: Mapping[str, TensorLocation]
) -> tuple[dict[str, str], list[str]]:
    """Return for each tensor of the model its name in `given`, and the errors found, one text per kind."""
    found: dict[str, str] = {}
    missing, misfits, unequal = [], [], []
    for name, location in locations.items():
        here = [alias for alias in location.saved_as if alias in given]
        wrong = [fault for alias in here for fault in _misfit(alias, given[alias], location.tensor.shape)]
        if here:
            found[name] = here[0]
        elif location.saved_as:
            missing.append(name)
        misfits += wrong
        if not wrong:
            unequal += [f"{here[0]} and {one}" for one in here[1:] if not _equal(given[here[0]], given[one])]
    saved = {alias for location in locations.values() for alias in location.saved_as}
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
    """Return a given value as a tensor: the tensor itself, or the content of a lazy slice of a file."""
    whole: Tensor = value if isinstance(value, Tensor) else value[...]
    return whole.detach()


def _equal(one: Any, other: Any) -> bool:
    one, other = _whole(one), _whole(other)
    return one.dtype == other.dtype and torch.equal(one, other.to(one.device))
