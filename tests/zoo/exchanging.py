"""Mistakes of what ranks exchange, each with what `likely` may say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parity.tensor_defects import replaced_backward
from plait.engine.pipeline.stage_exchange import Exchange
from plait.plan.plan import Plan
from plait.ranks.collectives import all_gather
from plait.schedules.action import Kind
from plait.tensor.autograd import paired_collectives
from plait.tensor.parallel import linear as region_boundary
from plait.verification.options import VerifyOptions
from zoo import cases
from zoo.backward import _messages
from zoo.computing import _of
from zoo.diagnosed import Mistake
from zoo.four import FOUR_PARTS
from zoo.patching import during, in_single
from zoo.row import TWO_STEPS

Parts = list[Tensor]
"""What each rank of a group brings."""


def _parts(tensor: Tensor, group: Any) -> Parts:
    return list(all_gather(tensor.detach().contiguous(), group).wait().chunk(group.size))


def _in_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().to(tensor.dtype)


def _leaving(change: Callable[[Parts, int], Tensor], layer: str = "*.mlp") -> Any:
    """What leaves a layer's region is what `change` makes of all ranks' summands and this rank's index."""

    def reduce(tensor: Tensor, group: Any) -> Tensor:
        wanted = change(_parts(tensor, group), group.index)
        total = paired_collectives.reduce(tensor.clone(), group)
        return total + (wanted - total).detach()

    return during("forward", lambda: patch.object(region_boundary, "reduce", reduce), layer=layer)


def summed_twice() -> Any:
    return _leaving(lambda parts, own: sum(parts) * len(parts))  # type: ignore[arg-type]


def averaged_over_four() -> Any:
    return _leaving(lambda parts, own: sum(parts) / len(parts))  # type: ignore[arg-type]


def largest_for_the_sum() -> Any:
    return _leaving(lambda parts, own: torch.stack(parts).amax(0))


def only_the_first_ranks() -> Any:
    return _leaving(lambda parts, own: parts[0])


def own_left_out() -> Any:
    """Each rank adds up what the others have."""
    return _leaving(lambda parts, own: sum(parts) - parts[own])  # type: ignore[arg-type]


def own_counted_twice() -> Any:
    return _leaving(lambda parts, own: sum(parts) + parts[own])  # type: ignore[arg-type]


def subtracted() -> Any:
    return _leaving(lambda parts, own: parts[0] - parts[1])


def summed_over_pairs() -> Any:
    """Of four ranks only two."""
    return _leaving(lambda parts, own: parts[own] + parts[own ^ 1])


def summed_in_bfloat16() -> Any:
    return _leaving(lambda parts, own: sum(map(_in_bfloat16, parts)))  # type: ignore[arg-type]


def summed_in_single_precision() -> Any:
    return _leaving(lambda parts, own: in_single(sum(map(in_single, parts))))  # type: ignore[arg-type]


def summed_shifted() -> Any:
    """The other rank's summand is one position late."""
    return _leaving(lambda parts, own: parts[own] + parts[1 - own].roll(1, 1))


def _entering(change: Callable[[Parts, int], Tensor], layer: str = "*.mlp") -> Any:
    """The same of the gradients where a region is entered."""

    def summed(gradient: Tensor, group: Any, overlap: Any) -> Tensor:
        return change(_parts(gradient, group), group.index)

    return during(
        "backward_input",
        lambda: replaced_backward(paired_collectives._sum, summed),
        layer=layer,
    )


def gradients_averaged() -> Any:
    return _entering(lambda parts, own: sum(parts) / len(parts))  # type: ignore[arg-type]


def gradients_summed_twice() -> Any:
    return _entering(lambda parts, own: sum(parts) * len(parts))  # type: ignore[arg-type]


def gradients_of_the_other_rank() -> Any:
    return _entering(lambda parts, own: parts[1 - own])


def gradients_of_the_first_rank() -> Any:
    return _entering(lambda parts, own: parts[0])


def gradients_summed_in_bfloat16() -> Any:
    return _entering(lambda parts, own: sum(map(_in_bfloat16, parts)))  # type: ignore[arg-type]


# messages


def _sent(change: Callable[[Any, Tensor], Tensor]) -> Any:
    """Messages forward are what `change` makes of them."""
    original = Exchange.send

    def send(self: Exchange, action: Any, tensors: Any, peer: int) -> None:
        forward = action.kind is Kind.F
        original(self, action, [change(action, t.detach().clone()) if forward else t for t in tensors], peer)

    return patch.object(Exchange, "send", send)


def message_of_zeros() -> Any:
    return _sent(lambda action, tensor: tensor * 0)


def message_in_bfloat16() -> Any:
    return _sent(lambda action, tensor: _in_bfloat16(tensor))


def message_negative() -> Any:
    return _sent(lambda action, tensor: -tensor)


def message_doubled() -> Any:
    return _sent(lambda action, tensor: 2 * tensor)


def message_with_rows_exchanged() -> Any:
    return _sent(lambda action, tensor: tensor.flip(0))


def message_one_feature_late() -> Any:
    """As when an offset is off by one element."""
    return _sent(lambda action, tensor: tensor.flatten().roll(1).view_as(tensor))


