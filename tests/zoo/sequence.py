"""Mistakes of sequence parallelism: parts cut, joined or summed otherwise, models that mix positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity.case import Case
from parity.cases import GPT2_CONTEXT, GPT2_VOCAB, draw_contexts, with_values
from parity.dropping import RULES as DROPPING_RULES
from parity.dropping import dropping
from parity.tensor_defects import copies_not_summed, replaced_backward
from plait.engine.sharding import reducer
from plait.models.gpt2 import RULES
from plait.models.rotary import rotary_angles, rotate
from plait.plan.plan import Plan
from plait.ranks.collectives import all_reduce
from plait.ranks.group import Group
from plait.rules import column, entrance, row, sequence
from plait.tensor.autograd import paired_collectives
from plait.tensor.autograd.deferred_weight_gradients import linear
from plait.tensor.autograd.regathered_activations import Gather, GatherRegistry, Regathered, own_range
from plait.tensor.dropout_mask import DimPart
from plait.tensor.parallel import linear as region_boundary
from plait.tensor.parallel.linear import RegionBoundary, RowParallelLinear
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.patching import during, replaced_all_reduce
from zoo.row import Named, Row

HIDDEN, HEADS = 16, 2


def whole_parameters_not_summed() -> Any:
    """A norm learns on each rank from that rank's positions."""
    return copies_not_summed()


def whole_parameters_summed_twice() -> Any:
    """What the ranks of tp summed is summed once more."""

    def twice(tensor: Tensor, group: Any) -> Tensor:
        return all_reduce(all_reduce(tensor, group, checked=False).wait(), group, checked=False).wait()

    return replaced_all_reduce(reducer, "copies", twice)


