"""The mesh of a plan: all ranks of a run along the axes `pp`, `replicate`, `shard`, `tp`."""

from __future__ import annotations

from collections.abc import Collection

import torch

from plait.comm import coordinates
from plait.comm.grid_mesh import GridMesh
from plait.comm.group import Group
from plait.comm.point_to_point import receive, send
from plait.errors import MeshError
from plait.plan import Plan
from plait.schedules.messages import Channel


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
        self._channels: dict[Channel, Group | None] = {}

    def channel_groups(self, channels: Collection[Channel]) -> dict[Channel, Group]:
        """Return the group (sender, receiver) of each of the `channels` that this rank sends or receives on.

        All ranks call it with the same channels along `pp`. Groups are made at the first call, in one order
        on all ranks, and count as `pp`. On NCCL each then sends a first message, which connects its ranks:
        so no connection is made within a step, where the ranks would come to it in different orders.
        """
        lines = coordinates.groups_along("pp", self.sizes)
        for channel in channels:
            if channel not in self._channels:
                sender, receiver, _ = channel
                group = self._make_group([(line[sender], line[receiver]) for line in lines], "pp")
                self._channels[channel] = group
                if group is not None and self.uses_nccl:
                    _send_first_message(group, self.device)
        return {channel: group for channel in channels if (group := self._channels[channel]) is not None}

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


def _send_first_message(group: Group, device: torch.device) -> None:
    token = torch.zeros(1, device=device)
    if group.index == 0:
        send(token, group, 1, label="the first connection").wait()
    else:
        receive(token, group, 0, label="the first connection").wait()
