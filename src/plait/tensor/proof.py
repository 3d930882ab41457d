"""Whether the rules of tensor parallelism fit a layer: proved on its autograd graph, before anything runs.

Every value of the graph is given a state, from the leaves on:

    an input of the layer          whole      the same on every rank, and so is its gradient
    one that comes in pieces       piece      this rank's positions of a sequence, and so is its gradient
    a parameter cut over `tp`      inside     this rank's own, or with this rank's part of the gradient
    one whose gradient is summed   summed     whole, with this rank's part of the gradient
    any other parameter            neutral    whole as well, as long as nothing else is done with it
    the same, frozen               constant   no matter where it is used

    operation                      reads                       gives
    copy, split                    whole, neutral, constant    inside
    reduce, gather                 inside                      whole
    gather_in                      piece                       inside
    scatter_out                    inside                      piece
    to_pieces, to_whole            whole, or a piece           a piece, or whole
    any other                      neutral                     neutral
                                   whole, or both of these     whole
                                   piece, or it and summed     piece
                                   inside, or it and summed    inside
                                   any others together         refused: a gradient would be one rank's part,
                                                               or be summed once too often

A dropout draws for its rank's piece inside, and for the whole elsewhere.

What needs no gradient is not in the graph: whole numbers, masks, what is detached; so the caller has every
parameter and input of floating-point numbers ask for one. A layer that passes gives each its whole gradient,
if what is done inside a region is done to each part (head, feature) by itself: a norm over all features of a
cut value is not seen, nor is what mixes the positions of a sequence that is in pieces. What an operation
hides from autograd (the inside of a reentrant checkpoint) is taken as one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from plait.autograd.dropout import Dropout, dropout_of
from plait.autograd.paired_collectives import PairedCollective, collective_of
from plait.errors import ModelError


class State(Enum):
    """How a value and its gradient stand to those of the other ranks of `tp`; see the module."""

    NEUTRAL = "neutral"
    WHOLE = "whole"
    INSIDE = "inside"
    PIECE = "piece"
    SUMMED = "summed"
    CONSTANT = "constant"


ANY = frozenset(State)
ONLY_INSIDE = frozenset({State.INSIDE})
ONLY_NEUTRAL = frozenset({State.NEUTRAL})


@dataclass(frozen=True)
class Claims:
    """What the rules say about a layer. Parameters go by their names in the model or in the layer."""

    cut: Collection[str] = ()
    """Those that the layout shards over `tp`."""
    frozen: Collection[str] = ()
    """Of whole parameters those whose gradient nobody wants."""
    summed: Collection[str] = ()
    """Of whole parameters those whose gradient is summed over `tp`."""
    begins_in_pieces: bool = False
    """Whether the first tensor comes as this rank's piece of a sequence."""
    ends_in_pieces: bool = False
    """Whether the first tensor leaves as one."""
    dropouts: Mapping[int, str] = field(default_factory=dict)
    """The names in the layer of its dropouts, by their `id`."""
    ends_inside: bool = False
    """Whether the output has to be this rank's own, as logits cut by vocabulary are."""


def prove_layer(
    path: str,
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    parameters: Mapping[str, Tensor],
    claims: Claims,
) -> None:
    """Follow a layer's autograd graph from `outputs` back to `inputs` and `parameters`.

    `inputs` are the leaves that the layer at `path` was given, `outputs` the tensors that it gave, with
    gradients enabled; on the meta device nothing is computed or sent. The graph stays as it is.

    ModelError for the first operation at which a gradient would be wrong: the layer, the parameter and the
    rule to change.
    """
    held = list(inputs)
    leaves = {id(tensor): State.WHOLE for tensor in held}
    if claims.begins_in_pieces and held:
        leaves[id(held[0])] = State.PIECE
    names = {id(tensor): "the layer's input" for tensor in held}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), name.removeprefix(f"{path}."))
        if name in claims.cut:
            leaves[id(parameter)] = State.INSIDE
        elif name in claims.frozen:
            leaves[id(parameter)] = State.CONSTANT
        elif name in claims.summed:
            leaves[id(parameter)] = State.SUMMED
    given = list(outputs)
    ends = [get_gradient_edge(output).node for output in given if output.requires_grad]
    proof = _Proof(path, leaves, names, claims.dropouts)
    for node in _in_order(ends):
        proof.step(node)
    if claims.ends_inside:
        proof.end_inside(ends)
    else:
        in_pieces = ends[:1] if claims.ends_in_pieces and given[0].requires_grad else []
        proof.end(ends[len(in_pieces) :], in_pieces)


def _read(node: Node) -> list[Node]:
    """The nodes whose values an operation read; those without a gradient have none."""
    return [before for before, _ in node.next_functions if before is not None]


def _leaf(node: Node) -> Tensor | None:
    """The leaf tensor that a node stands for, if it is the start of a graph."""
    variable = None if node.next_functions else getattr(node, "variable", None)
    return variable if isinstance(variable, Tensor) else None


