"""The reference run's optimizer, on whole parameters; it has an independent implementation of Muon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plait.models.layers.layer_sequence import LayerSequence
from plait.optimizers.hidden_matrices import ParameterMatrices, parameter_matrices
from plait.optimizers.muon import Muon
from plait.optimizers.muon_groups import ADAMW_OPTIONS, option_groups
from plait.optimizers.newton_schulz import (
    EPSILON,
    QUINTIC,
    coefficients_of_steps,
    learning_rate_factor,
    orthogonalized,
)
from plait.optimizers.optimizer_makers import MakeOptimizer, class_and_settings_of_owned, class_of
from plait.optimizers.owned_optimizer import Owned
from plait.plan.rules import Rules

MUON_OPTIONS: Mapping[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": QUINTIC,
    "eps": EPSILON,
    "ns_steps": 5,
    "adjust_lr_fn": "original",
}
"""Those of `torch.optim.Muon`."""


def whole_optimizer(
    make: MakeOptimizer,
    groups: Sequence[dict[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    sequence: LayerSequence,
    rules: Rules | None,
) -> Optimizer:
    """Return an optimizer of whole parameters whose updates are those of the plan's, which `make` makes."""
    if class_of(make) is Owned:
        kind, settings = class_and_settings_of_owned(make)
        return kind(list(groups), **settings)
    if class_of(make) is not Muon:
        return make(list(groups))
    options = dict(make.keywords) if isinstance(make, partial) else {}
    choice = {name: options.pop(name, False) for name in ("per_head", "routers")}
    found = parameter_matrices(sequence, rules or {}, **choice)
    matrices: dict[Tensor, ParameterMatrices] = {
        parameters[name]: one for name, one in found.items() if one.parts
    }
    return WholeMuon(groups, matrices, **options)


class WholeMuon(Optimizer):
    """Muon for whole matrices on one rank, and AdamW of torch for all other parameters."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        matrices: Mapping[Tensor, ParameterMatrices],
        *,
        dtype: torch.dtype = torch.bfloat16,
        others: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`matrices`: of each parameter that has some. `options` and `others`: as those of `plait.Muon`."""
        options, of_others = {**MUON_OPTIONS, **options}, {**ADAMW_OPTIONS, **(others or {})}
        super().__init__(option_groups(groups, options, of_others, lambda one: one in matrices), options)
        self.matrices, self.dtype = matrices, dtype
        rest = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        self._adamw = torch.optim.AdamW(rest) if any(group["params"] for group in rest) else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        assert closure is None
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                for parameter in group["params"]:
                    self._update(parameter, group)
        if self._adamw is not None:
            self._adamw.step()
            self.state.update(self._adamw.state)

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        mean = state.setdefault("momentum_buffer", torch.zeros_like(gradient))
        mean.lerp_(gradient, 1 - group["momentum"])
        looked_at = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        for part in self.matrices[parameter].parts:
            updates = [
                self._orthogonal(matrix, group).to(parameter.dtype)
                * learning_rate_factor(group["adjust_lr_fn"], *matrix.shape)
                for matrix in part.split(looked_at[part.box.slices])
            ]
            parameter[part.box.slices] -= group["lr"] * part.join(updates)

    def _orthogonal(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the matrix after Newton–Schulz iterations, by their formula; in 16 bits as plait rounds."""
        steps, coefficients = group["ns_steps"], group["ns_coefficients"]
        if self.dtype != torch.float64:
            return orthogonalized(matrix, coefficients, steps, self.dtype, group["eps"])
        x: Tensor = matrix.double()
        x = x / max(float(x.norm()), group["eps"])
        for a, b, c in coefficients_of_steps(coefficients, steps):
            square = x @ x.mT if x.shape[0] <= x.shape[1] else x.mT @ x
            factor = a * torch.eye(len(square), dtype=x.dtype) + b * square + c * (square @ square)
            x = factor @ x if x.shape[0] <= x.shape[1] else x @ factor
        return x
