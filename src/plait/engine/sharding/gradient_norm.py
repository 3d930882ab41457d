"""The gradient norm of the whole model, clipping by it, and the loss scale of half-precision gradients.

A dynamic scale (Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2) is halved after
a step whose gradients are not finite, and doubled after many steps whose gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from plait.engine.sharding.unit import Owners, Unit
from plait.errors import PlanError
from plait.plan.argument_checks import require_number
from plait.plan.layout.layout import Layout
from plait.ranks.collectives import all_reduce
from plait.ranks.device import is_accelerator, sent
from plait.ranks.group import Group
from plait.ranks.mesh import Mesh
from plait.tensor.autograd.private_torch_functions import multiply_each

ROW = 1024
"""Number of elements whose squares are summed in float32."""


def counted_parameters(
    owners: Owners, layouts: Mapping[str, Layout], mesh: Mesh, axis: str = "world"
) -> frozenset[str]:
    """Return the names of parameters whose gradients this rank adds to the norm: each shard counts once.

    Once among the ranks along `axis`, over which the norm is summed: `world`, or `model`, whose ranks have
    all parameters among them where none is sharded.
    """
    along = mesh.sizes if axis == "world" else mesh.axes_of(axis)

    def counts(name: str) -> bool:
        layout = layouts[name]
        owner = dict(zip(layout.axes, layout.owner(mesh.coordinate), strict=True))
        is_first = owners[name][0] == mesh.index("pp")
        return is_first and all(owner[one] == mesh.index(one) for one in layout.axes if one in along)

    return frozenset(name for name in owners if counts(name))


def start_norm(
    units: Iterable[Unit], counted: Collection[str], group: Group, device: torch.device, order: float = 2.0
) -> Callable[[], Tensor]:
    """Start computing the gradient norm over the ranks of `group`; return a function that waits for it.

    `counted`: the parameters whose gradients this rank adds; each shard that several ranks of the group hold
    has to be added by one of them. The function returns the norm, 0-d float64; it is not finite where
    gradients are not. The order is that of `torch.linalg.vector_norm`, above 0, else `PlanError`.
    Communication: one all-reduce of 8 bytes over `group`.
    """
    require_number("norm_type", order, PlanError, positive=True, infinite="the largest element")
    gradients = [gradient for unit in units for gradient in _gradients(unit, counted)]
    on_accelerator = [gradient for gradient in gradients if is_accelerator(gradient)]
    on_host = [gradient for gradient in gradients if not is_accelerator(gradient)]
    powers = [_power_of_all(on_accelerator, order)] if on_accelerator else []
    powers += [_power_on_host(on_host, order)] if on_host else []
    total = torch.zeros((), dtype=torch.float64, device=device)
    for power in powers:
        power = sent(power, device)
        total = torch.maximum(total, power) if math.isinf(order) else total + power
    if math.isinf(order):
        # The maximum of a backend may ignore NaN.
        largest = total.nan_to_num(nan=math.inf, posinf=math.inf)
        return all_reduce(largest, group, "max", checked=False).about("the gradient norm").wait
    under_way = all_reduce(total, group, checked=False).about("the gradient norm")
    return lambda: under_way.wait() ** (1 / order)


def scale_to(units: Iterable[Unit], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by `max_norm / norm` if that is below 1. Raises PlanError for a norm below 0.

    On a GPU they are multiplied by 1 otherwise, since the host would have to wait for the norm.
    """
    if not isinstance(max_norm, Tensor):
        require_number("max_norm", max_norm, PlanError, infinite="no clipping")
    # The same small number as torch.nn.utils.clip_grad_norm_, so that results are equal.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # A factor of NaN would spread to every gradient and hide where it began.
    factor = torch.where(norm.isfinite(), factor, 1.0)
    if not is_accelerator(factor) and factor == 1.0:  # in CPU memory the host knows it without waiting
        return
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for unit in units:
        for gradient in _gradients(unit, unit.shard_parameters):
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), each in alike.items():
        multiply_each(each, factor.to(device, dtype))


