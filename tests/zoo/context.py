"""Mistakes of context parallelism: positions, masks, exchanges of keys, sums over the ranks of cp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parity.case import Case
from parity.cases import llama
from parity.contexts import mixing, packed
from plait.engine import local_batch, runner
from plait.engine import parallelize as composer
from plait.engine.compilation import eager_autograd_calls, graphs_and_eager_operations
from plait.engine.compilation.layer_operations import LayerOperation
from plait.engine.pipeline.stage import Stage
from plait.engine.sharding import reducer
from plait.plan.layout.sequence_layout import SequenceLayout
from plait.plan.plan import Plan
from plait.ranks.handle import Handle
from plait.tensor.attention import key_exchange_plan, ring, ulysses
from plait.tensor.attention.block_attention import block_backward, block_forward
from plait.tensor.attention.key_exchange_plan import ExchangePlan, Mask, build_plan
from plait.tensor.attention.ring import KeyExchange, Pair
from plait.tensor.nested_values import Value, map_tensors
from plait.tensor.running_sequence import ContextParallelism, DocumentBounds, LocalSequence
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.patching import during, rank, replaced_all_reduce
from zoo.row import Named, Row

WINDOW = 3


def loss_weight_of_own_positions() -> Any:
    """The loss's weight is summed over dp, and not over cp: gradients are cp times too large."""
    return replaced_all_reduce(runner, "dp_cp", lambda tensor, group: tensor)


@contextmanager
def positions_of_the_part() -> Iterator[None]:
    """A rank counts the positions of its part from 0, and looks up its position embedding there."""
    original = LocalSequence.positions

    def positions(self: LocalSequence, device: torch.device) -> Tensor:
        if self.group.size == 1:
            return original(self, device)
        return torch.arange(self.size, device=device)

    with patch.object(LocalSequence, "positions", positions):
        yield


def angles_of_the_part() -> Any:
    """So do rotary angles."""
    return positions_of_the_part()


@contextmanager
def _with_peers(change: Any) -> Iterator[None]:
    """Replace the plan of a rank that has peers by what `change` returns for the arguments of the plan."""

    def build(layout: SequenceLayout, index: int, mask: Mask, documents: Any = None) -> ExchangePlan:
        plan = build_plan(layout, index, mask, documents)
        return plan if layout.ranks == 1 else change(plan, layout, index, mask, documents)

    anew = key_exchange_plan.remembered_plan.__wrapped__
    with (
        patch.object(key_exchange_plan, "build_plan", build),
        patch.object(key_exchange_plan, "remembered_plan", anew),
    ):
        yield


def mask_of_the_other_ranks_block() -> Any:
    """Each of two ranks masks the other's keys as that one masks its own."""

    def change(plan: ExchangePlan, layout: SequenceLayout, index: int, *more: Any) -> ExchangePlan:
        other = build_plan(layout, 1 - index, *more).peers[index]
        peers = [one and replace(one, calls=other.calls) for one in plan.peers if other is not None]
        return replace(plan, peers=tuple(peers))

    return _with_peers(change)


def window_one_too_narrow_for_other_ranks_keys() -> Any:
    """A window that begins in another rank's part is one position too narrow."""

    def change(
        plan: ExchangePlan, layout: SequenceLayout, index: int, mask: Mask, documents: Any
    ) -> ExchangePlan:
        narrower = build_plan(layout, index, replace(mask, window=WINDOW - 1), documents)
        return replace(plan, peers=narrower.peers)

    return _with_peers(change)


def blocks_added_without_rescaling() -> Any:
    """What two blocks give is added up, as if both had the same log-sum-exp."""

    def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
        out += part_out
        torch.logaddexp(lse, part_lse, out=lse)

    return patch.object(ring, "merge", merge)


