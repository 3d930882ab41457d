"""Mistakes of the forward: of what enters it, of messages, of layers that are cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

import plait.tensor.parallel.linear as parallel
from parity.tensor_defects import (
    average_instead_of_sum,
    bias_added_by_every_rank,
    last_row_of_each_shard_lost,
)
from plait.engine import parallelize as composer
from plait.engine import tensor_sources
from plait.engine.pipeline.stage_exchange import Exchange
from plait.engine.runner import Runner
from plait.models.gpt2 import MLP, Attention, Embedding
from plait.models.rotary import rotary_angles, rotate
from plait.ranks.collectives import all_gather
from plait.schedules.action import Kind
from plait.tensor import microbatches as values
from plait.tensor.nested_values import map_tensors
from plait.tensor.parallel import embedding_and_norm as embedding
from plait.tensor.parallel import linear as region_boundary
from plait.tensor.parallel.linear import RowParallelLinear
from plait.verification.step_location import StepPhase
from zoo import cases, models
from zoo.patching import during, in_single, rank
from zoo.row import Named, Row

LLAMA_MODULE = import_module("plait.models.llama")
"""The package has a function of that name."""


def micro_batches_interleaved() -> Any:
    """Row i goes to micro-batch i mod m."""

    def split(value: Any, microbatches: int, what: str) -> list[Any]:
        def every(start: int) -> Any:
            return map_tensors(lambda tensor: tensor[start::microbatches], value)

        return [every(start) for start in range(microbatches)]

    return patch.object(values, "split", split)


def inputs_in_single_precision() -> Any:
    """The batch goes through float32."""
    original = Runner.as_input

    def as_input(self: Runner, tensor: Tensor) -> Tensor:
        return in_single(original(self, tensor))

    return patch.object(Runner, "as_input", as_input)


@contextmanager
def message_of_another_microbatch() -> Iterator[None]:
    """Every message forward is the first one again."""
    original = Exchange.send
    first: list[Any] = []

    def send(self: Exchange, action: Any, tensors: Any, peer: int) -> None:
        if action.kind is Kind.F:
            first.append([tensor.clone() for tensor in tensors])
            tensors = first[0]
        original(self, action, tensors, peer)

    with patch.object(Exchange, "send", send):
        yield


@contextmanager
def hidden_state_sent_in_single_precision() -> Iterator[None]:
    """What goes over the wire has half of its digits."""
    original = Exchange.send

    def send(self: Exchange, action: Any, tensors: Any, peer: int) -> None:
        original(self, action, [in_single(t) if action.kind is Kind.F else t for t in tensors], peer)

    with patch.object(Exchange, "send", send):
        yield


def _own(tensor: Tensor, group: Any) -> Tensor:
    return tensor


def attention_not_summed() -> Any:
    """The all-reduce behind the row linear is missing, in attention only."""
    return during("forward", lambda: patch.object(region_boundary, "reduce", _own), layer="*.attention")


def mlp_not_summed() -> Any:
    """The same in the MLP only."""
    return during("forward", lambda: patch.object(region_boundary, "reduce", _own), layer="*.mlp")


def mlp_averaged() -> Any:
    """Averaged instead of summed, in the MLP only."""
    return during("forward", average_instead_of_sum, layer="*.mlp")


@contextmanager
def bias_left_out() -> Iterator[None]:
    """The bias of a row-parallel linear is not added."""
    original = RowParallelLinear.forward

    def forward(self: RowParallelLinear, input: Tensor) -> Tensor:
        output = original(self, input)
        return output if self.bias is None else output - self.bias

    with patch.object(RowParallelLinear, "forward", forward):
        yield


def _attention(change: Any) -> Any:
    """Attention of a woven layer is done on what `change` makes of query, key and value."""
    original = functional.scaled_dot_product_attention

    def changed(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return original(*change(query, key, value), **options)

    return during(
        "forward",
        lambda: patch.object(functional, "scaled_dot_product_attention", changed),
        layer="*.attention",
    )


def query_heads_in_another_order() -> Any:
    """A rank's query heads meet the keys of its other heads."""
    return _attention(lambda query, key, value: (query.flip(1), key, value))


def query_heads_paired_with_the_wrong_key_heads() -> Any:
    """Query head h reads key head h mod n, not h // (heads / n)."""

    def repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        copies = query.shape[1] // key.shape[1]
        return query, key.repeat(1, copies, 1, 1), value.repeat(1, copies, 1, 1)

    return _attention(repeated)


@contextmanager
def heads_of_the_other_rank() -> Iterator[None]:
    """What the heads give is exchanged between ranks before the output linear."""
    original = RowParallelLinear.forward

    def forward(self: RowParallelLinear, input: Tensor) -> Tensor:
        everyone = all_gather(input.detach(), self.group).wait().chunk(self.group.size)
        other = everyone[(self.group.index + 1) % self.group.size]
        return original(self, input + (other - input).detach())

    with during(
        "forward", lambda: patch.object(RowParallelLinear, "forward", forward), layer=cases.ATTENTION
    ):
        yield


