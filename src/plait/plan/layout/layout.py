"""`Layout` and its placements: which box of a global tensor the rank at each mesh coordinate holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import prod

from plait.errors import LayoutError

Coordinate = tuple[int, ...]
"""A rank's index along each axis of a layout, in the order of the axes."""


@dataclass(frozen=True)
class Replicate:
    """Every rank along the axis holds the same values."""


@dataclass(frozen=True)
class Shard:
    """Each rank along the axis holds a consecutive range of tensor dim `dim` (negative: from the end).

    With `copies` > 1, that many neighbouring ranks hold the same shard: of 4 ranks with 2 copies ranks 0 and
    1 hold the first half, 2 and 3 the second. With `blocks` > 1, the dim consists of that many equal blocks,
    and each rank holds the concatenation of its shards of all blocks: of 2 ranks with 3 blocks of 4 rows rank
    0 holds rows 0, 1, 4, 5, 8 and 9. Blocks of different sizes are given by their rows, each
    a multiple of the ranks.
    """

    dim: int
    copies: int = 1
    blocks: int | tuple[int, ...] = 1

    def __repr__(self) -> str:
        copies = f", copies={self.copies}" if self.copies > 1 else ""
        blocks = f", blocks={self.blocks}" if self.is_blocked else ""
        return f"Shard({self.dim}{copies}{blocks})"

    @property
    def is_blocked(self) -> bool:
        """Whether the dim consists of several blocks (such as query, key, value), each sharded by itself."""
        return self.blocks != 1

    def blocks_of(self, rows: range) -> list[range]:
        """Return the range of rows of each block, in a dim of `rows` rows."""
        if isinstance(self.blocks, tuple):
            bounds = accumulate(self.blocks, initial=rows.start)
            return [range(*bound) for bound in pairwise(bounds)]
        size = len(rows) // self.blocks
        starts = (rows.start + number * size for number in range(self.blocks))
        return [range(start, start + size) for start in starts]


@dataclass(frozen=True)
class Flat:
    """Each rank along the axis holds a range of the elements that its `Shard` placements leave, flattened.

    Rank `i` holds elements `bounds[i]` to `bounds[i + 1]` in row-major order, clipped to the number of
    elements; there is one bound more than ranks. The place of the axis among `Shard`s does not matter. Where
    several axes are `Flat` they are nested, the outermost first: ranks are counted row-major over an axis and
    the `Flat` axes before it, and every bound of an outer axis is one of the inner axis. A shard of whole
    rows has their shape; any other has one row of as many dims, `[1, ..., elements]`.
    """

    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Partial:
    """Each rank along the axis holds a summand; the global value is the sum over the axis."""


Placement = Replicate | Shard | Flat | Partial


@dataclass(frozen=True)
class Box:
    """A rectangular part of a global tensor: its first index and its size along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select this box from the global tensor."""
        return tuple(
            slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True)
        )


