"""LoRA adapters of experts: a `down` and an `up` for each expert, as peft has them by `target_parameters`.

x → (W[e] + alpha / rank · up[e] down[e]) x        down: [E, rank, in], up: [E, out, rank]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.initial_values import Constant, Initial, Normal
from plait.plan.rules import join
from plait.tensor.experts.expert_layouts import experts_in
from plait.tensor.experts.experts import ExpertAdapter, Experts
from plait.tensor.find_module_hooks import weight_utility

MATRICES = ("gate_up_proj", "down_proj")
"""The parameters of experts that can have an adapter, in their order in the module."""
SUFFIX = "_adapter"
"""What the name of an adapter has after that of its matrices."""


class ExpertLora(ExpertAdapter):
    """A trainable low-rank adapter of one matrix of each expert; `up` starts at zero."""

    dropout = None
    """None: an adapter that is added to a weight cannot drop its inputs."""

    @property
    def halves(self) -> dict[str, Tensor]:
        """Return `down` and `up` by their names."""
        return {"down": self.down, "up": self.up}

    def initial_values(self) -> dict[str, Initial]:
        """Return the initial distributions: `down` normal with std 1/√(3 · in features), `up` zero.

        That is the standard deviation of the uniform distribution that peft has by default.
        """
        return {"down": Normal(1 / math.sqrt(3 * self.down.shape[2])), "up": Constant(0.0)}


@dataclass(frozen=True)
class ExpertMatrices:
    """A parameter with one matrix of each expert, and access to its LoRA adapter."""

    experts: Experts
    name: str

    @property
    def weight(self) -> Tensor:
        """The parameter, `[E, out, in]` or `[E, in, out]`."""
        return getattr(self.experts, self.name)  # type: ignore[no-any-return]

    def adapter(self) -> ExpertLora | None:
        """Return the adapter, or None."""
        return getattr(self.experts, self.name + SUFFIX)  # type: ignore[no-any-return]

    def adapt(self, rank: int, alpha: float) -> None:
        """Add an adapter, unless there is one: experts may occur in several places."""
        if self.adapter() is None:
            made = ExpertLora(self.weight, transposed=self.experts.transposed, rank=rank, alpha=alpha)
            setattr(self.experts, self.name + SUFFIX, made)


def expert_matrices(model: nn.Module) -> dict[str, ExpertMatrices]:
    """Return the matrices of all experts by the paths of their parameters."""
    return {
        join(path, name): ExpertMatrices(experts, name)
        for path, experts in experts_in(model)
        for name in MATRICES
    }


def require_adaptable(chosen: Mapping[str, ExpertMatrices], dropout: float) -> None:
    """Raise ModelError for experts that cannot have a LoRA adapter: computed weights, or any `dropout`."""
    for path, one in chosen.items():
        if utility := weight_utility(one.experts):
            raise ModelError(
                f"a parameter of the experts around {path} is computed by {utility} in each forward, and an "
                "adapter is added to one that is a parameter: remove that, or name targets without it."
            )
        if dropout:
            raise ModelError(
                f"the adapter of {path} is added to a weight of experts, and cannot have dropout = "
                f"{dropout}: set dropout to 0, or name targets without it."
            )
