"""The auxiliary losses of routers, the loads of experts and the corrections of biases, on one device.

From what the routers of whole micro-batches give, by the formulas of `definitions.router_losses`.

Letters: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from plait.tensor.experts.balance import Balance
from plait.tensor.experts.router import Router, routers_of
from plait.tensor.named_layer import NamedLayer
from plait.verification.definitions.attention_and_dropout import numbers_of
from plait.verification.definitions.router_call_recorder import RouterCall
from plait.verification.definitions.router_losses import (
    choices_of,
    correction_of,
    load_of_documents,
    one_hot,
    probabilities_of,
    summed_balance_loss,
    summed_z_loss,
)
from plait.verification.step_location import RecordKey, Records

CHOICES, BALANCE_LOSS, Z_LOSS, CORRECTION = "choices", "balance", "z", "correction"
"""Kinds of records of a whole step, each by the path of a router."""
OF_ROUTERS = "of routers"
"""Kind of the gradient of a layer's input, like `gradient`, that the losses of its own routers give it."""


class RouterLosses:
    """Computes auxiliary losses, expert loads and bias corrections of all routers of a reference run."""

    def __init__(self, layers: Iterable[NamedLayer]) -> None:
        self.routers = routers_of(layers)
        self.settings = next((one.balance for one in self.routers.values()), Balance())
        self._names = {id(router.weight): path for path, router in self.routers.items()}
        self._previous: dict[str, Tensor] = {}
        """The choices of the step before."""
        self._choices: dict[str, Tensor] = {}
        self._loads: dict[str, Tensor] = {}
        """The load of the experts of each router in the whole step, float64 `[E]`."""
        self._tokens = 0
        self._losses: dict[str, Tensor] = {}

    def begin(self, calls: Sequence[RouterCall], ids: Tensor | None, rows: int) -> None:
        """Begin a step; `calls` and document `ids` are those of its whole batch, of `rows` rows."""
        self._previous, self._choices = self._choices, {}
        self._losses = {path: torch.zeros(2, dtype=torch.float64) for path in self.routers}
        for call in calls:
            path, counted = self._names[id(call.weight)], _documents(call, ids, rows) >= 0
            self._tokens = int(counted.sum())
            self._loads[path] = self._chosen(path, call)[counted].sum(0) / max(1, self._tokens)
            self._choices[path] = one_hot(call.indices, self._experts(path))[counted].sum(0).long()

    def losses(self, calls: Sequence[RouterCall], ids: Tensor | None, rows: int) -> list[Tensor]:
        """Return a micro-batch's share of each router call's weighted losses; 0-d.

        Adds each loss without its weight to those that `records` returns.
        """
        if not self.settings.has_losses:
            return []
        shares = []
        for call in calls:
            path, documents = self._names[id(call.weight)], _documents(call, ids, rows)
            probabilities = probabilities_of(self.routers[path].routing, call.logits)
            load, is_counted = self._load(call, calls, documents).to(probabilities.dtype), documents >= 0
            balance = summed_balance_loss(probabilities, load, is_counted) / self._layers / self._tokens
            z = summed_z_loss(call.logits, is_counted) / self._tokens
            self._losses[path] += torch.stack([balance, z]).detach().double().cpu()
            shares.append(self.settings.weight * balance + self.settings.z_weight * z)
        return shares

    def records(self) -> Records:
        """Return the choices and losses of the step, each by the path of a router."""
        records: Records = {}
        for path, losses in self._losses.items():
            records[RecordKey(CHOICES, name=path)] = self._choices[path]
            if self.settings.weight:
                records[RecordKey(BALANCE_LOSS, name=path)] = losses[0]
            if self.settings.z_weight:
                records[RecordKey(Z_LOSS, name=path)] = losses[1]
        return records

    @torch.no_grad()
    def correct(self) -> Records:
        """Raise the biases of experts with less than the mean load, lower others; return their records."""
        records: Records = {}
        for path, router in self.routers.items():
            bias, counts = router.e_score_correction_bias, self._choices.get(path)
            if bias is not None and counts is not None:
                bias += correction_of(counts, self.settings.bias_rate).to(bias)
                records[RecordKey(CORRECTION, name=path)] = bias.clone()
        return records

    @property
    def _layers(self) -> int:
        return len(self.routers) if self.settings.coupled else 1

    def _experts(self, path: str) -> int:
        return len(self.routers[path].weight)

    def _load(self, call: RouterCall, calls: Sequence[RouterCall], documents: Tensor) -> Tensor:
        """Return the load of each token's document, or of the step, `[T, E]`; coupled: of all layers."""
        loads = []
        for one in calls if self.settings.coupled else [call]:
            path = self._names[id(one.weight)]
            router = self.routers[path]
            if self.settings.counts == "document":
                loads.append(load_of_documents(self._chosen(path, one), documents))
                continue
            load = self._loads[path] if self.settings.counts == "step" else self._previous_load(path, router)
            loads.append(load.expand(len(documents), -1))
        return torch.stack(loads).mean(0)

    def _previous_load(self, path: str, router: Router) -> Tensor:
        experts = self._experts(path)
        if path not in self._previous:
            even = torch.full((experts,), router.top_k / experts, dtype=torch.float64)
            return even.to(router.weight.device)
        counts = self._previous[path].double()
        return router.top_k * counts / counts.sum().clamp(min=1)

    def _chosen(self, path: str, call: RouterCall) -> Tensor:
        return choices_of(self.routers[path].routing, call.logits.detach(), call.indices)


def _documents(call: RouterCall, ids: Tensor | None, rows: int) -> Tensor:
    """Return a number for each token that is equal within a document only, int64 `[T]`; -1 for padding."""
    length, device = len(call.indices) // rows, call.indices.device
    first = length * torch.arange(rows, device=device).unsqueeze(1)
    if ids is None:
        return first.expand(-1, length).flatten()
    ids = ids.to(device)
    return (numbers_of(ids) + first).masked_fill(ids < 0, -1).flatten()
