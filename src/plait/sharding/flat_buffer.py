"""A flat buffer: parameters of one kind, and their gradients, as views of flat tensors.

    what layers use         whole:     | query.weight | up.weight … | query.bias |pad|
    and add to              gradient:  | the same places                             |

    what the optimizer      piece:     |  this rank's |
    updates, and by what    its grad:  |  part of it  |

One collective moves all of it and nothing is copied. Where a strategy does not keep the whole tensors, their
storage is empty between uses and filled again in place, so what autograd has saved stays valid. Where it
does keep them a piece is a part of the whole, and where nothing is cut it is the whole.

Where several stages of this rank use the same parameters, as the two ends of a model in a v do, each adds to
a gradient of its own, and these are added up in the order of the stages: the same sums in any schedule of
one cut into stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.comm.group import Group
from plait.errors import PlanError
from plait.sharding.buffer_specs import BufferKind
from plait.sharding.offsets import Offsets


@dataclass(eq=False)
class StageView:
    """The parameters of a flat buffer for one more stage: the same memory, with a gradient of their own."""

    parameters: dict[str, nn.Parameter]
    gradient: Tensor
    gradients: Mapping[str, Tensor]
    """Views of `gradient`, one a parameter."""


@dataclass(eq=False)
class FlatBuffer:
    """Parameters of one kind; see above."""

    kind: BufferKind
    slots: Offsets
    shard: Group | None
    """Between whose ranks it is cut. None: it is not."""
    group: Group | None
    """Over which gradients are summed besides: ranks that hold the same parameters, or pieces, and saw other
    data, use them on another stage, or for other heads. None: they are frozen, or nobody else has them."""
    whole: Tensor
    parameters: dict[str, nn.Parameter]
    """What layers use (of several stages: those of the first), by full name: views of `whole`."""
    piece: Tensor
    """On the device where it lies while a step runs."""
    pieces: dict[str, nn.Parameter]
    """What the optimizer updates: views of `piece`, or the `parameters` themselves."""
    places: Mapping[str, tuple[int, torch.Size]]
    """Of each parameter in a flat piece: its first element, and its shape there."""
    gradient: Tensor | None
    gradients: Mapping[str, Tensor]
    """Views of `gradient`, one a parameter."""
    piece_gradient: Tensor | None
    piece_gradients: Mapping[str, Tensor]
    """Views of `piece_gradient`, one a piece."""
    keeps_whole: bool
    keeps_gradient: bool
    twins: tuple[StageView, ...] = ()
    """For each stage of this rank that uses it, but the first; none where it is frozen."""
    visits: bool = False
    """Whether the piece, which lies on the CPU, comes to the device between steps, for the optimizer."""
    visitor: Tensor | None = None
    """The piece while it is there, or while the place of `piece` is not safe."""

    @property
    def has_pieces(self) -> bool:
        """Whether the optimizer updates other tensors than layers use."""
        return self.pieces is not self.parameters

    @property
    def is_read_by_device(self) -> bool:
        """Whether the optimizer updates on the CPU what CUDA copies from."""
        return self.has_pieces and not self.visits and self.whole.is_cuda and not self.piece.is_cuda

    @property
    def own(self) -> Tensor:
        """This rank's part of `whole`, while that is there."""
        return self._own_part(self.whole)

    @property
    def own_gradient(self) -> Tensor:
        """This rank's part of `gradient`, while that is there."""
        assert self.gradient is not None
        return self._own_part(self.gradient)

    @property
    def whole_gradients(self) -> list[Tensor]:
        """What layers add to: one for each stage of this rank, while they are there."""
        return [] if self.gradient is None else [self.gradient, *(twin.gradient for twin in self.twins)]

    def add_up_stages(self) -> None:
        """Once a step, when nothing is left to add: then all that layers have added is in `gradient`."""
        for twin in self.twins:
            assert self.gradient is not None
            self.gradient.add_(twin.gradient)

    def place_in(self, name: str, flat: Tensor) -> Tensor:
        """The part of a flat piece that belongs to a parameter."""
        start, shape = self.places[name]
        return flat[start : start + shape.numel()].view(shape)

    @property
    def reduces_in_place(self) -> bool:
        """Whether the gradient of this rank's piece is a part of the whole one."""
        assert self.piece_gradient is not None
        return self.keeps_gradient and self.piece_gradient.data_ptr() == self.own_gradient.data_ptr()

    def _own_part(self, flat: Tensor) -> Tensor:
        index = 0 if self.shard is None else self.shard.index
        return flat[index * self.slots.piece : (index + 1) * self.slots.piece]

    def return_to_device(self) -> None:
        """After a step: what the optimizer updates lies where its gradients are."""
        if self.visits and self.has_pieces and self.visitor is None:
            self.visitor = self.piece.to(self.whole.device, copy=True, non_blocking=True)
            self._point_to(self.visitor)

    def step_aside(self) -> None:
        """After a step that failed: what still fills `whole` must not reach what the optimizer updates."""
        if self.keeps_whole and self.piece.data_ptr() == self.own.data_ptr():
            self.visitor = self.piece.clone()
            self._point_to(self.visitor)

    def leave_device(self) -> None:
        """Before a step: what the optimizer has updated goes back to the CPU, and its memory with it."""
        if self.visitor is not None:
            self.piece.copy_(self.visitor, non_blocking=True)
            self._point_to(self.piece)
            self.visitor = None

    def _point_to(self, flat: Tensor) -> None:
        for name, piece in self.pieces.items():
            piece.data = self.place_in(name, flat)

    def current_gradients(self, wanted: Collection[str]) -> list[Tensor]:
        """What the `.grad` of the `wanted` pieces hold now.

        The flat gradient as one if all are wanted, unless somebody replaced views.
        """
        if self.piece_gradient is None:
            return []
        names = [name for name in self.pieces if name in wanted]
        grads = [self.pieces[name].grad for name in names]
        places = [self.piece_gradients[name].data_ptr() for name in names]
        views = all(
            grad is not None and grad.data_ptr() == at for grad, at in zip(grads, places, strict=True)
        )
        if views and len(names) == len(self.pieces):
            return [self.piece_gradient]
        return [grad for grad in grads if grad is not None]

    def refuse_refreezing(self) -> None:
        """PlanError when a parameter was frozen or unfrozen since the buffer was made."""
        for name, parameter in self.pieces.items():
            if parameter.requires_grad != (self.gradient is not None):
                raise PlanError(
                    f"requires_grad of {name} has changed to {parameter.requires_grad} since parallelize: "
                    "set it before, or parallelize again."
                )

    def refuse_other_data(self) -> None:
        """PlanError when somebody gave what the optimizer updates another memory: nobody would look there."""
        if not self.has_pieces:
            return
        flat = self.piece if self.visitor is None else self.visitor
        for name, piece in self.pieces.items():
            if piece.numel() and piece.data_ptr() != self.place_in(name, flat).data_ptr():
                raise PlanError(
                    f"the data of {name} was replaced, which the layers would not see: "
                    "write to it in place, with copy_()."
                )

    def lead_twins(self) -> None:
        """Before a step: where somebody gave a parameter another memory, all stages use that."""
        for twin in self.twins:
            for name, parameter in twin.parameters.items():
                if parameter.data_ptr() != self.parameters[name].data_ptr():
                    parameter.data = self.parameters[name].data

    def attach_gradients(self) -> Tensor | None:
        """Make every parameter's `.grad` a view of the flat gradient, before a step adds to it.

        `zero_grad()` leaves None behind, which means zero. What was there from an earlier step is carried:
        it comes back as a copy, to be added once this step's own gradients are reduced; else None.
        """
        if self.gradient is None or self.piece_gradient is None:
            return None
        carried = None
        for name in self.piece_gradients:
            grad = self.pieces[name].grad
            if grad is None:
                continue
            if carried is None:
                carried = torch.zeros_like(self.piece_gradient)
            self.place_in(name, carried).copy_(grad)
        self.piece_gradient.zero_()
        for gradient in self.whole_gradients:
            if self.keeps_gradient and gradient is not self.piece_gradient:
                gradient.zero_()
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[name]
        for twin in self.twins:
            for name, parameter in twin.parameters.items():
                parameter.grad = twin.gradients[name]
        return carried

    def finish_gradients(self, carried: Tensor | None, scale: float) -> None:
        """After a step: the gradient of each piece is its view of what was reduced, with what was carried.

        This step's own part was multiplied by `scale`.
        """
        assert self.piece_gradient is not None
        assert self.gradient is not None
        if not self.kind.cut and self.piece_gradient is not self.gradient:
            self.piece_gradient.copy_(self.gradient)
        if scale != 1:
            self.piece_gradient.div_(scale)
        if carried is not None:
            self.piece_gradient.add_(carried)
        self._detach_gradients()
        for name, piece in self.pieces.items():
            piece.grad = self.piece_gradients[name]

    def restore_gradients(self, carried: Tensor | None) -> None:
        """Undo a step that failed: the gradients are what `attach_gradients` found and gave as `carried`.

        They no longer lie in the flat gradient, to which a reduction that is under way may still write.
        """
        assert self.piece_gradient is not None
        self._detach_gradients()
        for name in self.piece_gradients:
            piece = self.pieces[name]
            piece.grad = None if carried is None else self.place_in(name, carried)

    def _detach_gradients(self) -> None:
        """What layers use has none between steps."""
        for parameters in (self.parameters, *(twin.parameters for twin in self.twins)):
            for parameter in parameters.values():
                parameter.grad = None


def allocate_storage(flat: Tensor) -> None:
    """Let a flat tensor whose storage is empty have memory again; its content is undefined."""
    storage = flat.untyped_storage()
    if not storage.nbytes():
        storage.resize_(flat.numel() * flat.element_size())


def free_storage(flat: Tensor) -> None:
    """Give the memory of a flat tensor back; its views stay. On CUDA it is reused in the stream's order."""
    flat.untyped_storage().resize_(0)
