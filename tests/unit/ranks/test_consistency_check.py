"""Texts that ranks compare: of long ones the part that differs is shown, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import CommunicationError
from plait.ranks import Mesh
from plait.ranks.consistency_check import different_texts, require_same_text

CPU = torch.device("cpu")
LINES = [f"layer {number} = {number * 'ä'}" for number in range(100)]


def changed(number: int, line: str) -> str:
    return "".join(f"{one}\n" for one in [*LINES[:number], line, *LINES[number + 1 :]])


WHOLE = changed(0, LINES[0])
LONG = "loss = " + "a" * 1000


FITS = "x" * 100
DIFFERENCES: list[tuple[tuple[str, str, str], dict[str, list[int]]]] = [
    ((WHOLE, WHOLE, WHOLE), {}),
    (("a", "b", "a"), {"a": [0, 2], "b": [1]}),
    ((WHOLE, changed(70, "layer 70 = 5"), WHOLE), {LINES[70]: [0, 2], "layer 70 = 5": [1]}),
    ((WHOLE, changed(70, "x"), changed(60, "y")), {LINES[60]: [0, 1], "y": [2]}),
    ((changed(70, "x"), WHOLE, WHOLE), {"x": [0], LINES[70]: [1, 2]}),
    ((WHOLE, WHOLE + "more\n", WHOLE), {"nothing": [0, 2], "more": [1]}),
    (("short", WHOLE, "short"), {"short": [0, 2], LINES[0]: [1]}),
    ((FITS, FITS + "b", FITS), {FITS: [0, 2], FITS + "b": [1]}),
    (
        (changed(9, FITS + "b"), WHOLE, changed(9, FITS + "c")),
        {FITS + "b": [0], LINES[9]: [1], FITS + "c": [2]},
    ),
    ((changed(9, FITS + "b"), *[changed(9, FITS + "c")] * 2), {FITS + "b": [0], FITS + "c": [1, 2]}),
    ((LONG, "short", LONG), {LONG[:252] + " ...": [0, 2], "short": [1]}),
    ((LONG, LONG + "b", LONG), {f"loss = ... {60 * 'a'}": [0, 2], f"loss = ... {60 * 'a'}b": [1]}),
    (
        (LONG[7:], LONG[7:] + "b", LONG[7:]),
        {f"... {60 * 'a'}": [0, 2], f"... {60 * 'a'}b": [1]},
    ),
    (
        (LONG + "b" + LONG, LONG + "c" + LONG, LONG + "b" + LONG),
        {
            f"loss = ... {60 * 'a'}b{LONG[:180]} ...": [0, 2],
            f"loss = ... {60 * 'a'}c{LONG[:180]} ...": [1],
        },
    ),
]


def test_the_first_line_that_differs_is_shown_on_every_rank(thread_ranks: Any) -> None:
    def body() -> list[dict[str, list[int]]]:
        group = Mesh(dp=3).group("dp")
        return [different_texts(texts[group.index], group, CPU) for texts, _ in DIFFERENCES]

    assert thread_ranks.run(body, ranks=3) == [[wanted for _, wanted in DIFFERENCES]] * 3


def test_ranks_without_a_text_may_be_left_out(thread_ranks: Any) -> None:
    """With `optional=True` only the texts that are not empty are compared."""

    def body() -> list[dict[str, list[int]]]:
        group = Mesh(dp=3).group("dp")
        return [
            different_texts(texts[group.index], group, CPU, optional=True)
            for texts in (("", WHOLE, WHOLE), ("", WHOLE, changed(9, "x")), ("", "a", "b"))
        ]

    wanted = [{}, {LINES[9]: [1], "x": [2]}, {"a": [1], "b": [2]}]
    assert thread_ranks.run(body, ranks=3) == [wanted] * 3


def test_the_call_and_the_remedy_are_named(thread_ranks: Any) -> None:
    def body() -> None:
        group = Mesh(dp=2).group("dp")
        text = WHOLE if group.index else changed(50, "x = 1")
        require_same_text(text, group, CPU, doing="build", remedy="give one model")

    told = rf"^the ranks of dp do not agree \(build; rank 0: x = 1; rank 1: {LINES[50]}\): give one model\.$"
    with pytest.raises(CommunicationError, match=told):
        thread_ranks.run(body, ranks=2)
