"""All pairs: few rows in which every pair of values of two factors stands together at least once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]
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
    factors: Mapping[str, Sequence[Any]], allowed: Allowed = anything, beginnings: Sequence[Row] = ()
) -> list[Row]:
    """Rows of the product that together hold every pair that is allowed. Greedy and deterministic.

    A row starts from each of the `beginnings`, which are values of some factors, then from each pair that is
    still missing; every further factor gets the value that completes the most missing pairs with the values
    already chosen. What is allowed with the values chosen must go on being so with one of every factor.
    """
    order = list(factors)
    missing = {
        (one, a, two, b): None
        for one, two in combinations(order, 2)
        for a, b in product(factors[one], factors[two])
        if allowed({one: a, two: b})
    }
    waiting = list(beginnings)
    rows = []
    while waiting or missing:
        if waiting:
            row = waiting.pop(0)
        else:
            one, a, two, b = next(iter(missing))
            row = {one: a, two: b}
        for name in order:
            if name not in row:
                values = [value for value in factors[name] if allowed({**row, name: value})]
                row = {**row, name: max(values, key=_gain(row, name, order, missing))}
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
