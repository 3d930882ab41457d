"""Units: parameters that live and are reduced together, in one flat buffer per dtype.

    flat data:      | query.weight        |pad| query.bias |pad| key.weight …
    flat gradient:  | the same places                                       |

Each parameter and its gradient are views of the flat tensors, so one collective moves a whole unit and
nothing is copied. Parameters start at multiples of `ALIGNMENT` elements: fused optimizers then give
bit-equal results wherever a buffer is cut. Frozen parameters have a buffer of their own, without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.comm.group import Group
from plait.comm.shared import shared_zeros
from plait.errors import PlanError

ALIGNMENT = 16
"""Elements."""


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in a flat buffer: elements `start … start + numel`."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.shape.numel()

    def view_of(self, flat: Tensor) -> Tensor:
        """The slot's piece of `flat`, in the parameter's shape."""
        return flat[self.start : self.stop].view(self.shape)


@dataclass(eq=False)
class FlatBuffer:
    """Parameters of one dtype, all trainable or all frozen, in one flat tensor."""

    slots: tuple[Slot, ...]
    data: Tensor
    gradient: Tensor | None
    parameters: dict[str, nn.Parameter]
    group: Group | None
    """Over which the gradients are summed: the ranks that hold the same parameters and saw other data, use
    them on another stage, or for other heads. None: they are frozen, or nobody else has them."""

    def current_gradients(self, wanted: Collection[str]) -> list[Tensor]:
        """What the `.grad` of the `wanted` parameters hold now.

        The flat gradient as one if all are wanted, unless somebody replaced views.
        """
        if self.gradient is None:
            return []
        start, width = self.gradient.data_ptr(), self.gradient.element_size()
        slots = [slot for slot in self.slots if slot.name in wanted]
        grads = [self.parameters[slot.name].grad for slot in slots]
        places = [start + slot.start * width for slot in slots]
        views = all(
            grad is not None and grad.data_ptr() == at for grad, at in zip(grads, places, strict=True)
        )
        if views and len(slots) == len(self.slots):
            return [self.gradient]
        return [grad for grad in grads if grad is not None]

    def refuse_refreezing(self) -> None:
        """PlanError when a parameter was frozen or unfrozen since the buffer was made."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad != (self.gradient is not None):
                raise PlanError(
                    f"requires_grad of {name} has changed to {parameter.requires_grad} since parallelize: "
                    "set it before, or parallelize again."
                )

    def attach_gradients(self) -> Tensor | None:
        """Make every parameter's `.grad` a view of the flat gradient again, before a step adds to it.

        `zero_grad()` leaves None behind, which means zero. What was there from an earlier step is carried:
        it comes back as a copy, to be added once this step's own gradients are reduced; else None.
        """
        if self.gradient is None:
            return None
        carried = None
        for slot in self.slots:
            grad = self.parameters[slot.name].grad
            if grad is None:
                continue
            if carried is None:
                carried = torch.zeros_like(self.gradient)
            slot.view_of(carried).copy_(grad)
        self.gradient.zero_()
        for slot in self.slots:
            self.parameters[slot.name].grad = slot.view_of(self.gradient)
        return carried

    def restore_gradients(self, carried: Tensor | None) -> None:
        """Undo a step that failed: the gradients are what `attach_gradients` found and gave as `carried`.

        They no longer lie in the flat gradient, to which a reduction that is under way may still write.
        """
        for slot in self.slots:
            self.parameters[slot.name].grad = None if carried is None else slot.view_of(carried)


@dataclass(eq=False)
class Unit:
    """A layer's parameters, or one that several layers share; the name is the layer's or the parameter's."""

    name: str
    buffers: tuple[FlatBuffer, ...]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by their full name in the model."""
        return {name: parameter for buffer in self.buffers for name, parameter in buffer.parameters.items()}

    @property
    def trainable(self) -> tuple[FlatBuffer, ...]:
        """The buffers that have gradients."""
        return tuple(buffer for buffer in self.buffers if buffer.gradient is not None)


def build_unit(
    name: str,
    templates: Mapping[str, nn.Parameter],
    value_of: Callable[[str], Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
    groups: Mapping[str, Group],
) -> Unit:
    """A unit with real parameters like `templates` (by full name), filled by `value_of`.

    Floating-point parameters get `dtype`, if given. Each parameter's gradient is to be summed over its group
    of `groups`, if it has one; all ranks of a group build the unit at the same point (see `shared_zeros`).
    """
    kinds: dict[tuple[torch.dtype, bool, Group | None], list[str]] = {}
    for full_name, template in templates.items():
        kept = template.dtype if dtype is None or not template.is_floating_point() else dtype
        group = groups.get(full_name) if template.requires_grad else None
        kinds.setdefault((kept, template.requires_grad, group), []).append(full_name)
    buffers = [
        _build_buffer({name: templates[name] for name in names}, value_of, device, *kind)
        for kind, names in kinds.items()
    ]
    return Unit(name, tuple(buffers))


def _build_buffer(
    templates: Mapping[str, nn.Parameter],
    value_of: Callable[[str], Tensor],
    device: torch.device,
    dtype: torch.dtype,
    trainable: bool,
    group: Group | None,
) -> FlatBuffer:
    slots = _place({name: template.shape for name, template in templates.items()})
    size = _aligned(slots[-1].stop)
    data = torch.zeros(size, dtype=dtype, device=device)
    parameters = {}
    for slot in slots:
        slot.view_of(data).copy_(value_of(slot.name))
        # Through .data, so that the parameter has a version counter of its own: the flat tensor can then
        # be refilled (by a collective) without autograd taking that for a change of a saved weight.
        parameter = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=trainable)
        parameter.data = slot.view_of(data)
        parameters[slot.name] = parameter
    gradient = shared_zeros(size, dtype, device, group) if trainable else None
    return FlatBuffer(slots, data, gradient, parameters, group)


def _place(shapes: Mapping[str, torch.Size]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for name, shape in shapes.items():
        start = _aligned(slots[-1].stop) if slots else 0
        slots.append(Slot(name, shape, start))
    return tuple(slots)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