def backward_with_the_blocks_own_sum() -> Any:
    """The backward of a block takes the log-sum-exp of that block's scores."""

    def backward(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Any,
        scale: float,
        *more: Any,
    ) -> Any:
        _, own = block_forward(query, key, value, mask, scale, *more)
        return block_backward(gradient, query, key, value, out, own, mask, scale, *more)

    return patch.object(ring, "block_backward", backward)


def gradients_of_keys_to_the_wrong_rank() -> Any:
    """A rank returns to each peer what is the next one's."""
    original = KeyExchange.start_return

    def start_return(self: KeyExchange, gradients: Tensor, key: Tensor, value: Tensor) -> None:
        sizes = self._parts(self.plan.received(1), key, value).sizes
        parts = [part for part in gradients.split(sizes) if len(part)]
        original(self, torch.cat([*parts[1:], parts[0]]), key, value)

    return patch.object(KeyExchange, "start_return", start_return)


def gradients_of_own_keys_dropped() -> Any:
    """What arrives from other ranks replaces what a rank's own queries give, instead of being added."""
    original = KeyExchange.with_returned

    def with_returned(self: KeyExchange, key: Tensor, value: Tensor) -> Pair:
        return original(self, torch.zeros_like(key), torch.zeros_like(value))

    return patch.object(KeyExchange, "with_returned", with_returned)


def keys_of_the_first_micro_batch() -> Any:
    """The buffer of the first micro-batch's keys is read for all of them."""
    kept: list[Tensor] = []
    original = KeyExchange.received

    def received(self: KeyExchange, key: Tensor, value: Tensor) -> Tensor:
        kept.append(original(self, key, value))
        return kept[-1 if kept[0].is_meta else 0]

    return during("forward", lambda: patch.object(KeyExchange, "received", received))


def positions_of_the_first_micro_batch() -> Any:
    """A compiled layer goes on with the positions of the documents with which it first ran."""
    original = graphs_and_eager_operations._positions

    def positions(node: Any, slots: Any) -> LayerOperation:
        operation, first = original(node, slots), list[Tensor]()

        def run(given: Any, values: Any, call: Any) -> None:
            operation.run(given, values, call)
            first.append(values[slots[node]])
            values[slots[node]] = first[0]

        return replace(operation, run=run)

    return patch.object(graphs_and_eager_operations, "_positions", positions)


def gradients_of_keys_and_values_exchanged() -> Any:
    """Between the graphs of a backward, the gradients of keys and values are taken for each other."""
    original = eager_autograd_calls._Given.backward

    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return original(ctx, query, value, key)

    return patch.object(eager_autograd_calls._Given, "backward", staticmethod(backward))


def heads_in_another_order() -> Any:
    """The heads that come back from the other ranks begin with the second."""
    attention = import_module("plait.tensor.attention.attention")  # the package has a function of this name
    original = attention.attend_by_heads
    return patch.object(attention, "attend_by_heads", lambda *given: original(*given).roll(-1, 1))


def positions_in_the_order_of_the_ranks() -> Any:
    """The parts of a sequence are joined one after the other, though each rank has two chunks of it."""
    return patch.object(SequenceLayout, "join", lambda self, parts, dim=1: torch.cat(tuple(parts), dim))


def gradient_of_a_shared_head_of_one_rank() -> Any:
    """A head of keys that two ranks have gets the gradient of the first one only."""
    original = ulysses._positions_for_heads

    def kept(
        tensors: Sequence[Tensor], sequence: LocalSequence, heads: Any, all_heads: int, **more: Any
    ) -> list[Tensor]:
        left_out = sum(map(len, heads)) > all_heads and sequence.group.index
        given = [torch.zeros_like(one) for one in tensors] if left_out else tensors
        return original(given, sequence, heads, all_heads, **more)

    return patch.object(ulysses, "_positions_for_heads", kept)