def part_of_another_rank_kept() -> Any:
    """What leaves a region goes to the neighbour, who has other positions."""
    original = region_boundary.scatter_out

    def scatter_out(tensor: Tensor, group: Group, dim: int, registry: Any) -> Tensor:
        return original(tensor.roll(tensor.shape[dim] // group.size, dim), group, dim, registry)

    return patch.object(region_boundary, "scatter_out", scatter_out)


@contextmanager
def own_shard_of_a_gradient_not_summed() -> Iterator[None]:
    """The gradient of what entered a region is cut, but not summed."""

    def own(gradient: Tensor, group: Group, dim: int, overlap: Any) -> Tensor:
        return own_range(gradient, group, dim).contiguous()

    with replaced_backward(paired_collectives._reduce_scattered, own):
        yield


@contextmanager
def gradient_summed_where_it_is_gathered() -> Iterator[None]:
    """The gradient of what leaves a region is gathered, and summed over ranks that have the same."""
    original = paired_collectives._registered_whole

    def summed(gradient: Tensor, gather: Gather, registry: Any) -> Tensor:
        whole = original(gather, registry, gradient)
        return whole if whole.is_meta else all_reduce(whole, gather.group, checked=False).wait()

    with replaced_backward(original, summed):
        yield


def _joined_from_the_last() -> Any:
    original = Gather.whole

    def whole(self: Gather, part: Tensor) -> Tensor:
        return original(self, part).roll(self.size // self.group.size, self.dim)

    return patch.object(Gather, "whole", whole)


def entered_in_another_order() -> Any:
    """What enters attention begins with the part of the last rank."""
    return during("forward", _joined_from_the_last, layer=cases.ATTENTION)


def made_whole_in_another_order() -> Any:
    """So does what the head is given, which takes all positions."""
    return during("forward", _joined_from_the_last, layer="head")


@contextmanager
def bias_added_before_the_sum() -> Iterator[None]:
    """Every rank adds a row linear's bias to its summand."""

    def forward(self: RowParallelLinear, input: Tensor) -> Tensor:
        return self.boundary.leave(linear(input, self.weight, None, self.queue) + self.bias)

    with patch.object(RowParallelLinear, "forward", forward):
        yield


def first_micro_batch_gathered_again() -> Any:
    """The head's weight learns from what it read of the first micro-batch, every time."""
    kept: list[Tensor] = []
    original = GatherRegistry.again

    def again(self: GatherRegistry, part: Tensor, gather: Gather) -> Regathered:
        kept.append(part)
        return original(self, kept[0], gather)

    return during("backward_input", lambda: patch.object(GatherRegistry, "again", again), layer="head")


def parts_one_position_too_early() -> Any:
    """Where the first rank has one position more, the second takes that too, and leaves out the last."""

    def part(whole: Tensor, group: Group, dim: int) -> Tensor:
        length = own_range(whole, group, dim).shape[dim]
        return whole.narrow(dim, group.index * (whole.shape[dim] // group.size), length)

    return patch.object(paired_collectives, "own_range", part)


def dropout_counts_from_the_part() -> Any:
    """A rank draws for the first positions."""

    def first(self: RegionBoundary, size: int) -> DimPart:
        return DimPart(0, self.length)

    return patch.object(RegionBoundary, "part", first)


class Inner(nn.Module):
    """`x` plus two linears of its norm, on which `prepare` is done before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(self.prepare(x)))))
        return result


class Mixing(Inner):
    """Adds what stands one position before."""

    def prepare(self, x: Tensor) -> Tensor:
        return x + functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Turning(Inner):
    """Turns features by the number of their position in what it is given."""

    def prepare(self, x: Tensor) -> Tensor:
        return rotate(x, *rotary_angles(x.shape[1], HIDDEN, 100.0, x))


class Fused(nn.Module):
    """Query, key and value in one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.norm = nn.LayerNorm(HIDDEN)
        self.packed, self.output = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed(self.norm(x)).chunk(3, -1)
        query, key, value = (one.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for one in packed)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = x + self.output(mixed.transpose(1, 2).flatten(2))
        return result


INNER = {"1": sequence, "1.norm": entrance, "1.up": column, "1.down": row}
FUSED = {"1": sequence, "1.norm": entrance, "1.packed": column.by("heads"), "1.output": row.by("heads")}
"""Without `joined(3)`: the first rank's part is all of the query and half of the key."""


def around(layer: nn.Module, rules: Any) -> nn.Module:
    """Tokens to features, the layer, features to classes."""
    model = nn.Sequential(nn.Embedding(GPT2_VOCAB, HIDDEN), layer, nn.Linear(HIDDEN, GPT2_VOCAB))
    model.rules = rules
    return model


def mixing() -> nn.Module:
    return around(Mixing(), INNER)


def turning() -> nn.Module:
    return around(Turning(), INNER)


def fused() -> nn.Module:
    return around(Fused(), FUSED)


def whole_at_the_end() -> nn.Module:
    """A GPT-2 whose head takes all positions."""
    model = plait.models.gpt2(layers=1, hidden=HIDDEN, heads=HEADS, vocab=GPT2_VOCAB, context=GPT2_CONTEXT)
    model.rules = {path: rule for path, rule in RULES.items() if path != "head"}
    return model


def dropping_in_parts() -> nn.Module:
    model = dropping()
    model.rules = {**DROPPING_RULES, "1": sequence, "2": sequence, "3": sequence}  # type: ignore[assignment]
    return model


def mixes_positions() -> Any:
    """The layer has the rule sequence, and should not: it looks at its neighbours outside of the region."""
    return nullcontext()


def counts_positions_from_the_part() -> Any:
    """Likewise: the second rank's first position is not the first."""
    return nullcontext()


def blocks_not_joined() -> Any:
    """The rule of a linear that is three in one does not say so."""
    return nullcontext()


def draw_odd(rows: int, generator: torch.Generator) -> Any:
    """Sequences of seven: four positions for one rank, three for the other."""
    inputs, targets = draw_contexts(GPT2_VOCAB)(rows, generator)
    return inputs[:, 1:], targets[:, 1:].contiguous()


def tokens(build: Any) -> Case:
    """A model on random tokens."""
    return Case(build.__name__, with_values(build), draw_contexts(GPT2_VOCAB))


ODD = replace(cases.GPT2, draw=draw_odd)
WHOLE_AT_THE_END = replace(cases.GPT2, build=whole_at_the_end)
KEPT = Plan(tp=2, microbatches=2, sequence_parallel="keep")
REGATHERED = replace(KEPT, sequence_parallel="regather")


def _row(
    defect: Any, model: Case, phase: StepPhase, layer: str | None, *, plan: Plan = KEPT, **more: Any
) -> Row:
    named = {"microbatch": None if phase is StepPhase.REDUCTION else 0, "ranks": (0, 1)} | more
    return Row(defect=defect, model=model, plan=plan, named=Named(phase=phase, layer=layer, **named))


SEQUENCE = (
    _row(
        whole_parameters_not_summed,
        cases.LLAMA,
        StepPhase.REDUCTION,
        None,
        parameter=r".*norm.weight",
        cause="sum over tp is missing",
    ),
    _row(
        whole_parameters_summed_twice,
        ODD,
        StepPhase.REDUCTION,
        None,
        parameter=r".*norm.(weight|bias)|.*(output|down).bias",
        cause="2 times",
    ),
    _row(
        part_of_another_rank_kept, cases.GPT2, StepPhase.FORWARD, cases.ATTENTION, cause="rank 1 should have"
    ),
    _row(
        own_shard_of_a_gradient_not_summed,
        cases.LLAMA,
        StepPhase.INPUT_GRADIENT,
        "head",
        cause="a sum over tp",
    ),
    _row(
        gradient_summed_where_it_is_gathered,
        cases.GPT2,
        StepPhase.INPUT_GRADIENT,
        cases.MLP,
        plan=REGATHERED,
        cause="2 times",
    ),
    _row(entered_in_another_order, cases.GPT2, StepPhase.FORWARD, cases.ATTENTION),
    _row(made_whole_in_another_order, WHOLE_AT_THE_END, StepPhase.FORWARD, "head", cause="in another order"),
    _row(bias_added_before_the_sum, cases.GPT2, StepPhase.FORWARD, cases.ATTENTION, cause="bias"),
    _row(
        first_micro_batch_gathered_again,
        cases.GPT2,
        StepPhase.WEIGHT_GRADIENT,
        "head",
        plan=REGATHERED,
        parameter="embedding.token.weight",
        microbatch=1,
        cause="another input",
    ),
    _row(parts_one_position_too_early, ODD, StepPhase.FORWARD, "embedding", ranks=(1,), cause="shifted"),
    _row(
        dropout_counts_from_the_part,
        tokens(dropping_in_parts),
        StepPhase.FORWARD,
        "1",
        ranks=(1,),
        cause="from the start of a part",
    ),
    _row(mixes_positions, tokens(mixing), StepPhase.FORWARD, "1", ranks=(1,), cause="positions before it"),
    _row(
        counts_positions_from_the_part,
        tokens(turning),
        StepPhase.FORWARD,
        "1",
        plan=REGATHERED,
        ranks=(1,),
        cause="from the start of a part",
    ),
    _row(blocks_not_joined, tokens(fused), StepPhase.FORWARD, "1"),
)
