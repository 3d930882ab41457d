"""The embedding that is cut by rows, against `nn.Embedding`."""

from __future__ import annotations

import copy

import pytest
import torch
from layer_defects import (
    average_instead_of_sum,
    first_row_for_strangers,
    last_rows_lost,
    padding_learns,
    padding_on_every_rank,
    reduction_scaled_backward,
    reduction_summed_again_backward,
    table_without_gradient,
)
from parallel_cases import Trial, assert_close, check, defer, draw
from torch import Tensor, nn

from plait.errors import DataError, ModelError, PlanError
from plait.plan.layout import assemble
from plait.ranks import Count, Group, Mesh, Traffic
from plait.tensor.parallel.embedding_and_norm import VocabParallelEmbedding

ROWS = 37
"""Uneven for 2, 3 and 4 ranks."""


def table(rows: int = ROWS, *, padding: int | None = None, frozen: bool = False) -> nn.Embedding:
    full = nn.Embedding(rows, 6, padding, dtype=torch.float64)
    with torch.no_grad():
        full.weight.copy_(draw(rows, 6, seed=1))
    return full.requires_grad_(not frozen)


def trial(full: nn.Embedding, tokens: Tensor) -> Trial:
    return Trial(full, VocabParallelEmbedding.of, tokens, draw(*tokens.shape, 6, seed=9))


def all_tokens(rows: int = ROWS) -> Tensor:
    """Every row at least once, some twice."""
    return torch.cat([torch.arange(rows), torch.arange(0, rows, 3)])


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_sharded_embedding_equals_the_full_table(thread_ranks, ranks, deferred):
    tokens = all_tokens()
    shapes = [tokens, tokens[:1], tokens[:36].view(4, 9).t(), tokens[:36].view(2, 3, 6), tokens[36]]
    trials = [trial(table(), given) for given in shapes]
    trials += [trial(table(), tokens.int()), trial(table(4), all_tokens(4))]
    check(thread_ranks, ranks, *trials, deferred=deferred)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_padding_row_does_not_learn_wherever_it_lies(thread_ranks, ranks, deferred):
    paddings = (0, 12, 13, 18, 19, 24, 25, ROWS - 1, -1)
    trials = [trial(table(padding=padding), all_tokens()) for padding in paddings]
    check(thread_ranks, ranks, *trials, deferred=deferred)


@pytest.mark.parametrize("deferred", [True, False])
def test_a_sharded_embedding_adds_up_two_backwards_and_needs_no_gradient_if_frozen(thread_ranks, deferred):
    check(thread_ranks, 3, trial(table(padding=3), all_tokens()), deferred=deferred, twice=True)

    def body():
        made = VocabParallelEmbedding.of(table(frozen=True), Mesh(tp=2).group("tp"))
        queue = defer(made) if deferred else None
        return made(all_tokens()).requires_grad, queue is None or queue.take() == []

    assert thread_ranks.run(body, ranks=2) == [(False, True)] * 2


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize(
    ("defect", "finding"),
    [
        (average_instead_of_sum, "output"),
        (reduction_scaled_backward, "gradient of weight"),
        (reduction_summed_again_backward, "gradient of weight"),
        (table_without_gradient, "weight has no gradient|gradient of weight"),
        (last_rows_lost, "output"),
        (first_row_for_strangers, "output"),
        (padding_learns, "gradient of weight"),
        (padding_on_every_rank, "gradient of weight"),
    ],
)
def test_the_check_of_sharded_embeddings_finds_each_defect(rank_pool, defect, finding, deferred):
    with pytest.raises(AssertionError, match=finding):
        check(rank_pool, 2, trial(table(padding=20), all_tokens()), deferred=deferred, defect=defect)


@pytest.mark.parametrize("padding", [None, 0, 5, -1])
def test_a_sharded_embedding_made_from_shapes_is_a_shard_of_the_table_of_the_seed(thread_ranks, padding):
    def body():
        torch.manual_seed(5)
        made = VocabParallelEmbedding(7, 4, Mesh(tp=3).group("tp"), padding_idx=padding)
        assert made.padding_idx == nn.Embedding(7, 4, padding).padding_idx
        return made.layouts["weight"], made.weight.detach()

    torch.manual_seed(5)
    full = nn.Embedding(7, 4, padding)
    layouts, parts = zip(*thread_ranks.run(body, ranks=3), strict=True)
    assert [len(part) for part in parts] == [3, 2, 2]
    assert torch.equal(assemble(list(parts), layouts[0]), full.weight)


@pytest.mark.parametrize("strangers", [[ROWS], [-1], [3, ROWS + 5, 2]])
def test_a_token_outside_the_vocabulary_is_refused_on_every_rank(thread_ranks, strangers):
    def body():
        made = VocabParallelEmbedding.of(table(), Mesh(tp=2).group("tp"))
        with pytest.raises(DataError) as caught:
            made(torch.tensor(strangers))
        return str(caught.value)

    least, most = min(strangers), max(strangers)
    assert (
        thread_ranks.run(body, ranks=2)
        == [
            f"tokens from {least} to {most} were looked up in a table of {ROWS} rows: "
            "give tokens of the vocabulary."
        ]
        * 2
    )


def test_a_sharded_embedding_of_no_tokens_gives_no_rows(thread_ranks):
    def body():
        return VocabParallelEmbedding.of(table(), Mesh(tp=2).group("tp"))(torch.zeros(2, 0).long()).shape

    assert thread_ranks.run(body, ranks=2) == [(2, 0, 6)] * 2


def test_a_sharded_embedding_makes_one_all_reduce_forward_and_none_backward(thread_ranks):
    def body():
        mesh = Mesh(tp=2)
        made = VocabParallelEmbedding.of(table(), mesh.group("tp"))
        with torch.no_grad():
            made(torch.arange(5))
        output = made(torch.arange(5))
        forward = mesh.traffic.snapshot()
        output.sum().backward()
        return forward, mesh.traffic.since(forward)

    forward = {"tp": {"all_reduce": Count(2, 2 * 5 * 6 * 8)}}
    assert thread_ranks.run(body, ranks=2) == [(forward, {})] * 2


def test_a_sharded_embedding_works_with_optimizers_state_dicts_and_deepcopy(thread_ranks):
    def body():
        made = VocabParallelEmbedding.of(table(), Mesh(tp=2).group("tp"))
        made(all_tokens()).square().sum().backward()
        torch.optim.SGD(made.parameters(), lr=0.1).step()
        again = VocabParallelEmbedding.of(table(), made.group)
        again.load_state_dict(made.state_dict())
        return [one(all_tokens()).detach() for one in (made, again, copy.deepcopy(made))]

    full = table()
    full(all_tokens()).square().sum().backward()
    torch.optim.SGD(full.parameters(), lr=0.1).step()
    for outputs in thread_ranks.run(body, ranks=2):
        for output in outputs:
            assert_close(output, full(all_tokens()).detach(), "output")


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_embedding_with_max_norm_or_sparse_gradients_is_refused(option):
    with pytest.raises(ModelError, match=f"an embedding with {next(iter(option))} = "):
        VocabParallelEmbedding.of(nn.Embedding(4, 2, **option), Mesh().group("tp"))


def test_a_table_with_fewer_rows_than_ranks_is_refused():
    group = Group("tp", (0, 1, 2, 3), 0, None, Traffic(), 1.0)
    with pytest.raises(PlanError, match=r"shape \[3, 2\] .* tp = 4: its 3 features .* set tp to 1 or 2 or 3"):
        VocabParallelEmbedding(3, 2, group)
