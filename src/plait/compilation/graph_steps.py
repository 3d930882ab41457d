"""Part of a joint graph as steps that run: graphs, and what runs between them.

Each operation runs as early as the steps between graphs allow: a graph holds all that needs no result of a later
one. So each rank runs the same collectives in the same order, and weight gradients are in the queue before a
collective that overlaps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from plait.autograd.layer_trace import BETWEEN_GRAPHS, DROPOUT_MASK, LayerTrace
from plait.compilation.torch_compiler import COMPILER_LOCK, Call, with_generated_code
from plait.compilation.weight_terms import Operand, WeightTerm

Values = list[Tensor]
"""By slot. A slot without a value, before it is computed and after its last use, holds nothing of use."""


class LayerCall(Protocol):
    """One call of a layer: what its steps ask for besides their tensors."""

    def mask(self, number: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the mask of a call of the dropout `name`, the same each time for a number."""

    def defer(self, term: WeightTerm, operands: Sequence[Tensor]) -> None:
        """Queue a summand of a weight gradient."""


@dataclass
class GraphStep:
    """A graph of consecutive operations."""

    graph: GraphModule
    arguments: Sequence[int]
    results: Sequence[int]
    generates: bool
    """Whether code is generated, at the first run."""
    done: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._call: Call | None = None if self.generates else self.graph.forward

    """Slots that no later step reads."""

    def run(self, values: Values, call: LayerCall) -> None:
        """Run the graph."""
        arguments = [values[slot] for slot in self.arguments]
        run = self._call or self._generated(arguments)
        for slot, value in zip(self.results, run(*arguments), strict=True):
            values[slot] = value

    def _generated(self, arguments: Sequence[Tensor]) -> Call:
        with COMPILER_LOCK:
            if self._call is None:
                self._call = with_generated_code(self.graph, arguments)
            return self._call


@dataclass
class BetweenStep:
    """A collective between two graphs."""

    operation: Callable[[Tensor], Tensor]
    argument: int
    result: int
    copies: bool
    """Whether the operation writes to its argument, which others read, too."""
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Run the operation."""
        argument = values[self.argument]
        values[self.result] = self.operation(argument.clone() if self.copies else argument)


@dataclass
class MaskStep:
    """The mask of a dropout, made before the first graph."""

    number: int
    name: str
    """Of the dropout."""
    shape: Sequence[int]
    device: torch.device
    result: int
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Make the mask."""
        values[self.result] = call.mask(self.number, self.name, self.shape, self.device)


@dataclass
class DeferStep:
    """A summand of a weight gradient, whose operands are there."""

    term: WeightTerm
    operands: Sequence[int]
    done: Sequence[int] = ()

    def run(self, values: Values, call: LayerCall) -> None:
        """Queue the summand."""
        call.defer(self.term, [values[slot] for slot in self.operands])


Step = DeferStep | GraphStep | BetweenStep | MaskStep


@dataclass(frozen=True)
class Steps:
    """Steps, and the slots of what they are given and return."""

    steps: Sequence[Step]
    slots: int
    results: Sequence[int | None]
    nothing: Tensor = field(default_factory=lambda: torch.empty(0))

    def run(self, given: Iterable[Tensor], call: LayerCall) -> list[Tensor | None]:
        """Return the results of the steps for `given`; None where there is no result."""
        values = [*given]
        values += [self.nothing] * (self.slots - len(values))
        for step in self.steps:
            step.run(values, call)
            for slot in step.done:
                values[slot] = self.nothing
        return [None if slot is None else values[slot] for slot in self.results]