def message_with_last_row_unwritten() -> Any:
    def change(action: Any, tensor: Tensor) -> Tensor:
        tensor[-1] = torch.nan
        return tensor

    return _sent(change)


def second_half_not_sent() -> Any:
    def change(action: Any, tensor: Tensor) -> Tensor:
        tensor[len(tensor) // 2 :] = 0
        return tensor

    return _sent(change)


def half_of_the_message_before() -> Any:
    """The second row is that of the micro-batch before."""
    before: list[Tensor] = []

    def change(action: Any, tensor: Tensor) -> Tensor:
        before.append(tensor.clone())
        tensor[-1] = before[max(len(before) - 2, 0)][-1]
        return tensor

    return _sent(change)


def message_of_the_step_before() -> Any:
    sent: dict[int, Tensor] = {}

    def change(action: Any, tensor: Tensor) -> Tensor:
        return sent.setdefault(action.microbatch, tensor)

    return _sent(change)


def _sent_back(change: Callable[[Tensor], Tensor]) -> Any:
    return _messages(lambda action, gradients: [None if g is None else change(g) for g in gradients])


def gradient_in_bfloat16() -> Any:
    return _sent_back(_in_bfloat16)


def gradient_doubled() -> Any:
    return _sent_back(lambda gradient: 2 * gradient)


def gradient_with_rows_exchanged() -> Any:
    return _sent_back(lambda gradient: gradient.flip(0))


def gradient_without_its_last_row() -> Any:
    return _sent_back(lambda gradient: torch.cat((gradient[:-1], 0 * gradient[-1:])))


TP, PP = cases.TWO_PARTS_OF_THREE, cases.TWO_STAGES_OF_THREE
G, L = cases.GPT2, cases.LLAMA


def _at(
    plan: Plan, defect: Any, model: Any, cause: str, *true: str, options: VerifyOptions | None = None
) -> Mistake:
    more = {} if options is None else {"options": options}
    return _of(defect, model, cause, *true, plan=plan, **more)


EXCHANGING: tuple[Mistake, ...] = (
    _at(TP, summed_twice, L, "2 times .* size of tp", "factor", "sum", "cut", "sum"),
    _at(TP, summed_twice, G, "2 times .* size of tp|down gives", "factor", "sum", "cut", "sum"),
    _at(
        FOUR_PARTS,
        averaged_over_four,
        cases.FOUR_HEADS,
        "1/4 times|down gives",
        "factor",
        "sum",
        "cut",
        "sum",
    ),
    _at(TP, largest_for_the_sum, L, "down gives", "cut", "sum"),
    _at(TP, only_the_first_ranks, L, "down gives", "sum", "cut", "sum"),
    _at(TP, own_left_out, L, "down gives|over tp is missing", "sum", "cut", "sum"),
    _at(TP, own_counted_twice, L, "down gives", "sum", "cut", "sum"),
    _at(TP, subtracted, L, "down gives", "sum", "cut", "sum"),
    _at(
        FOUR_PARTS, summed_over_pairs, cases.FOUR_HEADS, "over tp is missing|down gives", "sum", "cut", "sum"
    ),
    _at(TP, summed_in_bfloat16, L, "16|down gives", "bfloat16", "float32", "cut", "sum"),
    _at(TP, summed_in_single_precision, G, "float32|down gives", "float32", "cut", "sum"),
    _at(TP, summed_shifted, L, "down gives", "cut", "sum"),
    _at(TP, gradients_averaged, G, "1/2 times .* averaged", "factor", "sum", "cut", "sum"),
    _at(TP, gradients_summed_twice, L, "2 times .* size of tp", "factor", "sum", "cut", "sum"),
    _at(TP, gradients_of_the_other_rank, L, "over tp is missing", "sum", "region", "cut", "sum"),
    _at(TP, gradients_of_the_first_rank, L, "tp", "sum", "region", "cut", "sum"),
    _at(TP, gradients_summed_in_bfloat16, G, "sum over tp", "region", "cut", "sum"),
    _at(PP, message_of_zeros, G, "zero"),
    _at(PP, message_in_bfloat16, L, "bfloat16", "bfloat16"),
    _at(PP, message_negative, G, "-1 times", "factor"),
    _at(PP, message_doubled, G, "2 times", "factor"),
    _at(PP, message_with_rows_exchanged, L, "order", "order"),
    _at(PP, message_one_feature_late, G, "order|shifted", "order"),
    _at(PP, message_with_last_row_unwritten, G, "never written"),
    _at(PP, second_half_not_sent, G, "zero", "cut", "rows"),
    _at(PP, half_of_the_message_before, L, "1:2 of dim 0", "cut", "rows"),
    _at(PP, message_of_the_step_before, L, "step before", "order", options=TWO_STEPS),
    _at(PP, gradient_in_bfloat16, G, "bfloat16", "bfloat16"),
    _at(PP, gradient_doubled, L, "2 times", "factor"),
    _at(PP, gradient_with_rows_exchanged, G, "order", "order"),
    _at(PP, gradient_without_its_last_row, G, "zero", "cut", "rows"),
)
