from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plait.errors import DataError, ModelError, NonFiniteError
from plait.ranks import Count, Group, Mesh, Traffic
from plait.tensor.parallel.partition import Vocabulary
from plait.tensor.sampling import LENGTH_STEP, TokenChoice, next_token, padded, require_prompt, stop_tokens

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 4.0, 0.0]])


def drawn(seed: int, temperature: float = 1.0, top_k: int | None = None, rows: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [next_token(LOGITS, TokenChoice(temperature, top_k), generator).tolist() for _ in range(rows)]


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert drawn(0, temperature=0) == [[1, 0]]


def test_sampling_refuses_invalid_prompts_counts_and_temperatures() -> None:
    prompt = torch.zeros(2, 3, dtype=torch.int64)
    for given, tokens, choice, told in (
        (prompt[0], 1, {}, r"the prompt is int64\[3\]: give tokens \[rows, length\]"),
        (prompt[:, :0], 1, {}, r"int64\[2, 0\]: .* length at least 1"),
        (prompt.float(), 1, {}, r"the prompt is float32\[2, 3\]: give tokens"),
        (prompt.tolist(), 1, {}, "the prompt is an object of list: give a tensor"),
        (prompt, -1, {}, "tokens is -1: give a whole number of at least 0"),
        (prompt, 2.0, {}, r"tokens is 2\.0: give a whole number"),
        (prompt, 1, {"temperature": -0.1}, r"the temperature is -0\.1: give a number of at least 0"),
        (prompt, 1, {"temperature": math.nan}, "the temperature is nan"),
        (prompt, 1, {"top_k": 0}, "top_k, unless it is None for all tokens, is 0: give a whole number"),
        (prompt, 1, {"seed": 0.5}, "the seed is an object of float: give a whole number"),
    ):
        with pytest.raises(DataError, match=told):
            require_prompt(given, tokens, TokenChoice(**choice))  # type: ignore[arg-type]
    require_prompt(prompt[:1, :1], 0, TokenChoice(temperature=0, top_k=1))
    assert TokenChoice() == TokenChoice(temperature=1.0, top_k=None, seed=0, stop=())


def test_one_token_or_several_end_a_row() -> None:
    assert stop_tokens(3) == stop_tokens(torch.tensor(3)) == (3,)
    assert stop_tokens((3, -1)) == stop_tokens(torch.tensor([3, -1])) == (3, -1)
    for wrong in (None, 1.5, (1.5,), "ab"):
        with pytest.raises(DataError, match="give the number of a token, or several"):
            stop_tokens(wrong)  # type: ignore[arg-type]


def test_the_seed_decides_the_drawn_tokens() -> None:
    assert drawn(1, rows=10) == drawn(1, rows=10)
    assert drawn(1, rows=10) != drawn(2, rows=10)


def test_a_row_that_has_ended_repeats_its_last_token() -> None:
    choice = TokenChoice(stop=(7, 8))
    tokens, all_ended = choice.stopped(torch.tensor([7, 2]), torch.empty(2, 0, dtype=torch.int64))
    assert (tokens.tolist(), all_ended) == ([7, 2], False)
    tokens, all_ended = choice.stopped(torch.tensor([3, 8]), tokens[:, None])
    assert (tokens.tolist(), all_ended) == ([7, 8], True)


@pytest.mark.parametrize("top_k", [1, 2, 4, 9])
def test_with_top_k_only_the_k_likeliest_tokens_are_drawn(top_k: int) -> None:
    likeliest = LOGITS.topk(min(top_k, 4), dim=-1).indices.tolist()
    tokens = drawn(0, temperature=50.0, top_k=top_k, rows=200)
    for row in range(2):
        assert {token[row] for token in tokens} == set(likeliest[row])


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 3)])
def test_drawn_tokens_follow_the_softmax_of_the_logits(temperature: float, top_k: int | None) -> None:
    rows = 20_000
    logits = torch.tensor([0.0, 1.5, -1.0, 0.5, -3.0])
    drawn = draw(logits.expand(rows, -1), temperature=temperature, top_k=top_k)
    kept = logits if top_k is None else logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    expected = rows * (kept.double() / temperature).softmax(-1)
    counts = drawn.bincount(minlength=5)
    assert not counts[expected == 0].any()
    statistic = ((counts - expected).square() / expected)[expected > 0].sum()
    assert statistic < 18.5  # chi-square with 4 degrees of freedom: one draw in a thousand is above it


