"""Helpers of plait's own models: assembly of the layer sequence, and checks of sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from plait.errors import ModelError
from plait.rules import Rules

INITIAL_STD = 0.02
"""Standard deviation of initial weights (Radford et al. 2018, section 4.1)."""


def assemble(
    embedding: nn.Module, blocks: Sequence[nn.Module], head: nn.Module, *, context: int, rules: Rules
) -> nn.Sequential:
    """Return the sequence embedding → blocks.0 … → head, with the attributes `context` and `rules`."""
    model = nn.Sequential(OrderedDict(embedding=embedding, blocks=nn.Sequential(*blocks), head=head))
    model.context = context  # type: ignore[assignment]  # the longest sequence of Engine.generate
    model.rules = rules  # type: ignore[assignment]
    return model


def require_positive(**sizes: int) -> None:
    """Raise ModelError for a size below one."""
    for name, size in sizes.items():
        if size < 1:
            raise ModelError(f"model.{name} is {size}: give at least 1.")


def require_whole_heads(hidden: int, heads: int) -> None:
    """Raise ModelError unless `heads` divides `hidden`."""
    if hidden % heads:
        raise ModelError(
            f"model.hidden = {hidden} is not divisible by model.heads = {heads}: "
            f"set hidden to {heads * max(1, hidden // heads)} or {heads * (hidden // heads + 1)}."
        )


def require_length(length: int, context: int) -> None:
    """Raise ModelError where a sequence is longer than the context."""
    if length > context:
        raise ModelError(
            f"a sequence of {length} tokens is longer than the model's context of {context}: "
            "shorten it or enlarge model.context."
        )
