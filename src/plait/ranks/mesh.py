"""Meshes: all ranks of a run as a grid with named axes, and the groups of ranks along each axis."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from plait.errors import MeshError
from plait.plan.argument_checks import require_flag, require_instance, require_number
from plait.plan.axes import (
    PLAN_AXES,
    axes_of,
    combined_axes,
    coordinate_of,
    grid_of,
    groups_along,
    index_along,
    name_of,
    rank_at,
    require_degrees,
    size_along,
    sizes_of,
    sizes_of_plan,
    split_dp,
    world_size,
)
from plait.plan.plan import Plan
from plait.ranks.accelerator import StreamEvent, is_accelerator, make_current
from plait.ranks.collectives import all_reduce, all_to_all
from plait.ranks.failure.operation_watch import OperationWatch
from plait.ranks.group import Group, Traffic
from plait.ranks.handle import Handle
from plait.ranks.launcher_environment import require_joined
from plait.ranks.point_to_point import receive, send
from plait.ranks.rank_device import device_of_rank
from plait.ranks.transport.interface import RankTransports
from plait.ranks.transport.process_ranks import Processes, current_ranks, joined_processes
from plait.ranks.transport.rank_subset import OUTSIDE, RankSubset
from plait.ranks.transport.torch_distributed import TorchTransport, splits_communicators
from plait.schedules.lowering.messages import Channel

CHANNEL_CTAS = 8
"""Thread blocks of a send or receive on NCCL: one that waits for its peer keeps them from computing."""


class GridMesh:
    """All ranks of the world as a row-major grid of any number of named axes, the last innermost.

    `GridMesh(rows=2, columns=3)` has rank 3 at row 1, column 0. The axis `world` combines all axes. The world
    is that of the initialised `torch.distributed`; without it there is one rank and no backend. `Mesh` is the
    grid of a plan's axes. A mesh of some `ranks` of the world numbers them from 0; on the others it has no
    groups but `all_ranks`.
    """

    def __init__(
        self,
        *,
        device: str | torch.device | None = None,
        timeout: float | None = None,
        alone: bool = False,
        guarded: bool = False,
        ranks: Sequence[int] | None = None,
        **sizes: int,
    ) -> None:
        """Make a group along every axis. All ranks of the world call it, with the same sizes.

        `timeout` is in seconds and holds for every wait; by default that of the world, as given to
        `plait.launch` or torch, or 600 where there is none. `device` is this rank's, by default
        `cuda:LOCAL_RANK` where the backend is NCCL, the CPU where it is not, and the current GPU, if there is
        one, where the process is no rank of a world. `alone` makes a mesh of this rank only, without the
        other ranks of its world. `ranks`: those of the world that are in the mesh, in order; None: all.
        Raises `MeshError` for sizes whose product is not their number, for ranks that the world does not
        have, and in a process that a launcher started as one of several, but which has not joined them.

        `guarded` checks every collective of every group for consistency before it starts, and the bits of
        each tensor that enters a region of tensor parallelism: a difference is a `CommunicationError` on
        every rank of the group. That costs 256 bytes a rank each time, counted as `guard`, and a wait for all
        of them; results stay the same bits. Messages between stages are not checked: the programs that send
        and receive them are proved to do so in one order, and each step checks their shapes.
        """
        require_degrees(sizes)
        if not sizes or "world" in sizes:
            raise MeshError(
                f"the mesh's axes are {', '.join(sizes) or 'none'}: give at least one, and none of the name "
                "world, which combines all."
            )
        require_flag("the mesh's alone", alone, MeshError)
        require_flag("the mesh's guarded", guarded, MeshError)
        self.sizes = dict(sizes)
        everyone = None if alone else _everyone()
        self.members = _members(ranks, 1 if everyone is None else everyone.size)
        """The numbers in the world of the mesh's ranks."""
        self._ranks = _ranks_of(everyone, self.members)
        self.rank, self.world = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)
        self.shared_results: dict[Hashable, Any] = {} if self._ranks is None else self._ranks.shared_results
        """Results that one rank of this process has computed for all of them, keyed by their inputs."""
        self._check_world()
        self.device = device_of_rank(device, self._ranks)
        self.has_default_device = device is None
        """Whether nobody has chosen the device."""
        make_current(self.device)
        self.timeout = _timeout_of(self._ranks, timeout)
        self.guarded = guarded
        self.traffic = Traffic()
        self.coordinate = self.coordinate_of(self.rank) if self.has_this_rank else {}
        self._discover(everyone)
        self._operation_watch: OperationWatch | None = None
        if self.uses_nccl:  # elsewhere waits block the host, and raise errors themselves
            self._operation_watch = OperationWatch(self.rank, self.timeout, partial(StreamEvent, self.device))
        self._all_ranks = self._make_group_of_all()
        self._groups: dict[str, Group] = {}
        if self.has_this_rank:
            for axis in (*self.sizes, *combined_axes(self.sizes)):  # in one order on all ranks
                self._groups[axis] = self._group_along(axis)

    @property
    def has_this_rank(self) -> bool:
        """Whether this rank is in the mesh; False for one that its argument `ranks` leaves out."""
        return self.rank != OUTSIDE

    @property
    def all_ranks(self) -> Group:
        """The group of all ranks of the world, also of those that are not in the mesh."""
        return self._all_ranks or self.group("world")

    @property
    def uses_nccl(self) -> bool:
        """Whether this rank is on a GPU and its tensors are sent over NCCL."""
        return is_accelerator(self.device) and self._ranks is not None and self._ranks.uses_nccl

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis or a combined axis."""
        return size_along(axis, self.sizes)

    def index(self, axis: str) -> int:
        """Return this rank's index along an axis; in a combined axis, the first of its axes is outermost."""
        return index_along(axis, self.coordinate, self.sizes)

    def group(self, axis: str | Collection[str]) -> Group:
        """Return this rank's group along an axis, or along several axes together.

        Where no combined axis has them, the group is made at the first call, by all ranks in one order.
        Raises `MeshError` for an unknown axis.
        """
        if not self.has_this_rank:
            raise MeshError(
                f"this rank is not in the mesh, whose ranks are {', '.join(map(str, self.members))} of the "
                "world: leave out on it what those ranks do, or give the mesh more ranks."
            )
        name = name_of(axis, self.sizes)
        if name not in self._groups:
            self._groups[name] = self._make_groups(groups_along(axis, self.sizes), name)
        return self._groups[name]

    def coordinate_of(self, rank: int) -> dict[str, int]:
        """Return the index of a global rank along each axis. Raises `MeshError` for an unknown rank."""
        return coordinate_of(rank, self.sizes)

    def axes_of(self, axis: str) -> tuple[str, ...]:
        """Return the axes that `axis` combines, or `axis` itself. Raises `MeshError` for an unknown axis."""
        return axes_of(axis, self.sizes)

    def rank_at(self, **coordinate: int) -> int:
        """Return the global rank at a coordinate; axes that are not given default to this rank's own index.

        On a plan's mesh `dp` may be given. Raises `MeshError` for an unknown axis or an index outside the
        mesh.
        """
        given = split_dp(coordinate, self.sizes)
        grid = grid_of(given, self.sizes)
        return rank_at({axis: given.get(axis, self.coordinate[axis]) for axis in grid}, self.sizes)

    def new_group(self, ranks_per_group: Sequence[Sequence[int]], name: str) -> Group | None:
        """Make disjoint groups of ranks, whose traffic is counted as `name`; return this rank's, or None.

        All ranks of the world call it with the same arguments. Raises `MeshError` for ranks that overlap or
        are not in the mesh.
        """
        groups = [tuple(ranks) for ranks in ranks_per_group]
        members = [rank for ranks in groups for rank in ranks]
        if len(set(members)) != len(members) or not all(0 <= rank < self.world for rank in members):
            raise MeshError(
                f"groups of {name} are {groups}: give each rank from 0 to {self.world - 1} at most once."
            )
        return self._make_group(groups, name)

    def device_mesh(self, axes: Sequence[str]) -> DeviceMesh:
        """Return a torch `DeviceMesh` of those `axes` that have several ranks, through this rank.

        It uses the groups of this mesh, in the order and with the names of `axes`; where no axis has more
        than one rank, it holds this rank only, under the last name. Without communication; messages that
        torch then sends are not counted as traffic. Raises `MeshError` without an initialised world, and for
        unknown axes.
        """
        world = self._ranks if isinstance(self._ranks, Processes) else joined_processes()
        if world is None:
            raise MeshError(
                "a DeviceMesh needs an initialised world of processes, even for one rank: use plait.launch "
                "or torchrun, and no threads as ranks."
            )
        sizes = {axis: size for axis in axes if (size := self.size(axis)) > 1}
        if not sizes:
            own, alone = world.own_process_group, [world.rank]
            return DeviceMesh.from_group([own], self.device.type, alone, mesh_dim_names=(axes[-1],))
        transports = [self.group(axis).transport for axis in sizes]
        groups = [one.process_group for one in transports if isinstance(one, TorchTransport)]
        places = (dict(zip(sizes, place, strict=True)) for place in product(*map(range, sizes.values())))
        numbers = [self.members[self.rank_at(**place)] for place in places]
        ranks = torch.tensor(numbers).view(*sizes.values())
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=tuple(sizes))

    def neighbours(self, axis: str, size: int, name: str = "copies") -> Group:
        """Make a group of each `size` consecutive ranks along an axis, and return this rank's group.

        All ranks of the world call it with the same arguments; traffic is counted as `name`. Raises
        `MeshError` unless `size` divides the ranks along the axis.
        """
        along = self.size(axis)
        require_degrees({f"number of neighbours along {axis}": size})
        if along % size:
            raise MeshError(
                f"{along} ranks along {axis} do not divide into groups of {size}: give a divisor."
            )
        groups = groups_along(axis, self.sizes)
        parts = [ranks[first : first + size] for ranks in groups for first in range(0, along, size)]
        return self._make_groups(parts, name)

    def close(self) -> None:
        """Close the connections of all groups; every rank calls it, with no communication pending.

        Only a process that makes many meshes needs it. Groups of the mesh cannot be used afterwards.
        """
        if self._operation_watch is not None:
            self._operation_watch.close()
        if self._ranks is not None:
            self._ranks.close()

    def forget_connections(self) -> None:
        """Drop the connections of all groups without communication, after a failure of other ranks.

        Groups of the mesh cannot be used afterwards; sizes, ranks and coordinates can.
        """
        if self._ranks is not None:
            self._ranks.forget()

    def __deepcopy__(self, memo: object) -> GridMesh:
        """Return this mesh itself, so that a copied module communicates with the same ranks."""
        return self

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        if not self.has_this_rank:
            return f"{type(self).__name__}({sizes}; without this rank)"
        place = " ".join(f"{axis}={self.coordinate[axis]}" for axis, size in self.sizes.items() if size > 1)
        return f"{type(self).__name__}({sizes}; rank {self.rank}{' at ' + place if place else ''})"

    def _axis_of_group(self, axis: str) -> str:
        """Return the axis whose group stands for `axis`: by default `axis` itself."""
        return axis

    def _described_sizes(self) -> dict[str, int]:
        """Return the sizes of the axes under the names that the user gave."""
        return self.sizes

    def _check_world(self) -> None:
        needed = world_size(self.sizes)
        if needed == self.world:
            return
        product = " × ".join(f"{axis} {size}" for axis, size in self._described_sizes().items())
        if isinstance(self._ranks, RankSubset):
            raise MeshError(
                f"the mesh needs {needed} ranks ({product}) but is given {list(self.members)} of the world: "
                "give as many ranks, or change the degrees."
            )
        raise MeshError(
            f"the mesh needs {needed} ranks ({product}) but the world has {self.world}: "
            f"start {needed} ranks, plait.launch(fn, ranks={needed}) or torchrun, or change the degrees."
        )

    def _discover(self, everyone: RankTransports | None) -> None:
        """Find which ranks share a host; on a timeout, raise an error that names the ranks it waited for."""
        if everyone is None:
            return
        numbers = tuple(range(everyone.size))
        world = Group("world", numbers, everyone.rank, everyone.world(), self.traffic, self.timeout)
        awaited = f"host discovery over world with ranks {', '.join(map(str, world.others))}"
        Handle(partial(everyone.discover, self.timeout), lambda: None, awaited, world).wait()

    def _make_group_of_all(self) -> Group | None:
        """Return a group of all ranks of the world, of which the mesh has some; None where it has all."""
        if not isinstance(self._ranks, RankSubset):
            return None
        everyone = self._ranks.everyone
        if everyone.uses_nccl and splits_communicators():
            raise MeshError(
                "a mesh of some ranks makes groups without the others, but torch's world was initialised "
                "with a device_id: leave that out of init_process_group, or give the mesh all ranks."
            )
        numbers = tuple(range(everyone.size))
        transport = everyone.connect([numbers], "all_ranks", self.timeout)
        log = everyone.failure_log
        return Group("all_ranks", numbers, everyone.rank, transport, self.traffic, self.timeout, log)

    def _group_along(self, axis: str) -> Group:
        """Make this rank's group along an axis; on NCCL, axes with the same ranks share a communicator.

        Each axis has a process group of its own, also where two have the same ranks: so an operation of one
        never waits for one of the other, and what a failed step has left pending on one is not matched on the
        other. On NCCL they share it, as a communicator takes memory of the GPU: operations start there in the
        order of the program, the same on all ranks, and a failure ends the process. Each is connected
        there when it is made, by a first all-reduce, except `pp`, which no training step needs.
        """
        same = self._axis_of_group(axis)
        if same != axis:
            return self._groups[same]
        groups = groups_along(axis, self.sizes)
        for other, group in self._groups.items() if self.uses_nccl else ():
            if groups_along(other, self.sizes) == groups:
                return replace(group, name=axis)
        return self._make_groups(groups, axis)

    def _make_groups(self, groups: Sequence[tuple[int, ...]], name: str) -> Group:
        group = self._make_group(groups, name)
        assert group is not None
        return group

    def _make_group(
        self, groups: Sequence[tuple[int, ...]], name: str, max_ctas: int | None = None
    ) -> Group | None:
        ranks = self._ranks
        transport = None if ranks is None else ranks.connect(groups, name, self.timeout, max_ctas)
        mine = next((group for group in groups if self.rank in group), None)
        if mine is None:
            return None
        log, watch = None if ranks is None else ranks.failure_log, self._operation_watch
        index = mine.index(self.rank)
        group = Group(name, mine, index, transport, self.traffic, self.timeout, log, self.guarded, watch)
        # Channels, of `pp`, have a first message of their own.
        if transport is not None and self.uses_nccl and name != "pp":
            _reduce_first(group, self.device)
        return group