def second_chunk_reversed() -> Any:
    """The second of a rank's two chunks of the inputs is cut from its end."""
    original = local_batch.cut

    def cut(value: Value, sequence: LocalSequence | None, *more: Any) -> Value:
        def reversed_half(part: Tensor) -> Tensor:
            first, second = part.chunk(2, 1)
            return torch.cat([first, second.flip(1)], 1)

        found = original(value, sequence, *more)
        is_cut = sequence is not None and sequence.group.size > 1
        return map_tensors(reversed_half, found) if is_cut else found

    return patch.object(local_batch, "cut", cut)


def labels_shifted_after_the_cut() -> Any:
    """The label of a chunk's last token is the first token of the rank's next chunk."""
    original = runner.cut

    def cut(value: Value, sequence: LocalSequence | None, *more: Any) -> Value:
        tokens = original(map_tensors(lambda labels: labels.roll(1, 1), value), sequence, *more)
        return map_tensors(lambda part: part.roll(-1, 1), tokens)

    return patch.object(runner, "cut", cut)


def documents_end_with_the_part() -> Any:
    """Bounds of documents are found in a rank's part: what continues there is a document of its own."""
    original = ContextParallelism.sequence

    def sequence(
        self: ContextParallelism, length: int, documents: DocumentBounds | None = None
    ) -> LocalSequence:
        whole = original(self, length, documents)
        if self.group.size == 1 or documents is None:
            return whole
        border = whole.layout.size(0)
        starts = tuple(tuple(sorted({*row, border})) for row in documents.starts)
        return replace(whole, documents=DocumentBounds(length, starts), _results={})

    return patch.object(ContextParallelism, "sequence", sequence)


def gradients_averaged_over_cp() -> Any:
    """Gradients are a mean over cp, as if its ranks had sequences of their own and means of losses."""
    original = reducer.all_reduce

    def mean(tensor: Tensor, group: Any) -> Tensor:
        return original(tensor, group, checked=False).wait() / group.size

    return replaced_all_reduce(reducer, "dp_cp", mean)


def gradients_not_summed_over_cp() -> Any:
    """Gradients are summed over dp alone."""
    original = composer.reduction_groups

    def groups(owners: Any, kinds: Any, mesh: Any) -> dict[str, Any]:
        found = original(owners, kinds, mesh)
        return {name: mesh.group("dp") if one.name == "dp_cp" else one for name, one in found.items()}

    return patch.object(composer, "reduction_groups", groups)


def mean_loss_of_the_first_part() -> Any:
    """The mean loss leaves out the positions of other ranks than the first of cp."""
    original = runner.all_reduce

    def all_reduce(tensor: Tensor, group: Any, *arguments: Any, **options: Any) -> Handle[Tensor]:
        is_mean = group.name == "world" and group.index
        return original(torch.zeros_like(tensor) if is_mean else tensor, group, *arguments, **options)

    return patch.object(runner, "all_reduce", all_reduce)


@contextmanager
def weight_gradient_of_the_second_part_twice() -> Iterator[None]:
    """The second rank adds the head's weight gradient twice in each micro-batch."""
    original = Stage.backward_weight

    def backward_weight(self: Stage, microbatch: int, layer: int) -> None:
        if rank() == 1 and self.layers[layer].path == "head":
            self.work[microbatch, layer] *= 2
        original(self, microbatch, layer)

    with patch.object(Stage, "backward_weight", backward_weight):
        yield


RING = Plan(cp=2, microbatches=2, context_parallel="ring")
RING_OF_THREE = replace(RING, cp=3, context_layout="contiguous")
HEADS = replace(RING, context_parallel="ulysses")
CONTIGUOUS = replace(RING, context_layout="contiguous")
THREE_MICRO_BATCHES = replace(RING, microbatches=3)
COMPILED = replace(RING, compile="graphs")
ACROSS = mixing(6, causal=False)
IN_A_WINDOW = mixing(8, window=WINDOW)
PACKED = packed(llama(layers=1), 8)


