"""Part of a joint graph as the operations that run it: graphs, and what runs eagerly between them.

Each node runs as early as the operations between graphs allow: a graph holds all that needs no result of a
later one. So each rank runs the same collectives in the same order, and weight gradients are in the queue
before a collective that overlaps them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import Graph, GraphModule, Node

from plait.engine.compilation.torch_compiler import example_of, with_generated_code
from plait.engine.compilation.weight_gradients import Operand, WeightTerm, WeightTerms
from plait.tensor.autograd.eager_operations import (
    AUTOGRAD_CALL,
    AUTOGRAD_CALL_BACKWARD,
    DROPOUT_MASK,
    EAGER_OPERATION,
    POSITIONS,
    REGATHERED,
    AutogradCall,
    LayerTrace,
)
from plait.tensor.autograd.kept_results import RECOMPUTED_RUN, Tensors
from plait.tensor.autograd.regather import Gather, Regathered
from plait.tensor.autograd.torch_calls import run_backward
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.dropout import Dropout
from plait.tensor.running_sequence import running_sequence

T = TypeVar("T")
Values = list[Any]
"""By slot a tensor, `Regathered` or `AutogradRun`; None before it is computed, and after its last use."""


@dataclass(eq=False)
class LayerCall:
    """One call of a layer: gives its operations modules and dropout masks, and queues weight gradients."""

    queue: WeightGradientQueue
    parameters: Sequence[nn.Parameter]
    modules: Mapping[str, nn.Module]
    """The modules in the layer, by name."""
    _makers: dict[int, Callable[[], Tensor]] = field(default_factory=dict, init=False)
    """Of masks, by number: they make the same mask again."""
    _repeated: dict[int, RepeatedCall] = field(default_factory=dict, init=False)
    """Autograd calls that the backward repeats, by number."""

    def mask(self, number: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the mask of call `number` of the dropout `name`; the same one if asked for again."""
        if number not in self._makers:
            dropout = self.modules[name]
            assert isinstance(dropout, Dropout)
            self._makers[number] = dropout.next_mask_maker(shape, device)
        return self._makers[number]()

    def repeated(self, number: int) -> RepeatedCall:
        """Return the state of an autograd call that the backward repeats."""
        return self._repeated.setdefault(number, RepeatedCall())

    def regathered(self, part: Tensor, gather: Gather) -> Regathered:
        """Return a tensor that is gathered again on first use, or now if weight gradients follow at once."""
        found = self.queue.gathered.again(part, gather)
        if self.queue.mode.overlaps:
            found.start()
        return found

    def add_gradients(self, parameters: Sequence[nn.Parameter], backward: Callable[[], None]) -> None:
        """Run a `backward`, and add the gradients of `parameters` that it computes to their buffers."""
        queue = self.queue
        held = queue.set_aside(parameters)
        try:
            backward()
        finally:
            learning, found = queue.put_back(held)
        if queue.adds_late:
            queue.add(partial(queue.add_found, learning, found))
        else:
            queue.add_found(learning, found)

    def defer(self, terms: WeightTerms, operands: Sequence[Tensor | Regathered]) -> None:
        """Queue the computation of `terms`, parts of weight gradients, from `operands`.

        An output gradient that was gathered is gathered again, unless the weight gradients follow at once.
        """
        if self.queue.gathered.is_used:
            operands = [self._later(operand) for operand in operands]
        self.queue.add(partial(terms.add_to, self.queue, self.parameters, operands))

    def _later(self, operand: Tensor | Regathered) -> Tensor | Regathered:
        if isinstance(operand, Regathered) or self.queue.mode.overlaps:
            return operand
        source = self.queue.gathered.of(operand)
        return operand if source is None else self.queue.gathered.again(*source)


@dataclass
class LayerOperation:
    """One operation of a compiled layer: a compiled graph, or what runs eagerly around graphs."""

    arguments: Sequence[int]
    """The slots whose values it is given."""
    run: Callable[[list[Any], Values, LayerCall], None]
    """Computes from the values of `arguments`, and stores the results among the values of all slots."""
    done: Sequence[int] = ()
    """The arguments that no later operation reads, whose references are dropped, so that graphs free them."""