def mask_missing_on_one_rank() -> Any:
    """Rank 1's attention sees what is to come."""
    original = functional.scaled_dot_product_attention

    def unmasked(*tensors: Tensor, **options: Any) -> Tensor:
        return original(*tensors, **(options | {"is_causal": False}))

    return during(
        "forward",
        lambda: patch.object(functional, "scaled_dot_product_attention", unmasked),
        on_rank=1,
    )


def query_positions_off_by_one() -> Any:
    """Rank 1 turns its queries as if each stood one place later."""

    def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        if x.shape[1] == 2:  # query heads; there is one key head
            later = rotary_angles(x.shape[2] + 1, x.shape[3], 10000.0, x)
            cosines, sines = later[0][1:], later[1][1:]
        return rotate(x, cosines, sines)

    return during("forward", lambda: patch.object(LLAMA_MODULE, "rotate", turned), on_rank=1)


def position_embedding_added_by_every_rank() -> Any:
    """It is added before the sum over ranks."""
    original = Embedding.forward

    def forward(self: Embedding, tokens: Tensor) -> Tensor:
        return original(self, tokens) + self.position(torch.arange(tokens.shape[1]))

    return during("forward", lambda: patch.object(Embedding, "forward", forward))


def rows_of_another_rank() -> Any:
    """Rank 1 takes its rows of the table to begin one token earlier."""
    original = embedding.divide

    def divide(size: int, parts: int) -> tuple[range, ...]:
        first, second = original(size, parts)
        return first, range(second.start - 1, second.stop - 1)

    return patch.object(embedding, "divide", divide)


def last_class_ignored() -> Any:
    """The head leaves out the last row of the last rank."""
    original = parallel.linear

    def linear(*arguments: Any, **options: Any) -> Tensor:
        output = original(*arguments, **options)
        kept = torch.ones_like(output[0, 0])
        kept[-1] = 0
        return output * kept

    return during("forward", lambda: patch.object(parallel, "linear", linear), layer="head", on_rank=1)


def layer_skipped() -> Any:
    """The second stage begins with its second layer."""
    return during("forward", lambda: patch.object(MLP, "forward", lambda self, x: x * 1))


def layer_run_twice() -> Any:
    """The last layer of the first stage runs again."""
    original = Attention.forward
    twice = patch.object(Attention, "forward", lambda self, x: original(self, original(self, x)))
    return during("forward", lambda: twice)


def other_epsilon() -> Any:
    """Norms of the MLP divide by a little more."""
    original = functional.rms_norm

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        return original(x, shape, weight, 2 * eps)

    return during("forward", lambda: patch.object(functional, "rms_norm", rms_norm), layer="*.mlp")


def norm_in_single_precision() -> Any:
    """A norm rounds what it gives."""
    original = functional.layer_norm

    def layer_norm(*arguments: Any, **options: Any) -> Tensor:
        return in_single(original(*arguments, **options))

    return during("forward", lambda: patch.object(functional, "layer_norm", layer_norm), layer="head")


@contextmanager
def random_numbers_of_the_rank() -> Iterator[None]:
    """No patch: the model draws a mask from a generator that is seeded with the rank."""
    yield


@contextmanager
def norm_over_a_shard() -> Iterator[None]:
    """No patch: the model normalises over features of which each rank holds a part."""
    yield


def first_shard_on_every_rank() -> Any:
    """Each rank of tp starts from the first part of what is cut."""
    original = composer.shard

    def shard(whole: Tensor, layout: Any, coordinate: Any) -> Tensor:
        return original(whole, layout, dict(coordinate) | {"tp": 0})

    return patch.object(composer, "shard", shard)


def other_values_on_one_rank() -> Any:
    """Rank 1 starts from other values, as from another seed."""
    original = tensor_sources.initial_value

    def initial_value(*arguments: Any) -> Tensor:
        value = original(*arguments)
        return value * 1.5 if rank() == 1 else value

    return patch.object(tensor_sources, "initial_value", initial_value)


def copy_differs() -> Any:
    """Rank 1's copy of one bias is not the others'."""
    original = tensor_sources.initial_value

    def initial_value(layer: Any, path: str, name: str, *others: Any) -> Tensor:
        value = original(layer, path, name, *others)
        return value + 1e-6 if rank() == 1 and name == "up.bias" else value

    return patch.object(tensor_sources, "initial_value", initial_value)