class Mesh(GridMesh):
    """Ranks along the axes `pp`, `replicate`, `shard`, `cp`, `tp`: outermost first, row-major.

    `dp` combines `replicate` × `shard` (ranks with other sequences), `dp_cp` `dp` × `cp` (ranks with other
    tokens), `shard_cp` `shard` × `cp` (ranks over which state is sharded), `model` `pp` × `cp` × `tp` (ranks
    with the same sequences), `world` all axes. `index("dp")` is replicate index · shard + shard index.

    With `ep` or `etp` above 1 the ranks of `shard`, `cp` and `tp` also have indices along `edp`, `ep` and
    `etp`, see `plait.plan.axes`.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
        tp: int = 1,
        replicate: int = 1,
        ep: int = 1,
        etp: int = 1,
        device: str | torch.device | None = None,
        timeout: float | None = None,
        alone: bool = False,
        guarded: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Make a group along every axis. All ranks of the world call it, with the same degrees or plan.

        `device`, `timeout` (seconds), `alone`, `guarded` and `ranks` are those of `GridMesh`. Raises
        `MeshError` for a plan together with degrees, and for another number of ranks than their product.
        """
        if plan is not None:
            if {pp, dp, cp, tp, replicate, ep, etp} != {1}:
                raise MeshError("a mesh was given a plan and degrees as well: give one or the other.")
            remedy = "give a plait.Plan, or degrees by name"
            require_instance("the mesh's plan", plan, Plan, remedy, MeshError)
            sizes = sizes_of_plan(plan)
        else:
            sizes = sizes_of(pp=pp, dp=dp, cp=cp, tp=tp, replicate=replicate, ep=ep, etp=etp)
        super().__init__(device=device, timeout=timeout, alone=alone, guarded=guarded, ranks=ranks, **sizes)
        self._channels: dict[Channel, Group | None] = {}

    def channel_groups(self, channels: Collection[Channel]) -> dict[Channel, Group]:
        """Return the group (sender, receiver) of each pipeline channel that this rank sends or receives on.

        All ranks call it with the same channels along `pp`. Groups are made at the first call, in one order
        on all ranks, and count as `pp`. On NCCL each then sends a first message, which connects its ranks:
        so no connection is made within a step, where the ranks would come to it in different orders.
        """
        lines = groups_along("pp", self.sizes)
        for channel in channels:
            if channel not in self._channels:
                sender, receiver, _ = channel
                pairs = [(line[sender], line[receiver]) for line in lines]
                group = self._make_group(pairs, "pp", CHANNEL_CTAS)
                self._channels[channel] = group
                if group is not None and self.uses_nccl:
                    _send_first_message(group, self.device)
        return {channel: group for channel in channels if (group := self._channels[channel]) is not None}

    def _axis_of_group(self, axis: str) -> str:
        """Return the axis whose group stands for `axis`: without context parallelism `dp` for `dp_cp`."""
        return axis if self.size("cp") > 1 else axis.removesuffix("_cp")

    def _described_sizes(self) -> dict[str, int]:
        return {axis: self.size(axis) for axis in PLAN_AXES}

    def check_plan(self, plan: Plan) -> None:
        """Raise `MeshError` unless the plan has this mesh's degrees; the error names the first to differ."""
        sizes = {"ep": 1, "etp": 1} | self.sizes
        name = next((axis for axis, size in sizes.items() if getattr(plan, axis) != size), None)
        if name is not None:
            raise MeshError(
                f"the plan has {name} = {getattr(plan, name)} but the mesh has {name} = {sizes[name]}: "
                "make the mesh from the same plan, Mesh(plan)."
            )