def draw(logits: Tensor, vocabulary: Vocabulary | None = None, **options) -> Tensor:
    return next_token(logits, TokenChoice(**options), torch.Generator().manual_seed(3), vocabulary=vocabulary)


MANY = torch.randn(64, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CHOICES = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_k": 2},
    {"top_k": 5},
    {"top_k": 10},
    {"top_k": 99},
]


def over_ranks(thread_ranks, ranks, logits, **options):
    """The tokens, which are the same on every rank, and what was communicated, likewise."""

    def body():
        mesh = Mesh(tp=ranks)
        vocabulary = Vocabulary(logits.shape[-1], mesh.group("tp"))
        own = vocabulary.own
        return draw(logits[:, own.start : own.stop], vocabulary, **options), mesh.traffic.snapshot()

    tokens, traffic = zip(*thread_ranks.run(body, ranks=ranks), strict=True)
    assert all(torch.equal(other, tokens[0]) for other in tokens)
    assert all(other == traffic[0] for other in traffic)
    return tokens[0], traffic[0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_the_drawn_token_does_not_depend_on_the_number_of_ranks(thread_ranks, options, ranks):
    expected = draw(MANY, **options)
    assert len(expected.unique()) > 5
    assert torch.equal(over_ranks(thread_ranks, ranks, MANY, **options)[0], expected)


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 1}, {"top_k": 2}], ids=str)
def test_sampling_over_more_ranks_than_classes_works(thread_ranks, options):
    logits = MANY[:, :2]
    assert torch.equal(over_ranks(thread_ranks, 4, logits, **options)[0], draw(logits, **options))


@pytest.mark.parametrize("ranks", [1, 3])
def test_with_top_k_1_the_likeliest_token_is_drawn(thread_ranks, ranks):
    tokens, _ = over_ranks(thread_ranks, ranks, MANY, top_k=1, temperature=5.0)
    assert torch.equal(tokens, MANY.argmax(-1))


def test_of_equal_logits_the_smallest_number_wins(thread_ranks):
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 2.0, 2.0], [3.0] * 5])
    for ranks in (1, 3):
        assert over_ranks(thread_ranks, ranks, logits, temperature=0)[0].tolist() == [1, 3, 0]


def test_sampling_gathers_one_candidate_a_row_and_another_with_top_k(thread_ranks):
    assert over_ranks(thread_ranks, 3, MANY)[1] == {"tp": {"all_gather": Count(1, 64 * 16)}}
    for top_k, offered in ((2, 2), (9, 4)):  # of 11 classes the largest part has 4
        traffic = over_ranks(thread_ranks, 3, MANY, top_k=top_k)[1]
        assert traffic == {"tp": {"all_gather": Count(2, 64 * (16 + 8 * offered))}}


def test_logits_may_rule_tokens_out() -> None:
    logits = torch.full((100, 4), -torch.inf)
    logits[:, 1:3] = 0
    assert set(draw(logits).tolist()) == {1, 2}
    assert set(draw(logits, top_k=3).tolist()) == {1, 2}


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_refused(options: dict[str, float], value: float) -> None:
    logits = MANY.clone()
    logits[5, 7] = value
    with pytest.raises(NonFiniteError, match=f"row 5 is {value}"):
        draw(logits, **options)


def test_sampling_refuses_logits_that_are_not_this_ranks_shard() -> None:
    vocabulary = Vocabulary(11, Group("tp", (0, 1), 0, None, Traffic(), 1.0))
    with pytest.raises(ModelError, match=r"of shape \[64, 11\]"):
        draw(MANY, vocabulary)


def test_padding_stands_on_the_right_and_is_short_of_the_context() -> None:
    sequence = torch.arange(1, 11).view(2, 5)
    seen, length = padded(sequence, 1000)
    assert (seen.shape, length) == ((2, LENGTH_STEP), 5)
    assert torch.equal(seen[:, :5], sequence)
    assert not seen[:, 5:].any()
    assert padded(sequence, 7)[0].shape == (2, 7)


def test_the_last_tokens_of_a_long_sequence_are_seen() -> None:
    seen, length = padded(torch.arange(10).view(1, 10), 4)
    assert (seen.tolist(), length) == ([[6, 7, 8, 9]], 4)


def test_without_a_context_length_the_whole_sequence_is_used_without_padding() -> None:
    sequence = torch.arange(3).view(1, 3)
    assert padded(sequence, None) == (sequence, 3)
