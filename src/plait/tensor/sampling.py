"""Sampling: the model's input for a growing sequence, and the next token from its logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from operator import index

import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import DataError, NonFiniteError
from plait.plan.argument_checks import require_instance, require_number, whole
from plait.ranks.collectives import all_gather
from plait.tensor.parallel.partition import Vocabulary

LENGTH_STEP = 64
"""Sequences are padded to multiples of it, so that a growing sequence has few shapes."""


def padded(sequence: Tensor, context: int | None) -> tuple[Tensor, int]:
    """Return the last `context` tokens of `sequence` `[rows, length]`, padded on the right, and their count.

    A causal model does not see the padding. Without a context returns `sequence` itself.
    """
    if context is None:
        return sequence, sequence.shape[1]
    seen = sequence[:, -context:]
    length = seen.shape[1]
    wanted = min(context, -(-length // LENGTH_STEP) * LENGTH_STEP)
    return functional.pad(seen, (0, wanted - length)), length


@dataclass(frozen=True)
class TokenChoice:
    """How the next token is chosen, and after which tokens a row ends."""

    temperature: float = 1.0
    """0: the likeliest token."""
    top_k: int | None = None
    seed: int = 0
    stop: tuple[int, ...] = ()

    def stopped(self, token: Tensor, generated: Tensor) -> tuple[Tensor, bool]:
        """Return `token` `[rows]`, where an ended row repeats its last one, and whether all rows have ended.

        A row that has ended, with `generated` `[rows, n]` so far, repeats its last token.
        """
        stop = torch.tensor(self.stop, device=token.device)
        if generated.shape[1]:
            token = torch.where(torch.isin(generated[:, -1], stop), generated[:, -1], token)
        return token, bool(torch.isin(token, stop).all())


def stop_tokens(stop: int | Iterable[int]) -> tuple[int, ...]:
    """Return `stop`, the number of one token or of several, as a tuple. Raises DataError for other values."""
    try:
        return (index(stop),)  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        return tuple(map(index, stop))  # type: ignore[arg-type]
    except TypeError:
        raise DataError(f"stop is {stop!r}: give the number of a token, or several.") from None


def require_prompt(prompt: Tensor, tokens: int, choice: TokenChoice) -> None:
    """Raise DataError for a prompt or a choice with which sampling is not possible."""
    require_instance("the prompt", prompt, Tensor, "give a tensor of tokens, [rows, length]", DataError)
    require_instance("the seed", choice.seed, Integral, "give a whole number", DataError)
    whole("tokens", tokens, DataError, least=0)
    require_number("the temperature", choice.temperature, DataError, infinite="all tokens alike")
    if choice.top_k is not None:
        whole("top_k, unless it is None for all tokens,", choice.top_k, DataError)
    if prompt.dim() != 2 or prompt.shape[1] == 0 or prompt.is_floating_point():
        dtype = str(prompt.dtype).removeprefix("torch.")
        raise DataError(
            f"the prompt is {dtype}{list(prompt.shape)}: give tokens [rows, length], length at least 1."
        )


def next_token(
    logits: Tensor,
    choice: TokenChoice,
    generator: torch.Generator,
    *,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """Return the next token of each row, int64 `[rows]`, from all logits or this rank's `[rows, len(own)]`.

    Rows end by `TokenChoice.stopped`, not here. Samples the softmax of `logits / temperature` by the
    Gumbel-max trick (Gumbel 1954; Maddison et al. 2014): the argmax of logits plus noise. The noise of all
    classes comes from a CPU `generator`, in float64, so the token is the same on every rank, on every device
    and for any number of ranks, up to the rounding of logits. `temperature` 0 takes the argmax; of equal
    logits the smallest token. `top_k`: only logits that are not below the k-th largest are sampled.
    Communication, with a vocabulary: an all-gather of 16 bytes a row; with `top_k` one more, of 8 · k.
    Raises ModelError for logits that are not this rank's part, NonFiniteError for a row whose maximum is not
    finite.
    """
    if vocabulary is not None:
        vocabulary.require_vocabulary_shard(logits)
    values = logits.detach().to("cpu", torch.float64)
    classes = range(logits.shape[-1]) if vocabulary is None else vocabulary.own
    if choice.temperature > 0:
        values = values / choice.temperature
        if choice.top_k is not None:
            values = _likeliest(values, choice.top_k, vocabulary, logits.device)
        total = len(classes) if vocabulary is None else vocabulary.classes
        uniform = torch.rand(values.shape[0], total, dtype=torch.float64, generator=generator)
        values = values - (-uniform.log()).log()[:, classes.start : classes.stop]
    # One more column of -inf, because a part may be empty; argmax finds the first of equals.
    best = functional.pad(values, (0, 1), value=-torch.inf).max(dim=-1)
    own = torch.stack([best.values, (best.indices + classes.start).double()])
    largest, tokens = _all_gathered(own, vocabulary, logits.device).unbind(1)
    rank = largest.argmax(dim=0, keepdim=True)
    _require_finite(largest.gather(0, rank)[0])
    return tokens.gather(0, rank)[0].long().to(logits.device)


def _likeliest(values: Tensor, top_k: int, vocabulary: Vocabulary | None, device: torch.device) -> Tensor:
    """Return `values` with -inf where they are below the k-th largest of their row over all ranks."""
    parts = (values.shape[-1],) if vocabulary is None else vocabulary.sizes
    if top_k >= sum(parts):
        return values
    # Every rank sends the same number of values: at most the size of the largest part.
    count = min(top_k, max(parts))
    own = values.topk(min(count, values.shape[-1]), dim=-1).values
    own = functional.pad(own, (0, count - own.shape[-1]), value=-torch.inf)
    gathered = torch.cat(list(_all_gathered(own, vocabulary, device)), dim=-1)
    smallest = gathered.topk(top_k, dim=-1).values[:, -1:]
    return values.masked_fill(values < smallest, -torch.inf)


def _all_gathered(own: Tensor, vocabulary: Vocabulary | None, device: torch.device) -> Tensor:
    """Return the ranks' tensors as `[ranks, ...]` on the CPU; the all-gather runs on `device`."""
    if vocabulary is None:
        return own[None]
    gathered = all_gather(own.to(device), vocabulary.group, checked=False).wait()
    return gathered.view(vocabulary.group.size, *own.shape).cpu()


def _require_finite(largest: Tensor) -> None:
    if not largest.isfinite().all():
        row = int(largest.isfinite().logical_not().nonzero()[0])
        raise NonFiniteError(
            f"the largest logit of row {row} is {largest[row].item()}, so no token can be drawn: look for "
            "the step at which the model's parameters stopped being finite."
        )
