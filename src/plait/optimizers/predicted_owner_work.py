"""The work of the ranks that own matrices or parameters: updates and exchanges of a step, without ranks.

Muon     owners of matrices, which travel in the dtype of the iterations
Owned    owners of whole parameters, which travel in the dtype that the optimizer updates
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plait.engine.blueprint import Blueprint
from plait.optimizers.hidden_matrices import ParameterMatrices, parameter_matrices
from plait.optimizers.matrix_parts import MatrixPart
from plait.optimizers.optimizer_makers import MuonSettings
from plait.optimizers.part_owners import (
    OwnedPart,
    ParameterPart,
    assign_owners,
    boxes_within,
    held_boxes,
    whole_parts,
)
from plait.plan.axes import sizes_of_plan
from plait.plan.layout.layout import Box
from plait.plan.layout.routes import RankBoxes
from plait.plan.parameter_units import Dtype


@dataclass(frozen=True)
class ExchangeSizes:
    """Elements of one dtype that a rank owns, sends and receives in a step of an optimizer."""

    owned: int
    """Elements of the parts that the rank owns."""
    sent: tuple[int, int]
    """Elements that the rank sends: to owners, and as an owner to others."""
    received: tuple[int, int]

    @property
    def largest(self) -> tuple[int, int]:
        """Elements in each of the two all-to-alls: sent or received, whichever is more."""
        return max(self.sent[0], self.received[0]), max(self.sent[1], self.received[1])

    @property
    def buffered(self) -> int:
        """Elements that the rank keeps memory for: its parts, and what it sends and receives at once."""
        return self.owned + max(self.sent) + max(self.received)


@dataclass(frozen=True)
class OwnerWork:
    """The parts that one rank owns, and the elements it sends and receives in a step."""

    parts: Sequence[OwnedPart]
    exchanges: Mapping[Dtype, ExchangeSizes]

    @property
    def cost(self) -> int:
        """The cost of the parts: of matrices the multiplications of an iteration, else their elements."""
        return sum(one.cost for one in self.parts)

    @property
    def exchanged_bytes(self) -> tuple[int, int]:
        """Bytes in each of the two all-to-alls: sent or received, whichever is more."""
        each = [(sizes.largest, dtype.itemsize) for dtype, sizes in self.exchanges.items()]
        return sum(there * item for (there, _), item in each), sum(back * item for (_, back), item in each)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the memory for the rank's parts, and for what it sends and receives."""
        return sum(sizes.buffered * dtype.itemsize for dtype, sizes in self.exchanges.items())


def owner_work(
    blueprint: Blueprint, parts: Sequence[ParameterPart], dtype_of: Callable[[str], Dtype]
) -> tuple[OwnerWork, ...]:
    """Return for each rank of the world the parts that it owns, and the sizes of its exchanges.

    `dtype_of`: in which dtype the parts of a parameter are exchanged.
    """
    held = held_boxes(
        blueprint.shard_plan, sizes_of_plan(blueprint.plan), dict.fromkeys(one.parameter for one in parts)
    )
    owned: dict[int, list[OwnedPart]] = {}
    counts: dict[Dtype, _ExchangeCounts] = {}
    for one in assign_owners(parts, held):
        owned.setdefault(one.owner, []).append(one)
        counts.setdefault(dtype_of(one.parameter), _ExchangeCounts(held)).add(one)
    return tuple(
        OwnerWork(owned.get(rank, ()), {dtype: count.of(rank) for dtype, count in counts.items()})
        for rank in range(blueprint.plan.world)
    )


def found_matrices(blueprint: Blueprint, muon: MuonSettings) -> dict[str, ParameterMatrices]:
    """Return by name the matrices of each trainable parameter of a model, as Muon divides it."""
    return parameter_matrices(
        blueprint.sequence, blueprint.rules, per_head=muon.per_head, routers=muon.routers
    )


def matrix_parts_of(found: Mapping[str, ParameterMatrices]) -> list[tuple[str, MatrixPart]]:
    """Return the parts of all matrices with the names of their parameters, in the order of their numbers."""
    return [(name, part) for name, one in found.items() for part in one.parts]


def matrix_work(
    blueprint: Blueprint, found: Mapping[str, ParameterMatrices], muon: MuonSettings
) -> tuple[OwnerWork, ...]:
    """Return for each rank, in order, the matrices that it owns for Muon, and how much it exchanges."""
    kinds = blueprint.kinds
    return owner_work(
        blueprint,
        [ParameterPart(name, part.box, part.cost) for name, part in matrix_parts_of(found)],
        lambda name: muon.sent_dtype(kinds[name].master),
    )


def parameter_work(blueprint: Blueprint) -> tuple[OwnerWork, ...]:
    """Return for each rank, in order, the parameters that it owns for `Owned`, and how much it exchanges."""
    kinds, parameters = blueprint.kinds, blueprint.sequence.parameters
    trained = {name for name, one in parameters.items() if one.requires_grad}
    return owner_work(blueprint, whole_parts(blueprint.layouts, trained), lambda name: kinds[name].master)


def matrix_shapes(work: OwnerWork, parts: Sequence[MatrixPart]) -> Counter[tuple[int, int]]:
    """Return how many matrices of each out and in features a rank orthogonalizes.

    `parts`: of all matrices of the model, in the order of their numbers.
    """
    return Counter(shape for one in work.parts for shape in parts[one.number].shapes)


class _ExchangeCounts:
    """Counts of elements by rank that are owned and exchanged in one dtype."""

    def __init__(self, held: Mapping[str, RankBoxes]) -> None:
        """`held`: the boxes of each parameter that ranks hold."""
        self._held = held
        self._owned = Counter[int]()
        self._sent = Counter[int](), Counter[int]()
        self._received = Counter[int](), Counter[int]()
        self._cells: dict[tuple[Box, int], list[tuple[int, list[int]]]] = {}

    def of(self, rank: int) -> ExchangeSizes:
        """Return the counts of a rank."""
        sent, received = self._sent, self._received
        return ExchangeSizes(
            self._owned[rank], (sent[0][rank], sent[1][rank]), (received[0][rank], received[1][rank])
        )

    def add(self, part: OwnedPart) -> None:
        """Count the elements of a part that ranks exchange.

        What several ranks hold and its owner does not, that one sends which `BoxRouter` chooses.
        """
        owner, (to_owners, to_others), (as_owner, from_owners) = part.owner, self._sent, self._received
        self._owned[owner] += part.box.numel
        for elements, ranks in self._cells_of(part):
            if owner not in ranks:
                sender = min(ranks, key=lambda rank: (to_owners[rank], abs(rank - owner), rank))
                to_owners[sender] += elements
                as_owner[owner] += elements
            for rank in ranks:
                if rank != owner:
                    from_owners[rank] += elements
                    to_others[owner] += elements

    def _cells_of(self, part: OwnedPart) -> list[tuple[int, list[int]]]:
        """Return the elements of each box that ranks hold of a part, and the ranks that do."""
        held = self._held[part.parameter]
        key = part.box, id(held)
        if key not in self._cells:
            ranks: dict[Box, list[int]] = {}
            for rank, boxes in sorted(boxes_within(part.box, held).items()):
                for box in boxes:
                    ranks.setdefault(box, []).append(rank)
            self._cells[key] = [(box.numel, each) for box, each in ranks.items()]
        return self._cells[key]
