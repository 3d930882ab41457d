"""Public names of the rules of tensor parallelism, which `plait.plan.rules` defines."""

from plait.plan.rules import (
    Rule,
    Rules,
    column,
    entrance,
    norm,
    partitioned,
    piece,
    replicated,
    row,
    sequence,
    vocabulary,
)

__all__ = [
    "Rule",
    "Rules",
    "column",
    "entrance",
    "norm",
    "partitioned",
    "piece",
    "replicated",
    "row",
    "sequence",
    "vocabulary",
]