@dataclass(frozen=True)
class LayerOperations:
    """The operations of a compiled layer's forward or backward, in order, which share a list of values."""

    operations: Sequence[LayerOperation]
    slots: int
    results: Sequence[int]
    """A slot beyond the last: no result."""

    def run(self, values: Values, call: LayerCall) -> list[Any]:
        """Run the operations on the arguments `values`, a list that is emptied; return the results."""
        values += [None] * (self.slots + 1 - len(values))
        for operation in self.operations:
            taken = list(map(values.__getitem__, operation.arguments))
            for slot in operation.done:
                values[slot] = None
            operation.run(taken, values, call)
        return list(map(values.__getitem__, self.results))


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
    """Return the operations that compute `results` by running `nodes`, given the values of nodes `given`."""
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
            between = [node for node in members if node.target != operator.getitem]
            operations += [_between(node, slots, trace, {*nodes, *outside}, outside) for node in between]
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
    """Return when each node can run: even levels are graphs, odd ones what runs between them."""
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
        return _autograd_call(node, slots, trace)
    if node.target == AUTOGRAD_CALL_BACKWARD:
        return _autograd_call_backward(node, slots)
    argument: Any = node.args[0]
    copies = node.args[1] in trace.writes and _is_read_elsewhere(argument, node, readers, outside)
    return _collective(node, slots, trace, copies=copies)


def _dropout_mask(node: Node, slots: Mapping[Node, int], trace: LayerTrace) -> LayerOperation:
    """Return the operation that computes the mask of a dropout, before the first graph."""
    number, shape, device = _arguments(node)
    name, slot = trace.masks[number], slots[node]

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        values[slot] = call.mask(number, name, shape, device)

    return LayerOperation((), run)


def _positions(node: Node, slots: Mapping[Node, int]) -> LayerOperation:
    """Return the operation that stores the positions of the running sequence, before the first graph."""
    _, device = _arguments(node)
    slot = slots[node]

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        sequence = running_sequence()
        assert sequence is not None
        values[slot] = sequence.positions(device)

    return LayerOperation((), run)


def _regather(node: Node, slots: Mapping[Node, int], trace: LayerTrace) -> LayerOperation:
    """Return the operation that prepares to repeat an all-gather of the forward, for a weight gradient."""
    part, number = _arguments(node)
    gather, slot = trace.gathers[number], slots[node]

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        values[slot] = call.regathered(given[0], gather)

    return LayerOperation([slots[part]], run)


def _collective(node: Node, slots: Mapping[Node, int], trace: LayerTrace, *, copies: bool) -> LayerOperation:
    """Return the operation that runs a collective between two graphs; `copies`: on a copy of its argument."""
    argument, number, _ = _arguments(node)
    collective, result = trace.operations[number], _Results([slots[node]], example_of(node).stride())

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


class RepeatedCall:
    """The first run of an autograd call, and then the second one, in the backward, which decides the same.

    Of the first run nothing else is kept. See `plait.tensor.autograd.kept_results`.
    """

    has_results = False

    def __init__(self) -> None:
        self.is_second = False
        self.output_is_read = True
        self._decisions: list[Any] = []

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return `compute()`."""
        return compute()

    def with_operations(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`."""
        return compute()

    def once(self, compute: Callable[[], T]) -> T:
        """Return `compute()`; in the second run what the first one's next `once` returned."""
        if not self.is_second:
            self._decisions.append(compute())
            return self._decisions[-1]  # type: ignore[no-any-return]
        return self._decisions.pop(0)  # type: ignore[no-any-return]


@dataclass
class AutogradRun:
    """What the backward of an autograd call needs."""

    outputs: Sequence[GradientEdge]
    """The nodes of autograd's graph of the results with a gradient; without the results' memory."""
    gradients: list[Tensor]
    """Of the inputs that need one, once the backward has run."""
    parameters: Sequence[nn.Parameter]
    """Those of the call's module."""


