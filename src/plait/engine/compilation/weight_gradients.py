"""Weight gradients taken out of a layer's backward, as summands that the queue adds to parameters' buffers.

A gradient that is a matrix product, through transposes and views, becomes its two operands; one that is the
scatter of an embedding becomes the rows and their indexes. Sums of them are taken apart.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from plait.engine.compilation.torch_compiler import example_of, is_view
from plait.tensor.autograd.deferred_weight_gradients import add_product, add_rows
from plait.tensor.autograd.eager_operations import AUTOGRAD_CALL_BACKWARD
from plait.tensor.autograd.float8_linear import add_float8_product
from plait.tensor.autograd.regathered_activations import Regathered
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.float8.cast import ScaledMatrix
from plait.tensor.float8.scaled_product import SCALED_PRODUCT

_ATEN = torch.ops.aten
View = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""An operation that returns a view of its first argument, and the other arguments."""

_TRANSPOSE: View = (Tensor.t, ())
_METHODS: Mapping[object, Callable[..., Tensor]] = MappingProxyType(
    {_ATEN.t.default: Tensor.t, _ATEN.view.default: Tensor.view, _ATEN.transpose.int: Tensor.transpose}
)
"""What does the same as an operator of a graph, with less work in Python."""


@dataclass(frozen=True)
class StridedView:
    """Shape and strides of a view (as of `as_strided`), and the strides of the tensor that it is of."""

    base: Sequence[int]
    """The strides of the tensor."""
    shape: Sequence[int]
    stride: Sequence[int]


@dataclass(frozen=True)
class Operand:
    """A graph node's value, seen through a chain of views (such as reshape, transpose)."""

    base: Node
    views: tuple[View, ...]

    @staticmethod
    def of(node: Node) -> Operand:
        """Return `node` as an operand: the nearest earlier node that is no view, and the views after it."""
        views: list[View] = []
        while is_view(node) and not node.kwargs and isinstance(node.args[0], Node):
            operation: Any = _METHODS.get(node.target, node.target)
            views.insert(0, (operation, tuple(node.args[1:])))
            node = node.args[0]
        return Operand(node, tuple(views))

    def in_one_step(self) -> StridedView | None:
        """Return several views of an operand's base as a single one; None if that is not possible.

        Several views cost the host as much as a small product.
        """
        base = example_of(self.base)
        if len(self.views) < 2:
            return None
        made = viewed(base, self.views)
        is_whole = made.storage_offset() == base.storage_offset()
        return StridedView(base.stride(), made.shape, made.stride()) if is_whole else None

    @property
    def transposed(self) -> Operand:
        """The operand, a matrix, with its dims swapped."""
        if self.views and self.views[-1] == _TRANSPOSE:
            return Operand(self.base, self.views[:-1])
        return Operand(self.base, (*self.views, _TRANSPOSE))


@dataclass(frozen=True)
class WeightTerm:
    """A summand of a parameter's gradient that the backward leaves to the weight gradient queue."""

    parameter: int
    """The number of the parameter in the layer."""
    operands: tuple[Operand, ...]
    add: Callable[..., None]
    """Adds the summand to a buffer, given that, the operands, and whether it is the first: then writes it."""


@dataclass(frozen=True)
class WeightTerms:
    """Summands of weight gradients that are computed together; views of the same operand are made once."""

    terms: Sequence[tuple[WeightTerm, Sequence[int]]]
    """Each with the numbers of its operands."""
    operands: Sequence[Operand]
    direct: Sequence[StridedView | None]
    """Of each operand, see `Operand.in_one_step`."""

    @staticmethod
    def of(terms: Sequence[WeightTerm]) -> WeightTerms:
        """Return `terms` with a list of their operands, in which each occurs once."""
        operands: list[Operand] = []
        for term in terms:
            operands += [one for one in term.operands if one not in operands]
        numbered = [(one, list(map(operands.index, one.operands))) for one in terms]
        return WeightTerms(numbered, operands, [one.in_one_step() for one in operands])

    def add_to(
        self, queue: WeightGradientQueue, parameters: Sequence[Tensor], values: Sequence[Tensor | Regathered]
    ) -> None:
        """Compute these summands from `values`, and add them to the gradients of `parameters`.

        Communication: gathers what is to be gathered again.
        """
        found = []
        for operand, direct, value in zip(self.operands, self.direct, values, strict=True):
            tensor = value.whole() if isinstance(value, Regathered) else value
            if direct is not None and tensor is value and tensor.stride() == direct.base:
                tensor = tensor.as_strided(direct.shape, direct.stride)
            else:
                for operation, arguments in operand.views:
                    tensor = operation(tensor, *arguments)
            found.append(tensor)
        for term, numbers in self.terms:
            weight = parameters[term.parameter]
            first = bool(queue.unwritten) and queue.begins((weight,))
            term.add(queue.buffer_of(weight), *map(found.__getitem__, numbers), first)