def _leaves(nodes: Iterable[Node]) -> list[Tensor]:
    return [leaf for node in nodes if (leaf := _leaf(node)) is not None]


def _operation(node: Node) -> str:
    """The operation's name as autograd gives it: `Add` for `AddBackward0`."""
    return re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])


def _in_order(ends: Iterable[Node]) -> Iterator[Node]:
    """Every node behind `ends` once, after those that it reads, the first of these first.

    Not recursive: graphs are deep.
    """
    done, waiting = set[Node](), list(ends)
    while waiting:
        node = waiting[-1]
        missing = [before for before in _read(node) if before not in done]
        waiting += reversed(missing)
        if not missing:
            waiting.pop()
            if node not in done:
                done.add(node)
                yield node


class _Proof:
    """The states found so far, and the sentences for what cannot be given one."""

    def __init__(
        self, path: str, leaves: Mapping[int, State], names: Mapping[int, str], dropouts: Mapping[int, str]
    ) -> None:
        self.path, self.leaves, self.names, self.dropouts = path, leaves, names, dropouts
        # By node: torch keeps one Python object a node only while somebody holds it.
        self.states: dict[Node, State] = {}

    def step(self, node: Node) -> None:
        """Give `node` its state; the nodes that it reads have theirs."""
        leaf = _leaf(node)
        if leaf is not None:
            self.states[node] = self.leaves.get(id(leaf), State.NEUTRAL)
            return
        read = {self.states[before] for before in _read(node)} - {State.CONSTANT}
        collective = collective_of(node)
        self.states[node] = (
            self._other(node, read) if collective is None else self._turn(node, read, collective)
        )
        dropout = dropout_of(node)
        if dropout is not None:
            self._draws_for_it(node, dropout)

    def _draws_for_it(self, node: Node, dropout: Dropout) -> None:
        """ModelError where a dropout draws for another piece than it is given."""
        if dropout.in_pieces and self.states[node] is not State.PIECE:
            raise self._other_pieces(node)
        inside = self.states[node] is State.INSIDE
        name = f"the dropout {self.dropouts.get(id(dropout), '')}".strip()
        if inside and not dropout.in_region:
            raise self._error(
                f"{name} stands inside a region, where each rank has another part, but would draw the same "
                "for all: give it the rule piece.along(d), d being the dim that is cut (-1 for features, 1 "
                "for heads in [rows, heads, ...])"
            )
        if not inside and dropout.in_region:
            raise self._error(
                f"{name} has the rule piece, but what it is given is whole on every rank, and each would "
                "drop other elements of it: take the rule away"
            )

    def _turn(self, node: Node, read: set[State], collective: PairedCollective) -> State:
        """What a collective gives."""
        if collective in ("reduce", "gather", "scatter_out"):
            if read != ONLY_INSIDE:
                raise self._reads_whole(node, collective)
            return State.PIECE if collective == "scatter_out" else State.WHOLE
        if State.INSIDE in read:
            raise self._enters_again(node)
        if (State.PIECE in read) != (collective in ("gather_in", "to_whole")) or State.SUMMED in read:
            raise self._other_pieces(node)
        return {"to_whole": State.WHOLE, "to_pieces": State.PIECE}.get(collective, State.INSIDE)

    def _other(self, node: Node, read: set[State]) -> State:
        """What any other operation gives."""
        if State.INSIDE in read and read & {State.WHOLE, State.PIECE}:
            raise self._meets_whole(node)
        if read & {State.INSIDE, State.PIECE} and State.NEUTRAL in read:
            raise self._whole_parameter(node)
        if State.WHOLE in read and read & {State.PIECE, State.SUMMED}:
            raise self._other_pieces(node)
        order = (State.INSIDE, State.PIECE, State.WHOLE, State.SUMMED, State.NEUTRAL)
        return next((state for state in order if state in read), State.CONSTANT)

    def end(self, whole: Iterable[Node], in_pieces: Iterable[Node] = ()) -> None:
        """ModelError if one of these, the layer's outputs, is inside a region, or in pieces or not."""
        self._end(whole, State.PIECE)
        self._end(in_pieces, State.WHOLE)

    def _end(self, nodes: Iterable[Node], wrong: State) -> None:
        for node in nodes:
            if self.states[node] in (wrong, State.SUMMED):
                raise self._other_pieces(node)
            if self.states[node] is not State.INSIDE:
                continue
            name = self._nearest([node], ONLY_INSIDE)
            if name is None:
                raise self._error(
                    "the output of the entrance leaves the layer, though a region ends where its layer does: "
                    "remove the entrance of this layer"
                )
            raise self._error(
                f"its output is one rank's part, for {name} is cut over tp: give the linear that reads what "
                "comes of it the rule row, or leave it uncut (a linear with the rule vocabulary may only "
                "stand at the model's end)"
            )

    def end_inside(self, ends: Iterable[Node]) -> None:
        """ModelError if one of these, the model's outputs, is whole."""
        if any(self.states[node] is not State.INSIDE for node in ends):
            raise self._error(
                "its output is whole on every rank, though it holds a linear with the rule vocabulary, whose "
                "logits in pieces the loss takes: let that linear come last, or give it the rule column"
            )

    def _enters_again(self, node: Node) -> ModelError:
        name = self._nearest(_read(node), ONLY_INSIDE)
        if name is None:
            return self._error(
                "a value enters a region twice, so that its gradient would be summed twice: keep one of the "
                "entrances"
            )
        return self._error(
            f"what comes of {name}, cut over tp, is one rank's part, but enters a region as if it were "
            "whole: give the linear that reads it the rule row and no entrance, or leave one of the two uncut"
        )

    def _other_pieces(self, node: Node) -> ModelError:
        origin = self._origin([node] if node in self.states else _read(node))
        return self._error(
            f"what is whole on every rank and what is in pieces of the sequence meet at {_operation(node)} "
            f"({origin}): let the layer work on each position by itself outside of its regions, or take "
            "the rule sequence off it"
        )

    def _reads_whole(self, node: Node, collective: PairedCollective) -> ModelError:
        done = "gathers" if collective == "gather" else "sums"
        return self._error(
            f"a module {done} over tp what is whole on every rank already ({self._origin(_read(node))}): "
            "give the linear whose output it reads the rule column, or leave it uncut"
        )

    def _meets_whole(self, node: Node) -> ModelError:
        inside = self._read_in(node, State.INSIDE)
        origin = self._origin(self._read_in(node, State.WHOLE) + self._read_in(node, State.PIECE))
        own = [before for before in inside if self._is_parameter(before)]
        name = self._nearest(own or inside, ONLY_INSIDE)
        if own:
            return self._error(
                f"{name} is cut over tp but reads a value that has not entered a region ({origin}): give the "
                "module whose output it reads the rule entrance (column, if it is cut by row), or leave "
                "entrances out of this layer"
            )
        if name is None:
            return self._error(
                f"the output of the entrance also goes around the region ({_operation(node)} joins it with "
                f"a whole value, {origin}): remove the entrance of this layer, so that each column linear "
                "copies its input by itself"
            )
        return self._error(
            f"what comes of {name}, cut over tp, is one rank's part, but {_operation(node)} joins it with a "
            f"whole value ({origin}): give the linear that reads it before the rule row, or the module that "
            "makes the whole value the rule entrance"
        )

    def _whole_parameter(self, node: Node) -> ModelError:
        name = self._nearest(self._read_in(node, State.NEUTRAL), ONLY_NEUTRAL)
        return self._error(
            f"the whole parameter {name} is used inside a region, where each rank sees only its part of the "
            "gradient: move it out, give its module a rule that cuts it, or leave this region uncut"
        )

    def _is_parameter(self, node: Node) -> bool:
        """Whether a value is a cut parameter, perhaps transposed or converted: each step reads one value."""
        while len(before := _read(node)) == 1:
            node = before[0]
        return not before and self.states[node] is State.INSIDE

    def _read_in(self, node: Node, state: State) -> list[Node]:
        return [before for before in _read(node) if self.states[before] is state]

    def _origin(self, nodes: Iterable[Node]) -> str:
        return f"nearest behind it: {self._nearest(nodes, ANY)}"

    def _nearest(self, nodes: Iterable[Node], within: frozenset[State]) -> str | None:
        """The name of the nearest leaf behind `nodes` that is reached through these states only."""
        levels = map(_leaves, self._levels(nodes, within))
        for leaves in levels:
            if leaves:
                return self._name(max(leaves + next(levels, []), key=self._says))
        return None

    def _levels(self, nodes: Iterable[Node], within: frozenset[State]) -> Iterator[list[Node]]:
        """`nodes`, what they read, what that reads, and so on; no node twice."""
        seen, level = set[Node](), list(nodes)
        while level:
            level = [
                node for node in dict.fromkeys(level) if node not in seen and self.states[node] in within
            ]
            seen.update(level)
            yield level
            level = [before for node in level for before in _read(node)]

    def _says(self, leaf: Tensor) -> int:
        """How much a leaf's name tells. A weight says more than the bias of the same linear, which stands one
        step (a transposition) nearer, and each more than an input."""
        return -1 if self.leaves.get(id(leaf)) in (State.WHOLE, State.PIECE) else leaf.dim()

    def _name(self, leaf: Tensor) -> str:
        return self.names.get(id(leaf), f"a tensor of shape {list(leaf.shape)} that is no parameter")

    def _error(self, fault: str) -> ModelError:
        return ModelError(f"{self.path or 'the model'}: {fault}.")
