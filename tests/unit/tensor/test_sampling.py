from __future__ import annotations

import pytest
import torch

from plait.tensor.sampling import LENGTH_STEP, next_token, padded

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 4.0, 0.0]])


def drawn(seed: int, temperature: float = 1.0, top_k: int | None = None, rows: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        next_token(LOGITS, temperature=temperature, top_k=top_k, generator=generator).tolist()
        for _ in range(rows)
    ]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn(0, temperature=0) == [[1, 0]]


def test_the_seed_decides() -> None:
    assert drawn(1, rows=10) == drawn(1, rows=10)
    assert drawn(1, rows=10) != drawn(2, rows=10)


@pytest.mark.parametrize("top_k", [1, 2, 4, 9])
def test_only_the_likeliest_are_drawn(top_k: int) -> None:
    likeliest = LOGITS.topk(min(top_k, 4), dim=-1).indices.tolist()
    tokens = drawn(0, temperature=50.0, top_k=top_k, rows=200)
    for row in range(2):
        assert {token[row] for token in tokens} == set(likeliest[row])


def test_draws_follow_the_softmax() -> None:
    tokens = torch.tensor(drawn(0, rows=4000))
    shares = torch.stack([(tokens[:, 0] == token).double().mean() for token in range(4)])
    torch.testing.assert_close(shares, LOGITS[0].double().softmax(-1), atol=0.03, rtol=0)


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


def test_without_a_context_all_is_seen() -> None:
    sequence = torch.arange(3).view(1, 3)
    assert padded(sequence, None) == (sequence, 3)
