"""Which layers of a program can run together, in one autograd graph: those with nothing between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Set
from itertools import pairwise, starmap
from typing import TypeAlias

from plait.schedules.action import Action
from plait.schedules.lowering.program import Instruction, Program, RunLayer

Place: TypeAlias = tuple[int, int, int]
"""Stage, micro-batch and layer."""


def joined_layers(program: Program, may_join: Callable[[RunLayer], bool]) -> Set[Place]:
    """Return the place of each layer that can share an autograd graph with the next one.

    `may_join`: whether a layer may share one at all. Two layers can where they follow each other in every
    action that runs them: a graph made in `F` is the one that `I` and `W` go through.
    """
    actions: dict[tuple[int, int], set[Action]] = {}
    alone = set[tuple[int, int]]()
    for one in program:
        if isinstance(one, RunLayer):
            actions.setdefault((one.action.stage, one.action.microbatch), set()).add(one.action)
            if not may_join(one):
                alone.add((one.action.stage, one.layer))
    adjacent = Counter(filter(None, starmap(_place, pairwise(program))))
    return {
        (stage, microbatch, layer)
        for (stage, microbatch, layer), count in adjacent.items()
        if count == len(actions[stage, microbatch]) and alone.isdisjoint([(stage, layer), (stage, layer + 1)])
    }


def in_groups(instructions: Program, joined: Set[Place]) -> Iterator[Program]:
    """Yield consecutive `instructions` in groups: layers that run together, each other instruction alone."""
    group: list[Instruction] = []
    for one in instructions:
        if group and _place(group[-1], one) not in joined:
            yield tuple(group)
            group = []
        group.append(one)
    if group:
        yield tuple(group)


def _place(one: Instruction, other: Instruction) -> Place | None:
    """Return the place of two neighbour layers that follow each other in an action; None for all else."""
    if not (isinstance(one, RunLayer) and isinstance(other, RunLayer) and one.action == other.action):
        return None
    stage, _, microbatch = one.action
    return (stage, microbatch, min(one.layer, other.layer)) if abs(one.layer - other.layer) == 1 else None
