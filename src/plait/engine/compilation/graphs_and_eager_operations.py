"""Converts part of a joint graph to the operations that run it: graphs, and eager calls between them.

Each node runs as early as the operations between graphs allow: a graph holds all that needs no result of a
later one. So each rank runs the same collectives in the same order, and weight gradients are in the queue
before a collective that overlaps them.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from plait.engine.compilation.eager_autograd_calls import autograd_call, autograd_call_backward
from plait.engine.compilation.layer_call_state import LayerCall
from plait.engine.compilation.layer_operations import (
    LayerOperation,
    LayerOperations,
    StoredResult,
    Values,
    arguments_of,
)
from plait.engine.compilation.torch_compiler import example_of, with_generated_code
from plait.engine.compilation.weight_gradients import Operand, WeightTerm, WeightTerms
from plait.tensor.autograd.eager_operations import (
    AUTOGRAD_CALL,
    AUTOGRAD_CALL_BACKWARD,
    DROPOUT_MASK,
    EAGER_OPERATION,
    POSITIONS,
    REGATHERED,
    LayerTrace,
)
from plait.tensor.running_sequence import running_sequence


def operations_of(
    module: GraphModule,
    nodes: Sequence[Node],
    given: Sequence[Node],
    results: Sequence[Node | None],
    trace: LayerTrace,
    terms: Sequence[WeightTerm] = (),
    *,
    generates: bool,
) -> LayerOperations:
    """Divide FX `nodes`, which compute `results` from `given`, into compiled graphs and eager operations."""
    slots = {node: number for number, node in enumerate([*given, *nodes])}
    levels = _levels(nodes)
    outside = {node for node in results if node is not None}
    outside.update(operand.base for term in terms for operand in term.operands)
    operations, waiting, known = list[LayerOperation](), list(terms), set(given)

    def defer() -> None:
        found = [one for one in waiting if all(operand.base in known for operand in one.operands)]
        if found:
            waiting[:] = [one for one in waiting if one not in found]
            operations.append(_defer(found, slots))

    defer()
    for level, group in groupby(sorted(nodes, key=levels.__getitem__), key=levels.__getitem__):
        members = list(group)
        if level % 2:
            operations += _all_between(members, slots, trace, {*nodes, *outside}, outside)
        else:
            read = outside.union(*(one.all_input_nodes for one in nodes if levels[one] != level))
            operations.append(_graph(module, members, slots, read, generates=generates))
        known.update(members)
        defer()
    returned = [len(slots) if node is None else slots[node] for node in results]
    read_later = set(returned)
    for operation in reversed(operations):
        operation.done = tuple(set(operation.arguments) - read_later)
        read_later.update(operation.done)
    return LayerOperations(operations, len(slots), returned)


def _levels(nodes: Sequence[Node]) -> Mapping[Node, int]:
    """Return the level at which each node can run: even ones are graphs, odd ones the eager calls between."""
    levels: dict[Node, int] = {}
    for node in nodes:
        level = max((levels.get(one, 0) for one in node.all_input_nodes), default=0)
        if node.target in (DROPOUT_MASK, POSITIONS):
            levels[node] = -1
        elif node.target in (EAGER_OPERATION, REGATHERED) or _is_autograd_call(node):
            levels[node] = level + 1 if level % 2 == 0 else level
        elif node.target == operator.getitem and _is_autograd_call(node.all_input_nodes[0]):
            levels[node] = level
        else:
            levels[node] = level + level % 2
    return levels


def _is_autograd_call(node: Node) -> bool:
    return node.target in (AUTOGRAD_CALL, AUTOGRAD_CALL_BACKWARD)


def _graph(
    module: GraphModule,
    members: Sequence[Node],
    slots: Mapping[Node, int],
    read: set[Node],
    *,
    generates: bool,
) -> LayerOperation:
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
    compute = with_generated_code(made) if generates else lambda given: made.forward(*given)
    stored = [slots[node] for node in results]

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        for slot, value in zip(stored, compute(given), strict=True):
            values[slot] = value

    return LayerOperation([slots[node] for node in arguments], run)


def _defer(terms: Sequence[WeightTerm], slots: Mapping[Node, int]) -> LayerOperation:
    """Return the operation that queues summands of weight gradients, once their operands are computed."""
    made = WeightTerms.of(terms)

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        call.defer(made, given)

    return LayerOperation([slots[operand.base] for operand in made.operands], run)


def _all_between(
    members: Sequence[Node],
    slots: Mapping[Node, int],
    trace: LayerTrace,
    readers: set[Node],
    outside: set[Node],
) -> Iterator[LayerOperation]:
    """Yield the operations that run `members` eagerly; those on each element that are equal run as one."""
    alike: dict[Hashable, list[Node]] = {}
    for node in members:
        number = arguments_of(node)[1] if node.target == EAGER_OPERATION else None
        if number in trace.elementwise:
            alike.setdefault((trace.elementwise[number], example_of(node).dtype), []).append(node)
    last = {nodes[-1]: nodes for nodes in alike.values() if len(nodes) > 1}
    together = {node for nodes in last.values() for node in nodes}
    for node in members:
        if node in last:
            yield _joined(last[node], slots, trace)
        elif node.target != operator.getitem and node not in together:
            yield _between(node, slots, trace, readers, outside)


def _joined(nodes: Sequence[Node], slots: Mapping[Node, int], trace: LayerTrace) -> LayerOperation:
    """Return the operation that runs equal operations on each element as one, on all of their arguments."""
    operation = trace.operations[arguments_of(nodes[0])[1]]
    results = [StoredResult([slots[node]], example_of(node).stride()) for node in nodes]

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        made = operation(torch.cat([one.reshape(-1) for one in given]))
        parts = torch.split(made, [one.numel() for one in given])
        for result, part, one in zip(results, parts, given, strict=True):
            result.store(values, part.view(one.shape))

    return LayerOperation([slots[arguments_of(node)[0]] for node in nodes], run)


def _between(
    node: Node, slots: Mapping[Node, int], trace: LayerTrace, readers: set[Node], outside: set[Node]
) -> LayerOperation:
    """Return the operation that runs a node eagerly, between two graphs."""
    if node.target == DROPOUT_MASK:
        return _dropout_mask(node, slots, trace)
    if node.target == POSITIONS:
        return _positions(node, slots)
    if node.target == REGATHERED:
        return _regather(node, slots, trace)
    if node.target == AUTOGRAD_CALL:
        return autograd_call(node, slots, trace)
    if node.target == AUTOGRAD_CALL_BACKWARD:
        return autograd_call_backward(node, slots)
    argument: Any = node.args[0]
    copies = node.args[1] in trace.writes and _is_read_elsewhere(argument, node, readers, outside)
    return _collective(node, slots, trace, copies=copies)


def _dropout_mask(node: Node, slots: Mapping[Node, int], trace: LayerTrace) -> LayerOperation:
    """Return the operation that computes the mask of a dropout, before the first graph."""
    number, shape, device = arguments_of(node)
    name, slot = trace.masks[number], slots[node]

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        values[slot] = call.mask(number, name, shape, device)

    return LayerOperation((), run)


def _positions(node: Node, slots: Mapping[Node, int]) -> LayerOperation:
    """Return the operation that stores the positions of the running sequence, before the first graph."""
    _, device = arguments_of(node)
    slot = slots[node]

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        sequence = running_sequence()
        assert sequence is not None
        values[slot] = sequence.positions(device)

    return LayerOperation((), run)


def _regather(node: Node, slots: Mapping[Node, int], trace: LayerTrace) -> LayerOperation:
    """Return the operation that prepares to repeat an all-gather of the forward, for a weight gradient."""
    part, number = arguments_of(node)
    gather, slot = trace.gathers[number], slots[node]

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        values[slot] = call.regathered(given[0], gather)

    return LayerOperation([slots[part]], run)


def _collective(node: Node, slots: Mapping[Node, int], trace: LayerTrace, *, copies: bool) -> LayerOperation:
    """Return the operation that runs a collective between two graphs; `copies`: on a copy of its argument."""
    argument, number, _ = arguments_of(node)
    collective, result = trace.operations[number], StoredResult([slots[node]], example_of(node).stride())

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        result.store(values, collective(given[0].clone() if copies else given[0]))

    return LayerOperation([slots[argument]], run)


def _is_read_elsewhere(node: Node, reader: Node, readers: set[Node], outside: set[Node]) -> bool:
    """Return whether the memory of a value is an argument's, or is read by another than `reader`."""
    base = Operand.of(node).base
    waiting = [base]
    while waiting:
        one = waiting.pop()
        if one in outside or one.op != "call_function" or one.target == operator.getitem:
            return True  # what an autograd call has returned, its backward may read
        for user in one.users:
            if user is reader or user not in readers:
                continue
            if Operand.of(user).base is not base:
                return True
            waiting.append(user)
    return False
