"""The auxiliary losses of routers on one device, computed as terms of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from plait.tensor.experts.balance import Balance, corrected_bias, count_choices, token_balance, token_z
from plait.tensor.experts.router import Router
from plait.tensor.experts.routers import routers_of
from plait.tensor.experts.token_documents import TokenDocuments
from plait.tensor.layer_values import NamedLayer


class ReferenceBalance:
    """Computes the auxiliary losses of each micro-batch, and corrects biases after a step."""

    def __init__(self, layers: Iterable[NamedLayer]) -> None:
        self.routers = routers_of(layers)
        self.settings = next((router.balance for router in self.routers.values()), Balance())
        for path, router in self.routers.items():
            router.register_forward_hook(partial(self._record, path))
        self._records = False
        self._calls: dict[str, tuple[Tensor, Tensor]] = {}
        """By path: the logits and choices of the micro-batch that runs."""
        self._total = 1
        self._of_step: dict[str, Tensor] = {}
        """The choices of the whole step, without corrections, by path: `[1, E]`."""
        self._choices: dict[str, Tensor] = {}
        self._previous: dict[str, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the context the calls of routers count, and replace those of before."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def _record(
        self, path: str, router: Router, given: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        if self._records:
            logits, _, indices = output
            self._calls[path] = logits, indices

    def begin(self, microbatches: Sequence[TokenDocuments]) -> None:
        """Begin a step, given the documents of all micro-batches; its batch as a whole has just run."""
        self._total = max(1, sum(one.counted for one in microbatches))
        self._choices = {}
        parts = [one.numbers(slice(0, one.length), torch.device("cpu")) < one.count for one in microbatches]
        documents = torch.where(torch.cat(parts), 0, 1) if parts and self._calls else torch.empty(0)
        self._of_step = {
            path: self._uncorrected(path, documents.to(logits.device), 1)
            for path, (logits, _) in self._calls.items()
        }

    def losses(self, tokens: TokenDocuments) -> Tensor | None:
        """Return the weighted losses of the micro-batch that has run, as shares of the mean over the step.

        Counts its choices. None without routers or weights.
        """
        settings, terms = self.settings, []
        for path, (logits, indices) in self._calls.items():
            documents = tokens.numbers(slice(0, tokens.length), logits.device)
            chosen = count_choices(indices, documents, tokens.count, logits.shape[1]).sum(0)
            self._choices[path] = self._choices.get(path, 0) + chosen
            if settings.weight:
                probabilities = self.routers[path].routing.probabilities(logits)
                terms.append(
                    settings.weight * token_balance(probabilities, self._load(path, tokens), documents)
                )
                terms[-1] = terms[-1] / (len(self.routers) if settings.coupled else 1)
            if settings.z_weight:
                terms.append(settings.z_weight * token_z(logits, documents < tokens.count))
        return torch.stack(terms).sum() / self._total if terms else None

    def end(self) -> None:
        """End a step: correct the biases by its choices."""
        for path, router in self.routers.items():
            bias = router.e_score_correction_bias
            if self.settings.bias_rate and bias is not None:
                bias.copy_(corrected_bias(bias, self._choices[path], self.settings.bias_rate))
        self._previous = self._choices

    def _load(self, path: str, tokens: TokenDocuments) -> Tensor:
        """Return the load of each document of a micro-batch, float64 `[D, E]`."""
        paths = list(self.routers) if self.settings.coupled else [path]
        if self.settings.counts == "document":
            logits, _ = self._calls[path]
            documents = tokens.numbers(slice(0, tokens.length), logits.device)
            counts = _sum(self._uncorrected(one, documents, tokens.count) for one in paths)
            sizes = tokens.sizes.to(logits.device).clamp(min=1)[:, None]
            return counts / (len(paths) * sizes)
        router = self.routers[path]
        if self.settings.counts == "step":
            counts = _sum(self._of_step[one] for one in paths)
            return (counts / (len(paths) * self._total)).expand(tokens.count, -1)
        if not self._previous:
            experts = len(router.weight)
            return torch.full((tokens.count, experts), router.top_k / experts, dtype=torch.float64)
        counts = _sum(self._previous[one] for one in paths)
        return (router.top_k * counts / counts.sum().clamp(min=1)).expand(tokens.count, -1)

    def _uncorrected(self, path: str, documents: Tensor, count: int) -> Tensor:
        logits, indices = self._calls[path]
        chosen = self.routers[path].routing.uncorrected_choice(logits.detach(), indices)
        return count_choices(chosen, documents, count, logits.shape[1])


def _sum(counts: Iterable[Tensor]) -> Tensor:
    """Return the sum in float64, in which the quotients of counts are rounded."""
    return torch.stack(list(counts)).sum(0).double()
