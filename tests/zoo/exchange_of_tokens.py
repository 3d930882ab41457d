"""Mistakes with the exchange of tokens: sent elsewhere, returned to others, lost, counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.plan.layout.layout import Layout, Shard, divide
from plait.ranks.group import Group
from plait.tensor.experts import experts as layer
from plait.tensor.experts.assignments import Assignments
from plait.tensor.experts.expert_products import ExpertCall
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.mixture import MixtureOfExperts
from plait.tensor.experts.token_exchange import TokenExchange
from plait.tensor.parallel import apply_rules
from plait.verification.step_location import StepPhase
from zoo import sparse
from zoo.patching import during, rank
from zoo.row import Named, Row

Change = Callable[[TokenExchange, Tensor], Tensor]


@contextmanager
def _travelling(method: str, before: Change | None = None, after: Change | None = None) -> Iterator[None]:
    """What `start` or `start_return` sends, or receives, is changed; not on the meta device."""
    original = getattr(TokenExchange, method)

    def start(self: TokenExchange, rows: Tensor) -> Any:
        if rows.is_meta:
            return original(self, rows)
        pending = original(self, before(self, rows) if before else rows)
        return (lambda: after(self, pending())) if after else pending

    with patch.object(TokenExchange, method, start):
        yield


def _returned(change: Change) -> Any:
    """What experts send back in the forward is changed where it arrives."""
    return during("forward", lambda: _travelling("start_return", after=change))


def tokens_sent_one_later() -> Any:
    """A rank sends each token's experts and weights with the token before it."""

    def change(exchange: TokenExchange, tokens: Tensor) -> Tensor:
        tokens = tokens.clone()
        tokens[:, : sparse.WIDTH] = tokens[:, : sparse.WIDTH].roll(1, 0)
        return tokens

    return during("forward", lambda: _travelling("start", before=change))


def results_returned_in_another_order() -> Any:
    """Each result comes back as that of the next row."""
    return _returned(lambda exchange, rows: rows.roll(1, 0))


def results_of_the_other_rank_lost() -> Any:
    """What other ranks' experts give does not arrive."""

    def change(exchange: TokenExchange, rows: Tensor) -> Tensor:
        parts = list(rows.split(list(exchange.counts.sent)))
        own = exchange.group.index
        return torch.cat([part if number == own else 0 * part for number, part in enumerate(parts)])

    return _returned(change)


def first_result_counted_twice() -> Any:
    """The first row that comes back counts twice."""

    def change(exchange: TokenExchange, rows: Tensor) -> Tensor:
        rows[:1] *= 2
        return rows

    return _returned(change)


def segments_of_ranks_exchanged() -> Any:
    """What has come from the first rank is taken for what came from the last."""

    def change(exchange: TokenExchange, rows: Tensor) -> Tensor:
        parts = list(rows.split(list(exchange.counts.sent)))
        return torch.cat(parts[::-1])

    return _returned(change)


def tokens_of_the_micro_batch_before() -> Any:
    """The features of tokens that arrive are those of the call before."""
    kept: dict[int, Tensor] = {}

    def change(exchange: TokenExchange, rows: Tensor) -> Tensor:
        own, rest = rows.split([sparse.WIDTH, rows.shape[1] - sparse.WIDTH], 1)  # weights, and experts
        before = kept.get(rank(), own)
        kept[rank()] = own.clone()
        return torch.cat([before if before.shape == own.shape else own.flip(0), rest], 1)

    return during("forward", lambda: _travelling("start", after=change), layer="1")


def parts_of_etp_added_twice() -> Any:
    """The partial outputs of the ranks of etp are summed before they travel, and again where they arrive."""
    return _returned(lambda exchange, rows: 2 * rows)


def second_part_of_etp_lost() -> Any:
    """Of the partial outputs only those of the first rank of etp are added."""

    def change(exchange: TokenExchange, rows: Tensor) -> Tensor:
        parts = rows.split(list(exchange.counts.sent))
        return torch.cat([part if number % 2 == 0 else 0 * part for number, part in enumerate(parts)])

    return _returned(change)


def gate_and_up_cut_as_one() -> Any:
    """The first rank of etp gets the gate, and the other one up."""
    original = apply_rules.expert_layouts

    def layouts(module: Experts, *how: Any) -> dict[str, Layout]:
        found = original(module, *how)
        whole = found["gate_up_proj"]
        degrees = dict(zip(whole.axes, whole.degrees, strict=True))
        placements = dict(zip(whole.axes, whole.placements, strict=True)) | {"etp": Shard(1)}
        return found | {"gate_up_proj": Layout(whole.shape, degrees, placements)}

    return patch.object(apply_rules, "expert_layouts", layouts)


@contextmanager
def own_experts_counted_from_one_later() -> Iterator[None]:
    """The second rank takes its first expert for the one behind it."""
    original = layer.assign

    def assign(indices: Tensor, experts: range, sizes: Any = None, **more: Any) -> Assignments:
        if experts.start and not indices.is_meta:
            last = indices.new_tensor(experts.stop - 1)
            shifted = torch.where(indices == last, experts.start, indices + 1)
            is_own = (indices >= experts.start) & (indices < experts.stop)
            indices, sizes = torch.where(is_own, shifted, indices), None
        return original(indices, experts, sizes, **more)

    with patch.object(layer, "assign", assign):
        yield


