"""Experts that a step gives to its routers, in place of those of the largest scores, as in a replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from plait.engine.fingerprint import fingerprint_of_tokens
from plait.engine.local_batch import LocalInputs, cut
from plait.engine.runner import Runner
from plait.errors import DataError, listed
from plait.plan.layout.layout import divide
from plait.tensor.experts.step_balance import RouterPlace, StepBalance
from plait.tensor.layer_values import split, tensors_of


@contextmanager
def given_experts(
    runner: Runner, routing: Mapping[str, Tensor] | None, inputs: LocalInputs
) -> Iterator[None]:
    """Context: routers take the experts in `routing`, by their paths in the model; None: they choose.

    Each is int64 `[rows, length, k]`, for the rows of this data-parallel rank, of whole sequences. `inputs`:
    this rank's part of the batch. Raises DataError for other tensors, and for paths that have no router.
    Communication: a hash over `pp`, `cp` and `tp`, to compare.
    """
    if routing is None:
        yield
        return
    balance = runner.runtime.balance
    if balance is None:
        raise DataError("routing is given to a model without routers: leave it out.")
    for path, experts in routing.items():
        _require(path, experts, balance.places)
    shapes = ", ".join(f"{path} {list(experts.shape)}" for path, experts in routing.items())
    hashed = fingerprint_of_tokens(dict(routing))
    runner.require_same_batch("a step that is given experts", shapes, hashed, None, over_pp=True)
    chosen = [
        (router, routing[path], balance.places[path])
        for path, router in balance.routers.items()
        if path in routing
    ]
    before = [router.given for router, _, _ in chosen]
    for router, experts, place in chosen:
        parts = _parts(runner, experts, place, inputs)
        router.given = partial(_of_running, balance, parts)
    try:
        yield
    finally:
        for (router, _, _), given in zip(chosen, before, strict=True):
            router.given = given


def _of_running(balance: StepBalance, parts: list[Tensor], scores: Tensor) -> Tensor:
    """Return the experts `[T, k]` of the micro-batch that runs."""
    assert balance.microbatch is not None
    return parts[balance.microbatch]


def _parts(runner: Runner, experts: Tensor, place: RouterPlace, inputs: LocalInputs) -> list[Tensor]:
    """Return the experts of this rank's tokens of each micro-batch, `[T, k]`."""
    parts, tp = [], runner.mesh.group("tp")
    rows = split(experts, runner.plan.microbatches, "experts of routing")
    for part, sequence in zip(rows, inputs.sequences, strict=True):
        (own,) = tensors_of(cut(part, sequence, "experts of routing"))
        if place.in_parts:
            mine = divide(own.shape[1], tp.size)[tp.index]
            own = own[:, mine.start : mine.stop]
        parts.append(own.flatten(0, 1).to(runner.mesh.device))
    return parts


def _require(path: str, experts: Tensor, places: Mapping[str, RouterPlace]) -> None:
    """Raise DataError unless a router is at `path`, and `experts` are numbers of its experts."""
    if path not in places:
        raise DataError(
            f"routing has {path!r}, where there is no router: choose of {listed(sorted(places))}."
        )
    count = places[path].experts
    if experts.dtype != torch.int64 or experts.dim() != 3:
        raise DataError(
            f"the experts of {path} are {experts.dtype} {list(experts.shape)}: give torch.int64 [rows, "
            "length, k], the numbers of the experts of each position."
        )
    if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < count:
        raise DataError(
            f"the experts of {path} are {int(experts.min())} to {int(experts.max())}: give numbers from 0 to "
            f"{count - 1}, also for padding, which is not routed anyway."
        )
