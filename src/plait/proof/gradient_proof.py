"""Proof, on a layer's autograd graph before training, that the tensor-parallel rules give right gradients.

Each value of the graph gets a state, from the leaves on:

    an input of the layer              whole      value and gradient are the same on every rank
    an input in parts                  part       value and gradient are this rank's positions of a sequence
    a parameter sharded over `tp`      inside     value or gradient is this rank's part
    a parameter with summed gradient   summed     the value is whole, the gradient this rank's part
    any other parameter                neutral    whole, unless it is used in a region
    any other parameter, frozen        constant   may be used anywhere

    operation                      reads                        gives
    copy, split                    whole, neutral, constant     inside
    reduce, gather                 inside                       whole
    gather_in                      part                         inside
    scatter_out                    inside                       part
    to_parts, to_whole             whole, part                  part, whole
    any other                      neutral                      neutral
                                   whole, whole and neutral     whole
                                   part, part and summed        part
                                   inside, inside and summed    inside
                                   any other combination        refused: a gradient would be one rank's
                                                                part, or be summed twice

A dropout's mask has to be that of the rank's part inside, and that of the whole tensor elsewhere.

Values without a gradient (integers, masks, detached tensors) are not in the graph, so the caller makes every
floating-point parameter and input require one. In a layer that passes, each parameter and input gets its
whole gradient, provided that operations inside a region treat each part (head, feature) by itself: a norm
over all features of a sharded value is not noticed, nor is an operation that mixes positions of a sequence in
parts. What an operation hides from autograd (the inside of a reentrant checkpoint) counts as one operation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from plait.errors import ModelError
from plait.tensor.autograd.paired_collectives import PairedCollective, collective_of
from plait.tensor.dropout import Dropout, dropout_of

ValueState: TypeAlias = Literal["inside", "part", "whole", "summed", "neutral", "constant"]
"""Whether a value and its gradient are whole or one rank's part: see the first table of the module.

An operation gives the first of these that it reads.
"""
ANY: frozenset[ValueState] = frozenset(get_args(ValueState))
ONLY_INSIDE: frozenset[ValueState] = frozenset({"inside"})
ONLY_NEUTRAL: frozenset[ValueState] = frozenset({"neutral"})


@dataclass(frozen=True)
class Claims:
    """What rules and layouts claim of a layer's parameters and inputs: whole, sharded over `tp`, or summed.

    Names are as in the model or as in the layer.
    """

    sharded: Collection[str] = ()
    """Parameters that are sharded over `tp`."""
    frozen: Collection[str] = ()
    """Whole parameters that do not require a gradient."""
    summed: Collection[str] = ()
    """Whole parameters whose gradient is summed over `tp`."""
    input_in_parts: bool = False
    """Whether the first input is this rank's part of a sequence."""
    output_in_parts: bool = False
    """Whether the first output is this rank's part of a sequence."""
    dropouts: Mapping[int, str] = field(default_factory=dict)
    """The names in the layer of its dropouts, by their `id`."""
    output_inside: bool = False
    """Whether the output has to be this rank's part, as logits partitioned by vocabulary are."""


def prove_layer(
    path: str,
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    parameters: Mapping[str, Tensor],
    claims: Claims,
) -> None:
    """Raise ModelError for a layer's first operation with a wrong gradient under tensor parallelism.

    `inputs` are the leaves that the layer at `path` received, `outputs` the tensors that it returned, with
    gradients enabled; on the meta device nothing is computed or sent. Follows the graph from `outputs` back
    to `inputs` and `parameters`, and leaves it unchanged. The error names the layer, the parameter and the
    rule to change.
    """
    held, given = list(inputs), list(outputs)
    leaves: dict[int, ValueState] = {id(tensor): "whole" for tensor in held}
    if claims.input_in_parts and held:
        leaves[id(held[0])] = "part"
    names = {id(tensor): "the layer's input" for tensor in held}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), name.removeprefix(f"{path}."))
        if name in claims.sharded:
            leaves[id(parameter)] = "inside"
        elif name in claims.frozen:
            leaves[id(parameter)] = "constant"
        elif name in claims.summed:
            leaves[id(parameter)] = "summed"
    results = [get_gradient_edge(output).node for output in given if output.requires_grad]
    proof = _Proof(path, leaves, names, claims.dropouts)
    for node in _inputs_first(results):
        proof.visit(node)
    if claims.output_inside:
        proof.require_inside(results)
    else:
        in_parts = results[:1] if claims.output_in_parts and given[0].requires_grad else []
        proof.require_outside(results[len(in_parts) :], not_allowed="part")
        proof.require_outside(in_parts, not_allowed="whole")


def _inputs(node: Node) -> list[Node]:
    """Return the nodes of an operation's inputs that require a gradient."""
    return [before for before, _ in node.next_functions if before is not None]


