"""The mesh of a plan: all ranks of a run along the axes `pp`, `replicate`, `shard`, `tp`."""

from __future__ import annotations

import torch

from plait.comm import coordinates
from plait.comm.grid_mesh import GridMesh
from plait.comm.group import Group
from plait.comm.point_to_point import receive, send
from plait.errors import MeshError
from plait.plan import Plan


class Mesh(GridMesh):
    """Ranks along the axes `pp`, `replicate`, `shard`, `tp`: outermost first, row-major, `tp` innermost.

    `dp` combines `replicate` × `shard`, `model` combines `pp` × `tp` (ranks with the same data that hold one
    copy of the model together), `world` all axes. `index("dp")` is replicate index · shard + shard index.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        pp: int = 1,
        dp: int = 1,
        tp: int = 1,
        replicate: int = 1,
        device: str | torch.device | None = None,
        timeout: float = 600.0,
        alone: bool = False,
        guarded: bool = False,
    ) -> None:
        """Make every group. All ranks of the world call it, with the same degrees or plan.

        `device`, `timeout` (seconds), `alone` and `guarded` are those of `GridMesh`. Raises `MeshError` for a
        plan together with degrees, and for degrees whose product is not the number of ranks in the world.
        """
        if plan is not None:
            if (pp, dp, tp, replicate) != (1, 1, 1, 1):
                raise MeshError("a mesh was given a plan and degrees as well: give one or the other.")
            pp, dp, tp, replicate = plan.pp, plan.dp, plan.tp, plan.replicate
        sizes = coordinates.sizes_of(pp=pp, dp=dp, tp=tp, replicate=replicate)
        super().__init__(device=device, timeout=timeout, alone=alone, guarded=guarded, **sizes)
        along_pp = coordinates.groups_along("pp", self.sizes)
        self._pipeline_groups = (self._make_groups(along_pp, "pp"), self._make_groups(along_pp, "pp"))
        if self.uses_nccl:
            self._connect_neighbours()

    @property
    def pipeline_groups(self) -> tuple[Group, Group]:
        """Two more groups over the ranks of `pp`, for messages forward and backward; both count as `pp`."""
        return self._pipeline_groups

    def _described_sizes(self) -> dict[str, int]:
        return {axis: self.size(axis) for axis in ("pp", "dp", "tp")}

    def check_plan(self, plan: Plan) -> None:
        """Raise `MeshError` that names the first degree in which the plan differs from this mesh."""
        name = next((axis for axis, size in self.sizes.items() if getattr(plan, axis) != size), None)
        if name is not None:
            raise MeshError(
                f"the plan has {name} = {getattr(plan, name)} but the mesh has {name} = {self.sizes[name]}: "
                "make the mesh from the same plan, Mesh(plan)."
            )

    def _connect_neighbours(self) -> None:
        """Send a first message between all neighbours along `pp`, in one order.

        NCCL connects a pair of ranks at their first message and blocks both until then: the first step, in
        which each rank posts a receive from a neighbour first, would hang.
        """
        index = self.index("pp")
        for group in self._pipeline_groups:
            for lower in range(group.size - 1):
                token = torch.zeros(1, device=self.device)
                if index == lower:
                    send(token, group, lower + 1, label="the first connection").wait()
                elif index == lower + 1:
                    receive(token, group, lower, label="the first connection").wait()
