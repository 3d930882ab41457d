import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.app.data.batches import (
    Batches,
    ConcatenatedRows,
    RandomBatches,
    ShuffledBatches,
    TokenWindows,
    ValidationBatches,
    description,
    permute,
    rank_rows,
    row_total,
)
from plait.app.data.token_shards import Corpus, TokenShard, corpus_of
from plait.errors import DataError
from plait.tensor.nested_values import tensors_of


def counting(windows: int, context: int) -> TokenWindows:
    """Tokens that name their own position."""
    tokens = np.arange(windows * context + 1, dtype=np.uint32)
    return TokenWindows(corpus_of(tokens), context, vocab=len(tokens), source="counting")


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_the_permutation_of_samples_is_one_to_one(count: int, seed: int, epoch: int) -> None:
    permuted = permute(np.arange(count), count, seed, np.full(count, epoch))
    assert sorted(permuted.tolist()) == list(range(count))


def test_the_order_of_samples_stays_that_of_earlier_versions() -> None:
    """A run goes on with the samples that it has not seen."""
    epochs = np.repeat([0, 1], 5)
    assert permute(np.arange(10), 10, 3, epochs).tolist() == [4, 8, 3, 2, 9, 7, 9, 3, 8, 2]
    places, epochs = np.array([0, 1, 2, 999]), np.array([0, 1, 2, 1 << 40])
    assert permute(places, 1000, 1 << 63, epochs).tolist() == [414, 163, 971, 541]
    inputs, targets = RandomBatches(100, 3, 2, seed=7, stream=1).batch(5, slice(None))
    assert inputs.tolist() == [[14, 55, 11], [68, 58, 86]]
    assert targets.tolist() == [[55, 11, 11], [58, 86, 54]]


def test_permutations_differ_by_seed_and_epoch() -> None:
    places, zeros = np.arange(1000), np.zeros(1000, dtype=np.int64)
    first = permute(places, 1000, 0, zeros)
    for other in (permute(places, 1000, 1, zeros), permute(places, 1000, 0, zeros + 1), places):
        assert (first == other).mean() < 0.02


def test_the_permutation_of_samples_leaves_no_correlation_of_neighbours() -> None:
    permuted = permute(np.arange(4096), 4096, 7, np.zeros(4096, dtype=np.int64))
    assert abs(np.corrcoef(permuted[:-1], permuted[1:])[0, 1]) < 0.1
    assert abs(np.corrcoef(permuted, np.arange(4096))[0, 1]) < 0.1


def batches(kind: str, size: int) -> Batches:
    corpus = counting(windows=23, context=5)
    if kind == "packed":
        shard = TokenShard(np.arange(116), np.arange(3, 120, 4))
        corpus = TokenWindows(Corpus([shard]), 5, vocab=116, source="packed")
    if kind in ("shuffled", "packed"):
        return ShuffledBatches(corpus, size, seed=3)
    if kind == "spread":
        return ValidationBatches(counting(windows=83, context=5), size, limit=4)
    return RandomBatches(vocab=100, context=5, size=size, seed=3)


@pytest.mark.parametrize("kind", ["shuffled", "packed", "spread", "uniform"])
@given(share=st.integers(1, 5), ranks=st.integers(1, 4), step=st.integers(0, 3))
def test_ranks_together_take_the_global_batch(kind: str, share: int, ranks: int, step: int) -> None:
    made = batches(kind, size=share * ranks)
    whole = list(tensors_of(made.batch(step, slice(None))))
    shares = (made.batch(step, rank_rows(rank, ranks, share * ranks)) for rank in range(ranks))
    for one, *parts in zip(whole, *map(tensors_of, shares), strict=True):
        assert torch.equal(torch.cat(parts), one)
        assert one.shape == (share * ranks, 5)
        assert one.dtype == torch.int64


@pytest.mark.parametrize("kind", ["shuffled", "spread", "uniform"])
def test_targets_of_a_window_are_the_next_tokens(kind: str) -> None:
    inputs, targets = batches(kind, size=4).batch(1, slice(None))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@given(windows=st.integers(1, 40), size=st.integers(1, 16), seed=st.integers(0, 100))
