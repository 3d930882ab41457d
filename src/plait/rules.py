"""Rules of tensor parallelism: which module of a model is cut how, as data beside the model.

    RULES = {
        "embedding.token": vocabulary,                          rows of the table
        "blocks.*.attention.norm": entrance,                    what it gives is read by the linears below
        "blocks.*.attention.query": column.by("heads"),         output features, whole heads to a rank
        "blocks.*.attention.output": row.by("heads"),           input features; its result is summed
        "blocks.*.attention": sequence,                         the rest may run on pieces of the sequence
        "blocks.*.attention.dropout": piece.along(1),           draws for this rank's heads
    }

A key is a module's path in the model, in which `*` stands for any one name. Every rule has to match
something, and no module may be matched twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Literal

from plait.errors import PlanError

NEAREST = 3
"""Paths that an error lists."""


@dataclass(frozen=True)
class Rule:
    """What happens to a module.

    `entrance`: its output enters a region, that is, the linears of the layer that are cut by `column` read
    it; the gradient that comes back is summed over `tp`, once. `column`: a linear whose output features are
    cut. `row`: a linear whose input features are cut; its result is summed over `tp`. `vocabulary`: an
    embedding, or the linear at the model's end, whose rows are cut, evenly or not. `piece`: a dropout in a
    region, which draws for this rank's piece of a dim, all pieces being equal: features that `column` cut, or
    heads, but not those that ranks hold repeatedly. `sequence`: a layer of the model whose work outside of
    regions (norms, dropouts, residual connections) is done for each position of the sequence by itself; with
    `Plan.sequence_parallel` each rank does it for a piece of the sequence.

    Layers without an entrance copy the input of each of their column linears by itself: right, but with as
    many sums.
    """

    kind: Literal["entrance", "column", "row", "vocabulary", "piece", "sequence"]
    parts: str | None = None
    """The attribute of the module that holds this one which says of how many equal parts the cut dim is made,
    such as heads; a part is never cut. None: of single features."""
    repeated: bool = False
    """Of a column: whether there may be fewer parts than ranks, so that neighbours hold the same part."""
    blocks: int = 1
    """Of a column: of how many equal blocks, one after another, its features are made, each of which is cut:
    3 for query, key and value in one linear. `parts` are those of one block."""
    gather_output: bool = False
    """Of a column or a vocabulary linear: whether every rank gets the whole output."""
    input_is_parallel: bool = True
    """Of a row: whether the input is this rank's piece; else it is whole, and cut here."""
    dim: int = -1
    """Of a piece: the dim that is cut, -1 for features, 1 for heads in `[rows, heads, ...]`. Of a sequence:
    that of the first tensor that the layer is given, and gives, 1 for `[batch, length, hidden]`; other
    tensors stay whole."""

    def __post_init__(self) -> None:
        fitting = _FIELDS.get(self.kind)
        if fitting is None:
            raise PlanError(f"a rule is of kind {self.kind!r}: choose one of {', '.join(_FIELDS)}.")
        for one in fields(self):
            if one.name not in ("kind", *fitting) and getattr(self, one.name) != one.default:
                raise PlanError(
                    f"a rule {self.kind} has {one.name} = {getattr(self, one.name)!r}, which says nothing "
                    f"there: leave it out{', or set ' + ' or '.join(fitting) if fitting else ''}."
                )
        if not isinstance(self.dim, int) or (self.kind == "piece" and self.dim == 0):
            raise PlanError(
                f"a rule {self.kind} has dim = {self.dim!r}: give a dim of the tensor, but not 0, its rows, "
                "which tp never cuts."
            )
        if self.kind == "sequence" and self.dim < 0:
            raise PlanError(f"a rule sequence has dim = {self.dim}: count the dims from 0.")
        if self.blocks > 1 and self.gather_output:
            raise PlanError(
                f"a rule {self.kind} has gather_output and blocks = {self.blocks}, whose pieces do not stand "
                "in a row: leave one of them out."
            )

    def by(self, parts: str, *, repeated: bool = False) -> Rule:
        """The same rule for features that belong together in `parts`; see the fields."""
        return replace(self, parts=parts, repeated=repeated)

    def along(self, dim: int) -> Rule:
        """The same rule for a dim; see the field."""
        return replace(self, dim=dim)

    def joined(self, blocks: int) -> Rule:
        """The same rule for a linear that is `blocks` linears in one, their features one after another."""
        return replace(self, blocks=blocks)


Rules = Mapping[str, Rule]

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "entrance": (),
    "column": ("parts", "repeated", "blocks", "gather_output"),
    "row": ("parts", "input_is_parallel"),
    "vocabulary": ("gather_output",),
    "sequence": ("dim",),
    "piece": ("dim",),
}
"""Of each kind of rule, what more it can say."""

entrance = Rule("entrance")
column = Rule("column")
row = Rule("row")
vocabulary = Rule("vocabulary")
sequence = Rule("sequence", dim=1)
piece = Rule("piece")


def match(rules: Rules, paths: Iterable[str]) -> dict[str, Rule]:
    """The rule of each path that has one.

    PlanError for a rule that matches nothing, with the nearest paths, and for a path matched twice.
    """
    names = list(dict.fromkeys(paths))
    found: dict[str, tuple[str, Rule]] = {}
    for pattern, rule in rules.items():
        if not isinstance(rule, Rule):
            raise PlanError(
                f"the rule {pattern!r} is {rule!r}: give entrance, column, row, vocabulary, piece or "
                "sequence of plait.rules."
            )
        matched = [name for name in names if _fits(pattern, name)]
        if not matched:
            raise PlanError(
                f"the rule {pattern!r} matches no module of the model: {_nearest(pattern, names)}."
            )
        for name in matched:
            if name in found:
                raise PlanError(
                    f"the module {name!r} is matched by the rules {found[name][0]!r} and {pattern!r}: "
                    "keep one of them."
                )
            found[name] = pattern, rule
    return {name: rule for name, (_, rule) in found.items()}


def join(path: str, name: str) -> str:
    """`path.name`, where either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def _fits(pattern: str, name: str) -> bool:
    """`*` within a pattern is a part of a name without dots."""
    pieces = (re.escape(piece) for piece in pattern.split("*"))
    return re.fullmatch(r"[^.]+".join(pieces), name) is not None


def _nearest(pattern: str, names: list[str]) -> str:
    # Numbers would make blocks.0, blocks.1 … three "different" neighbours: one of each kind is told.
    kinds = dict.fromkeys(_kind(name) for name in names if name)
    near = get_close_matches(_kind(pattern), kinds, n=NEAREST, cutoff=0.4)
    return f"the nearest are {', '.join(near)}" if near else "see model.named_modules() for its paths"


def _kind(name: str) -> str:
    """The name with `*` in place of numbers that stand beside names."""
    return re.sub(r"(?<![^.])\d+(?=\.)|(?<=\.)\d+(?![^.])", "*", name)
