"""The products of experts, with a backward that computes weight gradients later, in action `W`.

    F    rows of gate and up → activation, times the pair's weight → rows of output, summed for each token
    I    gradients of the rows, of the weights, and of the tokens; operands of the weight gradients are queued
    W    weight gradients, added to their buffers

With `Plan.linears` the products of F and I are in float8 (`expert_casts`), those of W are not.
Where tokens have come from other ranks, F sends the sums back, and I exchanges the gradients likewise.

The weight of a pair multiplies the activation, which is the same as multiplying the output, and half as wide.
What stays until the backward is the tokens and the rows of gate and up. Letters: T tokens, H hidden features,
A pairs of a token and an expert, F inner features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from plait.tensor.autograd.kept_results import RECOMPUTED_RUN, kept
from plait.tensor.autograd.private_torch_functions import apply_function
from plait.tensor.autograd.regathered_activations import PendingTensor
from plait.tensor.autograd.split_backward import refuse_other_orders
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.experts.assignments import Assignments
from plait.tensor.experts.expert_casts import ExpertCasts, MatrixCasts
from plait.tensor.experts.gated_activation import GatedActivation
from plait.tensor.experts.grouped_products import (
    Groups,
    add_grouped_product,
    for_each_row,
    grouped_product,
    grouped_sums,
)
from plait.tensor.experts.low_rank import Add, LowRank, Rows, weight_gradients
from plait.tensor.experts.token_exchange import TokenExchange, pack, unpack


@dataclass(frozen=True)
class ExpertParameters:
    """The parameters of a rank's experts, perhaps parts of them."""

    gate_up: Tensor
    """`[experts, 2F, H]`, or `[experts, H, 2F]` if transposed."""
    down: Tensor
    """`[experts, H, F]`, or `[experts, F, H]`."""
    gate_up_bias: Tensor | None = None
    """`[experts, 2F]`."""
    down_bias: Tensor | None = None
    """`[experts, H]`."""
    transposed: bool = False
    gate_up_adapter: LowRank | None = None
    down_adapter: LowRank | None = None

    @property
    def each(self) -> tuple[Tensor | None, ...]:
        """All parameters and adapters' matrices as a flat tuple; None for a bias that is missing."""
        adapters = (one for one in (self.gate_up_adapter, self.down_adapter) if one is not None)
        factors = (factor for one in adapters for factor in (one.down, one.up))
        return self.gate_up, self.down, self.gate_up_bias, self.down_bias, *factors

    def to(self, dtype: torch.dtype) -> ExpertParameters:
        """Return the parameters cast to `dtype`; autograd casts their gradients back."""
        return replace(
            self,
            gate_up=self.gate_up.to(dtype),
            down=self.down.to(dtype),
            gate_up_bias=None if self.gate_up_bias is None else self.gate_up_bias.to(dtype),
            down_bias=None if self.down_bias is None else self.down_bias.to(dtype),
            gate_up_adapter=None if self.gate_up_adapter is None else self.gate_up_adapter.to(dtype),
            down_adapter=None if self.down_adapter is None else self.down_adapter.to(dtype),
        )

    def inward(self, weight: Tensor) -> Tensor:
        """Return the matrices as `[experts, in, out]`, which multiply rows in the forward."""
        return weight if self.transposed else weight.transpose(1, 2)

    def outward(self, weight: Tensor) -> Tensor:
        """Return the matrices as `[experts, out, in]`, which multiply gradients in the backward."""
        return weight.transpose(1, 2) if self.transposed else weight


