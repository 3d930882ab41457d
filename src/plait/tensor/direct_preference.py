"""Direct preference optimization: the loss of pairs of answers, and batches of such pairs.

For a prompt with a chosen answer `c` and a rejected one `r`, the model's probabilities p, and those of the
reference, the model before training, q (Rafailov et al. 2023, equation 7):

    margin  m = β ((log p(c) - log q(c)) - (log p(r) - log q(r)))
    loss    -(1 - ε) log σ(m) - ε log σ(-m)        ε: label smoothing (Mitchell 2023), 0 in the paper

log p of an answer is the sum over its tokens, or their mean (`average`). The mean of the loss is over all
pairs of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import ConfigError, DataError
from plait.plan.argument_checks import require_flag, require_instance, require_number, whole
from plait.tensor.autograd.paired_collectives import reduce
from plait.tensor.losses import cross_entropy, token_losses_over_vocabulary, wide
from plait.tensor.parallel.partition import Vocabulary
from plait.tensor.running_sequence import running_sequence

Targets = Mapping[str, Tensor]
"""Of `preference_batch`; all are `[rows, length]`.

tokens      the next token, of answers only, else -100
answers     of a token of an answer its number in the row: 2 k is the chosen one of pair k, 2 k + 1 the other
begins      1 at one token of each pair, else 0
reference   the reference's log-probability of each token of an answer, else 0
"""
Preference = Sequence[Sequence[int] | Sequence[float] | Tensor]
"""Tokens of a prompt, a chosen answer and a rejected one, and the reference's log-probabilities, if any."""
_KEYS = {"tokens", "answers", "begins", "reference"}
_NO_TOKENS = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROUNDING = 1e-3
"""By how much less a log-probability may exceed 0."""


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of direct preference optimization; made by `dpo_loss`."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    average: bool = False
    pairs: int = 1
    """The most pairs in a row."""
    apart: bool = False
    """Whether each answer has a row of its own: rows 2 i and 2 i + 1 are a pair."""
    adds_over_cp: Literal[True] = True

    def total(self, output: Tensor, targets: Targets) -> Tensor:
        """Return the loss summed over the pairs of a micro-batch, 0-d, from logits `[rows, length, classes]`.

        Communication: under context parallelism an all-reduce over `cp` of some numbers for each pair.
        """
        return self._total(lambda tokens: -token_log_probs(output, tokens), _required(targets))

    def total_of_pieces(self, logits: Tensor, targets: Targets, vocabulary: Vocabulary) -> Tensor:
        """Return the summed loss, given only this rank's classes of the logits; may overwrite them.

        Communication: that of `total`, and that of `CrossEntropy.total_of_pieces`.
        """

        def losses(tokens: Tensor) -> Tensor:
            return token_losses_over_vocabulary(logits, tokens, vocabulary, cross_entropy).view(tokens.shape)

        return self._total(losses, _required(targets))

    def weight(self, targets: Targets) -> Tensor:
        """Return the number of pairs, 0-d.

        Raises DataError for targets that `preference_batch` has not made, and for half a pair.
        """
        _required(targets)
        answers = targets["answers"]
        if self.apart and len(answers) % 2:
            raise DataError(
                f"a micro-batch has {len(answers)} rows, and two consecutive rows are a pair: give batches, "
                "and plan.microbatches, that leave pairs together."
            )
        most = 1 if self.apart else 2 * self.pairs - 1
        if answers.device.type == "cpu" and answers.numel() and int(answers.max()) > most:
            raise DataError(
                f"a row holds {int(answers.max()) // 2 + 1} pairs, and the loss takes {self.pairs}: give "
                "dpo_loss the same pairs and apart as preference_batch."
            )
        return targets["begins"].sum()

    def margins(self, output: Tensor, targets: Targets) -> Tensor:
        """Return each pair's margin `[pairs]`, in which β is a factor; above 0 where the chosen is preferred.

        `output` are whole logits, as in a metric of `plait.fit`: `loss.margins(output, targets) > 0`.
        """
        margins, exists = self._margins(self._sums(-token_log_probs(output, targets["tokens"]), targets))
        return margins[exists]

    def _total(self, losses: Callable[[Tensor], Tensor], targets: Targets) -> Tensor:
        """Return the summed loss; `losses`: returns the cross-entropy of each token."""
        sums, sequence = self._sums(losses(targets["tokens"]), targets), running_sequence()
        is_first = True
        if sequence is not None and sequence.group.size > 1:
            sums, is_first = reduce(sums, sequence.group), sequence.group.index == 0
        margins, exists = self._margins(sums)
        self._require_pairs(sums, exists)
        smooth = self.label_smoothing
        each = -(1 - smooth) * functional.logsigmoid(margins) - smooth * functional.logsigmoid(-margins)
        total = each.where(exists, 0.0).sum()
        return total if is_first else total - total.detach()

    def _require_pairs(self, sums: Tensor, exists: Tensor) -> None:
        """Raise DataError (CPU only) unless each row's answers are pairs of a chosen and a rejected one."""
        if sums.device.type != "cpu":
            return
        has_answer, pairs = sums[1] > 0, exists.repeat_interleave(2, 1)
        if not torch.equal(has_answer, pairs) or bool((sums[2] > 1).any()):
            raise DataError(
                "answers of a batch are not in the pairs that the loss takes: give dpo_loss the same pairs "
                "and apart as preference_batch."
            )

    def _sums(self, losses: Tensor, targets: Targets) -> Tensor:
        """Return of each answer the sum of log p - log q, its tokens, and its pairs: `[3, rows, answers]`."""
        answers, counts = targets["answers"], targets["tokens"] != cross_entropy.ignore_index
        ratios = -losses - targets["reference"].to(losses)
        here = [counts & (answers == number) for number in range(2 * self.pairs)]
        begins = targets["begins"].to(losses)
        found = torch.stack(
            [
                torch.stack([values.where(one, 0.0).sum(1) for one in here], 1)
                for values in (ratios, torch.ones_like(losses), begins)
            ]
        )
        return found.reshape(3, -1, 2, len(here)).sum(2) if self.apart else found

    def _margins(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return β times the difference of each pair, `[rows, pairs]`, and whether there is such a pair."""
        ratios, counts, begins = sums.unbind()
        if self.average:
            ratios = ratios / counts.clamp(min=1.0)
        chosen, rejected = ratios[:, 0::2], ratios[:, 1::2]
        return self.beta * (chosen - rejected), (begins[:, 0::2] + begins[:, 1::2]) > 0


def dpo_loss(
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    average: bool = False,
    pairs: int = 1,
    apart: bool = False,
) -> PreferenceLoss:
    """Return the loss of direct preference optimization, for `parallelize`, `plait.fit` and `plait.verify`.

    Batches are those of `plait.tensor.preference_batch`, with the same `pairs` and `apart`, and with the
    log-probabilities of the reference, which `plait.tensor.answer_log_probs` returns, once, before training.
    `beta`: how strongly the model is held to the reference. `label_smoothing`: the share of pairs that are
    labelled the wrong way. `average`: the log-probability of an answer is the mean over its tokens. Raises
    `ConfigError` for other values.
    """
    require_number("dpo_loss's beta", beta, positive=True)
    require_number("dpo_loss's label_smoothing", label_smoothing)
    if label_smoothing >= 0.5:
        raise ConfigError(
            f"dpo_loss's label_smoothing is {label_smoothing}, so that pairs would be labelled the wrong way "
            "as often as not: give a number below 0.5."
        )
    require_flag("dpo_loss's average", average)
    pairs = whole("dpo_loss's pairs", pairs)
    require_flag("dpo_loss's apart", apart)
    return PreferenceLoss(beta, label_smoothing, average, pairs, apart)


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token in `tokens`, `[rows, length]`; 0 where it is -100.

    `logits` are whole, `[rows, length, classes]`.
    """
    values, ignored = wide(logits).flatten(0, 1), cross_entropy.ignore_index
    losses = functional.cross_entropy(values, tokens.flatten(), ignore_index=ignored, reduction="none")
    return -losses.view(tokens.shape)


def answer_log_probs(logits: Tensor, targets: Targets) -> list[tuple[Tensor, Tensor]]:
    """Return the log-probabilities of the tokens of each pair's chosen and rejected answer, on the CPU.

    `logits`, `[rows, length, classes]`, are those of a batch of `preference_batch` with these `targets`. Of
    the model before training they are the reference: `answer_log_probs(engine.output(inputs), targets)`.
    """
    values, answers = token_log_probs(logits, targets["tokens"]).cpu(), targets["answers"].cpu()
    found = [
        of_row[ids == one]
        for of_row, ids in zip(values, answers, strict=True)
        for one in ids[ids >= 0].unique()
    ]
    return list(zip(found[0::2], found[1::2], strict=True))


def preference_batch(
    preferences: Iterable[Preference], length: int, *, pairs: int = 1, apart: bool = False
) -> tuple[Any, dict[str, Tensor]]:
    """Return inputs and targets for `dpo_loss` from (prompt, chosen, rejected), each a sequence of tokens.

    After these three may come what `answer_log_probs` returns of the pair, the reference; else it is 0. A row
    of `length` positions holds `pairs` pairs, whose two texts are documents of it, apart from each other:
    inputs are a dictionary of `tokens` and `document_ids`. With `apart` each text has a row of its own, for
    layers that know no documents, and inputs are tokens. Targets: see `Targets`. Raises `DataError` for what
    does not fit a row, and for prompts and answers without tokens.
    """
    length = whole("preference_batch's length", length, DataError)
    pairs = whole("preference_batch's pairs", pairs, DataError)
    require_flag("preference_batch's apart", apart, DataError)
    remedy = "give a list of (prompt, chosen, rejected)"
    require_instance("preferences", preferences, Iterable, remedy, DataError)
    given = [_sequences(number, preference) for number, preference in enumerate(preferences)]
    _require_references(given)
    texts = 1 if apart else 2 * pairs
    rows = 2 * len(given) if apart else -(-len(given) // pairs)
    if not given or (apart and pairs > 1):
        raise DataError(
            "preference_batch was given no pairs, or apart and pairs > 1: give pairs, and one of these."
        )
    inputs, ids = torch.zeros(rows, length, dtype=torch.int64), torch.full((rows, length), -1)
    targets = {
        "tokens": torch.full((rows, length), cross_entropy.ignore_index),
        "answers": torch.full((rows, length), -1),
        "begins": torch.zeros(rows, length, dtype=torch.int64),
        "reference": torch.zeros(rows, length, dtype=torch.float64),
    }
    used = [0] * rows
    for number, (prompt, *answers) in enumerate(given):
        answers, references = answers[:2], answers[2:]
        for side, answer in enumerate(answers):
            text = 2 * number + side
            row, end = text // texts, used[text // texts] + len(prompt) + len(answer) - 1
            if not len(prompt) or not len(answer) or end > length:
                raise DataError(
                    f"pair {number} has a prompt of {len(prompt)} tokens and an answer of {len(answer)}, and "
                    f"needs {end} positions of a row of {length}: give prompts and answers with tokens, a "
                    "greater length, or fewer pairs a row."
                )
            first, place = used[row] + len(prompt) - 1, slice(used[row], end)
            joined, used[row] = torch.cat([prompt, answer]), end
            inputs[row, place], ids[row, place] = joined[:-1], text
            targets["tokens"][row, first:end] = answer
            targets["answers"][row, first:end] = side if apart else text % texts
            targets["begins"][row, first] = 1 - side
            if references:
                targets["reference"][row, first:end] = references[side]
    return (inputs if apart else {"tokens": inputs, "document_ids": ids}), targets


def _require_references(given: Sequence[Sequence[Tensor]]) -> None:
    """Raise `DataError` unless pairs are of three sequences, or of five, whose references fit the answers."""
    for number, sequences in enumerate(given):
        answers, references = sequences[1:3], sequences[3:]
        if len(answers) != 2 or (references and [*map(len, references)] != [*map(len, answers)]):
            raise DataError(
                f"pair {number} is {len(sequences)} sequences, of "
                f"{', '.join(str(len(one)) for one in sequences)}: give a prompt, a chosen and a rejected "
                "answer, and of both answers all log-probabilities, or none."
            )
        if len(sequences) != len(given[0]):
            raise DataError(
                f"pair {number} has {'a' if references else 'no'} reference, unlike those before: give all "
                "pairs theirs, or none."
            )


def _sequences(number: int, preference: Preference) -> list[Tensor]:
    """Return tokens and log-probabilities of a pair as tensors `[n]`. Raises `DataError` for other things."""
    if not isinstance(preference, Sequence) or isinstance(preference, str):
        raise DataError(
            f"pair {number} is an object of {type(preference).__name__}: give a tuple of the tokens of a "
            "prompt, of a chosen and of a rejected answer."
        )
    tokens = [_sequence(f"sequence {at} of pair {number}", one) for at, one in enumerate(preference[:3])]
    if any(one.dtype in _NO_TOKENS or bool((one.long() < 0).any()) for one in tokens):
        raise DataError(f"pair {number} has tokens that are not all whole numbers from 0: give token ids.")
    found = [_sequence(f"the reference of pair {number}", one).double() for one in preference[3:]]
    if any(not bool((one.isfinite() & (one < _ROUNDING)).all()) for one in found):
        raise DataError(
            f"the reference of pair {number} has numbers that are no log-probabilities, at most 0: give what "
            "answer_log_probs returns."
        )
    return [*(one.long() for one in tokens), *found]


def _sequence(what: str, given: object) -> Tensor:
    """Return a sequence of numbers as a tensor `[n]`. Raises `DataError`, which begins with `what`."""
    try:
        found = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = torch.zeros(())
    if found.dim() != 1:
        raise DataError(
            f"{what} is an object of {type(given).__name__}, and no list of numbers: give a list for each, "
            "of texts their tokens."
        )
    return found if len(found) else found.long()


def _required(targets: Targets) -> Targets:
    """Return `targets`. Raises `DataError` where they are not those of `preference_batch`."""
    if not isinstance(targets, Mapping) or not targets.keys() >= _KEYS:
        found = ", ".join(targets) if isinstance(targets, Mapping) else type(targets).__name__
        raise DataError(
            f"the targets of dpo_loss are {found}: give those of plait.tensor.preference_batch, a dictionary "
            f"of {', '.join(sorted(_KEYS))}."
        )
    return targets
