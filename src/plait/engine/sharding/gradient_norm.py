"""The gradient norm of the whole model, over all ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from plait.engine.sharding.unit import Owners, Unit
from plait.errors import PlanError
from plait.plan.argument_checks import require_number
from plait.plan.layout.layout import Layout
from plait.ranks.accelerator import is_accelerator, sent
from plait.ranks.collectives import all_reduce
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
