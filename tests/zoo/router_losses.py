"""Mistakes of the losses of routers, of counts of tokens and of the correction of biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.tensor.experts import router as routers
from plait.tensor.experts import router_losses_of_step
from plait.tensor.experts.router_losses_of_step import StepBalance
from plait.tensor.experts.routing import Routing
from plait.verification.step_location import StepPhase
from zoo import sparse
from zoo.patching import rank, replaced_all_reduce
from zoo.row import ONE_STEP, Named, Row


def padding_routed() -> Any:
    """Padding has experts, too."""
    return patch.object(routers, "without_padding", lambda indices, part: indices)


def _gradient(change: Callable[[StepBalance, Tensor], Tensor]) -> Any:
    original = StepBalance.gradient
    return patch.object(StepBalance, "gradient", lambda self, *call: change(self, original(self, *call)))


def losses_scaled_by_tp() -> Any:
    """Each rank of tp adds the whole loss of a router, as if these were summands."""
    return _gradient(lambda balance, gradient: gradient * balance.tp.size)


def losses_scaled_by_dp() -> Any:
    """The losses are means over a rank's own tokens."""
    return _gradient(lambda balance, gradient: gradient * 2)


def losses_of_each_micro_batch_a_mean() -> Any:
    """The losses of a micro-batch are divided by its own tokens."""
    return _gradient(lambda balance, gradient: gradient * len(balance._tokens))


def counts_of_own_positions() -> Any:
    """Under cp the load of a document is that of a rank's own positions."""
    return replaced_all_reduce(router_losses_of_step, "cp", lambda tensor, group: tensor)


@contextmanager
def counts_of_own_rank() -> Iterator[None]:
    """The load of the step is that of a rank's own tokens."""
    original = StepBalance._start

    def start(self: StepBalance, table: Any) -> None:
        whole = table.counts.clone()
        original(self, table)
        table.handle.wait().copy_(whole)

    with patch.object(StepBalance, "_start", start):
        yield


@contextmanager
def counts_doubled_by_recomputation() -> Iterator[None]:
    """The second run of a layer counts its tokens again."""
    original = StepBalance.attach

    def attach(self: StepBalance, path: str, logits: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        run = router_losses_of_step.RECOMPUTED_RUN.get()
        if run is not None and run.is_second and self._tokens:
            self._count(path, logits, indices)
        return original(self, path, logits, weights, indices)

    with patch.object(StepBalance, "attach", attach):
        yield


def load_of_one_rank_shown() -> Any:
    """The choices of experts are not summed over ranks."""
    original = StepBalance.settle

    def settle(self: StepBalance, totals: Tensor) -> None:
        own = [torch.cat([self._losses[path], self._choices[path].double()]) for path in self.places]
        original(self, torch.cat([*own, totals[sum(map(len, own)) :]]))

    return patch.object(StepBalance, "settle", settle)


def corrected_on_one_rank_only() -> Any:
    """The other ranks keep their biases."""
    original = StepBalance.correct
    return patch.object(StepBalance, "correct", lambda self: original(self) if rank() == 0 else None)


def biases_not_corrected() -> Any:
    """Biases stay as they are."""
    return patch.object(StepBalance, "correct", lambda self: None)


def probabilities_of_chosen_experts_only() -> Any:
    """The loss looks at the probabilities of the experts that a token has."""

    def balance(probabilities: Tensor, load: Tensor, documents: Tensor) -> Tensor:
        least = probabilities.topk(2, -1).values[..., -1:]
        return original(probabilities.where(probabilities >= least, 0), load, documents)

    original = router_losses_of_step.token_balance
    return patch.object(router_losses_of_step, "token_balance", balance)


def z_loss_of_the_mean() -> Any:
    """The z-loss squares the mean, not each token's logarithm."""

    def z(logits: Tensor, counted: Tensor) -> Tensor:
        own = logits.logsumexp(-1)[counted]
        return own.mean().square() * len(own)

    return patch.object(router_losses_of_step, "token_z", z)


def z_loss_not_squared() -> Any:
    """The z-loss adds up the logarithms themselves."""
    return patch.object(
        router_losses_of_step, "token_z", lambda logits, counted: logits.logsumexp(-1).where(counted, 0).sum()
    )


def load_without_k() -> Any:
    """The load of all experts adds up to 1, as Megatron-Core has it, not to k."""
    original = router_losses_of_step.token_balance

    def balance(probabilities: Tensor, load: Tensor, documents: Tensor) -> Tensor:
        return original(probabilities, load / load.sum(-1, keepdim=True), documents)

    return patch.object(router_losses_of_step, "token_balance", balance)


def sigmoids_not_over_their_sum() -> Any:
    """The probabilities of a router with sigmoids are these themselves, which do not add up to 1."""
    return patch.object(Routing, "probabilities", Routing.scores_of)


def _row(defect: Any, phase: StepPhase, cause: str = "", *, plan: Any = sparse.EP, **more: Any) -> Row:
    row = {"model": sparse.BALANCED, "full": True, "options": ONE_STEP}
    named = {"layer": "2", "microbatch": 0} if phase is StepPhase.INPUT_GRADIENT else {}
    row |= {key: more.pop(key) for key in list(more) if key in row}
    return Row(defect=defect, plan=plan, named=Named(phase=phase, cause=cause, **(named | more)), **row)


IN, LOAD, STATE = StepPhase.INPUT_GRADIENT, StepPhase.EXPERT_LOAD, StepPhase.OPTIMIZER
OTHER = "the losses of its router are others"
CP = replace(sparse.EP, dp=1, cp=2)
TP = replace(sparse.EP, dp=1, tp=2)
ROUTER_LOSSES = (
    _row(padding_routed, StepPhase.ROUTING, "padding", layer="1", full=False),
    _row(losses_scaled_by_tp, IN, "count 2 times", plan=TP),
    _row(losses_scaled_by_dp, IN, "count 2 times"),
    _row(losses_of_each_micro_batch_a_mean, IN, "count 2 times"),
    _row(counts_of_own_positions, IN, OTHER, plan=CP),
    _row(counts_of_own_rank, IN, OTHER, model=sparse.OF_THE_STEP, plan=replace(sparse.EP, microbatches=1)),
    _row(counts_doubled_by_recomputation, LOAD, "2 times", plan=sparse.RECOMPUTED),
    _row(load_of_one_rank_shown, LOAD, "sum over dp is missing"),
    _row(corrected_on_one_rank_only, STATE, "not corrected", model=sparse.LEARNING, ranks=(1,)),
    _row(biases_not_corrected, STATE, "not corrected", model=sparse.LEARNING),
    _row(probabilities_of_chosen_experts_only, IN, OTHER),
    _row(z_loss_of_the_mean, IN, OTHER),
    _row(z_loss_not_squared, IN, OTHER),
    _row(load_without_k, IN, OTHER),
    _row(sigmoids_not_over_their_sum, IN, OTHER, model=sparse.SIGMOIDS),
)
