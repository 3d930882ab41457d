"""A flat buffer: parameters of one kind, and their gradients, as views of flat tensors.

    layers use and          whole:     | query.weight | up.weight … | query.bias |pad|
    add to                  gradient:  | the same offsets                            |

    the optimizer updates   shard:     |  this rank's |
    and reads               its grad:  |  part of it  |

One collective moves a flat tensor, and nothing is copied. Where a strategy does not keep the whole tensors,
their storage is empty between uses and filled again in place, so that what autograd has saved stays valid.
Where it keeps them a shard is a view of the whole tensor, and where nothing is sharded it is that tensor.

A buffer's tensors, and when they have values:

- `whole`: all parameters, which layers use. Under the strategy `full`, between a gather and its release only.
  Weights of linears in float8 are in 8 bits there, with a scale for each matrix (`scaled`).
- `own`: the view of `whole` where this rank's shard lies.
- `shard`: this rank's shard, which the optimizer updates; always allocated. It is `own` (of one rank: all
  of `whole`) unless `whole` is released, the optimizer keeps masters in another dtype, or it is offloaded.
- `device_copy`: of a `shard` that is offloaded but updated on the device, its copy there: from the end of a
  step until the next begins, which copies it back. After a failed step it may be a clone of `shard`.
- `gradient`: what backwards add to, one for each stage of this rank; from the first one to the reduction.
- `shard_gradient`: the reduced gradient, which the optimizer reads; from the reduction to the update.

Where several stages of this rank use the same parameters, as the first and the last stage of a v-shaped
schedule do, each adds to a gradient of its own, and these are summed in the order of the stages: the same
sums in any schedule of the same stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from plait.engine.sharding.float8_matrices import ScaledMatrices
from plait.errors import PlanError
from plait.plan.flat_buffer_specs import BufferSpec, Slot
from plait.ranks.accelerator import copy_later, is_accelerator, moved_later
from plait.ranks.gradient_hook_detection import first_gradient_hook
from plait.ranks.group import Group
from plait.tensor.dtypes import torch_dtype


@dataclass(eq=False)
class StageView:
    """One stage's parameters and gradients in a buffer; a rank's stages share the parameters' memory only."""

    parameters: dict[str, nn.Parameter]
    """By full name: views of the buffer's `whole`."""
    gradient: Tensor | None
    gradients: Mapping[str, Tensor]
    """Views of `gradient`, one for each parameter."""

    def gradient_without(self, names: Collection[str]) -> list[Tensor]:
        """Return views that cover `gradient`, except the gradients of parameters `names`."""
        if self.gradient is None:
            return []
        parts: list[Tensor] = []
        start, first = 0, int(self.gradient.storage_offset())
        left_out = (one for name in names if (one := self.gradients[name]).numel())
        for one in sorted(left_out, key=Tensor.storage_offset):
            parts.append(self.gradient[start : int(one.storage_offset()) - first])
            start = int(one.storage_offset()) - first + one.numel()
        return [part for part in (*parts, self.gradient[start:]) if part.numel()]