def _leaf(node: Node) -> Tensor | None:
    """Return the tensor of a leaf node; None for any other node."""
    variable = None if node.next_functions else getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) else None


def _operation(node: Node) -> str:
    """Return the name of a node's collective, or of its autograd operation: `Add` for `AddBackward0`."""
    return collective_of(node) or re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])


def _inputs_first(results: Iterable[Node]) -> Iterator[Node]:
    """Yield every node of the graph of `results` once, after its inputs. Iterative, since graphs are deep."""
    done, waiting = set[Node](), list(results)
    while waiting:
        node = waiting[-1]
        missing = [before for before in _inputs(node) if before not in done]
        waiting += reversed(missing)
        if not missing:
            waiting.pop()
            if node not in done:
                done.add(node)
                yield node


class _Proof:
    """Computes the `ValueState` of each node of a layer's autograd graph, and raises where none is valid."""

    def __init__(
        self,
        path: str,
        leaves: Mapping[int, ValueState],
        names: Mapping[int, str],
        dropouts: Mapping[int, str],
    ) -> None:
        self.path, self.leaves, self.names, self.dropouts = path, leaves, names, dropouts
        # By node, not by its id: torch drops a node's Python object when nothing refers to it.
        self.states: dict[Node, ValueState] = {}

    def visit(self, node: Node) -> None:
        """Derive the state (whole, partitioned, …) of an autograd node's value from those of its inputs."""
        leaf = _leaf(node)
        if leaf is not None:
            self.states[node] = self.leaves.get(id(leaf), "neutral")
            return
        read = {self.states[before] for before in _inputs(node)} - {"constant"}
        collective = collective_of(node)
        if collective is None:
            self.states[node] = self._after_operation(node, read)
        else:
            self.states[node] = self._after_collective(node, read, collective)
        if (dropout := dropout_of(node)) is not None:
            self._check_dropout(node, dropout)

    def _check_dropout(self, node: Node, dropout: Dropout) -> None:
        """Raise ModelError where a dropout's mask is for a different part than its input."""
        if dropout.in_parts and self.states[node] != "part":
            raise self._other_parts(node)
        inside = self.states[node] == "inside"
        name = f"the dropout {self.dropouts.get(id(dropout), '')}".strip()
        if inside and not dropout.in_region:
            raise self._error(
                f"{name} is inside a region, where each rank has another part, but its mask would be the "
                "same on every rank: give it the rule piece.along(d), d being the partitioned dim (-1 for "
                "features, 1 for heads in [rows, heads, ...])"
            )
        if not inside and dropout.in_region:
            raise self._error(
                f"{name} has the rule piece, but its input is whole on every rank, of which each rank would "
                "drop other elements: remove the rule"
            )

    def _after_collective(
        self, node: Node, read: set[ValueState], collective: PairedCollective
    ) -> ValueState:
        """Return the `ValueState` of a collective's output, given the states `read` of its inputs."""
        if collective in ("reduce", "gather", "scatter_out"):
            if read != ONLY_INSIDE:
                raise self._reads_whole(node, collective)
            return "part" if collective == "scatter_out" else "whole"
        if "inside" in read:
            raise self._enters_again(node)
        from_parts = collective in ("gather_in", "to_whole")
        if from_parts != ("part" in read) or "summed" in read:
            raise self._other_parts(node)
        if collective == "to_whole":
            return "whole"
        return "part" if collective == "to_parts" else "inside"

    def _after_operation(self, node: Node, read: set[ValueState]) -> ValueState:
        """Return the `ValueState` of a non-collective's output, given the states `read` of its inputs."""
        if "inside" in read and read & {"whole", "part"}:
            raise self._meets_whole(node)
        if read & {"inside", "part"} and "neutral" in read:
            raise self._whole_parameter(node)
        if "whole" in read and read & {"part", "summed"}:
            raise self._other_parts(node)
        order: tuple[ValueState, ...] = get_args(ValueState)
        return next((state for state in order if state in read), "constant")

    def require_outside(self, outputs: Iterable[Node], not_allowed: ValueState) -> None:
        """Raise ModelError if an output is partitioned, a summand, or in the state `not_allowed`."""
        for node in outputs:
            if self.states[node] in (not_allowed, "summed"):
                raise self._other_parts(node)
            if self.states[node] != "inside":
                continue
            name = self._nearest([node], ONLY_INSIDE)
            if name is None:
                raise self._error(
                    "the output of the entrance leaves the layer, though a region ends where its layer does: "
                    "remove the entrance of this layer"
                )
            raise self._error(
                f"its output is one rank's part, because {name} is sharded over tp: give the linear behind "
                "it the rule row, or give it no rule (a linear with the rule vocabulary has to be the "
                "model's last)"
            )

    def require_inside(self, outputs: Iterable[Node]) -> None:
        """Raise ModelError if one of the model's outputs is whole instead of partitioned."""
        if any(self.states[node] != "inside" for node in outputs):
            raise self._error(
                "its output is whole on every rank, though it has a linear with the rule vocabulary, whose "
                "partitioned logits the loss takes: make that linear the last, or give it the rule column"
            )

    def _enters_again(self, node: Node) -> ModelError:
        name = self._nearest(_inputs(node), ONLY_INSIDE)
        if name is None:
            return self._error(
                "a value enters a region twice, so that its gradient would be summed twice: keep one of the "
                "entrances"
            )
        return self._error(
            f"a value computed with {name}, which is sharded over tp, is one rank's part, but enters a "
            "region as if it were whole: give the linear that reads it the rule row and no entrance, or "
            "give one of the two no rule"
        )

    def _other_parts(self, node: Node) -> ModelError:
        origin = self._origin([node] if node in self.states else _inputs(node))
        return self._error(
            f"a value that is whole on every rank and a part of the sequence meet at {_operation(node)} "
            f"({origin}): let the layer work on each position by itself outside of its regions, or remove "
            "its rule sequence"
        )

    def _reads_whole(self, node: Node, collective: PairedCollective) -> ModelError:
        done = "gathers" if collective == "gather" else "sums"
        return self._error(
            f"a module {done} over tp a value that is whole on every rank ({self._origin(_inputs(node))}): "
            "give the linear whose output it reads the rule column, or give it no rule"
        )

    def _meets_whole(self, node: Node) -> ModelError:
        inside = self._read_in(node, "inside")
        origin = self._origin(self._read_in(node, "whole") + self._read_in(node, "part"))
        own = [before for before in inside if self._is_parameter(before)]
        name = self._nearest(own or inside, ONLY_INSIDE)
        if own:
            return self._error(
                f"{name} is sharded over tp but reads a value that has not entered a region ({origin}): give "
                f"the module whose output it reads the rule entrance (column, if {name} has the rule row), "
                "or use no entrances in this layer"
            )
        if name is None:
            return self._error(
                f"the output of the entrance also bypasses the region ({_operation(node)} combines it with "
                f"a whole value, {origin}): remove the entrance of this layer, so that each column linear "
                "copies its input by itself"
            )
        return self._error(
            f"a value computed with {name}, which is sharded over tp, is one rank's part, but "
            f"{_operation(node)} combines it with a whole value ({origin}): give a linear between them the "
            "rule row, or the module that makes the whole value the rule entrance"
        )

    def _whole_parameter(self, node: Node) -> ModelError:
        name = self._nearest(self._read_in(node, "neutral"), ONLY_NEUTRAL)
        return self._error(
            f"the whole parameter {name} is used inside a region, where each rank sees only its part of the "
            "gradient: give its module the rule replicated, or a rule that shards it, or remove the rules of "
            "this region"
        )

    def _is_parameter(self, node: Node) -> bool:
        """Return whether a value is a sharded parameter, possibly transposed or cast."""
        while len(before := _inputs(node)) == 1:
            node = before[0]
        return not before and self.states[node] == "inside"

    def _read_in(self, node: Node, state: ValueState) -> list[Node]:
        return [before for before in _inputs(node) if self.states[before] is state]

    def _origin(self, nodes: Iterable[Node]) -> str:
        return f"computed from {self._nearest(nodes, ANY)}"

    def _nearest(self, nodes: Iterable[Node], within: frozenset[ValueState]) -> str | None:
        """Return the name of the leaf nearest to `nodes` through nodes with states in `within`, or None."""
        levels = (
            [leaf for leaf in map(_leaf, level) if leaf is not None] for level in self._levels(nodes, within)
        )
        for leaves in levels:
            if leaves:
                return self._name(max(leaves + next(levels, []), key=self._specificity))
        return None

    def _levels(self, nodes: Iterable[Node], within: frozenset[ValueState]) -> Iterator[list[Node]]:
        """Yield `nodes`, then all their inputs, then the inputs' inputs, and so on; each node once."""
        seen, level = set[Node](), list(nodes)
        while level:
            level = [
                node for node in dict.fromkeys(level) if node not in seen and self.states[node] in within
            ]
            seen.update(level)
            yield level
            level = [before for node in level for before in _inputs(node)]

    def _specificity(self, leaf: Tensor) -> int:
        """Return how precisely a leaf's name locates a fault: weight above bias, parameter above input.

        A bias may be one step nearer to the fault than its weight, which is transposed.
        """
        return -1 if self.leaves.get(id(leaf)) in ("whole", "part") else leaf.dim()

    def _name(self, leaf: Tensor) -> str:
        return self.names.get(id(leaf), f"a tensor of shape {list(leaf.shape)} that is no parameter")

    def _error(self, fault: str) -> ModelError:
        return ModelError(f"{self.path or 'the model'}: {fault}.")
