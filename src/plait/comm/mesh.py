"""The mesh: all ranks of a run, laid out along named axes, and the groups that run along them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import coordinates
from plait.comm.group import Group
from plait.comm.introduction import introduce
from plait.comm.last_words import of_world
from plait.comm.point_to_point import receive, send
from plait.comm.traffic import Traffic
from plait.errors import CommunicationError, MeshError
from plait.plan import Plan


class Mesh:
    """Ranks along the axes `pp`, `replicate`, `shard`, `tp`: outermost first, row-major, `tp` innermost.

    `dp` stands for `replicate` × `shard`, `model` for `pp` × `tp` (ranks that see the same data and hold one
    copy of the model between them), `world` for all. The world is that of the initialised
    `torch.distributed`; without it there is one rank and no backend.
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
        """Make every group, with all ranks of the world: call it on each, with the same degrees or plan.

        `timeout` is in seconds and holds for every wait. `device` is this rank's, by default
        `cuda:LOCAL_RANK` where the backend is NCCL, else the CPU. `alone` makes a mesh of this rank only,
        whatever world it is in, and asks nothing of the others. Raises `MeshError` for a plan together with
        degrees, and for degrees whose product is not the number of ranks in the world.

        `guarded` has the ranks of every group agree on each collective before it starts, whoever calls it,
        and on the bits of what enters a region of tensor parallelism: a difference is a `CommunicationError`
        on every rank of the group. That costs 256 bytes a rank each time, counted as `guard`, and a wait for
        all of them; results stay the same bits. Messages between stages have no such header: the programs
        that send and receive them are proved to do so in one order, and each step agrees on their shapes.
        """
        if plan is not None:
            if (pp, dp, tp, replicate) != (1, 1, 1, 1):
                raise MeshError("a mesh was given a plan and degrees as well: give one or the other.")
            pp, dp, tp, replicate = plan.pp, plan.dp, plan.tp, plan.replicate
        self.sizes = coordinates.sizes_of(pp=pp, dp=dp, tp=tp, replicate=replicate)
        joined = dist.is_available() and dist.is_initialized() and not alone
        self.rank = dist.get_rank() if joined else 0
        self.world = dist.get_world_size() if joined else 1
        _check_world(self.sizes, self.world)
        self.device = _device(device, joined)
        self.timeout = float(timeout)
        self.guarded = guarded
        self.traffic = Traffic()
        self.coordinate = self.coordinate_of(self.rank)
        self._made: list[dist.ProcessGroup] = []
        self._words = of_world(self.rank, self.timeout) if joined else None
        self._host = introduce(self._everyone()) if joined else None
        # All ranks make all groups in this order, each with a process group of its own, also where two axes
        # have the same ranks: so that the traffic of one axis never waits behind that of another, and that
        # what a step that failed has left under way on one meets nothing on another.
        self._groups = {
            axis: self._make_groups(coordinates.groups_along(axis, self.sizes), axis)
            for axis in (*coordinates.AXES, *coordinates.COMBINED)
        }
        along_pp = coordinates.groups_along("pp", self.sizes)
        self._pipeline_groups = (self._make_groups(along_pp, "pp"), self._make_groups(along_pp, "pp"))
        if self.device.type == "cuda" and _uses_nccl(joined):
            self._connect_neighbours()

    @property
    def pipeline_groups(self) -> tuple[Group, Group]:
        """Two more groups over the ranks of `pp`, for messages forward and backward; both count as `pp`."""
        return self._pipeline_groups

    def size(self, axis: str) -> int:
        """Ranks along an axis, combined or not."""
        return coordinates.size_along(axis, self.sizes)

    def index(self, axis: str) -> int:
        """This rank's place along an axis; for `dp` replicate index · shard + shard index."""
        return coordinates.index_along(axis, self.coordinate, self.sizes)

    def group(self, axis: str) -> Group:
        """The group along an axis that this rank is in. Raises `MeshError` for an unknown axis."""
        coordinates.axes_of(axis)
        return self._groups[axis]

    def coordinate_of(self, rank: int) -> dict[str, int]:
        """The index of a global rank along each of the four axes. Raises `MeshError` for an unknown rank."""
        return coordinates.coordinate_of(rank, self.sizes)

    def rank_at(self, **coordinate: int) -> int:
        """The global rank at a coordinate; axes that are not given are this rank's own. `dp` is allowed.

        Raises `MeshError` for an unknown axis or an index outside the mesh.
        """
        given = coordinates.split_dp(coordinate, self.sizes)
        return coordinates.rank_at({**self.coordinate, **given}, self.sizes)

    def new_group(self, ranks_per_group: Sequence[Sequence[int]], name: str) -> Group | None:
        """Make disjoint groups, in which traffic is counted as `name`; give the one this rank is in, if any.

        All ranks of the world call it with the same arguments. Raises `MeshError` for ranks that overlap, or
        that the mesh has not.
        """
        groups = [tuple(ranks) for ranks in ranks_per_group]
        members = [rank for ranks in groups for rank in ranks]
        if len(set(members)) != len(members) or not all(0 <= rank < self.world for rank in members):
            raise MeshError(
                f"groups of {name} are {groups}: give each rank from 0 to {self.world - 1} at most once."
            )
        return self._make_group(groups, name)

    def device_mesh(self, axes: Sequence[str]) -> DeviceMesh:
        """Those of `axes` with more than one rank, as torch's tools know them; else at this rank's place.

        In this order and under these names, over the groups of this mesh; where no axis has more ranks, this
        rank alone, under the name of the last. Nothing is sent. What torch's tools then send is no traffic of
        this mesh. Raises `MeshError` without an initialised world, and for unknown axes.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise MeshError(
                "torch's tools need an initialised world, be it of one rank: use plait.launch or torchrun."
            )
        sizes = {axis: size for axis in axes if (size := self.size(axis)) > 1}
        if not sizes:
            own, alone = self._own_process_group, [dist.get_rank()]
            return DeviceMesh.from_group([own], self.device.type, alone, mesh_dim_names=(axes[-1],))
        groups = [group for axis in sizes if (group := self.group(axis).process_group) is not None]
        places = (dict(zip(sizes, place, strict=True)) for place in product(*map(range, sizes.values())))
        ranks = torch.tensor([self.rank_at(**place) for place in places]).view(*sizes.values())
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=tuple(sizes))

    @cached_property
    def _own_process_group(self) -> dist.ProcessGroup:
        """Of this rank alone; no other takes part in making it."""
        made: dist.ProcessGroup | None = dist.group.WORLD
        if dist.get_world_size() > 1:
            made = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="alone")
            self._made.append(made)
        assert made is not None
        return made

    def check_plan(self, plan: Plan) -> None:
        """Raise `MeshError` that names the first degree in which the plan differs from this mesh."""
        name = self._difference(plan)
        if name is not None:
            raise MeshError(
                f"the plan has {name} = {getattr(plan, name)} but the mesh has {name} = {self.sizes[name]}: "
                "make the mesh from the same plan, Mesh(plan)."
            )

    def close(self) -> None:
        """Give back the connections of all groups; every rank calls it when none communicates any more.

        Only a process that makes many meshes needs it. Groups of the mesh are of no use afterwards.
        """
        if self._host is not None:
            self._host.close()
        for process_group in self._made:
            dist.destroy_process_group(process_group)
        self._made.clear()

    def __deepcopy__(self, memo: object) -> Mesh:
        """A module that is copied goes on communicating with the same ranks."""
        return self

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        place = " ".join(f"{axis}={self.coordinate[axis]}" for axis, size in self.sizes.items() if size > 1)
        return f"Mesh({sizes}; rank {self.rank}{' at ' + place if place else ''})"

    def _difference(self, plan: Plan) -> str | None:
        return next((axis for axis, size in self.sizes.items() if getattr(plan, axis) != size), None)

    def _connect_neighbours(self) -> None:
        """NCCL connects a pair of ranks at its first message and blocks both until then: so all in one order.

        Otherwise the first step would hang, where each rank posts a receive from a neighbour first.
        """
        index = self.index("pp")
        for group in self._pipeline_groups:
            for lower in range(group.size - 1):
                token = torch.zeros(1, device=self.device)
                if index == lower:
                    send(token, group, lower + 1, label="the first connection").wait()
                elif index == lower + 1:
                    receive(token, group, lower, label="the first connection").wait()

    def _everyone(self) -> Group:
        """All ranks, over the process group that is there before any of the mesh's."""
        ranks = tuple(range(self.world))
        return Group("world", ranks, self.rank, dist.group.WORLD, self.traffic, self.timeout)

    def _make_groups(self, groups: Sequence[tuple[int, ...]], name: str) -> Group:
        """As `_make_group`, for groups that cover the world."""
        group = self._make_group(groups, name)
        assert group is not None
        return group

    def _make_group(self, groups: Sequence[tuple[int, ...]], name: str) -> Group | None:
        mine = None
        for ranks in groups:
            process_group = None
            if len(ranks) > 1:
                process_group = self._connect(ranks, name)
            if self.rank in ranks:
                index = ranks.index(self.rank)
                mine = Group(
                    name,
                    ranks,
                    index,
                    process_group,
                    self.traffic,
                    self.timeout,
                    self._host,
                    words=self._words,
                    guarded=self.guarded,
                )
                self._made += [] if process_group is None else [process_group]
        return mine

    def _connect(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        """Make a process group, with all ranks of the world. `CommunicationError` where one does not come."""
        timeout = timedelta(seconds=self.timeout)
        try:
            made: dist.ProcessGroup = dist.new_group(
                list(ranks), timeout=timeout, group_desc=name, sort_ranks=False
            )
        except RuntimeError as error:
            others = ", ".join(str(rank) for rank in ranks if rank != self.rank)
            raise CommunicationError(
                f"rank {self.rank} waits for rank {others} to make the group {name} of the mesh: "
                f"{str(error).splitlines()[0]} (see what that rank is doing, or give the mesh more time)."
            ) from error
        return made


def _check_world(sizes: dict[str, int], world: int) -> None:
    needed = prod(sizes.values())
    if needed != world:
        degrees = {axis: coordinates.size_along(axis, sizes) for axis in ("pp", "dp", "tp")}
        product = " × ".join(f"{axis} {size}" for axis, size in degrees.items())
        raise MeshError(
            f"the mesh needs {needed} ranks ({product}) but the world has {world}: "
            f"start {needed} ranks, plait.launch(fn, ranks={needed}) or torchrun, or change the degrees."
        )


def _device(device: str | torch.device | None, joined: bool) -> torch.device:
    """The device asked for, where `cuda` means this rank's own; or the one the backend is made for."""
    if device is None:
        device = "cuda" if _uses_nccl(joined) and torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        own = os.environ.get("LOCAL_RANK")  # set by torchrun; else whoever joined the world chose the device
        return torch.device("cuda", torch.cuda.current_device() if own is None else int(own))
    return chosen


def _uses_nccl(joined: bool) -> bool:
    return joined and "nccl" in dist.distributed_c10d.get_backend_config()
