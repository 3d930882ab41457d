"""The plan: what a parallel run looks like, as one frozen value that every rank agrees on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from plait.errors import PlanError

Strategy = Literal["none", "optimizer", "gradients", "full"]
Reduce = Literal["last", "each"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp64", "fp32", "bf16"]

_CHOICES = {"strategy": Strategy, "reduce": Reduce, "recompute": Recompute, "precision": Precision}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees of parallelism and how the step is run.

    `dp` counts data-parallel ranks: `replicate` groups of `shard = dp / replicate` ranks each.
    `microbatches` is how many each data-parallel rank runs a step. `layers_per_stage` cuts the
    stages by hand (one count per stage, first stage first); without it the simulated step decides.
    `precision` is the dtype of parameters and activations; without it they keep the model's. `overlap`:
    whether a stage's full backward computes input and weight gradients layer by layer, so that weight
    gradients hide what `tp` sums; else all input gradients come first, so that the stage before can go on.
    Without it stages whose gradient nobody waits for do the first, others the second.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    replicate: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    microbatches: int = 1
    strategy: Strategy = "none"
    reduce: Reduce = "last"
    recompute: Recompute = "none"
    precision: Precision | None = None
    overlap: bool | None = None
    layers_per_stage: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp", "replicate", "microbatches"):
            _require_count(name, getattr(self, name))
        if self.chunks is not None:
            _require_count("chunks", self.chunks)
        for name, kind in _CHOICES.items():
            value, choices = getattr(self, name), get_args(kind)
            if value not in choices and not (name == "precision" and value is None):
                raise PlanError(f"plan.{name} is {value!r}: choose one of {', '.join(choices)}.")
        if self.dp % self.replicate:
            raise PlanError(
                f"plan.replicate = {self.replicate} does not divide plan.dp = {self.dp}: "
                "choose a divisor, the shard axis is dp / replicate."
            )
        if not isinstance(self.overlap, bool | None):
            raise PlanError(f"plan.overlap is {self.overlap!r}: give True, False or None.")
        if self.layers_per_stage is not None:
            if not isinstance(self.layers_per_stage, tuple | list) or not self.layers_per_stage:
                raise PlanError(
                    f"plan.layers_per_stage is {self.layers_per_stage!r}: give one count per stage, or None."
                )
            for count in self.layers_per_stage:
                _require_count("layers_per_stage", count)
            # A list would make the plan unhashable and unequal to its twin.
            object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))

    @property
    def shard(self) -> int:
        """Ranks along the `shard` axis."""
        return self.dp // self.replicate

    @property
    def world(self) -> int:
        """Ranks in the whole run: the product of the degrees."""
        return self.pp * self.dp * self.tp


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"plan.{name} is {value!r}: give a whole number of at least 1.")