def test_each_window_is_seen_once_an_epoch(windows: int, size: int, seed: int) -> None:
    context, epochs = 3, 2
    made = ShuffledBatches(counting(windows, context), size, seed)
    steps = -(-windows * epochs // size)
    starts = torch.cat([made.batch(step, slice(None))[0][:, 0] for step in range(steps)]) // context
    for epoch in range(epochs):
        seen = starts[epoch * windows : (epoch + 1) * windows].tolist()
        assert sorted(seen) == list(range(windows))


def test_every_token_but_the_first_is_a_target_once() -> None:
    made = ShuffledBatches(counting(windows=8, context=4), size=8, seed=0)
    assert sorted(made.batch(0, slice(None))[1].flatten().tolist()) == list(range(1, 33))


def test_validation_windows_are_spread_over_the_corpus_and_fixed() -> None:
    made = ValidationBatches(counting(windows=100, context=2), size=5, limit=4)
    starts = [
        window for number in range(4) for window in (made.batch(number, slice(None))[0][:, 0] // 2).tolist()
    ]
    assert starts == list(range(0, 100, 5))


@given(windows=st.integers(1, 40), size=st.integers(1, 16), limit=st.none() | st.integers(1, 8))
def test_validation_has_no_window_twice(windows: int, size: int, limit: int | None) -> None:
    made = ValidationBatches(counting(windows, context=2), size, limit)
    numbers = range(-(-made.rows // size))
    starts = [made.batch(number, slice(None))[0][:, 0] // 2 for number in numbers]
    assert all(len(each) == size for each in starts[:-1])
    seen = torch.cat(starts).tolist()
    assert sorted(set(seen)) == seen
    assert len(seen) == made.rows == (windows if limit is None else min(windows, size * limit))


def test_random_tokens_cover_the_vocabulary_and_change_with_step_and_seed() -> None:
    made = RandomBatches(vocab=7, context=50, size=20, seed=1)
    inputs, _ = made.batch(0, slice(None))
    assert set(inputs.flatten().tolist()) == set(range(7))
    assert not torch.equal(inputs, made.batch(1, slice(None))[0])
    assert not torch.equal(inputs, RandomBatches(7, 50, 20, seed=2).batch(0, slice(None))[0])
    assert not torch.equal(inputs, RandomBatches(7, 50, 20, seed=1, stream=1).batch(0, slice(None))[0])


def test_batches_describe_how_many_rows_they_have() -> None:
    corpus = corpus_of(np.arange(100))
    windows = TokenWindows(corpus, 7, 100, "some", start=10, stop=50)
    assert (windows.size, windows.count, windows.left) == (40, 5, 4)
    assert windows.take(np.array([4]))[1].tolist() == [[39, 40, 41, 42, 43, 44, 45]]
    whole = TokenWindows(corpus, 99, 100, "some", start=1)
    assert (whole.size, whole.count, whole.left) == (99, 0, 98)
    assert TokenWindows(corpus, 3, 100, "some", start=100).count == 0
    made: Batches = ShuffledBatches(windows, 4, seed=3)
    assert (row_total(made), description(made)) == (5, {"size": 4, "seed": 3, "rows": 5})
    for limit, rows in ((None, 5), (1, 4), (2, 5)):
        made = ValidationBatches(windows, 4, limit)
        assert description(made) == {"size": 4, "rows": 5, "taken": rows}
    assert (row_total(RandomBatches(7, 5, 4, 0)), description(RandomBatches(7, 5, 4, 0))) == (
        None,
        {"size": 4},
    )
    assert ConcatenatedRows([windows, windows, whole]).count == 10


def test_ranks_that_cannot_share_a_batch_are_refused() -> None:
    assert [rank_rows(rank, 3, 12) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    for batch, fitting in ((13, 10), (3, 5)):
        with pytest.raises(
            DataError, match=rf"have {batch} rows, which 5 .*: give batches of {fitting} rows"
        ):
            rank_rows(0, 5, batch)


@pytest.mark.parametrize(("token", "remedy"), [(256, "at least 257,"), (-1, "from 0 on")])
def test_a_token_outside_the_vocabulary_is_named_with_its_position(token: int, remedy: str) -> None:
    tokens = np.zeros(1021, dtype=np.int64)
    tokens[1013] = token
    corpus = TokenWindows(corpus_of(tokens), context=4, vocab=256, source="some.npy", start=1000)
    expected = rf"'some\.npy' holds token {token} at position 1013, outside the vocabulary of 256.*{remedy}"
    with pytest.raises(DataError, match=expected):
        corpus.check(len(tokens))
    with pytest.raises(DataError, match=expected):
        corpus.take(np.arange(5))
    corpus.check(13)  # no further than that
    corpus.take(np.array([0, 1, 2, 4]))
