"""What lowering must know of a model and a plan beside the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from plait.plan import Plan


class Place(NamedTuple):
    """A layer of the model, by its stage and its number within the stage."""

    stage: int
    layer: int


@dataclass(frozen=True)
class Sharding:
    """Which instructions about units a step has.

    `gathers`: whether parameters are gathered, before their first use in a step and then kept, or before each
    use and released after it. `scatters`: whether gradients are cut between the ranks of `shard`, after the
    last micro-batch or after each. `opens`: whether a unit's whole gradient is there only while it is added
    to.
    """

    gathers: Literal["never", "once", "each use"] = "never"
    scatters: Literal["never", "last", "each"] = "never"
    opens: bool = False


WHOLE = Sharding()
"""Every rank of `dp` keeps all parameters and all gradients."""


def sharding_of(plan: Plan) -> Sharding:
    """What the plan's strategy asks for.

    A strategy that keeps whole gradients anyway gains nothing by reducing them early: they are reduced last.
    """
    if not plan.shards:
        return Sharding(gathers="once") if plan.has_master else WHOLE
    opens = plan.strategy in ("gradients", "full")
    return Sharding(
        gathers="each use" if plan.strategy == "full" else "once",
        scatters=plan.reduce if opens else "last",
        opens=opens,
    )


@dataclass(frozen=True)
class Shape:
    """Of a model, cut into stages and units."""

    layers: tuple[int, ...]
    """Per stage."""
    units: Mapping[str, tuple[Place, ...]]
    """Which layers use which unit, and feed its gradient."""
    overlap: bool | None = None
    """Whether a full backward does `I` and `W` of a layer at once. None: where nobody waits for it."""
    sharding: Sharding = WHOLE
