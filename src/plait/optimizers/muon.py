"""`Muon`: the optimizer of hidden matrices, each orthogonalized whole by the rank that owns it.

    momentum, in shards   ──all-to-all──▶   whole matrices, with their owners
                                                  │ Newton–Schulz
    parameters, in shards ◀──all-to-all──   orthogonal updates

Each rank keeps parameters, gradients and momentum as the plan divides them. What is no hidden matrix is
updated by AdamW, element by element, where it is.

Jordan et al. 2024, "Muon" (https://kellerjordan.github.io/posts/muon); as in `torch.optim.Muon`, momentum is
a running mean (`lerp`), and weight decay is decoupled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from plait.engine.engine import Engine
from plait.errors import PlanError
from plait.optimizers.engine_parameters import EngineParameters, GivenGroups
from plait.optimizers.hidden_matrices import ParameterMatrices, parameter_matrices
from plait.optimizers.matrix_parts import MatrixPart, batches_of, row_blocks, sent_dtype
from plait.optimizers.muon_groups import ADAMW_OPTIONS, adamw_options, muon_options, option_groups
from plait.optimizers.newton_schulz import (
    EPSILON,
    ITERATIONS,
    QUINTIC,
    RateScaling,
    Triple,
    learning_rate_factor,
    orthogonalized,
)
from plait.optimizers.owned_parts import own_parts
from plait.optimizers.part_owners import ParameterPart
from plait.plan.argument_checks import require_flag
from plait.ranks.accelerator import is_accelerator
from plait.tensor.dtypes import named_dtype

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""In which matrices can be orthogonalized."""