def steps_of(
    module: GraphModule,
    nodes: Sequence[Node],
    given: Sequence[Node],
    results: Sequence[Node | None],
    trace: LayerTrace,
    terms: Sequence[WeightTerm] = (),
    *,
    generates: bool,
) -> Steps:
    """Return the steps that compute `results` of `nodes`, which are in order, from the values of `given`."""
    slots = {node: number for number, node in enumerate([*given, *nodes])}
    levels = _levels(nodes)
    outside = {node for node in results if node is not None}
    outside.update(operand.base for term in terms for operand in term.operands)
    steps, waiting, known = list[Step](), list(terms), set(given)

    def defer() -> None:
        for term in [one for one in waiting if all(operand.base in known for operand in one.operands)]:
            waiting.remove(term)
            steps.append(DeferStep(term, [slots[operand.base] for operand in term.operands]))

    defer()
    for level, group in groupby(sorted(nodes, key=levels.__getitem__), key=levels.__getitem__):
        members = list(group)
        if level % 2:
            steps += [_between(node, slots, trace, {*nodes, *outside}, outside) for node in members]
        else:
            read = outside.union(*(one.all_input_nodes for one in nodes if levels[one] != level))
            steps.append(_graph_step(module, members, slots, read, generates=generates))
        known.update(members)
        defer()
    returned = [None if node is None else slots[node] for node in results]
    _set_last_uses(steps, {slot for slot in returned if slot is not None})
    return Steps(steps, len(slots), returned)


def _between(
    node: Node, slots: Mapping[Node, int], trace: LayerTrace, readers: set[Node], outside: set[Node]
) -> Step:
    if node.target == DROPOUT_MASK:
        mask: Any = node.args
        return MaskStep(mask[0], trace.masks[mask[0]], mask[1], mask[2], slots[node])
    argument, number, _ = node.args
    assert isinstance(argument, Node) and isinstance(number, int)
    copies = number in trace.writes and _is_read_elsewhere(argument, node, readers, outside)
    return BetweenStep(trace.operations[number], slots[argument], slots[node], copies)


def _is_read_elsewhere(node: Node, reader: Node, readers: set[Node], outside: set[Node]) -> bool:
    """Return whether the memory of a value is an argument's, or is read by another than `reader`."""
    base = Operand.of(node).base
    waiting = [base]
    while waiting:
        one = waiting.pop()
        if one in outside or one.op != "call_function":
            return True
        for user in one.users:
            if user is reader or user not in readers:
                continue
            if Operand.of(user).base is not base:
                return True
            waiting.append(user)
    return False


def _graph_step(
    module: GraphModule,
    members: Sequence[Node],
    slots: Mapping[Node, int],
    read: set[Node],
    *,
    generates: bool,
) -> GraphStep:
    """Return the graph of `members`, which are in order; `read`: the nodes that are read outside of it."""
    graph, copies = Graph(), dict[Node, Node]()
    inside = set(members)
    arguments = dict.fromkeys(
        one for node in members for one in node.all_input_nodes if one not in inside and one.op != "get_attr"
    )
    for node in arguments:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta.get("val")

    def copy_of(node: Node) -> Node:
        if node not in copies:  # a constant tensor of the layer
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in members:
        copies[node] = graph.node_copy(node, copy_of)
    results = [node for node in members if node in read]
    graph.output(tuple(copies[node] for node in results))
    made = GraphModule(module, graph)
    return GraphStep(made, [slots[node] for node in arguments], [slots[node] for node in results], generates)


def _set_last_uses(steps: Sequence[Step], returned: set[int]) -> None:
    """Set for each step which slots no later step reads."""
    seen = set(returned)
    for step in reversed(steps):
        read = set(_read_by(step)) - seen
        step.done = tuple(read)
        seen |= read


def _read_by(step: Step) -> Sequence[int]:
    match step:
        case GraphStep():
            return step.arguments
        case BetweenStep():
            return [step.argument]
        case DeferStep():
            return step.operands
        case MaskStep():
            return []


def _levels(nodes: Sequence[Node]) -> Mapping[Node, int]:
    """Return when each node can run: even levels are graphs, odd ones what runs between them."""
    levels: dict[Node, int] = {}
    for node in nodes:
        level = max((levels.get(one, 0) for one in node.all_input_nodes), default=0)
        if node.target == DROPOUT_MASK:
            levels[node] = -1
        elif node.target == BETWEEN_GRAPHS:
            levels[node] = level + 1 if level % 2 == 0 else level
        else:
            levels[node] = level + level % 2
    return levels