def divide(size: int, parts: int) -> tuple[range, ...]:
    """Divide `size` rows into `parts` consecutive ranges; the first `size % parts` have one row more.

    `divide(10, 3)` is `(range(0, 4), range(4, 7), range(7, 10))`; parts beyond the rows are empty.
    Raises `LayoutError` unless `size >= 0` and `parts >= 1`.
    """
    if size < 0 or parts < 1:
        raise LayoutError(f"cannot divide {size} rows into {parts} parts: give size >= 0 and parts >= 1.")
    each, rest = divmod(size, parts)
    return tuple(range(*cut) for cut in pairwise(part * each + min(part, rest) for part in range(parts + 1)))


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """Distribution of a global tensor over ranks: its shape, and the degree and placement of each mesh axis.

    Axes are in order, outermost first. Two layouts are equal when shape, axes (with their order) and
    placements are. Methods take a coordinate as indices in the order of the axes, or as a mapping by axis
    name; the mapping may name further axes of the mesh, over which the tensor is replicated. They raise
    `LayoutError` for a coordinate out of range.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    degrees: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __init__(
        self, shape: Sequence[int], axes: Mapping[str, int], placements: Mapping[str, Placement] | None = None
    ) -> None:
        """`axes`: number of ranks by name, outermost first; an axis without a placement replicates.

        Raises `LayoutError` for a negative size, an axis without ranks, an unknown axis, a missing dim,
        copies that do not divide the ranks, or blocks that do not divide the dim or are sharded twice.
        """
        shape, placements = tuple(shape), placements or {}
        if any(size < 0 for size in shape):
            raise LayoutError(f"a layout has shape {shape}: give sizes of at least 0.")
        for axis, degree in axes.items():
            if degree < 1:
                raise LayoutError(f"axis {axis!r} has {degree} ranks: give at least 1.")
        for axis in placements.keys() - axes.keys():
            known = ", ".join(axes) or "none"
            raise LayoutError(
                f"a placement is for axis {axis!r}, but the axes are {known}: name one of these."
            )
        chosen = tuple(
            _checked(placements.get(axis, Replicate()), axis, n, shape) for axis, n in axes.items()
        )
        _require_bounds(axes, chosen)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "axes", tuple(axes))
        object.__setattr__(self, "degrees", tuple(axes.values()))
        object.__setattr__(self, "placements", chosen)
        self._refuse_nested_blocks()
        largest = prod(self.sizes([0] * len(self.axes)))
        for axis, placement in zip(self.axes, chosen, strict=True):
            if isinstance(placement, Flat) and placement.bounds[-1] < largest:
                raise LayoutError(
                    f"axis {axis!r} has bounds up to {placement.bounds[-1]}, but {largest} elements are to "
                    "be cut: no rank would hold the last ones."
                )

    def __repr__(self) -> str:
        axes = zip(self.axes, self.degrees, self.placements, strict=True)
        return f"Layout({', '.join([str(self.shape), *(f'{a}={n}: {p}' for a, n, p in axes)])})"

    @property
    def axis_degrees(self) -> dict[str, int]:
        """Number of ranks by axis name."""
        return dict(zip(self.axes, self.degrees, strict=True))

    @property
    def axis_placements(self) -> dict[str, Placement]:
        """Placement by axis name."""
        return dict(zip(self.axes, self.placements, strict=True))

    @property
    def divides(self) -> bool:
        """Whether a rank may hold less than the whole tensor."""
        pairs = zip(self.degrees, self.placements, strict=True)
        return any(degree > 1 and isinstance(one, Shard | Flat) for degree, one in pairs)

    def coordinates(self) -> Iterator[Coordinate]:
        """Yield all coordinates in row-major order: the last axis varies fastest, as in rank numbers."""
        return product(*map(range, self.degrees))

    def coordinate(self, where: Sequence[int] | Mapping[str, int]) -> Coordinate:
        """Return `where` as a tuple of indices in the order of the axes."""
        found = (
            tuple(where.get(axis, -1) for axis in self.axes) if isinstance(where, Mapping) else tuple(where)
        )
        if len(found) == len(self.degrees) and all(
            0 <= i < n for i, n in zip(found, self.degrees, strict=True)
        ):
            return found
        raise LayoutError(f"{where} is no coordinate of {self}: give each axis an index below its ranks.")

    def box(self, where: Sequence[int] | Mapping[str, int]) -> Box:
        """Return the box (a range per dim) of the global tensor that the rank at this coordinate holds.

        Raises `LayoutError` where the shard is no box: an interval that begins or ends inside a row, or
        shards of several blocks.
        """
        region, interval = self.region(where), self.interval(where)
        if interval is None or len(interval) == region.numel:
            return region
        rows = _rows(region.sizes, interval)
        if rows is None:
            raise LayoutError(
                f"elements {interval.start} to {interval.stop} of {self} at {where} are no box: "
                "call region(), and interval() for the elements in it."
            )
        offsets = (region.offsets[0] + rows.start, *region.offsets[1:])
        return Box(offsets, (len(rows), *region.sizes[1:]))

    def interval(self, where: Sequence[int] | Mapping[str, int]) -> range | None:
        """Return the range of flattened elements of the rank at `where`; None without a `Flat` axis."""
        number, bounds = 0, None
        for index, degree, placement in self._along(where):
            if isinstance(placement, Flat):
                number, bounds = number * degree + index, placement.bounds
        if bounds is None:
            return None
        cut = range(prod(self.sizes(where)))[bounds[number] : bounds[number + 1]]
        return range(cut.start, cut.stop)

    def region(self, where: Sequence[int] | Mapping[str, int]) -> Box:
        """Return the box of the global tensor at this coordinate, before a `Flat` axis, if any, divides it.

        Raises `LayoutError` for shards of several blocks.
        """
        boxes = self.boxes(where)
        if len(boxes) > 1:
            raise LayoutError(f"the part of {self} at {where} is {len(boxes)} boxes, not one: call boxes().")
        return boxes[0]

    def boxes(self, where: Sequence[int] | Mapping[str, int]) -> tuple[Box, ...]:
        """Return the boxes at this coordinate, one per block of a dim, before a `Flat` axis divides them.

        The rank holds their concatenation along `blocked_dim`.
        """
        per_dim = [[range(size)] for size in self.shape]
        for index, degree, placement in self._along(where):
            if isinstance(placement, Shard):
                held = [block for rows in per_dim[placement.dim] for block in placement.blocks_of(rows)]
                parts = degree // placement.copies
                cuts = [divide(len(block), parts)[index // placement.copies] for block in held]
                per_dim[placement.dim] = [
                    range(block.start + cut.start, block.start + cut.stop)
                    for block, cut in zip(held, cuts, strict=True)
                ]
        return tuple(
            Box(tuple(rows.start for rows in ranges), tuple(map(len, ranges))) for ranges in product(*per_dim)
        )

    @cached_property
    def blocked_dim(self) -> int | None:
        """The dim that is sharded in several blocks, such as query, key and value; None without one."""
        blocked = (p.dim for p in self.placements if isinstance(p, Shard) and p.is_blocked)
        return next(blocked, None)

    def sizes(self, where: Sequence[int] | Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the shard at coordinate `where`, before a `Flat` axis flattens and cuts it."""
        first, *others = self.boxes(where)
        if not others:
            return first.sizes
        dim = self.blocked_dim
        assert dim is not None
        rows = first.sizes[dim] + sum(box.sizes[dim] for box in others)
        return (*first.sizes[:dim], rows, *first.sizes[dim + 1 :])

    def local_shape(self, where: Sequence[int] | Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the shard at this coordinate."""
        sizes, interval = self.sizes(where), self.interval(where)
        if interval is None or len(interval) == prod(sizes):
            return sizes
        rows = _rows(sizes, interval)
        if rows is None:  # the number of dims matters to optimizers and parameter groups
            return (*(1 for _ in sizes[1:]), len(interval))
        return (len(rows), *sizes[1:])

    def replicas(self, where: Sequence[int] | Mapping[str, int]) -> tuple[Coordinate, ...]:
        """Return all coordinates with the same shard as `where`; all have its index on `Partial` axes."""
        return tuple(product(*(_same_shard(i, n, placement) for i, n, placement in self._along(where))))

    def owner(self, where: Sequence[int] | Mapping[str, int]) -> Coordinate:
        """Return the first coordinate with the same shard as `where`; along `Partial` axes it has index 0.

        The boxes of all owners tile the global tensor: a sum over owners counts each element once.
        """
        along = self._along(where)
        return tuple(0 if isinstance(p, Partial) else _same_shard(i, n, p)[0] for i, n, p in along)

    def _refuse_nested_blocks(self) -> None:
        shards = [p for p in self.placements if isinstance(p, Shard)]
        blocked = [p for p in shards if p.is_blocked]
        if len(blocked) > 1 or (blocked and sum(p.dim == blocked[0].dim for p in shards) > 1):
            raise LayoutError(
                f"{self} shards the blocks of a dim over several axes, or has blocks in several dims: give "
                "blocks to one axis, the only one that shards its dim."
            )

    def _along(self, where: Sequence[int] | Mapping[str, int]) -> list[tuple[int, int, Placement]]:
        """Return for each axis the index of `where`, the number of ranks, and the placement."""
        return list(zip(self.coordinate(where), self.degrees, self.placements, strict=True))


def _rows(sizes: tuple[int, ...], interval: range) -> range | None:
    """Return the rows of an interval of a flattened tensor; None where it is not made of whole rows."""
    row = prod(sizes[1:])
    if not sizes or row == 0 or interval.start % row or interval.stop % row:
        return None
    return range(interval.start // row, interval.stop // row)


def _same_shard(index: int, degree: int, placement: Placement) -> range:
    """Return the indices along an axis whose shard equals that of `index`."""
    if isinstance(placement, Replicate):
        return range(degree)
    copies = placement.copies if isinstance(placement, Shard) else 1
    first = index // copies * copies
    return range(first, first + copies)


def _require_bounds(axes: Mapping[str, int], placements: Sequence[Placement]) -> None:
    """Raise LayoutError unless the bounds of `Flat` axes are ascending, as many as needed, and nested."""
    ranks, outer_axis = 1, ""
    outer: tuple[int, ...] = ()
    for (axis, degree), placement in zip(axes.items(), placements, strict=True):
        if not isinstance(placement, Flat):
            continue
        ranks *= degree
        bounds = placement.bounds
        if len(bounds) != ranks + 1 or bounds[0] != 0 or list(bounds) != sorted(bounds):
            raise LayoutError(
                f"axis {axis!r} has {ranks} ranks and bounds {bounds}: give one bound more than ranks, "
                "ascending from 0."
            )
        if outer_axis and bounds[::degree] != outer:
            raise LayoutError(
                f"axis {axis!r} has bounds {bounds}, which do not contain those of axis {outer_axis!r}, "
                f"{outer}: let each interval of {outer_axis!r} be cut into {degree}."
            )
        outer, outer_axis = bounds, axis


def _checked(placement: Placement, axis: str, degree: int, shape: tuple[int, ...]) -> Placement:
    """Return the placement with a non-negative dim. Raises LayoutError if it does not fit the shape."""
    if not isinstance(placement, Shard):
        return placement
    if not -len(shape) <= placement.dim < len(shape):
        raise LayoutError(
            f"axis {axis!r} shards dim {placement.dim} of shape {shape}, which has {len(shape)} dims: "
            "choose one of those, or replicate."
        )
    if placement.copies < 1 or degree % placement.copies:
        raise LayoutError(
            f"axis {axis!r} has {degree} ranks, which cannot hold {placement.copies} copies of each shard: "
            f"give a divisor of {degree}."
        )
    size = shape[placement.dim]
    if isinstance(placement.blocks, tuple):
        parts = degree // placement.copies
        if sum(placement.blocks) != size or any(rows % parts for rows in placement.blocks):
            raise LayoutError(
                f"axis {axis!r} shards blocks of {placement.blocks} rows of dim {placement.dim} of shape "
                f"{shape} into {parts} shards: give multiples of {parts} that add up to {size}."
            )
    elif placement.blocks < 1 or size % placement.blocks:
        raise LayoutError(
            f"axis {axis!r} shards each of {placement.blocks} equal blocks of dim {placement.dim} of shape "
            f"{shape}, which has {size} rows: give a divisor of {size}."
        )
    return replace(placement, dim=placement.dim % len(shape))
