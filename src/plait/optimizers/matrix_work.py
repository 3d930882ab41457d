"""What Muon does on each rank in a step, decided without ranks: matrices, exchanged elements, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.engine.blueprint import Blueprint
from plait.optimizers.hidden_matrices import ParameterMatrices, parameter_matrices
from plait.optimizers.newton_schulz import iteration_cost
from plait.optimizers.part_owners import (
    OwnedPart,
    ParameterPart,
    assign_owners,
    boxes_within,
    held_boxes,
)
from plait.plan.axes import sizes_of_plan
from plait.plan.layout.layout import Box
from plait.plan.layout.routes import RankBoxes


@dataclass(frozen=True)
class MatrixWork:
    """Muon's work on one rank in a step."""

    shapes: Mapping[tuple[int, int], int]
    """How many matrices with these out and in features the rank orthogonalizes."""
    owned: int
    """Elements of these matrices."""
    sent: tuple[int, int]
    """Elements that the rank sends: to owners, and as an owner to others."""
    received: tuple[int, int]

    @property
    def cost(self) -> int:
        """The multiplications of one iteration for all of its matrices."""
        return sum(count * iteration_cost(*shape) for shape, count in self.shapes.items())

    @property
    def exchanged(self) -> tuple[int, int]:
        """Elements in each of the two all-to-alls: the more of those that it sends and receives."""
        return max(self.sent[0], self.received[0]), max(self.sent[1], self.received[1])

    @property
    def buffered(self) -> int:
        """Elements that the rank keeps memory for: its matrices, and what it sends and receives at once."""
        return self.owned + max(self.sent) + max(self.received)


def found_matrices(blueprint: Blueprint) -> dict[str, ParameterMatrices]:
    """Return by name the matrices of each trainable parameter of a model, as Muon divides it by default."""
    return parameter_matrices(blueprint.sequence, blueprint.rules)


def matrix_work(blueprint: Blueprint, matrices: Mapping[str, ParameterMatrices]) -> tuple[MatrixWork, ...]:
    """Return Muon's work on each rank of the world, in order of their numbers. No rank is needed.

    What several ranks hold and its owner does not, each of them is assumed to send as much of.
    """
    parts = [(name, part) for name, one in matrices.items() for part in one.parts]
    names = dict.fromkeys(name for name, _ in parts)
    held = held_boxes(blueprint.shard_plan, sizes_of_plan(blueprint.plan), names)
    owned = assign_owners([ParameterPart(name, part.box, part.cost) for name, part in parts], held)
    shapes: dict[int, Counter[tuple[int, int]]] = {}
    counts = {name: Counter[int]() for name in ("owned", "to owners", "to others", "as owner", "from owners")}
    for one, (_, part) in zip(owned, parts, strict=True):
        shapes.setdefault(one.owner, Counter()).update(part.shapes)
        _count(one, boxes_within(one.box, held[one.parameter]), counts)
    return tuple(
        MatrixWork(
            shapes.get(rank, {}),
            counts["owned"][rank],
            (counts["to owners"][rank], counts["to others"][rank]),
            (counts["as owner"][rank], counts["from owners"][rank]),
        )
        for rank in range(blueprint.plan.world)
    )


def work_of_stages(
    blueprint: Blueprint, matrices: Mapping[str, ParameterMatrices]
) -> list[Sequence[MatrixWork]]:
    """Return Muon's work on the ranks of each rank of `pp`."""
    work, ranks = matrix_work(blueprint, matrices), blueprint.plan.world // blueprint.plan.pp
    return [work[first : first + ranks] for first in range(0, len(work), ranks)]


def _count(part: OwnedPart, held: RankBoxes, counts: Mapping[str, Counter[int]]) -> None:
    """Add the elements of a part that ranks exchange to `counts`; `held`: what ranks hold of it."""
    holders: dict[tuple[Box, ...], list[int]] = {}
    for rank, boxes in held.items():
        if boxes:
            holders.setdefault(tuple(boxes), []).append(rank)
    counts["owned"][part.owner] += part.box.numel
    for boxes, ranks in holders.items():
        elements, others = sum(box.numel for box in boxes), [rank for rank in ranks if rank != part.owner]
        for rank in others:
            counts["from owners"][rank] += elements
            counts["to others"][part.owner] += elements
        if len(others) == len(ranks):
            counts["as owner"][part.owner] += elements
            for rank in ranks:
                counts["to owners"][rank] += -(-elements // len(ranks))
