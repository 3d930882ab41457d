"""All parts of an engine's parameters that ranks own, and their exchanges, one for each dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from plait.engine.engine import Engine
from plait.optimizers.part_exchange import PartExchange, Piece
from plait.optimizers.part_owners import OwnedPart, ParameterPart, assign_owners, held_boxes
from plait.plan.axes import STAGE_AXES
from plait.plan.layout.shards import shard_boxes
from plait.plan.shard_plan import ShardPlan
from plait.ranks.group import Group
from plait.ranks.mesh import Mesh


@dataclass(frozen=True, eq=False)
class OwnedParts:
    """Parts of a model's parameters, each whole on the rank that owns it, and their exchange with shards."""

    parts: Sequence[OwnedPart]
    """Those of the whole model, on all ranks."""
    exchanges: Sequence[PartExchange]
    """One for each dtype."""

    @cached_property
    def wholes(self) -> Mapping[int, Tensor]:
        """The parts that this rank owns, by number."""
        return {number: whole for one in self.exchanges for number, whole in one.wholes.items()}

    @cached_property
    def _exchange_of(self) -> Mapping[str, PartExchange]:
        return {part.parameter: one for one in self.exchanges for part in one.parts}

    def put(self, parameter: str, shard: Tensor) -> None:
        """Copy the parts of this rank's contiguous `shard` that owners need to the send buffer."""
        self._exchange_of[parameter].put(parameter, shard)

    def pieces_for_owners(self, parameter: str) -> Sequence[Piece]:
        """Return the parts of this rank's shard that owners need, with their places in the send buffer."""
        return self._exchange_of[parameter].pieces_for_owners(parameter)

    def gather(self) -> None:
        """Send shards copied by `put` to the owners; completes `wholes`. One all-to-all for each dtype."""
        for one in self.exchanges:
            one.gather()

    def give_back(self) -> None:
        """Send the values in `wholes` to all ranks that hold them: one all-to-all for each dtype."""
        for one in self.exchanges:
            one.give_back()

    def pieces_of(self, parameter: str) -> Sequence[Piece]:
        """Return the overlaps of this rank's shard with owners' parts, with values that owners sent back."""
        return self._exchange_of[parameter].pieces_of(parameter)

    def loads(self, ranks: int) -> list[int]:
        """Return the cost of the parts that each of `ranks` ranks owns."""
        costs = [0] * ranks
        for part in self.parts:
            costs[part.owner] += part.cost
        return costs


def own_parts(
    engine: Engine, parts: Sequence[ParameterPart], dtypes: Mapping[str, torch.dtype]
) -> OwnedParts:
    """Assign `parts` of an engine's parameters to owner ranks, and prepare their exchange. All ranks call it.

    `dtypes`: the dtype in which each parameter's parts are exchanged. Communication: where there is none yet,
    a group of the ranks of a stage is made.
    """
    mesh, shard_plan = engine.mesh, engine.shard_plan
    held = held_boxes(shard_plan, mesh.sizes, dict.fromkeys(part.parameter for part in parts))
    owned = assign_owners(parts, held)
    group = group_of_holders(held, shard_plan, mesh)
    members = set() if group is None else set(group.ranks)
    mine = [part for part in owned if part.owner in members]
    own = {part.parameter: shard_boxes(shard_plan.layouts[part.parameter], mesh.coordinate) for part in mine}
    by_dtype: dict[torch.dtype, list[OwnedPart]] = {}
    for part in sorted(mine, key=lambda part: str(dtypes[part.parameter])):
        by_dtype.setdefault(dtypes[part.parameter], []).append(part)
    exchanges = (
        PartExchange(each, held, own, group, dtype, mesh.device) for dtype, each in by_dtype.items() if group
    )
    return OwnedParts(owned, list(exchanges))


def group_of_holders(names: Iterable[str], shard_plan: ShardPlan, mesh: Mesh) -> Group | None:
    """Return the group of all ranks with which this rank shares parameters `names`; None where it has none.

    Those of its stage; where a parameter is tied across stages, those of all stages that have any.
    """
    stages_of = [shard_plan.owners[name] for name in names]
    stages = sorted({stage for stages in stages_of for stage in stages})
    if all(len(each) == 1 for each in stages_of):
        return mesh.group(STAGE_AXES) if mesh.size("pp") > 1 else mesh.group("world")
    if len(stages) == mesh.size("pp"):
        return mesh.group("world")
    ranks = [rank for rank in range(mesh.world) if mesh.coordinate_of(rank)["pp"] in stages]
    return mesh.new_group([ranks], "optimizer")
