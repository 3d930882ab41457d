"""All pairs, or triples: few rows in which those values of two factors, or three, stand together once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = dict[str, Any]
Choice = tuple[tuple[str, Any], ...]
"""Values of some factors, in the factors' order."""
Allowed = Callable[[Row], bool]
"""Whether a row, or the beginning of one, can be run."""


def anything(row: Row) -> bool:
    """All rows can be run."""
    return True


def every_row(factors: Mapping[str, Sequence[Any]], allowed: Allowed = anything) -> list[Row]:
    """The full product, the last factor fastest; of what is allowed."""
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [row for row in rows if allowed(row)]


def in_turns(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Any]:
    """Parameters `(a, b)` of the product; without the full products each of `first` with one of `second`."""
    return [
        pytest.param(a, b, id=f"{name}-{way}", marks=[] if number % len(second) == turn else pytest.mark.full)
        for number, (name, a) in enumerate(first.items())
        for turn, (way, b) in enumerate(second.items())
    ]


def in_quick(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of all values, or rows of them; without the full products those of `quick` only."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in quick else pytest.mark.full,
        )
        for value in values
    ]


def a_third_compiled(rows: Iterable[Row]) -> list[Row]:
    """The rows with `compile` for a plan: "graphs" in every third."""
    return [{**row, "compile": False if number % 3 else "graphs"} for number, row in enumerate(rows)]


def covering_rows(
    factors: Mapping[str, Sequence[Any]],
    allowed: Allowed = anything,
    beginnings: Sequence[Row] = (),
    strength: int = 2,
) -> list[Row]:
    """Rows of the product that together hold every pair that is allowed; with `strength` 3 every triple.

    Greedy and deterministic. A row starts from each of the `beginnings`, which are values of some factors,
    then from each pair that is still missing; every further factor gets the value that completes the most
    missing pairs with the values already chosen. What is allowed with the values chosen must go on being so
    with one of every factor.
    """
    order = list(factors)
    missing = {
        tuple(zip(names, values, strict=True)): None
        for names in combinations(order, strength)
        for values in product(*(factors[name] for name in names))
        if allowed(dict(zip(names, values, strict=True)))
    }
    waiting = list(beginnings)
    rows = []
    while waiting or missing:
        row = waiting.pop(0) if waiting else dict(next(iter(missing)))
        for name in order:
            if name not in row:
                values = [value for value in factors[name] if allowed({**row, name: value})]
                row = {**row, name: max(values, key=_gain(row, name, order, missing, strength))}
        rows.append({name: row[name] for name in order})
        for choice in choices_of(rows[-1], strength):
            missing.pop(choice, None)
    return rows


def choices_of(row: Row, strength: int = 2) -> list[Choice]:
    """The pairs of values that stand in a row, or the triples."""
    return list(combinations(row.items(), strength))


def _gain(
    row: Row, name: str, order: Sequence[str], missing: Mapping[Choice, None], strength: int
) -> Callable[[Any], int]:
    """How many missing choices a value of `name` would complete (`max` then takes the first of the best)."""
    before = [(n, row[n]) for n in order[: order.index(name)] if n in row]
    behind = [(n, row[n]) for n in order[order.index(name) :] if n in row]
    parts = [
        (first, second)
        for count in range(strength)
        for first in combinations(before, count)
        for second in combinations(behind, strength - 1 - count)
    ]

    def gain(value: Any) -> int:
        return sum((*first, (name, value), *second) in missing for first, second in parts)

    return gain
