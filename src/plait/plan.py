"""The plan: what a parallel run looks like, as one frozen value that every rank agrees on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from plait.errors import PlanError

Strategy = Literal["none", "optimizer", "gradients", "full"]
Reduce = Literal["last", "each"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp64", "fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees of parallelism and how the step is run.

    `dp` counts data-parallel ranks: `replicate` groups of `shard = dp / replicate` ranks each.
    `microbatches` is how many each data-parallel rank runs a step. `layers_per_stage` cuts the
    stages by hand (one count per stage, first stage first); without it they are cut for even cost.
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
    precision: Precision = "fp32"
    layers_per_stage: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp", "replicate", "microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"plan.{name} is {value!r}: give a whole number of at least 1.")
        for name, kind in (
            ("strategy", Strategy),
            ("reduce", Reduce),
            ("recompute", Recompute),
            ("precision", Precision),
        ):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise PlanError(f"plan.{name} is {value!r}: choose one of {', '.join(get_args(kind))}.")
        if self.chunks is not None and self.chunks < 1:
            raise PlanError(f"plan.chunks is {self.chunks}: give a whole number of at least 1.")
        if self.dp % self.replicate:
            raise PlanError(
                f"plan.replicate = {self.replicate} does not divide plan.dp = {self.dp}: "
                "choose a divisor, the shard axis is dp / replicate."
            )

    @property
    def shard(self) -> int:
        """Ranks along the `shard` axis."""
        return self.dp // self.replicate

    @property
    def world(self) -> int:
        """Ranks in the whole run: the product of the degrees."""
        return self.pp * self.dp * self.tp
