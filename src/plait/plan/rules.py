"""Rules of tensor parallelism: how a model's modules are partitioned, as data separate from the model.

    RULES = {
        "embedding.token": vocabulary,                     partition the rows of the table
        "blocks.*.attention.norm": entrance,               its output is the input of the column linears
        "blocks.*.attention.query": column.by("heads"),    partition output features by whole heads
        "blocks.*.attention.output": row.by("heads"),      partition input features; the output is summed
        "blocks.*.attention": sequence,                    the rest may run on parts of the sequence
        "blocks.*.attention.dropout": piece.along(1),      take the mask of this rank's heads
        "blocks.*.attention.query_norm": replicated,       whole inside of the region, with a summed gradient
        "blocks.*.attention.sinks": partitioned,           this rank's heads of a parameter [heads]
    }

A key is a module's path in the model, in which `*` matches any one name. Every rule has to match a module,
and no module may be matched twice.
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
    """How one module is partitioned over `tp`: which features, rows or positions each rank holds.

    What each kind does is said at its name: `entrance`, `column`, `row`, `vocabulary`, `sequence`, `piece`,
    `replicated`, `partitioned`, `norm`.

    In a layer without an entrance, each column linear enters the region by itself: correct, but with one sum
    of gradients for each.
    """

    kind: Literal[
        "entrance",
        "column",
        "row",
        "vocabulary",
        "piece",
        "sequence",
        "replicated",
        "partitioned",
        "norm",
    ]
    parts: str | None = None
    """The attribute of the parent module that is the number of equal parts in the partitioned dim, such as
    heads; a part is never divided. None: single features."""
    repeated: bool = False
    """Column, partitioned, norm: whether there may be fewer parts than ranks, so that neighbouring ranks hold
    the same."""
    blocks: int | tuple[str, ...] = 1
    """Column: the number of equal blocks of features, each partitioned by itself: 3 for query, key and value
    in one linear. `parts` are those of one block. For unequal blocks: for each the attribute of the parent
    module that is its number of parts, all of one size."""
    interleaved: int | tuple[str, ...] = 1
    """Column: how many matrices have rows in each part, one after another: 3 where each head has its rows of
    query, key and value. For unequal ones: for each the attribute of the parent module that is its number of
    rows in a part. Not read by `tp`, which divides no part, but by optimizers of whole matrices."""
    gather_output: bool = False
    """Column, vocabulary linear: whether every rank gets the whole output."""
    input_is_parallel: bool = True
    """Row: whether the input is this rank's part; else it is whole, and split here."""
    dim: int = -1
    """Part: the partitioned dim, -1 for features, 1 for heads in `[rows, heads, ...]`. Sequence: the dim of
    the sequence in the layer's first input and output tensor, 1 for `[batch, length, hidden]`; other tensors
    stay whole."""

    def __post_init__(self) -> None:
        fitting = _FIELDS.get(self.kind)
        if fitting is None:
            raise PlanError(f"a rule is of kind {self.kind!r}: choose one of {', '.join(_FIELDS)}.")
        for one in fields(self):
            if one.name not in ("kind", *fitting) and getattr(self, one.name) != one.default:
                raise PlanError(
                    f"a rule {self.kind} has {one.name} = {getattr(self, one.name)!r}, which does not apply "
                    f"to it: leave it out{', or set ' + ' or '.join(fitting) if fitting else ''}."
                )
        if not isinstance(self.dim, int) or (self.kind == "piece" and self.dim == 0):
            raise PlanError(
                f"a rule {self.kind} has dim = {self.dim!r}: give a dim of the tensor, but not 0, its rows, "
                "which tp never partitions."
            )
        if self.parts is not None and isinstance(self.blocks, tuple):
            raise PlanError(
                f"a rule {self.kind} has parts = {self.parts!r} and blocks = {self.blocks!r}, which name "
                "their parts themselves: leave out one of them."
            )
        if self.interleaved != 1 and self.parts is None:
            raise PlanError(
                f"a rule {self.kind} has interleaved = {self.interleaved!r} and no parts: name their number, "
                'column.by("heads").interleave(...).'
            )
        if self.kind == "sequence" and self.dim < 0:
            raise PlanError(f"a rule sequence has dim = {self.dim}: count the dims from 0.")
        if self.blocks != 1 and self.gather_output:
            raise PlanError(
                f"a rule {self.kind} has gather_output and blocks = {self.blocks!r}, whose parts are not "
                "contiguous: leave one of them out."
            )

    def by(self, parts: str, *, repeated: bool = False) -> Rule:
        """Return a copy that cuts only between parts (heads); `parts`: the attribute with their number."""
        return replace(self, parts=parts, repeated=repeated)

    def along(self, dim: int) -> Rule:
        """Return a copy of the rule that partitions the dim `dim`."""
        return replace(self, dim=dim)

    def joined(self, blocks: int | str, *more: str) -> Rule:
        """Return a copy for a linear whose output features are those of `blocks` linears, concatenated.

        Their number; or, where they differ in size, for each the module attribute with the number of its
        parts: `column.joined("heads", "key_heads", "key_heads")`.
        """
        return replace(self, blocks=(blocks, *more) if isinstance(blocks, str) else blocks)

    def interleave(self, matrices: int | str, *more: str) -> Rule:
        """Return a copy for a linear each of whose parts has rows of several matrices, one after another.

        Their number; or, where they differ in size, for each the module attribute with its number of rows in
        a part: `column.by("heads").interleave("key_size", "value_size")`.
        """
        return replace(self, interleaved=(matrices, *more) if isinstance(matrices, str) else matrices)