def viewed(tensor: Tensor, views: Sequence[View]) -> Tensor:
    """Return `tensor` after the operations `views`, each a view of the one before."""
    for operation, arguments in views:
        tensor = operation(tensor, *arguments)
    return tensor


def terms_of(gradient: Node, parameter: Node, number: int) -> tuple[list[WeightTerm], list[Node]]:
    """Return the summands of a parameter's gradient that can be deferred, and the nodes of the others.

    A summand that an autograd call adds to the buffer by itself is neither.
    """
    term = _product(gradient, parameter, number) or _scatter(gradient, number)
    term = term or _float8_product(gradient, number)
    if term is not None:
        return [term], []
    if _is_added_by_call(gradient):
        return [], []
    if gradient.target == _ATEN.add.Tensor and len(gradient.users) == 1 and not gradient.kwargs:
        terms, others = [], []
        for summand in gradient.args:
            assert isinstance(summand, Node)
            more, rest = terms_of(summand, parameter, number)
            terms += more
            others += rest
        is_divided = others != list(gradient.args)
        if is_divided and all(example_of(one).shape == example_of(gradient).shape for one in others):
            return terms, others
    return [], [gradient]


def _is_added_by_call(gradient: Node) -> bool:
    """Return whether an autograd call adds a parameter's gradient to the buffer by itself."""
    if gradient.target != operator.getitem:
        return False
    call, number = gradient.args
    assert isinstance(call, Node)
    return call.target == AUTOGRAD_CALL_BACKWARD and bool(number >= call.args[2])  # type: ignore[operator]


def _product(gradient: Node, parameter: Node, number: int) -> WeightTerm | None:
    """Return the term of a matrix product that reaches the gradient through views only."""
    views: list[View] = []  # of the buffer: from the gradient's shape to the product's
    node = gradient
    while is_view(node) and isinstance(node.args[0], Node) and len(node.users) == 1:
        inner = node.args[0]
        shape = tuple(example_of(inner).shape)
        if _is_transpose(node, len(shape)):
            views.append(_TRANSPOSE)
        elif node.target in (_ATEN.view.default, _ATEN.detach.default):
            views.append((Tensor.view, (shape,)))
        else:
            return None
        node = inner
    if node.target != _ATEN.mm.default or len(node.users) != 1:
        return None
    a, b = (Operand.of(operand) for operand in node.args if isinstance(operand, Node))
    while views and views[-1] == _TRANSPOSE:  # of the product: that of the transposed operands, swapped
        views.pop()
        a, b = b.transposed, a.transposed
    try:
        viewed(example_of(parameter), views)
    except RuntimeError:  # a buffer with the parameter's strides has no such view
        return None
    return WeightTerm(number, (a, b), partial(_add_product, tuple(views)) if views else add_product)


def _is_transpose(node: Node, dims: int) -> bool:
    if dims != 2:
        return False
    swapped = {(0, 1), (1, 0), (-2, -1), (-1, -2), (0, -1), (-1, 0)}
    return (
        node.target == _ATEN.t.default
        or (node.target == _ATEN.transpose.int and tuple(node.args[1:]) in swapped)
        or (node.target == _ATEN.permute.default and list(node.args[1]) in ([1, 0], [-1, -2]))  # type: ignore[arg-type]
    )


def _add_product(views: Sequence[View], buffer: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    add_product(viewed(buffer, views), a, b, first)


def _float8_product(gradient: Node, number: int) -> WeightTerm | None:
    """Return a weight gradient that a graph computes by one float8 product as a `WeightTerm`, else None."""
    node, is_transposed = gradient, False
    while is_view(node) and len(node.users) == 1 and _is_transpose(node, example_of(node).dim()):
        (node,), is_transposed = node.all_input_nodes, not is_transposed
    if node.target != SCALED_PRODUCT or len(node.users) != 1:
        return None
    operands = tuple(Operand.of(one) for one in node.args if isinstance(one, Node))
    return WeightTerm(number, operands, partial(_add_float8_product, is_transposed))


def _add_float8_product(
    is_transposed: bool,
    buffer: Tensor,
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    first: bool,
) -> None:
    total = buffer.t() if is_transposed else buffer
    add_float8_product(total, ScaledMatrix(a, scale_a), ScaledMatrix(b, scale_b), first)


def _scatter(gradient: Node, number: int) -> WeightTerm | None:
    """Return the term of an embedding's gradient."""
    if gradient.target != _ATEN.embedding_dense_backward.default or len(gradient.users) != 1:
        return None
    rows, tokens, _, padding, scales = gradient.args
    if scales:
        return None
    assert isinstance(rows, Node)
    assert isinstance(tokens, Node)
    assert isinstance(padding, int)
    operands = Operand.of(rows), Operand.of(tokens)
    return WeightTerm(number, operands, partial(_add_rows, None if padding == -1 else padding))


def _add_rows(padding: int | None, buffer: Tensor, rows: Tensor, tokens: Tensor, first: bool) -> None:
    if first:
        buffer.zero_()
    add_rows(buffer, tokens, rows, padding)
