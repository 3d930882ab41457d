"""All pairs: few rows in which every pair of values of two factors stands together at least once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def every_row(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """The full product, the last factor fastest."""
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


def covering_rows(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows of the product that together hold every pair. Greedy and deterministic.

    Each row starts from a pair that is still missing; every further factor gets the value that completes
    the most missing pairs with the values already chosen.
    """
    order = list(factors)
    missing = {
        (one, a, two, b): None
        for one, two in combinations(order, 2)
        for a, b in product(factors[one], factors[two])
    }
    rows = []
    while missing:
        one, a, two, b = next(iter(missing))
        row = {one: a, two: b}
        for name in order:
            if name not in row:
                row[name] = max(factors[name], key=_gain(row, name, order, missing))
        rows.append({name: row[name] for name in order})
        for pair in pairs_of(rows[-1]):
            missing.pop(pair, None)
    return rows


def pairs_of(row: Row) -> list[Pair]:
    """The pairs that stand in a row."""
    return [(one, row[one], two, row[two]) for one, two in combinations(row, 2)]


def _gain(row: Row, name: str, order: Sequence[str], missing: Mapping[Pair, None]) -> Callable[[Any], int]:
    """How many missing pairs each value of `name` would complete (`max` then takes the first of the best)."""

    def gain(value: Any) -> int:
        extended = {**row, name: value}
        return sum(pair in missing for pair in pairs_of({n: extended[n] for n in order if n in extended}))

    return gain