@dataclass(eq=False)
class FlatBuffer:
    """Flat tensors on this rank that hold parameters and their gradients, as a `BufferSpec` describes."""

    spec: BufferSpec
    """With the shapes of this rank of `tp`."""
    shard_group: Group | None
    """The ranks between which it is sharded, or None where it is not."""
    replica_group: Group | None
    """The ranks over which gradients are all-reduced: those that hold the same parameters, or shards, for
    other data, on another stage or for other heads. None where it is frozen or no other rank has it."""
    whole: Tensor
    own: Tensor
    """View of this rank's shard in `whole`."""
    shard: Tensor
    """On its device during a step."""
    shard_parameters: dict[str, nn.Parameter]
    """The parameters that the optimizer updates, by full name: views of `shard`, or those of the layers."""
    shard_slots: Mapping[str, Slot]
    """The elements of each parameter in a flat shard."""
    shard_gradient: Tensor | None
    shard_gradients: Mapping[str, Tensor]
    """Views of `shard_gradient`, one for each parameter."""
    stage_views: tuple[StageView, ...]
    """One for each stage of this rank that uses it; one for all stages where it is frozen."""
    scaled: ScaledMatrices | None = None
    """The scales of its matrices, where layers have them in float8."""
    device_copy: Tensor | None = None
    """An offloaded shard while it is on the device, or a clone while `shard` may still be written."""

    @property
    def latest_shard(self) -> Tensor:
        """This rank's shard with the latest values: the device copy of an offloaded shard, if any."""
        return self.shard if self.device_copy is None else self.device_copy

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the layers of the first stage use, by full name."""
        return self.stage_views[0].parameters

    @cached_property
    def gradient(self) -> Tensor | None:
        """The flat gradient that backwards of the first stage add to; of all stages after `add_up_stages`."""
        return self.stage_views[0].gradient

    @cached_property
    def whole_gradients(self) -> list[Tensor]:
        """The gradients that layers add to, one per stage of this rank."""
        return [view.gradient for view in self.stage_views if view.gradient is not None]

    @cached_property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return torch_dtype(self.spec.kind.reduce)

    @property
    def is_read_by_device(self) -> bool:
        """Whether the optimizer updates this rank's shard on the CPU, and a GPU copies it from there."""
        spec = self.spec
        offloaded = spec.has_own_parameters and spec.device_copy is None and not is_accelerator(self.shard)
        return offloaded and is_accelerator(self.whole)

    @property
    def offloads_gradients(self) -> bool:
        """Whether gradients are reduced on a GPU and summed in CPU memory."""
        gradient = self.shard_gradient
        return gradient is not None and not is_accelerator(gradient) and is_accelerator(self.whole)

    @property
    def has_shard_gradient(self) -> bool:
        """Whether `shard_gradient` has memory of its own; else it is `gradient`, or a view of that."""
        return self.spec.shard_gradient is not None

    def release_parameters(self) -> None:
        """Free the whole parameters, unless they stay allocated under the plan."""
        if self.spec.whole.freed:
            free_storage(self.whole)

    def release_gradients(self) -> None:
        """Free the whole gradients, unless there are none or they stay allocated under the plan."""
        if self.spec.gradient is not None and self.spec.gradient.freed:
            for gradient in self.whole_gradients:
                free_storage(gradient)

    def add_up_stages(self) -> None:
        """Sum the gradients of all stages into `gradient`; call once per step, after the last backward."""
        for gradient in self.whole_gradients[1:]:
            self.whole_gradients[0].add_(gradient)

    def copy_to_device(self) -> None:
        """If only parameters are offloaded, copy them to the layers' device, for the optimizer's update."""
        if self.spec.device_copy is not None and self.device_copy is None:
            self.device_copy = moved_later(self.shard, self.whole.device, copy=True)
            self._point_to(self.device_copy)

    def copy_back(self) -> None:
        """Copy parameters that the optimizer updated on the device back to the CPU, and free the copy."""
        if self.device_copy is not None:
            copy_later(self.shard, self.device_copy)
            self._point_to(self.shard)
            self.device_copy = None

    def detach(self) -> None:
        """After a failed step, replace a shard that is a view of `whole` by a copy: gathers may write it."""
        if self.spec.shard is None:
            self.device_copy = self.shard.clone()
            self._point_to(self.device_copy)

    def _point_to(self, flat: Tensor) -> None:
        for name, shard in self.shard_parameters.items():
            shard.data = self.shard_slots[name].view_of(flat)

    def current_gradients(self, wanted: Collection[str]) -> list[Tensor]:
        """Return the gradients of the optimizer parameters in `wanted`, as one flat tensor if possible."""
        if self.shard_gradient is None:
            return []
        grads, views = [], 0
        for name, shard in self.shard_parameters.items():
            if name in wanted and (grad := shard.grad) is not None:
                grads.append(grad)
                view = self.shard_gradients[name]
                views += grad is view or grad.data_ptr() == view.data_ptr()
        return [self.shard_gradient] if views == len(self.shard_parameters) else grads

    def discard(self) -> None:
        """Drop all memory: parameters become empty, and gradients None. Nothing can use the buffer then."""
        empty = self.whole.new_empty(0)
        for view in self.stage_views:
            _empty(view.parameters.values())
            view.gradient, view.gradients = None, {}
        _empty(self.shard_parameters.values())
        for name in ("gradient", "whole_gradients"):
            vars(self).pop(name, None)  # cached
        self.whole = self.own = self.shard = empty
        self.shard_gradient, self.shard_gradients, self.device_copy = None, {}, None

    def check_settings(self) -> None:
        """Raise PlanError where a parameter was frozen or unfrozen since `parallelize`, or has got a hook."""
        hook = first_gradient_hook(self.shard_parameters)
        if hook is not None:
            raise PlanError(
                f"{hook[0]} has a hook of {hook[1]}, which would not be called with the whole gradient: "
                "change gradients between forward_backward and optimizer.step()."
            )
        for name, parameter in self.shard_parameters.items():
            if parameter.requires_grad != self.spec.kind.trains:
                raise PlanError(
                    f"requires_grad of {name} has changed to {parameter.requires_grad} since parallelize: "
                    "set it before, or parallelize again."
                )

    def check_data(self) -> None:
        """Raise PlanError where the `.data` of one of the optimizer's parameters was replaced."""
        if not self.spec.has_own_parameters:
            return
        flat = self.latest_shard
        start, size = flat.data_ptr(), flat.element_size()
        for name, shard in self.shard_parameters.items():
            if shard.numel() and shard.data_ptr() != start + size * self.shard_slots[name].start:
                raise PlanError(
                    f"the data of {name} was replaced, which the layers would not see: "
                    "write to it in place, with copy_()."
                )

    def share_data(self) -> None:
        """If a parameter's `.data` was replaced on the first stage, set it on the rank's other stages."""
        for view in self.stage_views[1:]:
            for name, parameter in view.parameters.items():
                if parameter.data_ptr() != self.parameters[name].data_ptr():
                    parameter.data = self.parameters[name].data

    @property
    def adds_to_shard(self) -> bool:
        """Whether gradients are added to `shard_gradient`, which starts at zero; else they are written."""
        return self.has_shard_gradient and self.spec.kind.sharded

    def attach_gradients(self) -> Tensor | None:
        """Before a step, make each `.grad` a view of a flat gradient; return the earlier gradients.

        Returns a copy of the gradients of earlier steps, to be added when this step's are reduced, or None
        where there are none (as after `zero_grad()`).
        """
        if self.shard_gradient is None:
            return None
        carried = None
        for name in self.shard_gradients:
            grad = self.shard_parameters[name].grad
            if grad is None:
                continue
            if carried is None:
                carried = torch.zeros_like(self.shard_gradient)
            self.shard_slots[name].view_of(carried).copy_(grad)
        for view in self.stage_views:
            for name, parameter in view.parameters.items():
                parameter.grad = view.gradients[name]
        return carried

    def finish_gradients(self, carried: Tensor | None, scale: float) -> None:
        """Add `carried` (earlier steps' gradients) to the reduced gradient; make each `.grad` a view of it.

        The reduced gradient is divided by `scale`, by which this step's loss was multiplied.
        """
        assert self.shard_gradient is not None
        assert self.gradient is not None
        if self.has_shard_gradient and not self.spec.kind.sharded:
            self.shard_gradient.copy_(self.gradient)
        if scale != 1:
            self.shard_gradient.div_(scale)
        if carried is not None:
            self.shard_gradient.add_(carried)
        self._detach_gradients()
        for name, shard in self.shard_parameters.items():
            shard.grad = self.shard_gradients[name]

    def restore_gradients(self, carried: Tensor | None) -> None:
        """Undo a failed step: restore the gradients that `attach_gradients` returned as `carried`.

        They are no longer views of the flat gradient, to which a pending reduction may still write.
        """
        assert self.shard_gradient is not None
        self._detach_gradients()
        for name in self.shard_gradients:
            view = None if carried is None else self.shard_slots[name].view_of(carried)
            self.shard_parameters[name].grad = view

    def _detach_gradients(self) -> None:
        """Set the `.grad` of the layers' parameters to None, as required between steps."""
        for view in self.stage_views:
            for parameter in view.parameters.values():
                parameter.grad = None


def _empty(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)


def allocate_storage(flat: Tensor) -> None:
    """Allocate the freed storage of a flat tensor again; its content is undefined."""
    storage = flat.untyped_storage()
    if not storage.nbytes():
        storage.resize_(flat.numel() * flat.element_size())


def free_storage(flat: Tensor) -> None:
    """Free the storage of a flat tensor but keep its views. On CUDA, memory is reused in stream order."""
    flat.untyped_storage().resize_(0)