@dataclass(frozen=True)
class ExpertCall:
    """One call of experts: everything but its tensors."""

    assignments: Assignments
    parameters: ExpertParameters
    activation: GatedActivation
    weights_first: bool
    """Whether the weight of a pair multiplies the expert's input in place of its output."""
    adds_bias: bool
    """Whether `down_bias` is added here, and not by another rank."""
    queue: WeightGradientQueue | None
    """Where weight gradients are queued; None: they are computed with the other gradients."""
    exchange: TokenExchange | None = None
    """By which the tokens have come from other ranks; None: they are this rank's."""
    casts: ExpertCasts | None = None
    """How operands of the products of F and I are cast to float8; None: they are not."""

    def gate_up(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return gate and up of each pair of a token and an expert, `[A, 2F]`."""
        of, parameters = self.assignments, self.parameters
        inputs = cache(lambda: self._inputs(tokens, weights))
        copied = None if self.weights_first else tokens
        casts = None if self.casts is None else self.casts.gate_up
        rows = self._outputs(inputs, copied, parameters.gate_up, casts)
        if parameters.gate_up_adapter is not None:
            parameters.gate_up_adapter.add_outputs(rows, inputs(), of.groups)
        if parameters.gate_up_bias is not None:
            rows += for_each_row(parameters.gate_up_bias, of.groups)
        return rows

    def result(self, gate_up: Tensor, weights: Tensor) -> Tensor:
        """Return each token's sum of its experts' outputs, on the rank that sent the token.

        Communication with an exchange: one all-to-all.
        """
        sums = self._sums(gate_up, weights)
        return sums if self.exchange is None else self.exchange.rows.sums(self.exchange.start_return(sums)())

    def _sums(self, gate_up: Tensor, weights: Tensor) -> Tensor:
        """Return each token's sum of the outputs of this rank's experts: `[T, H]`."""
        of, parameters = self.assignments, self.parameters
        activated = self.activation(gate_up)
        if not self.weights_first:
            activated *= of.weights_of(weights)
        casts = None if self.casts is None else self.casts.down
        rows = self._outputs(lambda: activated, None, parameters.down, casts)
        if parameters.down_adapter is not None:
            parameters.down_adapter.add_outputs(rows, activated, of.groups)
        if parameters.down_bias is not None and self.adds_bias:
            bias = for_each_row(parameters.down_bias, of.groups)
            rows += bias if self.weights_first else bias * of.weights_of(weights)
        return of.rows.sums(rows)

    def gradients(
        self, gradient: Tensor, tokens: Tensor, weights: Tensor, gate_up: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Add, ...]]:
        """Return the gradients of tokens and weights, and functions that add those of parameters later."""
        of, parameters = self.assignments, self.parameters
        by_pair = of.weights_of(weights)
        of_output = cache(lambda: of.rows.copies(gradient))
        activated, activation_gradient = self.activation.with_gradient(gate_up)
        casts = None if self.casts is None else self.casts.down
        of_activated = self._input_gradients(of_output, gradient, parameters.down, casts)
        of_narrow_down = _add_adapted(parameters.down_adapter, of_activated, of_output, of.groups)
        if not self.weights_first:
            of_weight = (of_activated * activated).sum(1)
            if parameters.down_bias is not None and self.adds_bias:
                of_weight += (of_output() * for_each_row(parameters.down_bias, of.groups)).sum(1)
            of_activated *= by_pair
            activated *= by_pair
        of_gate_up = activation_gradient(of_activated)
        del of_output, of_activated
        casts = None if self.casts is None else self.casts.gate_up
        of_input = self._input_gradients(lambda: of_gate_up, None, parameters.gate_up, casts)
        of_narrow_gate_up = _add_adapted(parameters.gate_up_adapter, of_input, lambda: of_gate_up, of.groups)
        if self.weights_first:
            of_weight = (of_input * of.rows.copies(tokens)).sum(1)
            of_input *= by_pair
        works: tuple[Add, ...] = (
            partial(self._add_gate_up, of_gate_up, tokens, weights),
            partial(self._add_down, gradient, activated),
            partial(self._add_gate_up_bias, of_gate_up),
            partial(self._add_down_bias, gradient, weights),
            *self._of_gate_up_adapter(of_narrow_gate_up, of_gate_up, tokens, weights),
            *self._of_down_adapter(of_narrow_down, gradient, activated),
        )
        return of.rows.sums(of_input), of.in_slots(of_weight, weights), works

    def _outputs(
        self, rows: Rows, tokens: Tensor | None, weight: Tensor, casts: MatrixCasts | None
    ) -> Tensor:
        """Return the outputs of one matrix of each expert for `rows`, `[A, in]`.

        `tokens`: of which the rows are copies, so that only these are cast; None: they are no copies.
        """
        of, parameters = self.assignments, self.parameters
        if casts is None:
            return grouped_product(rows(), parameters.inward(weight), of.groups)
        given, copies = (rows(), None) if tokens is None else (tokens, of.rows)
        return casts.products(given, copies, parameters.outward(weight), of.groups)

    def _input_gradients(
        self, rows: Rows, tokens: Tensor | None, weight: Tensor, casts: MatrixCasts | None
    ) -> Tensor:
        """Return the input gradients of one matrix of each expert from those of its outputs, `[A, out]`.

        Arguments as of `_outputs`.
        """
        of, parameters = self.assignments, self.parameters
        if casts is None:
            return grouped_product(rows(), parameters.outward(weight), of.groups)
        given, copies = (rows(), None) if tokens is None else (tokens, of.rows)
        return casts.input_gradients(given, copies, parameters.outward(weight), of.groups)

    def _of_gate_up_adapter(
        self, of_narrow: Tensor | None, of_gate_up: Tensor, tokens: Tensor, weights: Tensor
    ) -> tuple[Add, ...]:
        adapter, groups = self.parameters.gate_up_adapter, self.assignments.groups
        if adapter is None or of_narrow is None:
            return ()
        inputs = partial(self._inputs, tokens, weights)
        return weight_gradients(
            inputs, adapter.narrow(inputs(), groups), of_narrow, lambda: of_gate_up, groups
        )

    def _of_down_adapter(
        self, of_narrow: Tensor | None, gradient: Tensor, activated: Tensor
    ) -> tuple[Add, ...]:
        adapter, groups = self.parameters.down_adapter, self.assignments.groups
        if adapter is None or of_narrow is None:
            return ()
        of_output = partial(self.assignments.rows.copies, gradient)
        return weight_gradients(
            lambda: activated, adapter.narrow(activated, groups), of_narrow, of_output, groups
        )

    def _inputs(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return the experts' inputs, `[A, H]`."""
        rows = self.assignments.rows.copies(tokens)
        return rows.mul_(self.assignments.weights_of(weights)) if self.weights_first else rows

    def _add_gate_up(
        self, of_gate_up: Tensor, tokens: Tensor, weights: Tensor, total: Tensor, first: bool
    ) -> None:
        self._add(self._inputs(tokens, weights), of_gate_up, total, first)

    def _add_down(self, gradient: Tensor, activated: Tensor, total: Tensor, first: bool) -> None:
        self._add(activated, self.assignments.rows.copies(gradient), total, first)

    def _add(self, inputs: Tensor, of_outputs: Tensor, total: Tensor, first: bool) -> None:
        left, right = (inputs, of_outputs) if self.parameters.transposed else (of_outputs, inputs)
        add_grouped_product(total, left, right, self.assignments.groups, first)

    def _add_gate_up_bias(self, of_gate_up: Tensor, total: Tensor, first: bool) -> None:
        _add_bias(grouped_sums(of_gate_up, self.assignments.groups), total, first)

    def _add_down_bias(self, gradient: Tensor, weights: Tensor, total: Tensor, first: bool) -> None:
        rows = self.assignments.rows.copies(gradient)
        if not self.weights_first:
            rows *= self.assignments.weights_of(weights)
        _add_bias(grouped_sums(rows, self.assignments.groups), total, first)


def _add_adapted(
    adapter: LowRank | None, of_inputs: Tensor, of_outputs: Rows, groups: Groups
) -> Tensor | None:
    """Add an adapter's gradients of the inputs; return those of its narrow rows, None without an adapter."""
    return None if adapter is None else adapter.add_input_gradients(of_inputs, of_outputs(), groups)


def compute_experts(
    hidden: Tensor, weights: Tensor, here: tuple[Tensor, Tensor] | None, call: ExpertCall
) -> Tensor:
    """Return each token's weighted sum of the outputs of its experts, like `hidden`, `[T, H]`.

    `weights [T, k]`. `here`: the tokens that this rank's experts compute, and their weights, where they have
    come from other ranks. Recomputation keeps the rows of gate and up.
    """
    tokens, token_weights = (hidden.detach(), weights.detach()) if here is None else here
    with torch.no_grad():
        gate_up = kept(lambda: (call.gate_up(tokens, token_weights),))[0]
    arguments = hidden, weights, *call.parameters.each, tokens, token_weights, gate_up, call
    run = RECOMPUTED_RUN.get()
    if run is None:
        return apply_function(_Experts, *arguments, False)  # type: ignore[no-any-return]
    if not run.is_second:
        return run.result(lambda: (apply_function(_Experts, *arguments, False),))[0]  # type: ignore[return-value]
    output: Tensor = apply_function(_Experts, *arguments, True)
    if not run.output_is_read:
        return output
    # After the operands are saved, where a second run may end.
    with torch.no_grad():
        assert gate_up is not None
        output.set_(run.result(lambda: (call.result(gate_up, token_weights),))[0])  # type: ignore[call-overload]
    return output


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, *given: Any) -> Tensor:
        """Return the experts' weighted sum, or a tensor without memory that is set later.

        `given`: parameters, the tokens that are computed here, their weights, their rows of gate and up,
        the call, and whether its result is set later.
        """
        *ctx.parameters, tokens, token_weights, gate_up, ctx.call, is_late = given
        ctx.save_for_backward(tokens, token_weights, gate_up)
        ctx.ran = False
        if is_late:
            return hidden.new_empty_strided(hidden.shape, (0,) * hidden.dim())
        result: Tensor = ctx.call.result(gate_up, token_weights)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call: ExpertCall = ctx.call
        queue, exchange = call.queue, call.exchange
        if queue is not None or torch.is_grad_enabled():
            refuse_other_orders(ctx, "a layer of experts")
        saved = [one.detach() for one in ctx.saved_tensors]  # pending work must not hold the layer's graph
        if exchange is not None:
            gradient = _meanwhile(queue, exchange.start(gradient))
        *found, works = call.gradients(gradient, *saved)
        returning = None if exchange is None else exchange.start_return(pack(*found))
        given = [_given_or_queued(*each, queue) for each in zip(ctx.parameters, works, strict=True)]
        if exchange is not None and returning is not None:
            found = [exchange.rows.sums(one) for one in unpack(_meanwhile(queue, returning), found)]
        return *found, *given, None, None, None, None, None


def _meanwhile(queue: WeightGradientQueue | None, pending: PendingTensor) -> Tensor:
    """Wait for a tensor that is being sent, and return it; before, compute queued weight gradients."""
    if queue is not None:
        queue.overlap()
    return pending()


def _given_or_queued(parameter: Tensor | None, add: Add, queue: WeightGradientQueue | None) -> Tensor | None:
    """Queue the weight gradient of a parameter; without a queue, or if it is itself computed, return it."""
    if parameter is None or not parameter.requires_grad:
        return None
    if queue is not None and parameter.is_leaf:
        queue.add(partial(_add_to_buffer, queue, parameter, add))
        return None
    total = torch.empty_like(parameter)
    add(total, True)
    return total


def _add_to_buffer(queue: WeightGradientQueue, parameter: Tensor, add: Add) -> None:
    first = bool(queue.unwritten) and queue.begins((parameter,))
    add(queue.buffer_of(parameter), first)


def _add_bias(gradient: Tensor, total: Tensor, first: bool) -> None:
    if first:
        total.copy_(gradient)
    else:
        total.add_(gradient)
