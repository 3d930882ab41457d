"""Gradient clipping of an engine's step, which also drops gradients that overflowed under a loss scale."""

from __future__ import annotations

from torch import Tensor

from plait.engine.runner import Runner
from plait.engine.sharding.gradient_norm import scale_to, start_norm
from plait.errors import NonFiniteError


def clip_gradients(runner: Runner, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
    """Scale all gradients of the model to a norm of at most `max_norm`, and return the norm before."""
    runtime, scale = runner.runtime, runner.scale
    units = runtime.units.values()
    group = runner.mesh.group(runtime.blueprint.norm_axis)
    norm = start_norm(units, runtime.counted, group, runner.mesh.device, norm_type)()
    scale_to(units, norm, max_norm)
    if scale.guards or error_if_nonfinite:
        finite = bool(norm.isfinite())
        scale.update(finite=finite)
        if not finite and scale.guards:
            runner.reducer.drop()
        if not finite and error_if_nonfinite:
            raise NonFiniteError(
                f"the gradient norm is {norm.item()} over all ranks: lower the learning rate, raise the "
                "warm-up, or look at the data of that step."
            )
    return norm