def _autograd_call(node: Node, slots: Mapping[Node, int], trace: LayerTrace) -> LayerOperation:
    """Return the operation that computes a call, and keeps its autograd graph if a backward reads it."""
    inputs, number, once, shapes, *_ = _arguments(node)
    recorded: AutogradCall = trace.calls[number]
    *results, saved = (_results(node, index, slots) for index in range(len(shapes)))
    output_is_read = any(one.slots for one in results)

    def compute(module: nn.Module | None, given: Sequence[Tensor], call: LayerCall) -> Sequence[Tensor]:
        if once:
            return recorded.compute(module, *given)
        run = call.repeated(number)
        run.output_is_read = output_is_read
        token = RECOMPUTED_RUN.set(run)
        try:
            return recorded.compute(module, *given)
        finally:
            RECOMPUTED_RUN.reset(token)
            run.is_second = True

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        module = None if recorded.module is None else call.modules[recorded.module]
        if not saved.slots:
            made = compute(module, given, call)
        else:
            with torch.enable_grad():
                given, gradients = _with_gradients(given, recorded.learns)
                made = compute(module, given, call)
            edges = [get_gradient_edge(one) for one in made if one.is_floating_point()]
            parameters = () if module is None else tuple(module.parameters())
            for slot in saved.slots:
                values[slot] = AutogradRun(edges, gradients, parameters)
        for one, result in zip(made, results, strict=True):
            result.store(values, one.detach())

    return LayerOperation([slots[one] for one in inputs], run)


def _autograd_call_backward(node: Node, slots: Mapping[Node, int]) -> LayerOperation:
    """Return the operation that computes the gradients of a call's inputs, and adds those of parameters."""
    gradients, saved, inputs, *_ = _arguments(node)
    results = [_results(node, index, slots) for index in range(inputs)]

    def run(given: list[Any], values: Values, call: LayerCall) -> None:
        *gradients, made = given
        call.add_gradients(made.parameters, partial(run_backward, made.outputs, gradients))
        for gradient, result in zip(made.gradients, results, strict=True):
            result.store(values, gradient)

    return LayerOperation([slots[one] for one in (*gradients, saved)], run)


def _with_gradients(tensors: Sequence[Tensor], learns: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
    """Return `tensors`, as views that need a gradient if they learn; and a list that is to hold these."""
    gradients: list[Tensor] = []
    learning = [one for one, learn in zip(tensors, learns, strict=True) if learn]
    if not learning:
        return list(tensors), gradients
    anchor = learning[0].new_empty(0).requires_grad_()
    views = iter(_Given.apply(anchor, gradients, *learning))  # type: ignore[no-untyped-call]
    return [next(views) if learn else one for one, learn in zip(tensors, learns, strict=True)], gradients


class _Given(torch.autograd.Function):
    """Autograd function that returns views of tensors, and appends their gradients to a list in its backward.

    Leaves with `.grad` would stay in memory until then, also those that the call does not save.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradients: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        return tuple(one.view_as(one) for one in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.gradients += gradients
        return (None,) * (2 + len(gradients))


@dataclass(frozen=True)
class _Results:
    """The slots that store one result of an operation, and the strides that later graphs expect of it."""

    slots: Sequence[int]
    stride: tuple[int, ...]

    def store(self, values: Values, tensor: Tensor) -> None:
        """Store a result among `values`; a copy of it if its strides differ from the trace's."""
        if self.slots:
            made = tensor if tensor.stride() == self.stride else with_strides(tensor, self.stride)
            for slot in self.slots:
                values[slot] = made


def with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy of `tensor` with the strides `stride`."""
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _results(node: Node, number: int, slots: Mapping[Node, int]) -> _Results:
    """Return where one result of a node that has several is stored."""
    users = [user for user in node.users if user.args[1] == number]
    found = [slots[user] for user in users if user in slots]
    return _Results(found, example_of(users[0]).stride() if found else ())


def _arguments(node: Node) -> tuple[Any, ...]:
    return node.args
