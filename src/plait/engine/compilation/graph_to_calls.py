"""Conversion of part of a joint graph to the steps that run it.

Each operation runs as early as the steps between graphs allow: a graph holds all that needs no result of a
later one. So each rank runs the same collectives in the same order, and weight gradients are in the queue
before a collective that overlaps them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from plait.engine.compilation.compiled_calls import (
    AttentionBackwardStep,
    AttentionOperation,
    CollectiveOperation,
    DeferOperation,
    GraphOperation,
    LayerOperations,
    MaskOperation,
    PositionsOperation,
    RegatherOperation,
    Results,
    Step,
)
from plait.engine.compilation.torch_compiler import example_of, with_generated_code
from plait.engine.compilation.weight_terms import Operand, WeightTerm, WeightTerms
from plait.tensor.autograd.between_graphs import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BETWEEN_GRAPHS,
    DROPOUT_MASK,
    POSITIONS,
    REGATHERED,
    LayerTrace,
)


def steps_of(
    module: GraphModule,
    nodes: Sequence[Node],
    given: Sequence[Node],
    results: Sequence[Node | None],
    trace: LayerTrace,
    terms: Sequence[WeightTerm] = (),
    *,
    generates: bool,
) -> LayerOperations:
    """Return the steps that compute `results` of `nodes`, which are in order, from the values of `given`."""
    slots = {node: number for number, node in enumerate([*given, *nodes])}
    levels = _levels(nodes)
    outside = {node for node in results if node is not None}
    outside.update(operand.base for term in terms for operand in term.operands)
    steps, waiting, known = list[Step](), list(terms), set(given)

    def defer() -> None:
        found = [one for one in waiting if all(operand.base in known for operand in one.operands)]
        if found:
            waiting[:] = [one for one in waiting if one not in found]
            made = WeightTerms.of(found)
            steps.append(DeferOperation(made, [slots[operand.base] for operand in made.operands]))

    defer()
    for level, group in groupby(sorted(nodes, key=levels.__getitem__), key=levels.__getitem__):
        members = list(group)
        if level % 2:
            between = [node for node in members if node.target != operator.getitem]
            steps += [_between(node, slots, trace, {*nodes, *outside}, outside) for node in between]
        else:
            read = outside.union(*(one.all_input_nodes for one in nodes if levels[one] != level))
            steps.append(_graph_step(module, members, slots, read, generates=generates))
        known.update(members)
        defer()
    returned = [len(slots) if node is None else slots[node] for node in results]
    _set_last_uses(steps, set(returned))
    return LayerOperations(steps, len(slots), returned)


def _between(
    node: Node, slots: Mapping[Node, int], trace: LayerTrace, readers: set[Node], outside: set[Node]
) -> Step:
    if node.target == DROPOUT_MASK:
        mask, shape, device = node.args
        names: Any = trace.masks
        return MaskOperation(mask, names[mask], shape, device, slots[node])  # type: ignore[arg-type]
    if node.target == POSITIONS:
        return PositionsOperation(node.args[1], slots[node])  # type: ignore[arg-type]
    if node.target == REGATHERED:
        part, gather = node.args
        return RegatherOperation(trace.gathers[gather], [slots[part]], slots[node])  # type: ignore[index]
    if node.target == ATTENTION:
        *given, call, _ = node.args
        output, run = (_results(node, number, slots) for number in range(2))
        arguments = [slots[one] for one in given]  # type: ignore[index]
        return AttentionOperation(trace.attentions[call], arguments, output, run.slots)  # type: ignore[index]
    if node.target == ATTENTION_BACKWARD:
        gradient, saved, *_ = node.args
        results = [_results(node, number, slots) for number in range(3)]
        return AttentionBackwardStep([slots[gradient], slots[saved]], results)  # type: ignore[index]
    argument, number, _ = node.args
    assert isinstance(argument, Node)
    assert isinstance(number, int)
    copies = number in trace.writes and _is_read_elsewhere(argument, node, readers, outside)
    result = Results([slots[node]], example_of(node).stride())
    return CollectiveOperation(trace.operations[number], [slots[argument]], result, copies)


def _results(node: Node, number: int, slots: Mapping[Node, int]) -> Results:
    """Return the slots of one result of a node that has several."""
    users = [user for user in node.users if user.args[1] == number]
    found = [slots[user] for user in users if user in slots]
    return Results(found, example_of(users[0]).stride() if found else ())


def _is_read_elsewhere(node: Node, reader: Node, readers: set[Node], outside: set[Node]) -> bool:
    """Return whether the memory of a value is an argument's, or is read by another than `reader`."""
    base = Operand.of(node).base
    waiting = [base]
    while waiting:
        one = waiting.pop()
        if one in outside or one.op != "call_function" or one.target == operator.getitem:
            return True  # what attention has returned, its backward may read
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
) -> GraphOperation:
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
    call = with_generated_code(made) if generates else partial(_run_operations, made)
    return GraphOperation(call, [slots[node] for node in arguments], [slots[node] for node in results])


def _run_operations(graph: GraphModule, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
    results: Sequence[Tensor] = graph.forward(*arguments)
    return results


def _set_last_uses(steps: Sequence[Step], returned: set[int]) -> None:
    """Set `done` of each step: the slots that it reads and no later step does."""
    seen = set(returned)
    for step in reversed(steps):
        read = set(step.arguments) - seen
        step.done = tuple(read)
        seen |= read


def _levels(nodes: Sequence[Node]) -> Mapping[Node, int]:
    """Return when each node can run: even levels are graphs, odd ones what runs between them."""
    levels: dict[Node, int] = {}
    for node in nodes:
        level = max((levels.get(one, 0) for one in node.all_input_nodes), default=0)
        if node.target in (DROPOUT_MASK, POSITIONS):
            levels[node] = -1
        elif node.target in (BETWEEN_GRAPHS, REGATHERED) or _is_attention(node):
            levels[node] = level + 1 if level % 2 == 0 else level
        elif node.target == operator.getitem and _is_attention(node.all_input_nodes[0]):
            levels[node] = level
        else:
            levels[node] = level + level % 2
    return levels


def _is_attention(node: Node) -> bool:
    return node.target in (ATTENTION, ATTENTION_BACKWARD)