def _row(
    defect: Any,
    phase: StepPhase,
    layer: str | None,
    *,
    model: Case = cases.GPT2,
    plan: Plan = RING,
    **more: Any,
) -> Row:
    of_all = phase in (StepPhase.REDUCTION, StepPhase.MEAN_LOSS)
    named = {"microbatch": None if of_all else 0, "ranks": (0, 1)} | more
    return Row(defect=defect, model=model, plan=plan, named=Named(phase=phase, layer=layer, **named))


CONTEXT = (
    _row(
        loss_weight_of_own_positions,
        StepPhase.LOSS_GRADIENT,
        "head",
        plan=THREE_MICRO_BATCHES,
        cause="2 times what it should be, the size of cp",
    ),
    _row(positions_of_the_part, StepPhase.FORWARD, "embedding", cause=r"position.weight is read at"),
    _row(
        angles_of_the_part,
        StepPhase.FORWARD,
        cases.ATTENTION,
        model=cases.LLAMA,
        cause="its positions are not",
    ),
    _row(mask_of_the_other_ranks_block, StepPhase.FORWARD, cases.ATTENTION, cause="other keys"),
    _row(
        window_one_too_narrow_for_other_ranks_keys, StepPhase.FORWARD, "1", model=IN_A_WINDOW, cause="window"
    ),
    _row(blocks_added_without_rescaling, StepPhase.FORWARD, cases.ATTENTION),
    _row(backward_with_the_blocks_own_sum, StepPhase.INPUT_GRADIENT, cases.ATTENTION, model=cases.LLAMA),
    _row(
        gradients_of_keys_to_the_wrong_rank,
        StepPhase.INPUT_GRADIENT,
        "3",
        model=ACROSS,
        plan=RING_OF_THREE,
        ranks=(0, 1, 2),
        cause="another rank's",
    ),
    _row(gradients_of_own_keys_dropped, StepPhase.INPUT_GRADIENT, cases.ATTENTION, cause="is lost"),
    _row(
        keys_of_the_first_micro_batch, StepPhase.FORWARD, cases.ATTENTION, microbatch=1, cause="before it are"
    ),
    _row(
        positions_of_the_first_micro_batch,
        StepPhase.FORWARD,
        cases.ATTENTION,
        model=PACKED,
        plan=COMPILED,
        microbatch=1,
    ),
    _row(
        gradients_of_keys_and_values_exchanged,
        StepPhase.INPUT_GRADIENT,
        cases.ATTENTION,
        model=cases.LLAMA,
        plan=COMPILED,
    ),
    _row(heads_in_another_order, StepPhase.FORWARD, cases.ATTENTION, plan=HEADS),
    _row(positions_in_the_order_of_the_ranks, StepPhase.FORWARD, cases.ATTENTION, plan=HEADS),
    _row(
        gradient_of_a_shared_head_of_one_rank,
        StepPhase.INPUT_GRADIENT,
        cases.ATTENTION,
        model=cases.SHARING,
        plan=HEADS,
        cause="is lost",
    ),
    _row(second_chunk_reversed, StepPhase.INPUT, "", cause="another order"),
    _row(labels_shifted_after_the_cut, StepPhase.LOSS, None, cause="shifted after the cut"),
    _row(
        documents_end_with_the_part,
        StepPhase.FORWARD,
        cases.ATTENTION,
        model=PACKED,
        plan=CONTIGUOUS,
        ranks=(1,),
        cause="only some ranks|documents",
    ),
    _row(
        weight_gradient_of_the_second_part_twice,
        StepPhase.WEIGHT_GRADIENT,
        "head",
        model=cases.UNTIED,
        parameter="head.output.weight",
    ),
    _row(
        gradients_averaged_over_cp,
        StepPhase.REDUCTION,
        None,
        plan=THREE_MICRO_BATCHES,
        cause="one over cp: either averaged",
    ),
    _row(gradients_not_summed_over_cp, StepPhase.REDUCTION, None, cause="sum over cp is missing"),
    _row(mean_loss_of_the_first_part, StepPhase.MEAN_LOSS, None, cause="not all of them"),
)
