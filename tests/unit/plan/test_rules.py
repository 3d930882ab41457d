from __future__ import annotations

import re

import pytest

import plait.rules
from plait.errors import PlanError
from plait.plan.rules import match
from plait.rules import Rule, column, entrance, row, vocabulary

PATHS = [
    "embedding.token",
    "blocks.0.attention",
    "blocks.0.attention.norm",
    "blocks.0.attention.query",
    "blocks.0.attention.output",
    "blocks.1.attention",
    "blocks.1.attention.norm",
    "blocks.1.attention.query",
    "blocks.1.attention.output",
    "head",
]


def test_a_star_in_a_rule_matches_one_component_of_a_path() -> None:
    heads = column.by("heads")
    rules = {"embedding.token": vocabulary, "blocks.*.attention.norm": entrance, "blocks.*.*.query": heads}
    assert match(rules, PATHS) == {
        "embedding.token": vocabulary,
        "blocks.0.attention.norm": entrance,
        "blocks.1.attention.norm": entrance,
        "blocks.0.attention.query": heads,
        "blocks.1.attention.query": heads,
    }


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("*", "head", True),
        ("*", "embedding.token", False),
        ("*.token", "embedding.token", True),
        ("*.query", "blocks.0.attention.query", False),
        ("blocks.*", "blocks.0.attention", False),
        ("blocks.*.query", "blocks..query", False),
        ("blocks.*.que*", "blocks.0.query", True),
        ("embedding.token", "embeddingxtoken", False),
        ("embedding.token", "embedding.token.more", False),
        ("token", "embedding.token", False),
        ("a[0-9].b", "a1.b", False),
        ("a[0-9].b", "a[0-9].b", True),
        ("", "", True),
    ],
)
def test_a_rule_pattern_matches_the_listed_module_paths(pattern: str, name: str, fits: bool) -> None:
    if fits:
        assert match({pattern: row}, [name]) == {name: row}
    else:
        with pytest.raises(PlanError, match="matches no module"):
            match({pattern: row}, [name])


def test_a_module_path_listed_twice_is_matched_once() -> None:
    assert match({"head": column}, ["head", "head"]) == {"head": column}


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("blocks.*.attention.querry", "the nearest are blocks.*.attention.query, "),
        ("blocks.7.attention.query", "the nearest are blocks.*.attention.query, "),
        ("heads", "the nearest are head."),
        ("§", "see model.named_modules() for its paths."),
    ],
)
def test_a_rule_without_a_module_is_told_the_nearest(pattern: str, nearest: str) -> None:
    with pytest.raises(PlanError) as caught:
        match({"head": column, pattern: row}, PATHS)
    start = f"the rule {pattern!r} matches no module of the model: {nearest}"
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith(".")


def test_the_nearest_are_of_different_kinds() -> None:
    """Without names around them numbers are names themselves."""
    paths = ["0", "1", *(f"{layer}.{name}" for layer in range(2, 6) for name in ("query", "output"))]
    with pytest.raises(PlanError, match=r"the nearest are \*\.query, \*\.output\.$"):
        match({"*.queri": row}, paths)
    with pytest.raises(PlanError, match=r"the nearest are 1, 0\.$|the nearest are 1\.$"):
        match({"11": row}, paths)


def test_no_module_is_matched_twice() -> None:
    with pytest.raises(PlanError) as caught:
        match({"blocks.*.attention.query": column, "blocks.1.*.query": row}, PATHS)
    assert str(caught.value) == (
        "the module 'blocks.1.attention.query' is matched by the rules 'blocks.*.attention.query' and "
        "'blocks.1.*.query': keep one of them."
    )


def test_rule_by_keeps_the_other_options() -> None:
    rule = Rule("column", gather_output=True)
    assert rule.by("heads", repeated=True) == Rule("column", "heads", True, gather_output=True)
    assert rule.by("heads") == Rule("column", "heads", gather_output=True)
    assert rule == Rule("column", gather_output=True)
    assert Rule("column").by("heads").joined(3) == Rule("column", "heads", blocks=3)
    assert Rule("column").by("heads").interleave("a", "b") == Rule("column", "heads", interleaved=("a", "b"))
    with pytest.raises(PlanError, match="a rule column has interleaved = 3 and no parts: name their number"):
        Rule("column").interleave(3)
    with pytest.raises(PlanError, match="gather_output and blocks = 3, whose parts are not contiguous"):
        rule.joined(3)
    with pytest.raises(PlanError, match="a rule sequence has dim = -1: count the dims from 0"):
        Rule("sequence", dim=-1)
    with pytest.raises(PlanError, match="the rule 'head' is 3: give entrance") as refusal:
        match({"head": 3}, PATHS)  # type: ignore[dict-item]
    named = re.findall(r"\w+", str(refusal.value).split(": give ")[1].split(" of plait.rules")[0])
    assert sorted({*named} - {"or"}) == sorted({*plait.rules.__all__} - {"Rule", "Rules"})
    with pytest.raises(PlanError, match="a rule row has blocks = 3, which does not apply to it"):
        Rule("row").joined(3)