def _everyone() -> RankTransports | None:
    """Return all ranks of the world; None without one. Raises MeshError where it has not been joined."""
    everyone = current_ranks()
    if everyone is None:
        require_joined()
    return everyone


def _ranks_of(everyone: RankTransports | None, members: tuple[int, ...]) -> RankTransports | None:
    """Return the ranks of a mesh, numbered from 0: `members` of `everyone`; None for one rank alone."""
    is_some = everyone is not None and members != tuple(range(everyone.size))
    return RankSubset(everyone, members) if everyone is not None and is_some else everyone


def _timeout_of(ranks: RankTransports | None, given: float | None) -> float:
    """Return the timeout in seconds: `given`, else that of torch's default process group, else 600.

    Raises MeshError where `given` is no positive number.
    """
    if given is not None:
        require_number("the mesh's timeout", given, MeshError, positive=True, infinite="no limit")
        return float(given)
    of_world = None if ranks is None else ranks.timeout
    return 600.0 if of_world is None else of_world


def _members(ranks: Sequence[int] | None, started: int) -> tuple[int, ...]:
    """Return the numbers of the mesh's ranks, by default all `started`. Raises MeshError for others."""
    members = tuple(range(started)) if ranks is None else tuple(ranks)
    if not members or len(set(members)) < len(members) or not set(members) <= set(range(started)):
        raise MeshError(
            f"the mesh's ranks are {list(members)}, but the world has the ranks 0 to {started - 1}: give "
            "each of those at most once, and at least one."
        )
    return members


def _reduce_first(group: Group, device: torch.device) -> None:
    all_reduce(torch.zeros(1, device=device), group, checked=False).about("the first connection").wait()
    if group.name == "cp":  # a collective connects neighbours only, and attention sends to all ranks
        token = torch.zeros(group.size, device=device)
        all_to_all(token, group, checked=False).about("the first connection").wait()


def _send_first_message(group: Group, device: torch.device) -> None:
    token = torch.zeros(1, device=device)
    if group.index == 0:
        send(token, group, 1, label="the first connection").wait()
    else:
        receive(token, group, 0, label="the first connection").wait()
