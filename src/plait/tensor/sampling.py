"""Continuing a sequence: what the model is shown, and how the next token is drawn from its logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from plait.comm.collectives import all_gather
from plait.errors import DataError, NonFiniteError
from plait.tensor.vocabulary import Vocabulary

LENGTH_STEP = 64
"""Sequences are padded to multiples of it, so that few shapes occur while one grows token by token."""


def padded(sequence: Tensor, context: int | None) -> tuple[Tensor, int]:
    """The last `context` tokens of `sequence` `[rows, length]`, padded on the right, and how many are real.

    A causal model does not look at the padding. Without a context nothing is cut or padded.
    """
    if context is None:
        return sequence, sequence.shape[1]
    seen = sequence[:, -context:]
    length = seen.shape[1]
    wanted = min(context, -(-length // LENGTH_STEP) * LENGTH_STEP)
    return functional.pad(seen, (0, wanted - length)), length


def require_prompt(prompt: Tensor, tokens: int, temperature: float, top_k: int | None) -> None:
    """DataError for what cannot be continued."""
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise DataError(f"the prompt has shape {list(prompt.shape)}: give [rows, length], length at least 1.")
    if tokens < 0:
        raise DataError(f"{tokens} tokens were asked for: give at least 0.")
    if temperature < 0:
        raise DataError(f"the temperature is {temperature}: give at least 0 (the likeliest token).")
    if top_k is not None and top_k < 1:
        raise DataError(f"top_k is {top_k}: give at least 1, or None for all tokens.")


def next_token(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """One token per row, int64 `[rows]`, of whole logits, or of this rank's piece `[rows, len(own)]`.

    Drawn from the softmax of the logits over `temperature` by the Gumbel-max trick (Gumbel 1954; Maddison et
    al. 2014): with noise on each logit, the largest wins. The noise of all classes comes from `generator`, on
    the CPU and in float64, the same on every rank. So the token is the same on every rank, on every device
    and for any number of ranks, but for the rounding of logits. `temperature` 0 takes the likeliest; of equal
    ones the smallest number wins. `top_k`: only logits that are not below the k-th largest are drawn.
    Communication, with a vocabulary: an all-gather of 16 bytes a row; with `top_k` one more, of 8 · k.
    ModelError for logits that are not this rank's piece, NonFiniteError for a row without a finite largest.
    """
    if vocabulary is not None:
        vocabulary.require_piece(logits)
    values = logits.detach().to("cpu", torch.float64)
    classes = range(logits.shape[-1]) if vocabulary is None else vocabulary.own
    if temperature > 0:
        values = values / temperature
        if top_k is not None:
            values = _likeliest(values, top_k, vocabulary, logits.device)
        total = len(classes) if vocabulary is None else vocabulary.classes
        values = values + _gumbel(values.shape[0], total, generator)[:, classes.start : classes.stop]
    # One more column, below all, gives an empty piece something to offer; argmax finds the first of equals.
    best = functional.pad(values, (0, 1), value=-torch.inf).max(dim=-1)
    offers = torch.stack([best.values, (best.indices + classes.start).double()])
    largest, tokens = _from_all(offers, vocabulary, logits.device).unbind(1)
    winner = largest.argmax(dim=0, keepdim=True)
    _require_finite(largest.gather(0, winner)[0])
    return tokens.gather(0, winner)[0].long().to(logits.device)


def _likeliest(values: Tensor, top_k: int, vocabulary: Vocabulary | None, device: torch.device) -> Tensor:
    """`values` with -inf for what is below the k-th largest of its row on all ranks."""
    pieces = (values.shape[-1],) if vocabulary is None else vocabulary.sizes
    if top_k >= sum(pieces):
        return values
    # Every rank offers as many: as the largest piece has, at most.
    wanted = min(top_k, max(pieces))
    offered = values.topk(min(wanted, values.shape[-1]), dim=-1).values
    offered = functional.pad(offered, (0, wanted - offered.shape[-1]), value=-torch.inf)
    everyone = torch.cat(list(_from_all(offered, vocabulary, device)), dim=-1)
    smallest = everyone.topk(top_k, dim=-1).values[:, -1:]
    return values.masked_fill(values < smallest, -torch.inf)


def _gumbel(rows: int, classes: int, generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise `[rows, classes]`, float64."""
    return -(-torch.rand(rows, classes, dtype=torch.float64, generator=generator).log()).log()


def _from_all(offer: Tensor, vocabulary: Vocabulary | None, device: torch.device) -> Tensor:
    """The ranks' tensors `[...]`, on the CPU: `[ranks, ...]`; they travel from `device` to `device`."""
    if vocabulary is None:
        return offer[None]
    gathered = all_gather(offer.to(device), vocabulary.group, checked=False).wait()
    return gathered.view(vocabulary.group.size, *offer.shape).cpu()


def _require_finite(largest: Tensor) -> None:
    if not largest.isfinite().all():
        row = int(largest.isfinite().logical_not().nonzero()[0])
        raise NonFiniteError(
            f"the largest logit of row {row} is {largest[row].item()}, so no token can be drawn: look for "
            "the step at which the model's parameters stopped being finite."
        )
