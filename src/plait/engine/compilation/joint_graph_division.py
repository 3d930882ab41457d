"""The division of a joint graph into forward and backward, and the values that the forward saves.

    none        the results that the backward reads
    selective   those of matrix products, autograd calls and collectives; the rest is computed again
    full        the arguments only, and those of calls that must not be repeated

Views are computed again in any case, so that no view of a parameter's memory is saved; so are positions, and
the masks of dropouts, but with `none`. Other random numbers are saved. Not to be repeated are attention whose
weights drop out, and the choice of experts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.engine.compilation.torch_compiler import is_random, is_view
from plait.engine.compilation.weight_gradients import Operand, WeightTerm, terms_of
from plait.plan.plan import Recompute
from plait.tensor.autograd.eager_operations import (
    AUTOGRAD_CALL,
    AUTOGRAD_CALL_BACKWARD,
    EAGER_OPERATION,
    POSITIONS,
    REGATHERED,
)
from plait.tensor.autograd.kept_results import KEPT_OPERATIONS
from plait.tensor.float8.scaled_product import SCALED_PRODUCT


@dataclass(frozen=True)
class JointGraph:
    """The traced graph of a layer's forward and backward, with its inputs, outputs and gradients."""

    module: GraphModule
    arguments: Sequence[Node]
    tangents: Sequence[Node]
    """The gradients of the results that require one."""
    results: Sequence[Node]
    gradients: Sequence[Node | None]
    """Of each argument."""

    @staticmethod
    def of(module: GraphModule, arguments: int, results: int, inputs: int) -> JointGraph:
        """Return the `JointGraph` of a traced function with that number of arguments and results.

        The trace clones every result; clones stay only where a result shares memory with an argument or
        another result. The gradients of the first `inputs` arguments become clones if they have the memory of
        anything else.
        """
        given = [node for node in module.graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        made = list(output.args[0])
        gradients = made[results:] or [None] * arguments
        memory, returned = set(given), list[Node]()
        for clone in made[:results]:
            (original,) = clone.all_input_nodes
            base = Operand.of(original).base
            returned.append(clone if base in memory or base.op != "call_function" else original)
            memory.add(base)
        for number, gradient in enumerate(gradients[:inputs]):
            if gradient is not None:
                base = Operand.of(gradient).base
                if base in memory:
                    gradients[number] = _inserted(gradient, torch.ops.aten.clone.default, gradient)
                memory.add(base)
        return JointGraph(module, given[:arguments], given[arguments:], returned, gradients)

    def in_order(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes among `nodes` that compute a value, in the order of the graph."""
        wanted = set(nodes)
        return [node for node in self.module.graph.nodes if node in wanted and node.op == "call_function"]


@dataclass(frozen=True)
class DividedGraph:
    """The nodes of forward and backward, in order, and the nodes whose values the forward saves."""

    forward: Sequence[Node]
    backward: Sequence[Node]
    saved: Sequence[Node]
    gradients: Sequence[Node | None]
    """Of each argument, what the backward returns; None where all of it is deferred, or there is none."""
    terms: Sequence[WeightTerm]
    """What the backward defers, in the order of the graph."""


def divided(
    joint: JointGraph, parameters: Sequence[int], mode: Recompute, gathers: Collection[int] = ()
) -> DividedGraph:
    """Return a layer's joint graph divided into a forward and a backward, with weight gradients left out.

    Left out, as `terms`, is what can be deferred of the gradients of `parameters`. `mode`: which values the
    backward computes again.
    `gathers`: the numbers of recorded gathers whose results the weight gradients gather again.
    """
    gradients, terms = list(joint.gradients), list[WeightTerm]()
    for number in parameters:
        gradient = gradients[number]
        if gradient is not None:
            found, others = terms_of(gradient, joint.arguments[number], number - parameters[0])
            terms += found
            gradients[number] = _sum_of(others)
    terms = [_with_regathered(term, gathers) for term in terms]
    place = {node: number for number, node in enumerate(joint.module.graph.nodes)}
    terms.sort(key=lambda term: max(place[operand.base] for operand in term.operands))
    wanted = [node for node in gradients if node is not None]
    wanted += [operand.base for term in terms for operand in term.operands]
    # Also those that nothing reads: their modules add gradients to parameters.
    wanted += [node for node in place if node.target == AUTOGRAD_CALL_BACKWARD]
    late = _after(joint, joint.tangents)
    saved: dict[Node, None] = {}

    def goes_on(node: Node) -> bool:
        if node in late or _is_recomputed(node, mode):
            return True
        saved[node] = None
        return False

    backward = joint.in_order(_before(wanted, goes_on))
    made = [node for node in saved if node.op == "call_function"]
    forward = joint.in_order(_before([*joint.results, *made], lambda node: True))
    kept = [node for node in saved if node not in set(joint.tangents)]
    return DividedGraph(forward, backward, kept, gradients, terms)


def _with_regathered(term: WeightTerm, gathers: Collection[int]) -> WeightTerm:
    """Return `term` with operands that came from the recorded `gathers` gathered again when they are used."""
    operands = []
    for operand in term.operands:
        base = operand.base
        if base.target == EAGER_OPERATION and base.args[1] in gathers:
            operand = replace(operand, base=_inserted(base, REGATHERED, *base.args[:2]))
        operands.append(operand)
    return replace(term, operands=tuple(operands))


def _sum_of(summands: Sequence[Node]) -> Node | None:
    """Return a node that sums the given summands of a gradient; None where there are none."""
    if not summands:
        return None
    total, *others = summands
    for summand in others:
        made = _inserted(max(total, summand), torch.ops.aten.add.Tensor, total, summand)
        made.meta["val"] = total.meta["val"]
        total = made
    return total


def _inserted(node: Node, operation: Any, *arguments: Any) -> Node:
    """Insert an operation after `node`; return its node, whose value has the shape and dtype of `node`."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(operation, arguments)
    made.meta["val"] = node.meta["val"]
    return made


def _after(joint: JointGraph, sources: Sequence[Node]) -> set[Node]:
    """Return all nodes that depend on `sources`, with them."""
    found = set(sources)
    for node in joint.module.graph.nodes:
        if any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _before(wanted: Iterable[Node], goes_on: Callable[[Node], bool]) -> set[Node]:
    """Return the nodes that `wanted` depend on, with them; not beyond a node where `goes_on` is false."""
    found, seen, waiting = set[Node](), set[Node](), list(wanted)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "get_attr" or not goes_on(node):
            continue
        found.add(node)
        waiting += node.all_input_nodes
    return found


def _is_recomputed(node: Node, mode: Recompute) -> bool:
    """Return whether the backward computes a node's value again, instead of saving it."""
    if node.op != "call_function" or is_random(node):
        return False
    if is_view(node) or node.target in (POSITIONS, REGATHERED):
        return True
    if node.target == operator.getitem:
        assert isinstance(node.args[0], Node)
        return _is_recomputed(node.args[0], mode)
    if node.target == AUTOGRAD_CALL:
        _, _, once, *_ = node.args
        return mode == "full" and not once
    if mode == "selective":
        kept = node.target in (EAGER_OPERATION, SCALED_PRODUCT) or _name_of(node) in KEPT_OPERATIONS
        return not kept
    return mode == "full"


def _name_of(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "")