def _row(
    defect: Any, model: Any, plan: Any, layer: str, phase: StepPhase = StepPhase.FORWARD, **more: Any
) -> Row:
    shown = {key: more.pop(key) for key in ("options", "missed", "unexplained", "full") if key in more}
    return Row(
        defect=defect,
        model=model,
        plan=plan,
        named=Named(phase=phase, layer=layer, **{"microbatch": 0} | more),
        **shown,
    )


def _started(defect: Any, model: Any, plan: Any, parameter: str, **more: Any) -> Row:
    return _row(defect, model, plan, "", StepPhase.INITIAL, parameter=parameter, microbatch=None, **more)


FORWARD = (
    _row(
        micro_batches_interleaved, cases.GPT2, cases.TWO_STAGES, "", StepPhase.INPUT, ranks=(0,), cause="rows"
    ),
    _row(
        inputs_in_single_precision, models.VECTORS, cases.ANY_TWO_STAGES, "", StepPhase.INPUT, cause="float32"
    ),
    _row(
        message_of_another_microbatch,
        cases.GPT2,
        cases.TWO_STAGES,
        cases.ATTENTION,
        StepPhase.MESSAGE,
        microbatch=1,
        ranks=(1,),
        cause="micro-batch 0",
    ),
    _row(
        hidden_state_sent_in_single_precision,
        cases.GPT2,
        cases.TWO_STAGES,
        cases.ATTENTION,
        StepPhase.MESSAGE,
        ranks=(1,),
        cause="float32",
    ),
    _row(bias_added_by_every_rank, cases.GPT2, cases.TWO_PARTS, cases.ATTENTION, ranks=(0, 1), cause="bias"),
    _row(bias_left_out, cases.GPT2, cases.TWO_PARTS, cases.ATTENTION, ranks=(0, 1), cause="bias", full=True),
    _row(average_instead_of_sum, cases.LLAMA, cases.TWO_PARTS, "embedding", cause="averaged"),
    _row(
        attention_not_summed,
        cases.LLAMA,
        cases.TWO_PARTS,
        cases.ATTENTION,
        ranks=(0, 1),
        cause="sum over tp is missing",
    ),
    _row(mlp_not_summed, cases.GPT2, cases.TWO_PARTS, cases.MLP, ranks=(0, 1), full=True),
    _row(
        mlp_averaged,
        cases.LLAMA,
        cases.TWO_PARTS,
        cases.MLP,
        cause="adds to it is 1/2 .* averaged",
        full=True,
    ),
    _row(query_heads_in_another_order, cases.FOUR_HEADS, cases.TWO_PARTS, cases.ATTENTION),
    _row(heads_of_the_other_rank, cases.GPT2, cases.TWO_PARTS, cases.ATTENTION, full=True),
    _row(
        query_heads_paired_with_the_wrong_key_heads,
        cases.LLAMA,
        cases.TWO_STAGES,
        cases.ATTENTION,
        ranks=(0,),
    ),
    _row(mask_missing_on_one_rank, cases.GPT2, cases.TWO_COPIES, cases.ATTENTION, microbatch=2, ranks=(1,)),
    _row(query_positions_off_by_one, cases.LLAMA, cases.TWO_PARTS, cases.ATTENTION),
    _row(position_embedding_added_by_every_rank, cases.GPT2, cases.TWO_PARTS, "embedding"),
    _row(rows_of_another_rank, cases.GPT2, cases.TWO_PARTS, "embedding"),
    _row(last_row_of_each_shard_lost, cases.GPT2, cases.TWO_PARTS, "embedding", microbatch=None, full=True),
    _row(last_class_ignored, cases.GPT2, cases.TWO_PARTS, "head", ranks=(1,), cause="36:37 of dim 2"),
    _row(layer_skipped, cases.GPT2, cases.TWO_STAGES, cases.MLP, ranks=(1,), cause="the layer is skipped"),
    _row(layer_run_twice, cases.GPT2, cases.TWO_STAGES, cases.ATTENTION, ranks=(0,), full=True),
    _row(other_epsilon, cases.LLAMA, cases.TWO_STAGES, cases.MLP, ranks=(1,)),
    _row(
        norm_in_single_precision,
        cases.GPT2,
        cases.TWO_STAGES,
        "head",
        ranks=(1,),
        cause="float32",
        full=True,
    ),
    _row(random_numbers_of_the_rank, models.MASKED, cases.TWO_COPIES, "1", microbatch=2, ranks=(1,)),
    _row(norm_over_a_shard, models.NORM_INSIDE, cases.TWO_PARTS, "1"),
    _started(first_shard_on_every_rank, cases.EVEN, cases.TWO_PARTS, ".*", ranks=(1,)),
    _started(other_values_on_one_rank, cases.GPT2, cases.TWO_STAGES, ".*", ranks=(1,), full=True),
    _started(copy_differs, cases.GPT2, cases.TWO_COPIES, ".*bias", ranks=(1,), full=True),
)