class Muon(Optimizer):
    """Updates an engine's hidden matrices by Muon, and its other parameters by AdamW, under any plan."""

    communicates = True

    def __init__(
        self,
        engine: Engine,
        params: GivenGroups | None = None,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Triple | Sequence[Triple] = QUINTIC,
        eps: float = EPSILON,
        ns_steps: int = ITERATIONS,
        adjust_lr_fn: RateScaling = "original",
        dtype: torch.dtype = torch.bfloat16,
        others: Mapping[str, Any] | None = None,
        per_head: bool = False,
        routers: bool = False,
    ) -> None:
        """Choose the hidden matrices, and the rank that owns each. All ranks call it with the same arguments.

        The arguments are those of `torch.optim.Muon`, and `params` are the engine's, by default all that
        train: an iterable of them, or of groups with their own options and `others`. `ns_coefficients` may
        have a triple for each step. `dtype`: in which matrices are orthogonalized; they are sent in it, or in
        that of the parameters if that is narrower. `others`: the options of AdamW for all other parameters,
        of which `weight_decay` counts for tensors of two and more dims. `per_head`: whether each head of
        query, key and value is a matrix of its own. `routers`: whether weights of routers are hidden
        matrices. Memory: momentum, two means for AdamW's parameters; the matrices that this rank owns, and
        buffers for what it sends and receives of them. Communication: names of parameters over `world`.
        """
        given = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        options, options_of_others = muon_options(given), {**ADAMW_OPTIONS, **adamw_options(others)}
        if dtype not in DTYPES:
            raise PlanError(f"dtype is {dtype!r}: choose torch.bfloat16, torch.float32 or torch.float64.")
        self._chosen = {"per_head": per_head, "routers": routers}
        for name, value in self._chosen.items():
            require_flag(name, value, PlanError)
        self._choose_matrices(engine)
        groups = option_groups(self._parameters.groups(params), options, options_of_others, self._is_matrix)
        shared = {name: options[name] for name in ("lr", "weight_decay", "eps")}
        super().__init__(groups, shared)
        self.dtype = dtype
        self._own_matrices(engine)

    def use_engine(self, engine: Engine) -> None:
        """Continue with another engine of the same model, whose parameters are already in the groups.

        All ranks of that engine call it. `plait.reshard` does. Communication: as when it was made.
        """
        self._choose_matrices(engine)
        self._own_matrices(engine)

    def _choose_matrices(self, engine: Engine) -> None:
        """Choose the matrices of an engine's parameters."""
        self._parameters = EngineParameters(engine, type(self).__name__)
        self.matrices: dict[str, ParameterMatrices] = parameter_matrices(
            engine.blueprint.sequence, engine.blueprint.rules, **self._chosen
        )
        """The matrices of each parameter that trains, or why AdamW updates it."""

    def _own_matrices(self, engine: Engine) -> None:
        """Choose the rank that owns each part of the matrices, and allocate what it is exchanged by."""
        everyone = self._parameters.require_same(self.param_groups)
        parts = [
            (name, part) for name, found in self.matrices.items() if name in everyone for part in found.parts
        ]
        self.matrix_parts: Sequence[MatrixPart] = [part for _, part in parts]
        """What single ranks orthogonalize, in the order of `owned.parts`."""
        iterations = named_dtype(self.dtype)
        dtypes: dict[str, torch.dtype] = {
            name: getattr(torch, sent_dtype(kind.master, iterations).name)
            for name, kind in engine.blueprint.kinds.items()
        }
        self.owned = own_parts(
            engine, [ParameterPart(name, part.box, part.cost) for name, part in parts], dtypes
        )
        """Which rank owns which part, and how parts are exchanged."""

    def _is_matrix(self, parameter: nn.Parameter) -> bool:
        return bool(self.matrices[self._parameters.names[id(parameter)]].parts)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; does nothing where no parameter has a gradient. All ranks call it.

        Communication: two all-to-alls for each dtype of parameters that Muon updates, over the ranks of a
        stage (over `world` where one of them is tied across stages): of each element that the owner of its
        matrix does not hold, and of each such element to every rank that holds it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._parameters.have_gradients(self.param_groups):
            return loss
        of_matrices = [group for group in self.param_groups if group["algorithm"] == "muon"]
        for group in of_matrices:
            for parameter in group["params"]:
                self._put_momentum(parameter, group)
        self.owned.gather()
        self._orthogonalize(of_matrices)
        self.owned.give_back()
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                self._update_matrices(group)
            else:
                self._step_adamw(group)
        return loss

    def _put_momentum(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Update a parameter's momentum in this rank's shard, and copy parts to their owners' buffers."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean: Tensor = state["momentum_buffer"]
        mean.lerp_(gradient, 1 - group["momentum"])
        for piece in self.owned.pieces_for_owners(self._parameters.names[id(parameter)]):
            for sent, latest, average in row_blocks(piece.exchanged, piece.of(gradient), piece.of(mean)):
                sent.copy_(latest.lerp(average, group["momentum"]) if group["nesterov"] else average)

    def _orthogonalize(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Replace the momentum of each matrix that this rank owns by its orthogonalized form."""
        group_of = {self._parameters.names[id(one)]: group for group in groups for one in group["params"]}
        for parameter, numbers in self._owned_numbers().items():
            group = group_of[parameter]
            for alike in batches_of(numbers, self.matrix_parts):
                part = self.matrix_parts[alike[0]]
                stacked = zip(*(part.split(self.owned.wholes[number]) for number in alike), strict=True)
                made = []
                for matrices, shape in zip(stacked, part.shapes, strict=True):
                    results = orthogonalized(
                        torch.stack(matrices) if len(matrices) > 1 else matrices[0][None],
                        group["ns_coefficients"],
                        group["ns_steps"],
                        self.dtype,
                        group["eps"],
                    )
                    ratio = _rate_factor(group, shape) / _rate_factor(group, part.shapes[0])
                    made.append(results if ratio == 1 else results * ratio)
                for index, number in enumerate(alike):
                    joined = self.matrix_parts[number].join([results[index] for results in made])
                    self.owned.wholes[number].copy_(joined)

    def _owned_numbers(self) -> dict[str, list[int]]:
        """Return by parameter name the places in `matrix_parts` of matrices that this rank orthogonalizes."""
        numbers: dict[str, list[int]] = {}
        for number in self.owned.wholes:
            numbers.setdefault(self.owned.parts[number].parameter, []).append(number)
        return numbers

    def _update_matrices(self, group: Mapping[str, Any]) -> None:
        """Decay this rank's shards of a group's matrices, and subtract the orthogonalized updates."""
        rate = float(group["lr"])
        for parameter in group["params"]:
            for piece in self.owned.pieces_of(self._parameters.names[id(parameter)]):
                factor = _rate_factor(group, self.matrix_parts[piece.part].shapes[0])
                for values, update in row_blocks(piece.of(parameter), piece.exchanged):
                    values.mul_(1 - rate * group["weight_decay"])
                    values.add_(update.to(values.device), alpha=-rate * factor)

    def _step_adamw(self, group: Mapping[str, Any]) -> None:
        """Update the parameters of a group by AdamW."""
        parameters: list[Tensor] = group["params"]
        for one in parameters:
            if not self.state[one]:
                means = {key: torch.zeros_like(one) for key in ("exp_avg", "exp_avg_sq")}
                self.state[one] = {"step": torch.tensor(0.0), **means}
        states = [self.state[one] for one in parameters]
        if parameters:
            adamw(
                parameters,
                [one.grad for one in parameters if one.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=None if any(is_accelerator(one.device) for one in parameters) else True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _rate_factor(group: Mapping[str, Any], shape: tuple[int, int]) -> float:
    return learning_rate_factor(group["adjust_lr_fn"], *shape)