@contextmanager
def slices_of_tp_overlap() -> Iterator[None]:
    """The second rank of tp takes its slice of the tokens from one token earlier."""
    original = layer.split

    def split(tensor: Tensor, group: Group, dim: int) -> Tensor:
        return original(tensor.roll(group.index, dim), group, dim)

    with patch.object(layer, "split", split):
        yield


@contextmanager
def experts_numbers_of_the_first_slice() -> Iterator[None]:
    """Each rank of tp reads its tokens' experts at the start of all tokens."""

    def own_range(whole: Tensor, group: Group, dim: int) -> Tensor:
        return whole.narrow(dim, 0, len(divide(whole.shape[dim], group.size)[group.index]))

    with patch.object(layer, "own_range", own_range):
        yield


def _weights(change: Callable[[Tensor], Tensor]) -> Any:
    original = Assignments.weights_of
    return patch.object(Assignments, "weights_of", lambda self, weights: change(original(self, weights)))


def weights_applied_twice() -> Any:
    """Each weight multiplies an output twice."""
    return during("forward", lambda: _weights(Tensor.square))


def weights_of_the_next_token() -> Any:
    """Each pair takes the weight of the pair before it."""
    return during("forward", lambda: _weights(lambda weights: weights.roll(1, 0)))


@contextmanager
def bias_of_each_rank_of_etp() -> Iterator[None]:
    """Each rank of etp adds the bias behind `down`."""
    original = Experts._call

    def call(self: Experts, *arguments: Any, adds_bias: bool = True) -> ExpertCall:
        return original(self, *arguments)

    with patch.object(Experts, "_call", call):
        yield


def shared_experts_weighted_twice() -> Any:
    """The output of shared experts is added for each of a token's experts."""
    original = MixtureOfExperts._shared_output
    return patch.object(
        MixtureOfExperts, "_shared_output", lambda self, shared, x: 2 * original(self, shared, x)
    )


def gradients_of_other_ranks_tokens_lost() -> Any:
    """The gradients of tokens that were sent to other ranks do not come back."""

    def change(exchange: TokenExchange, rows: Tensor) -> Tensor:
        own, parts = exchange.group.index, rows.split(list(exchange.counts.sent))
        return torch.cat([part if number == own else 0 * part for number, part in enumerate(parts)])

    return during("backward_input", lambda: _travelling("start_return", after=change))


def output_gradients_of_other_tokens() -> Any:
    """In the backward each token travels with the gradient of the one before it."""
    return during(
        "backward_input", lambda: _travelling("start", before=lambda exchange, rows: rows.roll(1, 0))
    )


@contextmanager
def gradients_of_slices_not_gathered() -> Iterator[None]:
    """A rank of tp keeps the gradient of its slice of the tokens, and 0 for the others."""

    def split(tensor: Tensor, group: Group, dim: int) -> Tensor:
        own = divide(tensor.shape[dim], group.size)[group.index]
        return tensor.narrow(dim, own.start, len(own))

    with patch.object(layer, "split", split):
        yield


def _row(
    defect: Any,
    phase: StepPhase = StepPhase.FORWARD,
    *,
    model: Any = sparse.FIVE,
    plan: Any = sparse.EP,
    full: bool = True,
    **named: Any,
) -> Row:
    default = {"layer": "1", "microbatch": 0, "ranks": (0,) if plan.dp > 1 else (0, 1)}
    named = default | {"cause": "what experts gives" if phase is StepPhase.FORWARD else ""} | named
    return Row(defect=defect, model=model, plan=plan, named=Named(phase=phase, **named), full=full)


EXCHANGE_OF_TOKENS = (
    _row(results_returned_in_another_order, full=False),
    _row(tokens_sent_one_later),
    _row(results_of_the_other_rank_lost),
    _row(first_result_counted_twice),
    _row(segments_of_ranks_exchanged),
    _row(tokens_of_the_micro_batch_before, microbatch=1),
    _row(own_experts_counted_from_one_later),
    _row(parts_of_etp_added_twice, plan=sparse.PARTS),
    _row(second_part_of_etp_lost, plan=sparse.PARTS),
    _row(gate_and_up_cut_as_one, plan=sparse.PARTS),
    _row(slices_of_tp_overlap, plan=sparse.SLICES),
    _row(experts_numbers_of_the_first_slice, plan=sparse.SLICES),
    _row(weights_applied_twice),
    _row(weights_of_the_next_token, plan=sparse.SPLIT),
    _row(bias_of_each_rank_of_etp, model=sparse.BIASED, plan=sparse.PARTS),
    _row(shared_experts_weighted_twice, model=sparse.SHARED, plan=sparse.SLICES, cause="mixture"),
    _row(gradients_of_other_ranks_tokens_lost, StepPhase.INPUT_GRADIENT, layer="2"),
    _row(output_gradients_of_other_tokens, StepPhase.INPUT_GRADIENT, layer="2"),
    _row(gradients_of_slices_not_gathered, StepPhase.INPUT_GRADIENT, plan=sparse.SLICES, layer="2"),
)
