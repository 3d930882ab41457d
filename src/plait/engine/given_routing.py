"""Makes routers take given experts in a step, in place of those with the largest scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from plait.engine.fingerprint import fingerprint_of_tokens
from plait.engine.local_batch import LocalInputs, cut
from plait.engine.runner import LossBatch, Runner
from plait.errors import DataError, listed
from plait.plan.layout.layout import divide
from plait.ranks.accelerator import sent
from plait.tensor.experts.router_losses_of_step import RouterPlace, StepBalance
from plait.tensor.experts.routing import balanced_indices
from plait.tensor.experts.token_documents import TokenDocuments
from plait.tensor.microbatches import split
from plait.tensor.nested_values import tensors_of


@contextmanager
def given_experts(runner: Runner, routing: Mapping[str, Tensor] | None, batch: LossBatch) -> Iterator[None]:
    """Context: routers whose path is in `routing` take the experts given there; others choose themselves.

    Each is int64 `[rows, length, k]`, for the rows of this data-parallel rank, of whole sequences. Where
    routing is forced, the others take the experts of `balanced_indices`. Raises DataError for other tensors,
    and for paths that have no router. Communication: a hash of `routing` over `pp`, `cp` and `tp`.
    """
    balance = runner.runtime.balance
    if balance is None and routing is not None:
        raise DataError("routing is given to a model without routers: leave it out.")
    parts: dict[str, list[Tensor]] = {}
    if balance is not None and balance.settings.forced_routing:
        parts |= _balanced(runner, balance, batch.documents)
    if balance is not None and routing is not None:
        parts |= _given(runner, balance, routing, batch.inputs)
    if balance is None or not parts:
        yield
        return
    changed = [balance.routers[path] for path in parts]
    before = [router.given for router in changed]
    for router, experts in zip(changed, parts.values(), strict=True):
        router.given = partial(_of_running, balance, experts)
    try:
        yield
    finally:
        for router, given in zip(changed, before, strict=True):
            router.given = given


def _given(
    runner: Runner, balance: StepBalance, routing: Mapping[str, Tensor], inputs: LocalInputs
) -> dict[str, list[Tensor]]:
    """Return the experts in `routing` of this rank's tokens of each micro-batch, by path of its routers."""
    for path, experts in routing.items():
        _require(path, experts, balance.places)
    shapes = ", ".join(f"{path} {list(experts.shape)}" for path, experts in routing.items())
    hashed = fingerprint_of_tokens(dict(routing))
    runner.require_same_batch("a step that is given experts", shapes, hashed, None, over_pp=True)
    own = (path for path in balance.routers if path in routing)
    return {path: _parts(runner, routing[path], balance.places[path], inputs) for path in own}


def _balanced(
    runner: Runner, balance: StepBalance, microbatches: Sequence[TokenDocuments]
) -> dict[str, list[Tensor]]:
    """Return the experts of `balanced_indices` of this rank's tokens of each micro-batch, by path of routers.

    By the position in the sequence alone: in each layout a token has the same ones.
    """
    made: dict[tuple[RouterPlace, int], list[Tensor]] = {}
    tp, device = runner.mesh.group("tp"), runner.mesh.device
    for path, router in balance.routers.items():
        place = balance.places[path]
        if (place, router.top_k) in made:
            continue
        parts = made[place, router.top_k] = []
        for tokens in microbatches:
            positions = tokens.positions
            if place.in_parts:
                mine = divide(len(positions), tp.size)[tp.index]
                positions = positions[mine.start : mine.stop]
            experts = balanced_indices(positions, place.experts, router.top_k)
            parts.append(sent(experts.repeat(tokens.rows, 1), device))
    return {path: made[balance.places[path], router.top_k] for path, router in balance.routers.items()}


def _of_running(balance: StepBalance, parts: list[Tensor], scores: Tensor) -> Tensor:
    """Return the running micro-batch's experts `[T, k]`."""
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
