"""Exchanges of tokens between the ranks that hold a layer's experts, as programs run them.

    F       all-gather of counts, which the host reads; all-to-all of tokens; all-to-all of results
    I, B    all-to-all of the results' gradients; all-to-all of the tokens' gradients
    W       none

They are no instructions of their own: a layer exchanges tokens while it runs. All ranks of a group have to
run the same layers in the same order, in `F` and in `I`. Those of a plan do: `ep` and `etp` divide ranks with
one index along `pp`, which run one program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from plait.errors import ScheduleError
from plait.schedules.action import Kind
from plait.schedules.lowering.program import ExpertExchanges, Instruction, LayerIndex, Program, RunLayer
from plait.schedules.lowering.stream_replay import Awaited, Call, Operation, Queued, Read


def exchanges_in(program: Iterable[Instruction], exchanges: ExpertExchanges) -> list[RunLayer]:
    """Return the instructions of a program that exchange tokens, in order: layers with experts in F, I, B."""
    return [one for one in program if isinstance(one, RunLayer) and _exchanges(one, exchanges)]


def _exchanges(instruction: RunLayer, exchanges: ExpertExchanges) -> bool:
    place = LayerIndex(instruction.action.stage, instruction.layer)
    return place in exchanges.layers and instruction.action.kind is not Kind.W


def check_exchanges(programs: Sequence[Program], exchanges: ExpertExchanges) -> None:
    """Raise ScheduleError if ranks of a group run layers with experts in different orders."""
    for first, *others in map(sorted, map(set, exchanges.groups)):
        expected = exchanges_in(programs[first], exchanges)
        for other in others:
            found = exchanges_in(programs[other], exchanges)
            for number, (one, two) in enumerate(zip_longest(expected, found)):
                if one != two:
                    raise ScheduleError(
                        f"rule 'one order of exchanges' is broken between ranks {first} and {other}, which "
                        f"divide experts: exchange {number} of rank {first} is {_named(one)}, and of rank "
                        f"{other} {_named(two)}; let both run the same layers in the same order."
                    )


def _named(instruction: RunLayer | None) -> str:
    return "none" if instruction is None else f"that of layer {instruction.layer} in {instruction.action}"


def exchange_calls(rank: int, instruction: Instruction, exchanges: ExpertExchanges) -> Iterator[Call]:
    """Yield the communication calls of an instruction that exchanges tokens; none for any other.

    `rank`: the index of the program. The ranks of a group whose programs are one and the same stand for
    each other.
    """
    if not isinstance(instruction, RunLayer) or not _exchanges(instruction, exchanges):
        return
    group = next((one for one in exchanges.groups if rank in one), (rank,))
    ranks, place = tuple(sorted(set(group))), f"{instruction.action}.{instruction.layer}"

    def operation(what: str) -> Operation:
        return Operation(("experts", ranks), ranks, f"the all-{what} of {place}")

    if instruction.action.kind is Kind.F:
        counts = operation("gather of counts")
        yield from (Queued(counts), Read(counts))
    for what in ("to-all to the experts", "to-all from the experts"):
        yield from (Queued(operation(what)), Awaited(operation(what)))
