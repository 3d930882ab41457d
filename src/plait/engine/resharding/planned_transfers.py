"""Plans a reshard: which boxes of which tensors move between which ranks, in rounds, unit by unit.

A round has tensors of one unit that are alike: its parameters, their gradients, or one entry of their
optimizer state, of one dtype. All ranks compute all rounds, and so agree before anything moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from plait.checkpoint.optimizer_state import layout_of_state
from plait.checkpoint.rank_contents import parameter_key, state_key, state_keys
from plait.engine.blueprint import Blueprint
from plait.engine.resharding.rank_report import RankReport, gradient_key
from plait.errors import LayoutError
from plait.plan.axes import coordinate_of, sizes_of_plan
from plait.plan.layout.layout import Box, Layout
from plait.plan.layout.routes import BoxRouter, BoxTransfer, boxes_by_rank
from plait.plan.layout.shards import full_box


@dataclass(frozen=True)
class PlacedBlueprint:
    """A blueprint, and which rank of the world has which coordinate in its mesh."""

    blueprint: Blueprint
    members: Mapping[int, int]
    """The number in the world of each rank of the mesh; a rank that is lost has none."""
    _boxes: dict[tuple[Layout, tuple[int, ...]], dict[int, tuple[Box, ...]]] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis."""
        return sizes_of_plan(self.blueprint.plan)

    def coordinates(self, stages: Iterable[int]) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield the ranks of the world in pipeline `stages`, each with its coordinate in the mesh."""
        for rank, number in self.members.items():
            where = coordinate_of(rank, self.sizes)
            if where["pp"] in stages:
                yield number, where

    def boxes(self, name: str, layout: Layout) -> dict[int, tuple[Box, ...]]:
        """Return by rank of the world the boxes of a tensor of `layout` that belongs to parameter `name`."""
        key = layout, self.blueprint.owners[name]
        if key not in self._boxes:
            self._boxes[key] = boxes_by_rank(layout, self.coordinates(key[1]))
        return self._boxes[key]

    def ranks_with_buffer(self, name: str) -> list[int]:
        """Return the ranks of the world whose layers have the buffer `name`, by its first name."""
        sequence = self.blueprint.sequence
        path = max((one.path for one in sequence.layers if _is_within(name, one.path)), key=len)
        layer = next(one for one in sequence.layers if one.path == path)
        buffer = layer.module.get_buffer(name[len(path) + 1 :] if path else name)
        ranks = {
            self.blueprint.schedule.rank_of[stage]
            for stage, numbers in enumerate(self.blueprint.stage_layers)
            for number in numbers
            if any(one is buffer for one in sequence.layers[number].module.buffers())
        }
        return [number for number, _ in self.coordinates(ranks)]


def _is_within(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")


@dataclass(frozen=True)
class MovedTensor:
    """A global tensor that moves, and the layouts of its shards."""

    key: str
    parameter: str
    """The name of the parameter that it belongs to."""
    entry: str
    """The entry of the optimizer's state; "" for a parameter, `GRADIENT` for a gradient."""
    shape: tuple[int, ...]
    before: Layout
    after: Layout


GRADIENT = ".grad"
"""The entry of a gradient; no entry of an optimizer's state has a dot."""


@dataclass(frozen=True)
class Round:
    """Tensors of one unit and one dtype that move together."""

    tensors: tuple[MovedTensor, ...]
    dtype: torch.dtype
    transfers: tuple[BoxTransfer, ...]


@dataclass(frozen=True)
class Moves:
    """The transfers of all tensors from the old layout to the new one, in rounds, unit by unit."""

    units: Mapping[str, Sequence[Round]]
    """The rounds of each unit, by its name."""
    buffers: Mapping[str, tuple[BoxTransfer, ...]]
    """The transfers of each buffer, by its first name."""
    most: int
    """The number of elements of the largest unit."""


def plan_moves(
    before: PlacedBlueprint, after: PlacedBlueprint, reports: Sequence[RankReport], buffers: Iterable[str]
) -> Moves:
    """Return which boxes of each tensor move between which ranks, given every rank's report.

    `buffers`: the model's, by first name. Raises
    LayoutError for a tensor of which no rank has told that it holds some part.
    """
    router, buffers = BoxRouter(), list(buffers)
    holders: dict[str, set[int]] = {}
    for number, report in enumerate(reports):
        for key in report.shapes:
            holders.setdefault(key, set()).add(number)
    first = {key: reports[min(ranks)] for key, ranks in holders.items()}
    for name in (*before.blueprint.layouts, *buffers):  # all ranks of a stage may be lost
        if parameter_key(name) not in first:
            raise LayoutError(f"no rank holds any of {name}: go on from a checkpoint or a snapshot.")
    units = {
        unit: [
            _round(tensors, dtype, before, after, holders, router)
            for (_, dtype), tensors in _alike(names, before, after, first).items()
        ]
        for unit, names in before.blueprint.sequence.units.items()
    }
    sequence = before.blueprint.sequence
    elements = (sum(sequence.parameters[name].numel() for name in names) for names in sequence.units.values())
    moved = {}
    for name in buffers:
        key = parameter_key(name)
        box = full_box(first[key].shapes[key])
        needed = dict.fromkeys(after.ranks_with_buffer(name), (box,))
        held = dict.fromkeys(sorted(holders[key]), (box,))
        moved[name] = router.transfers(key, held, needed, first[key].dtype_of(key).itemsize)
    return Moves(units, moved, max(elements, default=0))


def lost_parameter(blueprint: PlacedBlueprint) -> str:
    """Return the name of a parameter that the remaining ranks hold only in part, "" if there is none."""
    router = BoxRouter()
    for name, layout in blueprint.blueprint.layouts.items():
        try:
            router.transfers(name, blueprint.boxes(name, layout), {0: (full_box(layout.shape),)}, 1)
        except LayoutError:
            return name
    return ""


def _alike(
    names: Sequence[str], before: PlacedBlueprint, after: PlacedBlueprint, first: Mapping[str, RankReport]
) -> dict[tuple[str, torch.dtype], list[MovedTensor]]:
    """Return the tensors to move for some parameters, by entry and dtype; `first`: a report by key."""
    found: dict[tuple[str, torch.dtype], list[MovedTensor]] = {}
    keys = state_keys(first)
    for name in names:
        both = before.blueprint.layouts[name], after.blueprint.layouts[name]
        states = {key: state_key(name, key) for key in sorted(keys.get(name, ()))}
        for entry, key in {"": parameter_key(name), GRADIENT: gradient_key(name), **states}.items():
            if key in first:
                shape = tuple(first[key].shapes[key])
                layouts = (layout_of_state(entry, shape, one) if entry in states else one for one in both)
                moved = MovedTensor(key, name, entry, shape, *layouts)
                found.setdefault((entry, first[key].dtype_of(key)), []).append(moved)
    return found


def _round(
    tensors: Sequence[MovedTensor],
    dtype: torch.dtype,
    before: PlacedBlueprint,
    after: PlacedBlueprint,
    holders: Mapping[str, set[int]],
    router: BoxRouter,
) -> Round:
    transfers = list[BoxTransfer]()
    for one in tensors:
        boxes = before.boxes(one.parameter, one.before)
        held = {rank: each for rank, each in boxes.items() if rank in holders[one.key]}
        needed = after.boxes(one.parameter, one.after)
        transfers += router.transfers(one.key, held, needed, dtype.itemsize)
    return Round(tuple(tensors), dtype, tuple(transfers))