def non_finite_gradients(units: Iterable[Unit], device: torch.device) -> Tensor:
    """Return whether an element of this rank's gradients is not finite: bool 0-d, on `device`."""
    gradients = (gradient for unit in units for gradient in _gradients(unit, unit.shard_parameters))
    largest = [sent(torch.linalg.vector_norm(one, math.inf), device, torch.float64) for one in gradients]
    if not largest:
        return torch.zeros((), dtype=torch.bool, device=device)
    return ~torch.stack(largest).isfinite().all()


def _power_of_all(gradients: Iterable[Tensor], order: float) -> Tensor:
    """Return the sum of |element|^order over gradients on a GPU, or the largest |element|; 0-d float64.

    In few kernels for all gradients together, and one more for each gradient in 16 bits. A GPU sums in a
    tree, in which float32 keeps its digits.
    """
    wide = [
        gradient if gradient.itemsize >= 4 else torch.linalg.vector_norm(gradient, order, dtype=torch.float32)
        for gradient in gradients
    ]
    norm = get_total_norm(wide, order, foreach=True).double()
    return norm if math.isinf(order) else norm.pow(order)


def _power_on_host(gradients: Iterable[Tensor], order: float) -> Tensor:
    """Return what `_power_of_all` does, of gradients on the CPU.

    By rows: a CPU sums squares in float32 sequentially, which loses three digits over the elements of a large
    layer and hardly any over a row, and takes no longer.
    """
    parts = []
    for gradient in gradients:
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        flat = gradient.reshape(-1)
        whole = len(flat) // ROW * ROW
        if whole:
            rows = flat[:whole].view(-1, ROW)
            parts.append(torch.linalg.vector_norm(rows, order, dim=1, dtype=wide))
        if whole < len(flat):
            parts.append(torch.linalg.vector_norm(flat[whole:], order, dtype=wide).view(1))
    norms = torch.cat(parts).double()
    return norms.amax() if math.isinf(order) else norms.pow(order).sum()


def _gradients(unit: Unit, wanted: Collection[str]) -> list[Tensor]:
    """Return the gradients of the `wanted` optimizer parameters that have elements."""
    gradients = (one for buffer in unit.buffers for one in buffer.current_gradients(wanted))
    return [gradient for gradient in gradients if gradient.numel()]


FIRST = 2.0**16
GROWS_AFTER = 2000
"""Steps in a row with finite gradients."""


@dataclass
class LossScale:
    """The loss scale of the next step, and the state by which a dynamic scale adapts."""

    value: float = 1.0
    dynamic: bool = False
    good_steps: int = 0
    checked: bool = True
    """Whether the gradients of the latest step were checked for finite values."""

    def require_checked(self, *, anew: bool) -> None:
        """Raise PlanError where gradients begin `anew`, and the last ones were not checked for overflow.

        With a dynamic scale only: the optimizer may have used values that are not finite.
        """
        if self.dynamic and anew and not self.checked:
            raise PlanError(
                "in fp16 gradients may overflow, and they were not checked: call "
                "engine.clip_grad_norm_ (with float('inf') to clip nothing) before each optimizer.step()."
            )

    def end(self) -> None:
        """End a successful step: mark its gradients as not yet checked for overflow."""
        self.checked = False

    @property
    def guards(self) -> bool:
        """Whether all gradients of a step are set to None if any of them overflowed (is not finite)."""
        return self.dynamic or self.value != 1

    def update(self, *, finite: bool) -> None:
        """Adapt a dynamic scale: halve it if gradients were not finite, double it after many finite steps."""
        self.checked = True
        self.good_steps = self.good_steps + 1 if finite else 0
        if not self.dynamic:
            return
        if not finite:
            self.value /= 2
        elif self.good_steps == GROWS_AFTER:
            self.value, self.good_steps = self.value * 2, 0


def loss_scale(given: float | None, *, in_fp16: bool) -> LossScale:
    """Return the first step's loss scale: `given`, or dynamic if anything is in fp16, or else 1."""
    if given is not None:
        return LossScale(given)
    return LossScale(FIRST, dynamic=True) if in_fp16 else LossScale()