Rules = Mapping[str, Rule]

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "entrance": (),
    "column": ("parts", "repeated", "blocks", "interleaved", "gather_output"),
    "row": ("parts", "input_is_parallel"),
    "vocabulary": ("gather_output",),
    "sequence": ("dim",),
    "piece": ("dim",),
    "replicated": (),
    "partitioned": ("parts", "repeated"),
    "norm": ("parts", "repeated"),
}
"""The fields that apply to each kind of rule."""

entrance = Rule("entrance")
"""The module's output enters a region: the layer's column linears read it. Its gradient is summed over `tp`,
once."""
column = Rule("column")
"""A linear with partitioned output features."""
row = Rule("row")
"""A linear with partitioned input features, whose output is summed over `tp`."""
vocabulary = Rule("vocabulary")
"""An embedding, or the model's last linear, with partitioned rows, evenly or not."""
sequence = Rule("sequence", dim=1)
"""A layer of the model that, outside of regions (norms, dropouts, residual connections), treats each position
of the sequence by itself; with `Plan.sequence_parallel` each rank does so for a part of the sequence."""
piece = Rule("piece")
"""A dropout in a region, whose mask is that of this rank's part of a dim with equal parts: features of a
column linear, or heads, but no repeated heads."""
replicated = Rule("replicated")
"""A module in a region whose parameters every rank has whole, such as a norm of each head; each rank has a
summand of their gradients, which are summed over `tp`. Its dropouts take one mask on all ranks, as for an
input that is the same on all of them."""
partitioned = Rule("partitioned")
"""A module in a region whose own parameters (not those of modules in it) have a row for each feature or head,
of which every rank has some, as it has of activations there."""
norm = Rule("norm")
"""An `nn.RMSNorm` in a region over all the features of which each rank has some,
weight · x / sqrt(mean(x²) + eps); its weight is partitioned with them, its mean square summed over `tp`."""


def match(rules: Rules, paths: Iterable[str]) -> dict[str, Rule]:
    """Return the rule whose pattern matches each module path, without paths that no pattern matches.

    Raises PlanError for a rule that matches no path, with the nearest paths, and for a path matched twice.
    """
    if not isinstance(rules, Mapping):
        raise PlanError(f"rules is {rules!r}: give a dictionary of rules by patterns of module paths.")
    names = list(dict.fromkeys(paths))
    found: dict[str, tuple[str, Rule]] = {}
    for pattern, rule in rules.items():
        if not isinstance(rule, Rule):
            raise PlanError(
                f"the rule {pattern!r} is {rule!r}: give entrance, column, row, vocabulary, piece, "
                "sequence, replicated, partitioned or norm of plait.rules."
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
    """Return `path.name`, where either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def _fits(pattern: str, name: str) -> bool:
    """Return whether `name` matches `pattern`, in which `*` matches one or more characters except dots."""
    literals = (re.escape(literal) for literal in pattern.split("*"))
    return re.fullmatch(r"[^.]+".join(literals), name) is not None


def _nearest(pattern: str, names: list[str]) -> str:
    # Without numbers, so that the nearest paths are not blocks.0, blocks.1 and blocks.2.
    kinds = dict.fromkeys(_kind(name) for name in names if name)
    near = get_close_matches(_kind(pattern), kinds, n=NEAREST, cutoff=0.4)
    return f"the nearest are {', '.join(near)}" if near else "see model.named_modules() for its paths"


def _kind(name: str) -> str:
    """Return a module's path with each number replaced by `*`."""
    return re.sub(r"(?<![^.])\d+(?=\.)|(?<=\.)\d+(?![^.])", "*", name)
