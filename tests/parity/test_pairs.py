import pytest

from parity.pairs import choices_of, covering_rows, every_row


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3, 4), (6, 5, 2, 2, 2), (1, 4, 1, 3), (5,), ()], ids=str)
def test_every_pair_of_values_is_in_some_covering_row(sizes):
    factors = {f"factor{number}": range(size) for number, size in enumerate(sizes)}
    rows, product = covering_rows(factors), every_row(factors)
    covered = {pair for row in rows for pair in choices_of(row)}
    assert covered == {pair for row in product for pair in choices_of(row)}
    assert all(row in product for row in rows)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3, 4, 3), (6, 5, 2, 2, 2), (5, 2)], ids=str)
def test_every_triple_of_values_is_in_some_covering_row_of_strength_3(sizes):
    factors = {f"factor{number}": range(size) for number, size in enumerate(sizes)}
    rows, product = covering_rows(factors, strength=3), every_row(factors)
    covered = {triple for row in rows for triple in choices_of(row, 3)}
    assert covered == {triple for row in product for triple in choices_of(row, 3)}
    assert all(row in product for row in rows)
    assert len(rows) < len(product) or len(sizes) <= 3


def test_covering_rows_are_few_and_the_same_each_time():
    factors = {"a": range(6), "b": range(5), "c": "xy", "d": "xy", "e": "xy"}
    rows = covering_rows(factors)
    assert rows == covering_rows(factors)
    assert len(rows) == 30  # a and b alone need as many; the product has 240


def test_covering_rows_begin_with_given_rows_and_contain_no_forbidden_ones():
    factors = {"a": range(3), "b": range(3), "c": "xyz"}

    def allowed(row):
        return row.get("a", 0) + row.get("b", 0) <= 2

    beginnings = [{"a": a, "b": b} for a in range(3) for b in range(3 - a)]
    rows, product = covering_rows(factors, allowed, beginnings), every_row(factors, allowed)
    assert [{"a": row["a"], "b": row["b"]} for row in rows[:6]] == beginnings
    assert len(product) == 6 * 3
    assert all(row in product for row in rows)
    assert {pair for row in rows for pair in choices_of(row)} == {
        pair for row in product for pair in choices_of(row)
    }
    assert len(rows) < len(product)
